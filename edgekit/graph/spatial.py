"""The spatial axes of a graph: where windows lie, what a Resize picks, and whether an image input takes raw pixels."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array

Modes = tuple[str, str]
"""A coordinate_transformation_mode and a nearest_mode."""

_ROUNDED: dict[str, Callable[[Array], Array]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round_prefer_floor": lambda places: np.ceil(places - 0.5),
    "round_prefer_ceil": lambda places: np.floor(places + 0.5),
}


def read_modes(node: Node) -> Modes:
    """Returns the modes of a Resize."""
    given = node.attributes
    coordinates = given.get("coordinate_transformation_mode", "half_pixel")
    return str(coordinates), str(given.get("nearest_mode", "round_prefer_floor"))


class Windows(NamedTuple):
    """The windows of a convolution or pooling: a number for each spatial axis. `sizes` are those of the output."""

    stride: Array
    dilation: Array
    begin: Array
    end: Array
    sizes: tuple[int, ...]


def has_windows(node: Node, rank: int) -> bool:
    """Returns True if a node states its windows for so many spatial axes, with strides that move them.

    ONNX Runtime refuses another one, but rewrites are tried on what `check` is given too.
    """
    stated = {name: node.entries(name) for name in ("strides", "dilations", "pads") if name in node.attributes}
    wanted = {"strides": rank, "dilations": rank, "pads": 2 * rank}
    if any(numbers is None or len(numbers) != wanted[name] for name, numbers in stated.items()):
        return False
    return len(node.entries("kernel_shape") or ()) == rank and min(stated.get("strides") or (1,)) > 0


def place_windows(node: Node, spatial: tuple[int, ...], kernel: tuple[int, ...]) -> Windows:
    """Returns the windows of a node over an input of this size, with the padding that it states (ONNX: Conv).

    The output of a ConvTranspose has the size that ONNX gives it; a `ceil_mode` is not read.
    """
    lists, auto = node.attributes, node.attributes.get("auto_pad", "NOTSET")
    rank = len(kernel)
    stride, dilation = np.array(lists.get("strides") or [1] * rank), np.array(lists.get("dilations") or [1] * rank)
    reach, size = (np.array(kernel) - 1) * dilation + 1, np.array(spatial)
    if auto in {"SAME_UPPER", "SAME_LOWER"}:
        total = np.maximum(0, (-(-size // stride) - 1) * stride + reach - size)
        begin = total // 2 if auto == "SAME_UPPER" else total - total // 2
    else:
        pads = np.array((lists.get("pads") or [0] * 2 * rank) if auto == "NOTSET" else [0] * 2 * rank)
        begin, total = pads[:rank], pads[:rank] + pads[rank:]
    sizes = (size + total - reach) // stride + 1
    if node.op_type == "ConvTranspose":
        sizes = (size - 1) * stride + reach - total + np.array(lists.get("output_padding") or [0] * rank)
    return Windows(stride, dilation, begin, total - begin, tuple(int(value) for value in sizes))


def find_picks(graph: Graph, node: Node, modes: Modes) -> list[Array] | None:
    """Returns, for each axis, the indices of the elements that a nearest Resize of a fixed size picks with these modes.

    Returns None for another Resize, and for modes that are seldom used or wrong.
    """
    before, after = (graph.value(name).static_shape for name in (node.input[0], node.output[0]))
    if node.since < 11 or node.attributes.get("mode", "nearest") != "nearest" or before is None or after is None:
        return None
    if len(before) != len(after) or 0 in before:
        return None
    given = graph.array(node.input[2]) if node.has_input(2) else None
    scales = np.divide(after, before) if given is None or given.size != len(before) else given
    picks: list[Array] = []
    for size, made, scale in zip(before, after, np.asarray(scales, np.float32), strict=True):
        # In float32, as ONNX Runtime computes the places.
        at = np.arange(made, dtype=np.float32)
        centred = (at + np.float32(0.5)) / scale
        places = {
            "asymmetric": at / scale,
            "half_pixel": centred - 0.5,
            "pytorch_half_pixel": centred - 0.5 if made > 1 else 0 * at,
            "align_corners": at * (size - 1) / max(made - 1, 1),
            "tf_half_pixel_for_nn": centred,
        }
        if modes[0] not in places or modes[1] not in _ROUNDED:
            return None
        picks.append(np.clip(_ROUNDED[modes[1]](places[modes[0]]), 0, size - 1).astype(np.int64))
    return picks


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
