"""The statistics of run times, against what is known of the series."""

import math

import numpy as np
import pytest
from fixture_types import present

from edgekit.bench.latency import (
    compare_rounds,
    count_needed,
    find_drift,
    find_false_times,
    find_steady,
    median_interval,
    summarize_latency,
)


def noise(seed: int, count: int) -> list[float]:
    """Times around 10 ms with a long tail, as real ones have."""
    return [float(value) for value in 10 + np.random.default_rng(seed).gamma(2.0, 0.2, count)]


def test_the_figures_are_those_of_the_series() -> None:
    latency = present(summarize_latency([float(value) for value in range(1, 102)]))
    assert (latency.median, latency.p95, latency.p99, latency.runs) == (51, 96, 100, 101)
    assert summarize_latency([]) is None
    assert summarize_latency([2.0]) is not None


def test_the_interval_of_the_median_holds_it_in_95_of_100_series() -> None:
    truth = float(np.median(noise(0, 200_000)))
    for count in (10, 30, 101):
        held = [low <= truth <= high for low, high in (median_interval(noise(seed, count)) for seed in range(1, 401))]
        assert 0.92 <= np.mean(held) <= 0.99


def test_the_interval_narrows_with_more_runs_as_predicted() -> None:
    low, high = median_interval(noise(2, count_needed(noise(1, 30), 0.005)))
    assert (high - low) / 2 <= 0.0075 * 10.4
    assert count_needed([5.0] * 30, 0.01) == 30


@pytest.mark.parametrize("growth", [0.15, -0.15])
def test_a_drift_is_seen_through_noise_and_slow_runs(growth: float) -> None:
    series = [value * (1 + growth * index / 99) for index, value in enumerate(noise(3, 100))]
    series[50] = 500.0
    assert abs(present(find_drift(series)) - growth) < 0.05


def test_steady_series_have_no_drift() -> None:
    false_alarms = [find_drift(noise(seed, 60)) for seed in range(300)]
    assert sum(drift is not None for drift in false_alarms) <= 1


@pytest.mark.parametrize(
    ("series", "drifts"),
    [
        pytest.param([1.0] * 50, False, id="equal"),
        pytest.param([1.0, 2.0, 3.0], False, id="too few"),
        pytest.param([0.0] * 50, False, id="no time"),
        pytest.param([100 + index * 0.01 for index in range(100)], False, id="small, however sure"),
        pytest.param([*noise(4, 60), *(value * 1.4 for value in noise(5, 40))], True, id="a step of the clock"),
        pytest.param([10 + index / 5000 for index in range(20_000)], True, id="long, so it is thinned"),
    ],
)
def test_a_drift_needs_size_and_significance(series: list[float], *, drifts: bool) -> None:
    assert (find_drift(series) is not None) is drifts


def test_a_ratio_is_found_although_the_device_slows_down() -> None:
    slowing = [1 + index / 5 for index in range(10)]
    wobble = np.random.default_rng(6).normal(1, 0.01, 10)
    ratio = compare_rounds([(10 * slow, 10 * slow * 1.1 * float(w)) for slow, w in zip(slowing, wobble, strict=True)])
    assert ratio.interval[0] <= 1.1 <= ratio.interval[1]
    assert ratio.verdict == "A is faster"
    assert compare_rounds([(b, a) for a, b in [(1.0, 1.1), (1.0, 1.12), (1.0, 1.09)]]).verdict == "B is faster"


def test_two_equal_models_differ_in_only_five_of_100_comparisons() -> None:
    wrong = 0
    for seed in range(500):
        rng = np.random.default_rng(seed)
        rounds = [(float(a), float(b)) for a, b in rng.lognormal(0, 0.05, (8, 2))]
        wrong += compare_rounds(rounds).verdict != "no difference can be told"
    assert 0.02 <= wrong / 500 <= 0.08


def test_many_rounds_use_the_limit_of_student_s_t() -> None:
    rounds = [(1.0, math.exp(0.01 if index % 2 else -0.01)) for index in range(100)]
    low, high = compare_rounds(rounds).interval
    assert math.isclose(high / low, math.exp(2 * 1.98422 * 0.01 * math.sqrt(100 / 99) / 10), rel_tol=1e-4)


@pytest.mark.parametrize("rounds", [[], [(1.0, 1.0)], [(1.0, 0.0), (1.0, 1.0)], [(math.nan, 1.0), (1.0, 1.0)]])
def test_fewer_than_two_rounds_with_times_are_an_error(rounds: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two rounds"):
        compare_rounds(rounds)


@pytest.mark.parametrize(
    ("times", "elapsed_ms", "words"),
    [
        ((), 1.0, None),
        ((0.0005, 0.01), 1.0, None),
        ((0.01, 0.0), 1.0, "0 ms is less than any session takes"),
        ((0.0004,), 1.0, "0.0004 ms is less"),
        ((2.0, 3.0), 5.0, None),
        ((2.0, 3.2), 5.0, None),
        ((2.0, 3.3), 5.0, "5.3 ms together, and answered after 5 ms"),
        ((1e7,), 2000.0, "1e+07 ms together, and answered after 2000 ms"),
    ],
)
def test_impossible_device_times_are_refused(times: tuple[float, ...], elapsed_ms: float, words: str | None) -> None:
    found = find_false_times(times, elapsed_ms)
    assert (found is None) if words is None else (found is not None and words in found)


def test_warming_up_ends_where_the_times_are_steady() -> None:
    warm = [30.0, *(10 + 5 * math.exp(-index / 6) for index in range(30))]
    cuts = [find_steady([*warm, *noise(seed, 100)], 50) for seed in range(50)]
    assert 10 <= np.median(cuts) <= 35
    assert min(cuts) >= 10
    assert find_steady([*warm, *noise(6, 100)], 5) == 5


def test_only_the_first_of_steady_times_is_left_out() -> None:
    cuts = [find_steady(noise(seed, 100), 50) for seed in range(200)]
    assert np.median(cuts) <= 20
    assert min(cuts) == 1
    assert find_steady([3.0], 0) == 0
    assert find_steady([3.0, 2.0], 1) == 1


def test_a_pause_of_the_system_is_no_warm_up() -> None:
    calm = [10.0 + 0.01 * (index % 7) for index in range(100)]
    assert find_steady([*calm[:22], 400.0, *calm[23:]], 50) == find_steady(calm, 50)
