"""Normalisations of layers as means, differences and a root, for providers that have these only."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "split-layer-norm"
RMS_ID = "split-rms-norm"
_AXES_INPUT_SINCE = 18


def split_layer_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each float LayerNormalization as (x - mean) / sqrt(mean of squares + epsilon) * scale + bias, in place.

    Returns the names of the nodes; the formula is that of ONNX. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(graph, opset, {"LayerNormalization"}, lambda view, node: _expand(view, node, opset))


def split_rms_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each float RMSNormalization, or ONNX Runtime's older name for it, as x / sqrt(...) * scale, in place.

    Returns the names of the nodes; the formula is that of ONNX. The last bits may differ (1e-5 relative).
    """
    ops = {"RMSNormalization", "SimplifiedLayerNormalization"}
    return replace_nodes(graph, opset, ops, lambda view, node: _expand(view, node, opset))


def _expand(graph: Graph, node: Node, opset: int) -> Sequence[onnx.NodeProto] | None:
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
