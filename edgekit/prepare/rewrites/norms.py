"""Layer and RMS normalisation, fused into one node or split into ReduceMean, Sub, Sqrt and Div."""

import numpy as np

from edgekit.graph.match import made_by, mean_of, quotient_of, root_of, square_of, vector_beside
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite
from edgekit.prepare.rewrites.split_attention import input_of, real

# The first opsets with RMSNormalization, and with the axes of ReduceMean as an input.
_RMS_NORM_SINCE, _AXES_INPUT_SINCE = 23, 18


@node_rewrite("join-rms-norm", {"Mul"}, "write the parts of an RMS normalisation as one node, {count}")
def join_rms_norm(writer: Writer) -> None:
    """Fuses x / sqrt(mean(x * x) + epsilon) * scale over the last axis into one node.

    The last node of the pattern is replaced: by ONNX's RMSNormalization from opset 23 on, before that by ONNX Runtime's
    SimplifiedLayerNormalization. The last bits may differ (1e-5 relative).
    """
    graph = writer.graph
    scaled = vector_beside(graph, writer.node)
    quotient = quotient_of(graph, scaled[0]) if scaled is not None else None
    root = root_of(graph, quotient[1]) if quotient is not None else None
    if scaled is None or quotient is None or root is None:
        return
    x, (squares, epsilon) = quotient[0], root
    # The scale is a float32 constant, so x has this type even where type inference gave none.
    is_float = x not in graph.constants and graph.value(x).dtype in {None, "float32"}
    # With x - mean(x) the pattern is a layer normalisation, split for a provider without it.
    centred = made_by(graph, x, "Sub")
    is_centred = centred is not None and mean_of(graph, centred.input[1]) == centred.input[0]
    if square_of(graph, mean_of(graph, squares) or "") != x or not is_float or is_centred:
        return
    op = "RMSNormalization" if writer.opset >= _RMS_NORM_SINCE else "SimplifiedLayerNormalization"
    writer.add(op, [x, scaled[1]], axis=-1, epsilon=epsilon)


@node_rewrite(
    "split-layer-norm", {"LayerNormalization"}, "write {count} of LayerNormalization as means, differences and a root"
)
def split_layer_norm(writer: Writer) -> None:
    """Splits a float LayerNormalization into (x - mean) / sqrt(mean((x - mean)^2) + epsilon) * scale + bias.

    The formula is that of ONNX. The last bits may differ (1e-5 relative).
    """
    _split_norm(writer, centres=True)


@node_rewrite(
    "split-rms-norm",
    {"RMSNormalization", "SimplifiedLayerNormalization"},
    "write {count} of RMS normalisation as a mean of squares and a root",
)
def split_rms_norm(writer: Writer) -> None:
    """Splits a float RMSNormalization into x / sqrt(mean(x * x) + epsilon) * scale.

    SimplifiedLayerNormalization, ONNX Runtime's older name of it, is split too. The formula is that of ONNX. The last
    bits may differ (1e-5 relative).
    """
    _split_norm(writer, centres=False)


def _split_norm(writer: Writer, *, centres: bool) -> None:
    node, shape = writer.node, writer.graph.value(writer.node.input[0]).static_shape
    if any(node.output[1:]) or shape is None or writer.dtype != "float32":
        return
    axes = list(range(node.attributes.get("axis", -1) % len(shape), len(shape)))
    centred = node.input[0]
    if centres:
        centred = writer.add("Sub", [centred, _mean(writer, centred, "mean", axes)], "centred")
    variance = _mean(writer, writer.add("Mul", [centred, centred], "squares"), "variance", axes)
    epsilon = writer.constant("epsilon", node.attributes.get("epsilon", 1e-5))
    root = writer.add("Sqrt", [writer.add("Add", [variance, epsilon], "moved")], "root")
    normal = writer.add("Div", [centred, root], "normal")
    scaled = writer.add("Mul", [normal, node.input[1]], "scaled" if node.has_input(2) else "")
    if node.has_input(2):
        writer.add("Add", [scaled, node.input[2]])


def _mean(writer: Writer, value: str, part: str, axes: list[int]) -> str:
    if writer.opset < _AXES_INPUT_SINCE:
        return writer.add("ReduceMean", [value], part, axes=axes, keepdims=1)
    return writer.add("ReduceMean", [value, writer.constant(f"{part}/axes", axes, "int64")], part, keepdims=1)


_LAYER_NORM_SINCE = 17
_SUM = 3


@node_rewrite(
    "split-skip-norm",
    {"SkipSimplifiedLayerNormalization", "SkipLayerNormalization"},
    "write {count} of Skip(Simplified)LayerNormalization as Add and the norm",
    floats=True,
)
def split_skip_norm(writer: Writer) -> None:
    """Rewrites Skip(Simplified)LayerNormalization(x, skip) to (Simplified)LayerNormalization(x + bias + skip).

    The bias is optional. The last bits may differ (1e-5 relative).
    """
    node = writer.node
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    if any(node.output[1:_SUM]) or (not simple and writer.opset < _LAYER_NORM_SINCE):
        return
    # The inputs from the third on: scale, then beta, which only the full norm has, then the bias of the sum.
    scale, *rest = node.input[2:]
    shift, bias = ("", *rest, "")[:2] if simple else (*rest, "", "")[:2]
    source = node.input[0]
    if bias:
        source = writer.add("Add", [source, bias], "biased")
    total = writer.add("Add", [source, node.input[1]], "sum")
    if len(node.output) > _SUM and node.output[_SUM]:
        # Other nodes read the sum under the name of this output.
        writer.nodes[-1].output[0] = total = node.output[_SUM]
    op = "SimplifiedLayerNormalization" if simple else "LayerNormalization"
    writer.add(op, [total, scale, *filter(None, [shift])], axis=-1, epsilon=node.attributes.get("epsilon", 1e-5))


_IDS, _SEGMENTS, _WORDS, _PLACES, _KINDS, _GAIN, _SHIFT, _MASK, _POSITIONS = range(9)


@node_rewrite(
    "split-embed-norm",
    {"EmbedLayerNormalization"},
    "write {count} of EmbedLayerNormalization as tables, a sum and the norm",
    since=_LAYER_NORM_SINCE,
)
def split_embed_norm(writer: Writer) -> None:
    """Rewrites EmbedLayerNormalization to LayerNormalization of the sum of Gathers from its embedding tables.

    The tables are those of words, positions and, if there are segment ids, segments. The last bits may differ (1e-5
    relative).
    """
    graph, node, add = writer.graph, writer.node, writer.add
    shape, table = graph.value(node.input[_IDS]).static_shape, graph.value(input_of(node, _PLACES))
    is_whole = all(node.has_input(at) for at in (_WORDS, _PLACES, _GAIN, _SHIFT))
    if shape is None or len(shape) != 2 or not is_whole or table.dtype not in FLOATS:
        return
    if node.has_input(_SEGMENTS) != node.has_input(_KINDS) or shape[1] > (table.static_shape or (0,))[0]:
        return
    places = input_of(node, _POSITIONS) or writer.constant("places", np.arange(shape[1])[None], "int64")
    words = add("Gather", [node.input[_WORDS], node.input[_IDS]], "words", axis=0)
    total = add("Add", [words, add("Gather", [node.input[_PLACES], places], "positions", axis=0)], "placed")
    if node.has_input(_KINDS):
        total = add("Add", [total, add("Gather", [node.input[_KINDS], node.input[_SEGMENTS]], "kinds", axis=0)], "sum")
    outputs = (*node.output, "", "")
    if outputs[2]:
        writer.nodes[-1].output[0] = total = outputs[2]
    if outputs[1]:
        # This output counts the unmasked tokens of each sample; as in ONNX Runtime it is 0 without a mask.
        if node.has_input(_MASK):
            add("ReduceSum", [node.input[_MASK], writer.constant("axis", [1], "int64")], "counted", keepdims=0)
        else:
            add("Identity", [writer.constant("none", [0] * shape[0], "int32")], "counted")
        writer.nodes[-1].output[0] = outputs[1]
    norm = [total, node.input[_GAIN], node.input[_SHIFT]]
    add("LayerNormalization", norm, axis=-1, epsilon=real(node, "epsilon", 1e-12))
