"""Seeded data for the families that no rule was made from: lines of digits, stick figures, rooms and noisy tones."""

import functools

import numpy as np
from collapse_data import make_tones
from scipy.ndimage import zoom
from sklearn.datasets import load_digits

from edgekit.model.tensors import Array

LINE = (16, 96)
MOST_DIGITS = 7
SIDE = 64
JOINTS = 7
WAVE = 1024
PARTS = (2400, 256, 300, 1000)
"""How many samples train, calibrate, score, and tell a drop to a tenth of a point or two."""
_LIMBS = ((0, 1), (1, 2), (1, 3), (1, 4), (4, 5), (4, 6))
_COLOURS = ((1, 0.9, 0.8), (0.9, 0.2, 0.2), (0.2, 0.2, 0.9), (0.8, 0.8, 0.2), (0.2, 0.8, 0.8), (0.8, 0.3, 0.8))


@functools.cache
def split_digits(part: int) -> tuple[Array, Array]:
    """Returns the images [N,8,8] of scikit-learn's digits in [0, 1] and their classes.

    No image is of two parts, but that the last one has those of the one before: there are no more.
    """
    digits = load_digits()
    order = np.random.default_rng(900).permutation(len(digits.target))
    ends = ((0, 1000), (1000, 1256), (1256, 1797))[min(part, 2)]
    chosen = order[slice(*ends)]
    return (digits.images[chosen] / 16).astype(np.float32), digits.target[chosen]


@functools.cache
def write_lines(part: int) -> tuple[Array, Array]:
    """Returns images [N,1,16,96] of four to seven digits in a row, and the digits [N,7], -1 where a line is over."""
    rng, (glyphs, classes) = np.random.default_rng(910 + part), split_digits(part)
    count = PARTS[part]
    images, labels = np.zeros((count, 1, *LINE), np.float32), np.full((count, MOST_DIGITS), -1)
    for index in range(count):
        at = rng.integers(1, 6)
        for number in range(rng.integers(4, MOST_DIGITS + 1)):
            glyph = rng.integers(len(glyphs))
            size = rng.uniform(1.2, 1.6)
            drawn = np.clip(zoom(glyphs[glyph], (size, size * rng.uniform(0.8, 1.0)), order=1), 0, 1)
            down, (height, width) = rng.integers(0, LINE[0] - drawn.shape[0] + 1), drawn.shape
            if at + width > LINE[1]:
                break
            images[index, 0, down : down + height, at : at + width] = drawn
            labels[index, number] = classes[glyph]
            at += width + rng.integers(0, 4)
        ink, paper = rng.uniform(0.6, 1), rng.uniform(0, 0.3)
        images[index] = paper + (ink - paper) * images[index] + rng.normal(0, 0.08, images[index].shape)
    return np.clip(images, 0, 1), labels


@functools.cache
def draw_figures(part: int) -> tuple[Array, Array]:
    """Returns images [N,3,64,64] of a figure of sticks before clutter, and its joints [N,7,2] (x, y) in pixels."""
    rng, count = np.random.default_rng(920 + part), PARTS[part]
    down, right = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    images, joints = np.empty((count, 3, SIDE, SIDE), np.float32), np.empty((count, JOINTS, 2), np.float32)
    for index in range(count):
        size, lean = rng.uniform(9, 14), rng.normal(0, 0.3)
        angles = np.array([lean, 0, np.pi * 0.65, -np.pi * 0.65, np.pi, np.pi - 0.4, np.pi + 0.4])
        angles = angles + rng.normal(0, 0.35, JOINTS) + lean
        reach = size * np.array([0.9, 0, 1.2, 1.2, 1.3, 1.4, 1.4])
        steps = np.stack([reach * np.sin(angles), -reach * np.cos(angles)], 1)
        neck = np.array([rng.uniform(24, 40), rng.uniform(20, 28)])
        place = neck + steps
        place[5:] += steps[4]
        joints[index] = np.clip(place, 2, SIDE - 3)
        image = rng.uniform(0, 1, (3, 1, 1)) + rng.normal(0, 0.1, (3, SIDE, SIDE))
        for _ in range(3):
            corner, extent = rng.uniform(0, SIDE, 2), rng.uniform(4, 20, 2)
            box = (np.abs(right - corner[0]) < extent[0]) & (np.abs(down - corner[1]) < extent[1])
            image = np.where(box, rng.uniform(0, 1, (3, 1, 1)), image)
        for (first, last), colour in zip(_LIMBS, _COLOURS, strict=True):
            near = _distance(right, down, joints[index, first], joints[index, last]) < size / 7
            image = np.where(near, np.array(colour).reshape(3, 1, 1) * rng.uniform(0.7, 1), image)
        images[index] = np.clip(image + rng.normal(0, 0.05, image.shape), 0, 1)
    return images, joints


def _distance(right: Array, down: Array, start: Array, end: Array) -> Array:
    """Returns how far each pixel is from a line between two points."""
    along = end - start
    share = ((right - start[0]) * along[0] + (down - start[1]) * along[1]) / max(float(along @ along), 1e-6)
    share = np.clip(share, 0, 1)
    return np.asarray(np.hypot(right - start[0] - share * along[0], down - start[1] - share * along[1]))


@functools.cache
def render_rooms(part: int) -> tuple[Array, Array]:
    """Returns images [N,3,64,64] of balls over a floor in haze, and how far each pixel is [N,1,64,64], 1 to 10."""
    rng, count = np.random.default_rng(930 + part), PARTS[part]
    down, right = (np.mgrid[:SIDE, :SIDE].astype(np.float32) + 0.5) / SIDE - 0.5
    images, depths = np.empty((count, 3, SIDE, SIDE), np.float32), np.empty((count, 1, SIDE, SIDE), np.float32)
    for index in range(count):
        horizon, height = rng.uniform(-0.2, 0.1), rng.uniform(0.5, 1.5)
        depth = np.where(down > horizon, height / np.maximum(down - horizon, 1e-3), 10.0)
        depth = np.minimum(depth, 10.0)
        stripes = 0.2 * np.sign(np.sin(3 * depth + rng.uniform(0, 6))) * np.sign(np.sin(3 * right * depth))
        image = rng.uniform(0.2, 0.8, (3, 1, 1)) + np.where(depth < 10, stripes, 0)
        for _ in range(rng.integers(1, 5)):
            far, size = rng.uniform(1.5, 7), rng.uniform(0.3, 0.8)
            middle, radius = rng.uniform(-0.4, 0.4), size / far
            line = horizon + height / far - radius
            apart = np.hypot(right - middle, down - line)
            own = far - size * np.sqrt(np.clip(1 - (apart / radius) ** 2, 0, 1))
            seen = (apart < radius) & (own < depth)
            light = 0.4 + 0.6 * np.clip((line - down + radius) / (2 * radius), 0, 1)
            image = np.where(seen, rng.uniform(0.2, 1, (3, 1, 1)) * light, image)
            depth = np.where(seen, own, depth)
        haze = np.exp(-depth / 8)
        image = image * haze + 0.75 * (1 - haze)
        images[index] = np.clip(image + rng.normal(0, 0.03, image.shape), 0, 1)
        depths[index, 0] = np.clip(depth, 1, 10)
    return images, depths


@functools.cache
def add_noise(part: int) -> tuple[Array, Array]:
    """Returns waves [N,1,1024] in coloured noise, 0 to 10 dB below them, and the waves themselves."""
    rng, count = np.random.default_rng(940 + part), PARTS[part]
    clean = make_tones(count, 10, 950 + part)[0][:, 400 : 400 + WAVE]
    clean = clean * (rng.uniform(0.2, 0.9, (count, 1)) / np.abs(clean).max(1, keepdims=True))
    noise = rng.normal(0, 1, (count, WAVE))
    noise = noise + rng.uniform(-0.8, 0.8, (count, 1)) * np.roll(noise, 1, 1)
    powers = (clean**2).mean(1, keepdims=True) / (noise**2).mean(1, keepdims=True)
    noise = noise * np.sqrt(powers / 10 ** rng.uniform(0, 1, (count, 1)))
    return (clean + noise)[:, None].astype(np.float32), clean[:, None].astype(np.float32)
