"""How certain a figure from few samples is: 95 % confidence intervals."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Z95 = 1.959963984540054
"""95 % of a normal distribution lie within this many standard deviations of the mean."""

# Student's t for 95 %, two-sided, for 1, 2, ... degrees of freedom. A table avoids scipy as a dependency for one
# function; for more degrees, the first term of the Cornish-Fisher expansion is used.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

# What Efron and Tibshirani (1993) recommend for percentile intervals; many samples cost more and need fewer draws.
_RESAMPLES = 1000
# Nobody labels more samples than this: a limit that would need more cannot be proven.
_MOST_SAMPLES = 10_000_000


def student_95(degrees: int) -> float:
    """Returns Student's t: 95 % of the means lie within this many of their standard errors, which `degrees` tell."""
    return _T95[degrees - 1] if degrees <= len(_T95) else Z95 * (1 + (Z95**2 + 1) / (4 * degrees))


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """Returns the interval of a share of hits by Wilson's score method (E. B. Wilson, JASA 22, 1927).

    Unlike the normal approximation it stays within 0 and 1, and is not empty when all samples hit.
    """
    if total == 0:
        return 0.0, 1.0
    share, z2 = hits / total, Z95 * Z95
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_share(parts: npt.NDArray[Any]) -> tuple[float, tuple[float, float] | None]:
    """Returns the sum of the first column over that of the second, and its interval by the percentile bootstrap.

    The bootstrap (Efron 1979) is seeded. The interval is None for a single sample, which says nothing about the spread.
    """
    share = float(_divide(parts.sum(axis=0)))
    return share, None if len(parts) < 2 else span_95(_divide(draw_sums(parts)))


def draw_sums(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns bootstrap sums: each over as many rows as there are, drawn with replacement."""
    rounds = min(_RESAMPLES, 100 + 200_000 // len(rows))
    drawn = np.random.default_rng(0).integers(0, len(rows), (rounds, len(rows)))
    return np.asarray(rows[drawn].sum(axis=1))


def span_95(values: Sequence[float] | npt.NDArray[Any]) -> tuple[float, float]:
    """Returns the percentiles between which 95 % of the bootstrap draws lie."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _divide(parts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns shares of at most 1; two sides that are both empty agree."""
    both, named = parts[..., 0], parts[..., 1]
    return np.where(named > 0.0, both / np.where(named > 0.0, named, 1.0), 1.0).clip(0.0, 1.0)


def interval_of_pairs(total: int, gained: int, lost: int) -> tuple[float, float]:
    """Returns the interval of the difference of two shares of hits on the same samples.

    Of `total` samples `gained` are hits only on the second side, `lost` only on the first. Half a sample is added to
    each of the four cells (Agresti and Min, Statistics in Medicine 24, 2005), so that the interval is not empty if both
    sides agree on every sample: 100 samples leave 1.9 points of doubt, 500 leave 0.4.
    """
    # Half a sample in each of four cells: two more in total, and one more among those that changed sides.
    centre = (gained - lost) / (total + 2)
    spread = gained + lost + 1 - (gained - lost) ** 2 / (total + 2)
    half = Z95 * math.sqrt(spread) / (total + 2)
    return max(-1.0, centre - half), min(1.0, centre + half)


def find_enough_pairs(total: int, gained: int, lost: int, least: float) -> int | None:
    """Returns how many samples the lower end of `interval_of_pairs` needs to reach `least`, or None.

    It is assumed that the same proportion of them changes sides as among the measured ones.
    """

    def reaches(count: int) -> bool:
        scale = count / total
        # Rounded to the unfavourable side, so that the number returned is enough.
        return interval_of_pairs(count, math.floor(gained * scale), math.ceil(lost * scale))[0] >= least

    return _find_first(reaches, total)


def find_enough_hits(total: int, share: float, least: float) -> int | None:
    """Returns how many samples the lower end of Wilson's interval of a share needs to reach `least`, or None."""
    return _find_first(lambda count: wilson_interval(math.floor(share * count), count)[0] >= least, total)


def _find_first(reaches: Callable[[int], bool], total: int) -> int | None:
    """Returns the first number of samples above `total` that is enough, or None; rounding may make it a few off."""
    count = bisect_left(range(_MOST_SAMPLES), x=True, lo=total + 1, key=reaches)
    return count if count < _MOST_SAMPLES else None


def find_enough(samples: int, half: float, room: float) -> int | None:
    """Returns how many samples narrow an interval so that its end moves from `half` to `room`, or None if none would.

    Widths fall with the square root of the number of samples.
    """
    if room <= 0.0:
        return None
    enough = math.ceil(samples * (half / room) ** 2)
    return None if enough > _MOST_SAMPLES else enough


def describe_enough(count: int | None) -> str:
    """Returns, in words, how many samples are enough, rounded up to two digits; "" if no number is."""
    if count is None:
        return ""
    unit = 10 ** max(0, len(str(count)) - 2)
    return f": about {-(-count // unit) * unit} samples would tell"


def bootstrap_pairs(
    reference: Callable[[npt.NDArray[Any]], float], got: Callable[[npt.NDArray[Any]], float], count: int, rounds: int
) -> tuple[tuple[float, float], tuple[float, float] | None]:
    """Returns the intervals of `got` minus `reference` and of `got` over `reference`, by the paired bootstrap, seeded.

    Both are functions of how often each of `count` samples is drawn (Efron 1979, percentiles); both get the same draw,
    so that samples that are hard for both cancel out. The second is None if a draw gave a reference of zero.
    """
    rng = np.random.default_rng(0)
    differences: list[float] = []
    shares: list[float] = []
    for _ in range(rounds):
        weights = rng.multinomial(count, np.full(count, 1.0 / count))
        before, now = reference(weights), got(weights)
        differences.append(now - before)
        if before > 0.0:
            shares.append(now / before)
    return span_95(differences), span_95(shares) if len(shares) == rounds else None
