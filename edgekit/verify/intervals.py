"""How sure a figure from few samples is: confidence intervals of 95 %."""

import math
from collections.abc import Sequence

import numpy as np

from edgekit.verify.metrics import DB_LIMIT, SampleErrors

_Z95 = 1.959963984540054
_RESAMPLES = 1000


def wilson_interval(hits: int, total: int) -> tuple[float, float]:
    """Returns the interval of a share of hits by Wilson's score method (E. B. Wilson, JASA 22, 1927).

    Unlike the normal approximation it stays within 0 and 1, and is not empty when all samples hit.
    """
    if total == 0:
        return 0.0, 1.0
    share, z2 = hits / total, _Z95 * _Z95
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_sqnr(samples: Sequence[SampleErrors]) -> tuple[float, float] | None:
    """Returns the interval of the SQNR in dB by the percentile bootstrap over samples (Efron 1979), seeded.

    None for a single sample, which says nothing about the spread.
    """
    if len(samples) < 2:
        return None
    signal = np.array([sample.reference_energy for sample in samples])
    noise = np.array([sample.error_energy for sample in samples])
    rounds = min(_RESAMPLES, 100 + 200_000 // len(samples))
    drawn = np.random.default_rng(0).integers(0, len(samples), (rounds, len(samples)))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = 10.0 * np.log10(signal[drawn].sum(axis=1) / noise[drawn].sum(axis=1))
    values = np.nan_to_num(values, nan=DB_LIMIT, posinf=DB_LIMIT, neginf=-DB_LIMIT).clip(-DB_LIMIT, DB_LIMIT)
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
