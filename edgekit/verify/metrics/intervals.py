"""How sure a figure from few samples is: confidence intervals of 95 %."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgekit.data.wilson import Z95, wilson_interval
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT, SampleErrors

# What Efron and Tibshirani (1993) ask for percentile intervals; many samples, which cost more, get by with fewer.
_RESAMPLES = 1000
# Beyond this nobody labels: a limit that would need more cannot be proven.
_MOST_SAMPLES = 10_000_000


def bootstrap_sqnr(samples: Sequence[SampleErrors]) -> tuple[float, float] | None:
    """Returns the interval of the SQNR in dB by the percentile bootstrap over samples (Efron 1979), seeded.

    None for a single sample, which says nothing about the spread.
    """
    if len(samples) < 2:
        return None
    signal, noise = _draw_sums(np.array([(one.reference_energy, one.error_energy) for one in samples])).T
    # Draws without noise are infinitely good, draws of zeros are no number: both become the limit.
    with np.errstate(divide="ignore", invalid="ignore"):
        values = 10.0 * np.log10(signal / noise)
    return span_95(np.nan_to_num(values, nan=DB_LIMIT, posinf=DB_LIMIT, neginf=-DB_LIMIT).clip(-DB_LIMIT, DB_LIMIT))


def bootstrap_share(parts: npt.NDArray[Any]) -> tuple[float, tuple[float, float] | None]:
    """Returns the share that the first of two columns has of the second, over all rows, and its interval as above."""
    share = float(_divide(parts.sum(axis=0)))
    return share, None if len(parts) < 2 else span_95(_divide(_draw_sums(parts)))


def _draw_sums(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the sums over as many rows as there are, drawn with replacement again and again."""
    rounds = min(_RESAMPLES, 100 + 200_000 // len(rows))
    drawn = np.random.default_rng(0).integers(0, len(rows), (rounds, len(rows)))
    return np.asarray(rows[drawn].sum(axis=1))


def span_95(values: Sequence[float] | npt.NDArray[Any]) -> tuple[float, float]:
    """Returns the percentiles between which 95 % of the draws of a bootstrap lie."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _divide(parts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns shares of at most one; two sides that name nothing agree."""
    both, named = parts[..., 0], parts[..., 1]
    return np.where(named > 0.0, both / np.where(named > 0.0, named, 1.0), 1.0).clip(0.0, 1.0)


def interval_of_pairs(total: int, gained: int, lost: int) -> tuple[float, float]:
    """Returns the interval of the difference of two shares of hits on the same samples.

    Of `total` samples `gained` are hits on the second side alone, `lost` on the first alone. Half a sample is added to
    each of the four cells (Agresti and Min, Statistics in Medicine 24, 2005), so that it is not empty where both sides
    agree on every sample: 100 of these leave 1.9 points of doubt, 500 leave 0.4.
    """
    # Half a sample in each of four cells: two more in all, and one more among those that changed sides.
    centre = (gained - lost) / (total + 2)
    spread = gained + lost + 1 - (gained - lost) ** 2 / (total + 2)
    half = Z95 * math.sqrt(spread) / (total + 2)
    return max(-1.0, centre - half), min(1.0, centre + half)


def find_enough_pairs(total: int, gained: int, lost: int, least: float) -> int | None:
    """Returns how many samples would do for the lower end of `interval_of_pairs` to reach `least`, None if none would.

    As many of them change sides, in proportion, as among those that are known.
    """

    def reaches(count: int) -> bool:
        scale = count / total
        # Rounded to the bad side: what would do must do.
        return interval_of_pairs(count, math.floor(gained * scale), math.ceil(lost * scale))[0] >= least

    return _find_first(reaches, total)


def find_enough_hits(total: int, share: float, least: float) -> int | None:
    """Returns how many samples would do for the lower end of Wilson's interval of a share to reach `least`, or None."""
    return _find_first(lambda count: wilson_interval(math.floor(share * count), count)[0] >= least, total)


def _find_first(reaches: Callable[[int], bool], total: int) -> int | None:
    """Returns about the first number of samples beyond `total` that does, None where there is none."""
    below, enough = total, 2 * total
    while not reaches(enough):
        below, enough = enough, 2 * enough
        if enough > _MOST_SAMPLES:
            return None
    while enough - below > max(1, enough // 100):
        middle = (below + enough) // 2
        below, enough = (below, middle) if reaches(middle) else (middle, enough)
    return enough


def find_enough(samples: int, half: float, room: float) -> int | None:
    """Returns how many samples would narrow an interval to `room` from an end at `half`, None where none would.

    Widths fall with the root of the number of samples.
    """
    if room <= 0.0:
        return None
    enough = math.ceil(samples * (half / room) ** 2)
    return None if enough > _MOST_SAMPLES else enough


def describe_enough(count: int | None) -> str:
    """Returns in words how many samples would do, "" where no number would: rounded up to two digits."""
    if count is None:
        return ""
    unit = 10 ** max(0, len(str(count)) - 2)
    return f": about {-(-count // unit) * unit} samples would tell"


def bootstrap_pairs(
    reference: Callable[[npt.NDArray[Any]], float], got: Callable[[npt.NDArray[Any]], float], count: int, rounds: int
) -> tuple[tuple[float, float], tuple[float, float] | None]:
    """Returns the intervals of `got` minus `reference` and of `got` over `reference`, by the paired bootstrap, seeded.

    Both are functions of how often each of `count` samples is drawn (Efron 1979, percentiles); the same draw goes to
    both, so that what is hard for both cancels. The second is None where a reference of zero was drawn.
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
