"""Whether an image input takes raw pixels (0 to 255): the operators up to the first layer with weights tell."""

import numpy as np

from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array

# Operators that do not change the scale of pixels.
_MOVING = frozenset({
    "Cast", "Clip", "Concat", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth",
    "Split", "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip
_SHIFTING, _SCALING = frozenset({"Add", "Sub"}), frozenset({"Mul", "Div"})
# Operators that divide by the standard deviation of their input.
_NORMALIZING = frozenset({"InstanceNormalization", "LayerNormalization", "MeanVarianceNormalization"})
_LAYERS = frozenset({"Conv", "Gemm", "MatMul"})
# Few operators come before the first layer: a longer walk is a cycle in a malicious file.
_MOST_NODES = 32
# A graph that divides by this or more makes pixels small; the usual divisors are 58 (a standard deviation) to 255.
_LEAST_DIVISOR = 16.0
# The standard deviation of raw pixels is about 64. In a trained layer, weights and bias contribute about equally to the
# outputs. With raw pixels, the weights' part was 1.2 to 1.7 times the bias in three networks for raw pixels, and 24 to
# 2,800 times in 19 networks for scaled pixels. The bound is the geometric mean of 1.7 and 24.
_PIXEL_DEVIATION, _MOST_TIMES_BIAS = 64.0, 6.0


def takes_raw_pixels(graph: Graph, name: str) -> bool:
    """Returns True if a graph scales an input down, or its first layer's weights are as small as raw pixels need."""
    gain = 1.0
    for _ in range(_MOST_NODES):
        node = next(iter(graph.readers(name)), None)
        if node is None or not node.output:
            return False
        # The indices of a Gather are codes, such as letters, which must not be scaled either.
        if node.op_type in _NORMALIZING or (node.op_type == "Gather" and node.input[1] == name):
            return True
        if node.op_type in _LAYERS:
            weight, bias = graph.inline(node.input[1]), _find_bias(graph, node)
            if weight is None or bias is None or weight.ndim < 2:
                return False
            rows = weight.reshape(len(weight), -1) if node.op_type == "Conv" else np.moveaxis(weight, -1, 0)
            part = _PIXEL_DEVIATION * gain * float(np.median(np.linalg.norm(rows.reshape(len(rows), -1), axis=1)))
            return part <= _MOST_TIMES_BIAS * float(np.median(np.abs(bias)))
        gain *= _find_gain(graph, node, name)
        if not np.isfinite(gain) or gain <= 0:
            return False
        if gain <= 1 / _LEAST_DIVISOR:
            return True
        name = node.output[0]
    return False


def _find_gain(graph: Graph, node: Node, name: str) -> float:
    """Returns the factor by which an operator before the first layer scales pixels, NaN where it is not known."""
    if node.op_type in _MOVING | _SHIFTING:
        return 1.0
    if node.op_type in _SCALING:
        factor = graph.inline(next((each for each in node.input if each != name), ""))
        if factor is None or not factor.size:
            return np.nan
        size = float(np.median(np.abs(factor)))
        return size if node.op_type == "Mul" else 1 / size if size else np.nan
    if node.op_type == "BatchNormalization":
        scale, variance = (graph.inline(node.input[place]) for place in (1, 4))
        if scale is not None and variance is not None:
            return float(np.median(np.abs(scale) / np.sqrt(np.maximum(variance, 0) + 1e-5)))
    return np.nan


def _find_bias(graph: Graph, node: Node) -> Array | None:
    if node.has_input(2):
        return graph.inline(node.input[2])
    adds = (each for each in graph.readers(node.output[0]) if each.op_type == "Add")
    return next((value for add in adds for each in add.input if (value := graph.inline(each)) is not None), None)
