"""Operations with a sliding window or resampling: convolutions, pooling, resizing, grid sampling.

Windows and grids are computed by the equivalent ONNX operators in ONNX Runtime's CPU provider.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.devices.ios.mil.operations import Arguments
from edgekit.errors import RuntimeRefusal
from edgekit.model.tensors import Array

_OPSET = 20


@functools.cache
def _open_operator(op: str, inputs: int, attributes: tuple[tuple[str, Any], ...]) -> CpuSession:
    """Returns a session of a single ONNX operator on float tensors of any shape."""
    names = [f"i{index}" for index in range(inputs)]
    floats = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in (*names, "y")]
    node = helper.make_node(op, names, ["y"], **dict(attributes))
    graph = helper.make_graph([node], "operator", floats[:-1], floats[-1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=9)
    # With one thread, the order of sums does not depend on the number of cores.
    return CpuSession(model.SerializeToString(), SessionSettings(level=Level.DISABLED, threads=1))


def _run_operator(op: str, tensors: Sequence[Array | None], **attributes: object) -> Array:
    """Returns the output of an ONNX operator for some tensors; those that are None are omitted."""
    given = [tensor for tensor in tensors if tensor is not None]
    try:
        session = _open_operator(op, len(given), tuple(attributes.items()))
        return session.run({f"i{index}": np.asarray(tensor, np.float32) for index, tensor in enumerate(given)})["y"]
    except RuntimeRefusal as error:
        raise ValueError(error.message) from error


def _list_sizes(given: Arguments, x: Array) -> Iterator[tuple[int, int, int, float]]:
    """Yields the last two axes, each with its size, its size after resizing, and the scale factor."""
    for axis, name in ((x.ndim - 2, "height"), (x.ndim - 1, "width")):
        old = x.shape[axis]
        size = given.whole(f"target_size_{name}", 0)
        factor = size / old if size else given.number(f"scale_factor_{name}", 1)
        yield axis, old, size or int(old * factor), factor


def _resize_nearest(given: Arguments, *, by_factor: bool) -> Array:
    x = given.tensor("x")
    for axis, old, size, factor in _list_sizes(given, x):
        at = np.arange(size)
        x = np.take(x, np.minimum((at / factor).astype(np.int64), old - 1) if by_factor else at * old // size, axis)
    return x


def _resize_bilinear(given: Arguments) -> Array:
    mode = given.text("sampling_mode", "DEFAULT")
    if mode not in {"DEFAULT", "STRICT_ALIGN_CORNERS", "UNALIGN_CORNERS"}:
        raise ValueError(f"its sampling mode is {mode!r}")
    return _resize_linearly(given, corners=mode == "STRICT_ALIGN_CORNERS", half=mode == "UNALIGN_CORNERS")


def _resize_linearly(given: Arguments, *, corners: bool, half: bool) -> Array:
    x = given.tensor("x")
    for axis, old, size, factor in _list_sizes(given, x):
        at = np.arange(size)
        if corners:
            places = at * ((old - 1) / max(size - 1, 1))
        elif half:
            places = (at + 0.5) / factor - 0.5
        else:
            places = at / factor
        # Positions outside are clamped to the edges.
        places = np.clip(places, 0, old - 1)
        low = np.floor(places).astype(np.int64)
        shape = [1] * x.ndim
        shape[axis] = -1
        share = (places - low).astype(np.float32).reshape(shape)
        high = np.take(x, np.minimum(low + 1, old - 1), axis)
        x = np.asarray(np.take(x, low, axis) * (1 - share) + high * share)
    return x


def _resample(given: Arguments) -> Array:
    """Computes `resample`: `coordinates` [N, H, W, 2] are x and y, from -1 to 1 across the image."""
    mode = given.text("coordinates_mode", "normalized_minus_one_to_one")
    padding = given.text("padding_mode", "constant")
    if mode != "normalized_minus_one_to_one":
        raise ValueError(f"its coordinates are {mode!r}")
    if padding not in _PADDINGS:
        raise ValueError(f"its padding is {padding!r}")
    # Constant padding in ONNX's operator is always zero. As interpolation weights sum to 1, subtracting the padding
    # value before and adding it afterwards gives the same as padding with that value.
    fill = np.float32(given.number("padding_value", 0.0))

    sampled = _run_operator(
        "GridSample",
        (given.tensor("x") - fill, given.tensor("coordinates")),
        align_corners=int(given.flag("align_corners")),
        mode="nearest" if given.text("sampling_mode", "bilinear") == "nearest" else "linear",
        padding_mode=_PADDINGS[padding],
    )
    return sampled + fill


_PADDINGS = {"constant": "zeros", "border": "border"}

RESIZING: Mapping[str, Callable[[Arguments], Array]] = {
    "resample": _resample,
    "resize_bilinear": _resize_bilinear,
    "resize_nearest_neighbor": lambda given: _resize_nearest(given, by_factor=False),
    "upsample_bilinear": lambda given: _resize_linearly(
        given, corners=given.flag("align_corners", default=True), half=given.flag("half_pixel_centers", default=True)
    ),
    "upsample_nearest_neighbor": lambda given: _resize_nearest(given, by_factor=True),
}
"""Operations by their names in MIL."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A window along each spatial axis; `pads` are pairs of the padding before and after.

    `spans` are the extents of the window, including dilation.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    spans: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @property
    def attributes(self) -> dict[str, tuple[int, ...]]:
        """The attributes of ONNX's operators, whose pads are those before each axis and then those after each."""
        before, after = zip(*self.pads, strict=True)
        return {"strides": self.strides, "dilations": self.dilations, "pads": (*before, *after)}


def read_window(given: Arguments, sizes: tuple[int, ...], extents: tuple[int, ...]) -> Window:
    """Returns the window of an operation over spatial sizes `extents`, with its padding computed.

    Raises:
        ValueError: MIL has no such kind of padding.
    """
    ones, kind = (1,) * len(sizes), given.text("pad_type", "valid")
    strides, dilations = given.wholes("strides") or ones, given.wholes("dilations") or ones
    spans = tuple((size - 1) * dilation + 1 for size, dilation in zip(sizes, dilations, strict=True))
    pads = [(0, 0)] * len(sizes)
    if kind == "custom":
        flat = given.wholes("pad") or (0,) * (2 * len(sizes))
        pads = list(zip(flat[::2], flat[1::2], strict=True))
    elif kind in {"same", "same_lower"}:
        for axis, (extent, stride, span) in enumerate(zip(extents, strides, spans, strict=True)):
            total = max((math.ceil(extent / stride) - 1) * stride + span - extent, 0)
            smaller, larger = total // 2, total - total // 2
            pads[axis] = (larger, smaller) if kind == "same_lower" else (smaller, larger)
    elif kind != "valid":
        raise ValueError(f"its padding is of kind {kind!r}")
    return Window(strides=strides, dilations=dilations, spans=spans, pads=tuple(pads))


def convolve(given: Arguments) -> Array:
    """Computes `conv`: `x` [N, C, ...], `weight` [K, C/groups, ...]."""
    x, weight = given.tensor("x"), given.tensor("weight")
    window = read_window(given, weight.shape[2:], x.shape[2:])
    return _run_operator("Conv", (x, weight, given.find("bias")), group=given.whole("groups", 1), **window.attributes)


def convolve_transposed(given: Arguments) -> Array:
    """Computes `conv_transpose`: `x` [N, C, ...], `weight` [C, K/groups, ...]; padding crops the result."""
    x, weight = given.tensor("x"), given.tensor("weight")
    window = read_window(given, weight.shape[2:], x.shape[2:])
    wanted = given.wholes("output_shape")
    pads, more = list(window.pads), [0] * len(window.pads)
    for axis, (count, stride, span) in enumerate(zip(x.shape[2:], window.strides, window.spans, strict=True)):
        if wanted is not None:
            before = pads[axis][0]
            after = (count - 1) * stride + span - before - wanted[2 + axis]
            pads[axis], more[axis] = (before, max(after, 0)), max(-after, 0)
    return _run_operator(
        "ConvTranspose",
        (x, weight, given.find("bias")),
        group=given.whole("groups", 1),
        output_padding=tuple(more),
        **msgspec.structs.replace(window, pads=tuple(pads)).attributes,
    )


def _pool(given: Arguments, op: str, **attributes: int) -> Array:
    x, sizes = given.tensor("x"), given.wholes("kernel_sizes") or ()
    window = read_window(given, sizes, x.shape[2:]).attributes
    return _run_operator(op, (x,), kernel_shape=sizes, ceil_mode=int(given.flag("ceil_mode")), **window, **attributes)


WINDOWS: Mapping[str, Callable[[Arguments], Array]] = {
    "avg_pool": lambda given: _pool(
        given, "AveragePool", count_include_pad=int(not given.flag("exclude_padding_from_average"))
    ),
    "conv": convolve,
    "conv_transpose": convolve_transposed,
    "max_pool": lambda given: _pool(given, "MaxPool"),
}
"""Operations by their names in MIL."""
