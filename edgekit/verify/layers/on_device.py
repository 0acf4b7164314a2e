"""The first layer that a device computes otherwise: by the tensors inside the model, or by bisection."""

import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.data.samples import Samples, limit_samples
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.devices.ios.ios import NAME
from edgekit.devices.ios.mil.program import Operation
from edgekit.devices.named import kind_of
from edgekit.devices.packages import match_operations
from edgekit.errors import EdgekitError
from edgekit.graph.constants import lift_constants
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, iterate_reads, load_model, read_outside, read_proto, save_proto
from edgekit.model.tensors import Array, Tensors, TensorSpec
from edgekit.verify.layers.comparison import LayerReport, Located
from edgekit.verify.layers.grids import Grid, StepErrors, add_steps, measure_steps, read_grid
from edgekit.verify.layers.matching import DEQUANTIZE, ISOLATED_PREFIX, QUANTIZE, list_computing, open_proto, sort_nodes
from edgekit.verify.metrics import tensor_metrics as metrics
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.metrics.tensor_metrics import ErrorSums, SampleErrors

_ROUNDING = frozenset({QUANTIZE, DEQUANTIZE})
# What runtimes compute together with the node before, where nothing else reads that node.
_FUSED_AFTER = frozenset({
    "BatchNormalization", "Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Tanh",
})  # fmt: skip
_FUSED_WITH_CONSTANT = frozenset({"Add", "Mul"})


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor to look at, and the layer that it is the result of: a node with what belongs to it.

    With a `grid` the tensor holds integers on it, else floats.
    """

    tensor: str
    layer: str
    op: str
    grid: Grid | None = None


def plan_probes(model: Model) -> tuple[Probe, ...]:
    """Returns what to look at in a model, in the order of computation.

    A quantized value is looked at as the integers of its QuantizeLinear, so that no group of Q, DQ and a node is parted
    (ONNX Runtime keeps a group whose integers are an output too). A value that only an activation reads is not looked
    at: runtimes compute both at once.
    """
    graph = view_model(read_outside(model))
    computing = list_computing(graph)
    dynamic = {name for node in computing for name in node.output}.union(graph.fed)
    starts: dict[str, tuple[str, str]] = {}
    joined: set[str] = set()
    probes: list[Probe] = []
    for node in computing:
        start = _find_start(node, starts, joined)
        for name in filter(None, node.output):
            starts[name] = start
            after = graph.consumers.get(name, ())
            grid = read_grid(node, graph) if node.op_type == QUANTIZE else None
            if len(after) == 1 and name not in graph.outputs and _is_fused_into(after[0], node, dynamic):
                joined.add(name)
            elif grid is not None or not (
                node.op_type in _ROUNDING or any(reader.op_type == QUANTIZE for reader in after)
            ):
                probes.append(Probe(tensor=name, layer=start[0], op=start[1], grid=grid))
    return tuple(probes)


def find_sources(model: Model, probes: Iterable[Probe], wanted: Iterable[Probe]) -> tuple[Probe, ...]:
    """Returns the probes that the layers of `wanted` compute from, directly, in the order of computation."""
    stops = {probe.tensor for probe in probes}
    _, met = _walk_back(view_model(read_outside(model)), [probe.tensor for probe in wanted], stops)
    return tuple(probe for probe in probes if probe.tensor in met)


def save_probed(model: Model, outputs: Sequence[TensorSpec], path: Path) -> Path:
    """Saves a model that gives these tensors too, and returns its path; its nodes are the same.

    Raises:
        OutputError: the file cannot be written.
    """
    proto = read_proto(model)
    for spec in outputs:
        elem = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        proto.graph.output.append(onnx.helper.make_tensor_value_info(spec.name, elem, spec.shape))
    return save_proto(proto, path).path


def open_layers(
    model: Model, wanted: Sequence[Probe], given: Sequence[Probe] = (), dtypes: Mapping[str, str] | None = None
) -> CpuSession:
    """Returns a session, with every optimisation off, of the nodes that the tensors `wanted` need, and gives those.

    What `given` names is an input `ISOLATED_PREFIX` + name, of its dtype: every node reads it there.
    """
    proto = read_outside(model)
    graph = proto.graph
    names = {probe.tensor for probe in given}
    lift_constants(graph)
    kept, _ = _walk_back(view_model(proto), [probe.tensor for probe in wanted], names)
    nodes = [node for node in graph.node if any(name in kept for name in node.output)]
    for node in nodes:
        for place, name in enumerate(node.input):
            if name in names:
                node.input[place] = ISOLATED_PREFIX + name
    needed = {name for node in nodes for name in iterate_reads(node)}
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [
        *(value for value in graph.input if value.name not in constants - needed),
        *(
            onnx.helper.make_tensor_value_info(
                ISOLATED_PREFIX + name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype((dtypes or {})[name])), None
            )
            for name in sorted(names)
        ),
    ]
    part = onnx.GraphProto(
        name=graph.name,
        node=nodes,
        initializer=[tensor for tensor in graph.initializer if tensor.name in needed],
        input=inputs,
        output=[onnx.ValueInfoProto(name=probe.tensor) for probe in wanted],
    )
    graph.CopyFrom(part)
    return open_proto(proto, model)


def _find_start(node: Node, starts: Mapping[str, tuple[str, str]], joined: Collection[str]) -> tuple[str, str]:
    """Returns name and operator of the layer that a node belongs to: that of what it rounds or ends, or itself."""
    if node.op_type in _ROUNDING:
        return starts.get(node.input[0], (node.input[0], "Input"))
    before = next((name for name in node.input if name in joined), None)
    return (node.name or node.output[0], node.op_type) if before is None else starts[before]


def _is_fused_into(reader: Node, node: Node, dynamic: Collection[str]) -> bool:
    if node.op_type in _ROUNDING:
        return False
    others = [name for name in reader.input if name in dynamic and name not in node.output]
    return reader.op_type in _FUSED_AFTER or (reader.op_type in _FUSED_WITH_CONSTANT and not others)


def _walk_back(graph: Graph, wanted: Iterable[str], stops: set[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the tensors that `wanted` are computed from, `wanted` included, and the `stops` that were met before."""
    kept, met = set[str](), set[str]()
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name in kept or name not in graph.producers:
            continue
        kept.add(name)
        reads = set(graph.producers[name].reads)
        met |= reads & stops
        waiting.extend(reads - stops)
    return frozenset(kept), frozenset(met)


def name_operations(device: Device, job: Job, found: Located) -> Located:
    """Returns what was found of a job's layers with their operations in the ML Program, where the device writes one."""
    if kind_of(device) != NAME:
        return found
    try:
        matched = match_operations(job)
    except (EdgekitError, ValueError) as error:
        note = f"the layers were not matched to Core ML's program: {error}"
        return msgspec.structs.replace(found, notes=(*found.notes, note))
    return msgspec.structs.replace(
        found, operations={name: tuple(map(_describe, operations)) for name, operations in matched.items()}
    )


def _describe(operation: Operation) -> str:
    is_half = any(result.dtype is np.float16 for result in operation.results)
    return f"{operation.kind} '{operation.name}' ({'half' if is_half else 'float'})"


LAYER_SAMPLES = 4
"""So many samples are looked at layer by layer, spread evenly."""

_MOST_TENSORS = 256
_SAME_DB, _CLOSER_DB = 40.0, 6.0
"""Outputs may move a little when tensors inside are given out, because fusions end there: by 40 dB, or clearly less
(half the amplitude) than they are off."""
_WRONG_DB, _FAR_STEPS, _FAR_OFFSET = 30.0, 2.0, 0.5
"""A layer of a device is wrong by itself below this ratio, or where it has a grid if the worst channel (the root of the
mean square) or all of it is farther off than these steps: other kernels round otherwise, by a step at most (measured on
QNN's simulator and XNNPACK: 1.0 and 0.13)."""

# Where the outputs are wrong, the worst layer is to blame if it is worse than the middle one by this.
_OUTLIER_DB = 20.0


class _Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Probes that a device gives in one run: those that are looked at, and those that they are computed from."""

    wanted: tuple[Probe, ...]
    sources: tuple[Probe, ...]


class _Sums(msgspec.Struct, kw_only=True):
    """What has been summed up for a probe: the error so far, the layer's own, and that in steps of its grid."""

    found: ErrorSums
    own: ErrorSums
    steps: StepErrors | None


class _Trace(msgspec.Struct, kw_only=True):
    """What the runs of a device gave so far; `refusal` says why the rest cannot be had."""

    runs: int = 1
    sums: dict[str, _Sums] = {}
    notes: tuple[str, ...] = ()
    refusal: str = ""


def find_device_layer(
    device: Device,
    job: Job,
    work: Path,
    *,
    min_sqnr_db: float = 15.0,
    may_cut: bool = True,
    slice_bytes: int = 32 << 20,
) -> Located:
    """Returns the first layer of an ONNX model that a device computes otherwise than this machine without optimisation.

    The tensors inside are added to the outputs, in slices of about `slice_bytes` a sample, and the device runs a few
    samples of the job once for each. A layer's own error is its distance from what this machine makes of the inputs
    that the layer had on the device. Where the outputs of the model change when tensors are given out, or the device
    then fails, the model is cut in two again and again instead, if it may be.

    Raises:
        ModelError: the job's model is no ONNX model.
        DeviceError: the device is not there.
    """
    job = msgspec.structs.replace(job, samples=limit_samples(job.samples, LAYER_SAMPLES))
    model = load_model(job.model)
    plain_folder = work / "plain"
    plain_folder.mkdir(parents=True)
    plain = device.run_job(job, plain_folder)
    trace = _Trace(refusal=plain.failure or "")
    outputs = () if plain.failure else compare_outputs(run_here(model, job.samples), plain.outputs)
    specs, probes = _measure_probes(model, job, plan_probes(model))
    for index, part in enumerate(_list_slices(model, probes, specs, slice_bytes)):
        if not trace.refusal:
            _run_slice(device, job, (model, part, specs), (plain, outputs), work / f"slice{index}", trace)
    if trace.refusal:
        return _cut(device, job, work, min_sqnr_db, trace) if may_cut else _give_up(trace)
    layers = tuple(_report(probe, trace.sums[probe.tensor]) for probe in probes if probe.tensor in trace.sums)
    wrong = not is_right(outputs, min_sqnr_db)
    bad = next((layer for layer in layers if _is_wrong(layer)), None) or (_find_worst(layers) if wrong else None)
    name = None if bad is None else bad.name
    return Located(layer=name, runs=trace.runs, cuts=0, layers=layers, found_by="tensors", notes=trace.notes)


def look_at_layers(device: Device, job: Job, work: Path, *, may_cut: bool) -> Located:
    """Returns what `find_device_layer` finds; where it cannot look, a note says why."""
    try:
        return name_operations(device, job, find_device_layer(device, job, work, may_cut=may_cut))
    except EdgekitError as error:
        return Located(layer=None, runs=0, cuts=0, notes=(f"the layers were not compared: {error.message}",))


def _cut(device: Device, job: Job, work: Path, min_sqnr_db: float, trace: _Trace) -> Located:
    located = locate_on_device(device, job, work / "cuts", min_sqnr_db=min_sqnr_db)
    note = f"the model was cut, because {trace.refusal}"
    return msgspec.structs.replace(located, runs=located.runs + trace.runs, notes=(*trace.notes, note))


def _give_up(trace: _Trace) -> Located:
    note = f"the layers were not compared, because {trace.refusal}; edgekit verify --layers cuts the model instead"
    return Located(layer=None, runs=trace.runs, cuts=0, notes=(*trace.notes, note))


def _measure_probes(
    model: Model, job: Job, probes: Sequence[Probe]
) -> tuple[dict[str, tuple[TensorSpec, int]], tuple[Probe, ...]]:
    """Returns type, shape and bytes of each probe that holds numbers, and these probes.

    A dimension that is not the same in every sample is unknown.
    """
    seen: dict[str, tuple[TensorSpec, int]] = {}
    session = open_layers(model, probes)
    for sample in job.samples:
        for name, value in session.run(sample).items():
            before = seen.get(name)
            shape = value.shape if before is None else _join_shapes(before[0].shape or (), value.shape)
            size_bytes = max(value.nbytes, 0 if before is None else before[1])
            seen[name] = (TensorSpec(name=name, dtype=value.dtype.name, shape=shape), size_bytes)
    kept = tuple(
        probe
        for probe in probes
        if probe.tensor in seen
        and seen[probe.tensor][1]
        and (probe.grid is not None or seen[probe.tensor][0].dtype.startswith("float"))
    )
    return seen, kept


def _join_shapes(first: Sequence[int | str | None], second: Sequence[int]) -> tuple[int | str | None, ...] | None:
    if len(first) != len(second):
        return None
    return tuple(dim if dim == other else None for dim, other in zip(first, second, strict=True))


def _list_slices(
    model: Model, probes: Sequence[Probe], specs: Mapping[str, tuple[TensorSpec, int]], slice_bytes: int
) -> Iterator[_Slice]:
    part: list[Probe] = []
    size_bytes = 0
    for probe in probes:
        more = specs[probe.tensor][1]
        if part and (size_bytes + more > slice_bytes or len(part) >= _MOST_TENSORS):
            yield _Slice(wanted=tuple(part), sources=find_sources(model, probes, part))
            part, size_bytes = [], 0
        part.append(probe)
        size_bytes += more
    if part:
        yield _Slice(wanted=tuple(part), sources=find_sources(model, probes, part))


def _run_slice(
    device: Device,
    job: Job,
    asked: tuple[Model, _Slice, Mapping[str, tuple[TensorSpec, int]]],
    plain: tuple[DeviceRun, Sequence[OutputReport]],
    work: Path,
    trace: _Trace,
) -> None:
    """Runs the model once with the tensors of a slice as outputs, and adds what came back to the trace."""
    model, part, specs = asked
    known = {spec.name for spec in job.outputs}
    names = {probe.tensor for probe in (*part.sources, *part.wanted)}
    added = {name: specs[name][0] for name in sorted(names - known)}
    folder = work / "run"
    folder.mkdir(parents=True)
    path = save_probed(model, tuple(added.values()), work / "probed.onnx")
    run = device.run_job(msgspec.structs.replace(job, model=path, outputs=(*job.outputs, *added.values())), folder)
    trace.runs += 1
    if run.failure is not None:
        trace.refusal = f"with tensors given out the device failed: {run.failure}"
    elif not names <= next(iter(run.outputs), dict[str, Array]()).keys():
        trace.refusal = "the device does not give tensors inside"
    elif not _stays_same(plain[1], compare_outputs(plain[0].outputs, run.outputs)):
        trace.refusal = "the outputs change when tensors inside are given out too"
    else:
        more = ", ".join(f"{count} {op}" for op, count in sorted((_count_left(run) - _count_left(plain[0])).items()))
        note = (f"with tensors given out more nodes ran on the CPU: {more}",) if more else ()
        trace.notes = tuple(dict.fromkeys((*trace.notes, *note)))
        _sum_up(model, part, job, run, trace.sums)
    shutil.rmtree(work)


def _stays_same(plain: Sequence[OutputReport], probed: Sequence[OutputReport]) -> bool:
    """Returns True if giving tensors out moved the outputs by clearly less than they are off, or by very little."""
    before = {report.name: report for report in plain}
    for report in probed:
        off = before.get(report.name)
        if not report.samples or report.non_finite != report.reference_non_finite:
            return False
        distance = None if off is None else off.sqnr_db
        least = _SAME_DB if distance is None else min(_SAME_DB, distance + _CLOSER_DB)
        if report.sqnr_db is not None and report.sqnr_db < least:
            return False
    return True


def _count_left(run: DeviceRun) -> Counter[str]:
    return Counter(node.op for node in run.placement if node.provider == CPU_PROVIDER)


def _sum_up(model: Model, part: _Slice, job: Job, run: DeviceRun, sums: dict[str, _Sums]) -> None:
    here = open_layers(model, part.wanted)
    isolated = None
    for sample, got in zip(job.samples, run.outputs, strict=False):
        if isolated is None:
            dtypes = {probe.tensor: got[probe.tensor].dtype.name for probe in part.sources}
            isolated = open_layers(model, part.wanted, part.sources, dtypes)
        wanted = here.run(sample)
        own = isolated.run({**sample, **{ISOLATED_PREFIX + probe.tensor: got[probe.tensor] for probe in part.sources}})
        for probe in part.wanted:
            found, expected = _read(probe, got), _read(probe, own)
            measured = _Sums(
                found=_measure(_read(probe, wanted), found),
                own=_measure(expected, found),
                steps=None
                if probe.grid is None or expected.shape != found.shape
                else measure_steps(probe.grid, expected, found),
            )
            before = sums.get(probe.tensor)
            sums[probe.tensor] = measured if before is None else _add(before, measured)


def _read(probe: Probe, values: Tensors) -> Array:
    value = values[probe.tensor]
    return value if probe.grid is None else probe.grid.read_values(value)


def _measure(wanted: Array, found: Array) -> SampleErrors:
    """Returns the errors of one sample; values that are not finite on both sides alike, as in masks, do not count."""
    if wanted.shape != found.shape:
        return SampleErrors(numeric=True, elements=found.size, matches=0, non_finite=max(1, found.size))
    alike = ~np.isfinite(wanted) & ((wanted == found) | (np.isnan(wanted) & np.isnan(found)))
    if alike.any():
        wanted, found = (np.where(alike, np.zeros((), wanted.dtype), value) for value in (wanted, found))
    return metrics.measure_errors(wanted, found)


def _add(before: _Sums, more: _Sums) -> _Sums:
    return _Sums(
        found=metrics.add_sums(before.found, more.found),
        own=metrics.add_sums(before.own, more.own),
        steps=before.steps if more.steps is None else add_steps(before.steps, more.steps),
    )


def _report(probe: Probe, sums: _Sums) -> LayerReport:
    found, own, steps = sums.found, sums.own, sums.steps
    step = 0.0 if probe.grid is None else probe.grid.step
    is_stepped = steps is not None and step > 0.0 and not own.non_finite
    return LayerReport(
        name=probe.layer,
        op=probe.op,
        tensor=probe.tensor,
        sqnr_db=None if found.non_finite else metrics.sqnr_db([found]),
        max_abs=None if found.non_finite else found.max_abs,
        own_sqnr_db=None if own.non_finite else metrics.sqnr_db([own]),
        own_bias=None if own.non_finite else metrics.bias_share([own]),
        offset_steps=steps.measure_offset(step) if steps is not None and is_stepped else None,
        channel_steps=steps.measure_channels(step) if steps is not None and is_stepped else None,
        non_finite=found.non_finite,
    )


def _is_wrong(layer: LayerReport) -> bool:
    if layer.own_sqnr_db is None:
        return True
    if layer.channel_steps is None or layer.offset_steps is None:
        return layer.own_sqnr_db < _WRONG_DB
    return layer.channel_steps[0] > _FAR_STEPS or layer.offset_steps > _FAR_OFFSET


def _find_worst(layers: Sequence[LayerReport]) -> LayerReport | None:
    """Returns the layer whose own ratio lies lowest, where it lies clearly below that of the middle one."""
    known = sorted((layer.own_sqnr_db, place) for place, layer in enumerate(layers) if layer.own_sqnr_db is not None)
    if not known or known[0][0] > known[len(known) // 2][0] - _OUTLIER_DB:
        return None
    return layers[known[0][1]]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of a model: how many of its computing nodes, in their order, and the tensors that come out there.

    `layer` names the last node before the cut that is no Q or DQ, or the input where there is none.
    """

    nodes: int
    outputs: tuple[str, ...]
    layer: str


def plan_cuts(graph: Graph) -> tuple[Cut, ...]:
    """Returns every place to cut, in the order of computation; the last one is the whole graph.

    A cut never parts a node from the Q and DQ behind it, because the node would then compute in float.
    """
    nodes = _order_groups(graph)
    last_read = {name: place for place, node in enumerate(nodes) for name in node.reads}
    given = graph.outputs
    rounded = {name for node in nodes if node.op_type == QUANTIZE for name in (node.input[0], node.output[0])}
    cuts: list[Cut] = []
    live: list[str] = []
    layer = ""
    for place, node in enumerate(nodes):
        layer = layer or node.input[0] if node.op_type in {QUANTIZE, DEQUANTIZE} else node.name or node.output[0]
        live = [name for name in (*live, *node.output) if name in given or last_read.get(name, -1) > place]
        if live and not any(name in rounded and last_read.get(name, -1) > place for name in live):
            cuts.append(Cut(nodes=place + 1, outputs=tuple(live), layer=layer))
    return tuple(cuts)


def save_prefix(model: Model, cut: Cut, path: Path) -> Model:
    """Saves the part of a model before a cut as a model of its own, with the same inputs.

    Raises:
        OutputError: the file cannot be written.
    """
    proto = read_proto(model)
    graph = proto.graph
    lift_constants(graph)
    view = view_model(proto)
    kept = _order_groups(view)[: cut.nodes]
    kept = [*_find_constants(view, kept), *kept]
    needed = {name for node in kept for name in node.reads} | set(cut.outputs)
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    outputs = [value for value in graph.output if value.name in cut.outputs]
    outputs += [onnx.ValueInfoProto(name=name) for name in cut.outputs if name not in view.outputs]
    nodes = [node.proto for node in kept]
    part = onnx.GraphProto(name=graph.name, node=nodes, initializer=initializers, input=graph.input, output=outputs)
    graph.CopyFrom(part)
    return save_proto(proto, path)


def _order_groups(graph: Graph) -> list[Node]:
    """Returns the computing nodes in order, the Q and DQ right behind what they round: then branches can be parted."""
    nodes = list_computing(graph)
    computed = {name for node in nodes for name in node.output}
    rounding: dict[str, list[Node]] = {}
    for node in nodes:
        if node.op_type in {QUANTIZE, DEQUANTIZE} and computed.isdisjoint(node.input[1:]):
            rounding.setdefault(node.input[0], []).append(node)
    ordered: dict[str, Node] = {}
    for node in nodes:
        waiting = [node]
        while waiting:
            one = waiting.pop(0)
            if one.output[0] not in ordered:
                ordered[one.output[0]] = one
                waiting.extend(reader for name in one.output for reader in rounding.get(name, []))
    return list(ordered.values())


def _find_constants(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Returns, in order, the constant nodes that some nodes need."""
    computed = {name for node in list_computing(graph) for name in node.output}
    needed = {name for node in nodes for name in node.reads}
    found: list[Node] = []
    for node in reversed(sort_nodes(graph)):
        if computed.isdisjoint(node.output) and not needed.isdisjoint(node.output):
            found.append(node)
            needed.update(node.reads)
    return found[::-1]


def locate_on_device(device: Device, job: Job, work: Path, *, min_sqnr_db: float = 15.0) -> Located:
    """Bisects an ONNX model on a device and returns the first layer whose result is wrong there.

    The job's model is cut in two again and again; each prefix runs on the device and, with every optimisation off,
    here. A prefix is wrong if an output of it cannot be compared, or has an SQNR below `min_sqnr_db`. It takes at
    most 2 + log2(cuts) runs. An error that later layers remove, as saturation can, is not found.

    Raises:
        ModelError: the job's model is no ONNX model.
        DeviceError: the device is not there.
    """
    model = load_model(job.model)
    cuts = plan_cuts(view_model(read_proto(model, weights=False)))
    runs = 1
    if not cuts or _prefix_is_right(device, job, model, cuts[-1], work / "whole", min_sqnr_db):
        return Located(layer=None, runs=runs, cuts=len(cuts))
    right, wrong = -1, len(cuts) - 1
    while wrong - right > 1:
        middle = (right + wrong) // 2
        runs += 1
        if _prefix_is_right(device, job, model, cuts[middle], work / str(middle), min_sqnr_db):
            right = middle
        else:
            wrong = middle
    return Located(layer=cuts[wrong].layer, runs=runs, cuts=len(cuts))


def _prefix_is_right(device: Device, job: Job, model: Model, cut: Cut, work: Path, min_sqnr_db: float) -> bool:
    work.mkdir(parents=True)
    prefix = save_prefix(model, cut, work / "prefix.onnx")
    reference = run_here(prefix, job.samples)
    outputs = tuple(_specify(name, value) for name, value in next(iter(reference), dict[str, Array]()).items())
    folder = work / "run"
    folder.mkdir()
    kept = {node.name for node in read_proto(prefix, weights=False).graph.node}
    check = msgspec.structs.replace(
        job.check, node_list=tuple(node for node in job.check.node_list if node.name in kept)
    )
    part = msgspec.structs.replace(job, model=prefix.path, outputs=outputs, check=check)
    run = device.run_job(part, folder)
    return run.failure is None and is_right(compare_outputs(reference, run.outputs), min_sqnr_db)


def is_right(reports: Sequence[OutputReport], min_sqnr_db: float) -> bool:
    """Returns True if outputs came back whole, finite, and not below a signal-to-noise ratio."""
    return bool(reports) and all(
        report.mismatch is None
        and not report.non_finite
        and (report.sqnr_db is None or report.sqnr_db >= min_sqnr_db)
        and (report.exact_match is None or report.exact_match == 1.0)
        for report in reports
    )


def run_here(model: Model, samples: Samples) -> Samples:
    """Returns what a model makes of samples on this machine, with every optimisation off."""
    session = CpuSession(model.path, SessionSettings(level=Level.DISABLED))

    def read() -> Iterator[Tensors]:
        for sample in samples:
            yield session.run(sample)

    return Samples(source=str(model.path), count=samples.count, read=read)


def _specify(name: str, value: Array) -> TensorSpec:
    return TensorSpec(name=name, dtype="string" if value.dtype.kind in "UO" else value.dtype.name, shape=value.shape)
