"""The figure of each unseen family, in points or dB, and what its net is taught."""

from collections.abc import Callable
from typing import Any

import numpy as np
from collapse_data import KINDS
from collapse_score import score_masks
from unseen_data import MOST_DIGITS, SIDE

from edgekit.model.tensors import Array, Tensors
from edgekit.verify.tasks.tasks import Detections, prepare_map

CELL = 4
"""Pixels of a cell of maps, along a side."""
_CELLS = SIDE // CELL
_MOST_PEAKS = 30
_NEAR = 2.0
"""Pixels that a joint may be off."""
_CLOSE = 1.05
"""How many times too far or too near a depth may be."""


def encode_centres(boxes: tuple[Any, ...]) -> dict[str, Array]:
    """Returns for each image the map of middles of each class, sizes and shifts in cells, and where there are any."""
    count, (down, right) = len(boxes), np.mgrid[:_CELLS, :_CELLS]
    heat = np.zeros((count, KINDS, _CELLS, _CELLS), np.float32)
    size, shift = (np.zeros((count, 2, _CELLS, _CELLS), np.float32) for _ in range(2))
    has = np.zeros((count, 1, _CELLS, _CELLS), np.float32)
    for index, one in enumerate(boxes):
        for box, kind in zip(one.boxes, one.classes, strict=True):
            low, high = np.array(box[:2]) / CELL, np.array(box[2:]) / CELL
            middle = (low + high) / 2
            x, y = np.minimum(middle.astype(int), _CELLS - 1)
            spread = max(0.6, float((high - low).min()) / 5)
            bump = np.exp(-((right - x) ** 2 + (down - y) ** 2) / (2 * spread**2))
            heat[index, kind] = np.maximum(heat[index, kind], bump)
            size[index, :, y, x], shift[index, :, y, x] = high - low, middle - (x, y)
            has[index, 0, y, x] = 1
    return {"heat": heat, "size": size, "shift": shift, "has": has}


def encode_joints(joints: Array) -> Array:
    """Returns a map with a bump at each joint [N,7,16,16]."""
    down, right = (np.mgrid[:_CELLS, :_CELLS] + 0.5) * CELL
    apart = (right - joints[..., 0, None, None]) ** 2 + (down - joints[..., 1, None, None]) ** 2
    return np.asarray(np.exp(-apart / (2 * 5.0**2)), np.float32)


def _score_masks(rows: list[Tensors], masks: Any) -> float:
    return score_masks(np.concatenate([row["scores"] for row in rows]), masks)


def _score_lines(rows: list[Tensors], digits: Any) -> float:
    return 100 * float(
        np.mean([_read_line(row["logits"][0]) == _known(one) for row, one in zip(rows, digits, strict=True)])
    )


def _read_line(logits: Array) -> list[int]:
    steps = logits.argmax(0)
    return [int(now) - 1 for now, before in zip(steps, [0, *steps[:-1]], strict=True) if now not in {0, before}]


def _known(digits: Array) -> list[int]:
    return [int(digit) for digit in digits[:MOST_DIGITS] if digit >= 0]


def _score_centres(rows: list[Tensors], boxes: Any) -> float:
    records = [_find_peaks(row, label) for row, label in zip(rows, boxes, strict=True)]
    return 100 * prepare_map(records)(np.ones(len(records), np.int64))


def _find_peaks(row: Tensors, label: Any) -> Detections:
    heat, size, shift = (row[name][0].astype(np.float64) for name in ("heat", "size", "shift"))
    padded = np.pad(heat, ((0, 0), (1, 1), (1, 1)))
    around = [padded[:, y : y + _CELLS, x : x + _CELLS] for y in range(3) for x in range(3)]
    peaks = np.where(heat == np.max(around, axis=0), heat, 0)
    order = np.argsort(-peaks.ravel(), kind="stable")[:_MOST_PEAKS]
    kinds, down, right = np.unravel_index(order, peaks.shape)
    middle = np.stack([right, down], 1) + shift[:, down, right].T
    half = np.maximum(size[:, down, right].T, 0.05) / 2
    corners = CELL * np.concatenate([middle - half, middle + half], 1)
    return Detections(label=label, boxes=corners, scores=peaks[kinds, down, right], classes=kinds)


def _score_joints(rows: list[Tensors], joints: Any) -> float:
    found = np.stack([[_find_joint(one) for one in row["heatmaps"][0]] for row in rows])
    return 100 * float((np.hypot(*np.moveaxis(found - joints, -1, 0)) < _NEAR).mean())


def _find_joint(heat: Array) -> tuple[float, float]:
    """Returns (x, y) of a maximum, a quarter of a cell towards its higher neighbour (A. Newell, arXiv:1603.06937)."""
    y, x = np.unravel_index(int(heat.argmax()), heat.shape)
    padded = np.pad(heat, 1, mode="edge")
    across = np.sign(padded[y + 1, x + 2] - padded[y + 1, x])
    along = np.sign(padded[y + 2, x + 1] - padded[y, x + 1])
    return CELL * (float(x) + 0.5 + 0.25 * across), CELL * (float(y) + 0.5 + 0.25 * along)


def _score_depths(rows: list[Tensors], depths: Any) -> float:
    found = np.maximum(np.concatenate([row["depth"] for row in rows]), 1e-3)
    return 100 * float((np.maximum(found / depths, depths / found) < _CLOSE).mean())


def _score_embeddings(rows: list[Tensors], classes: Any) -> float:
    """Returns the mean over the samples of the average precision with which each finds the others of its class."""
    vectors = np.concatenate([row["embedding"] for row in rows])
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    found = (classes[np.argsort(-likeness, axis=1, kind="stable")] == classes[:, None])[:, :-1]
    precision = found.cumsum(1) / np.arange(1, found.shape[1] + 1)
    alone = ~found.any(axis=1)
    return 100 * float(((precision * found).sum(1) / (found.sum(1) + alone))[~alone].mean())


def _score_waves(rows: list[Tensors], waves: Any) -> float:
    """Returns the mean scale-invariant ratio of signal to noise in dB (J. Le Roux et al., arXiv:1811.02508)."""
    found, clean = (
        value.reshape(len(rows), -1).astype(np.float64)
        for value in (np.concatenate([row["clean"] for row in rows]), waves)
    )
    part = clean * (found * clean).sum(1, keepdims=True) / (clean**2).sum(1, keepdims=True)
    return float(10 * np.log10((part**2).sum(1) / ((found - part) ** 2).sum(1)).mean())


FIRST_SCORES: dict[str, Callable[[list[Tensors], Any], float]] = {
    "mIoU": _score_masks,
    "exact": _score_lines,
    "AP": _score_centres,
    "PCK": _score_joints,
    "delta": _score_depths,
    "retrieval": _score_embeddings,
    "SI-SNR": _score_waves,
}
DECIBELS = frozenset({"SI-SNR"})
"""Scores that are dB; the others are points."""


def as_decibels(lost: float, reference: float) -> float:
    """Returns what a ratio of `reference` dB falls by where R2 falls by `lost`: what is missed grows by so much."""
    missed = 10 ** (-reference / 10)
    return float(10 * np.log10(max(1 + lost / missed, 1e-9)))
