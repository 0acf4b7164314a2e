"""The figure of each task: accuracy, mean AP, mean IoU in points, or PSNR in dB."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from edgekit.model.tensors import Array
from edgekit.verify.tasks.tasks import Detections, prepare_map

_LEAST_SCORE, _SAME_OBJECT, _MOST_BOXES = 0.02, 0.5, 50


def score_classes(outputs: Array, labels: Any) -> float:
    """Returns the share of samples [N,C] whose first class is right, in points."""
    return 100 * float((outputs.argmax(1) == labels).mean())


def score_masks(outputs: Array, masks: Any) -> float:
    """Returns the intersection over union of the classes of pixels [N,C,H,W], the mean over the classes, in points."""
    found = outputs.argmax(1)
    shares = [
        ((found == kind) & (masks == kind)).sum() / max(1, ((found == kind) | (masks == kind)).sum())
        for kind in range(outputs.shape[1])
    ]
    return 100 * float(np.mean(shares))


def score_images(outputs: Array, images: Any) -> float:
    """Returns the mean over the images of their peak signal-to-noise ratio in dB; the peak is 1."""
    errors = ((np.clip(outputs, 0, 1) - images) ** 2).mean((1, 2, 3))
    return float((-10 * np.log10(errors)).mean())


def score_boxes(outputs: Array, boxes: Any) -> float:
    """Returns the mean AP over IoU 0.50 to 0.95 of rows [N,R,5+C] with centre, size, objectness and classes."""
    records = [_read_rows(rows, label) for rows, label in zip(outputs, boxes, strict=True)]
    return 100 * prepare_map(records)(np.ones(len(records), np.int64))


def score_columns(outputs: Array, boxes: Any) -> float:
    """Returns the mean AP of columns [N,4+C,R] with centre, size and the chances of classes."""
    rows = outputs.transpose(0, 2, 1)
    return score_boxes(np.insert(rows, 4, 1, axis=2), boxes)


def _read_rows(rows: Array, label: Any) -> Detections:
    scores = rows[:, 4:5] * rows[:, 5:]
    corners = np.concatenate([rows[:, :2] - rows[:, 2:4] / 2, rows[:, :2] + rows[:, 2:4] / 2], 1)
    kept = [(kind, row) for kind in range(scores.shape[1]) for row in _suppress(corners, scores[:, kind])]
    kept = sorted(kept, key=lambda pair: -scores[pair[1], pair[0]])[:_MOST_BOXES]
    kinds, places = (np.array([pair[at] for pair in kept], np.int64) for at in (0, 1))
    return Detections(label=label, boxes=corners[places], scores=scores[places, kinds], classes=kinds)


def _suppress(corners: Array, scores: Array) -> Iterator[int]:
    """Yields the rows of one class that no better row overlaps."""
    order = [int(row) for row in np.argsort(-scores, kind="stable") if scores[row] > _LEAST_SCORE]
    while order:
        best, *order = order
        yield best
        low = np.maximum(corners[order, :2], corners[best, :2])
        high = np.minimum(corners[order, 2:], corners[best, 2:])
        both = np.prod(np.clip(high - low, 0, None), 1)
        sizes = np.prod(corners[[best, *order], 2:] - corners[[best, *order], :2], 1)
        overlap = both / np.maximum(sizes[0] + sizes[1:] - both, 1e-9)
        order = [row for row, share in zip(order, overlap, strict=True) if share < _SAME_OBJECT]


SCORES: dict[str, Callable[[Array, Any], float]] = {
    "class": score_classes,
    "mask": score_masks,
    "image": score_images,
    "boxes": score_boxes,
    "columns": score_columns,
}
UNITS = {"class": "%", "mask": "mIoU", "image": "dB", "boxes": "AP", "columns": "AP"}
