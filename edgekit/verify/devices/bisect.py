"""Finding the first layer that a device computes wrongly, where the device shows outputs alone.

The model is cut into prefixes, each up to a place where only one tensor passes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import onnx

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.samples import Samples
from edgekit.devices.device import Device, Job
from edgekit.graph.constants import lift_constants
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, load_model, read_proto, save_proto
from edgekit.model.tensors import Array, Tensors, TensorSpec
from edgekit.verify.facts import Located
from edgekit.verify.matching.match import DEQUANTIZE, QUANTIZE, list_computing, sort_nodes
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport


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
    outputs = tuple(_describe(name, value) for name, value in next(iter(reference), dict[str, Array]()).items())
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


def _describe(name: str, value: Array) -> TensorSpec:
    return TensorSpec(name=name, dtype="string" if value.dtype.kind in "UO" else value.dtype.name, shape=value.shape)
