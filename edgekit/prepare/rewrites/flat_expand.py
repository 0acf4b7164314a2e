"""Expand over few axes: what repeats heads of keys and values has five, and providers take four."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import made_by
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "flat-expand"
_MOST = 4


def flatten_expands(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Expand of five axes and more between Reshapes, with neighbouring axes as one, in place.

    Where a Reshape alone reads it, that Reshape and the Unsqueeze before, so that nothing of five axes stays. Returns
    the names of the nodes. No number changes.
    """
    return replace_nodes(graph, opset, {"Expand", "Reshape"}, _flatten)


def _flatten(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    expand = node if node.op_type == "Expand" else made_by(graph, node.input[0], "Expand")
    if expand is None or (_find_reader(graph, expand) or expand) is not node:
        return None
    source, wanted = (graph.value(name).static_shape for name in (expand.input[0], expand.output[0]))
    shape = graph.value(node.output[0]).static_shape
    if source is None or wanted is None or shape is None or len(wanted) <= _MOST or 0 in wanted:
        return None
    groups = _join_axes((1,) * (len(wanted) - len(source)) + source, wanted)
    if len(groups) > _MOST:
        return None
    opened = made_by(graph, expand.input[0], "Unsqueeze", "Reshape")
    writer = Writer(graph=graph, node=node)
    before, after = ([pair[side] for pair in groups] for side in (0, 1))
    x = expand.input[0] if opened is None else opened.input[0]
    flat = writer.add("Reshape", [x, writer.constant("before", before, "int64")], "flat")
    grown = writer.add("Expand", [flat, writer.constant("after", after, "int64")], "grown")
    writer.add("Reshape", [grown, writer.constant("shape", shape, "int64")])
    return writer.nodes


def _find_reader(graph: Graph, expand: Node) -> Node | None:
    """Returns the Reshape that alone reads an Expand."""
    name, readers = expand.output[0], graph.readers(expand.output[0])
    hidden = name in graph.outputs or name in graph.captured
    return readers[0] if len(readers) == 1 and readers[0].op_type == "Reshape" and not hidden else None


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
