"""Statistics of a series of run times: quantiles, confidence intervals, drift, and warming of the device."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.data.intervals import Z95, student_95
from edgekit.devices.device import DeviceState

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Thresholds of warnings, chosen by edgekit: the temperatures at which devices lower their clock differ.
MAX_WARMING_C = 5.0
MAX_CLOCK_CHANGE = 0.1


def describe_change(before: DeviceState | None, after: DeviceState | None) -> Iterator[str]:
    """Yields warnings about the sensor that warmed the most and the clock that changed the most, beyond the thresholds.

    There is none if the device reports neither.
    """
    if before is None or after is None:
        return
    warmer = _changes(before.temperatures_c, after.temperatures_c)
    sensor = max(warmer, key=lambda name: warmer[name], default=None)
    if sensor is not None and warmer[sensor] > MAX_WARMING_C:
        yield f"the device got {warmer[sensor]:.0f} °C warmer ({sensor})"
    changes = _changes(before.clocks_khz, after.clocks_khz)
    clocks = {name: change / before.clocks_khz[name] for name, change in changes.items()}
    cpu = max(clocks, key=lambda name: abs(clocks[name]), default=None)
    if cpu is not None and abs(clocks[cpu]) > MAX_CLOCK_CHANGE:
        yield f"the clock of {cpu} changed by {clocks[cpu]:+.0%}"


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - value for name, value in before.items() if name in after and value}


Series = npt.NDArray[np.float64]

MAX_DRIFT = 0.05
"""A change over the series by more than this share of the median is a drift, if it is statistically significant."""

_DRIFT_Z = 3.0
_MIN_DRIFT_RUNS = 12
# 200 points have 19,900 pairs; the 2,000 runs that a block may have would have two million.
_MAX_DRIFT_POINTS = 200
_MIN_MEDIAN_MS = 1e-9
_MSER_BATCH = 5
_MIN_TIME_MS, _CLOCK_TOLERANCE = 0.0005, 1.05


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds per sample on the device.

    `interval` is the 95 % confidence interval of the median. `drift` is the change of the time from the first run to
    the last as a share of the median (negative: it fell), None if it is not significant (see `find_drift`).
    """

    median: float
    p95: float
    p99: float | None = None
    runs: int = 0
    interval: tuple[float, float] | None = None
    drift: float | None = None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """The time of B divided by that of A, with its 95 % confidence interval, from interleaved rounds."""

    value: float
    interval: tuple[float, float]
    rounds: int

    @property
    def verdict(self) -> str:
        """Which of the two is faster, or that the interval includes 1."""
        low, high = self.interval
        return "A is faster" if low > 1 else "B is faster" if high < 1 else "no difference can be told"


def summarize_latency(latency_ms: Sequence[float]) -> Latency | None:
    """Returns the figures of a series of times in the order of the runs, None for an empty one.

    Quantiles are interpolated linearly. With fewer than 100 runs, the 99th percentile lies between the two slowest
    ones.
    """
    if not latency_ms:
        return None
    series = np.asarray(latency_ms, dtype=np.float64)
    median, p95, p99 = (float(value) for value in np.percentile(series, [50.0, 95.0, 99.0]))
    interval, drift = median_interval(series), find_drift(series)
    return Latency(median=median, p95=p95, p99=p99, runs=len(series), interval=interval, drift=drift)


def median_interval(latency_ms: Sequence[float] | Series) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the median from order statistics, for any distribution.

    The ranks come from the binomial distribution with p = 1/2 in its normal approximation (W. J. Conover, Practical
    Nonparametric Statistics, 3.2). With fewer than six runs, no interval reaches 95 %: their whole range is returned.
    """
    ordered = np.sort(np.asarray(latency_ms, dtype=np.float64))
    count = len(ordered)
    # The standard deviation of a binomial with p = 1/2 is sqrt(n) / 2.
    half = Z95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - half))
    high = min(count - 1, math.ceil(count / 2 + half) - 1)
    return (float(ordered[0]), float(ordered[-1])) if count < 6 else (float(ordered[low]), float(ordered[high]))


def find_drift(latency_ms: Sequence[float] | Series) -> float | None:
    """Returns the change of the time from the first run to the last as a share of the median, None for no drift.

    The slope is the median of the slopes of all pairs (P. K. Sen, JASA 63, 1968), which single slow runs do not affect.
    It counts as drift if the change exceeds MAX_DRIFT, and Kendall's trend statistic (H. B. Mann, Econometrica 13,
    1945) exceeds three standard deviations. Long series are reduced to the medians of equal sections.
    """
    series = np.asarray(latency_ms, dtype=np.float64)
    if len(series) > _MAX_DRIFT_POINTS:
        series = np.array([np.median(part) for part in np.array_split(series, _MAX_DRIFT_POINTS)])
    count, median = len(series), float(np.median(series)) if len(series) else 0.0
    if count < _MIN_DRIFT_RUNS or median <= _MIN_MEDIAN_MS:
        return None
    first, second = np.triu_indices(count, 1)
    differences = series[second] - series[first]
    drift = float(np.median(differences / (second - first))) * (count - 1) / median
    # The standard deviation of Kendall's S without a trend and without ties, which are rare among times in nanoseconds.
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    is_chance = abs(float(np.sign(differences).sum())) < _DRIFT_Z * deviation
    return None if is_chance or abs(drift) <= MAX_DRIFT else drift


def find_steady(latency_ms: Sequence[float], max_warmup: int) -> int:
    """Returns how many of the first runs are warm-up, at most `max_warmup`; the runs after them are steady.

    This is MSER-5 (K. P. White, Simulation 69, 1997), in batches of five: the cut that minimizes the variance of the
    remaining batches, divided by their number. Each batch is represented by its median, so that a single pause of the
    system does not count as warm-up. The first run is always cut: it fills the arena, and kernels are initialized
    lazily in it.
    """
    count = len(latency_ms) // _MSER_BATCH
    whole = np.asarray(latency_ms[: count * _MSER_BATCH], dtype=np.float64)
    batches = np.median(np.reshape(whole, (count, _MSER_BATCH)), axis=1)
    cuts = range(min(max_warmup // _MSER_BATCH, count // 2) + 1)
    if not count:
        return min(1, max_warmup)
    errors = [float(np.var(batches[cut:])) / (count - cut) for cut in cuts]
    return min(max_warmup, max(1, int(np.argmin(errors)) * _MSER_BATCH))


def find_impossible_time(times_ms: Sequence[float]) -> str | None:
    """Returns a message about a device's first impossible time (NaN, infinite or negative), or None."""
    wrong = next(((run, time) for run, time in enumerate(times_ms, 1) if not 0.0 <= time < math.inf), None)
    return None if wrong is None else f"it says that run {wrong[0]} took {wrong[1]:g} ms, which is no time"


def find_false_times(latency_ms: Sequence[float], elapsed_ms: float) -> str | None:
    """Returns a message if the times of single runs are implausible, else None.

    No session returns within half a microsecond, so a shorter time is no measurement. All times together cannot exceed
    the time that the device took to answer, with some tolerance for the clock of another machine.
    """
    if not latency_ms:
        return None
    if min(latency_ms) < _MIN_TIME_MS:
        return f"its times are left out: {min(latency_ms):g} ms is less than any session takes"
    if (total_ms := sum(latency_ms)) > _CLOCK_TOLERANCE * elapsed_ms:
        return f"its times are left out: it reports {total_ms:g} ms together, and answered after {elapsed_ms:g} ms"
    return None


def describe_drift(drift: float) -> str:
    """Returns the text of the warning about a drift."""
    change = f"{abs(drift):.0%} {'slower' if drift > 0 else 'faster'}"
    return f"the runs became {change} from first to last: clock or temperature changed, or others used the device"


def count_needed(latency_ms: Sequence[float], precision: float) -> int:
    """Returns how many runs are needed for a half width of the median's interval of `precision` times the median.

    The width is inversely proportional to the square root of the number of runs.
    """
    low, high = median_interval(latency_ms)
    median = float(np.median(latency_ms))
    if (half := (high - low) / 2) <= precision * median:
        return len(latency_ms)
    return math.ceil(len(latency_ms) * (half / (precision * median)) ** 2)


def measure_round(number: int, items: Sequence[_Item], measure: Callable[[_Item], _Result]) -> tuple[_Result, ...]:
    """Measures each item once, in an order that depends on the round's number; returns the results in the items' order.

    Slow changes of the machine must affect all items alike. So the second of two rounds has the order of the first in
    reverse, and each pair of rounds begins with another item: two items are measured as AB, BA, BA, AB.
    """
    places = list(range(len(items)))
    first = number // 2 % len(places)
    rotated = places[first:] + places[:first]
    results = {place: measure(items[place]) for place in (rotated if number % 2 == 0 else rotated[::-1])}
    return tuple(results[place] for place in places)


def compare_rounds(rounds: Sequence[Sequence[float]]) -> Ratio:
    """Returns the ratio of B's time to A's, from the median times of both in each round.

    Slow changes, such as those of clock and temperature, affect both halves of a round alike and cancel in their ratio.
    The interval is Student's t interval for the mean of the logarithms of the ratios.

    Raises:
        ValueError: there are fewer than two rounds, or a time is not above zero.
    """
    if len(rounds) < 2 or not all(time > 0 for times in rounds for time in times):
        raise ValueError("a comparison needs two rounds or more, of times above zero")
    # Logarithms make the result symmetric: B against A is the inverse of A against B.
    logs = np.log([b / a for a, b in rounds])
    mean = float(logs.mean())
    half = student_95(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), interval=(math.exp(mean - half), math.exp(mean + half)), rounds=len(logs))
