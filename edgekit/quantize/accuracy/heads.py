"""Decodes the raw head of a detector: which columns hold boxes and scores, and how box coordinates are encoded.

A code is such an encoding, for example YOLOX's. Boxes are relative to the cells of grids, one grid per level (stride).
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import ClassVar, Literal

import msgspec
import numpy as np

from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.ranges import sigmoid, softmax

BINS = (8, 16, 17, 32)
"""Usual numbers of bins of a distance to a side, which is their softmax-weighted mean (X. Li, arXiv:2006.04388)."""
_STRIDES = ((8, 16, 32), (8, 16), (16, 32), (8, 16, 32, 64), (8, 16, 32, 64, 128), (4, 8, 16, 32), (8,), (16,), (32,))
_MOST_ANCHORS = 9
# BlazeFace has two anchors at each place of its first level and six at those of its second: (stride, anchors).
_UNEVEN = (((8, 2), (16, 6)), ((16, 2), (32, 6)), ((8, 2), (16, 2), (32, 6)))
# Widths and heights in pixels of the anchors of YOLOv3 to YOLOv7 for COCO, level by level. For a model with others they
# make all boxes of a place too large or too small alike, which hardly changes how much two of them overlap.
_ANCHORS = (((10, 13), (16, 30), (33, 23)), ((30, 61), (62, 45), (59, 119)), ((116, 90), (156, 198), (373, 326)))
# exp(10) times a stride is larger than any image.
_LARGEST_POWER = 10.0


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A level with `anchors` boxes in each of height x width cells.

    With `anchors_first` rows are ordered [anchors, height, width], else [height, width, anchors].
    """

    anchors: int
    height: int
    width: int
    anchors_first: bool = False


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The levels of a head, in the order of its rows; `image` is height and width in pixels."""

    levels: tuple[Level, ...]
    image: tuple[int, int]


class _Places(msgspec.Struct, frozen=True, kw_only=True):
    """The cell of each row: its column and line, its size and that of its anchor in pixels, all float64 [rows, 2].

    `image` is width and height in pixels.
    """

    corner: Array
    cell: Array
    anchor: Array
    image: Array

    def take(self, rows: Array) -> "_Places":
        return _Places(corner=self.corner[rows], cell=self.cell[rows], anchor=self.anchor[rows], image=self.image)


def lay_grids(
    columns: tuple[int, ...], rows: int, sides: tuple[tuple[int, int, int], ...], image: tuple[int, int]
) -> Iterator[tuple[str, Grid | None]]:
    """Yields the codes and grids that fit so many columns (of each output) and rows.

    `sides` are anchors, height and width of each level where the layout tells them; else the number of rows does.
    """
    # A graph that decodes its boxes joins them to a table. Those of a map may be a heat map that looks like boxes.
    if columns == (4,) and not sides:
        yield from ((code, None) for code in sorted(EXPLICIT))
    levels = tuple(
        Level(anchors=count, height=height, width=width, anchors_first=True) for count, height, width in sides
    )
    for grid in [Grid(levels=levels, image=image)] if sides else _guess_grids(rows, image):
        has_anchors = len(grid.levels) == len(_ANCHORS) and all(level.anchors == 3 for level in grid.levels)
        for code in _CODES_BY_COLUMNS.get(columns, _BINNED):
            if has_anchors or code not in _ANCHORED:
                yield code, grid


def decode_boxes(code: str, values: Array, grid: Grid | None, rows: Array | None = None) -> Array:
    """Returns the corners of boxes (left, top, right, bottom), float64 [rows, 4], in the units of the graph.

    `values` are those of all rows of the grid, or of the `rows` that are given.
    """
    if grid is None:
        return EXPLICIT[code](values)
    places = _find_places(grid)
    return CODES[code](values, places if rows is None else places.take(rows))


def _guess_grids(rows: int, image: tuple[int, int]) -> Iterator[Grid]:
    for strides in _STRIDES:
        sides = [(-(-image[0] // stride), -(-image[1] // stride)) for stride in strides]
        count, left = divmod(rows, sum(height * width for height, width in sides))
        if left or not 1 <= count <= _MOST_ANCHORS:
            continue
        for first in (False, True) if count > 1 else (False,):
            levels = tuple(
                Level(anchors=count, height=height, width=width, anchors_first=first) for height, width in sides
            )
            yield Grid(levels=levels, image=image)
    for uneven in _UNEVEN:
        levels = tuple(Level(anchors=n, height=-(-image[0] // s), width=-(-image[1] // s)) for s, n in uneven)
        if sum(level.anchors * level.height * level.width for level in levels) == rows:
            yield Grid(levels=levels, image=image)


@lru_cache(maxsize=64)
def _find_places(grid: Grid) -> _Places:
    corners, cells, anchors = list[Array](), list[Array](), list[Array]()
    for index, level in enumerate(grid.levels):
        shape = (level.height, level.width, level.anchors)
        line, column, number = np.indices(shape)
        if level.anchors_first:
            line, column, number = (np.moveaxis(value, -1, 0) for value in (line, column, number))
        cell = np.array([grid.image[1] / level.width, grid.image[0] / level.height])
        corners.append(np.stack([column.ravel(), line.ravel()], axis=1))
        cells.append(np.broadcast_to(cell, corners[-1].shape))
        known = index < len(_ANCHORS) and level.anchors == len(_ANCHORS[index])
        sizes = np.array(_ANCHORS[index], np.float64) if known else np.broadcast_to(cell, (level.anchors, 2))
        anchors.append(sizes[number.ravel()])
    return _Places(
        corner=np.concatenate(corners).astype(np.float64),
        cell=np.concatenate(cells),
        anchor=np.concatenate(anchors),
        image=np.array(grid.image[::-1], np.float64),
    )


def _corners(middle: Array, size: Array) -> Array:
    return np.concatenate([middle - size / 2, middle + size / 2], axis=1)


def _powers(values: Array) -> Array:
    return np.asarray(np.exp(np.clip(values, -_LARGEST_POWER, _LARGEST_POWER)))


def _decode_yolov5(values: Array, at: _Places) -> Array:
    """The head of ultralytics/yolov5, and of YOLOv7."""
    shares = sigmoid(values)
    return _corners((2 * shares[:, :2] - 0.5 + at.corner) * at.cell, (2 * shares[:, 2:]) ** 2 * at.anchor)


def _decode_distances(values: Array, at: _Places, *, in_pixels: bool = False) -> Array:
    """Distances to the four sides, in cells or in pixels (Z. Tian et al., "FCOS", arXiv:1904.01355)."""
    middle, unit = (at.corner + 0.5) * at.cell, 1.0 if in_pixels else at.cell
    return np.concatenate([middle - values[:, :2] * unit, middle + values[:, 2:] * unit], axis=1)


def _decode_centres(values: Array, at: _Places, *, in_pixels: bool = False) -> Array:
    """Shifts in cells from the corner of the cell, and sizes (X. Zhou et al., "CenterNet", arXiv:1904.07850)."""
    return _corners((at.corner + values[:, :2]) * at.cell, np.maximum(values[:, 2:], 0) * (1 if in_pixels else at.cell))


def _decode_bins(values: Array, at: _Places) -> Array:
    """Distances in cells as means over bins (X. Li et al., arXiv:2006.04388)."""
    bins = values.reshape(len(values), 4, values.shape[1] // 4)
    return _decode_distances(softmax(bins) @ np.arange(bins.shape[-1], dtype=np.float64), at)


EXPLICIT: Mapping[str, Callable[[Array], Array]] = {
    "corners": lambda values: values,
    "middle and size": lambda values: _corners(values[:, :2], values[:, 2:]),
}
"""Codes of boxes that the graph has decoded. Overlaps are the same whether x or y comes first."""

CODES: Mapping[str, Callable[[Array, _Places], Array]] = {
    # Z. Ge et al., arXiv:2107.08430
    "yolox": lambda values, at: _corners((values[:, :2] + at.corner) * at.cell, _powers(values[:, 2:]) * at.cell),
    # J. Redmon and A. Farhadi, arXiv:1804.02767
    "yolov3": lambda values, at: _corners(
        (sigmoid(values[:, :2]) + at.corner) * at.cell, _powers(values[:, 2:]) * at.anchor
    ),
    "yolov5": _decode_yolov5,
    # The head of dog-qiuqiu/FastestDet: the centre relative to the cell by a tanh, the size relative to the image
    "shares": lambda values, at: _corners(
        (np.tanh(values[:, :2]) + at.corner) * at.cell, sigmoid(values[:, 2:]) * at.image
    ),
    "distances": _decode_distances,
    "pixel distances": partial(_decode_distances, in_pixels=True),
    # Centre and size in pixels, from the centre of the cell (V. Bazarevsky et al., "BlazeFace", arXiv:1907.05047)
    "offsets": lambda values, at: _corners((at.corner + 0.5) * at.cell + values[:, :2], values[:, 2:]),
    "binned distances": _decode_bins,
    "centres": _decode_centres,
    "centres and pixels": partial(_decode_centres, in_pixels=True),
}
"""Codes of raw heads, by the names that are used here."""
_ANCHORED = frozenset({"yolov3", "yolov5"})
_BINNED = ("binned distances",)
CENTRED = ("centres", "centres and pixels")
"""Codes of heads whose scores are a heat map with a peak at the centre of each object."""
_CODES_BY_COLUMNS: Mapping[tuple[int, ...], tuple[str, ...]] = {
    (4,): tuple(code for code in CODES if code not in {*_BINNED, *CENTRED}),
    (2, 2): CENTRED,
}
"""The codes for so many columns of each output; other numbers of columns are bins."""


# Bounds by which boxes are told from other numbers: the least share whose corners are in order, the least spread of
# centres as a share of the image, the least median area (2 x 2 of 640 x 640 pixels), and the largest coordinate of
# boxes that are given as shares of the image.
_MOSTLY, _LEAST_SPREAD, _SPECK, _MOST_SHARE = 0.95, 0.2, 1e-5, 2.0


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a table, which is one output, or several outputs (one per level) one below the other.

    `axis` is that of the columns, counted from the end. With several `anchors` it holds the columns of the first, then
    those of the second, and so on. The columns are those from `start` to `stop`.
    """

    outputs: tuple[str, ...]
    axis: int
    start: int
    stop: int
    anchors: int = 1

    @property
    def count(self) -> int:
        """How many columns."""
        return self.stop - self.start

    def read(self, outputs: Tensors, rows: Array | None = None) -> Array:
        """Returns the columns of all rows, or of those that are given, float64 [rows, columns]."""
        values = self.view(outputs)
        return np.asarray(values if rows is None else values[rows], np.float64)

    def view(self, outputs: Tensors) -> Array:
        """Returns the columns of all rows as they lie in memory, [rows, columns]."""
        parts = list[Array]()
        for value in (outputs[name] for name in self.outputs):
            rows = np.moveaxis(value[0], self.axis, -1) if value.ndim > 2 else value
            if self.anchors > 1:
                rows = np.moveaxis(rows.reshape(*rows.shape[:-1], self.anchors, -1), -2, 0)
            parts.append(rows.reshape(-1, rows.shape[-1]))
        return (np.concatenate(parts) if len(parts) > 1 else parts[0])[:, self.start : self.stop]


class ExtraColumns(Columns, frozen=True, kw_only=True):
    """Columns with other predictions for an object than its box, class and score.

    Attributes:
        kind: "masks" are coefficients of the channels of the output `prototypes` (D. Bolya et al., "YOLACT",
            arXiv:1904.02689), "points" are keypoints in the image, and "values" anything else.
        numbers: how many numbers a keypoint has: x and y, and mostly a visibility.
        prototypes: the output whose channels are combined to masks.
        image: height and width of the image.
    """

    kind: Literal["values", "points", "masks"] = "values"
    numbers: int = 0
    prototypes: str = ""
    image: tuple[int, int] = (0, 0)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Where the boxes, the scores and the objectness of a detector lie, and how they are coded.

    Attributes:
        boxes: the columns that encode boxes.
        scores: the columns of the classes.
        code: how boxes are encoded (a key of `CODES` or `EXPLICIT`).
        grid: the grids that boxes are relative to, None for boxes that the graph has decoded.
        objectness: the column of the objectness, None if there is none.
        squash: the function that makes probabilities of scores: "" (none), "sigmoid" or "softmax".
        squash_objectness: the same for the objectness.
        background: the index of the background class among the scores, None if there is none.
        peaks: the sides of a map of scores of which only those that are higher than their neighbours are detections,
            and no box suppresses another (X. Zhou et al., "Objects as Points", arXiv:1904.07850).
        extras: other columns of the same rows, such as keypoints: they count only where an object is.
    """

    boxes: tuple[Columns, ...]
    scores: Columns
    code: str
    grid: Grid | None = None
    objectness: Columns | None = None
    squash: str = ""
    squash_objectness: str = ""
    background: int | None = None
    peaks: tuple[int, int] | None = None
    extras: tuple[ExtraColumns, ...] = ()

    keeps_places: ClassVar[bool] = True

    @property
    def centred(self) -> bool:
        """True if scores are heights of peaks on a map; else non-maximum suppression is still to be applied."""
        return self.peaks is not None

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs that are read."""
        every = (*self.boxes, self.scores, *filter(None, [self.objectness]), *self.extras)
        prototypes = frozenset(each.prototypes for each in self.extras if each.prototypes)
        return prototypes.union(*(each.outputs for each in every))

    def decode(self, outputs: Tensors) -> tuple[Array, Array]:
        """Returns corners of boxes, float64 [rows, 4], and the probability of each class, float64 [rows, classes]."""
        scores = self.read_scores(outputs)
        if self.peaks is not None:
            # 0 where one of the eight neighbours on the map has a higher score of the class.
            maps = np.pad(scores.reshape(*self.peaks, -1), ((1, 1), (1, 1), (0, 0)))
            windows = np.lib.stride_tricks.sliding_window_view(maps, (3, 3), axis=(0, 1))
            scores = np.where(scores >= windows.max(axis=(-2, -1)).reshape(scores.shape), scores, 0.0)
        return decode_boxes(self.code, self.read_boxes(outputs), self.grid), scores

    def read_boxes(self, outputs: Tensors, rows: Array | None = None) -> Array:
        """Returns the numbers that code boxes, float64 [rows, columns]; of all rows, or of those that are given."""
        return np.concatenate([each.read(outputs, rows) for each in self.boxes], axis=1)

    def read_scores(self, outputs: Tensors, rows: Array | None = None) -> Array:
        """Returns the probability of each class, float64 [rows, classes]; of all rows, or of those that are given."""
        scores = squash_scores(self.scores.read(outputs, rows), self.squash)
        if self.background is not None:
            scores = np.delete(scores, self.background, axis=1)
        if self.objectness is None:
            return scores
        return scores * squash_scores(self.objectness.read(outputs, rows), self.squash_objectness)

    def read_surest(self, outputs: Tensors) -> Array:
        """Returns the probability of the surest class, float64 [rows]."""
        if self.background is not None:
            return np.asarray(self.read_scores(outputs).max(axis=1))
        # A sigmoid is monotonic: that of the largest is enough.
        surest = squash_scores(self.scores.view(outputs).max(axis=1).astype(np.float64), self.squash)
        return (
            surest
            if self.objectness is None
            else surest * squash_scores(self.objectness.read(outputs)[:, 0], self.squash_objectness)
        )


def squash_scores(scores: Array, squash: str) -> Array:
    """Returns probabilities of scores; `squash` is that of a `Head`."""
    if squash == "sigmoid":
        return sigmoid(scores)
    if squash == "softmax":
        return softmax(scores)
    return np.clip(scores, 0, 1)


def overlap_boxes(one: Array, two: Array) -> Array:
    """Returns intersection over union of all pairs of boxes, given by their corners, float64 [first, second]."""
    return overlap_pairs(one[:, None], two[None])


def overlap_pairs(one: Array, two: Array) -> Array:
    """Returns intersection over union of the boxes at equal positions of two arrays [..., 4] of corners."""

    def share(first: Array, second: Array) -> Array:
        # By side: a product over an axis of two numbers takes ten times as long.
        wide, high = (
            np.minimum(first[..., at + 2], second[..., at + 2]) - np.maximum(first[..., at], second[..., at])
            for at in (0, 1)
        )
        return np.asarray(np.maximum(wide, 0) * np.maximum(high, 0))

    both = share(one, two)
    return np.asarray(both / np.maximum(share(one, one) + share(two, two) - both, 1e-12))


def find_sides(boxes: Array, image: tuple[int, int]) -> Array:
    """Returns width and height of the image in the units of decoded corners: pixels, or 1 for shares of the image."""
    return np.array([1, 1] if np.abs(boxes).max(initial=0) <= _MOST_SHARE else image[::-1], np.float64)


def are_boxes(boxes: Array, image: tuple[int, int], *, explicit: bool) -> bool:
    """Returns True if corners are plausible boxes: spread over the image, neither tiny nor as large as all of it."""
    if not np.isfinite(boxes).all():
        return False
    sides = find_sides(boxes, image) if explicit else np.array(image[::-1], np.float64)
    low, high = boxes[:, :2] / sides, boxes[:, 2:] / sides
    middle, area = (low + high) / 2, (high - low).prod(axis=1)
    good = (high > low).all(axis=1) & (middle > -0.2).all(axis=1) & (middle < 1.2).all(axis=1)
    is_spread = np.ptp(middle, axis=0).max() >= _LEAST_SPREAD
    return bool(good.mean() >= _MOSTLY and is_spread and _SPECK <= np.median(area) < 1.0)
