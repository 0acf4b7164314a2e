"""How the raw head of a detector is read: where boxes and scores lie in the outputs, and how they become detections."""

from typing import ClassVar

import msgspec
import numpy as np

from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.box_codes import Grid, decode_boxes
from edgekit.quantize.ranges.nonlinearities import sigmoid, softmax

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

    keeps_places: ClassVar[bool] = True

    @property
    def suppresses(self) -> bool:
        """True if of boxes that overlap only the surest is a detection."""
        return self.peaks is None

    @property
    def centred(self) -> bool:
        """True if scores are heights of peaks on a map."""
        return self.peaks is not None

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
        scores = squash_scores(self.scores.read(outputs, rows), self.squash)
        if self.background is not None:
            scores = np.delete(scores, self.background, axis=1)
        if self.objectness is None:
            return scores
        return scores * squash_scores(self.objectness.read(outputs, rows), self.there)

    def read_surest(self, outputs: Tensors) -> Array:
        """Returns the probability of the surest class, float64 [rows]."""
        if self.background is not None:
            return np.asarray(self.read_scores(outputs).max(axis=1))
        # A sigmoid is monotonic: that of the largest is enough.
        surest = squash_scores(self.scores.view(outputs).max(axis=1).astype(np.float64), self.squash)
        return (
            surest
            if self.objectness is None
            else surest * squash_scores(self.objectness.read(outputs)[:, 0], self.there)
        )


def squash_scores(scores: Array, squash: str) -> Array:
    """Returns probabilities of scores; `squash` is that of a `Head`."""
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


def overlap_boxes(one: Array, two: Array) -> Array:
    """Returns intersection over union of all pairs of boxes, given by their corners, float64 [first, second]."""
    low = np.maximum(one[:, None, :2], two[None, :, :2])
    high = np.minimum(one[:, None, 2:], two[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(axis=-1)
    sizes = [np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1) for boxes in (one, two)]
    return np.asarray(both / np.maximum(sizes[0][:, None] + sizes[1][None] - both, 1e-12))


def are_boxes(boxes: Array, image: tuple[int, int], *, explicit: bool) -> bool:
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
