"""Raw heads of detectors: which outputs hold boxes and scores, told by layout and by values, and how to decode them.

No model is known by name. Every way to read the outputs that their shapes allow is tried on a few samples, and one
counts only if its boxes make sense: places that are sure of a class show the same objects as their neighbours do.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import msgspec
import numpy as np

from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.box_codes import BINS, CENTRED, Grid, decode_boxes, lay_grids
from edgekit.quantize.ranges.nonlinearities import sigmoid, softmax

# Fewer rows are no places where something may be; a small net for images of 64 pixels has 80.
_LEAST_ROWS = 40
# More outputs are no head, which has five levels of four at most. Of a language model's cache, two for each layer,
# pairs and triples would be tried for minutes.
_MOST_OUTPUTS = 20
# More rows are pixels, and so are maps whose cells are smaller.
_MOST_ROWS, _LEAST_CELL = 1 << 17, 4
_BOX = 4
# What is less sure than this tells nothing about where something is; detectors for COCO reach 0.3 and more.
_LEAST_SCORE = 0.1
# Of the rows at most so many may be sure: most of an image is background.
_MOST_SURE = 0.3
# How much more sure neighbours must overlap than with boxes mixed up, and in how many places that is seen. Readings
# that are right come to 0.23 to 0.49, wrong ones to 0.19 at most, on the detectors of tools/bench/detector_drop.py.
_LEAST_AGREEMENT = 0.2
_LEAST_SEEN = 8
# Around a middle boxes are not taught, so its neighbours show the same object less well; but shifts that are right stay
# within their cell, but for so much. By the CenterNet of tools/bench/collapse/run_unseen.py (0.15) alone.
_LEAST_CENTRED, _BEYOND_CELL = 0.1, 0.25
# A softmax with a background has that on top in at least so many places.
_BACKGROUND = 0.6
# What is left, once multiplied by the surest class, of a column that says whether there is anything: 0.85 and more. Of
# a class it is less than 0.5, even where a detector hardly tells its classes apart.
_SURE_CLASS = 0.65
_MOST_COMPARED = 60
# Boxes that are right as they stand need no grid, and what are corners would do for middle and size as well.
_PREFERRED = {"corners": 2, "middle and size": 1}
# What tells boxes from other numbers: so many are in order, they lie in more than one corner, and half of them are
# larger than 2 of 640 pixels either way. Shares of an image may reach past it.
_MOSTLY, _LEAST_SPREAD, _SPECK, _MOST_SHARE = 0.95, 0.2, 1e-5, 2.0


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a table of rows, which is one output or several levels one after the other.

    `axis` is that of the columns, counted from the end; `anchors` tables lie within that axis, one after the other.
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
        parts = [self._read_level(outputs[name]) for name in self.outputs]
        return (np.concatenate(parts) if len(parts) > 1 else parts[0])[:, self.start : self.stop]

    def _read_level(self, value: Array) -> Array:
        rows = np.moveaxis(value[0], self.axis, -1) if value.ndim > 2 else value
        if self.anchors > 1:
            rows = np.moveaxis(rows.reshape(*rows.shape[:-1], self.anchors, -1), -2, 0)
        return rows.reshape(-1, rows.shape[-1])


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Where boxes, scores and, if there is one, the score of there being anything lie, and how they are coded.

    `boxes` are columns side by side. Of scores on a map with the sides `peaks` only what is highest among its
    neighbours is a detection, and no box suppresses another (X. Zhou et al., "Objects as Points", arXiv:1904.07850).
    `squash` is what makes probabilities of scores: "", "sigmoid" or "softmax", and `there` of the score of there being
    anything. `background` is the column of scores that stands for nothing.
    """

    boxes: tuple[Columns, ...]
    scores: Columns
    code: str
    grid: Grid | None = None
    objectness: Columns | None = None
    squash: str = ""
    there: str = ""
    background: int | None = None
    peaks: tuple[int, int] | None = None

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs that are read."""
        return frozenset(name for each in (*self.boxes, self.scores) for name in each.outputs)

    def decode(self, outputs: Tensors) -> tuple[Array, Array]:
        """Returns corners of boxes, float64 [rows, 4], and the probability of each class, float64 [rows, classes]."""
        scores = self.read_scores(outputs)
        if self.peaks is not None:
            scores = _keep_peaks(scores, self.peaks)
        return decode_boxes(self.code, self.read_boxes(outputs), self.grid), scores

    def read_boxes(self, outputs: Tensors, rows: Array | None = None) -> Array:
        """Returns the numbers that code boxes, float64 [rows, columns]; of all rows, or of those that are given."""
        return np.concatenate([each.read(outputs, rows) for each in self.boxes], axis=1)

    def read_scores(self, outputs: Tensors, rows: Array | None = None) -> Array:
        """Returns the probability of each class, float64 [rows, classes]; of all rows, or of those that are given."""
        scores = _squash(self.scores.read(outputs, rows), self.squash)
        if self.background is not None:
            scores = np.delete(scores, self.background, axis=1)
        if self.objectness is None:
            return scores
        return scores * _squash(self.objectness.read(outputs, rows), self.there)

    def read_surest(self, outputs: Tensors) -> Array:
        """Returns the probability of the surest class, float64 [rows]."""
        if self.background is not None:
            return np.asarray(self.read_scores(outputs).max(axis=1))
        # A sigmoid is monotonic: that of the largest is enough.
        surest = _squash(self.scores.view(outputs).max(axis=1).astype(np.float64), self.squash)
        return surest if self.objectness is None else surest * _squash(self.objectness.read(outputs)[:, 0], self.there)


_Pair = tuple[tuple[Columns, ...], tuple[Columns, ...]]
"""Columns of boxes, side by side, and of the objectness, if there is one, and the scores."""


class _Sure(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a sample that are sure of a class, the surest first, and that class."""

    rows: Array
    classes: Array


def find_head(outputs: Sequence[Tensors], image: tuple[int, int]) -> Head | None:
    """Returns how to read the raw head of a detector, None where nothing makes sense as one.

    `outputs` are what a float model gave for a few samples, `image` height and width of what it saw.
    """
    best, reached = None, (0, 0.0)
    for boxes, scores in _pair_columns(outputs[0]):
        sides, rows = _sides(outputs[0], boxes[0]), sum(_count_rows(outputs[0], boxes[0]))
        if rows > _MOST_ROWS or any(_LEAST_CELL * height > image[0] for _, height, _ in sides):
            continue
        for head in _read_scores(outputs, boxes, scores):
            sure = _find_sure(head, outputs)
            columns = tuple(each.count for each in boxes)
            for code, grid in lay_grids(columns, rows, sides, image) if sure else ():
                peaks = sides[0][1:] if code in CENTRED else None
                coded = msgspec.structs.replace(head, code=code, grid=grid, peaks=peaks)
                near, mixed = _agreement(coded, outputs, sure, image)
                rank = (_PREFERRED.get(code, 0), round(near, 2))
                if near - mixed >= (_LEAST_AGREEMENT if peaks is None else _LEAST_CENTRED) and rank > reached:
                    best, reached = coded, rank
    return best


def may_be_head(outputs: Tensors) -> bool:
    """Returns True where the shapes of outputs allow them to be the raw head of a detector."""
    return next(_pair_columns(outputs), None) is not None


def find_image(inputs: Tensors) -> tuple[int, int] | None:
    """Returns height and width of the image among the inputs, None where there is none."""
    for value in inputs.values():
        if value.ndim == 4 and min(value.shape[1], value.shape[3]) in {1, 3, 4}:
            sides = value.shape[2:] if value.shape[1] in {1, 3, 4} else value.shape[1:3]
            return int(sides[0]), int(sides[1])
    return None


def _pair_columns(outputs: Tensors) -> Iterator[_Pair]:
    """Yields where boxes may lie, and the scores with the objectness, if there is one, in front of them."""
    if sum(value.dtype.kind == "f" and value.ndim > 1 for value in outputs.values()) > _MOST_OUTPUTS:
        return
    for table in _find_tables(outputs):
        for boxes, scores in _split_table(table):
            yield (boxes,), scores
    yield from _pair_maps(outputs)
    named = {name: value.shape for name, value in outputs.items() if value.dtype.kind == "f" and value.ndim >= 2}
    for name, shape in named.items():
        for other, beside in named.items():
            pair = name != other and len(shape) == len(beside) == 3 and shape[:2] == beside[:2]
            if pair and shape[1] >= _LEAST_ROWS and shape[2] >= _BOX and (shape[2] == _BOX or beside[2] == 1):
                boxes = Columns(outputs=(name,), axis=-1, start=0, stop=_BOX)
                yield (boxes,), (Columns(outputs=(other,), axis=-1, start=0, stop=beside[2]),)


def _pair_maps(outputs: Tensors) -> Iterator[_Pair]:
    """Yields two maps of two channels each, shifts and sizes, beside one of scores with the same sides."""
    shapes = {name: value.shape for name, value in outputs.items() if value.dtype.kind == "f" and value.ndim == 4}
    for axis in (-3, -1):
        places = {
            name: tuple(size for place, size in enumerate(shape) if place != 4 + axis) for name, shape in shapes.items()
        }
        whole = {name: Columns(outputs=(name,), axis=axis, start=0, stop=shape[axis]) for name, shape in shapes.items()}
        # Those of two channels first: of a language model's cache every output has four dimensions.
        halves = [
            name
            for name, shape in shapes.items()
            if shape[axis] == _BOX // 2 and math.prod(places[name]) >= _LEAST_ROWS
        ]
        for shifts, sizes in permutations(halves, 2):
            for scores in shapes if places[shifts] == places[sizes] else ():
                if scores not in {shifts, sizes} and places[scores] == places[shifts]:
                    yield (whole[shifts], whole[sizes]), (whole[scores],)


def _find_tables(outputs: Tensors) -> Iterator[Columns]:
    """Yields what may be a table of boxes and scores: one output, or maps of several levels with as many channels."""
    shapes = {
        name: value.shape for name, value in outputs.items() if value.dtype.kind == "f" and value.shape[:1] == (1,)
    }
    for name, shape in shapes.items():
        if len(shape) == 3:
            for axis in (-1, -2):
                if shape[axis] > _BOX and math.prod(shape) // shape[axis] >= _LEAST_ROWS:
                    yield Columns(outputs=(name,), axis=axis, start=0, stop=shape[axis])
    for rank, axis in ((4, -3), (4, -1), (5, -1)):
        levels = tuple(name for name, shape in shapes.items() if len(shape) == rank)
        channels = {shapes[name][axis] for name in levels}
        if len(channels) != 1:
            continue
        (count,) = channels
        for anchors in (1, 3) if rank == 4 else (1,):
            if count % anchors == 0 and count // anchors > _BOX:
                ordered = tuple(sorted(levels, key=lambda name: -math.prod(shapes[name])))
                yield Columns(outputs=ordered, axis=axis, start=0, stop=count // anchors, anchors=anchors)


def _split_table(table: Columns) -> Iterator[tuple[Columns, tuple[Columns, ...]]]:
    """Yields the usual orders of columns: boxes first or last, with or without a score of there being anything."""
    count = table.count

    def part(start: int, stop: int) -> Columns:
        return msgspec.structs.replace(table, start=start, stop=stop)

    for width in (_BOX, *(_BOX * bins for bins in BINS)):
        if width + 1 > count:
            continue
        yield part(0, width), (part(width, count),)
        yield part(count - width, count), (part(0, count - width),)
        if width + 2 <= count:
            yield part(0, width), (part(width, width + 1), part(width + 1, count))
            yield part(1, width + 1), (part(0, 1), part(width + 1, count))


def _count_rows(outputs: Tensors, columns: Columns) -> list[int]:
    return [
        math.prod(outputs[name].shape) // outputs[name].shape[columns.axis] * columns.anchors
        for name in columns.outputs
    ]


def _sides(outputs: Tensors, columns: Columns) -> tuple[tuple[int, int, int], ...]:
    """Returns anchors, height and width of each level, nothing where rows are not laid out as maps."""
    found: list[tuple[int, int, int]] = []
    for name in columns.outputs:
        shape = outputs[name].shape
        if len(shape) < 4:
            return ()
        height, width = shape[2:4] if columns.axis == -3 or len(shape) == 5 else shape[1:3]
        found.append((shape[1] if len(shape) == 5 else columns.anchors, height, width))
    return tuple(found)


def _read_scores(outputs: Sequence[Tensors], boxes: tuple[Columns, ...], parts: tuple[Columns, ...]) -> Iterator[Head]:
    """Yields how scores may be read, as their values allow: probabilities, or logits with or without background."""
    scores = [parts[-1].view(row) for row in outputs]
    low, high = min(float(each.min()) for each in scores), max(float(each.max()) for each in scores)
    # The least and the largest of what holds NaN are NaN.
    if not (np.isfinite(low) and np.isfinite(high)):
        return
    are_shares = _are_shares(low, high)
    squash = "" if are_shares else "sigmoid"
    if len(parts) == 2:
        there = np.stack([parts[0].read(row) for row in outputs])
        whether = "" if _are_shares(float(there.min()), float(there.max())) else "sigmoid"
        there = _squash(there, whether)
        # Both are monotonic: the largest score is that of the largest value.
        both = there * _squash(
            np.stack([each.max(axis=-1, keepdims=True) for each in scores], dtype=np.float64), squash
        )
        # Where something is, some class is sure too: a class in that place would stand alone.
        if both.max(axis=1).mean() >= _SURE_CLASS * max(float(there.max(axis=1).mean()), 1e-12):
            yield Head(boxes=boxes, scores=parts[1], objectness=parts[0], squash=squash, there=whether, code="")
        return
    if parts[0].count > 1:
        ends, tops = (0, parts[0].count - 1), np.stack([each.argmax(axis=-1) for each in scores])
        shares = [float((tops == end).mean()) for end in ends]
        sums_to_one = (
            are_shares and max(np.abs(each.sum(axis=-1, dtype=np.float64) - 1).max() for each in scores) < 1e-2
        )
        if max(shares) >= _BACKGROUND and (sums_to_one or not are_shares):
            over = "" if sums_to_one else "softmax"
            yield Head(boxes=boxes, scores=parts[0], squash=over, background=ends[int(np.argmax(shares))], code="")
    yield Head(boxes=boxes, scores=parts[0], squash=squash, code="")


def _are_shares(low: float, high: float) -> bool:
    return low >= -1e-3 and high <= 1 + 1e-3


def _squash(scores: Array, squash: str) -> Array:
    if squash == "sigmoid":
        return sigmoid(scores)
    if squash == "softmax":
        return softmax(scores)
    return np.clip(scores, 0, 1)


def _keep_peaks(scores: Array, sides: tuple[int, int]) -> Array:
    """Returns scores of a map [rows, classes], 0 where one of the eight neighbours has a higher one of the class."""
    maps = np.pad(scores.reshape(*sides, -1), ((1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(maps, (3, 3), axis=(0, 1))
    return np.where(scores >= windows.max(axis=(-2, -1)).reshape(scores.shape), scores, 0.0)


def _find_sure(head: Head, outputs: Sequence[Tensors]) -> tuple[_Sure, ...]:
    """Returns the rows of each sample that are sure of a class, nothing where they are too many, or sure of nothing."""
    best = np.stack([head.read_surest(row) for row in outputs])
    least = float(best.max()) / 2
    if 2 * least < _LEAST_SCORE or np.mean(best >= least) > _MOST_SURE or np.sum(best >= least) < _LEAST_SEEN:
        return ()
    found: list[_Sure] = []
    for row, tops in zip(outputs, best, strict=True):
        rows = np.argsort(-tops, kind="stable")[: min(_MOST_COMPARED, int((tops >= least).sum()))]
        found.append(_Sure(rows=rows, classes=head.read_scores(row, rows).argmax(axis=1)))
    return tuple(found)


def _agreement(
    head: Head, outputs: Sequence[Tensors], sure: Sequence[_Sure], image: tuple[int, int]
) -> tuple[float, float]:
    """Returns how much sure neighbours overlap, and how much they would with the box of another; 0 for what is no head.

    Places alone make neighbours overlap, so for the comparison each gets the numbers of another one.
    """
    values = [head.read_boxes(row, one.rows) for row, one in zip(outputs, sure, strict=True)]
    every = np.concatenate(values)
    mixed = np.random.default_rng(0).permutation(every)
    swapped = np.split(mixed, np.cumsum([len(one.rows) for one in sure])[:-1])
    boxes = [decode_boxes(head.code, each, head.grid, one.rows) for each, one in zip(values, sure, strict=True)]
    beyond = np.abs(every[:, :2] - 0.5).max(axis=1) - 0.5
    in_cells = head.peaks is None or float((beyond <= _BEYOND_CELL).mean()) >= _MOSTLY
    if not in_cells or not _are_boxes(np.concatenate(boxes), image, explicit=head.grid is None):
        return 0.0, 0.0
    near: list[float] = []
    others: list[float] = []
    for one, swap, right in zip(sure, swapped, boxes, strict=True):
        near += _overlap_neighbours(right, one.classes)
        others += _overlap_neighbours(decode_boxes(head.code, swap, head.grid, one.rows), one.classes)
    return (float(np.mean(near)), float(np.mean(others))) if len(near) >= _LEAST_SEEN else (0.0, 0.0)


def _overlap_neighbours(boxes: Array, classes: Array) -> list[float]:
    """Returns how much each box overlaps the one of its class that it overlaps most."""
    overlaps = overlap_boxes(boxes, boxes) * (classes[:, None] == classes)
    np.fill_diagonal(overlaps, 0)
    return [float(value) for value in overlaps.max(axis=1)] if len(boxes) > 1 else []


def _are_boxes(boxes: Array, image: tuple[int, int], *, explicit: bool) -> bool:
    """Returns True if corners are those of boxes here and there in the image, neither specks nor all of it."""
    if not np.isfinite(boxes).all():
        return False
    # Corners that the graph decodes may be shares of the image.
    sides = np.array([1, 1] if explicit and np.abs(boxes).max() <= _MOST_SHARE else image[::-1], np.float64)
    low, high = boxes[:, :2] / sides, boxes[:, 2:] / sides
    middle, area = (low + high) / 2, (high - low).prod(axis=1)
    good = (high > low).all(axis=1) & (middle > -0.2).all(axis=1) & (middle < 1.2).all(axis=1)
    is_spread = np.ptp(middle, axis=0).max() >= _LEAST_SPREAD
    return bool(good.mean() >= _MOSTLY and is_spread and _SPECK <= np.median(area) < 1.0)


def overlap_boxes(one: Array, two: Array) -> Array:
    """Returns intersection over union of all pairs of boxes, given by their corners, float64 [first, second]."""
    low = np.maximum(one[:, None, :2], two[None, :, :2])
    high = np.minimum(one[:, None, 2:], two[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(axis=-1)
    sizes = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1) for boxes in (one, two)]
    return np.asarray(both / np.maximum(sizes[0][:, None] + sizes[1][None] - both, 1e-12))
