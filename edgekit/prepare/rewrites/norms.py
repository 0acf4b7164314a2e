"""Layer and RMS normalisation, fused into one node or split into ReduceMean, Sub, Sqrt and Div."""

import math
from collections.abc import Sequence
from itertools import permutations

import msgspec
import numpy as np

from edgekit.graph import match
from edgekit.graph.constants import LAYER_NORM_SINCE
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import fraction_of, keeps_axis, known, made_by, mean_of, need, single, unshape
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite
from edgekit.model.tensors import MAX_HALF

# The first opsets with LayerNormalization, RMSNormalization, and with the axes of ReduceMean as an input.
_RMS_NORM_SINCE, _AXES_INPUT_SINCE = 23, 18


class _Norm(msgspec.Struct, frozen=True):
    """A normalisation of `data` along an axis, (x - mean) / sqrt(variance + epsilon) * scale + shift.

    An RMS normalisation has no mean. An absent scale or shift is "".
    """

    data: str
    axis: int
    epsilon: float
    has_mean: bool
    scale: str
    shift: str


def _find_norm(graph: Graph, name: str) -> _Norm:
    """Returns the normalisation that computes a value in parts, with its factors in any order.

    TensorFlow and Keras write x * f + (shift - mean(x) * f) with f = scale / sqrt(variance + epsilon).
    """
    scaled, shift, subtracted = _find_shift(graph, name)
    divisor = single(fraction_of(graph, scaled)[1])
    root = known(made_by(graph, unshape(graph, divisor), "Sqrt", "Pow"))
    need(root.op_type == "Sqrt" or graph.number(root.input[1]) == 0.5)
    variance, epsilon = match.split_number(graph, known(made_by(graph, root.input[0], "Add")))
    data, axis, squared = _find_variance(graph, variance)
    above = fraction_of(graph, scaled, (data, squared))[0]
    vectors = [each for each in above if each in graph.constants]
    moved = single([each for each in above if each not in graph.constants])
    has_mean = squared != data
    need(len(vectors) <= 1 and keeps_axis(graph, divisor, data, axis))
    if subtracted:
        over, under = fraction_of(graph, subtracted)
        mean = single([each for each in over if each not in graph.constants])
        need(
            has_mean and moved == data and mean_of(graph, mean) == (data, axis) and keeps_axis(graph, mean, data, axis)
        )
        need(sorted(over) == sorted((mean, *vectors)) and under == (divisor,))
    else:
        need(_find_mean(graph, moved) == (data, axis) if has_mean else moved == data)
    value = graph.value(data)
    along = [size if at == axis else 1 for at, size in enumerate(value.shape or ())]
    for each in filter(None, (*vectors, shift)):
        own = graph.value(each)
        # A constant of this type, with size 1 at all other axes.
        need(each in graph.constants and own.dtype == value.dtype)
        need([1] * (len(along) - len(own.shape or ())) + list(own.shape or ()) == along)
    return _Norm(data, axis, epsilon, has_mean, vectors[0] if vectors else "", shift)


def _find_shift(graph: Graph, name: str) -> tuple[str, str, str]:
    """Returns (a, b, c) for a value a + (b - c) with a constant b, (a, b, "") for a + b, and (a, "", "") for others."""
    added = made_by(graph, name, "Add")
    for scaled, shift in permutations(added.input) if added is not None else ():
        difference = made_by(graph, shift, "Sub")
        if shift in graph.constants:
            return scaled, shift, ""
        if difference is not None and difference.input[0] in graph.constants:
            return scaled, difference.input[0], difference.input[1]
    return name, "", ""


def _find_variance(graph: Graph, name: str) -> tuple[str, int, str]:
    """Returns x, the axis, and the squared tensor where a value is a variance of x or a mean of its squares.

    The variance is the mean of (x - mean(x))^2, or max(0, mean(x^2) - mean(x)^2), as JAX and Flax write it: then the
    squared tensor is "".
    """
    variance = unshape(graph, name)
    variance = unshape(graph, match.other_operand(graph, made_by(graph, variance, "Max"), 0.0) or variance)
    difference = made_by(graph, variance, "Sub")
    squares, axis = mean_of(graph, variance if difference is None else difference.input[0])
    data = known(match.square_of(graph, squares))
    if difference is None:
        centred = match.attempt(_find_mean, graph, data)
        return (data, axis, data) if centred is None else (*centred, data)
    mean = known(match.square_of(graph, unshape(graph, difference.input[1])))
    need(mean_of(graph, mean) == (data, axis))
    return data, axis, ""


def _find_mean(graph: Graph, name: str) -> tuple[str, int]:
    """Returns x and an axis where a value is x - mean(x) along this axis."""
    node = known(made_by(graph, name, "Sub"))
    mean = mean_of(graph, node.input[1])
    need(mean[0] == node.input[0] and keeps_axis(graph, node.input[1], *mean))
    return mean


@node_rewrite("join-layer-norm", {"Add", "Div", "Mul"}, since=LAYER_NORM_SINCE)
def join_layer_norm(writer: Writer) -> None:
    """Fuses (x - mean(x)) / sqrt(variance(x) + epsilon) * scale + shift along one axis into one node.

    JAX and Flax write the variance as mean(x^2) - mean(x)^2, a small difference of large numbers, which is lost in 8
    bits and in half precision. An axis that is not the last, as of channels in [N, C, H, W], becomes the last between
    two Transposes. The last bits may differ (1e-5 relative).
    """
    graph, node = writer.graph, writer.node
    norm = _find_norm(graph, node.output[0])
    dtype, shape = graph.value(norm.data).dtype, graph.value(norm.data).shape or ()
    readers = graph.readers(node.output[0])
    need(norm.has_mean and dtype in FLOATS)
    # If the readers are normalisations too, this node is a part of a larger match, with scale or shift.
    need(not readers or any(match.attempt(_find_norm, graph, reader.output[0]) is None for reader in readers))
    size = known(shape[norm.axis])
    ones = "" if norm.scale else writer.constant("scale", np.ones(size), dtype or "")
    vectors = [ones or writer.reshaped("scale", norm.scale, [size])]
    vectors += [writer.reshaped("shift", norm.shift, [size])] if norm.shift else []
    order = [*(axis for axis in range(len(shape)) if axis != norm.axis), norm.axis]
    if norm.axis == len(shape) - 1:
        writer.add("LayerNormalization", [norm.data, *vectors], axis=-1, epsilon=norm.epsilon)
    else:
        moved = writer.add("Transpose", [norm.data], "moved", perm=order)
        normal = writer.add("LayerNormalization", [moved, *vectors], "normal", axis=-1, epsilon=norm.epsilon)
        writer.add("Transpose", [normal], perm=[order.index(axis) for axis in range(len(shape))])


@node_rewrite("join-moments", {"BatchNormalization"}, since=LAYER_NORM_SINCE, floats=True)
def join_moments(writer: Writer) -> None:
    """Rewrites a BatchNormalization by the mean and variance of its own input, [1, rows, ...], as a LayerNormalization.

    So tf2onnx writes Keras's LayerNormalization: each row is a channel, and the scale and shift of the layer follow in
    nodes of their own. The last bits may differ (1e-5 relative).
    """
    graph, node, shape = writer.graph, writer.node, writer.shape()
    need(len(shape) > 2 and shape[0] == 1 and 0 not in shape)
    axes, size = [0, *range(2, len(shape))], math.prod(shape[2:])

    def reduces(reduced: Node) -> bool:
        return list(match.reduced_axes(graph, reduced) or ()) == axes

    squeezed = made_by(graph, node.input[3], "Squeeze")
    mean = known(made_by(graph, squeezed.input[0] if squeezed else node.input[3], "ReduceMean"))
    quotient = known(made_by(graph, node.input[4], "Div"))
    squares = known(made_by(graph, quotient.input[0], "ReduceSumSquare"))
    centred = known(made_by(graph, squares.input[0], "Sub"))
    # Without its axes, a mean of as many rows as columns would be taken from the columns.
    need(centred.input == (writer.x, mean.output[0]) and mean.input[0] == writer.x and mean.integer("keepdims", 1) == 1)
    need(graph.number(quotient.input[1]) == size and reduces(mean) and reduces(squares))
    for name, plain in zip(node.input[1:3], (1, 0), strict=True):
        need((known(graph.inline(name)) == plain).all())
    flat = writer.reshape(writer.x, "rows", [shape[1], size], "flat")
    ones, epsilon = writer.constant("scale", np.ones(size)), node.number("epsilon", 1e-5)
    normal = writer.add("LayerNormalization", [flat, ones], "normal", axis=-1, epsilon=epsilon)
    writer.reshape(normal, "shape", writer.made)


@node_rewrite("join-rms-norm", {"Mul"})
def join_rms_norm(writer: Writer) -> None:
    """Fuses x / sqrt(mean(x * x) + epsilon) * scale over the last axis into one node.

    The last node of the pattern is replaced: by ONNX's RMSNormalization from opset 23 on, before that by ONNX Runtime's
    SimplifiedLayerNormalization. The last bits may differ (1e-5 relative).
    """
    graph = writer.graph
    norm = _find_norm(graph, writer.node.output[0])
    need(not norm.has_mean and norm.scale and graph.is_float_constant(norm.scale))
    # The scale must be a vector along the last axis.
    need(len(graph.value(norm.scale).shape or ()) == 1 and norm.axis == len(graph.value(norm.data).shape or ()) - 1)
    op = "RMSNormalization" if writer.opset >= _RMS_NORM_SINCE else "SimplifiedLayerNormalization"
    writer.add(op, [norm.data, norm.scale], axis=-1, epsilon=norm.epsilon)


def _split_norm(writer: Writer) -> None:
    """Splits a float LayerNormalization into (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias.

    An RMSNormalization, or SimplifiedLayerNormalization, ONNX Runtime's older name of it, becomes
    x / sqrt(mean(x * x) + epsilon) * scale. An InstanceNormalization is the layer normalisation of each channel. The
    formulas are those of ONNX. The last bits may differ (1e-5 relative).
    """
    node, rank, vectors = writer.node, len(writer.shape()), list(writer.node.input[1:3])
    need(not any(node.output[1:]) and writer.dtype == "float32")
    axes = list(range(node.attributes.get("axis", -1) % rank, rank))
    if node.op_type == "InstanceNormalization":
        axes, shape = list(range(2, rank)), [*writer.shape()[1:2], *[1] * (rank - 2)]
        need(axes and all(tuple(known(writer.graph.constants.get(name)).dims) == (shape[0],) for name in vectors))
        vectors = [writer.reshaped(part, name, shape) for part, name in zip(("scale", "shift"), vectors, strict=True)]
    centred = node.input[0]
    if node.op_type in {"InstanceNormalization", "LayerNormalization"}:
        centred = writer.add("Sub", [centred, reduce_axes(writer, "ReduceMean", centred, "mean", axes)], "centred")
    squares = writer.add("Mul", [centred, centred], "squares")
    variance = reduce_axes(writer, "ReduceMean", squares, "variance", axes)
    epsilon = writer.constant("epsilon", node.attributes.get("epsilon", 1e-5))
    root = writer.add("Sqrt", [writer.add("Add", [variance, epsilon], "moved")], "root")
    normal = writer.add("Div", [centred, root], "normal")
    scaled = writer.add("Mul", [normal, vectors[0]], "scaled" if node.has_input(2) else "")
    if node.has_input(2):
        writer.add("Add", [scaled, vectors[1]])


split_instance_norm = node_rewrite("split-instance-norm", {"InstanceNormalization"}, since=6)(_split_norm)
split_layer_norm = node_rewrite("split-layer-norm", {"LayerNormalization"})(_split_norm)
split_rms_norm = node_rewrite("split-rms-norm", {"RMSNormalization", "SimplifiedLayerNormalization"})(_split_norm)


def reduce_axes(writer: Writer, op: str, value: str, part: str, axes: Sequence[int], *, keepdims: int = 1) -> str:
    """Adds a ReduceMean or ReduceMax along axes, and returns its result."""
    if writer.opset < _AXES_INPUT_SINCE:
        return writer.add(op, [value], part, axes=axes, keepdims=keepdims)
    return writer.add(op, [value, writer.ints(f"{part}/axes", axes)], part, keepdims=keepdims)


# The smallest normal number of float16.
_SMALL = 2.0**-14


@node_rewrite("split-l2-norm", {"ReduceL2"}, floats=True)
def split_l2_norm(writer: Writer) -> None:
    """Writes a ReduceL2 as the root of a mean of squares, of numbers that their mean size divides.

    In half precision the squares of numbers above 255 would be infinite, and those of numbers below 2e-4 zero. The n
    quotients by sqrt(n) * mean(|x|) have a mean of squares between 1 / n, if all are equal, and 1, if one alone is not
    zero. NNAPI has ReduceMean, and no ReduceMax.
    """
    x, before, after = writer.x, writer.shape(), writer.made
    listed = [axis % len(before) for axis in known(match.reduced_axes(writer.graph, writer.node))]
    count = math.prod(before[axis] for axis in set(listed))
    need(listed and 0 not in before and count <= MAX_HALF)
    size = writer.add("Max", [x, writer.add("Mul", [x, writer.constant("minus_one", -1)], "negative")], "size")
    usual = reduce_axes(writer, "ReduceMean", size, "usual", listed)
    wide = writer.add("Mul", [usual, writer.constant("root_count", math.sqrt(count))], "wide")
    divisor = writer.add("Max", [wide, writer.constant("small", _SMALL)], "divisor")
    scaled = writer.add("Div", [x, divisor], "scaled")
    mean = reduce_axes(writer, "ReduceMean", writer.add("Mul", [scaled, scaled], "squares"), "mean", listed)
    root = writer.add("Sqrt", [writer.add("Mul", [mean, writer.constant("count", count)], "sum")], "root")
    is_kept = len(after) == len(before)
    norm = writer.add("Mul", [root, divisor], "" if is_kept else "norm")
    if not is_kept:
        writer.reshape(norm, "shape", after)


# The output that is the sum.
_SUM = 3


@node_rewrite("split-skip-norm", {"SkipSimplifiedLayerNormalization", "SkipLayerNormalization"}, floats=True)
def split_skip_norm(writer: Writer) -> None:
    """Rewrites Skip(Simplified)LayerNormalization(x, skip) to (Simplified)LayerNormalization(x + bias + skip).

    The bias is optional. The last bits may differ (1e-5 relative).
    """
    node = writer.node
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    need(not any(node.output[1:_SUM]) and (simple or writer.opset >= LAYER_NORM_SINCE))
    # The inputs from the third on: scale, then beta, which only the full norm has, then the bias of the sum.
    scale, *rest = node.input[2:]
    shift, bias = ("", *rest, "")[:2] if simple else (*rest, "", "")[:2]
    source = writer.add("Add", [writer.x, bias], "biased") if bias else writer.x
    total = writer.add("Add", [source, node.input[1]], "sum", into=(*node.output, "", "", "")[_SUM])
    op = "SimplifiedLayerNormalization" if simple else "LayerNormalization"
    writer.add(op, [total, scale, *filter(None, [shift])], axis=-1, epsilon=node.number("epsilon", 1e-12))


_IDS, _SEGMENTS, _WORDS, _PLACES, _KINDS, _GAIN, _SHIFT, _MASK, _POSITIONS = range(9)


@node_rewrite("split-embed-norm", {"EmbedLayerNormalization"}, since=LAYER_NORM_SINCE)
def split_embed_norm(writer: Writer) -> None:
    """Rewrites EmbedLayerNormalization to LayerNormalization of the sum of Gathers from its embedding tables.

    The tables are those of words, positions and, if there are segment ids, segments. The last bits may differ (1e-5
    relative).
    """
    node, add, ids = writer.node, writer.add, writer.shape(_IDS)
    table = writer.graph.value(node.given(_PLACES))
    need(len(ids) == 2)
    batch, length = ids
    need(all(node.has_input(at) for at in (_WORDS, _PLACES, _GAIN, _SHIFT)) and table.dtype in FLOATS)
    need(node.has_input(_SEGMENTS) == node.has_input(_KINDS) and length <= (table.static_shape or (0,))[0])
    places = node.given(_POSITIONS) or writer.ints("places", np.arange(length)[None])
    words = add("Gather", [node.input[_WORDS], node.input[_IDS]], "words", axis=0)
    _, count, whole = (*node.output, "", "")[:3]
    has_kinds, counted = node.has_input(_KINDS), {"part": "counted", "into": count}
    placed = add("Gather", [node.input[_PLACES], places], "positions", axis=0)
    total = add("Add", [words, placed], "placed", into="" if has_kinds else whole)
    if has_kinds:
        kinds = add("Gather", [node.input[_KINDS], node.input[_SEGMENTS]], "kinds", axis=0)
        total = add("Add", [total, kinds], "sum", into=whole)
    # This output counts the unmasked tokens of each sample; as in ONNX Runtime it is 0 without a mask.
    if count and node.has_input(_MASK):
        add("ReduceSum", [node.input[_MASK], writer.ints("axis", [1])], keepdims=0, **counted)
    elif count:
        add("Identity", [writer.constant("none", [0] * batch, "int32")], **counted)
    norm = [total, node.input[_GAIN], node.input[_SHIFT]]
    add("LayerNormalization", norm, axis=-1, epsilon=node.number("epsilon", 1e-12))


@node_rewrite("planar-instance-norm", {"InstanceNormalization"}, since=5)
def planar_instance_norm(writer: Writer) -> None:
    """Rewrites an InstanceNormalization of five axes or more to one of four, as its mean is that of all of them."""
    node, shape = writer.node, writer.shape()
    need(len(shape) > max(_PLANES) and 0 not in shape)
    flat = writer.reshape(node.input[0], "plane", [*shape[:3], math.prod(shape[3:])], "flat")
    normal = writer.add(node.op_type, [flat, *node.input[1:]], "normal", **node.attributes)
    writer.reshape(normal, "shape", shape)


_PLANES = (3, 4)


@node_rewrite("batch-norm-to-conv", {"BatchNormalization"}, since=9, floats=True)
def batch_norm_to_conv(writer: Writer) -> None:
    """Rewrites a BatchNormalization of 3 or 4 axes as a Conv of each channel, and others as Mul and Add, for QNN.

    Between integers QNN's kernel is wrong for some gains and variances (targets/qnn/NOTES.md). The weight of the Conv
    is one number per channel, which a scale per channel holds exactly.
    """
    graph, node = writer.graph, writer.node
    shape = known(graph.value(node.input[0]).shape)
    gain, shift, mean, variance = (known(graph.inline(name)).astype(np.float64) for name in node.input[1:5])
    need(shape and not any(node.output[1:]))
    gain = gain / np.sqrt(variance + float(node.attributes.get("epsilon", 1e-5)))
    shift, ones = shift - mean * gain, (1,) * (len(shape) - 2)
    if len(shape) in _PLANES:
        weight = writer.constant("weight", gain.reshape(-1, 1, *ones))
        writer.add("Conv", [node.input[0], weight, writer.constant("shift", shift)], group=gain.size)
    else:
        scaled = writer.add("Mul", [node.input[0], writer.constant("gain", gain.reshape(-1, *ones))], "scaled")
        writer.add("Add", [scaled, writer.constant("shift", shift.reshape(-1, *ones))])
