"""Range methods: which range of an activation its integers should span, chosen from its statistics."""

import math
from collections.abc import Callable

import msgspec
import numpy as np

from edgekit.quantize.ranges.entropy import find_entropy_threshold
from edgekit.quantize.ranges.histogram import Histogram
from edgekit.quantize.ranges.nonlinearities import Nonlinearity, saturation_of

LEVELS = 255
"""Steps between the lowest and the highest of 256 integers."""
_LARGEST = float(np.finfo(np.float32).max)
# From the whole range to a fiftieth of it; chosen by hand.
_FACTORS = np.linspace(1.0, 0.02, 50).tolist()


class TensorRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lowest and highest value that the integers of a tensor stand for, before zero is made exact."""

    low: float
    high: float


class TensorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a tensor: its lowest and highest value, their means over the samples, and a histogram."""

    exact: TensorRange
    mean: TensorRange
    histogram: Histogram


def snap_range(exact: TensorRange) -> TensorRange:
    """Returns a range with both ends rounded to 9 significant bits, which moves them by half a step of 255 at most."""
    # CPUs differ in the last bits of a sum, since their kernels add in other orders; the scale that follows, and so the
    # bytes of the quantized model, should not.
    return TensorRange(low=_snap(exact.low), high=_snap(exact.high))


def _snap(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return float(np.clip(math.ldexp(round(mantissa * 512), exponent - 9), -_LARGEST, _LARGEST))


def percentile_range(
    exact: TensorRange, histogram: Histogram, percent: float, reader: Nonlinearity | None = None
) -> TensorRange:
    """Returns the range that holds `percent` of the values, the rest cut off in equal parts at both ends.

    What lies where `reader` is saturated, such as HardSwish below -3, is cut off too.
    """
    if not histogram.total:
        return exact
    # Bins are at most 1/1024 of the largest magnitude wide, a quarter of a step of 8 bits over all: their centres are
    # near enough.
    cumulative = np.cumsum(histogram.counts) / histogram.total
    tail = (100 - percent) / 200
    low = histogram.centers[int(np.searchsorted(cumulative, tail))]
    high = histogram.centers[min(int(np.searchsorted(cumulative, 1 - tail)), len(cumulative) - 1)]
    exact = _clip_saturated(exact, reader)
    return TensorRange(low=max(exact.low, float(low)), high=min(exact.high, float(high)))


def _clip_saturated(exact: TensorRange, reader: Nonlinearity | None) -> TensorRange:
    least, most = saturation_of(reader)
    return TensorRange(low=min(max(exact.low, least), most), high=max(min(exact.high, most), least))


def tail_error(percent: float, values: int) -> float:
    """Returns how far what is cut off at an end may be from the share wanted, with 95 % certainty, from so many values.

    This is the normal bound for values drawn at random; those picked one from each of equal parts of a tensor are
    never worse (W. Cochran, "Sampling Techniques", 1977, 5.6).
    """
    tail = (100 - percent) / 200
    return 1.96 * math.sqrt(tail * (1 - tail) / max(1, values))


def mse_range(exact: TensorRange, histogram: Histogram, reader: Nonlinearity | None = None) -> TensorRange:
    """Returns the range with the least mean squared rounding and clipping error at 8 bits, after `reader`.

    Both ends shrink together over 50 factors, then each by itself (a search as of OMSE, Y. Choukroun et al.,
    arXiv:1902.06822, for two ends).
    """
    if not histogram.total or exact.high <= exact.low:
        return exact
    exact = _clip_saturated(exact, reader)

    def best(candidates: list[tuple[float, float]]) -> tuple[float, float]:
        return min(candidates, key=lambda ends: quantization_error(ends[0], ends[1], histogram, reader))

    low, high = best([(exact.low * factor, exact.high * factor) for factor in _FACTORS])
    if exact.low < 0:
        low, high = best([(low, high), *((exact.low * factor, high) for factor in _FACTORS)])
    if exact.high > 0:
        low, high = best([(low, high), *((low, exact.high * factor) for factor in _FACTORS)])
    return TensorRange(low=low, high=high)


def quantization_error(low: float, high: float, histogram: Histogram, reader: Nonlinearity | None = None) -> float:
    """Returns the summed squared error, after `reader`, of 8-bit integers over [low, high] made to include zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / LEVELS
    values = histogram.centers
    if step > 0:
        zero = round(-low / step)
        rounded = np.rint(values / step)
        np.maximum(rounded, -zero, out=rounded)
        np.minimum(rounded, LEVELS - zero, out=rounded)
        rounded *= step
    else:
        rounded = np.zeros_like(values)
    error = rounded - values if reader is None else reader(rounded) - reader(values)
    return float(np.dot(histogram.counts, error * error))


def entropy_range(exact: TensorRange, histogram: Histogram) -> TensorRange:
    """Returns the range, alike to both sides of zero, whose quantized values diverge least from the float ones."""
    most = find_entropy_threshold(exact.low, exact.high, histogram)
    return TensorRange(low=max(exact.low, -most), high=min(exact.high, most))


PLAIN_METHODS = ("minmax", "moving-average")
"""The range methods that need no histogram."""

# A thousandth and a ten-thousandth of the values: those cut off are about 4 and 0.4 of the 4096 picked from a sample.
PERCENTS = {"percentile-99.99": 99.99, "percentile-99.9": 99.9}

AUTO_METHODS = ("minmax", "mse", *PERCENTS)
"""The range methods that are judged against each other.

No one wins on every net of tools/bench/quantize_zoo.py. Entropy is left out: it collapses on ReLU nets.
"""

RANGE_METHODS: dict[str, Callable[[TensorStatistics, Nonlinearity | None], TensorRange]] = {
    "minmax": lambda seen, _reader: seen.exact,
    "moving-average": lambda seen, _reader: seen.mean,
    "mse": lambda seen, reader: mse_range(seen.exact, seen.histogram, reader),
    "entropy": lambda seen, _reader: entropy_range(seen.exact, seen.histogram),
    "percentile-99.99": lambda seen, reader: percentile_range(seen.exact, seen.histogram, 99.99, reader),
    "percentile-99.9": lambda seen, reader: percentile_range(seen.exact, seen.histogram, 99.9, reader),
}
"""Every range method, by the name that plans and options use. "moving-average" is the mean over the samples of each
tensor's lowest and highest value: a moving average without decay, so that the order of the samples is of no matter."""

METHODS = ("auto", "best", *RANGE_METHODS)
"""What a user may ask for."""
