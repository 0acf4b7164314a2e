"""Forecasts the run time of a model or a bundle on phones; nothing runs.

Known times improve a forecast: of this network on a phone, or of another model on a CPU. So does QNN's compiler.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import onnx

from edgekit._files import work_folder
from edgekit.bench.bench import BenchRun
from edgekit.bench.history import list_benches
from edgekit.bundle.folder import open_bundle
from edgekit.check.check import check_graph, count_crossings
from edgekit.check.report import count_of
from edgekit.check.rules.rulebook import load_rules
from edgekit.convert.context import require_compiler
from edgekit.errors import DeviceError, RuntimeRefusal, UsageError
from edgekit.evidence import Evidence
from edgekit.forecasts import forecast as forecasts
from edgekit.forecasts.features import SOC, Traffic, Work, compile_traffic, join_graph, measure_work
from edgekit.forecasts.model import Bits, load_fitted, load_phones, load_table
from edgekit.graph.graph import Graph, view_model
from edgekit.graph.inference import infer_model
from edgekit.model.external import skim_model
from edgekit.model.model import Model, load_model
from edgekit.phones import find_phone
from edgekit.prepare.clean import freeze_model, prepare_model, sketch_model
from edgekit.prepare.interface import name_nodes
from edgekit.prepare.shapes import find_unset
from edgekit.recipe import Recipe, choose_precision
from edgekit.report.tables import format_bytes
from edgekit.target import Precision, Target, load_target
from edgekit.verify.history import list_runs
from edgekit.verify.run_report import RunReport

BITS_OF: Mapping[Precision, Bits] = {"int8": "w8a8", "int16": "w8a16", "fp16": "float", "fp32": "float"}
"""The table's names for the precisions of bundles."""
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_CPUS = {"CPUExecutionProvider": "cpu", "XnnpackExecutionProvider": "xnnpack"}


class CpuTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of another model on the CPU of a machine; `machine` is the name to show."""

    model: Path
    machine: str
    ms: float


def parse_measured(text: str, precisions: Sequence[Bits]) -> forecasts.KnownTime:
    """Parses `DEVICE[:PRECISION]=TIME`, such as `Galaxy S25:w8a8=1.9ms`.

    Without a precision it is that of `precisions` if there is only one, else float.

    Raises:
        UsageError: it is malformed, the device is unknown, or the time is no time.
    """
    name, _, given = text.rpartition("=")
    device, _, precision_name = name.partition(":")
    ms = _read_ms(given)
    if not device or ms is None:
        raise UsageError(f"--measured {text} is no time on a device", hint='as in --measured "Galaxy S25=1.9ms"')
    precision = precisions[0] if len(precisions) == 1 else "float"
    precision = forecasts.read_precisions(precision_name)[0] if precision_name else precision
    return forecasts.KnownTime(device=find_phone(device, load_phones()).name, precision=precision, ms=ms)


def read_history(path: Path, subject: Path) -> tuple[forecasts.KnownTime, ...]:
    """Returns the last time that bench or verify recorded of a model or bundle on the NPU of each phone.

    That of a model is taken as float, that of a bundle as its own precision.

    Raises:
        BundleError: the bundle is incomplete or altered.
        DataError: there is no such file, or it is no history.
        UsageError: it holds no such time, or one of an unknown chip.
    """
    name = subject.resolve().name
    precision = BITS_OF.get(open_bundle(subject).manifest.precision, "float") if subject.is_dir() else "float"
    numbers = {soc.casefold(): int(number) for number, soc in load_target("qnn").socs.items()}
    found: dict[str, forecasts.KnownTime] = {}
    # The time of an emulator says nothing about a phone.
    for run, ms, source in _list_recorded(path, name):
        if run.provider == "QNNExecutionProvider" and run.evidence is Evidence.DEVICE:
            soc = run.versions.get("soc", "")
            number = numbers.get(soc.casefold())
            known = (phone for phone in load_phones() if phone.soc_model == number and phone.form == "Phone")
            if (phone := next(known, None)) is None:
                words = f"{source}: '{run.device}' says that its chip is '{soc}', which edgekit has no name for"
                raise UsageError(words, hint=f'give the time by hand: --measured "DEVICE={ms:.4g}ms"')
            found[phone.name] = forecasts.KnownTime(device=phone.name, precision=precision, ms=ms, source=source)
    if not found:
        words = f"'{path}' holds no time of '{name}' on the NPU of a phone"
        raise UsageError(words, hint=f"edgekit bench {subject} --on adb:SERIAL --history {path}")
    return tuple(found.values())


def parse_cpu_times(text: str) -> tuple[CpuTime, ...]:
    """Parses `MODEL=TIME` or `MODEL=HISTORY`: the times of another model on the CPUs of machines.

    Raises:
        UsageError: it is malformed, or the history has no time of the model on a CPU.
        DataError: there is no such history.
    """
    name, _, given = text.rpartition("=")
    if not name or not given:
        words = f"--on-cpu {text} is not MODEL=TIME"
        raise UsageError(words, hint="as in --on-cpu other.onnx=12ms, or other.onnx=bench.sqlite")
    model, ms = Path(name), _read_ms(given)
    if ms is not None:
        return (CpuTime(model=model, machine=f"the CPU that ran {model.name}", ms=ms),)
    if re.match(r"\s*([-+.0-9]|nan|inf)", given) and not Path(given).exists():
        raise UsageError(f"--on-cpu {text}: '{given}' is no time", hint="a positive number with us, ms or s: 12ms")
    recorded = _list_recorded(Path(given), model.resolve().name)
    found = {f"{run.device} ({_CPUS[run.provider]})": ms for run, ms, _ in recorded if run.provider in _CPUS}
    if not found:
        words = f"'{given}' holds no time of '{model.name}' on a CPU"
        raise UsageError(words, hint=f"edgekit bench {model} --history {given}")
    return tuple(CpuTime(model=model, machine=machine, ms=ms) for machine, ms in found.items())


def _list_recorded(path: Path, subject: str) -> Iterator[tuple[BenchRun | RunReport, float, str]]:
    """Yields the recorded runs of a subject with one sample at a time, with milliseconds and source, oldest first.

    Batches, queues and concurrent runs are left out.
    """
    for bench in list_benches(path, subject=subject):
        for timed in bench.report.runs:
            is_single = timed.batch == timed.concurrency == 1 and not timed.queue
            if timed.failure is None and timed.median_ms > 0 and is_single:
                yield timed, timed.median_ms, f"bench {bench.id} of {path.name}"
    for past in list_runs(path, bundle=subject):
        for run in past.report.runs:
            taken = run.failure is None and run.provider_nodes.get(run.provider, 0)
            if taken and run.latency_ms is not None and run.latency_ms.median > 0:
                yield run, run.latency_ms.median, f"run {past.id} of {path.name}"


def _read_ms(text: str) -> float | None:
    """Returns the milliseconds of a time with unit (us, ms, s), None if the text is no such time above 0."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(us|ms|s)\s*", text)
    ms = float(found[1]) * _UNITS[found[2]] if found else math.nan
    return ms if ms > 0 else None


# Makers of NPUs without free measurements: the name, the target whose rules say which nodes the NPU would get, and a
# pattern of device names.
_UNMEASURED_MAKERS: tuple[tuple[str, str, str], ...] = (
    ("Apple's Neural Engine", "coreml", r"apple|iphone|ipad|\bmac|\b[am]1\d?\b|neural engine"),
    ("Google's Tensor", "nnapi", r"tensor|pixel ([6-9]|1\d)"),
    ("MediaTek's APU", "nnapi", r"mediatek|dimensity|helio|\bmt\d{4}"),
    ("Samsung's Exynos", "nnapi", r"exynos"),
)  # fmt: skip
COMPILE_SECONDS = 180.0
"""The time limit of QNN's compiler for a forecast."""
_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul"})


def forecast(
    subject: Path | str,
    devices: Sequence[str] = (),
    precisions: Sequence[Bits] | None = None,
    measured: Sequence[forecasts.KnownTime | CpuTime] = (),
    *,
    dims: Mapping[str, int] | None = None,
    every: bool = False,
    max_ms: float | None = None,
    compiles: bool = False,
) -> forecasts.ForecastReport:
    """Returns how long a model, or a bundle's, is forecast to take on devices with a Hexagon NPU; nothing runs.

    Args:
        subject: a model file, or the folder of a bundle, which is forecast in its own precision.
        devices: names of devices, or parts of names that belong to one chip; without any, one device of each measured
            chip.
        precisions: of "float", "w8a8" and "w8a16"; without any, all three, or that of the bundle.
        measured: known times of this network, which correct the forecast for every device; and times of other float
            models on CPUs, from which the time of this one there is scaled.
        dims: a size for each dynamic dimension of the inputs.
        every: True for all devices that are known by name.
        max_ms: the limit for the verdict of the report.
        compiles: True to compile the float model with QNN, whose plan says how many bytes it moves. That takes seconds
            or minutes, and makes the forecast in float and w8a16 more accurate. If it fails, a remark says so.

    Raises:
        UsageError: a device, precision or dimension that does not exist, a time that cannot be of this network, or a
            quantized model that is to be compiled.
        MissingExtraError: `compiles`, and onnxruntime-qnn is not installed.
        ModelError: the model cannot be read, or its work cannot be counted.
        BundleError: the bundle is incomplete, altered, or has no model in ONNX form.
    """
    subject = Path(subject)
    path, bits = _open(subject)
    chosen: tuple[Bits, ...] = tuple(precisions or ((bits,) if bits else forecasts.BITS))
    # If several makers match a name, the first one counts.
    unmeasured = {
        name: (maker, target)
        for name in devices
        for maker, target, words in reversed(_UNMEASURED_MAKERS)
        if re.search(words, name.casefold())
    }
    found = dict.fromkeys(find_phone(name, load_phones()) for name in devices if name not in unmeasured)
    phones = load_phones() if every else tuple(found) if devices else forecasts.choose_phones()
    source = load_model(path)
    graph, counted = _count_work(source, dims or {})
    # An HTP version that QNN's rules do not know is treated as the next older one.
    arches = sorted(map(int, load_target("qnn").parameters["htp_arch"].choices))
    arch_of = {phone.name: max((arch for arch in arches if arch <= phone.htp), default=arches[0]) for phone in phones}
    placed = {arch: _place(graph, "qnn", {"htp_arch": str(arch)}) for arch in sorted(set(arch_of.values()))}
    placings = {name: placed[arch] for name, arch in arch_of.items()}
    traffic, compile_remark = compile_model(source, graph, dims or {}) if compiles else (None, "")
    known = [time for time in measured if isinstance(time, forecasts.KnownTime)]
    on_cpu = [time for time in measured if isinstance(time, CpuTime)]
    rows, distances = forecasts.forecast_work(counted, phones, chosen, known, placings, traffic)
    for timed in on_cpu:
        other = load_model(timed.model)
        # As `bench` times it, with 1 for a size that is not given.
        sizes = {name: (dims or {}).get(name, 1) for name in find_unset(other.inputs, {})}
        rows += (forecasts.forecast_cpu(counted, _count_work(other, sizes)[1], timed.machine, timed.ms),)
    rows += tuple(
        forecasts.DeviceForecast(
            device=name, chipset=maker, soc_model=None, htp=None, precision=bit, placing=_place(graph, target, {}),
            basis="none", note=f"there are no free measurements of {maker}: only what {target} takes is known",
        )
        for name, (maker, target) in unmeasured.items()
        for bit in chosen
    )  # fmt: skip
    fitted = load_fitted()[0].precisions
    unlike: tuple[Bits, ...] = tuple(bit for bit, far in distances.items() if far > fitted[bit].farthest)
    remarks: list[str] = []
    if unlike:
        far = "it is further from them than any on which the forecast was tested"
        alone = f"no measured network is like this one in {', '.join(unlike)}"
        remarks.append(f"{alone}: {far}, so that even the wide interval is not reliable")
    if counted.recurrent:
        remarks.append(f"{counted.recurrent} recurrent layers run step by step on an NPU; the fit has no such networks")
    if on_cpu:
        interval = "the interval is that of float networks on a PC with one thread"
        remarks.append(f"times on a CPU are scaled from another model's by the work; {interval}")
    moved = "corrects the forecast of every device"
    remarks += [f"{time.ms:g} ms on {time.device} in {time.precision} ({time.source}) {moved}" for time in known]
    table = load_table()
    return forecasts.ForecastReport(
        model=source.name,
        sha256=source.sha256,
        macs=counted.macs,
        weights=round(counted.kinds["weights"]),
        nodes=round(counted.kinds["nodes"]),
        work={kind: float(round(amount)) for kind, amount in counted.kinds.items()},
        rows=rows,
        known=tuple(known),
        distance={bit: round(far, 3) for bit, far in distances.items()},
        faster={bit: fitted[bit].faster for bit in chosen},
        unlike=unlike,
        traffic=traffic,
        remarks=(*remarks, *filter(None, [compile_remark])),
        ground=f"{table.package} {table.version}, {table.licence}, {table.source}",
        max_ms=max_ms,
    )


def forecast_goal(model: Path, recipe: Recipe, targets: Sequence[Target]) -> forecasts.ForecastReport | None:
    """Returns the forecast that a recipe asks for, in the precision of the target qnn; None if it asks for none.

    Raises:
        EdgekitError: as `forecast` does.
    """
    if recipe.forecast is msgspec.UNSET:
        return None
    built: list[Precision] = [choose_precision(each, recipe.precision) for each in targets if each.name == "qnn"]
    bits: tuple[Bits, ...] = tuple(dict.fromkeys(BITS_OF[precision] for precision in built if precision in BITS_OF))
    goal = recipe.forecast
    with work_folder() as work:
        frozen = freeze_model(load_model(model), work, recipe.freeze)
        return forecast(frozen.path, goal.devices, bits or forecasts.BITS, dims=recipe.dims, max_ms=goal.max_ms)


def _open(subject: Path) -> tuple[Path, Bits | None]:
    """Returns the model file of a subject, and the precision of a bundle, None for a model."""
    if not subject.is_dir():
        return subject, None
    bundle = open_bundle(subject)
    if (precision := bundle.manifest.precision) not in BITS_OF:
        words = f"bundle '{subject}' is in {precision}, in which no network was measured"
        raise UsageError(words, hint="forecast the float model, or a bundle in int8 or int16")
    return bundle.find_model("onnx"), BITS_OF[precision]


def _count_work(source: Model, dims: Mapping[str, int]) -> tuple[Graph, Work]:
    """Returns the graph of a model as a provider sees it, and its work.

    Raises:
        UsageError: sizes are unknown, so that the work cannot be counted.
    """
    with work_folder() as work:
        proto = infer_model(skim_model(sketch_model(source, work / "sketch.onnx", dims).path))
    name_nodes(proto.graph)
    joined = onnx.ModelProto()
    joined.CopyFrom(proto)
    counted = measure_work(join_graph(joined))
    if counted.unsized:
        unsized = f"{count_of(counted.unsized, 'node')} with values of unknown size"
        hint = "give every size with --dim or --shape, or make shapes static with edgekit prepare"
        raise UsageError(f"the work of '{source.name}' cannot be counted: {unsized}", hint=hint)
    return view_model(proto), counted


def _place(graph: Graph, name: str, settings: Mapping[str, str]) -> forecasts.Placing:
    target = load_target(name, settings)
    options = {**target.session.provider_options, **target.settings}
    nodes = check_graph(graph, load_rules(target), options, opset=graph.opset)
    left = [node for node in nodes if not node.taken]
    return forecasts.Placing(
        nodes=len(nodes),
        taken=len(nodes) - len(left),
        partitions=len({node.partition for node in nodes if node.partition is not None}),
        crossing_bytes=count_crossings(graph, nodes)[1],
        cpu_ops=dict(Counter(node.op for node in left).most_common()),
        reasons=tuple(dict.fromkeys(reason for node in left for reason in node.reasons[:1]))[:5],
    )


def compile_model(source: Model, graph: Graph, dims: Mapping[str, int]) -> tuple[Traffic | None, str]:
    """Returns the traffic that the compiler plans, None if it fails, and a remark on it; `graph` is that of the model.

    Raises:
        UsageError: the model is quantized: the forecast was fitted to plans of float models.
        MissingExtraError: onnxruntime-qnn is not installed.
    """
    if any(node.op_type in _QUANTIZED for node in graph.nodes):
        words = f"'{source.name}' is quantized, and --compile was fitted to plans of float models"
        raise UsageError(words, hint="give the float model, or leave --compile out")
    require_compiler()
    start = time.monotonic()
    try:
        with work_folder() as work:
            prepared = prepare_model(source, work / "prepared.onnx", dims)
            traffic = compile_traffic(prepared.path.name, work, timeout_s=COMPILE_SECONDS)
    except (DeviceError, RuntimeRefusal) as error:
        return None, f"forecast from the graph alone, without a plan: {error}"
    plans = f"QNN's compiler plans {traffic.operations:,} operations in float for SoC {SOC}"
    moves = f"{format_bytes(traffic.dram)} from and to DRAM (compiled in {time.monotonic() - start:.0f} s)"
    return traffic, f"{plans}, and moves {moves}"
