"""Clip as Max and Min: NNAPI takes a Clip only from 0 to 6 and from -1 to 1, but any Max and Min."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "clip-to-min-max"


def write_min_max(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Clip with constant bounds a Max and a Min, in place, and returns the names of the nodes.

    The result is the same to the bit, for Clip is defined as Min(Max(x, low), high).
    """
    return replace_nodes(graph, opset, {"Clip"}, _expand) if opset >= 13 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS:
        return None
    names = [*node.input[1:], "", ""][:2]
    steps = [(op, name) for op, name in zip(("Max", "Min"), names, strict=True) if name]
    if not steps or any(graph.number(name) is None for _, name in steps):
        return None
    writer = Writer(graph=graph, node=node)
    value = node.input[0]
    for op, name in steps:
        value = writer.add(op, [value, name], "" if name == steps[-1][1] and op == steps[-1][0] else op.lower())
    return writer.nodes
