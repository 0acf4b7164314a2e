import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from edgekit.data.samples import spread_indices
from edgekit.quantize.ranges import PARTS, Histogram, HistogramCollector

floats = npst.arrays(np.float32, st.integers(1, 60), elements=st.floats(-1e6, 1e6, width=32))


@given(floats, floats)
@example(np.array([32768], np.float32), np.array([-1e-44], np.float32))
def test_order_does_not_matter_and_nothing_is_lost(one: np.ndarray, two: np.ndarray) -> None:
    forward, backward = HistogramCollector(), HistogramCollector()
    for collector, parts in ((forward, (one, two)), (backward, (two, one))):
        for part in parts:
            collector.add(part[None])
    left, right = forward.freeze(), backward.freeze()
    assert left.total == one.size + two.size
    assert np.array_equal(left.centers, right.centers)
    assert np.array_equal(left.counts, right.counts)


@given(floats)
def test_each_value_lies_within_a_bin_of_a_center(values: np.ndarray) -> None:
    collector = HistogramCollector()
    collector.add(values[None])
    centers = collector.freeze().centers
    nearest = np.abs(values[:, None] - centers[None]).min(axis=1)
    assert (nearest <= max(float(np.abs(values).max()) / 1024, 2.0**-126)).all()


def test_bins_double_when_a_value_falls_outside() -> None:
    collector = HistogramCollector()
    collector.add(np.array([[0.75, -0.25, 0.0, 0.7501]], np.float32))
    first = collector.freeze()
    assert first.centers.tolist() == [(-512 + 0.5) / 2048, 0.0, (1536 + 0.5) / 2048]
    assert (first.counts.tolist(), first.total) == ([1, 1, 2], 4)
    collector.add(np.array([[0.0, 0.0, 3.0]], np.float32))
    second = collector.freeze()
    assert second.centers.tolist() == [(-128 + 0.5) / 512, 0.0, (384 + 0.5) / 512, (1536 + 0.5) / 512]
    assert second.counts.tolist() == [1, 3, 2, 1]
    assert second.parts[:2].tolist() == [[1, 1, 2, 0], [0, 2, 0, 1]]
    assert not second.parts[2:].any()


def test_a_state_that_is_none_is_not_restored() -> None:
    collector, other = HistogramCollector(), HistogramCollector()
    collector.add(np.array([[1.0, 2.0, 0.0]], np.float32))
    state = collector.state()
    cases = ((0, -126, True), (0, -127, False), (0, 128, True), (0, 129, False), (1, -1, False), (-1, -1, False))
    for place, value, good in cases:
        changed = state.copy()
        changed[place] = value
        assert other.restore(changed) is good
    assert not other.restore(state[:-1])
    assert other.restore(state)
    assert np.array_equal(other.state(), state)
    other.add(np.zeros((1, 0), np.float32))
    other.add(np.array([[1.0]], np.float32))
    assert np.array_equal(collector.state(), state)


def every_sample(kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(200, 256)).astype(np.float32)
    scales, shifts, few = (
        np.exp(0.4 * rng.normal(size=(200, 1))),
        rng.normal(size=(200, 1)),
        rng.random((200, 1)) < 0.08,
    )
    kinds: dict[str, np.ndarray] = {
        "scales": rows * scales,
        "shifts": np.maximum(rows + shifts, 0),
        "few differ": rows * np.where(few, 4, 1),
        "alike": rows,
    }
    return kinds[kind].astype(np.float32)


@pytest.mark.parametrize("kind", ["scales", "shifts", "few differ", "alike"])
def test_shares_hold_for_all_samples_to_within_the_error_that_is_stated(kind: str) -> None:
    held, turns = 0, 50
    for seed in range(turns):
        every = every_sample(kind, seed)
        measured = every[list(spread_indices(len(every), 64))]
        collector = HistogramCollector()
        for block in np.split(measured, 4):
            collector.add(block)
        stated = collector.freeze().sample_error(len(measured), len(every))
        points = np.quantile(every, np.linspace(0, 1, 201))
        shares = [np.searchsorted(np.sort(part.reshape(-1)), points) / part.size for part in (every, measured)]
        held += float(np.abs(shares[0] - shares[1]).max()) <= stated
        assert stated < 0.25
    assert held >= 0.92 * turns


def test_the_stated_error_is_that_of_students_t() -> None:
    parts = np.array([[4, 0, 1], [0, 4, 1]] * (PARTS // 2))
    seen = Histogram(centers=np.arange(3.0), counts=parts.sum(axis=0), parts=parts)
    spread = np.std([0.8, 0.0] * (PARTS // 2), ddof=1)
    assert seen.sample_error(50, 100) == pytest.approx(3.4995 * spread * (0.5 / PARTS) ** 0.5)
    assert seen.sample_error(1, 10**9) == pytest.approx(3.4995 * spread / PARTS**0.5)
    assert (seen.sample_error(100, 100), seen.sample_error(101, 100)) == (0, 0)
    parts[0] = 0
    assert msgspec.structs.replace(seen, parts=parts).sample_error(50, 100) == 1


def test_samples_are_dealt_to_the_parts_in_turn_over_calls_and_restarts() -> None:
    whole, parts = HistogramCollector(), HistogramCollector()
    values = np.random.default_rng(0).normal(size=(3 * PARTS + 2, 40)).astype(np.float32)
    whole.add(values)
    for block in (values[:5], values[5:6], values[6:]):
        again = HistogramCollector()
        assert again.restore(parts.state())
        again.add(block)
        parts = again
    assert np.array_equal(whole.state(), parts.state())
    assert whole.freeze().parts.sum(axis=1).tolist() == [4 * 40, 4 * 40, *[3 * 40] * (PARTS - 2)]
    assert not parts.restore(whole.state().astype(np.int64))
    assert whole.freeze().sample_error(26, 26) == 0


def test_more_values_than_half_the_memory_can_count_are_counted() -> None:
    collector, other = HistogramCollector(), HistogramCollector()
    for _ in range(2):
        collector.add(np.full((1, 70_000), 1.0, np.float32))
        other.restore(collector.state())
        assert other.freeze().counts.tolist() == collector.freeze().counts.tolist()
    assert collector.freeze().parts[:3].sum(axis=1).tolist() == [70_000, 70_000, 0]
