"""Operations that sample an image anew: resizing and grids."""

from collections.abc import Callable, Mapping

import numpy as np

from edgekit.devices.ios.mil.arguments import Arguments
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


def _upsample_nearest(given: Arguments) -> Array:
    x = given.tensor("x")
    for axis, name in ((-2, "height"), (-1, "width")):
        factor = given.number(f"scale_factor_{name}", 1)
        size = int(x.shape[axis] * factor)
        x = np.take(x, np.minimum((np.arange(size) / factor).astype(np.int64), x.shape[axis] - 1), axis)
    return x


def _upsample_bilinear(given: Arguments) -> Array:
    x = given.tensor("x")
    corners, half = given.flag("align_corners", default=True), given.flag("half_pixel_centers", default=True)
    for axis, name in ((x.ndim - 2, "height"), (x.ndim - 1, "width")):
        factor = given.number(f"scale_factor_{name}", 1)
        size = int(x.shape[axis] * factor)
        x = _blend(x, axis, _place(np.arange(size), x.shape[axis], size, factor, corners=corners, half=half))
    return x


def _place(at: Array, old: int, new: int, factor: float, *, corners: bool, half: bool) -> Array:
    if corners:
        return at * ((old - 1) / max(new - 1, 1))
    return (at + 0.5) / factor - 0.5 if half else at / factor


def _resize_nearest(given: Arguments) -> Array:
    x = given.tensor("x")
    for axis, name in ((-2, "height"), (-1, "width")):
        size = given.whole(f"target_size_{name}", 1)
        x = np.take(x, np.arange(size) * x.shape[axis] // size, axis)
    return x


def _resize_bilinear(given: Arguments) -> Array:
    x = given.tensor("x")
    mode = given.text("sampling_mode", "DEFAULT")
    if mode not in {"DEFAULT", "STRICT_ALIGN_CORNERS", "UNALIGN_CORNERS"}:
        raise ValueError(f"its sampling mode is {mode!r}")
    corners, half = mode == "STRICT_ALIGN_CORNERS", mode == "UNALIGN_CORNERS"
    for axis, name in ((x.ndim - 2, "height"), (x.ndim - 1, "width")):
        size, old = given.whole(f"target_size_{name}", 1), x.shape[axis]
        x = _blend(x, axis, _place(np.arange(size), old, size, size / old, corners=corners, half=half))
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
