"""What a series of run times says: its figures, how sure they are, and whether the device got warmer meanwhile."""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.data.wilson import Z95
from edgekit.devices.device import DeviceState

# Our own thresholds, for a warning only: governors of phones and boards step the clock down at temperatures that are
# the maker's own.
MAX_WARMING_C = 5.0
MAX_CLOCK_CHANGE = 0.1


def describe_change(before: DeviceState | None, after: DeviceState | None) -> Iterator[str]:
    """Yields a warning for the sensor that rose the most beyond MAX_WARMING_C, and for the clock that changed the most.

    A device that tells neither gives none.
    """
    if before is None or after is None:
        return
    warmer = _changes(before.temperatures_c, after.temperatures_c)
    sensor = max(warmer, key=lambda name: warmer[name], default=None)
    if sensor is not None and warmer[sensor] > MAX_WARMING_C:
        yield f"the device got {warmer[sensor]:.0f} °C warmer ({sensor})"
    clocks = {
        name: change / before.clocks_khz[name] for name, change in _changes(before.clocks_khz, after.clocks_khz).items()
    }
    cpu = max(clocks, key=lambda name: abs(clocks[name]), default=None)
    if cpu is not None and abs(clocks[cpu]) > MAX_CLOCK_CHANGE:
        yield f"the clock of {cpu} changed by {clocks[cpu]:+.0%}"


def find_energy(before: DeviceState | None, after: DeviceState | None) -> float | None:
    """Returns the joules that the processor's packages used in between, None where they are not told or began anew."""
    if before is None or after is None:
        return None
    used = {
        name: after.energy_uj[name] - value
        for name, value in before.energy_uj.items()
        # Other zones, such as the whole board's, hold the packages once more.
        if name.startswith("package") and name in after.energy_uj
    }
    # A counter that ran over is not guessed at: its range differs from one processor to the next.
    return sum(used.values()) / 1e6 if used and min(used.values()) >= 0 else None


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - value for name, value in before.items() if name in after and value}


Series = npt.NDArray[np.float64]

MAX_DRIFT = 0.05
"""A change of the median from the first run to the last beyond this is a drift, where chance does not explain it."""

_DRIFT_Z = 3.0
_DRIFT_LEAST = 12
# All pairs of 200 points are 19,900; of the 2,000 runs that a block may have they would be two million.
_DRIFT_POINTS = 200
_FAST = 1e-9
_BATCH = 5
_LEAST_MS, _CLOCKS = 0.0005, 1.05

# Student's t for 95 %, two-sided, by degrees of freedom from 1. A table, because scipy would be a dependency for one
# function; larger degrees by Cornish and Fisher's first term.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds for one sample on the device.

    `interval` holds the median with 95 % confidence. `drift` is how much of the median the time grew from the first run
    to the last (negative: it fell), None where there are too few runs to tell it from chance, or none is seen.
    """

    median: float
    p95: float
    p99: float | None = None
    runs: int = 0
    interval: tuple[float, float] | None = None
    drift: float | None = None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as long B takes as A, with 95 % confidence, from so many rounds of one after the other."""

    value: float
    interval: tuple[float, float]
    rounds: int

    @property
    def verdict(self) -> str:
        """Which of the two is faster, as far as the rounds can tell."""
        low, high = self.interval
        if low > 1:
            return "A is faster"
        return "B is faster" if high < 1 else "no difference can be told"


def summarize_latency(latency_ms: Sequence[float]) -> Latency | None:
    """Returns the figures of a series of times in the order of the runs, None for an empty one.

    Quantiles are interpolated linearly. The 99th of fewer than 100 runs lies beside the slowest of them.
    """
    if not latency_ms:
        return None
    series = np.asarray(latency_ms, dtype=np.float64)
    median, p95, p99 = (float(value) for value in np.percentile(series, [50.0, 95.0, 99.0]))
    return Latency(
        median=median, p95=p95, p99=p99, runs=len(series), interval=median_interval(series), drift=find_drift(series)
    )


def median_interval(latency_ms: Sequence[float] | Series) -> tuple[float, float]:
    """Returns the 95 % interval of the median from the order of the times alone, whatever their distribution.

    The ranks come from the binomial distribution with p = 1/2 in its normal approximation (W. J. Conover, Practical
    Nonparametric Statistics, 3.2). Of fewer than six runs no interval is that sure: it is their whole range.
    """
    ordered = np.sort(np.asarray(latency_ms, dtype=np.float64))
    count = len(ordered)
    # The standard deviation of a binomial with p = 1/2 is sqrt(n) / 2.
    half = Z95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - half))
    high = min(count - 1, math.ceil(count / 2 + half) - 1)
    return (float(ordered[0]), float(ordered[-1])) if count < 6 else (float(ordered[low]), float(ordered[high]))


def find_drift(latency_ms: Sequence[float] | Series) -> float | None:
    """Returns the share of the median by which the time changed from the first run to the last, None for no drift.

    The slope is the median of the slopes of all pairs (P. K. Sen, JASA 63, 1968), which single slow runs do not
    move. It counts where it makes more than MAX_DRIFT and Kendall's test (H. B. Mann, Econometrica 13, 1945) lies
    beyond three standard deviations. Long series are thinned to the medians of equal stretches.
    """
    series = _thin(np.asarray(latency_ms, dtype=np.float64))
    count, median = len(series), float(np.median(series)) if len(series) else 0.0
    if count < _DRIFT_LEAST or median <= _FAST:
        return None
    first, second = np.triu_indices(count, 1)
    differences = series[second] - series[first]
    drift = float(np.median(differences / (second - first))) * (count - 1) / median
    # The standard deviation of Kendall's S under no trend, without ties, which times in nanoseconds hardly have.
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    is_chance = abs(float(np.sign(differences).sum())) < _DRIFT_Z * deviation
    return None if is_chance or abs(drift) <= MAX_DRIFT else drift


def find_steady(latency_ms: Sequence[float], most: int) -> int:
    """Returns how many of the first runs are warming up, at most `most`: what follows them is steady.

    MSER-5 (K. P. White, Simulation 69, 1997): the cut after which the spread of what is left, over the square of how
    much is left, is least, in batches of five. Batches count by their medians, as a pause of the system is no warm-up.
    The first run is always cut: it fills the arena, and lazy parts of kernels are made in it.
    """
    count = len(latency_ms) // _BATCH
    batches = np.median(np.reshape(np.asarray(latency_ms[: count * _BATCH], dtype=np.float64), (count, _BATCH)), axis=1)
    cuts = range(min(most // _BATCH, count // 2) + 1)
    if not count:
        return min(1, most)
    errors = [float(np.var(batches[cut:])) / (count - cut) for cut in cuts]
    return min(most, max(1, int(np.argmin(errors)) * _BATCH))


def find_impossible_time(times_ms: Sequence[float]) -> str | None:
    """Returns in words which of the times that a device gives is none at all: NaN, infinite or negative."""
    wrong = next(((run, time) for run, time in enumerate(times_ms, 1) if not 0.0 <= time < math.inf), None)
    return None if wrong is None else f"it says that run {wrong[0]} took {wrong[1]:g} ms, which is no time"


def find_false_times(latency_ms: Sequence[float], elapsed_ms: float) -> str | None:
    """Returns in words why times of one run each cannot be, None where they can.

    No session returns within half a microsecond, so that less is no measurement; and all of them together took no
    longer than the device was waited for. A clock of another machine may go a little faster.
    """
    if not latency_ms:
        return None
    if min(latency_ms) < _LEAST_MS:
        return f"its times are left out: {min(latency_ms):g} ms is less than any session takes"
    whole = sum(latency_ms)
    if whole > _CLOCKS * elapsed_ms:
        return f"its times are left out: it reports {whole:g} ms together, and answered after {elapsed_ms:g} ms"
    return None


def describe_drift(drift: float) -> str:
    """Returns the warning about a drift."""
    change = f"{abs(drift):.0%} {'slower' if drift > 0 else 'faster'}"
    return f"the runs became {change} from first to last: clock or temperature changed, or others used the device"


def count_needed(latency_ms: Sequence[float], precision: float) -> int:
    """Returns how many runs would bring the interval of the median to `precision` of it on either side.

    The width shrinks with the square root of the number of runs.
    """
    low, high = median_interval(latency_ms)
    median = float(np.median(latency_ms))
    half = (high - low) / 2
    if half <= precision * median:
        return len(latency_ms)
    return math.ceil(len(latency_ms) * (half / (precision * median)) ** 2)


def compare_rounds(rounds: Sequence[tuple[float, float]]) -> Ratio:
    """Returns how B compares with A from the median times of both in each round.

    What changes slowly, such as clock and temperature, hits both halves of a round alike and cancels in their ratio.
    The interval is Student's for the mean of the logarithms of the ratios.

    Raises:
        ValueError: there are fewer than two rounds, or a time is not above zero.
    """
    if len(rounds) < 2 or not all(time > 0 for times in rounds for time in times):
        raise ValueError("a comparison needs two rounds or more, of times above zero")
    # Logarithms, so that A against B and B against A are the same statement.
    logs = np.log([b / a for a, b in rounds])
    mean = float(logs.mean())
    degrees = len(logs) - 1
    quantile = _T95[degrees - 1] if degrees <= len(_T95) else Z95 * (1 + (Z95**2 + 1) / (4 * degrees))
    half = quantile * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), interval=(math.exp(mean - half), math.exp(mean + half)), rounds=len(logs))


def _thin(series: Series) -> Series:
    if len(series) <= _DRIFT_POINTS:
        return series
    return np.array([np.median(part) for part in np.array_split(series, _DRIFT_POINTS)])
