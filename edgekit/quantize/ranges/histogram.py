"""Histograms of activations that grow with their data and do not depend on its order."""

import math

import msgspec
import numpy as np

from edgekit.model.tensors import Array

# On either side of zero. ONNX Runtime has as many in all (PercentileCalibrater in its quantization/calibrate.py).
HALF_BINS = 2048
PARTS = 8
"""Into how many parts the samples of a histogram are dealt in turn, to see how much they differ; chosen by hand."""

# The 99.5 % quantile of Student's t with PARTS - 1 degrees of freedom.
_T_99 = 3.4995

# What a count may be in half the memory: the samples of a calibration give a part less.
_MOST_NARROW = int(np.iinfo(np.uint16).max)


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values at bin centres; bins without a value are left out.

    `centers` rise and have shape [B], `counts` too; exact zeros have a bin of their own. `parts` [PARTS, B] says from
    which part of the samples the values come.
    """

    centers: Array
    counts: Array
    parts: Array

    @property
    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    def sample_error(self, measured: int, samples: int) -> float:
        """Returns how far a share read from here may be from that over all `samples`, of which `measured` were counted.

        This is the largest half-width, over all values, of the 99 % interval of Student's t for the share of what lies
        below a value, from how much it differs between the parts, less what is certain because the samples are a part
        of all (W. Cochran, "Sampling Techniques", 1977, 2.7). 99 % at each value leave about 95 % for all together.
        """
        sizes = self.parts.sum(axis=1)
        if measured >= samples or not sizes.all():
            return 0.0 if measured >= samples else 1.0
        shares = np.cumsum(self.parts, axis=1) / sizes[:, None]
        spread = float(shares.std(axis=0, ddof=1).max())
        return _T_99 * spread * math.sqrt((1 - measured / samples) / PARTS)


class HistogramCollector:
    """Counts values in bins of a power-of-two width, which doubles when a value falls outside.

    Bins begin at multiples of their width, so doubling merges pairs exactly and the order of the values is of no
    matter. The width ends between 1/2048 and 1/1024 of the largest magnitude.
    """

    def __init__(self) -> None:
        self._exponent = -126
        self._counts = np.zeros((PARTS, 2 * HALF_BINS), np.uint16)
        self._zeros = np.zeros(PARTS, np.int32)

    def add(self, values: Array) -> None:
        """Counts finite floats [samples, values]; the samples are dealt to the parts in turn, from call to call."""
        if not values.size:
            return
        magnitude = max(float(values.max()), -float(values.min()))
        ordinal = int(self._counts.sum() + self._zeros.sum()) // values.shape[1]
        parts = (ordinal + np.arange(len(values))) % PARTS
        # All values of a part may fall into one bin.
        if -(-(ordinal + len(values)) // PARTS) * values.shape[1] > _MOST_NARROW:
            self._counts = self._counts.astype(np.int32)
        zeros = values.shape[1] - np.count_nonzero(values, axis=1)
        np.add.at(self._zeros, parts, zeros.astype(np.int32))
        if not magnitude:
            return
        self._widen(magnitude)
        # Wide bins: in float32 a small negative value would underflow to -0, and be counted on the other side of zero.
        scaled = values.astype(np.float64 if self._exponent > 0 else values.dtype) * 2.0**-self._exponent
        bins = np.floor(scaled, out=scaled).astype(np.intp)
        bins += (parts * 2 * HALF_BINS + HALF_BINS)[:, None]
        found = np.bincount(bins.reshape(-1), minlength=self._counts.size).reshape(PARTS, -1)
        self._counts += found.astype(self._counts.dtype)
        np.subtract.at(self._counts[:, HALF_BINS], parts, zeros.astype(self._counts.dtype))

    def state(self) -> Array:
        """Returns everything counted as int32 [1 + PARTS (1 + bins)]: the exponent of the width, zeros, bins."""
        return np.concatenate([[np.int32(self._exponent)], self._zeros, self._counts.reshape(-1)])

    def restore(self, state: Array) -> bool:
        """Goes on from a state; returns False, and does nothing, if it is none."""
        fits = state.shape == (1 + PARTS * (1 + 2 * HALF_BINS),) and state.dtype == np.int32
        if not fits or state[1:].min() < 0 or not -126 <= state[0] <= 128:
            return False
        self._exponent, self._zeros = int(state[0]), state[1 : 1 + PARTS].copy()
        counts = state[1 + PARTS :].reshape(PARTS, -1)
        fits_narrow = (counts.sum(axis=1) + self._zeros).max() <= _MOST_NARROW
        self._counts = counts.astype(np.uint16 if fits_narrow else np.int32)
        return True

    def freeze(self) -> Histogram:
        """Returns the histogram of everything counted."""
        used = np.flatnonzero(self._counts.any(axis=0))
        centers = (used - HALF_BINS + 0.5) * 2.0**self._exponent
        parts = self._counts[:, used].astype(np.int64)
        if self._zeros.any():
            at = int(np.searchsorted(centers, 0.0))
            centers, parts = np.insert(centers, at, 0.0), np.insert(parts, at, self._zeros, axis=1)
        return Histogram(centers=centers, counts=parts.sum(axis=0), parts=parts)

    def _widen(self, magnitude: float) -> None:
        # 2^-126 is the least normal float32.
        needed = max(-126, math.frexp(magnitude)[1] - (HALF_BINS.bit_length() - 1))
        if not self._counts.any():
            self._exponent = max(self._exponent, needed)
        while self._exponent < needed:
            merged = self._counts.reshape(PARTS, -1, 2).sum(axis=2, dtype=self._counts.dtype)
            self._counts = np.pad(merged, ((0, 0), (HALF_BINS // 2, HALF_BINS // 2)))
            self._exponent += 1
