"""Tensors of a model to look at while a device runs it: those that it can give out and compute the same."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession
from edgekit.graph.constants import lift_constants
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, iterate_reads, read_proto, save_proto
from edgekit.model.outside import read_outside
from edgekit.model.tensors import TensorSpec
from edgekit.verify.matching.grids import Grid, read_grid
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE, list_computing
from edgekit.verify.matching.trace import ISOLATED_PREFIX, open_proto

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
            elif grid is not None or not (node.op_type in _ROUNDING or any(_rounds(reader) for reader in after)):
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


def _rounds(node: Node) -> bool:
    return node.op_type == QUANTIZE


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
