"""Honest devices are not accused: outputs of many kinds, with noise, heavy tails and grids, at most 1 run of 1,000."""

from collections.abc import Callable

import numpy as np
import pytest
from verify_devices import from_list

from edgekit.model.tensors import Array
from edgekit.verify.metrics.dependence import compare_device_outputs

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


def add_noise(values: Array, rng: np.random.Generator) -> Array:
    """Returns the values with 8 to 40 dB of noise, often of heavy tails or much worse in some samples."""
    shares = 10.0 ** (-rng.uniform(8.0, 40.0) / 20.0)
    noise = rng.normal(size=values.shape) if rng.random() < 0.5 else rng.standard_t(3, size=values.shape) / 1.7
    if rng.random() < 0.3:
        noise = noise * np.where(rng.random((len(values), 1)) < 0.1, 5.0, 0.7)
    if rng.random() < 0.2:
        noise = noise + rng.normal(size=(1, values.shape[1]))
    return np.asarray(values + shares * max(values.std(), 1e-3) * noise)


def draw_run(rng: np.random.Generator) -> tuple[list[Array], list[Array]]:
    values = draw_values(rng)
    head = HEADS[rng.choice(list(HEADS))]
    wanted, found = head(values), head(add_noise(values, rng))
    step = max(float(np.ptp(found)), 1e-9) / 255.0
    found = np.round(found / step) * step if rng.random() < 0.5 else found
    return list(wanted.astype(np.float32)[:, None]), list(found.astype(np.float32)[:, None])


def accuse(wanted: list[Array], found: list[Array]) -> str | None:
    (report,) = compare_device_outputs(
        from_list([{"y": row} for row in wanted]), from_list([{"y": row} for row in found])
    )
    return report.mismatch


def test_honest_runs_are_not_accused() -> None:
    rng = np.random.default_rng(2)
    accused = [words for words in (accuse(*draw_run(rng)) for _ in range(RUNS)) if words]
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
        both = (np.stack([side, 1.0 - side][:classes], axis=1)[:, None] for side in (sides, found))
        assert accuse(*(list(rows.astype(np.float32)) for rows in both)) is None


@pytest.mark.parametrize(("step", "is_told"), [(1.0, False), (0.25, False), (0.01, True)])
def test_a_grid_that_is_too_coarse_for_what_varies_is_no_lie(step: float, *, is_told: bool) -> None:
    """Outputs that all round to the same level come back the same; a constant that no grid makes of them is told."""
    wanted = 0.1 * np.random.default_rng(0).uniform(-1.0, 1.0, size=(8, 1, 4)).astype(np.float32)
    assert not np.round(wanted / 0.25).any()
    found = np.repeat(np.round(wanted[:1] / step) * step, 8, axis=0).astype(np.float32)
    assert (accuse(list(wanted), list(found)) == "is the same for every sample") is is_told


@pytest.mark.parametrize(("classes", "samples"), [(1, 64), (2, 24), (10, 16)])
def test_a_device_that_gives_the_outputs_of_others_is_still_found(classes: int, samples: int) -> None:
    """The fewer values an output has, the more samples it takes; the figures are good enough to pass."""
    rng, missed = np.random.default_rng(classes), 0
    for _ in range(50):
        wanted = 1.0 + 0.25 * rng.normal(size=(samples, 1, classes))
        found = wanted[rng.permutation(samples)] + rng.normal(scale=0.01, size=wanted.shape)
        missed += accuse(list(wanted.astype(np.float32)), list(found.astype(np.float32))) is None
    assert missed <= 2
