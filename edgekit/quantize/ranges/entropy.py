"""The entropy search: how far a range must reach so that quantized values say most about the float ones."""

from functools import cache

import numpy as np

from edgekit.model.tensors import Array
from edgekit.quantize.ranges.histogram import Histogram

# As in the paper; ONNX Runtime's EntropyCalibrater begins with 128 (onnxruntime/quantization/calibrate.py).
_BINS = 2048


def find_entropy_threshold(low: float, high: float, histogram: Histogram) -> float:
    """Returns the magnitude to clip at whose quantized values diverge least from the float ones (Kullback-Leibler).

    Magnitudes lie in 2048 bins; every cut-off from the number of levels upward is tried at once (S. Migacz, "8-bit
    inference with TensorRT", GTC 2017).
    """
    top = max(-low, high)
    # Every range holds zero exactly, and the zeros of a Relu would outweigh all else.
    kept = histogram.centers != 0
    if top <= 0 or not kept.any():
        return top
    bins = np.minimum((np.abs(histogram.centers[kept]) * (_BINS / top)).astype(np.int64), _BINS - 1)
    counts = np.bincount(bins, weights=histogram.counts[kept].astype(np.float64), minlength=_BINS)
    return least_divergent_cut(counts, 128 if low < 0 < high else 256) * top / _BINS


def least_divergent_cut(counts: Array, levels: int) -> int:
    """Returns how many bins to keep so that they, quantized to `levels` groups, say most about all of them."""
    return levels + int(np.argmin(divergences(counts, levels)))


def divergences(counts: Array, levels: int) -> Array:
    """Returns the divergence of each cut-off from `levels` bins on, times the sum of all counts."""
    # P holds the counts below a cut-off, with all above it in the last bin; Q has in each used bin of a group the mean
    # of the group's used bins, without what was above. ONNX Runtime (get_entropy_threshold in calibrate.py) and the
    # paper build both anew for each cut-off, thousands of loops of Python. But the sum of p log(p / q) splits: p log p
    # over bins comes from running sums, and log q is one number a group, so a cut-off is one row of a matrix.
    cuts = np.arange(levels, _BINS + 1)
    total = counts.sum()
    logs = counts * np.log(np.maximum(counts, 1))
    before, before_logs, before_used = (np.concatenate([[0.0], np.cumsum(part)]) for part in (counts, logs, counts > 0))
    masses, used = (_sums_of_runs(sums, -(-_BINS // levels)) for sums in (before, before_used))
    means = np.log(np.maximum(masses, 1) / np.maximum(used, 1))
    groups, kept = _group_runs(levels), before[cuts]
    cut_off, last = total - kept, counts[cuts - 1]
    heavy = last + cut_off
    own = before_logs[cuts] - logs[cuts - 1] + heavy * np.log(np.maximum(heavy, 1)) - total * np.log(total)
    of_groups = (masses * means).reshape(-1)[groups].sum(axis=1) + cut_off * means.reshape(-1)[groups[:, -1]]
    divergence = own - of_groups + total * np.log(np.maximum(kept, 1))
    # Q is 0 where P is not: nothing is said about what was cut off.
    divergence[(last == 0) & (cut_off > 0)] = np.inf
    return np.asarray(divergence)


def _sums_of_runs(before: Array, longest: int) -> Array:
    """Returns the sums of 0 to `longest` bins from each bin on, [longest + 1, bins + 1], from the sums before each."""
    ends = np.arange(longest + 1)[:, None] + np.arange(_BINS + 1)
    return np.asarray(before[np.minimum(ends, _BINS)] - before)


@cache
def _group_runs(levels: int) -> Array:
    """Returns for each cut-off from `levels` bins on where each of its groups stands among flattened sums of runs."""
    # There are a hundred thousand groups and more, but few runs: taking their logarithms once is what makes this fast.
    bounds = np.arange(levels, _BINS + 1)[:, None] * np.arange(levels + 1) // levels
    return np.asarray(np.diff(bounds, axis=1) * (_BINS + 1) + bounds[:, :-1])
