"""Signal-to-quantization-noise ratios, and the one that stands for several."""

from collections.abc import Sequence

import numpy as np

# Past -20 dB nothing is left of a signal, past 80 dB float32 itself errs: one such output must not decide a mean.
_WORST_DB, _BEST_DB = -20.0, 80.0


def ratio_db(signal: float, noise: float) -> float:
    """Returns signal over noise in dB, within -20 and 80."""
    if not np.isfinite(noise):
        return _WORST_DB
    # What is silent or empty in both, such as the past of a first step, has lost nothing.
    if noise == 0:
        return _BEST_DB
    tiny = np.finfo(np.float64).tiny
    return float(np.clip(10 * (np.log10(max(signal, tiny)) - np.log10(max(noise, tiny))), _WORST_DB, _BEST_DB))


def join_ratios(ratios: Sequence[float]) -> float:
    """Returns the ratio in dB that stands for several: that of their mean noise, so that the worst counts most."""
    return float(-10 * np.log10(np.mean(10 ** (-np.asarray(ratios) / 10))))
