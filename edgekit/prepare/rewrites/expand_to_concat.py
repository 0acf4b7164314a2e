"""Expand of one axis as a Concat of copies, for who has no Expand: what repeats the keys of grouped attention."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "expand-to-concat"

# As many heads share keys in the largest models; a Concat of more copies costs more than it joins.
_MOST_COPIES = 16


def write_concats(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Expand that repeats one axis of size 1 as a Concat of its input with itself, in place.

    Returns the names of the nodes.
    """
    return replace_nodes(graph, opset, {"Expand"}, _expand)


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    before, after = (graph.value(name).static_shape for name in (node.input[0], node.output[0]))
    if before is None or after is None or len(before) != len(after):
        return None
    axes = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    if len(axes) != 1 or before[axes[0]] != 1 or not 1 < after[axes[0]] <= _MOST_COPIES:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Concat", [node.input[0]] * after[axes[0]], axis=axes[0])
    return writer.nodes
