"""The mean AP that a detector loses, estimated without labels from the detections of the float and the quantized model.

Ground truths are drawn at random from the float model's detections: each shows an object with a probability that
follows from its score, and its box differs from the object's by a random error of the size that is usual for detectors.
Against each ground truth both models get their AP over IoU 0.50 to 0.95, as COCO computes it (T.-Y. Lin et al., 2014).
The shift of a box by quantization is independent of that error, so their squares add up. Example: a quantized box with
an IoU of 0.97 with the float box, whose own error is 0.2, loses next to nothing, though its AP against the float boxes
falls by much more.

A detector's other predictions for an object, such as masks, keypoints and angles, are compared row by row, weighted by
the probability that the row shows an object.
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from edgekit.data.intervals import Z95
from edgekit.model.tensors import Array, Reading, Tensors
from edgekit.quantize.accuracy.head_search import Detector
from edgekit.quantize.accuracy.heads import ExtraColumns, find_sides, overlap_boxes, overlap_pairs
from edgekit.quantize.accuracy.loss import Loss, bootstrap, discount_loss, measure_hellinger, record_values

_THRESHOLDS = np.linspace(0.5, 0.95, 10)
# COCO counts at most so many boxes of an image; what scores less is noise and costs time.
_MOST_BOXES, _LEAST_SCORE = 100, 0.01
_MOST_CANDIDATES = 300
# Boxes with at least this IoU show one object. No IoU reaches _NEVER, so with it nothing is suppressed.
_SAME_OBJECT, _NEVER = 0.5, 2.0
# The probability that a detection is right is its score to the power CERTAINTY: the power lowers small scores most,
# since most boxes that non-maximum suppression wrongly leaves are false detections. _MISS is the deviation of each of
# the four error components of a box (in units of 1 - IoU), so a box misses its object by about twice that. Both are
# fitted on the small detectors of docs/reference/measured.md ("What detectors lose") that are not marked as held out.
CERTAINTY = 1.8
_MISS = 0.13
_DRAWS = 100
# The true AP as a share of the AP computed from scores, which is too high, because scores do not tell which objects the
# model never finds. Chosen after five detectors, whose shares were 0.46 (FastestDet, on photographs), 0.63, 0.78, 0.85
# and 1.1. A fit that left out each detector in turn gave 0.75: the error of the drop was about the same (0.75 points
# instead of 0.79), but larger on photographs, so 0.6 stays. A CenterNet needs no such factor, because every object has
# a peak on its map, however low: with `_likelihood` its computed AP was 12.2 to 13.1, and its true AP 12.7. All of this
# was measured once, the program is gone.
_ALL_SEEN = 0.6
# The standard deviations, below and above, of the errors of _ALL_SEEN and `discount_loss`, as shares of the drop.
# Fitted on six detectors with 3 to 12 plans each: the logarithm of true over estimated loss has a deviation of 0.47, so
# 95 % of other detectors should lie between 1 / 2.7 and 2.7 times the estimate (measured once, the program is gone).
# The lower end is farther out than that, because the smaller a computed drop is, the smaller is its true share.
_LESS, _MORE = 0.4, 0.85


class _Detections(msgspec.Struct, frozen=True, kw_only=True):
    """Detections of an image, by falling score: their rows, corners, scores and classes."""

    rows: Array
    boxes: Array
    scores: Array
    classes: Array


def record_detections(head: Detector, expected: Tensors, found: Tensors) -> Array:
    """Returns a row for each possible object of a sample, float64 [objects, 5].

    The columns are its class, the float model's probability that it is an object, its scores in the float and in the
    quantized model (0 where a model does not detect it), and 1 - IoU of the boxes of the two models.
    """
    boxes, chances = head.decode(expected)
    others, theirs = head.decode(found)
    # Of peaks and listed detections none is suppressed any more.
    suppresses = head.keeps_places and not head.centred
    overlap = _SAME_OBJECT if suppresses else _NEVER
    mine, got = _suppress(boxes, chances, overlap), _suppress(others, theirs, overlap)
    overlaps = overlap_boxes(got.boxes, mine.boxes) * (got.classes[:, None] == mine.classes)
    taken = np.zeros(len(mine.rows), np.bool_)
    records = np.stack([mine.classes, mine.scores, mine.scores, np.zeros_like(mine.scores), np.zeros_like(mine.scores)])
    records, more = records.T.copy(), list[list[float]]()
    # The row with an object's highest score may be another one now. Its float box is as good as that of the old row, so
    # its shift is measured against its own float box.
    moved = 1 - overlap_pairs(boxes[got.rows], got.boxes) if head.keeps_places else np.zeros(len(got.rows))
    for index, score in enumerate(got.scores):
        row, kind = int(got.rows[index]), int(got.classes[index])
        apart = float(moved[index])
        free = np.where(taken, 0.0, overlaps[index])
        best = int(free.argmax()) if free.size else 0
        if free.size and free[best] >= _SAME_OBJECT:
            taken[best] = True
            # A CenterNet has meaningful boxes at peaks only, so a peak that moved is compared with the old peak's box.
            records[best, 3:] = score, apart if suppresses else 1 - overlaps[index, best]
            continue
        # A second box on an object is a false detection. Elsewhere the float model's score at that row is the
        # probability of an object.
        is_wrong = not head.keeps_places or overlaps[index].max(initial=0) >= _SAME_OBJECT
        more.append([kind, 0.0 if is_wrong else float(chances[row, kind]), 0.0, float(score), apart])
    return np.concatenate([records, np.array(more).reshape(-1, 5)])


def detection_distances(records: Sequence[Array], *, centred: bool = False) -> Array:
    """Returns how far each sample's detections moved, relative to the mean number of objects, float64 [samples].

    A row moves by the Hellinger distance of its two scores plus 1 - IoU of its two boxes. It is weighted by the
    probability of an object according to the higher score: most rows of a head have low scores, which change much but
    decide nothing.
    """
    table = np.concatenate([*records, np.zeros((0, 5))])
    scores, others = np.clip(table[:, 2], 0, 1), np.clip(table[:, 3], 0, 1)
    moved = measure_hellinger(np.stack([scores, 1 - scores]), np.stack([others, 1 - others])) + table[:, 4]
    images = np.repeat(np.arange(len(records)), [len(record) for record in records])
    expected = max(float(_likelihood(scores, centred=centred).sum()) / max(len(records), 1), 1e-12)
    likely = _likelihood(np.maximum(scores, others), centred=centred)
    return np.bincount(images, likely * moved, minlength=len(records)) / expected


def estimate_drop(records: Sequence[Array], *, centred: bool = False) -> Loss:
    """Returns the drop of mean AP over ground truths that are drawn from records; images are resampled for each draw.

    `centred` says that scores are heights of peaks on a map (`Head.peaks`).
    """
    table = np.concatenate(records)
    likely = _likelihood(table[:, 1], centred=centred)
    images = np.repeat(np.arange(len(records)), [len(record) for record in records])
    rng = np.random.default_rng(0)
    measures = [_open_ap(table, column) for column in (2, 3)]
    scores = np.zeros((_DRAWS, 2))
    for draw in range(_DRAWS):
        counts = rng.multinomial(len(records), np.full(len(records), 1 / len(records)))
        weights = counts[images] * (rng.random(len(table)) < likely)
        # The shift of the quantized box adds to the first of the four error components.
        along, others = rng.normal(0, _MISS, len(table)), _MISS**2 * rng.chisquare(3, len(table))
        miss, moved = (np.sqrt((along + by) ** 2 + others) for by in (0.0, table[:, 4]))
        for side, (measure, error) in enumerate(zip(measures, (miss, moved), strict=True)):
            scores[draw, side] = measure(counts[images], weights, error)
    seen, reference, drops = 1.0 if centred else _ALL_SEEN, float(scores[:, 0].mean()), scores[:, 0] - scores[:, 1]
    drop = seen * reference * discount_loss(float(drops.mean()) / max(reference, 1e-12))
    less, more = (Z95 * float(np.hypot(seen * drops.std(), doubt * drop)) for doubt in (_LESS, _MORE))
    return Loss(estimate=drop, interval=(max(drop - less, -1.0), min(drop + more, 1.0)))


def _likelihood(chances: Array, *, centred: bool) -> Array:
    """Returns the probability that each detection is correct, from its score.

    A map of centres (`centred`) is above zero everywhere, and the highest peak of an uncertain model is far below one.
    So a peak's height is measured between the median and the highest peak. For a small CenterNet whose highest peak was
    0.45, peaks of 0.34, 0.25, 0.18 and 0.12 were right in 25, 12, 4.6 and 1.1 % of cases; this function returns 24, 12,
    4.9 and 1.5 % (measured once, the program is gone).
    """
    if not centred or not len(chances):
        return np.asarray(chances**CERTAINTY)
    most, level = float(chances.max()), float(np.median(chances))
    risen = np.maximum(chances - level, 0) / max(most - level, 1e-12)
    return np.asarray(most * risen**CERTAINTY)


def _suppress(boxes: Array, chances: Array, overlap: float) -> _Detections:
    """Returns the detections left by non-maximum suppression within each class; `overlap` is the IoU threshold."""
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
    return _Detections(rows=rows[kept], boxes=boxes[rows[kept]], scores=scores[kept], classes=classes[kept])


def _open_ap(table: Array, column: int) -> Callable[[Array, Array, Array], float]:
    """Returns a function of draws: the mean AP of the model whose scores are in this column.

    That is the area under the precision-recall curve, averaged over the classes with objects and the IoU thresholds.
    The function takes how often each record's image was drawn, the same for objects and 0 for other records, and the
    error of each box.
    """
    # The detections in the order in which AP reads them: by class, then by falling score. For each, the position at
    # which its class begins, and the number of its class, from 1 on.
    shown, classes = np.flatnonzero(table[:, column] > 0), table[:, 0].astype(np.int64)
    places = shown[np.lexsort((-table[shown, column], table[shown, 0]))]
    kinds = classes[places]
    first = np.append(True, kinds[1:] != kinds[:-1])[: len(places)]
    starts = np.maximum.accumulate(np.where(first, np.arange(len(places)), 0)) if len(places) else places
    ranks = np.cumsum(first)

    def add_up(values: Array) -> Array:
        sums = np.cumsum(values, axis=-1)
        return np.asarray(sums - (sums - values)[..., starts])

    def measure(counts: Array, weights: Array, error: Array) -> float:
        objects = np.bincount(classes, weights, minlength=int(classes.max(initial=0)) + 1)
        if not objects.any():
            return 0.0
        hits = weights[places] * (error[places] <= 1 - _THRESHOLDS[:, None] + 1e-9)
        precision = add_up(hits) / np.maximum(add_up(counts[places].astype(np.float64)), 1e-12)
        # Precision at a recall is the best at any higher one; classes to the right are put below all of it.
        best = np.maximum.accumulate((precision - 2 * ranks)[:, ::-1], axis=1)[:, ::-1] + 2 * ranks
        areas = (hits * best).sum(axis=0) / np.maximum(objects[kinds], 1e-12)
        return float(areas.sum() / len(_THRESHOLDS) / np.count_nonzero(objects))

    return measure


# The least weight of a row, so that images without objects have a mean too.
_TINY = 1e-12
# Masks and keypoints are compared for so many rows with the highest scores: a choice, to save time. Rows with scores
# below the second number show nothing.
_MOST_ROWS, _LEAST_SHOWN = 32, 0.1
# Object keypoint similarity, exp(-d^2 / (2 area k^2)), with the mean of COCO's 17 constants k (M. R. Ronchi and P.
# Perona, "Benchmarking and error diagnosis in multi-instance pose estimation", 2017).
_POINT_SPREAD = 0.13


def record_extra(head: Detector, extra: ExtraColumns, expected: Tensors, found: Tensors) -> Array:
    """Returns a sample's record: as `record_values`, or for masks and keypoints [weight of all rows, lost part]."""
    boxes, chances = head.decode(expected)
    surest = chances.max(axis=1)
    if extra.kind == "values":
        weights = np.maximum(surest, _TINY) ** CERTAINTY
        return record_values(extra.read(expected), extra.read(found), Reading(kind="values", axis=1), weights)
    rows = np.argsort(-surest, kind="stable")[:_MOST_ROWS]
    rows = rows[surest[rows] >= _LEAST_SHOWN]
    lose = _lose_masks if extra.kind == "masks" else _lose_points
    weights = surest[rows] ** CERTAINTY
    return np.array([weights.sum(), (weights * lose(extra, rows, boxes[rows], expected, found)).sum()])


def _lose_masks(extra: ExtraColumns, rows: Array, boxes: Array, expected: Tensors, found: Tensors) -> Array:
    """Returns 1 - IoU of the two masks of each row, within the box of the float model.

    A place belongs to a mask where the sum is positive.
    """
    height, width = expected[extra.prototypes].shape[2:]
    cell = find_sides(boxes, extra.image) / (width, height)
    columns, lines = (np.arange(width) + 0.5) * cell[0], (np.arange(height) + 0.5) * cell[1]
    wide = (columns >= boxes[:, 0:1]) & (columns <= boxes[:, 2:3])
    high = (lines >= boxes[:, 1:2]) & (lines <= boxes[:, 3:4])
    one, two = (
        np.tensordot(extra.read(each, rows), each[extra.prototypes][0].astype(np.float64), axes=1) > 0
        for each in (expected, found)
    )
    inside = wide[:, None, :] & high[:, :, None]
    both, either = ((each & inside).sum(axis=(1, 2)) for each in (one & two, one | two))
    return np.where(either > 0, 1 - both / np.maximum(either, 1), 0.0)


def _lose_points(extra: ExtraColumns, rows: Array, boxes: Array, expected: Tensors, found: Tensors) -> Array:
    """Returns 1 - OKS of the keypoints of each row, weighted by the visibility that the float model predicts."""
    one, two = (extra.read(each, rows) for each in (expected, found))
    # Not -1: nothing may be found in a sample.
    one, two = (each.reshape(len(rows), each.shape[1] // extra.numbers, extra.numbers) for each in (one, two))
    squares = ((one[..., :2] - two[..., :2]) ** 2).sum(axis=-1)
    area = np.maximum((boxes[:, 2:] - boxes[:, :2]).prod(axis=1), _TINY)
    lost = 1 - np.exp(-squares / (2 * area[:, None] * _POINT_SPREAD**2))
    seen = one[..., 2] if extra.numbers > 2 else np.ones_like(squares)
    return np.asarray((seen * lost).sum(axis=1) / np.maximum(seen.sum(axis=1), _TINY))


def judge_extra(records: Sequence[Array]) -> Loss:
    """Returns the loss of masks or keypoints: the estimate is `discount_loss` of the lost share, 0 its lower bound."""
    table = np.stack(records)

    def score(sums: Array) -> Array:
        return np.asarray(sums[..., 1] / np.maximum(sums[..., 0], _TINY))

    return Loss(estimate=discount_loss(float(score(table.sum(axis=0)))), interval=(0.0, bootstrap(table, score)[1]))


def extra_distances(records: Sequence[Array]) -> Array:
    """Returns the lost part of each sample's masks or keypoints, relative to the mean weight of a sample."""
    table = np.stack(records)
    return np.asarray(table[:, 1] / max(float(table[:, 0].mean()), _TINY))
