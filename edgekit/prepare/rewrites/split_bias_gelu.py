"""Gelu of a sum as an Add and the Gelu: providers have these, and not the two in one."""

from collections.abc import Sequence

import onnx

from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "split-bias-gelu"


def split_bias_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each BiasGelu as Add and Gelu, and FastGelu with a bias as Add and FastGelu, in place.

    Returns the names of the nodes. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"BiasGelu", "FastGelu"}, _expand)


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS or not node.has_input(1):
        return None
    writer = Writer(graph=graph, node=node)
    total = writer.add("Add", node.input[:2], "sum")
    writer.add({"BiasGelu": "Gelu"}.get(node.op_type, node.op_type), [total], domain=ORT_DOMAIN)
    return writer.nodes
