"""What the mean AP of a detector loses, told without labels from the detections of the float and the quantized model.

A detection of the float model is taken for an object with the probability of its score, and its box for one that misses
the object's by as much as boxes of detectors do. Truths are drawn so, and AP over IoU 0.50 to 0.95 is computed of both
models on each, as COCO does (T.-Y. Lin et al., 2014). What a quantized box moves adds to a miss as a side to a side: a
box that overlaps with 0.97 where the float one itself misses by 0.2 hardly loses, though its own AP against the float
boxes falls by much more.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from edgekit.data.wilson import Z95
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.heads import overlap_boxes
from edgekit.quantize.accuracy.loss import discount_loss

_THRESHOLDS = np.linspace(0.5, 0.95, 10)
# As COCO counts: at most so many of an image; what scores less is noise and costs time.
_MOST_BOXES, _LEAST_SCORE = 100, 0.01
_MOST_CANDIDATES = 300
_SAME_OBJECT, _NEVER = 0.5, 2.0
# How likely a detection is right, as a power of its score: what is left where boxes overlap less than they should is
# mostly wrong. How far the four sides of a box miss those of the object, one by one, so that a box misses it by twice
# that on average. Both by the detectors of tools/bench/detector_drop.py that were not held out.
_CERTAINTY = 1.8
_MISS = 0.13
_DRAWS = 100
# What scores do not tell: which objects no model finds, so that AP is mostly less than drawn. Five detectors of
# tools/bench/interval_coverage.py have 0.46 (FastestDet, of photographs), 0.63, 0.78, 0.85 and 1.1 of it. Fitted with
# each left out in turn it comes to 0.75, which misses the drop as much (0.75 points for 0.79) and that of photographs
# by more, so this stays. On a map of middles every object has a peak, however low, and the law of `_likelihood` gives
# the AP as it is: 12.2 to 13.1, true 12.7.
_ALL_SEEN = 0.6
# How far that, and `discount_loss`, may be off to each side, as a share of the drop: from detector to detector the
# mean logarithm of what was lost of what was expected has a deviation of 0.47 (six of them, 3 to 12 plans each). So
# 95 % of further ones lie between 1 / 2.7 and 2.7 times it; downwards more, as of small drops least is lost.
_LESS, _MORE = 0.4, 0.85


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The mean AP expected of the float model and its drop, with the interval of 95 % of that."""

    reference: float
    drop: float
    interval: tuple[float, float]


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """Detections of an image, the surest first: their rows, corners, scores and classes."""

    rows: Array
    boxes: Array
    scores: Array
    classes: Array


class _Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Detections of one model in the order in which AP reads them: by class, the surest first.

    `places` are their rows in the table of records, `starts` where the class of each begins, `ranks` which class it is.
    """

    places: Array
    starts: Array
    ranks: Array


class Detector(Protocol):
    """How outputs become detections; of one that `keeps_places` a row is the same place in both models."""

    keeps_places: ClassVar[bool]

    @property
    def suppresses(self) -> bool:
        """True if of boxes that overlap only the surest is a detection."""
        ...

    def decode(self, outputs: Tensors) -> tuple[Array, Array]:
        """Returns corners of boxes, float64 [rows, 4], and the probability of each class, float64 [rows, classes]."""
        ...


def record_detections(head: Detector, expected: Tensors, found: Tensors) -> Array:
    """Returns what may be an object in a sample, float64 [objects, 5].

    The columns are its class, the float model's probability that it is one, the scores that the float and the quantized
    model give it (0 where one does not show it), and one less the overlap of the two boxes.
    """
    boxes, chances = head.decode(expected)
    others, theirs = head.decode(found)
    overlap = _SAME_OBJECT if head.suppresses else _NEVER
    mine, got = _suppress(boxes, chances, overlap), _suppress(others, theirs, overlap)
    overlaps = overlap_boxes(got.boxes, mine.boxes) * (got.classes[:, None] == mine.classes)
    taken = np.zeros(len(mine.rows), np.bool_)
    records = np.zeros((len(mine.rows), 5))
    records[:, 0], records[:, 1], records[:, 2] = mine.classes, mine.scores, mine.scores
    more: list[list[float]] = []
    for index, score in enumerate(got.scores):
        row, kind = int(got.rows[index]), int(got.classes[index])
        # Another place may show the object now, whose float box is as good: what counts is by how much that moved.
        apart = 1 - float(overlap_boxes(boxes[row : row + 1], others[row : row + 1])[0, 0]) if head.keeps_places else 0
        free = np.where(taken, 0.0, overlaps[index])
        best = int(free.argmax()) if free.size else 0
        if free.size and free[best] >= _SAME_OBJECT:
            taken[best] = True
            # Beside a middle no box is taught, so that a peak one place on is held against the box of the old one.
            records[best, 3:] = score, apart if head.suppresses else 1 - overlaps[index, best]
            continue
        # A second box on an object is wrong; elsewhere the float model says itself how likely one is, if it does.
        is_wrong = not head.keeps_places or overlaps[index].max(initial=0) >= _SAME_OBJECT
        more.append([kind, 0.0 if is_wrong else float(chances[row, kind]), 0.0, float(score), apart])
    return np.concatenate([records, np.array(more).reshape(-1, 5)])


def estimate_drop(records: Sequence[Array], *, centred: bool = False) -> Estimate:
    """Returns the drop of mean AP over the truths that records allow, with images drawn anew each time.

    `centred` says that scores are heights of peaks on a map (`Head.peaks`).
    """
    table = np.concatenate(records)
    likely = _likelihood(table[:, 1], centred=centred)
    images = np.repeat(np.arange(len(records)), [len(record) for record in records])
    rng = np.random.default_rng(0)
    rankings = [_rank(table, column) for column in (2, 3)]
    scores = np.zeros((_DRAWS, 2))
    for draw in range(_DRAWS):
        counts = rng.multinomial(len(records), np.full(len(records), 1 / len(records)))
        weights = counts[images] * (rng.random(len(table)) < likely)
        # Of four errors the first is taken to be the one along which the quantized box lies apart.
        along, others = rng.normal(0, _MISS, len(table)), _MISS**2 * rng.chisquare(3, len(table))
        miss, moved = (np.sqrt((along + by) ** 2 + others) for by in (0.0, table[:, 4]))
        for side, (ranking, error) in enumerate(zip(rankings, (miss, moved), strict=True)):
            scores[draw, side] = _mean_ap(ranking, table[:, 0], counts[images], weights, error)
    reference, (drop, spread) = float(scores[:, 0].mean()), _mean_and_spread(scores[:, 0] - scores[:, 1])
    seen = 1.0 if centred else _ALL_SEEN
    expected = seen * reference * discount_loss(drop / max(reference, 1e-12))
    less, more = (Z95 * float(np.hypot(seen * spread, doubt * expected)) for doubt in (_LESS, _MORE))
    return Estimate(
        reference=seen * reference,
        drop=expected,
        interval=(max(expected - less, -1.0), min(expected + more, 1.0)),
    )


def _likelihood(chances: Array, *, centred: bool) -> Array:
    """Returns how likely detections are right.

    A map of middles lies above zero everywhere, and one that is little sure comes nowhere near one. What it tells is
    how far a peak rises from the level of most of them to the highest. Of a CenterNet (tools/bench/collapse) whose
    highest was 0.45, peaks of 0.34, 0.25, 0.18 and 0.12 were right in 25, 12, 4.6 and 1.1 %; this says 24, 12, 4.9 and
    1.5.
    """
    if not centred or not len(chances):
        return np.asarray(chances**_CERTAINTY)
    most, level = float(chances.max()), float(np.median(chances))
    return np.asarray(most * (np.maximum(chances - level, 0) / max(most - level, 1e-12)) ** _CERTAINTY)


def _mean_and_spread(values: Array) -> tuple[float, float]:
    return float(values.mean()), float(values.std())


def _suppress(boxes: Array, chances: Array, overlap: float) -> _Found:
    """Returns what is left where of two boxes of a class that overlap by so much the surer one stays."""
    rows, classes = np.nonzero(chances >= _LEAST_SCORE)
    scores = chances[rows, classes]
    order = np.argsort(-scores, kind="stable")[:_MOST_CANDIDATES]
    rows, classes, scores = rows[order], classes[order], scores[order]
    near = (overlap_boxes(boxes[rows], boxes[rows]) >= overlap) & (classes[:, None] == classes)
    alive = np.ones(len(rows), np.bool_)
    for index in range(len(rows)):
        if alive[index]:
            alive[index + 1 :] &= ~near[index, index + 1 :]
    kept = np.flatnonzero(alive)[:_MOST_BOXES]
    return _Found(rows=rows[kept], boxes=boxes[rows[kept]], scores=scores[kept], classes=classes[kept])


def _rank(table: Array, column: int) -> _Ranking:
    shown = np.flatnonzero(table[:, column] > 0)
    order = shown[np.lexsort((-table[shown, column], table[shown, 0]))]
    kinds = table[order, 0]
    first = np.append(True, kinds[1:] != kinds[:-1])[: len(order)]
    starts = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0)) if len(order) else order
    return _Ranking(places=order, starts=starts, ranks=np.cumsum(first))


def _mean_ap(ranking: _Ranking, classes: Array, counts: Array, weights: Array, error: Array) -> float:
    """Returns the mean over classes that occur and over thresholds of the area under precision against recall.

    `counts` says how often each record counts, `weights` the same where it is an object and 0 elsewhere.
    """
    kinds = classes.astype(np.int64)
    objects = np.bincount(kinds, weights, minlength=int(kinds.max(initial=0)) + 1)
    if not objects.any():
        return 0.0
    places, starts = ranking.places, ranking.starts
    hits = weights[places] * (error[places] <= 1 - _THRESHOLDS[:, None] + 1e-9)

    def add_up(values: Array) -> Array:
        sums = np.cumsum(values, axis=-1)
        return np.asarray(sums - (sums - values)[..., starts])

    precision = add_up(hits) / np.maximum(add_up(counts[places].astype(np.float64)), 1e-12)
    # Precision at a recall is the best at any higher one; classes to the right are put below all of it.
    lowered = precision - 2 * ranking.ranks
    best = np.maximum.accumulate(lowered[:, ::-1], axis=1)[:, ::-1] + 2 * ranking.ranks
    areas = (hits * best).sum(axis=0) / np.maximum(objects[kinds[places]], 1e-12)
    return float(areas.sum() / len(_THRESHOLDS) / np.count_nonzero(objects))
