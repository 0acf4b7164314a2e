"""Honest devices are not accused: outputs of many kinds, with noise, heavy tails and grids, at most 1 run of 1,000."""

from collections.abc import Callable

import numpy as np
import pytest

from edgekit.model.tensors import Array
from edgekit.verify.metrics.fidelity import Sides, describe_origin

RUNS, MOST_ACCUSED = 1000, 1
CLASSES, SAMPLES = (1, 1, 2, 2, 3, 5, 10, 10, 100), (2, 3, 4, 6, 8, 8, 16, 24, 64)


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def sigmoid(values: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-values.clip(-60.0, 60.0))))


HEADS: dict[str, Callable[[Array], Array]] = {
    "logits": np.asarray, "softmax": softmax, "sigmoid": sigmoid, "image": lambda values: np.cumsum(values, axis=1),
}  # fmt: skip


def draw_values(rng: np.random.Generator) -> Array:
    """Returns what a model gives before its head: spread, in clusters, or nearly the same for all samples."""
    shape, scale = (int(rng.choice(SAMPLES)), int(rng.choice(CLASSES))), float(rng.choice([0.3, 1.0, 3.0, 10.0, 30.0]))
    kind, values = rng.choice(["spread", "clusters", "steady"], p=[0.6, 0.2, 0.2]), rng.normal(size=shape) * scale
    if kind == "clusters":
        centres = rng.normal(size=(max(2, min(shape[1], 10)), shape[1])) * scale
        values = centres[rng.integers(0, len(centres), shape[0])] + 0.05 * values
    return scale + 0.05 * values if kind == "steady" else values


def add_noise(values: Array, rng: np.random.Generator, loudness_db: float) -> Array:
    """Returns the values with noise so far below them, often of heavy tails or much worse in some samples."""
    noise = rng.normal(size=values.shape) if rng.random() < 0.5 else rng.standard_t(3, size=values.shape) / 1.7
    if rng.random() < 0.3:
        noise = noise * np.where(rng.random((len(values), 1)) < 0.1, 5.0, 0.7)
    if rng.random() < 0.2:
        noise = noise + rng.normal(size=(1, values.shape[1]))
    return np.asarray(values + 10.0 ** (-loudness_db / 20.0) * max(values.std(), 1e-3) * noise)


def draw_run(rng: np.random.Generator) -> Sides:
    """Returns what a float model gives, what its quantized model gives, and a device that rounds otherwise."""
    values, head = draw_values(rng), HEADS[rng.choice(list(HEADS))]
    far_db = rng.uniform(8.0, 40.0)
    own, got = (head(add_noise(values, rng, db)) for db in (far_db + rng.uniform(-6.0, 20.0), far_db))
    if rng.random() < 0.5:
        own, got = (np.round(side / (np.ptp(side) + 1e-9) * 255) * (np.ptp(side) + 1e-9) / 255 for side in (own, got))
    got = got * rng.uniform(0.9, 1.1) if rng.random() < 0.3 else got
    return make_sides(own, got, head(values))


def make_sides(own: Array, got: Array, reference: Array | None = None) -> Sides:
    own, got = (side.reshape(len(side), -1).astype(np.float32).astype(np.float64) for side in (own, got))
    return Sides(own=own, got=got, reference=own if reference is None else reference, is_whole=True)


def test_honest_runs_are_not_accused() -> None:
    rng = np.random.default_rng(0)
    accused = [words for words in (describe_origin(draw_run(rng)) for _ in range(RUNS)) if words]
    assert len(accused) <= MOST_ACCUSED, accused


@pytest.mark.parametrize("classes", [1, 2])
def test_two_samples_of_one_or_two_classes_that_are_mistaken_are_no_other_order(classes: int) -> None:
    """A classifier that mistakes a few confident samples gives what belongs to others, and each looks like a swap."""
    rng = np.random.default_rng(classes)
    for _ in range(100):
        sides = rng.permutation(np.repeat([0.02, 0.98], 12)) + rng.normal(scale=0.005, size=24)
        found = sides + rng.normal(scale=0.005, size=24)
        wrong = [*rng.choice(np.flatnonzero(sides < 0.5), 2), *rng.choice(np.flatnonzero(sides > 0.5), 2)]
        found[wrong] = 1.0 - found[wrong]
        own, got = (np.stack([side, 1.0 - side][:classes], axis=1) for side in (sides, found))
        assert describe_origin(make_sides(own, got)) is None


@pytest.mark.parametrize("mistaken", [1, 2])
def test_samples_of_a_class_that_are_all_mistaken_are_no_class_that_is_stuck(mistaken: int) -> None:
    """Where a softmax saturates, the class of a mistaken sample is zero everywhere, and another one gains it."""
    own = np.eye(10)[[*range(10), *range(mistaken - 1, 10)]]
    got = own.copy()
    got[own[:, 3] > 0] = np.eye(10)[4]
    assert describe_origin(make_sides(own, got)) is None


@pytest.mark.parametrize(("classes", "samples"), [(1, 64), (2, 24), (10, 16)])
def test_a_device_that_gives_the_outputs_of_others_is_still_found(classes: int, samples: int) -> None:
    """The fewer values an output has, the more samples it takes; the figures are good enough to pass."""
    rng, missed = np.random.default_rng(classes), 0
    for _ in range(50):
        own = 1.0 + 0.25 * rng.normal(size=(samples, classes))
        got = own[rng.permutation(samples)] + rng.normal(scale=0.01, size=own.shape)
        missed += describe_origin(make_sides(own, got)) is None
    assert missed <= 2
