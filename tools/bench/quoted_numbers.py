"""The numbers that people quote of ONNX Runtime on a CPU, measured: INT8, fp16, levels, IO binding, batch, threads.

    python tools/bench/quoted_numbers.py [NAME | MODEL.onnx ...] [--state DIR] [--rounds 8] [--write]

NAME is one of tools/bench/architectures.py. Every way of running a net is a session of its own; in a round each runs
after warming up, in an order that is turned round, so that only ratios within a round count. With one thread a run is
timed in CPU seconds of that thread, which other programs hardly change; with two in seconds, which they do. QDQ is
edgekit's (`quantize --target cpu --method minmax`, for this kind of CPU), QOperator and dynamic are ONNX Runtime's own
quantizer with the types that are fast here, per channel, and fp16 its converter. Samples are drawn: accuracy is
measured elsewhere. `--write` puts the tables into docs/reference/measured.md; `--state` keeps models and rounds.
"""

import argparse
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
from architectures import ARCHITECTURES
from onnx import numpy_helper
from quantize_ratio import write_model
from row_state import add_state_option, resume_rows

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.bench.latency import Ratio, compare_rounds
from edgekit.data.samples import draw_samples
from edgekit.machine import describe_machine
from edgekit.model.model import load_model
from edgekit.model.tensors import Tensors
from edgekit.profile.events import read_trace

ort: Any = onnxruntime
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "measured.md"
BEGIN, END = "<!-- quoted_numbers.py writes from here -->", "<!-- to here -->"
ZOO = Path(__file__).parents[2].parent / "shared" / "zoo" / "models"
SUBJECTS = ("resnet50", str(ZOO / "mobilenetv2_1.0_224_fp32.onnx"), "encoder25m", "yolov8n")
_LEVELS = {
    Level.DISABLED: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    Level.BASIC: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    Level.EXTENDED: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    Level.ALL: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
_SAMPLES, _RUNS = 4, 2
_PRODUCTS = frozenset({"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "ConvTranspose"})
_INTEGER_PRODUCTS = frozenset(
    {"QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm",
     "DynamicQuantizeMatMul"}
)  # fmt: skip
_ROUNDING = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})


class Way(msgspec.Struct, frozen=True):
    """A way to run a net: its name, the file, and what the session is told; `beside` is the way that it is held to."""

    name: str
    file: str = "float"
    level: Level = Level.ALL
    threads: int = 1
    batch: int = 1
    bound: bool = False
    beside: str = "float"


WAYS = (
    Way("float"),
    Way("level extended", level=Level.EXTENDED),
    Way("level basic", level=Level.BASIC),
    Way("level disabled", level=Level.DISABLED),
    Way("IO binding", bound=True),
    Way("fp16", "fp16"),
    Way("INT8, QDQ", "qdq"),
    Way("INT8, QOperator", "qoperator"),
    Way("INT8, dynamic", "dynamic"),
    Way("free batch, 1", "free"),
    Way("batch 4", "free", batch=4, beside="free batch, 1"),
    Way("batch 8", "free", batch=8, beside="free batch, 1"),
    Way("2 threads", threads=2),
    Way("INT8, QDQ, 2 threads", "qdq", threads=2, beside="2 threads"),
)
BASE = WAYS[0]


class Round(msgspec.Struct, frozen=True):
    """What each way took once, in milliseconds a sample: of the thread that ran it, and of the clock on the wall."""

    cpu_ms: dict[str, float]
    wall_ms: dict[str, float]


class Subject(msgspec.Struct, frozen=True):
    """A net in all its files, a sample for it, and why a file is missing."""

    name: str
    files: Mapping[str, Path]
    sample: Tensors
    missing: Mapping[str, str]


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reference/measured.md")
    add_state_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = options.state or Path(folder)
        parts = [_report(name, work, options) for name in options.subjects]
    text = f"{_describe_machine()}\n\n" + "\n\n".join(parts)
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, found, after = rest.partition(END)
        if not found:
            raise SystemExit(f"'{PAGE}' has no lines '{BEGIN}' and '{END}'")
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    return 0


def _report(name: str, work: Path, options: argparse.Namespace) -> str:
    start = time.monotonic()
    subject = _make_subject(name, work)
    made_s = time.monotonic() - start
    rounds = list(resume_rows(options.state, subject.name, Round, lambda: _take_rounds(subject, options.rounds)))
    print(f"{subject.name}: files {made_s:.0f} s, rounds {time.monotonic() - start - made_s:.0f} s", file=sys.stderr)
    return "\n".join([*_table(subject, rounds), "", *_verdicts(subject, rounds)])


def _make_subject(name: str, work: Path) -> Subject:
    folder = work / f"net-{Path(name).stem}"
    folder.mkdir(parents=True, exist_ok=True)
    model, data = folder / "model.onnx", folder / "data.npz"
    if not data.is_file():
        _write_net(name, folder)
    missing: dict[str, str] = {}
    files = {"float": model}
    for kind, make in _MAKERS.items():
        files[kind] = folder / f"{kind}.onnx"
        if not files[kind].is_file():
            try:
                make(model, data, files[kind])
            except Exception as error:  # noqa: BLE001 # converters fail in any way: a row says so
                missing[kind] = " ".join(str(error).split())[:120] or type(error).__name__
                files[kind].unlink(missing_ok=True)
    arrays = dict(np.load(data))
    return Subject(Path(name).stem, files, {key: rows[0] for key, rows in arrays.items()}, missing)


def _write_net(name: str, folder: Path) -> None:
    if name in ARCHITECTURES:
        write_model(ARCHITECTURES[name](), folder, _SAMPLES)
        return
    onnx.save(_fix_batch(onnx.load(name)), str(folder / "model.onnx"))
    samples = draw_samples(load_model(folder / "model.onnx").inputs, _SAMPLES)
    if samples is None:
        raise SystemExit(f"no sample can be drawn for '{name}'")
    rows = list(samples)
    stacked = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    np.savez(folder / "data.npz", allow_pickle=False, **stacked)


def _fix_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    return model


def _free_batch(model: Path, data: Path, out: Path) -> None:
    """Writes a model whose first axis is free: Reshapes to one sample copy the size of their input instead."""
    proto = onnx.load(model)
    shapes = {node.input[1] for node in proto.graph.node if node.op_type == "Reshape"}
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "n"
    del proto.graph.value_info[:]
    for tensor in proto.graph.initializer:
        sizes = numpy_helper.to_array(tensor)
        if tensor.name in shapes and sizes.size and sizes[0] == 1:
            tensor.CopyFrom(numpy_helper.from_array(np.concatenate([[0], sizes[1:]]).astype(np.int64), tensor.name))
    onnx.save(proto, str(out))
    # Tried: a shape that still says one sample would fail in the middle of a round.
    rows = next(iter(dict(np.load(data)).values()))
    name = proto.graph.input[0].name
    ort.InferenceSession(str(out), providers=["CPUExecutionProvider"]).run(None, {name: np.concatenate(rows[:2])})


def _quantize_qdq(model: Path, data: Path, out: Path) -> None:
    words = ["quantize", str(model), "--data", str(data), "--target", "cpu", "--set", f"arch={_find_arch()}"]
    words += ["--method", "minmax", "--out", str(out), "-q"]
    done = subprocess.run([sys.executable, "-m", "edgekit", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])


def _quantize_qoperator(model: Path, data: Path, out: Path) -> None:
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    arrays = dict(np.load(data))
    rows = iter([{name: value[index] for name, value in arrays.items()} for index in range(_SAMPLES)])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped base
        def get_next(self) -> Any:
            return next(rows, None)

    types = quantization.QuantType
    quantization.quantize_static(
        str(model),
        str(out),
        Reader(),
        quant_format=quantization.QuantFormat.QOperator,
        per_channel=True,
        # Signed activations are slow on x64, as it says itself.
        activation_type=types.QInt8 if _find_arch() == "arm64" else types.QUInt8,
        weight_type=types.QInt8,
    )


def _quantize_dynamic(model: Path, _: Path, out: Path) -> None:
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    quantization.quantize_dynamic(str(model), str(out), per_channel=True)


def _halve(model: Path, _: Path, out: Path) -> None:
    converter: Any = importlib.import_module("onnxruntime.transformers.float16")
    onnx.save(converter.convert_float_to_float16(onnx.load(model), keep_io_types=True), str(out))


_MAKERS: Mapping[str, Callable[[Path, Path, Path], None]] = {
    "free": _free_batch,
    "fp16": _halve,
    "qdq": _quantize_qdq,
    "qoperator": _quantize_qoperator,
    "dynamic": _quantize_dynamic,
}


def _take_rounds(subject: Subject, count: int) -> Iterator[Round]:
    ways = [way for way in WAYS if way.file not in subject.missing]
    calls = {way.name: _prepare(subject, way) for way in ways}
    for number in range(count):
        turned = ways[number % len(ways) :] + ways[: number % len(ways)]
        cpu: dict[str, float] = {}
        wall: dict[str, float] = {}
        for way in turned if number % 2 == 0 else turned[::-1]:
            spent = _spend(calls[way.name])
            cpu[way.name], wall[way.name] = (1e3 * value / way.batch for value in spent)
        yield Round(cpu, wall)


def _prepare(subject: Subject, way: Way) -> Callable[[], object]:
    options = ort.SessionOptions()
    options.graph_optimization_level = _LEVELS[way.level]
    options.intra_op_num_threads = way.threads
    options.log_severity_level = 3
    # Threads that wait in a loop take the cores of the next way.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(str(subject.files[way.file]), options, providers=["CPUExecutionProvider"])
    sample = {name: np.concatenate([value] * way.batch) for name, value in subject.sample.items()}
    if not way.bound:
        return lambda: session.run(None, sample)
    binding = session.io_binding()
    for name, value in sample.items():
        binding.bind_cpu_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    for output, value in zip(session.get_outputs(), binding.get_outputs(), strict=True):
        binding.bind_ortvalue_output(output.name, value)
    return lambda: session.run_with_iobinding(binding)


def _spend(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the CPU seconds of this thread and those of the wall: the least of a few, as disturbances only add."""
    call()
    cpu: list[float] = []
    wall: list[float] = []
    for _ in range(_RUNS):
        start = time.thread_time(), time.perf_counter()
        call()
        cpu.append(time.thread_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return min(cpu), min(wall)


def _compare(way: Way, rounds: list[Round]) -> Ratio:
    """Returns how many times as fast a way is as the one it is held to; of threads the wall's clock tells."""
    beside = next(other for other in WAYS if other.name == way.beside)
    is_wall = way.threads > 1 or beside.threads > 1
    times = [one.wall_ms if is_wall else one.cpu_ms for one in rounds]
    return compare_rounds([(one[way.name], one[way.beside]) for one in times])


def _table(subject: Subject, rounds: list[Round]) -> Iterator[str]:
    yield f"**{subject.name}**"
    yield ""
    yield "| way | ms a sample | times as fast | beside | products in integers, in float | Q and DQ |"
    yield "|---|--:|--:|---|---|--:|"
    for way in WAYS:
        if way.file in subject.missing:
            yield f"| {way.name} | - | {subject.missing[way.file]} | - | - | - |"
            continue
        spent = median((one.wall_ms if way.threads > 1 else one.cpu_ms)[way.name] for one in rounds)
        ratio = _compare(way, rounds)
        low, high = ratio.interval
        fast = "1" if way == BASE else f"{ratio.value:.2f} ({low:.2f} to {high:.2f})"
        whole, real, rounding = _count(subject.files[way.file], way.level)
        yield f"| {way.name} | {spent:.1f} | {fast} | {way.beside} | {whole}, {real} | {rounding} |"


def _count(model: Path, level: Level) -> tuple[int, int, int]:
    """Returns how many products of a session are in integers and in float, and how many nodes round."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "saved.onnx"
        optimize_graph(model, out, SessionSettings(level=level))
        ops = Counter(node.op_type for node in onnx.load(out, load_external_data=False).graph.node)
    return tuple(sum(ops[op] for op in kind) for kind in (_INTEGER_PRODUCTS, _PRODUCTS, _ROUNDING))  # type: ignore[return-value] # three


def _verdicts(subject: Subject, rounds: list[Round]) -> Iterator[str]:
    """Yields whether what is quoted was reached, and what stands in the way."""
    by_name = {way.name: way for way in WAYS if way.file not in subject.missing}
    names = [name for name in ("INT8, QDQ", "INT8, QOperator", "INT8, dynamic") if name in by_name]
    best = max(names, key=lambda name: _compare(by_name[name], rounds).value, default="")
    if best:
        ratio, (whole, real, rounding) = (
            _compare(by_name[best], rounds),
            _count(subject.files[by_name[best].file], Level.ALL),
        )
        yield (
            f"INT8's 2 to 3 times: {_judge(ratio, 2.0)}, {ratio.value:.2f} with {best}: {whole} products in integers,"
            f" {real} in float, {rounding} nodes that round; {_describe_kernels(subject.files[by_name[best].file])}."
        )
    ratio = compare_rounds([(one.cpu_ms["float"], one.cpu_ms["level disabled"]) for one in rounds])
    yield f"The levels' 1.3 to 2 times: {_judge(ratio, 1.3)}, {ratio.value:.2f} from none to all."


def _judge(ratio: Ratio, wanted: float) -> str:
    low, high = ratio.interval
    return "reached" if low >= wanted else "not reached" if high < wanted else "not told from noise"


def _describe_kernels(model: Path) -> str:
    """Returns the shares of time of an INT8 session, as ONNX Runtime's profiler saw them with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.enable_profiling = 1, True
        options.profile_file_prefix = f"{folder}/p"
        session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        inputs = draw_samples(load_model(model).inputs)
        sample: Tensors = next(iter(inputs)) if inputs else {}
        for _ in range(4):
            session.run(None, sample)
        steps = [step for run in read_trace(Path(session.end_profiling())).executions[1:] for step in run.steps]
    kinds = {"products in integers": _INTEGER_PRODUCTS, "in float": _PRODUCTS, "rounding": _ROUNDING}
    total = max(1, sum(step.self_us for step in steps))
    shares = {kind: sum(s.self_us for s in steps if s.op in ops) / total for kind, ops in kinds.items()}
    named = _INTEGER_PRODUCTS | _PRODUCTS | _ROUNDING
    rest = Counter[str]()
    for step in steps:
        rest[step.op] += 0 if step.op in named else step.self_us
    others = ", ".join(f"{op} {us / total:.0%}" for op, us in rest.most_common(3) if us)
    return f"time: {', '.join(f'{kind} {share:.0%}' for kind, share in shares.items())}, {others}"


def _list_fast() -> list[str]:
    """Returns the instructions for products of 8 bits that this CPU has."""
    flags = Path("/proc/cpuinfo").read_text().split() if platform.system() == "Linux" else []
    return [name for name in ("avx512_vnni", "avx_vnni", "amx_int8", "asimddp") if name in flags]


def _find_arch() -> str:
    """Returns what target `cpu` calls this kind of CPU."""
    if platform.machine() in {"aarch64", "arm64"}:
        return "arm64"
    return "x64-vnni" if any("vnni" in name for name in _list_fast()) else "x64"


def _describe_machine() -> str:
    facts, fast = describe_machine(), ", ".join(_list_fast())
    return (
        f"{facts['cpu']}, {facts['cores']} cores, products of 8 bits: {fast or 'no instructions of their own'}; ONNX"
        f" Runtime {ort.__version__}; load {os.getloadavg()[0]:.0f}."
    )


if __name__ == "__main__":
    sys.exit(main())
