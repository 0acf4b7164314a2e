"""Finds the first layer that a device computes differently: by the tensors inside the model, or by bisection.

Probes are tensors that a device can return without a change of what it computes: they are added to the outputs of the
model. If a device does not return them, the model is cut in two repeatedly, each time at a place where few tensors
pass.
"""

import math
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._ort import CPU_PROVIDER, CpuSession
from edgekit.data.samples import Samples, limit_samples, map_samples
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.errors import EdgekitError
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, load_model, read_proto, read_with_weights_on_disk, save_proto
from edgekit.model.tensors import DTYPES, Array, Tensors, TensorSpec, is_text
from edgekit.verify.layers import comparison, grids, matching
from edgekit.verify.metrics.changes import describe_pairs
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport

# Runtimes fuse these into the node before, if nothing else reads that node.
_FUSED_AFTER = frozenset({
    "BatchNormalization", "Clip", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Tanh",
})  # fmt: skip
_FUSED_WITH_CONSTANT = frozenset({"Add", "Mul"})

_MOST_TENSORS = 256
_SAME_DB, _CLOSER_DB = 40.0, 6.0
"""Outputs may change a little when inner tensors become outputs, because fusions end there: the SQNR between the two
must be 40 dB, or 6 dB (half the amplitude) above that of the error which is investigated."""
_WRONG_DB, _MOST_CHANNEL_STEPS, _MOST_OFFSET_STEPS = 30.0, 2.0, 0.5
"""A layer of a device is wrong by itself below this SQNR. With a grid it is wrong if its worst channel (root of the
mean square) or the mean of all is off by more than this many steps: other kernels round differently, by a step at most
(measured on QNN's simulator and XNNPACK: 1.0 and 0.13)."""
# Outputs with a lower SQNR are wrong.
_LEAST_DB = 15.0
_OUTLIER_DB = 20.0
_COPY = "edgekit.copy:"
"""Begins the names of outputs that copy an input of the model."""


_Measured = tuple["Probe", comparison.LayerErrors, tuple[Array, Array]]
"""A layer, its errors in one sample, and what it should have given and gave."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor to compare, and the name and operator of the layer whose result it is.

    With a `grid` the tensor holds integers on it, else floats.
    """

    tensor: str
    layer: str
    op: str
    grid: grids.Grid | None = None

    def read(self, values: Tensors) -> Array:
        """Returns the tensor as floats."""
        value, grid = values[self.tensor], self.grid
        if grid is not None:
            value = ((value.astype(np.float64) - grid.zero) * grid.scale).astype(np.float32)
        return value


def plan_probes(model: Model) -> tuple[Probe, ...]:
    """Returns the tensors to compare in a model, in the order of computation.

    For a quantized value it is the integer output of its QuantizeLinear, so that no group of Q, DQ and a node is split
    (ONNX Runtime keeps a group whose integers are an output too). A value that only an activation reads is left out,
    because runtimes compute both at once.
    """
    graph = view_model(read_with_weights_on_disk(model))
    computing = matching.list_computing(graph)
    dynamic = {name for node in computing for name in node.output}.union(graph.fed)
    starts: dict[str, tuple[str, str]] = {}
    joined: set[str] = set()
    probes: list[Probe] = []
    for node in computing:
        # The layer of a node is that of the node which it rounds or ends, or its own.
        before = next((name for name in node.input if name in joined), None)
        if node.op_type in matching.ROUNDING:
            start = starts.get(node.input[0], (node.input[0], comparison.INPUT))
        else:
            start = (node.name or node.output[0], node.op_type) if before is None else starts[before]
        for name in filter(None, node.output):
            starts[name] = start
            after = graph.consumers.get(name, ())
            grid = grids.read_grid(node, graph) if node.op_type == matching.QUANTIZE else None
            if len(after) == 1 and name not in graph.outputs and _is_fused_into(after[0], node, dynamic):
                joined.add(name)
            elif grid is not None or not (
                node.op_type in matching.ROUNDING or any(reader.op_type == matching.QUANTIZE for reader in after)
            ):
                probes.append(Probe(tensor=name, layer=start[0], op=start[1], grid=grid))
    return tuple(probes)


def _plan_outputs(graph: Graph, planned: Sequence[Probe]) -> Iterator[Probe]:
    """Yields the outputs of the model that are dequantized: what is done to them behind the last layer shows there."""
    layers = {probe.tensor: probe for probe in planned}
    for name in graph.outputs:
        node = graph.producers.get(name)
        if node is not None and node.op_type == matching.DEQUANTIZE and (last := layers.get(node.input[0])):
            yield Probe(tensor=name, layer=last.layer, op=last.op)


def _is_fused_into(reader: Node, node: Node, dynamic: Collection[str]) -> bool:
    if node.op_type in matching.ROUNDING:
        return False
    others = [name for name in reader.input if name in dynamic and name not in node.output]
    return reader.op_type in _FUSED_AFTER or (reader.op_type in _FUSED_WITH_CONSTANT and not others)


def look_at_layers(
    device: Device, job: Job, work: Path, *, may_cut: bool, before: Samples | None = None
) -> comparison.Located:
    """Returns the result of `find_device_layer`, or a note that says why the layers cannot be looked at."""
    try:
        return find_device_layer(device, job, work, may_cut=may_cut, before=before)
    except EdgekitError as error:
        return comparison.Located(layer=None, runs=0, cuts=0, notes=(f"the layers were not compared: {error.message}",))


def find_device_layer(
    device: Device,
    job: Job,
    work: Path,
    *,
    may_cut: bool = True,
    slice_bytes: int = 32 << 20,
    before: Samples | None = None,
) -> comparison.Located:
    """Returns the first layer of an ONNX model that a device computes differently from this machine.

    This machine runs without optimisation. The tensors inside are added to the outputs, in slices of about
    `slice_bytes` a sample, and the device runs a few samples of the job once for each slice. A layer's own error is the
    distance from what this machine computes from the inputs that the layer had on the device. If the outputs of the
    model change when tensors inside become outputs, or if the device then fails, the model is bisected instead, if
    `may_cut`. A layer is not named if the device got other inputs, or gives other outputs than `before` for the same
    samples; for the layer that is named, one more run shows in what way its result is another.

    Raises:
        ModelError: the job's model is no ONNX model.
        DeviceError: the device is not there.
    """
    job = msgspec.structs.replace(job, samples=limit_samples(job.samples, comparison.LAYER_SAMPLES))
    model, unprobed = load_model(job.model), device.run_job(job, work / "unprobed")
    refusal, runs, notes = unprobed.failure or "", 1, dict[str, None]()
    outputs = () if refusal else compare_outputs(matching.run_unoptimized(model, job.samples), unprobed.outputs)
    if before is not None and (moved := _find_changed(before, unprobed.outputs)) is not None:
        return comparison.Located(
            layer=None, runs=1, cuts=0, notes=(f"output '{moved.name}' is another {comparison.UNSTEADY}",)
        )
    same_db = min(_SAME_DB, find_least_db(outputs) + _CLOSER_DB)
    graph, errors = view_model(read_with_weights_on_disk(model)), dict[str, list[comparison.LayerErrors]]()
    planned = plan_probes(model)
    planned = (*planned, *_plan_outputs(graph, planned))
    specs = _describe_tensors(matching.open_part(model, [probe.tensor for probe in planned]), job.samples)
    floats = {name for name, (spec, _) in specs.items() if spec.dtype.startswith("float")}
    filled = {name for name, (_, size_bytes) in specs.items() if size_bytes > 0}
    probes = [it for it in planned if it.tensor in filled and (it.grid is not None or it.tensor in floats)]
    tensors = {probe.tensor for probe in probes}

    def run_probed(
        wanted: Sequence[Probe], place: Path, copied: Sequence[TensorSpec] = ()
    ) -> tuple[list[Probe], DeviceRun]:
        """Runs the model once with these tensors, those that their layers read, and copies of inputs as outputs."""
        met = matching.walk_back(graph, [probe.tensor for probe in wanted], tensors)[1]
        sources = [probe for probe in probes if probe.tensor in met]
        names = {probe.tensor for probe in (*sources, *wanted)}
        copies = [msgspec.structs.replace(spec, name=_COPY + spec.name) for spec in copied]
        added = [*(specs[name][0] for name in sorted(names - {spec.name for spec in job.outputs})), *copies]
        proto = read_proto(model)
        proto.graph.node.extend(onnx.helper.make_node("Identity", [spec.name], [_COPY + spec.name]) for spec in copied)
        proto.graph.output.extend(matching.declare(spec.name, spec.dtype, spec.shape) for spec in added)
        path = save_proto(proto, place / "probed.onnx").path
        run = device.run_job(msgspec.structs.replace(job, model=path, outputs=(*job.outputs, *added)), place / "run")
        return sources, run

    def run_slice(wanted: Sequence[Probe], place: Path) -> str:
        """Measures the layers that give these tensors; returns a refusal."""
        sources, run = run_probed(wanted, place)
        names = {probe.tensor for probe in (*sources, *wanted)}
        if run.failure is not None:
            return f"with tensors inside as outputs the device failed: {run.failure}"
        if not names <= next(iter(run.outputs), dict[str, Array]()).keys():
            return "the device does not give tensors inside"
        if find_least_db(compare_outputs(unprobed.outputs, run.outputs)) < same_db:
            return "the outputs change when tensors inside become outputs too"
        more = ", ".join(f"{count} {op}" for op, count in sorted((_count_left(run) - _count_left(unprobed)).items()))
        if more:
            notes[f"with tensors inside as outputs more nodes ran on the CPU: {more}"] = None
        for probe, measured, _ in _measure_slice(model, wanted, sources, job.samples, run.outputs):
            errors.setdefault(probe.tensor, []).append(measured)
        return ""

    for part in _list_slices(probes, specs, slice_bytes):
        if not refusal:
            refusal = run_slice(part, work / "slice")
            shutil.rmtree(work / "slice")
            runs += 1
    if refusal and may_cut:
        located = locate_on_device(device, job, work / "cuts")
        all_notes = (*notes, f"the model was bisected, because {refusal}", *located.notes)
        return msgspec.structs.replace(located, runs=located.runs + runs, notes=all_notes)
    if refusal:
        note = f"the layers were not compared, because {refusal}; to bisect the model: edgekit verify --layers"
        return comparison.Located(layer=None, runs=runs, cuts=0, notes=(*notes, note))
    measured = ((it, errors[it.tensor], it.grid.step if it.grid else 0.0) for it in probes if it.tensor in errors)
    layers = tuple(comparison.report_layer(it.layer, it.op, it.tensor, error, step) for it, error, step in measured)
    located = comparison.Located(
        layer=find_wrong_layer(layers, find_least_db(outputs)),
        runs=runs,
        cuts=0,
        layers=layers,
        found_by="tensors",
        notes=tuple(notes),
    )
    if (wrong := located.bad) is None:
        return located
    probe = next(probe for probe in probes if probe.tensor == wrong.tensor)
    copied = [spec for spec in model.inputs if spec.dtype in DTYPES and spec.dtype != "string"]
    sources, run = run_probed([probe], work / "wrong", copied)
    if run.failure is not None:
        return msgspec.structs.replace(located, runs=runs + 1)
    copies = map_samples(
        run.outputs, lambda row: {name.removeprefix(_COPY): row[name] for name in row if name.startswith(_COPY)}
    )
    # If the device got another input, the layer is not to blame.
    if (found := _find_changed(job.samples, copies)) is None:
        change = describe_pairs(
            [pair for *_, pair in _measure_slice(model, [probe], sources, job.samples, run.outputs)]
        )
        found = msgspec.structs.replace(wrong, causes=(f"its result {change}",) if change else ())
    layers = tuple(found if layer is wrong else layer for layer in layers)
    return msgspec.structs.replace(located, layer=found.name, runs=runs + 1, layers=layers)


def _find_changed(wanted: Samples, found: Samples) -> comparison.LayerReport | None:
    """Returns the first tensor of both sides, an input or output of the model, that is another in `found`."""
    rows = list(zip(wanted, found, strict=False))
    for name in rows[0][0] if rows else ():
        pairs = [(one[name], other[name]) for one, other in rows if name in other and one[name].dtype.kind in "fiu"]
        if not pairs:
            continue
        layer = comparison.report_layer(
            name, comparison.INPUT, name, [comparison.measure_layer(None, pair, [pair]) for pair in pairs], 0.0
        )
        if _is_wrong(layer):
            others = [wanted for wanted, _ in pairs]
            moved = all(any(np.array_equal(got, other) for other in others) for _, got in pairs)
            change = "is that of another sample" if moved else describe_pairs(pairs)
            return msgspec.structs.replace(layer, causes=(f"it {change}",) if change else ())
    return None


def find_wrong_layer(layers: Sequence[comparison.LayerReport], least_db: float) -> str | None:
    """Returns the name of the first layer that is wrong by itself, or None.

    If no layer is, but the outputs are (`least_db` is the lowest SQNR among them), it is the layer with the lowest SQNR
    of its own, provided that this is clearly below the median of all layers.
    """
    if (bad := next((layer for layer in layers if _is_wrong(layer)), None)) is not None:
        return bad.name
    known = sorted((layer.own_sqnr_db, place) for place, layer in enumerate(layers) if layer.own_sqnr_db is not None)
    is_outlier = bool(known) and known[0][0] <= known[len(known) // 2][0] - _OUTLIER_DB
    return layers[known[0][1]].name if is_outlier and least_db < _LEAST_DB else None


def _describe_tensors(session: CpuSession, samples: Samples) -> dict[str, tuple[TensorSpec, int]]:
    """Returns type, shape and size in bytes of each tensor that a session gives, over all samples."""
    forms: dict[str, list[tuple[str, tuple[int, ...], int]]] = {}
    for sample in samples:
        for name, value in session.run(sample).items():
            forms.setdefault(name, []).append((value.dtype.name, value.shape, value.nbytes))
    specs: dict[str, tuple[TensorSpec, int]] = {}
    for name, found in forms.items():
        dtypes, shapes, sizes = zip(*found, strict=True)
        # A dimension that is not the same in every sample is unknown.
        dims = tuple(dims[0] if len(set(dims)) == 1 else None for dims in zip(*shapes, strict=False))
        is_ranked = len(set(map(len, shapes))) == 1
        specs[name] = TensorSpec(name=name, dtype=dtypes[-1], shape=dims if is_ranked else None), max(sizes)
    return specs


def _list_slices(
    probes: Iterable[Probe], specs: Mapping[str, tuple[TensorSpec, int]], slice_bytes: int
) -> list[list[Probe]]:
    """Returns the probes in slices of about `slice_bytes` bytes a sample."""
    parts: list[list[Probe]] = []
    size_bytes = 0
    for probe in probes:
        more = specs[probe.tensor][1]
        if not parts or size_bytes + more > slice_bytes or len(parts[-1]) >= _MOST_TENSORS:
            parts.append([])
            size_bytes = 0
        parts[-1].append(probe)
        size_bytes += more
    return parts


def _measure_slice(
    model: Model, wanted: Sequence[Probe], sources: Sequence[Probe], samples: Samples, outputs: Samples
) -> Iterator[_Measured]:
    """Yields the errors of each layer in each sample; `outputs` are the device's, with the tensors of all probes."""
    tensors = [probe.tensor for probe in wanted]
    here, isolated = matching.open_part(model, tensors), None
    for sample, got in zip(samples, outputs, strict=False):
        given = {probe.tensor: (probe.tensor, got[probe.tensor].dtype) for probe in sources}
        isolated = isolated or matching.open_part(model, tensors, given)
        exact = here.run(sample)
        fed = {matching.ISOLATED_PREFIX + probe.tensor: got[probe.tensor] for probe in sources}
        own = isolated.run({**sample, **fed})
        for probe in wanted:
            pair = probe.read(own), probe.read(got)
            yield probe, comparison.measure_layer(probe.grid, (probe.read(exact), pair[1]), [pair]), pair


def _count_left(run: DeviceRun) -> Counter[str]:
    return Counter(node.op for node in run.placement if node.provider == CPU_PROVIDER)


def _is_wrong(layer: comparison.LayerReport) -> bool:
    if layer.own_sqnr_db is None:
        return True
    if layer.channel_steps is None or layer.offset_steps is None:
        return layer.own_sqnr_db < _WRONG_DB
    return layer.channel_steps[0] > _MOST_CHANNEL_STEPS or layer.offset_steps > _MOST_OFFSET_STEPS


def plan_cuts(graph: Graph, probes: Sequence[Probe]) -> list[tuple[str, tuple[str, ...]]]:
    """Returns each layer with the outputs of the model's part that ends there; the last part is the whole model.

    The outputs of a part are the tensors that later nodes read. A quantized tensor is cut after its DQ node: a cut that
    separates a node from the Q and DQ behind it would let the node compute in float.
    """
    stops = {probe.tensor for probe in probes}
    last_read: dict[str, int] = {}
    for place, probe in enumerate(probes):
        last_read |= dict.fromkeys(matching.walk_back(graph, [probe.tensor], stops)[1], place)
    last_read |= dict.fromkeys(graph.outputs | matching.walk_back(graph, graph.outputs - stops, stops)[1], len(probes))
    cuts: list[tuple[str, tuple[str, ...]]] = []
    live: list[str] = []
    for place, probe in enumerate(probes):
        live = [name for name in (*live, probe.tensor) if last_read.get(name, -1) > place]
        dequantized = {
            name: node.output[0] for name in live for node in graph.readers(name) if node.op_type == matching.DEQUANTIZE
        }
        if live:
            cuts.append((probe.layer, tuple(dequantized.get(name, name) for name in live)))
    return [*cuts[:-1], (cuts[-1][0], tuple(sorted(graph.outputs)))] if cuts else []


def save_prefix(model: Model, outputs: Sequence[str], path: Path) -> Model:
    """Saves the part of a model that some tensors need as a model of its own, with the same inputs.

    Raises:
        OutputError: the file cannot be written.
    """
    proto = read_proto(model)
    matching.extract_part(proto, outputs)
    return save_proto(proto, path)


def locate_on_device(device: Device, job: Job, work: Path) -> comparison.Located:
    """Bisects an ONNX model on a device and returns the layer at which most of the error arises.

    The job's model is cut at several places; each prefix runs on the device and, with every optimisation off, here. Its
    value is the least SQNR of its outputs, where all from 30 dB on counts as right: so much is lost by other rounding.
    Of the spans between two cuts, the one over which the SQNR falls most is cut in two, until it is one layer. For one
    wrong layer that takes 2 + log2(cuts) runs. A layer at which the SQNR falls by less than 6 dB is not named, since
    small errors of many layers add up to as much.

    Raises:
        ModelError: the job's model is no ONNX model.
        DeviceError: the device is not there.
    """
    model = load_model(job.model)
    cuts = plan_cuts(view_model(read_proto(model, weights=False)), plan_probes(model))
    found = {-1: _WRONG_DB}

    def measure(place: int) -> None:
        """Sets the least SQNR of an output of a prefix on the device; the lowest if one cannot be compared."""
        folder = work / str(place)
        prefix = save_prefix(model, cuts[place][1], folder / "prefix.onnx")
        reference = matching.run_unoptimized(prefix, job.samples)
        outputs = tuple(
            TensorSpec(name=name, dtype="string" if is_text(value) else value.dtype.name, shape=value.shape)
            for name, value in next(iter(reference), dict[str, Array]()).items()
        )
        kept = {node.name for node in read_proto(prefix, weights=False).graph.node}
        nodes = tuple(node for node in job.check.node_list if node.name in kept)
        check = msgspec.structs.replace(job.check, node_list=nodes)
        part = msgspec.structs.replace(job, model=prefix.path, outputs=outputs, check=check)
        run = device.run_job(part, folder / "run")
        ratio = -math.inf if run.failure is not None else find_least_db(compare_outputs(reference, run.outputs))
        found[place] = min(max(ratio, -_WRONG_DB), _WRONG_DB)

    def fall(span: tuple[int, int]) -> float:
        return found[span[0]] - found[span[1]]

    last, layer = len(cuts) - 1, None
    if cuts:
        measure(last)
    spans = [(-1, last)]
    while layer is None and fall(steepest := max(spans, key=fall)) >= _CLOSER_DB:
        begin, end = steepest
        if end - begin == 1:
            layer = cuts[end][0]
        else:
            middle = (begin + end) // 2
            measure(middle)
            spans.remove(steepest)
            spans += [(begin, middle), (middle, end)]
    grows = layer is None and found[last] < _WRONG_DB
    notes = (f"the error grows from layer to layer, at none by {_CLOSER_DB:.0f} dB",) if grows else ()
    return comparison.Located(layer=layer, runs=len(found) - 1, cuts=len(cuts), notes=notes)


def find_least_db(reports: Sequence[OutputReport]) -> float:
    """Returns the least SQNR of outputs; -inf if they did not come back whole and finite, or differ in exact values."""
    if not reports or any(
        report.mismatch is not None or report.non_finite or report.exact_match not in {None, 1.0} for report in reports
    ):
        return -math.inf
    return min((report.sqnr_db for report in reports if report.sqnr_db is not None), default=math.inf)
