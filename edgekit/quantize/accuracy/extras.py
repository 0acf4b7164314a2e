"""The loss in a detector's other predictions for an object: masks, keypoints, and numbers such as an angle.

The same row is compared in both models, weighted by the probability that it shows an object (`CERTAINTY`).
"""

from collections.abc import Sequence

import numpy as np

from edgekit.model.outputs import Reading
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.detections import CERTAINTY, Detector
from edgekit.quantize.accuracy.heads import ExtraColumns, find_sides
from edgekit.quantize.accuracy.loss import Loss, bootstrap, discount_loss, record_values

# The least weight of a row, so that images without objects have a mean too.
_TINY = 1e-12
# Masks and keypoints are compared for so many rows with the highest scores: a choice, to save time. Rows with scores
# below the second number show nothing.
_MOST_ROWS, _LEAST_SCORE = 32, 0.1
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
    rows = rows[surest[rows] >= _LEAST_SCORE]
    lose = _lose_masks if extra.kind == "masks" else _lose_points
    weights = surest[rows] ** CERTAINTY
    return np.array([weights.sum(), (weights * lose(extra, rows, boxes[rows], expected, found)).sum()])


def _lose_masks(extra: ExtraColumns, rows: Array, boxes: Array, expected: Tensors, found: Tensors) -> Array:
    """Returns 1 - IoU of the two masks of each row, within the box of the float model."""
    masks = [_draw_masks(extra, rows, boxes, outputs) for outputs in (expected, found)]
    both, either = (masks[0] & masks[1]).sum(axis=(1, 2)), (masks[0] | masks[1]).sum(axis=(1, 2))
    return np.where(either > 0, 1 - both / np.maximum(either, 1), 0.0)


def _draw_masks(extra: ExtraColumns, rows: Array, boxes: Array, outputs: Tensors) -> Array:
    """Returns the mask of each row, bool [rows, height, width]: a place belongs to it where the sum is positive."""
    prototypes = outputs[extra.prototypes][0].astype(np.float64)
    masks = np.tensordot(extra.read(outputs, rows), prototypes, axes=1) > 0
    height, width = masks.shape[1:]
    cell = find_sides(boxes, extra.image) / (width, height)
    columns, lines = (np.arange(width) + 0.5) * cell[0], (np.arange(height) + 0.5) * cell[1]
    wide = (columns >= boxes[:, 0:1]) & (columns <= boxes[:, 2:3])
    high = (lines >= boxes[:, 1:2]) & (lines <= boxes[:, 3:4])
    return np.asarray(masks & wide[:, None, :] & high[:, :, None])


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
