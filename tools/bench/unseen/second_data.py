"""Seeded data and figures of the second set of unseen families: spectra, cut-out targets, and detections as lists."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from collapse_data import draw_scenes, make_tones
from PIL import Image
from unseen_data import PARTS, SIDE

from edgekit.model.tensors import Array, Tensors
from edgekit.verify.tasks.tasks import Detections, prepare_map

FRAMES, BANDS = 40, 32
TEMPLATE = 32
CELL = 8
"""Pixels of a cell of the tracker's maps, along a side."""
_COUNTS = (4000, 256, 1000, 4000)
"""Samples are small here, so more of them are scored than of PARTS."""
_WINDOW = 256


@functools.cache
def shape_classes(part: int) -> tuple[Array, Array]:
    """Returns images [N,3,32,32] of one shape, and its kind."""
    scenes = draw_scenes(_COUNTS[part], 32, 1, 1060 + part)
    return scenes.images, np.array([boxes.classes[0] if boxes.classes else 0 for boxes in scenes.boxes])


@functools.cache
def scene_masks(part: int) -> tuple[Array, Array]:
    """Returns images [N,3,64,64] of several shapes and the class of each pixel."""
    scenes = draw_scenes(PARTS[part], SIDE, 4, 1070 + part)
    return scenes.images, scenes.masks


@functools.cache
def tone_spectra(part: int) -> tuple[Array, Array]:
    """Returns logarithms of spectra [N,40,32], in bands of equal width of the lower half, and the class of each."""
    waves, classes = make_tones(_COUNTS[part], 10, 1080 + part)
    starts = np.linspace(0, waves.shape[1] - _WINDOW, FRAMES).astype(int)
    frames = np.stack([waves[:, start : start + _WINDOW] for start in starts], 1) * np.hanning(_WINDOW)
    powers = np.abs(np.fft.rfft(frames, axis=-1)[..., 1 : 1 + 2 * BANDS]) ** 2
    spectra = np.log(powers.reshape(*powers.shape[:2], BANDS, 2).sum(-1) + 1e-4)
    return spectra.astype(np.float32), classes


@functools.cache
def cut_targets(part: int) -> tuple[dict[str, Array], Array]:
    """Returns a cut-out of one shape, somewhat darker or lighter and noisy, the scene it is in, and its box [N,4]."""
    rng, scenes = np.random.default_rng(1090 + part), draw_scenes(PARTS[part], SIDE, 3, 1090 + part)
    rows: list[tuple[Array, Array, tuple[float, ...]]] = []
    for image, boxes in zip(scenes.images, scenes.boxes, strict=True):
        if not boxes.boxes:
            continue
        box = boxes.boxes[rng.integers(len(boxes.boxes))]
        middle, half = (np.add(box[:2], box[2:]) / 2), 0.6 * max(box[2] - box[0], box[3] - box[1])
        left, top, right, bottom = (round(float(edge)) for edge in (*(middle - half), *(middle + half)))
        whole = Image.fromarray((255 * image.transpose(1, 2, 0)).astype(np.uint8))
        small = whole.crop((left, top, right, bottom)).resize((TEMPLATE, TEMPLATE), Image.Resampling.BILINEAR)
        template = np.asarray(small, np.float32).transpose(2, 0, 1) / 255 * rng.uniform(0.8, 1.2)
        rows.append((np.clip(template + rng.normal(0, 0.05, template.shape), 0, 1), image, box))
    templates, searched, wanted = (np.stack([row[at] for row in rows]).astype(np.float32) for at in range(3))
    return {"template": templates, "search": searched}, wanted


def encode_targets(boxes: Array) -> dict[str, Array]:
    """Returns a bump where the middle of a box is [N,1,8,8], the cells that count for its sides, and the box."""
    down, right = (np.mgrid[: SIDE // CELL, : SIDE // CELL] + 0.5) * CELL
    middles = ((boxes[:, :2] + boxes[:, 2:]) / 2)[:, :, None, None]
    apart = (right - middles[:, 0]) ** 2 + (down - middles[:, 1]) ** 2
    heat = np.exp(-apart / (2 * CELL**2))[:, None].astype(np.float32)
    return {"heat": heat, "near": (heat > 0.5).astype(np.float32), "box": boxes}


def _score_classes(rows: list[Tensors], classes: Any) -> float:
    found = np.array([next(iter(row.values())).argmax() for row in rows])
    return 100 * float((found == classes).mean())


def _score_lists(rows: list[Tensors], boxes: Any) -> float:
    lists = [row["detections"][0].astype(np.float64) for row in rows]
    records = [
        Detections(label=label, boxes=each[:, :4], scores=each[:, 4], classes=each[:, 5].astype(np.int64))
        for each, label in zip(lists, boxes, strict=True)
    ]
    return 100 * prepare_map(records)(np.ones(len(records), np.int64))


def _score_tracks(rows: list[Tensors], boxes: Any) -> float:
    """Returns the mean overlap of the box in the surest place with the true one."""
    found = np.stack([_find_target(row) for row in rows])
    low, high = np.maximum(found[:, :2], boxes[:, :2]), np.minimum(found[:, 2:], boxes[:, 2:])
    both = np.clip(high - low, 0, None).prod(1)
    sizes = [np.clip(each[:, 2:] - each[:, :2], 0, None).prod(1) for each in (found, boxes)]
    return 100 * float((both / np.maximum(sizes[0] + sizes[1] - both, 1e-9)).mean())


def _find_target(row: Tensors) -> Array:
    heat, sides = row["heat"][0, 0], row["sides"][0]
    down, right = np.unravel_index(int(heat.argmax()), heat.shape)
    middle, (left, top, more, below) = (np.array([right, down]) + 0.5) * CELL, CELL * sides[:, down, right]
    return np.array([middle[0] - left, middle[1] - top, middle[0] + more, middle[1] + below])


SECOND_SCORES: dict[str, Callable[[list[Tensors], Any], float]] = {
    "top-1": _score_classes,
    "listed AP": _score_lists,
    "overlap": _score_tracks,
}
