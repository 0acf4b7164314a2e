"""Clip from zero to nothing, which is a Relu: every provider has one."""

from collections.abc import Sequence

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "clip-to-relu"


def write_relus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each such Clip a Relu, in place, and returns the names of the nodes; both give the same for any number."""
    return replace_nodes(graph, opset, {"Clip"}, _expand) if opset >= 11 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    dtype = graph.value(node.input[1]).dtype if node.has_input(1) else None
    if dtype is None or dtype not in FLOATS:
        return None
    low = graph.number(node.input[1])
    high = graph.number(node.input[2]) if node.has_input(2) else float("inf")
    limit = float(np.finfo(dtype).max)
    if low != 0 or high is None or high < limit:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Relu", node.input[:1])
    return writer.nodes
