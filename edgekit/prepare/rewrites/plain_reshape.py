"""Reshape without `allowzero` where its shape holds no 0: PyTorch's dynamo exporter sets it on every one.

Without a 0 the attribute changes nothing, and there are providers that refuse it: OpenVINO the whole session, QNN as
it was built into ONNX Runtime before its plug-in each of the nodes, which cuts a MobileViT into 38 parts.
"""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "plain-reshape"


def write_plain_reshapes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Leaves `allowzero` out of each such Reshape, in place, and returns the names of the nodes."""
    return replace_nodes(graph, opset, {"Reshape"}, _expand) if opset >= 14 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    shape = graph.array(node.input[1])
    if not node.integer("allowzero", 0) or shape is None or 0 in shape.tolist():
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Reshape", node.input)
    return writer.nodes
