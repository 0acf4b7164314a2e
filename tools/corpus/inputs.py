"""Samples of the corpus: crops of photographs, sounds, words. Runs with edgekit's Python and with PyTorch's.

Samples must differ in brightness, contrast, colour and detail as real ones do: a network with random weights gives the
same answer for all samples of noise.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SAMPLE_RATE = 16000
Array = np.ndarray[Any, Any]
Draw = Callable[[np.random.Generator, tuple[int, ...], Path], Array]


def draw_image(rng: np.random.Generator, shape: tuple[int, ...], photos: Path) -> Array:
    """Returns crops of photographs [N, 3, H, W], about normally distributed."""
    if shape[0] > 1:
        return np.concatenate([draw_image(rng, (1, *shape[1:]), photos) for _ in range(shape[0])])
    paths = sorted(photos.iterdir())
    with Image.open(paths[rng.integers(len(paths))]) as image:
        side = int(min(image.size) * rng.uniform(0.3, 1))
        left, top = (int(rng.integers(0, size - side + 1)) for size in image.size)
        crop = image.convert("RGB").crop((left, top, left + side, top + side)).resize((shape[3], shape[2]))
    values = np.asarray(crop, np.float32).transpose(2, 0, 1)[None] / 255
    values = (values - 0.5) * rng.uniform(0.6, 1.2) + 0.5 + rng.uniform(-0.15, 0.15, (1, 3, 1, 1))
    return np.asarray((np.clip(values[..., :: rng.choice([-1, 1])], 0, 1) - 0.45) / 0.225, np.float32)


def draw_letters(rng: np.random.Generator, shape: tuple[int, ...], _: Path) -> Array:
    """Returns pictures [1, 3, H, W] of five turned letters and digits between lines, in the scale of `draw_image`.

    A reader of captchas reads about one doubtful letter in a photograph, so photographs do not tell what it loses.
    """
    height, width = shape[2:]
    image = Image.new("RGB", (width, height), tuple(int(value) for value in rng.integers(190, 256, 3)))
    font = ImageFont.load_default(0.55 * height)
    for place in range(5):
        letter = Image.new("L", (width // 4, height))
        text = "0123456789abcdefghijklmnopqrstuvwxyz"[rng.integers(36)]
        ImageDraw.Draw(letter).text((width // 16, 0), text, 255, font)
        ink = tuple(int(value) for value in rng.integers(0, 120, 3))
        corner = (int((place + rng.uniform(-0.1, 0.2)) * width * 0.18), int(rng.integers(height // 5)))
        image.paste(ink, corner, letter.rotate(rng.uniform(-20, 20)))
    for _line in range(3):
        ends = [tuple(int(value) for value in rng.integers(0, image.size)) for _end in range(2)]
        ImageDraw.Draw(image).line(ends, tuple(int(value) for value in rng.integers(60, 200, 3)))
    return np.asarray((np.asarray(image, np.float32).transpose(2, 0, 1)[None] / 255 - 0.45) / 0.225, np.float32)


def draw_sound(rng: np.random.Generator, shape: tuple[int, ...], _: Path) -> Array:
    """Returns pieces of a voice [M, N] at 16 kHz: gliding harmonics through formants, with pauses and noise."""
    time = np.arange(np.prod(shape)) / SAMPLE_RATE
    pitch = rng.uniform(80, 300) * np.exp(0.3 * np.sin(2 * np.pi * rng.uniform(0.5, 3) * time + rng.uniform(0, 6)))
    phase, formants = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE, rng.uniform(300, 3000, 3)
    voice = np.zeros_like(time)
    for order in range(1, 20):
        weight = sum(np.exp(-(((order * pitch - formant) / 200) ** 2)) for formant in formants)
        voice += (weight + 0.05) * np.sin(order * phase)
    voice *= np.clip(np.sin(2 * np.pi * rng.uniform(1, 4) * time + rng.uniform(0, 6)) + rng.uniform(0, 1), 0, 1)
    voice = voice / (np.abs(voice).max() + 1e-6) * rng.uniform(0.1, 0.7)
    noise = rng.normal(size=time.shape) * 10 ** -rng.uniform(1.2, 3)
    return np.asarray(np.clip(voice + noise, -1, 1).reshape(shape), np.float32)


def draw_spectrum(rng: np.random.Generator, shape: tuple[int, ...], photos: Path) -> Array:
    """Returns the logarithmic spectrum of a voice [..., frames, bins]."""
    frames, bins = shape[-2:]
    sound = draw_sound(rng, (frames * 160 + 400,), photos)
    windows = np.stack([sound[at * 160 : at * 160 + 400] for at in range(frames)]) * np.hanning(400)
    power = np.abs(np.fft.rfft(windows, 2 * bins - 1)) ** 2
    return np.asarray((np.log(power + 1e-6) / 4 + 1).reshape(shape), np.float32)


def draw_words(rng: np.random.Generator, shape: tuple[int, ...], _: Path) -> Array:
    """Returns indices of words [1, N], the frequent ones small; each text has a subject whose words recur."""
    subject = rng.integers(4, 500, 6)
    words = np.where(rng.random(shape) < 0.5, rng.choice(subject, shape), rng.geometric(0.02, shape) % 496 + 4)
    return np.asarray(words, np.int64)


def draw_bytes(rng: np.random.Generator, shape: tuple[int, ...], _: Path) -> Array:
    """Returns bytes [1, N] of a file: runs of text, numbers, or noise."""
    letters = np.frombuffer(bytes(range(32, 127)), np.uint8)
    kinds = (rng.integers(0, 256, shape), rng.choice(letters[rng.permutation(95)[:20]], shape))
    return np.asarray(kinds[rng.integers(len(kinds))], np.int32)


DRAWS: Mapping[str, Draw] = {
    "image": draw_image, "letters": draw_letters, "sound": draw_sound, "spectrum": draw_spectrum,
    "tokens": draw_words, "bytes": draw_bytes,
}  # fmt: skip


def draw_samples(kind: str, shape: tuple[int, ...], count: int, seed: int, photos: Path) -> Array:
    """Returns samples of a kind, stacked."""
    rng = np.random.default_rng(seed)
    return np.stack([DRAWS[kind](rng, shape, photos) for _ in range(count)])
