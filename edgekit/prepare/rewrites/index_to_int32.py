"""Indices of 64 bits that are computed, as 32 bits: an index lies within a dimension, so it always fits."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "index-to-int32"
# Which input of an operator holds indices and may have 32 bits.
_INDEXED = {"Gather": 1, "GatherElements": 1}


def narrow_indices(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes the computed indices of each Gather 32 bits wide, in place, and returns the names of the nodes.

    Indices that were widened from 32 bits by a Cast are taken from before it. The result is the same to the bit.
    """
    return replace_nodes(graph, opset, _INDEXED, _expand) if opset >= 9 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    at = _INDEXED[node.op_type]
    if node.input[at] in graph.constants or graph.value(node.input[at]).dtype != "int64":
        return None
    writer = Writer(graph=graph, node=node)
    wide = graph.producers.get(node.input[at])
    if wide is not None and wide.op_type == "Cast" and graph.value(wide.input[0]).dtype == "int32":
        indices = wide.input[0]
    else:
        indices = writer.add("Cast", [node.input[at]], "indices", to=onnx.TensorProto.INT32)
    inputs = [indices if place == at else name for place, name in enumerate(node.input)]
    writer.add(node.op_type, inputs, axis=node.attributes.get("axis", 0))
    return writer.nodes
