"""Boxes of a picture cut out and resized, as an app does it between detector and classifier."""

import numpy as np

from edgekit.bundle.group.wiring import Crop
from edgekit.errors import DataError
from edgekit.model.tensors import Array, TensorSpec


def cut_boxes(crop: Crop, spec: TensorSpec, image: Array, boxes: Array, scores: Array) -> list[Array]:
    """Returns a picture of the input's shape and type for each of the best boxes, from left to right.

    `image` is [1, C, H, W], `boxes` [..., N, 4] and `scores` [..., N].

    Raises:
        DataError: the three are of other shapes.
    """
    corners, ranked = boxes.reshape(-1, boxes.shape[-1]) if boxes.ndim else boxes, scores.reshape(-1)
    if image.ndim != 4 or corners.ndim != 2 or corners.shape[1] != 4 or len(corners) != ranked.size:
        shapes = f"image {list(image.shape)}, boxes {list(boxes.shape)}, scores {list(scores.shape)}"
        raise DataError(f"no boxes can be cut out of {shapes}", hint="they are [1,C,H,W], [...,N,4] and [...,N]")
    if spec.shape is None or len(spec.shape) != 4 or spec.shape[1] != image.shape[1]:
        raise DataError(f"a picture {list(image.shape)} is none for [{spec}]", hint="as many channels, [1,C,H,W]")
    if crop.units == "shares":
        height, width = image.shape[2:]
        corners = corners * np.array([width, height, width, height])
    found = [place for place in np.argsort(-ranked, kind="stable") if ranked[place] >= crop.least]
    kept = [corners[place].astype(np.float64) for place in found if _has_area(corners[place])][: crop.most]
    size = int(spec.shape[2] or 1), int(spec.shape[3] or 1)
    return [_resize(image, box, size).astype(spec.dtype) for box in sorted(kept, key=tuple)]


def _has_area(box: Array) -> bool:
    return bool(np.isfinite(box).all() and box[2] > box[0] and box[3] > box[1])


def _resize(image: Array, box: Array, size: tuple[int, int]) -> Array:
    """Returns the box resized (bilinear, half-pixel centres); beyond the picture's edge its last row goes on."""
    left, top, right, bottom = box
    ys = top + (np.arange(size[0]) + 0.5) * (bottom - top) / size[0] - 0.5
    xs = left + (np.arange(size[1]) + 0.5) * (right - left) / size[1] - 0.5
    rows = _blend(image.astype(np.float64), ys, axis=2)
    return _blend(rows, xs, axis=3)


def _blend(values: Array, places: Array, axis: int) -> Array:
    last = values.shape[axis] - 1
    places = np.clip(places, 0, last)
    low = np.floor(places).astype(np.int64)
    shape = [1] * values.ndim
    shape[axis] = -1
    share = (places - low).reshape(shape)
    high = np.minimum(low + 1, last)
    return np.asarray(values.take(low, axis) * (1 - share) + values.take(high, axis) * share)
