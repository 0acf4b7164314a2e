"""Operations that slide a window over a tensor or sample an image anew: convolutions, pools, resizing, grids."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import msgspec
import numpy as np

from edgekit.devices.ios.mil.operations import Arguments
from edgekit.model.tensors import Array


def _blend(x: Array, axis: int, places: Array) -> Array:
    """Returns `x` at fractional places along an axis, linearly between its neighbours, its edges going on."""
    last = x.shape[axis] - 1
    places = np.clip(places, 0, last)
    low = np.floor(places).astype(np.int64)
    share = (places - low).astype(np.float32)
    shape = [1] * x.ndim
    shape[axis] = -1
    share = share.reshape(shape)
    high = np.take(x, np.minimum(low + 1, last), axis)
    return np.asarray(np.take(x, low, axis) * (1 - share) + high * share)


def _list_sizes(given: Arguments, x: Array) -> Iterator[tuple[int, int, int, float]]:
    """Yields each of the last two axes, with its size, that after resizing, and how much larger that is."""
    for axis, name in ((x.ndim - 2, "height"), (x.ndim - 1, "width")):
        old = x.shape[axis]
        size = given.whole(f"target_size_{name}", 0)
        factor = size / old if size else given.number(f"scale_factor_{name}", 1)
        yield axis, old, size or int(old * factor), factor


def _resize_nearest(given: Arguments) -> Array:
    x = given.tensor("x")
    for axis, old, size, _ in _list_sizes(given, x):
        x = np.take(x, np.arange(size) * old // size, axis)
    return x


def _upsample_nearest(given: Arguments) -> Array:
    x = given.tensor("x")
    for axis, old, size, factor in _list_sizes(given, x):
        x = np.take(x, np.minimum((np.arange(size) / factor).astype(np.int64), old - 1), axis)
    return x


def _upsample_bilinear(given: Arguments) -> Array:
    corners, half = given.flag("align_corners", default=True), given.flag("half_pixel_centers", default=True)
    return _resize_linearly(given, corners=corners, half=half)


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
        x = _blend(x, axis, places)
    return x


def _resample(given: Arguments) -> Array:
    """Computes `resample`: `coordinates` [N, H, W, 2] are x and y, which the mode scales to the image."""
    x, grid = given.tensor("x"), given.tensor("coordinates")
    mode = given.text("coordinates_mode", "normalized_minus_one_to_one")
    if mode != "normalized_minus_one_to_one":
        raise ValueError(f"its coordinates are {mode!r}")
    corners, padding = given.flag("align_corners"), given.text("padding_mode", "constant")
    places = [
        (grid[..., index] + 1) * ((size - 1) / 2) if corners else ((grid[..., index] + 1) * size - 1) / 2
        for index, size in ((1, x.shape[2]), (0, x.shape[3]))
    ]
    fill = np.float32(given.number("padding_value", 0.0))
    if given.text("sampling_mode", "bilinear") == "nearest":
        return _pick(x, *(np.rint(place).astype(np.int64) for place in places), padding=padding, fill=fill)
    out = np.zeros((x.shape[0], x.shape[1], *grid.shape[1:3]), np.float32)
    low = [np.floor(place).astype(np.int64) for place in places]
    for down in (0, 1):
        for right in (0, 1):
            shares = [
                np.abs(place - floor - (1 - step))
                for place, floor, step in zip(places, low, (down, right), strict=True)
            ]
            part = _pick(x, low[0] + down, low[1] + right, padding=padding, fill=fill)
            out += part * (shares[0] * shares[1])[:, None]
    return out


def _pick(x: Array, rows: Array, columns: Array, *, padding: str, fill: np.float32) -> Array:
    """Returns the elements at places [N, H, W] of each image, beyond its edges what `padding` says."""
    height, width = x.shape[2:]
    if padding in {"reflection", "symmetric"}:
        raise ValueError(f"its padding is {padding!r}")
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    rows, columns = np.clip(rows, 0, height - 1), np.clip(columns, 0, width - 1)
    taken = np.stack([image[:, row, column] for image, row, column in zip(x, rows, columns, strict=True)])
    return taken if padding == "border" else np.where(inside[:, None], taken, fill)


RESIZING: Mapping[str, Callable[[Arguments], Array]] = {
    "resample": _resample,
    "resize_bilinear": _resize_bilinear,
    "resize_nearest_neighbor": _resize_nearest,
    "upsample_bilinear": _upsample_bilinear,
    "upsample_nearest_neighbor": _upsample_nearest,
}
"""Operations by their names in MIL."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A window along each axis in space; `pads` are before and after."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @property
    def spans(self) -> tuple[int, ...]:
        """How many elements the window reaches over."""
        return tuple((size - 1) * dilation + 1 for size, dilation in zip(self.sizes, self.dilations, strict=True))


def read_window(given: Arguments, sizes: tuple[int, ...], extents: tuple[int, ...]) -> Window:
    """Returns the window of an operation over `extents`, its padding worked out.

    Raises:
        ValueError: its kind of padding is none of MIL's.
    """
    ones = (1,) * len(sizes)
    window = Window(
        sizes=sizes,
        strides=given.wholes("strides") or ones,
        dilations=given.wholes("dilations") or ones,
        pads=((0, 0),) * len(sizes),
    )
    kind = given.text("pad_type", "valid")
    if kind == "custom":
        flat = given.wholes("pad") or (0,) * (2 * len(sizes))
        return msgspec.structs.replace(window, pads=tuple(zip(flat[::2], flat[1::2], strict=True)))
    if kind in {"same", "same_lower"}:
        return msgspec.structs.replace(window, pads=tuple(_pad_same(window, extents, lower=kind == "same_lower")))
    if kind != "valid":
        raise ValueError(f"its padding is of kind {kind!r}")
    return window


def _pad_same(window: Window, extents: tuple[int, ...], *, lower: bool) -> Iterator[tuple[int, int]]:
    for extent, stride, span in zip(extents, window.strides, window.spans, strict=True):
        whole = max((math.ceil(extent / stride) - 1) * stride + span - extent, 0)
        yield (whole - whole // 2, whole // 2) if lower else (whole // 2, whole - whole // 2)


def _pad(x: Array, window: Window, fill: float) -> Array:
    return np.pad(x, ((0, 0), (0, 0), *window.pads), constant_values=fill)


def _list_views(padded: Array, window: Window, counts: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yields each place in the window with what lies under it, for all steps of the window at once."""
    for place in itertools.product(*map(range, window.sizes)):
        cuts = tuple(
            slice(at * dilation, at * dilation + (count - 1) * stride + 1, stride)
            for at, dilation, count, stride in zip(place, window.dilations, counts, window.strides, strict=True)
        )
        yield place, padded[:, :, *cuts]


def convolve(given: Arguments) -> Array:
    """Computes `conv`: `x` [N, C, ...], `weight` [K, C/groups, ...]."""
    x, weight, groups = given.tensor("x"), given.tensor("weight"), given.whole("groups", 1)
    window = read_window(given, weight.shape[2:], x.shape[2:])
    padded = _pad(x, window, 0)
    counts = tuple(
        (extent - span) // stride + 1
        for extent, span, stride in zip(padded.shape[2:], window.spans, window.strides, strict=True)
    )
    if groups == x.shape[1] == weight.shape[0]:
        out = np.zeros((x.shape[0], weight.shape[0], *counts), np.float32)
        for place, view in _list_views(padded, window, counts):
            out += view * weight[_at(0, place)].reshape(-1, *[1] * len(counts))
    else:
        out = _convolve_groups(padded, weight, groups, window, counts)
    return _add_bias(out, given.find("bias"))


def _at(second: int | slice, place: tuple[int, ...]) -> tuple[int | slice, ...]:
    """Returns the index of a place in the kernels of a weight."""
    return (slice(None), second, *place)


def _convolve_groups(padded: Array, weight: Array, groups: int, window: Window, counts: tuple[int, ...]) -> Array:
    batch, kernels = padded.shape[0], weight.shape[0] // groups
    each = weight.shape[1]
    columns = np.empty((batch, groups, each, math.prod(window.sizes), math.prod(counts)), np.float32)
    for index, (_, view) in enumerate(_list_views(padded, window, counts)):
        columns[:, :, :, index] = view.reshape(batch, groups, each, -1)
    rows = weight.reshape(groups, kernels, -1)
    out = rows @ columns.reshape(batch, groups, rows.shape[2], -1)
    return np.asarray(out.reshape(batch, groups * kernels, *counts))


def _add_bias(out: Array, bias: Array | None) -> Array:
    return out if bias is None else out + bias.reshape(-1, *[1] * (out.ndim - 2))


def convolve_transposed(given: Arguments) -> Array:
    """Computes `conv_transpose`: `x` [N, C, ...], `weight` [C, K/groups, ...]; padding cuts off the result."""
    x, weight, groups = given.tensor("x"), given.tensor("weight"), given.whole("groups", 1)
    window = read_window(given, weight.shape[2:], x.shape[2:])
    counts = x.shape[2:]
    sizes = tuple(
        (count - 1) * stride + span for count, stride, span in zip(counts, window.strides, window.spans, strict=True)
    )
    batch, kernels = x.shape[0], weight.shape[1]
    out = np.zeros((batch, groups * kernels, *sizes), np.float32)
    inputs = x.reshape(batch, groups, x.shape[1] // groups, -1)
    for place, view in _list_views(out, window, counts):
        part = weight[_at(slice(None), place)].reshape(groups, -1, kernels).transpose(0, 2, 1)
        # The view writes into `out`: each place of the kernel adds what it throws there.
        np.add(view, (part @ inputs).reshape(view.shape), out=view)
    wanted = given.wholes("output_shape")
    cuts = tuple(
        slice(before, size - after if wanted is None else before + wanted[2 + axis])
        for axis, ((before, after), size) in enumerate(zip(window.pads, sizes, strict=True))
    )
    return _add_bias(out[:, :, *cuts], given.find("bias"))


def _stretch(x: Array, given: Arguments) -> tuple[Window, tuple[int, ...]]:
    """Returns the window of a pool with enough behind the last step, and how many steps there are."""
    window = read_window(given, given.wholes("kernel_sizes") or (), x.shape[2:])
    up = given.flag("ceil_mode")
    counts: list[int] = []
    pads: list[tuple[int, int]] = []
    for extent, (before, after), stride, size in zip(
        x.shape[2:], window.pads, window.strides, window.sizes, strict=True
    ):
        free = extent + before + after - size
        count = (-(-free // stride) if up else free // stride) + 1
        # A step must begin inside, or in what was added before.
        count -= up and (count - 1) * stride >= extent + before
        counts.append(count)
        pads.append((before, max(after, (count - 1) * stride + size - extent - before)))
    return msgspec.structs.replace(window, pads=tuple(pads)), tuple(counts)


def _max_pool(given: Arguments) -> Array:
    x = given.tensor("x")
    window, counts = _stretch(x, given)
    views = (view for _, view in _list_views(_pad(x, window, -np.inf), window, counts))
    out = np.array(next(views))
    for view in views:
        np.maximum(out, view, out=out)
    return out


def _average_pool(given: Arguments) -> Array:
    x = given.tensor("x")
    window, counts = _stretch(x, given)
    out = sum(view for _, view in _list_views(_pad(x, window, 0), window, counts))
    if not given.flag("exclude_padding_from_average"):
        return np.asarray(out / math.prod(window.sizes))
    inside = _pad(np.ones((1, 1, *x.shape[2:]), np.float32), window, 0)
    return np.asarray(out / sum(view for _, view in _list_views(inside, window, counts)))


def _normalize_locally(given: Arguments) -> Array:
    x, size = given.tensor("x"), given.whole("size", 1)
    before = (size - 1) // 2
    squares = np.pad(x * x, ((0, 0), (before, size - 1 - before), *[(0, 0)] * (x.ndim - 2)))
    summed = sum(squares[:, at : at + x.shape[1]] for at in range(size))
    scale = given.number("k", 1.0) + given.number("alpha", 1e-4) * summed / size
    return np.asarray(x / scale ** given.number("beta", 0.75))


WINDOWS: Mapping[str, Callable[[Arguments], Array]] = {
    "avg_pool": _average_pool,
    "conv": convolve,
    "conv_transpose": convolve_transposed,
    "local_response_norm": _normalize_locally,
    "max_pool": _max_pool,
}
"""Operations by their names in MIL."""
