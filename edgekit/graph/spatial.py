"""Where windows lie, which elements a nearest Resize picks, and which a ConvTranspose does not reach."""

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


def find_uncovered(graph: Graph, node: Node, *, whole_strides: bool = False) -> list[int]:
    """Returns how many elements at the end of each axis of a ConvTranspose its kernel does not reach: its bias is all.

    With `whole_strides` the kernel is thought to be as long as the next multiple of its stride. Returns an empty list
    if a size is not known.
    """
    data, weight, made = (graph.value(name).static_shape for name in (*node.input[:2], node.output[0]))
    if data is None or weight is None or made is None:
        return []
    ones = (1,) * (len(weight) - 2)
    strides, dilations = (node.entries(name) or ones for name in ("strides", "dilations"))
    # Pads are computed where an output_shape is given.
    pads = None if "output_shape" in node.attributes else node.entries("pads")
    rest: list[int] = []
    begins = pads or (0,) * len(ones)
    for axis, (stride, dilation, start) in enumerate(zip(strides, dilations, begins, strict=False), 2):
        reach = (weight[axis] - 1) * dilation + 1
        reach += -reach % stride if whole_strides else 0
        rest.append(max(made[axis] + start - (data[axis] - 1) * stride - reach, 0))
    return rest
