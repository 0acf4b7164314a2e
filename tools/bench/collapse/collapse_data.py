"""Seeded data for the nets: scenes of shapes, tones in noise, and scikit-learn's two photographs."""

import functools

import msgspec
import numpy as np
from sklearn.datasets import load_sample_image

from edgekit.data.labels import Boxes
from edgekit.model.tensors import Array

KINDS = 6
AUDIO_LENGTH, RATE = 4000, 8000


class Scenes(msgspec.Struct, frozen=True, kw_only=True):
    """Images [N,3,S,S], the class of each pixel [N,S,S] (0 is background, kind + 1 else), and what is in each image."""

    images: Array
    masks: Array
    boxes: tuple[Boxes, ...]


@functools.cache
def draw_scenes(count: int, side: int, most: int, seed: int) -> Scenes:
    """Returns images with one to `most` shapes of six kinds, plain or striped, on a noisy background."""
    rng = np.random.default_rng(seed)
    images, masks = np.empty((count, 3, side, side), np.float32), np.zeros((count, side, side), np.int64)
    boxes: list[Boxes] = []
    grid = np.mgrid[:side, :side].astype(np.float32)
    for index in range(count):
        tilt = rng.normal(0, 0.3, (3, 2, 1, 1))
        slope = (tilt * (grid / side - 0.5)[None]).sum(1)
        image = rng.uniform(0.1, 0.9, (3, 1, 1)) + slope + rng.normal(0, 0.06, (3, side, side))
        found: list[tuple[float, float, float, float]] = []
        kinds: list[int] = []
        for _ in range(rng.integers(1, most + 1)):
            size = (rng.uniform(0.12, 0.32) if most > 1 else rng.uniform(0.25, 0.42)) * side
            middle = rng.uniform(size, side - size, 2)
            kind = int(rng.integers(KINDS))
            inside = _shape(grid - middle[:, None, None], size, kind) & (masks[index] == 0)
            rows, columns = np.nonzero(inside)
            if len(rows) < 12:
                continue
            colour = rng.uniform(0, 1, (3, 1, 1)) * np.ones((1, side, side))
            if rng.integers(2):
                colour = colour + 0.25 * np.sign(np.sin((grid[0] + grid[1]) * 1.3))
            image = np.where(inside, colour + rng.normal(0, 0.05, image.shape), image)
            masks[index][inside] = kind + 1
            found.append((float(columns.min()), float(rows.min()), columns.max() + 1.0, rows.max() + 1.0))
            kinds.append(kind)
        images[index] = np.clip(image, 0, 1)
        boxes.append(Boxes(boxes=tuple(found), classes=tuple(kinds)))
    return Scenes(images=images, masks=masks, boxes=tuple(boxes))


def _shape(place: Array, size: float, kind: int) -> Array:
    """Returns where a shape is: disk, square, triangle, cross, ring or diamond."""
    down, right = place
    distance = np.hypot(down, right)
    near = (np.abs(down) < size) & (np.abs(right) < size)
    forms = (
        distance < size,
        near & (np.maximum(np.abs(down), np.abs(right)) < 0.85 * size),
        near & (np.abs(right) < (down + size) / 2),
        near & ((np.abs(down) < size / 3) | (np.abs(right) < size / 3)),
        (distance < size) & (distance > 0.55 * size),
        np.abs(down) + np.abs(right) < size,
    )
    return np.asarray(forms[kind])


@functools.cache
def make_tones(count: int, classes: int, seed: int) -> tuple[Array, Array]:
    """Returns waves [N, AUDIO_LENGTH] of very unequal loudness, and the class of each: how pitch and timbre move."""
    rng = np.random.default_rng(seed)
    time = np.arange(AUDIO_LENGTH) / RATE
    labels = rng.integers(0, classes, count)
    waves = np.empty((count, AUDIO_LENGTH), np.float32)
    for index, label in enumerate(labels):
        pitch = 120 * 2 ** rng.uniform(0, 1.2)
        bend = (-0.8, -0.4, 0.0, 0.4, 0.8)[label % 5] + rng.normal(0, 0.08)
        phase = 2 * np.pi * np.cumsum(pitch * 2 ** (bend * time / time[-1])) / RATE
        decay = (0.9, 0.45)[label // 5]
        tone = sum(decay**k * np.sin((k + 1) * phase + rng.uniform(0, 6)) for k in range(8))
        onset = rng.uniform(0, 0.15)
        envelope = np.exp(-3 * np.maximum(0, time - onset)) * (time > onset)
        wave = tone * envelope + rng.normal(0, 0.25, AUDIO_LENGTH)
        waves[index] = 10 ** rng.uniform(-1.6, -0.5) * wave / np.abs(wave).max()
    return waves, labels


@functools.cache
def cut_photographs(name: str, columns: tuple[int, int], count: int, side: int, seed: int) -> Array:
    """Returns pieces [N,3,S,S] in [0, 1] of some columns of a photograph of scikit-learn."""
    rng = np.random.default_rng(seed)
    photograph = np.asarray(load_sample_image(name), np.float32).transpose(2, 0, 1)[:, :, slice(*columns)] / 255
    places = zip(
        rng.integers(0, photograph.shape[1] - side, count),
        rng.integers(0, photograph.shape[2] - side, count),
        strict=True,
    )
    return np.stack([photograph[:, top : top + side, left : left + side] for top, left in places])
