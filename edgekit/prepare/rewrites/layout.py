"""Operators that only move elements, in the form that most providers take: Reshape, Expand, Gather, Pad, indices."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import made_by
from edgekit.graph.rewrite import Writer, replace_nodes

FLATTEN_TO_RESHAPE = "flatten-to-reshape"
# The Reshape that equals a Flatten at an axis: 0 keeps a dimension, -1 takes the rest.
_SHAPES = {0: (1, -1), 1: (0, -1)}


def write_flattens(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Flatten at axis 0 or 1 a Reshape, in place, and returns the names of the nodes."""
    changed: list[str] = []
    for node in graph.node:
        if node.op_type != "Flatten" or node.domain or opset < 5:
            continue
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        if axis not in _SHAPES:
            continue
        shape = f"{node.name}/shape"
        graph.initializer.append(numpy_helper.from_array(np.array(_SHAPES[axis], np.int64), shape))
        node.CopyFrom(helper.make_node("Reshape", [node.input[0], shape], list(node.output), node.name))
        changed.append(node.name)
    return tuple(changed)


PLAIN_RESHAPE = "plain-reshape"


def write_plain_reshapes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Leaves `allowzero` out of each such Reshape, in place, and returns the names of the nodes."""
    return replace_nodes(graph, opset, {"Reshape"}, _plain_reshape) if opset >= 14 else ()


def _plain_reshape(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    shape = graph.array(node.input[1])
    if not node.integer("allowzero", 0) or shape is None or 0 in shape.tolist():
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Reshape", node.input)
    return writer.nodes


EXPAND_TO_CONCAT = "expand-to-concat"

# As many heads share keys in the largest models; a Concat of more copies costs more than it joins.
_MOST_COPIES = 16


def write_concats(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Expand that repeats one axis of size 1 as a Concat of its input with itself, in place.

    Returns the names of the nodes.
    """
    return replace_nodes(graph, opset, {"Expand"}, _expand_to_concat)


def _expand_to_concat(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    before, after = (graph.value(name).static_shape for name in (node.input[0], node.output[0]))
    if before is None or after is None or len(before) != len(after):
        return None
    axes = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    if len(axes) != 1 or before[axes[0]] != 1 or not 1 < after[axes[0]] <= _MOST_COPIES:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Concat", [node.input[0]] * after[axes[0]], axis=axes[0])
    return writer.nodes


FLAT_EXPAND = "flat-expand"
_MOST_AXES = 4


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
    if source is None or wanted is None or shape is None or len(wanted) <= _MOST_AXES or 0 in wanted:
        return None
    groups = _join_axes((1,) * (len(wanted) - len(source)) + source, wanted)
    if len(groups) > _MOST_AXES:
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


PLAIN_GATHER = "plain-gather"
_GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})
_MOST_GATHERED = 4


def write_plain_gathers(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Gathers 32-bit integers in place of bools, and by a list of rows where a GatherND has five axes, in place.

    Returns the names of the gathers. No number changes.
    """
    return replace_nodes(graph, opset, _GATHERS, _plain_gather)


def _plain_gather(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    rows = _read_rows(graph, node)
    is_bool = graph.value(node.input[0]).dtype == "bool"
    if rows is None and not is_bool:
        return None
    writer = Writer(graph=graph, node=node)
    value, indices = node.input[0], node.input[1]
    if is_bool:
        value = writer.add("Cast", [value], "numbers", to=onnx.TensorProto.INT32)
    if rows is not None:
        indices = writer.constant("rows", rows, "int64")
    # The last node has no part to name it: it makes the output.
    value = writer.add(node.op_type, [value, indices], "picked", **node.attributes)
    if rows is not None:
        shape = writer.constant("shape", graph.value(node.output[0]).static_shape, "int64")
        value = writer.add("Reshape", [value, shape], "shaped" if is_bool else "")
    if is_bool:
        writer.add("Cast", [value], to=onnx.TensorProto.BOOL)
    return writer.nodes


def _read_rows(graph: Graph, node: Node) -> np.ndarray | None:
    """Returns the constant indices of a GatherND of many axes as rows, None for any other node."""
    indices = graph.array(node.input[1]) if node.op_type == "GatherND" else None
    if indices is None or indices.ndim <= _MOST_GATHERED or node.integer("batch_dims", 0):
        return None
    return None if graph.value(node.output[0]).static_shape is None else indices.reshape(-1, indices.shape[-1])


GATHER_TO_RESHAPE = "gather-to-reshape"


def reshape_gathers(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes a Reshape of each Gather whose constant indices count through the whole axis, in place.

    PyTorch's dynamo exporter writes `as_strided` so: a flat tensor of 64, gathered by 0 to 63 in the shape [1,64,1,1].
    QNN's compiler dies of it (SIGABRT) before a Transpose or a Conv. Returns the names of the nodes.
    """
    return replace_nodes(graph, opset, {"Gather"}, _gather_to_reshape) if opset >= 5 else ()


def _gather_to_reshape(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    sizes, indices = graph.value(node.input[0]).static_shape, graph.array(node.input[1])
    if not sizes or 0 in sizes or indices is None:
        return None
    axis = node.integer("axis", 0) % len(sizes)
    if not np.array_equal(np.where(indices < 0, indices + sizes[axis], indices).ravel(), np.arange(sizes[axis])):
        return None
    shape = (*sizes[:axis], *indices.shape, *sizes[axis + 1 :])
    writer = Writer(graph=graph, node=node)
    writer.add("Reshape", [node.input[0], writer.constant("shape", shape, "int64")])
    return writer.nodes


GATHER_FROM_START = "gather-from-start"


def count_from_start(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes constant indices of Gather that count from the end as those that count from the start, in place.

    NNAPI's GATHER has no negative ones: its provider takes the node, and the run fails. Returns the names of the nodes.
    """
    return replace_nodes(graph, opset, {"Gather"}, _gather_from_start)


def _gather_from_start(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    sizes, indices = graph.value(node.input[0]).static_shape, graph.array(node.input[1])
    if not sizes or indices is None or indices.min(initial=0) >= 0:
        return None
    size = sizes[node.integer("axis", 0) % len(sizes)]
    writer = Writer(graph=graph, node=node)
    counted = writer.constant("indices", np.where(indices < 0, indices + size, indices), indices.dtype.name)
    writer.add("Gather", [node.input[0], counted], **node.attributes)
    return writer.nodes


PAD_REFLECT = "pad-reflect"


def write_mirrors(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Pad of mode reflect with constant pads slices and Concats, an axis after the other, in place.

    Returns the names of the nodes. Values are copied only, so the result is the same to the bit.
    """
    return replace_nodes(graph, opset, {"Pad"}, _pad_reflect) if opset >= 13 else ()


def _pad_reflect(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
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


INDEX_TO_INT32 = "index-to-int32"
# Which input of an operator holds indices and may have 32 bits.
_INDEXED = {"Gather": 1, "GatherElements": 1}


def narrow_indices(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes the computed indices of each Gather 32 bits wide, in place, and returns the names of the nodes.

    Indices that were widened from 32 bits by a Cast are taken from before it. The result is the same to the bit.
    """
    return replace_nodes(graph, opset, _INDEXED, _index_to_int32) if opset >= 9 else ()


def _index_to_int32(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
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
