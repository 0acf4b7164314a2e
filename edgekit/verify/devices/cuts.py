"""Cutting a model for bisection: its prefix, up to each place where only whole layers lie before the cut."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import onnx

from edgekit.graph.constants import lift_constants
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, read_proto, save_proto
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE, list_computing, sort_nodes


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
