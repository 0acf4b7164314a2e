"""LayerNormalization as means, differences and a root, for providers that have these only."""

from collections.abc import Sequence

import onnx

from edgekit.prepare.rewrites.scene import Scene, Writer, read_attribute, replace_nodes

FIX_ID = "split-layer-norm"
_AXES_INPUT_SINCE = 18


def split_layer_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each float LayerNormalization as (x - mean) / sqrt(mean of squares + epsilon) * scale + bias, in place.

    Returns the names of the nodes; the formula is that of ONNX. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(graph, opset, {"LayerNormalization"}, lambda scene, node: _expand(scene, node, opset))


def _expand(scene: Scene, node: onnx.NodeProto, opset: int) -> Sequence[onnx.NodeProto] | None:
    if any(node.output[1:]):
        return None
    shape = scene.shape(node.input[0])
    if shape is None or scene.dtype(node.input[0]) != onnx.TensorProto.FLOAT:
        return None
    first = read_attribute(node, "axis", -1) % len(shape)
    writer = Writer(scene=scene, node=node)
    axes = list(range(first, len(shape)))
    mean = _mean(writer, node.input[0], "mean", axes, opset)
    centred = writer.add("Sub", [node.input[0], mean], "centred")
    squares = writer.add("Mul", [centred, centred], "squares")
    variance = _mean(writer, squares, "variance", axes, opset)
    epsilon = writer.constant("epsilon", read_attribute(node, "epsilon", 1e-5), "float32")
    root = writer.add("Sqrt", [writer.add("Add", [variance, epsilon], "moved")], "root")
    normal = writer.add("Div", [centred, root], "normal")
    biased = len(node.input) > 2 and bool(node.input[2])
    scaled = writer.add("Mul", [normal, node.input[1]], "scaled" if biased else "")
    if biased:
        writer.add("Add", [scaled, node.input[2]])
    return writer.nodes


def _mean(writer: Writer, value: str, part: str, axes: list[int], opset: int) -> str:
    if opset < _AXES_INPUT_SINCE:
        return writer.add("ReduceMean", [value], part, axes=axes, keepdims=1)
    return writer.add("ReduceMean", [value, writer.constant(f"{part}/axes", axes, "int64")], part, keepdims=1)
