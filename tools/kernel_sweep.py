"""Looks for operators that a target's provider computes wrongly: generated nodes, compared with ONNX Runtime's CPU.

    python tools/kernel_sweep.py --target qnn --precision int8 --seeds 0 1000 [--set soc_model=36] [--only Conv]
    python tools/kernel_sweep.py --target xnnpack --device android:x86_64 --precision int8

Each seed is a line of kernel_cases.txt with random choices `{a|b}`, shapes and scales. The nodes are rewritten and
quantized as in a build, many to a session, and what fails or differs runs again alone. The table names results of 8
bits that are more than 2 steps apart, of 16 bits 100, and floats 1 %. What check calls fatal is left out, as a build
keeps it in float. Not each line is a fault of a kernel: where an operator jumps (Floor, Equal, ArgMax), a step before
it is a whole range behind it, floats are halves, and few providers clip what lies beyond a calibrated range.
"""

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, compose, numpy_helper, parser

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.data.samples import list_samples
from edgekit.devices.device import Device, Job
from edgekit.devices.find import find_device
from edgekit.errors import EdgekitError
from edgekit.jobs.check import fix_for_target
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.fix import ready_model
from edgekit.quantize import calibrate_model, plan_quantization
from edgekit.quantize.apply import quantize_model
from edgekit.target import INTEGERS, Precision, Target, load_target

CASES = Path(__file__).with_suffix("").with_name("kernel_cases.txt").read_text().splitlines()
CHANNELS, SIZES = (1, 2, 3, 5, 8, 13, 16, 31, 32, 33, 40), (1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 20, 33, 41, 64, 1030)
BEFORE = ("h = Identity(x)", "h = Relu(x)", "h = Mul(x, F[1.7])", "h = Conv(x, W[$C,$C$1])")
PLACES = "half_pixel|asymmetric|align_corners|pytorch_half_pixel"
BATCH, MOST_SHARE = 24, 0.01
MOST_STEPS: dict[int, float] = {TensorProto.UINT8: 2.01, TensorProto.INT8: 2.01, TensorProto.UINT16: 100.0}
HEAD = '<ir_version: 10, opset_import: ["" : 21]> g'
PLAIN = "34 y = MatMul(h, W[$R,4])"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A node, perhaps behind another one; `text` is what was chosen, `scale` and `sign` are those of its inputs."""

    model: onnx.ModelProto
    text: str
    scale: float
    sign: int


def main() -> int:
    """Prints a table of wrong results; returns 0 if it is empty."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--target", default="qnn")
    options.add_argument("--device", default="qnn-htp-sim")
    options.add_argument("--precision", default="int8")
    options.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options.add_argument("--seeds", nargs=2, type=int, default=(0, 500), metavar=("FROM", "TO"))
    options.add_argument("--only", default="", help="cases whose line contains this")
    given = options.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    target = load_target(given.target, dict(pair.split("=", 1) for pair in given.set))
    device, lines = find_device(given.device, target), [line for line in CASES if given.only in line]
    if missing := device.find_missing():
        print(missing.reason)
        return 2
    cases = [case for seed in range(*given.seeds) if (case := make_case(seed, lines[seed % len(lines)]))]
    found = 0
    for first in range(0, len(cases), BATCH):
        for case, _ in run_cases(cases[first : first + BATCH], device, target, given.precision):
            # Alone, beside a plain layer, so that something can be quantized.
            for _, told in run_cases([case], device, target, given.precision):
                found += 1
                print(f"{told:48} {case.text}", flush=True)
    print(f"{found} of {len(cases)} nodes are wrong on {device.name} in {given.precision}")
    return 1 if found else 0


def make_case(seed: int, line: str) -> Case | None:
    """Returns a node, None if the choices fit no shape."""
    rng = np.random.default_rng(seed)
    ranks, body = line.split(" ", 1)
    shape = [0]
    while not 0 < np.prod(shape) < 40_000:
        shape = rng.choice(SIZES, int(rng.choice([*ranks]))).tolist()
        shape[1:2] = rng.choice(CHANNELS, len(shape[1:2])).tolist() if len(shape) > 2 else shape[1:2]
        shape[:1] = [1] if len(shape) > 1 and rng.random() < 0.8 else shape[:1]
    axis, rank = int(rng.integers(-len(shape), len(shape))), len(shape)
    before = BEFORE[int(rng.integers(len(BEFORE) if 2 < rank < 5 else 3))].replace("$1", ",1" * (rank - 2))
    text = f"{before} {body}".replace("$S", ",".join(["{1|2|0.5|1.5}"] * (rank - 2))).replace("$T", f"{{{PLACES}}}")
    words = {"C": shape[1 % rank], "R": shape[-1], "Q": shape[-2 % rank], "N": shape[0], "A": axis, "K": rank}
    text = re.sub(r"\$([A-Z])", lambda found: str(words.get(found[1], rng.permutation(rank).tolist())), text)
    while choices := re.search(r"\{([^{}]*)\}", text):
        text = text.replace(choices[0], str(rng.choice(choices[1].split("|"))), 1)
    constants: dict[str, Any] = {}

    def keep(found: re.Match[str]) -> str:
        numbers = [float(each) for each in found[2].split(",")]
        constants[f"k{len(constants)}"] = make_constant(found[1], numbers, rng)
        return f"k{len(constants) - 1}"

    graph = re.sub(r"\b([FIJMOPWZ])\[([^\]]*)\]", keep, text)
    kind = f"float[{','.join(map(str, shape))}]"
    outputs = "float y, float k" if "y, k" in body else "float y"
    scale, sign = float(rng.choice([1, 1, 1, 0.01, 30])), int(rng.choice([0, 0, 1, -1]))
    try:
        model = parser.parse_model(f"{HEAD} ({kind} x, {kind} u) => ({outputs}) {{ {graph} }}")
        model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
        for node in model.graph.node:
            node.name = node.output[0]
        for output in model.graph.output:
            output.ClearField("type")
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        session = CpuSession(model.SerializeToString(), SessionSettings(level=Level.DISABLED))
        if any(
            value.size == 0 or not np.isfinite(value).all() for value in session.run(draw(model, scale, sign)).values()
        ):
            return None
    except Exception:  # noqa: BLE001 - onnx and ONNX Runtime refuse what does not fit, each with errors of its own
        return None
    return Case(model=compose.add_prefix(model, f"s{seed}_"), text=f"#{seed} {shape} {text}", scale=scale, sign=sign)


def make_constant(kind: str, numbers: list[float], rng: np.random.Generator) -> Any:
    """Returns what a letter of kernel_cases.txt means: the numbers themselves, or random values of this shape."""
    if kind in "FIJ":
        values = np.array(numbers, np.float32 if kind == "F" else np.int64)
        return values[0] if kind == "J" or (kind == "F" and len(numbers) == 1) else values
    shape = [int(each) for each in numbers]
    weights = rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))
    masks = np.where(rng.random(shape) < 0.3, -1e4, 0)
    found = {"W": weights, "M": masks, "P": rng.uniform(0.3, 2, shape)}.get(kind)
    return np.full(shape, kind == "O", np.int64) if found is None else found.astype(np.float32)


def draw(model: onnx.ModelProto, scale: float, sign: int, seed: int = 0, stretch: float = 1.0) -> Tensors:
    """Returns random inputs; with a `stretch` some lie beyond the range of the others."""
    rng, made = np.random.default_rng(seed), dict[str, Array]()
    for value in model.graph.input:
        drawn = rng.normal(0, scale, [dim.dim_value for dim in value.type.tensor_type.shape.dim]) * stretch
        made[value.name] = (np.abs(drawn) * sign if sign else drawn).astype(np.float32)
    return made


def run_cases(cases: list[Case], device: Device, target: Target, precision: Precision) -> Iterator[tuple[Case, str]]:
    """Yields what a device computes wrongly, with the distance; cases whose session fails run in smaller parts."""
    with work_folder() as work:
        try:
            # Beside them a layer that can be quantized.
            model, samples = prepare([*cases, *filter(None, [make_case(10**9, PLAIN)])], target, precision, work)
            check = check_model(model, target, advises=False)
            if check.is_refused and len(cases) == 1:
                return
            source = list_samples(samples, "rows")
            job = Job(
                model=model.path, target=target, precision=precision, outputs=model.outputs, check=check, samples=source
            )
            (work / "run").mkdir()
            run = device.run_job(job, work / "run")
            failure, got = run.failure, [] if run.failure else list(run.outputs)
            session = CpuSession(model.path, SessionSettings(level=Level.DISABLED))
            pairs, steps = list(zip(map(session.run, samples), got, strict=False)), read_steps(model.path)
        except EdgekitError as error:
            failure, pairs, steps = error.message, [], {}
    if failure is not None and len(cases) > 1:
        size = -(-len(cases) // 3)
        for first in range(0, len(cases), size):
            yield from run_cases(cases[first : first + size], device, target, precision)
        return
    for case in cases:
        names = [each.name for each in case.model.graph.output]
        told = [compare(wanted[name], found[name], steps.get(name)) for wanted, found in pairs for name in names]
        off, words = max(told) if failure is None else (1e9, f"fails: {failure[-150:]}")
        if off > 1:
            yield case, words


def prepare(cases: list[Case], target: Target, precision: Precision, work: Path) -> tuple[Model, list[Tensors]]:
    """Returns a model of all cases as a build would make it for the target, and samples of its inputs."""
    merged = onnx.ModelProto.FromString(cases[0].model.SerializeToString())
    for other in [case.model.graph for case in cases[1:]]:
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(merged.graph, field).extend(getattr(other, field))
    onnx.save(merged, str(work / "m.onnx"))
    floats = precision not in INTEGERS
    ready = ready_model(load_model(work / "m.onnx"), work / "ready", {}).model
    model = fix_for_target(ready, work / "fixed.onnx", target, stays_float=floats).model
    rows = [(seed, stretch) for seed, stretch in ((0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0), (1, 1.3))]
    drawn = [
        {key: each for case in cases for key, each in draw(case.model, case.scale, case.sign, *row).items()}
        for row in rows
    ]
    if not floats:
        seen = calibrate_model(
            model, list_samples(drawn[:4], "rows"), work=work / "seen", methods=("minmax",), fitting=False
        )
        plan = plan_quantization(model, seen, target, precision, method="minmax")
        model = quantize_model(model, plan, seen, work / "quantized.onnx").model
    return model, [drawn[0], drawn[-1]]


def read_steps(path: Path) -> dict[str, float]:
    """Returns how far each output that a DequantizeLinear makes may be off."""
    graph = onnx.load(str(path)).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    made = [node for node in graph.node if node.op_type == "DequantizeLinear" and node.input[2] in stored]
    return {
        node.output[0]: MOST_STEPS.get(stored[node.input[2]].data_type, 2.01)
        * float(numpy_helper.to_array(stored[node.input[1]]).max())
        for node in made
    }


def compare(wanted: Array, found: Array, most: float | None) -> tuple[float, str]:
    """Returns the distance of two outputs as a multiple of what is allowed, and in words."""
    if wanted.shape != found.shape:
        return 1e9, f"has shape {found.shape} in place of {wanted.shape}"
    one, two = wanted.astype(np.float64), found.astype(np.float64)
    distance = np.abs(one - two)
    allowed = most or MOST_SHARE * max(float(np.abs(one).max()), 1e-9)
    ratio = float((distance**2).sum() / max(float((one**2).sum()), 1e-30))
    share, off = float((distance > allowed).mean()), float(distance.max() / allowed)
    return off, f"{off:.1f} times what is allowed, {share:.0%} of all, {-10 * np.log10(max(ratio, 1e-20)):.0f} dB"


if __name__ == "__main__":
    sys.exit(main())
