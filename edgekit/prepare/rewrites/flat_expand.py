"""Expand over few axes: what repeats heads of keys and values has five, and providers take four."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "flat-expand"
_MOST = 4


def flatten_expands(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Expand of five axes and more between Reshapes, with neighbouring axes as one, in place.

    Returns the names of the nodes. No number changes.
    """
    return replace_nodes(graph, opset, {"Expand"}, _flatten)


def _flatten(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    source, wanted = (graph.value(name).static_shape for name in (node.input[0], node.output[0]))
    if source is None or wanted is None or len(wanted) <= _MOST or 0 in wanted:
        return None
    groups = _join_axes((1,) * (len(wanted) - len(source)) + source, wanted)
    if len(groups) > _MOST:
        return None
    writer = Writer(graph=graph, node=node)
    before, after = ([pair[side] for pair in groups] for side in (0, 1))
    flat = writer.add("Reshape", [node.input[0], writer.constant("before", before, "int64")], "flat")
    grown = writer.add("Expand", [flat, writer.constant("after", after, "int64")], "grown")
    writer.add("Reshape", [grown, writer.constant("shape", wanted, "int64")])
    return writer.nodes


def _join_axes(source: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Returns sizes before and after with neighbours joined that grow both, or stay both."""
    groups: list[tuple[int, int]] = []
    for old, new in zip(source, wanted, strict=True):
        last = groups[-1] if groups else None
        if new == 1:
            continue
        if last is not None and (last[0] == last[1]) == (old == new):
            groups[-1] = (last[0] * old, last[1] * new)
        else:
            groups.append((old, new))
    return groups or [(1, 1)]
