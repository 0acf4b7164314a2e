"""Gelu as the formula with Erf: Core ML does not take the operator of ONNX Runtime's own domain."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "split-gelu"


def split_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each exact Gelu, of ONNX or ONNX Runtime, as x / 2 * (1 + Erf(x / sqrt 2)), in place.

    Returns the names of the nodes. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Gelu"}, _expand) if opset >= 9 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if node.attributes.get("approximate", "none") != "none":
        return None
    if graph.value(node.input[0]).dtype not in FLOATS:
        return None
    dtype, writer = str(graph.value(node.input[0]).dtype), Writer(graph=graph, node=node)
    root, one, half = (
        writer.constant(part, value, dtype) for part, value in (("root", 0.5**0.5), ("one", 1), ("half", 0.5))
    )
    bent = writer.add("Erf", [writer.add("Mul", [node.input[0], root], "narrow")], "bent")
    gate = writer.add("Add", [bent, one], "gate")
    halved = writer.add("Mul", [node.input[0], half], "halved")
    writer.add("Mul", [halved, gate])
    return writer.nodes
