"""Operators that move elements, and windows over them, as most providers take them: Reshape, Gather, Pad, pooling."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import msgspec
import numpy as np
import onnx

from edgekit.graph.constants import MOVES, RESHAPES
from edgekit.graph.match import known, made_by, need, reduced_axes
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite, replace_nodes, rewrite
from edgekit.graph.spatial import Windows, find_picks, has_windows, place_windows, read_modes
from edgekit.model.tensors import MAX_HALF, Array
from edgekit.prepare.rewrites.norms import reduce_axes

# The first opset whose Slice has its axes as an input.
_SLICE_INPUTS_SINCE = 10

# The Reshape that equals a Flatten at an axis: 0 keeps a dimension, -1 takes the rest.
_FLATTENED = {0: (1, -1), 1: (0, -1)}


@node_rewrite("flatten-to-reshape", {"Flatten"}, since=5)
def flatten_to_reshape(writer: Writer) -> None:
    """Writes a Flatten at axis 0 or 1 as Reshape."""
    writer.reshape(writer.x, "shape", known(_FLATTENED.get(writer.node.integer("axis", 1))))


@node_rewrite("plain-reshape", {"Reshape"}, since=14)
def plain_reshape(writer: Writer) -> None:
    """Leaves `allowzero` out of a Reshape whose shape holds no 0."""
    need(writer.node.integer("allowzero", 0) and 0 not in writer.array(1).tolist())
    writer.add("Reshape", writer.node.input)


@node_rewrite("squeeze-to-scalar", {"Reshape"}, since=13)
def squeeze_to_scalar(writer: Writer) -> None:
    """Writes a Reshape of one element to no axes as a Squeeze of all axes."""
    need(writer.graph.value(writer.node.output[0]).shape == () and writer.shape())
    writer.add("Squeeze", [writer.x])


# In the largest models, this many heads share a key; a Concat of more copies, of an edge too, costs more than it saves.
_MOST_COPIES = 16


@node_rewrite("expand-to-concat", {"Expand"})
def expand_to_concat(writer: Writer) -> None:
    """Writes an Expand that repeats one axis of size 1 as a Concat of its input with itself."""
    before, after = writer.shape(), writer.made
    need(len(before) == len(after))
    axes = [axis for axis, sizes in enumerate(zip(before, after, strict=True)) if sizes[0] != sizes[1]]
    need(len(axes) == 1 and before[axes[0]] == 1 < after[axes[0]] <= _MOST_COPIES)
    writer.add("Concat", [writer.x] * after[axes[0]], axis=axes[0])


_MOST_AXES = 4


@node_rewrite("flat-expand", {"Expand", "Reshape"})
def flatten_expand(writer: Writer) -> None:
    """Rewrites an Expand of five or more axes to Reshape, Expand and Reshape, with neighbouring axes merged.

    A Reshape that is the only reader is replaced too, and the Unsqueeze or Reshape before the Expand, so that no tensor
    of five axes remains. Values are only copied.
    """
    graph, node = writer.graph, writer.node
    expand = node if node.op_type == "Expand" else known(made_by(graph, node.input[0], "Expand"))
    readers = graph.readers(expand.output[0])
    # If a Reshape is the only reader of the Expand, the Reshape is the node to replace.
    is_hidden = expand.output[0] in graph.outputs | graph.captured
    is_reshaped = len(readers) == 1 and readers[0].op_type == "Reshape" and not is_hidden
    need((readers[0] if is_reshaped else expand) is node)
    source, wanted = (known(graph.value(name).static_shape) for name in (expand.input[0], expand.output[0]))
    need(len(wanted) > _MOST_AXES and 0 not in wanted)
    groups = _join_axes((1,) * (len(wanted) - len(source)) + source, wanted)
    need(len(groups) <= _MOST_AXES)
    opened = made_by(graph, expand.input[0], "Unsqueeze", "Reshape")
    before, after = ([pair[side] for pair in groups] for side in (0, 1))
    shape = writer.made
    flat = writer.reshape(expand.input[0] if opened is None else opened.input[0], "before", before, "flat")
    writer.reshape(writer.add("Expand", [flat, writer.ints("after", after)], "grown"), "shape", shape)


# Sums and products, and curves that QNN computes along at most four axes.
_ELEMENTWISE = frozenset(
    {"Add", "Div", "Elu", "Floor", "HardSwish", "Mul", "Neg", "Selu", "Softplus", "Sqrt", "Sub", "Tanh"}
)
# Before, a Softmax is that of all axes from its own to the last.
_SOFTMAX_SINCE = 13
_REDUCING = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "Softmax"})
_CUTTING = frozenset({"Gather", "Slice", "Split"})
_Run = tuple[int, ...]


@rewrite("fewer-axes", {"Transpose"} | _CUTTING | _ELEMENTWISE | _REDUCING)
def fewer_axes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Rewrites Gather, Slice, Split, Transpose, sums and curves of five or more axes to ones of fewer.

    They lie between Reshapes then. A Gather, Slice or Split of one axis needs three. In a Transpose, axes of size 1 are
    left out, and neighbours that stay neighbours are one: one image is cut into windows with four or five axes in place
    of six. So are neighbouring axes of a sum along which the same operands are repeated. A Reshape of what was only
    reshaped reads the first tensor, so that none of the many axes remains. The results are the same to the bit.
    """
    sources = dict[str, str]()

    def view_at_once(writer: Writer) -> None:
        view, node = writer.graph, writer.node
        source = sources[node.output[0]] = sources.get(node.input[0], node.input[0])
        known, given = view.static_shape(node.output[0]), view.array(node.input[1]) if node.has_input(1) else None
        # Of a Reshape that was just made, the shape is its constant.
        shape = given if known is None and node.op_type == "Reshape" else known
        many = view.static_shape(node.input[0])
        if source != node.input[0] and shape is not None and (many is None or len(many) > _MOST_AXES):
            writer.add("Reshape", [source, writer.constant("sizes", shape, "int64")])

    if opset < _SLICE_INPUTS_SINCE:
        return ()
    changed: list[str] = []
    for ops, write in (
        (_CUTTING, _cut_three_axes), ({"Transpose"}, _turn_fewer_axes), (_ELEMENTWISE, _sum_fewer_axes),
        (_REDUCING, _reduce_fewer_axes),
    ):  # fmt: skip
        changed += replace_nodes(graph, opset, ops, write, floats=True)
    if changed:
        replace_nodes(graph, opset, RESHAPES, view_at_once)
    return tuple(changed)


def _cut_three_axes(writer: Writer) -> None:
    """Writes a Slice or Split of one of five or more axes as one of three, and a Gather that reads or makes so many."""
    graph, node, shape = writer.graph, writer.node, writer.shape()
    after = [known(graph.static_shape(name)) for name in node.output]
    need(max(map(len, (shape, *after))) > _MOST_AXES and 0 not in shape)
    axes = writer.array(3) if node.op_type == "Slice" else None
    need(axes is None or axes.size == 1)
    axis = (node.integer("axis", 0) if axes is None else int(axes.item())) % len(shape)
    flat = [math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])]
    indices = writer.array(1) if node.op_type == "Gather" else np.ones(1)
    need(indices.size)
    given, kept = [writer.reshape(writer.x, "flat_sizes", flat, "flat"), *node.input[1:]], dict(node.attributes)
    if node.op_type == "Gather":
        given[1] = writer.reshaped("indices", node.input[1], [indices.size])
    if axes is None:
        kept["axis"] = 1
    else:
        given[3] = writer.ints("axis", [1])
    made = writer.add(node.op_type, given, "cut", **kept)
    cuts = [made, *(f"{made}_{place}" for place in range(1, len(after)))]
    writer.nodes[-1].output[:] = cuts
    for place, (part, name, sizes) in enumerate(zip(cuts, node.output, after, strict=True)):
        writer.reshape(part, f"sizes_{place}", sizes, f"part_{place}", into=name)


def _turn_fewer_axes(writer: Writer) -> None:
    """Writes a Transpose of five or more axes as one of the runs of axes that stay side by side."""
    shape, perm = writer.shape(), known(writer.node.entries("perm"))
    need(len(shape) > _MOST_AXES and 0 not in shape)
    wide = [axis for axis in perm if shape[axis] > 1]
    places, runs = {axis: place for place, axis in enumerate(sorted(wide))}, list[_Run]()
    for axis in wide:
        if runs and places[axis] == places[runs[-1][-1]] + 1:
            runs[-1] += (axis,)
        else:
            runs.append((axis,))
    now, sizes = sorted(runs), {run: math.prod(shape[axis] for axis in run) for run in runs}
    value, is_few = writer.x, len(runs) <= _MOST_AXES
    if is_few:
        value = writer.reshape(value, "flat_sizes", [sizes[run] for run in now], "flat")
        if runs != now:
            value = writer.add("Transpose", [value], "turned", perm=[now.index(run) for run in runs])
    # Many runs get their order by Transposes that swap two neighbouring blocks of them.
    for place, run in enumerate(() if is_few else runs):
        start = now.index(run)
        if start == place:
            continue
        # All that follows in the wanted order too comes along.
        end = start
        while end < len(now) and now[end] == runs[place + end - start]:
            end += 1
        blocks = [now[:place], now[place:start], now[start:end], now[end:]]
        flat_sizes = [math.prod(map(sizes.__getitem__, each)) for each in blocks]
        flat = writer.reshape(value, f"flat_{place}_sizes", flat_sizes, f"flat_{place}")
        value = writer.add("Transpose", [flat], f"turned_{place}", perm=[0, 2, 1, 3])
        now = [*blocks[0], *blocks[2], *blocks[1], *blocks[3]]
    writer.reshape(value, "sizes", [shape[axis] for axis in perm])


def _reduce_fewer_axes(writer: Writer) -> None:
    """Writes a reduction or Softmax of five or more axes, along neighbouring ones, as one of three."""
    node, shape, made = writer.node, writer.shape(), writer.made
    is_softmax = node.op_type == "Softmax"
    need(not is_softmax or writer.opset >= _SOFTMAX_SINCE)
    axes = (node.integer("axis", -1),) if is_softmax else known(reduced_axes(writer.graph, node))
    places = sorted(axis % len(shape) for axis in axes)
    first, last = places[0], places[-1] + 1
    need(len(shape) > _MOST_AXES and 0 not in shape and places == [*range(first, last)])
    flat = [math.prod(shape[:first]), math.prod(shape[first:last]), *((math.prod(shape[last:]),) * (last < len(shape)))]
    value = writer.reshape(writer.x, "flat_sizes", flat, "flat")
    if is_softmax:
        value = writer.add(node.op_type, [value], "made", axis=1)
    else:
        value = reduce_axes(writer, node.op_type, value, "made", [1], keepdims=0)
    writer.reshape(value, "sizes", made)


def _sum_fewer_axes(writer: Writer) -> None:
    """Writes a sum, product or curve of five or more axes as one of the runs of axes that are repeated alike."""
    node, made = writer.node, writer.made
    need(len(made) > _MOST_AXES and 0 not in made)
    operands = [(1,) * (len(made) - len(shape)) + shape for shape in map(writer.shape, range(len(node.input)))]
    *shapes, result = zip(*_join_axes(*operands, made), strict=True)
    need(len(result) < len(made))
    given = [
        writer.reshaped(f"flat_{at}", name, shape)
        if name in writer.graph.constants
        else writer.reshape(name, f"flat_sizes_{at}", shape, f"flat_{at}")
        for at, (name, shape) in enumerate(zip(node.input, shapes, strict=True))
    ]
    writer.reshape(writer.add(node.op_type, given, "flat", **node.attributes), "sizes", made)


def _join_axes(*shapes: Sequence[int]) -> list[tuple[int, ...]]:
    """Merges neighbouring axes if the same of these shapes are repeated along both, up to the last shape.

    Returns the size of each merged axis in each shape.
    """
    groups: list[tuple[int, ...]] = []
    for sizes in zip(*shapes, strict=True):
        last = groups[-1] if groups else None
        if sizes[-1] == 1:
            continue
        if last is not None and all(
            (old == last[-1]) == (new == sizes[-1]) for old, new in zip(last, sizes, strict=True)
        ):
            groups[-1] = tuple(old * new for old, new in zip(last, sizes, strict=True))
        else:
            groups.append(sizes)
    return groups or [(1,) * len(shapes)]


@node_rewrite("plain-gather", {"Gather", "GatherElements", "GatherND"})
def plain_gather(writer: Writer) -> None:
    """Gathers bools as int32, and rewrites GatherND with constant indices to a Gather of rows between Reshapes.

    A Cast restores the bools. Values are only copied. QNN takes no indices of five axes, and computes GatherND wrongly
    for some shapes (targets/qnn/NOTES.md).
    """
    node, is_bool, after = writer.node, writer.dtype == "bool", writer.graph.static_shape(writer.node.output[0])
    rows, flat = _find_rows(writer) if node.op_type == "GatherND" and after else (None, [])
    need(is_bool or rows is not None)
    value, indices, op, given = node.input[0], node.input[1], node.op_type, dict(node.attributes)
    if is_bool:
        value = writer.add("Cast", [value], "numbers", to=onnx.TensorProto.INT32)
    if rows is not None:
        value = writer.reshape(value, "sizes", flat, "flat")
        op, given, indices = "Gather", {"axis": 0}, writer.ints("rows", rows)
    # The last node has no part name: it gets the name and output of the replaced node.
    value = writer.add(op, [value, indices], "picked", **given)
    if rows is not None:
        value = writer.reshape(value, "shape", after or (), "shaped" if is_bool else "")
    if is_bool:
        writer.add("Cast", [value], to=onnx.TensorProto.BOOL)


def _find_rows(writer: Writer) -> tuple[Array | None, list[int]]:
    """Returns the rows that constant indices of a GatherND pick, and the two sizes of the data as a list of rows."""
    before, array = writer.graph.static_shape(writer.x), writer.graph.array(writer.node.input[1])
    if not before or array is None or writer.node.integer("batch_dims", 0):
        return None, []
    count = array.shape[-1]
    places = np.where(array < 0, array + before[:count], array)
    # A node whose indices lie outside fails when it runs.
    if not ((places >= 0) & (places < before[:count])).all():
        return None, []
    rows = np.ravel_multi_index(tuple(np.moveaxis(places, -1, 0)), before[:count]).ravel()
    return rows, [math.prod(before[:count]), math.prod(before[count:])]


@node_rewrite("gather-to-reshape", {"Gather"}, since=5)
def gather_to_reshape(writer: Writer) -> None:
    """Rewrites a Gather whose constant indices enumerate the whole axis in order to Reshape.

    PyTorch's dynamo exporter writes `as_strided` like this, e.g. a tensor [64] with the indices 0 to 63 of shape
    [1,64,1,1]. QNN's compiler crashes on it (SIGABRT) before a Transpose or a Conv.
    """
    sizes, axis, _, places = _read_indices(writer)
    need(0 not in sizes and np.array_equal(places.ravel(), np.arange(sizes[axis])))
    writer.reshape(writer.x, "shape", (*sizes[:axis], *places.shape, *sizes[axis + 1 :]))


def _read_indices(writer: Writer) -> tuple[tuple[int, ...], int, Array, Array]:
    """Returns the shape of a Gather's data, its axis, and its constant indices, as written and non-negative."""
    sizes, indices = writer.shape(), writer.array(1)
    need(sizes)
    axis = writer.node.integer("axis", 0) % len(sizes)
    return sizes, axis, indices, np.where(indices < 0, indices + sizes[axis], indices)


@node_rewrite("gather-from-start", {"Gather"})
def gather_from_start(writer: Writer) -> None:
    """Rewrites negative constant indices of a Gather, which count from the end, to non-negative ones.

    NNAPI's GATHER has no negative indices: its provider takes the node, and the run fails.
    """
    *_, indices, counted = _read_indices(writer)
    need((indices < 0).any())
    writer.add("Gather", [writer.x, writer.constant("indices", counted, indices.dtype.name)], **writer.node.attributes)


@node_rewrite("unsqueeze-arg", {"ArgMax", "ArgMin"}, since=13)
def unsqueeze_arg(writer: Writer) -> None:
    """Rewrites ArgMax or ArgMin with keepdims to one without it and an Unsqueeze.

    After a convolution, ONNX Runtime's layout transformation to NHWC then leaves no Transpose of the indices.
    """
    node = writer.node
    need(node.integer("keepdims", 1))
    dropped = writer.add(node.op_type, node.input, "dropped", **{**node.attributes, "keepdims": 0})
    writer.add("Unsqueeze", [dropped, writer.ints("axis", [node.integer("axis", 0)])])


@node_rewrite("cast-by-int32", {"Cast"}, since=6)
def cast_by_int32(writer: Writer) -> None:
    """Casts uint8 to float32 by way of int32, for QNN, whose own Cast turns each number except 0 into 1.

    A Cast before a QuantizeLinear, with which the provider fuses it, is right and stays (targets/qnn/NOTES.md).
    """
    ops = {reader.op_type for reader in writer.graph.readers(writer.node.output[0])}
    need(writer.dtype == "uint8" and writer.node.integer("to", 0) == onnx.TensorProto.FLOAT)
    need(ops != {"QuantizeLinear"})
    whole = writer.add("Cast", [writer.x], "whole", to=onnx.TensorProto.INT32)
    writer.add("Cast", [whole], to=onnx.TensorProto.FLOAT)


@node_rewrite("even-split", {"Split"}, since=18)
def write_number_of_parts(writer: Writer) -> None:
    """Writes the number of parts of a Split in place of their equal sizes, which NNAPI's provider does not read."""
    sizes = _read_parts(writer)
    need(len(set(sizes)) == 1)
    made = writer.copy(writer.node)
    del made.input[1:]
    made.attribute.append(onnx.helper.make_attribute("num_outputs", len(sizes)))


def _read_parts(writer: Writer) -> list[int]:
    """Returns the stated sizes of the parts of a Split."""
    sizes = writer.array(1)
    need(sizes.shape == (len(writer.node.output),))
    return [int(size) for size in sizes]


@node_rewrite("split-to-slices", {"Split"}, since=13, floats=True)
def split_to_slices(writer: Writer) -> None:
    """Writes a Split in parts of several sizes as Slices, the same to the bit: NNAPI has only equal parts."""
    node, sizes = writer.node, _read_parts(writer)
    need(len(set(sizes)) > 1 and all(node.output))
    at = [writer.ints(f"at_{place}", [end]) for place, end in enumerate((0, *np.cumsum(sizes).tolist()))]
    axes = writer.ints("axes", [node.integer("axis", 0)])
    for place, name in enumerate(node.output):
        part = "" if name == node.output[-1] else f"part_{place}"
        writer.add("Slice", [node.input[0], at[place], at[place + 1], axes], part, into=name)


@node_rewrite("write-pads", {"ConvTranspose"})
def write_pads(writer: Writer) -> None:
    """Writes the default pads of a ConvTranspose, zeros: Core ML's provider reads them where there are none."""
    shape, given = known(writer.graph.value(writer.node.input[1]).shape), writer.node.attributes
    # ONNX Runtime's optimizer writes the default of auto_pad, too.
    need(given.get("auto_pad", "NOTSET") == "NOTSET" and not {"pads", "output_shape"} & given.keys())
    writer.copy(writer.node).attribute.append(onnx.helper.make_attribute("pads", [0] * 2 * (len(shape) - 2)))


@node_rewrite("fixed-pads", {"ConvTranspose"})
def fix_pads(writer: Writer) -> None:
    """Writes the pads that ONNX computes from the `output_shape` or the `auto_pad` of a ConvTranspose.

    tf2onnx writes an `output_shape`, which Core ML's provider refuses and other rewrites of ConvTranspose do not read.
    """
    node = writer.node
    given = {name: value for name, value in node.attributes.items() if name not in _PADDING}
    pads = known(find_pads(writer))
    writer.add("ConvTranspose", node.input, **given, pads=pads)


_PADDING = frozenset({"auto_pad", "output_shape", "pads"})


def find_pads(writer: Writer) -> list[int] | None:
    """Returns the pads that the `output_shape` or `auto_pad` of a ConvTranspose stands for, None if it has neither."""
    node, made, given = writer.node, writer.made[2:], dict(writer.node.attributes)
    if not given.get("output_shape") and given.get("auto_pad", "NOTSET") not in {"SAME_LOWER", "SAME_UPPER"}:
        return None
    size, kernel = writer.shape()[2:], known(writer.graph.value(node.input[1]).static_shape)[2:]
    kept = {name: value for name, value in given.items() if name not in _PADDING}
    bare = msgspec.structs.replace(node, attributes={"kernel_shape": kernel, **kept})
    need(len(size) == len(kernel) == len(made) and has_windows(bare, len(made)))
    whole = place_windows(bare, size, kernel).sizes
    surplus = [size - wanted for size, wanted in zip(whole, made, strict=True)]
    need(all(each >= 0 for each in surplus))
    smaller = [each // 2 for each in surplus]
    larger = [each - half for each, half in zip(surplus, smaller, strict=True)]
    # An odd pad lies at the end with SAME_UPPER, else at the beginning.
    begins, ends = (smaller, larger) if given.get("auto_pad") == "SAME_UPPER" else (larger, smaller)
    return [*begins, *ends]


@node_rewrite("floor-pool", {"AveragePool", "MaxPool"}, since=10)
def floor_pool(writer: Writer) -> None:
    """Writes the pads that the `ceil_mode` of a pooling adds at the ends, or leaves out those of a window beyond them.

    QNN computes a window that begins behind the input, which ONNX leaves out, and wrong averages
    (targets/qnn/NOTES.md).
    """
    node, spatial = writer.node, writer.shape()[2:]
    need(node.integer("ceil_mode", 0) and node.attributes.get("auto_pad", "NOTSET") == "NOTSET")
    need(not any(node.output[1:]) and has_windows(node, len(spatial)))
    kernel = node.entries("kernel_shape") or ()
    windows = place_windows(node, spatial, kernel)
    begin, end, needed = *windows[2:4], _round_up(windows, spatial, kernel)[1]
    # Pads that are stated count then, and those of ceil_mode do not.
    need(not node.integer("count_include_pad", 0) or (needed <= end).all())
    kept = {name: value for name, value in node.attributes.items() if name != "ceil_mode"}
    writer.add(node.op_type, node.input, **{**kept, "pads": [*begin.tolist(), *needed.tolist()]})


@node_rewrite("part-pool", {"MaxPool"}, since=10)
def part_pool(writer: Writer) -> None:
    """Writes a quantized MaxPool of 8 x 8 that moves by as much as one of 2 x 2 and one of 4 x 4, for QNN.

    With four channels and more the HTP's kernel for 8 bits is wrong, and that for 16 may end the program
    (targets/qnn/NOTES.md). The maximum of maxima is the same.
    """
    node, read = writer.node, known(writer.graph.producers.get(writer.x))
    need(read.op_type == "DequantizeLinear" and read.has_input(2) and not any(node.output[1:]))
    need(node.entries("kernel_shape") == node.entries("strides") == (8, 8) and not any(node.entries("pads") or ()))
    need({*(node.entries("dilations") or (1,))} == {1} and not node.integer("ceil_mode", 0))
    need(node.attributes.get("auto_pad", "NOTSET") in {"NOTSET", "VALID"})
    pairs = writer.add("MaxPool", [writer.x], "pairs", kernel_shape=[2, 2], strides=[2, 2])
    again = writer.requantize(pairs, read.input[1:3], read.domain, ("rounded", "again"))
    writer.add("MaxPool", [again], kernel_shape=[4, 4], strides=[4, 4])


def _round_up(windows: Windows, spatial: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[tuple[int, ...], Array]:
    """Returns how many windows a `ceil_mode` makes along each axis, and the pads at the end that these need."""
    stride, dilation, begin, end, _ = windows
    size, reach = np.array(spatial), (np.array(kernel) - 1) * dilation + 1
    last = np.ceil((size + begin + end - reach) / stride).astype(int)
    last -= last * stride >= size + begin
    return tuple((last + 1).tolist()), np.maximum(last * stride + reach - size - begin, 0)


@node_rewrite("plain-count", {"AveragePool"}, since=7, floats=True)
def leave_out_count(writer: Writer) -> None:
    """Leaves `count_include_pad` out of an AveragePool without pads, where there are none to count."""
    node = writer.node
    need(node.integer("count_include_pad", 0) and not any(node.entries("pads") or ()))
    need(not node.integer("ceil_mode", 0) and node.attributes.get("auto_pad", "NOTSET") in {"NOTSET", "VALID"})
    kept = {name: value for name, value in node.attributes.items() if name != "count_include_pad"}
    writer.add(node.op_type, node.input, **kept)


# A pooling of a real network needs far fewer; a hostile shape would fill the memory.
_MOST_WEIGHTS = 2**24


@node_rewrite("plain-average", {"AveragePool"}, since=7, floats=True)
def plain_average(writer: Writer) -> None:
    """Writes a padded AveragePool as a Conv of each channel, times a constant for each place, for QNN.

    The HTP's float kernels compute some paddings wrongly; which ones depends on the window, the channels and the size
    (targets/qnn/NOTES.md). The Conv divides by the size of the whole window, and the constant corrects that at the
    borders: for a window of 9 elements of which 4 count, it is 9/4. Elements of the input count and, with
    `count_include_pad`, the stated pads; what a `ceil_mode` adds never does.
    """
    node, (_, channels, *sides) = writer.node, writer.shape()
    kernel, spatial = node.entries("kernel_shape") or (), tuple(sides)
    need(has_windows(node, len(spatial)))
    windows, dims = place_windows(node, spatial, kernel), (channels, 1, *kernel)
    stride, _, begin, end, sizes = windows
    low, high = (begin, end) if node.integer("count_include_pad", 0) else (0 * begin, 0 * end)
    if node.integer("ceil_mode", 0):
        sizes, end = _round_up(windows, spatial, kernel)
    pads = [*begin.tolist(), *end.tolist()]
    need(any(pads) and "dilations" not in node.attributes and math.prod(dims) <= _MOST_WEIGHTS)
    factor = np.ones(())
    for axis, count in enumerate(sizes):
        first = np.arange(count) * stride[axis] - begin[axis]
        counted = np.minimum(first + kernel[axis], spatial[axis] + high[axis]) - np.maximum(first, -low[axis])
        factor = np.multiply.outer(factor, kernel[axis] / counted)
    weight, is_whole = writer.constant("weight", np.full(dims, 1 / math.prod(kernel))), (factor == 1).all()
    settings = {"group": channels, "kernel_shape": kernel, "strides": stride.tolist(), "pads": pads}
    averaged = writer.add("Conv", [node.input[0], weight], "" if is_whole else "average", **settings)
    if not is_whole:
        writer.add("Mul", [averaged, writer.constant("factor", factor[None, None])])


@node_rewrite("cast-by-floor", {"Cast"}, since=9)
def cast_by_floor(writer: Writer) -> None:
    """Writes a Cast of floats to whole numbers and back as Sign(x) * Floor(Abs(x)), for QNN, which drops both Casts."""
    whole = known(made_by(writer.graph, writer.x, "Cast"))
    kind = writer.graph.value(whole.input[0]).dtype
    need(writer.dtype in {"int32", "int64", "uint32"} and kind in FLOATS)
    need(kind == writer.graph.value(writer.node.output[0]).dtype)
    floor = writer.add("Floor", [writer.add("Abs", whole.input, "size")], "floor")
    writer.add("Mul", [writer.add("Sign", whole.input, "sign"), floor])


# The end of a Slice to the last element.
_LAST = int(np.iinfo(np.int64).max)


@node_rewrite("pad-reflect", {"Pad"}, since=13)
def pad_reflect(writer: Writer) -> None:
    """Rewrites a Pad of mode reflect, edge or wrap with constant pads to Slices and Concats, one axis after the other.

    Values are copied only, so the result is the same to the bit.
    """
    mode = str(writer.node.attributes.get("mode", ""))

    def copy(value: str, part: str, axis: int, count: int, *, is_before: bool) -> list[str]:
        if mode == "edge":
            need(count <= _MOST_COPIES)
            return [_slice(writer, value, part, axis, (0, 1, 1) if is_before else (-1, _LAST, 1))] * count
        if mode == "wrap":
            need(count <= writer.shape()[axis])
            return [_slice(writer, value, part, axis, (-count, _LAST, 1) if is_before else (0, count, 1))]
        # Mode reflect does not repeat the edge element itself.
        start, end = (count, 0) if is_before else (-2, -2 - count)
        return [_slice(writer, value, part, axis, (start, end, -1))]

    need(mode in {"edge", "reflect", "wrap"})
    # One axis after the other gives the same corners as ONNX's modes.
    _pad_by_axis(writer, mode, copy)


@node_rewrite("pad-axes", {"Pad"}, since=18)
def pad_all_axes(writer: Writer) -> None:
    """Writes the pads of a Pad for all axes, in place of those that it names.

    ONNX Runtime's change to NHWC permutes the pads as if they were those of all axes, and the first run fails.
    """
    shape = known(writer.graph.value(writer.x).shape)
    pads, axes = writer.array(1), writer.array(3)
    need(pads.size == 2 * axes.size and ((axes >= -len(shape)) & (axes < len(shape))).all())
    whole = np.zeros((2, len(shape)), np.int64)
    whole[:, axes.ravel()] = pads.reshape(2, -1)
    given = [writer.x, writer.ints("pads", whole.ravel()), *filter(None, writer.node.input[2:3])]
    writer.add("Pad", given, **writer.node.attributes)


@node_rewrite("pad-edge", {"Pad"}, since=13, floats=True)
def pad_edge(writer: Writer) -> None:
    """Rewrites a float Pad of mode edge with constant pads to Slice, Tile and Concat, axis by axis, for QNN.

    With few channels, or three axes, the HTP copies what lies beyond the data (targets/qnn/NOTES.md).
    """
    rank = len(known(writer.graph.value(writer.x).shape))
    _pad_by_axis(writer, "edge", partial(_repeat_edge, writer, rank))


def _repeat_edge(
    writer: Writer, rank: int, value: str, part: str, axis: int, count: int, *, is_before: bool
) -> list[str]:
    """Adds copies of the first or the last element of an axis."""
    bounds = (0, 1, 1) if is_before else (-1, _LAST, 1)
    if count == 1:
        return [_slice(writer, value, part, axis, bounds)]
    edge = _slice(writer, value, f"{part}-edge", axis, bounds)
    copies = [count if each == axis else 1 for each in range(rank)]
    return [writer.add("Tile", [edge, writer.ints(f"{part}/copies", copies)], part)]


def _pad_by_axis(writer: Writer, mode: str, make: Callable[..., list[str]]) -> None:
    """Rewrites a Pad of a mode to Concats with what `make` gives for each side of each axis that is padded."""
    node, pads = writer.node, writer.array(1)
    need(node.attributes.get("mode", "constant") == mode and not node.has_input(3))
    need(pads.size % 2 == 0 and (pads >= 0).all())
    wanted = [(axis, *pair) for axis, pair in enumerate(pads.reshape(2, -1).T.tolist()) if any(pair)]
    value = node.input[0]
    for axis, before, after in wanted:
        first = make(value, f"axis_{axis}/before", axis, before, is_before=True) if before else []
        last = make(value, f"axis_{axis}/after", axis, after, is_before=False) if after else []
        name = "" if axis == wanted[-1][0] else f"axis_{axis}"
        value = writer.add("Concat", [*first, value, *last], name, axis=axis)


def _slice(writer: Writer, value: str, part: str, axis: int, bounds: tuple[int, int, int]) -> str:
    """Adds a Slice of one axis; `bounds` are its start, end and step."""
    start, end, step = bounds
    numbers = {"start": [start], "end": [end], "axis": [axis], "step": [step]}
    names = writer.constants({f"{part}/{name}": number for name, number in numbers.items()}, "int64")
    return writer.add("Slice", [value, *names], part)


# The first are those that most providers have.
_NEAREST = (("asymmetric", "floor"), ("half_pixel", "round_prefer_ceil"), ("align_corners", "round_prefer_ceil"))


@node_rewrite("plain-nearest", {"Resize"}, since=13)
def plain_nearest(writer: Writer) -> None:
    """Rewrites a nearest Resize of fixed sizes to one with other modes that pick the same elements, or to Gathers."""
    graph, node, modes = writer.graph, writer.node, read_modes(writer.node)
    need(modes != _NEAREST[0])
    picks = known(find_picks(graph, node, modes))
    for plain in _NEAREST:
        if all(map(np.array_equal, picks, find_picks(graph, node, plain) or ())):
            named = dict(zip(("coordinate_transformation_mode", "nearest_mode"), plain, strict=True))
            writer.add("Resize", node.input, **{**node.attributes, **named})
            return
    value = writer.x
    axes = [
        axis for axis, (size, each) in enumerate(zip(writer.shape(), picks, strict=True)) if [*each] != [*range(size)]
    ]
    for axis in axes:
        indices = writer.ints(f"axis_{axis}/indices", picks[axis])
        value = writer.add("Gather", [value, indices], "" if axis == axes[-1] else f"axis_{axis}", axis=axis)


# Coordinate modes in which an element lies where the scale says, and not where the ends do.
_SCALED = frozenset({"asymmetric", "half_pixel", "pytorch_half_pixel"})
_MOST_DENOMINATOR, _SAME_PLACE = 1000, 1e-4


@node_rewrite("exact-resize", {"Resize"}, since=13)
def exact_resize(writer: Writer) -> None:
    """Rewrites a linear Resize to one whose scales are the quotients of its sizes, after / before, on each axis.

    Providers compute with the quotient in place of the scale. For example, a scale of 1/2 makes 16 of 33 elements, and
    a provider takes 16/33 for the scale. So the last element, which no result reads, is cut off before the Resize,
    since 16/32 is 1/2. Where the input is too short, its last element is repeated, as ONNX does beyond the end, and the
    results that this adds are cut off behind the Resize. The last bits may differ (1e-6 relative).
    """
    node, given = writer.node, writer.node.attributes
    before, after, scales = writer.shape(), writer.made, writer.array(2)
    need(scales.size == len(before) == len(after))
    need(given.get("mode") == "linear" and not node.integer("antialias", 0) and "axes" not in given)
    need(given.get("coordinate_transformation_mode", "half_pixel") in _SCALED)
    fitted = [_fit_scale(*each) for each in zip(before, after, scales.tolist(), strict=True)]
    need(fitted != [*zip(before, after, strict=True)])
    value = _cut(writer, node.input[0], "cut", before, [old for old, _ in fitted])
    for axis, (old, _) in enumerate(fitted):
        if old > before[axis]:
            part = f"axis_{axis}"
            more = _repeat_edge(writer, len(before), value, f"{part}/after", axis, old - before[axis], is_before=False)
            value = writer.add("Concat", [value, *more], part, axis=axis)
    made = [new for _, new in fitted]
    kept = {name: each for name, each in given.items() if name != "keep_aspect_ratio_policy"}
    resized = [value, "", "", writer.ints("sizes", made)]
    _cut(writer, writer.add("Resize", resized, "longer" if made != [*after] else "", **kept), "", made, after)


def _fit_scale(before: int, after: int, scale: float) -> tuple[int, int]:
    """Returns a number of elements and of results with this quotient, at least as many results, if there are such.

    A number of the kind `after` / `scale` loses only elements that no result reads.
    """
    need(0.0 < scale < math.inf)
    if abs(before * scale - after) < _SAME_PLACE:
        return before, after
    ratio = Fraction(scale).limit_denominator(_MOST_DENOMINATOR)
    made = -(-after // max(ratio.numerator, 1)) * ratio.numerator
    needed = made * ratio.denominator // max(ratio.numerator, 1)
    need(abs(made - needed * scale) < _SAME_PLACE and 0 < needed <= 2 * before and (after > 1 or made == 1))
    return needed, made


def _cut(writer: Writer, value: str, part: str, sizes: Sequence[int], wanted: Sequence[int]) -> str:
    """Adds a Slice of the first elements along the axes where fewer are wanted, if there are any."""
    axes = [axis for axis, pair in enumerate(zip(sizes, wanted, strict=True)) if pair[1] < pair[0]]
    numbers = {"starts": [0] * len(axes), "ends": [wanted[axis] for axis in axes], "axes": axes}
    names = writer.constants({f"{part or 'end'}/{name}": each for name, each in numbers.items()}, "int64")
    return writer.add("Slice", [value, *names], part) if axes else value


@node_rewrite("planar-resize", {"Resize"}, since=13, floats=True)
def planar_resize(writer: Writer) -> None:
    """Rewrites a linear Resize of the last three of five axes to one of two axes and one of one, between Reshapes.

    QNN computes a linear Resize of five axes wrongly (targets/qnn/NOTES.md). The last bits may differ (1e-6 relative).
    """
    node, before, after = writer.node, writer.shape(), writer.made
    place = 2 if node.has_input(2) else 3
    given = writer.array(place)
    need(len(before) == given.size == 5 and node.attributes.get("mode") == "linear" and before[:2] == after[:2])
    need(node.attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch")
    (rows, channels, depth), plane = before[:3], math.prod(after[3:])
    value, numbers = node.input[0], given.tolist()
    for part, shape, made, scales in (
        ("planes", (rows, channels * depth, *before[3:]), after[3:], numbers[3:]),
        ("lines", (rows, channels, depth, plane), (after[2], plane), [numbers[2], 1]),
    ):
        flat = writer.reshape(value, f"{part}/flat", shape, f"{part}-flat")
        wanted = [1, 1, *scales] if place == 2 else [*shape[:2], *made]
        sizes = writer.constant(f"{part}/sizes", wanted, given.dtype.name)
        value = writer.add("Resize", [flat, *[""] * (place - 1), sizes], part, **node.attributes)
    writer.reshape(value, "shape", after)


@node_rewrite("whole-compare", {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}, since=9)
def compare_whole(writer: Writer) -> None:
    """Compares integers before their Cast to floats, such as places with lengths, or one of them with a constant.

    Each side of a quantized comparison has a scale of its own, so two numbers that are equal may differ in 8 bits.
    Floats hold all whole numbers up to 2^24, so that far the result is the same.
    """
    graph, sides = writer.graph, writer.node.input
    casts = [made_by(graph, name, "Cast") for name in sides]
    kinds = {graph.value(cast.input[0]).dtype for cast in casts if cast is not None}
    kind = known(next((each for each in ("int32", "int64") if kinds == {each}), None))
    need({graph.value(name).dtype for name in sides} & FLOATS)

    def find_integers(at: int) -> str:
        if (cast := casts[at]) is not None:
            return cast.input[0]
        values = writer.array(at).astype(np.float64)
        need((values == np.rint(values)).all() and (np.abs(values) < np.iinfo(np.int32).max).all())
        return writer.constant(f"whole_{at}", values, kind)

    writer.add(writer.node.op_type, [find_integers(at) for at in range(len(sides))])


@node_rewrite("index-to-int32", {"Gather", "GatherElements"}, since=9)
def narrow_indices(writer: Writer) -> None:
    """Casts the computed indices of a Gather to int32, or takes them from before a Cast from int32.

    The result is the same to the bit.
    """
    graph, node, (data, indices) = writer.graph, writer.node, writer.node.input
    need(indices not in graph.constants and graph.value(indices).dtype == "int64")
    wide = made_by(graph, indices, "Cast")
    if wide is not None and graph.value(wide.input[0]).dtype == "int32":
        indices = wide.input[0]
    else:
        indices = writer.add("Cast", [indices], "indices", to=onnx.TensorProto.INT32)
    writer.add(node.op_type, [data, indices], axis=node.attributes.get("axis", 0))


# Kernels of 8 entries are computed rightly.
_LEAST_KERNEL = 9


@node_rewrite("clip-input", {"Conv"}, since=12, floats=True)
def clip_input(writer: Writer) -> None:
    """Puts a Clip to what half precision holds before a float Conv that reads an input of the model in NHWC, for QNN.

    The HTP gives zeros for such a Conv with strides of 2 and 2 and a kernel of 9 or more entries along an axis, as the
    keyword network of MLPerf Tiny begins (targets/qnn/NOTES.md). It computes in half precision, so the Clip changes
    nothing.
    """
    node, graph = writer.node, writer.graph
    need(node.entries("strides") == (2, 2) and node.integer("group", 1) == 1)
    need(max(writer.shape(1)[2:]) >= _LEAST_KERNEL)
    maker = known(graph.producers.get(writer.x))
    need(maker.op_type in MOVES and maker.input[0] in graph.inputs)
    limits = writer.constants({"low": -MAX_HALF, "high": MAX_HALF})
    writer.copy(node).input[0] = writer.add("Clip", [writer.x, *limits], "clipped")
