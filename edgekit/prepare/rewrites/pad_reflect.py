"""Pad that mirrors the edge, as slices that run backwards and a Concat: many providers pad with a constant only."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "pad-reflect"


def write_mirrors(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Pad of mode reflect with constant pads slices and Concats, an axis after the other, in place.

    Returns the names of the nodes. Values are copied only, so the result is the same to the bit.
    """
    return replace_nodes(graph, opset, {"Pad"}, _expand) if opset >= 13 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if node.attributes.get("mode", "constant") != "reflect":
        return None
    pads = graph.array(node.input[1])
    if pads is None or node.has_input(3) or int(pads.min(initial=0)) < 0:
        return None
    rank = pads.size // 2
    wanted = [(axis, int(pads[axis]), int(pads[axis + rank])) for axis in range(rank)]
    # An axis after the other gives the corners, too, as numpy's and ONNX's reflect do.
    wanted = [(axis, before, after) for axis, before, after in wanted if before or after]
    if not wanted:
        return None
    writer = Writer(graph=graph, node=node)
    value = node.input[0]
    for axis, before, after in wanted:
        left = [_mirror(writer, value, f"axis_{axis}/before", (before, 0, axis))] if before else []
        # From the last but one backwards: reflect does not repeat the edge itself.
        right = [_mirror(writer, value, f"axis_{axis}/after", (-2, -2 - after, axis))] if after else []
        last = axis == wanted[-1][0]
        value = writer.add("Concat", [*left, value, *right], "" if last else f"axis_{axis}", axis=axis)
    return writer.nodes


def _mirror(writer: Writer, value: str, part: str, span: tuple[int, int, int]) -> str:
    start, end, axis = span
    names = [
        writer.constant(f"{part}/{name}", [number], "int64")
        for name, number in (("start", start), ("end", end), ("axis", axis), ("step", -1))
    ]
    return writer.add("Slice", [value, *names], part)
