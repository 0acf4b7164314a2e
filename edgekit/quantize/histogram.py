"""Histograms of activations that grow with their data and do not depend on its order."""

import math

import msgspec
import numpy as np

from edgekit.tensors import Array

HALF_BINS = 2048


class Histogram(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of values at bin centres; bins without a value are left out.

    `centers` rise and have shape [B], `counts` too; exact zeros have a bin of their own.
    """

    centers: Array
    counts: Array

    @property
    def total(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())


class HistogramGrower:
    """Counts values in bins of a power-of-two width, which doubles when a value falls outside.

    Bins begin at multiples of their width, so doubling merges pairs exactly and the order of the values is of no
    matter. The width ends between 1/2048 and 1/1024 of the largest magnitude.
    """

    def __init__(self) -> None:
        self._exponent = -126
        self._counts = np.zeros(2 * HALF_BINS, np.int64)
        self._zeros = 0

    def add(self, values: Array) -> None:
        """Counts finite floats of any shape."""
        flat = values.reshape(-1)
        magnitude = max(float(flat.max()), -float(flat.min())) if flat.size else 0.0
        zeros = flat.size - int(np.count_nonzero(flat))
        self._zeros += zeros
        if not magnitude:
            return
        self._widen(magnitude)
        scaled = flat * flat.dtype.type(2.0**-self._exponent)
        bins = np.floor(scaled, out=scaled).astype(np.intp)
        bins += HALF_BINS
        self._counts += np.bincount(bins, minlength=2 * HALF_BINS)
        self._counts[HALF_BINS] -= zeros

    def state(self) -> Array:
        """Returns everything counted as int64 [2 + bins]: the exponent of the width, the zeros, the bins."""
        return np.concatenate([[self._exponent, self._zeros], self._counts])

    def restore(self, state: Array) -> bool:
        """Goes on from a state; returns False, and does nothing, if it is none."""
        if state.shape != (2 + 2 * HALF_BINS,) or state[1:].min() < 0 or not -126 <= state[0] <= 128:
            return False
        self._exponent, self._zeros, self._counts = int(state[0]), int(state[1]), state[2:].copy()
        return True

    def freeze(self) -> Histogram:
        """Returns the histogram of everything counted."""
        used = np.flatnonzero(self._counts)
        centers = (used - HALF_BINS + 0.5) * 2.0**self._exponent
        counts = self._counts[used]
        if self._zeros:
            at = int(np.searchsorted(centers, 0.0))
            centers, counts = np.insert(centers, at, 0.0), np.insert(counts, at, self._zeros)
        return Histogram(centers=centers, counts=counts)

    def _widen(self, magnitude: float) -> None:
        needed = max(-126, math.frexp(magnitude)[1] - (HALF_BINS.bit_length() - 1))
        if not self._counts.any():
            self._exponent = max(self._exponent, needed)
        while self._exponent < needed:
            merged = self._counts.reshape(-1, 2).sum(axis=1)
            self._counts = np.pad(merged, HALF_BINS // 2)
            self._exponent += 1
