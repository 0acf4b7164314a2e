"""Normalisations written as one node, or as the means, differences and roots that every provider has."""

from collections.abc import Sequence

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import made_by, mean_of, quotient_of, root_of, square_of, vector_beside
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes
from edgekit.prepare.rewrites.split_attention import input_of, real

JOIN_RMS_NORM = "join-rms-norm"
_SINCE = 23


def join_rms_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each x / sqrt(mean(x * x) + epsilon) * scale over the last axis as one node, in place.

    That is ONNX's RMSNormalization from opset 23 on, and before it ONNX Runtime's SimplifiedLayerNormalization. Returns
    the names of the nodes that end such a pattern. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(graph, opset, {"Mul"}, lambda view, node: _join_rms_norm(view, node, opset))


def _join_rms_norm(graph: Graph, node: Node, opset: int) -> Sequence[onnx.NodeProto] | None:
    scaled = vector_beside(graph, node)
    quotient = quotient_of(graph, scaled[0]) if scaled is not None else None
    root = root_of(graph, quotient[1]) if quotient is not None else None
    if scaled is None or quotient is None or root is None:
        return None
    if square_of(graph, mean_of(graph, root[0]) or "") != quotient[0] or not _is_float(graph, quotient[0]):
        return None
    if _is_centred(graph, quotient[0]):
        return None
    writer = Writer(graph=graph, node=node)
    op = "RMSNormalization" if opset >= _SINCE else "SimplifiedLayerNormalization"
    writer.add(op, [quotient[0], scaled[1]], axis=-1, epsilon=root[1])
    return writer.nodes


def _is_centred(graph: Graph, name: str) -> bool:
    """Returns True for x - mean(x): that is a layer normalisation, taken apart for who has neither."""
    node = made_by(graph, name, "Sub")
    return node is not None and mean_of(graph, node.input[1]) == node.input[0]


def _is_float(graph: Graph, name: str) -> bool:
    # What lies beside a constant of float32 has its type, also where nothing was inferred.
    return name not in graph.constants and graph.value(name).dtype in {None, "float32"}


SPLIT_LAYER_NORM = "split-layer-norm"
RMS_ID = "split-rms-norm"
_AXES_INPUT_SINCE = 18


def split_layer_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each float LayerNormalization as (x - mean) / sqrt(mean of squares + epsilon) * scale + bias, in place.

    Returns the names of the nodes; the formula is that of ONNX. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(graph, opset, {"LayerNormalization"}, lambda view, node: _split_layer_norm(view, node, opset))


def split_rms_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each float RMSNormalization, or ONNX Runtime's older name for it, as x / sqrt(...) * scale, in place.

    Returns the names of the nodes; the formula is that of ONNX. The last bits may differ (1e-5 relative).
    """
    ops = {"RMSNormalization", "SimplifiedLayerNormalization"}
    return replace_nodes(graph, opset, ops, lambda view, node: _split_layer_norm(view, node, opset))


def _split_layer_norm(graph: Graph, node: Node, opset: int) -> Sequence[onnx.NodeProto] | None:
    if any(node.output[1:]):
        return None
    shape = graph.value(node.input[0]).static_shape
    if shape is None or graph.value(node.input[0]).dtype != "float32":
        return None
    first = node.attributes.get("axis", -1) % len(shape)
    writer = Writer(graph=graph, node=node)
    axes = list(range(first, len(shape)))
    centred = node.input[0]
    if node.op_type == "LayerNormalization":
        centred = writer.add("Sub", [centred, _mean(writer, centred, "mean", axes, opset)], "centred")
    squares = writer.add("Mul", [centred, centred], "squares")
    variance = _mean(writer, squares, "variance", axes, opset)
    epsilon = writer.constant("epsilon", node.attributes.get("epsilon", 1e-5), "float32")
    root = writer.add("Sqrt", [writer.add("Add", [variance, epsilon], "moved")], "root")
    normal = writer.add("Div", [centred, root], "normal")
    biased = node.has_input(2)
    scaled = writer.add("Mul", [normal, node.input[1]], "scaled" if biased else "")
    if biased:
        writer.add("Add", [scaled, node.input[2]])
    return writer.nodes


def _mean(writer: Writer, value: str, part: str, axes: list[int], opset: int) -> str:
    if opset < _AXES_INPUT_SINCE:
        return writer.add("ReduceMean", [value], part, axes=axes, keepdims=1)
    return writer.add("ReduceMean", [value, writer.constant(f"{part}/axes", axes, "int64")], part, keepdims=1)


SPLIT_SKIP_NORM = "split-skip-norm"
_LAYER_NORM_SINCE = 17
_SUM = 3


def split_skip_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each SkipLayerNormalization and SkipSimplifiedLayerNormalization as Add and the norm, in place.

    Returns the names of the nodes. The last bits may differ (1e-5 relative).
    """
    ops = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
    return replace_nodes(graph, opset, ops if opset >= _LAYER_NORM_SINCE else ops[:1], _split_skip_norm)


def _split_skip_norm(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS or any(node.output[1:_SUM]):
        return None
    writer = Writer(graph=graph, node=node)
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    # Scale, then the shift that only the full norm has, then a bias of what is added.
    scale, *rest = node.input[2:]
    shift, bias = ("", *rest, "")[:2] if simple else (*rest, "", "")[:2]
    source = node.input[0]
    if bias:
        source = writer.add("Add", [source, bias], "biased")
    total = writer.add("Add", [source, node.input[1]], "sum")
    if len(node.output) > _SUM and node.output[_SUM]:
        # Others read the sum by this name.
        writer.nodes[-1].output[0] = total = node.output[_SUM]
    op = "SimplifiedLayerNormalization" if simple else "LayerNormalization"
    writer.add(op, [total, scale, *filter(None, [shift])], axis=-1, epsilon=node.attributes.get("epsilon", 1e-5))
    return writer.nodes


SPLIT_EMBED_NORM = "split-embed-norm"
_IDS, _SEGMENTS, _WORDS, _PLACES, _KINDS, _GAIN, _SHIFT, _MASK, _POSITIONS = range(9)


def split_embed_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each EmbedLayerNormalization as Gather, Add and LayerNormalization, in place.

    Returns the names of the nodes. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(
        graph, opset, {"EmbedLayerNormalization"} if opset >= _LAYER_NORM_SINCE else set[str](), _split_embed_norm
    )


def _split_embed_norm(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    shape, table = graph.value(node.input[_IDS]).static_shape, graph.value(input_of(node, _PLACES))
    is_whole = all(node.has_input(at) for at in (_WORDS, _PLACES, _GAIN, _SHIFT))
    if shape is None or len(shape) != 2 or not is_whole or table.dtype not in FLOATS:
        return None
    if node.has_input(_SEGMENTS) != node.has_input(_KINDS) or shape[1] > (table.static_shape or (0,))[0]:
        return None
    writer = Writer(graph=graph, node=node)
    add = writer.add
    places = input_of(node, _POSITIONS) or writer.constant("places", np.arange(shape[1])[None], "int64")
    words = add("Gather", [node.input[_WORDS], node.input[_IDS]], "words", axis=0)
    total = add("Add", [words, add("Gather", [node.input[_PLACES], places], "positions", axis=0)], "placed")
    if node.has_input(_KINDS):
        total = add("Add", [total, add("Gather", [node.input[_KINDS], node.input[_SEGMENTS]], "kinds", axis=0)], "sum")
    outputs = (*node.output, "", "")
    if outputs[2]:
        writer.nodes[-1].output[0] = total = outputs[2]
    if outputs[1]:
        _count(writer, input_of(node, _MASK), outputs[1], shape[0])
    add(
        "LayerNormalization",
        [total, node.input[_GAIN], node.input[_SHIFT]],
        axis=-1,
        epsilon=real(node, "epsilon", 1e-12),
    )
    return writer.nodes


def _count(writer: Writer, mask: str, output: str, batch: int) -> None:
    """Adds what says how many rows of each text count: without a mask, as ONNX Runtime has it, none."""
    if mask:
        axes = writer.constant("axis", [1], "int64")
        writer.add("ReduceSum", [mask, axes], "counted", keepdims=0)
    else:
        writer.add("Identity", [writer.constant("none", [0] * batch, "int32")], "counted")
    writer.nodes[-1].output[0] = output
