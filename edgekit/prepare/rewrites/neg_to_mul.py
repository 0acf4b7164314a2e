"""Neg as a product with -1, for providers that have no Neg, such as Core ML."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "neg-to-mul"


def write_products(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Neg of floats as Mul by -1, in place; returns the names of the nodes."""
    return replace_nodes(graph, opset, {"Neg"}, _expand)


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    dtype = graph.value(node.input[0]).dtype
    if dtype not in FLOATS:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Mul", [node.input[0], writer.constant("minus_one", -1, dtype)])
    return writer.nodes
