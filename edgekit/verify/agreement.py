"""How far two outputs agree in what they say: distributions, ranks and masks. Pure numpy, one sample at a time."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgekit.tensors import Array

_LEAST_PROBABILITY = 1e-12
_MAX_RANKED = 100_000
_MAX_CLASSES = 256

Floats = npt.NDArray[np.float64]
ClassCount = tuple[int, int, int]
"""A class of a mask, how many positions both sides give it, and how many at least one does."""


def kl_divergence(reference: Array, got: Array) -> float | None:
    """Returns the mean over rows of sum p ln(p / q) in nats, p the reference (Kullback and Leibler 1951).

    A row is the last axis, or all of an output with one axis that counts. None where the rows of the reference are no
    distributions. What came back is clipped to 1e-12 from below and scaled to a sum of one, so that a probability of
    zero costs much, but not infinity.
    """
    p, q = _as_rows(reference), _as_rows(got)
    if p.shape[1] < 2 or float(p.min(initial=0.0)) < 0.0 or np.any(np.abs(p.sum(axis=1) - 1.0) > 1e-2):
        return None
    q = np.clip(q, _LEAST_PROBABILITY, None)
    q = q / q.sum(axis=1, keepdims=True)
    p = p / p.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0.0, p * np.log(p / q), 0.0)
    return max(0.0, float(terms.sum(axis=1).mean()))


def rank_correlation(reference: Floats, got: Floats) -> float | None:
    """Returns the correlation of the ranks of two vectors, -1 to 1 (Spearman 1904), equal values sharing a mean rank.

    None for fewer than three values, for more than 100,000, and where a side has only one value: then nothing is
    ranked.
    """
    if not 3 <= reference.size <= _MAX_RANKED:
        return None
    first, second = _rank(reference), _rank(got)
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt(np.dot(first, first) * np.dot(second, second)))
    return None if size == 0.0 else max(-1.0, min(1.0, float(np.dot(first, second)) / size))


def count_masks(reference: Array, got: Array) -> tuple[ClassCount, ...]:
    """Returns, for each class of a mask, the sizes of intersection and union; nothing where the output is no mask.

    A mask is of booleans, whose one class is True, or of integers with two axes that count and at most 256 classes.
    """
    if reference.dtype.kind == "b":
        both, either = np.count_nonzero(reference & got), np.count_nonzero(reference | got)
        return ((1, int(both), int(either)),) if reference.size > 1 else ()
    if reference.dtype.kind not in "iu" or sum(dim > 1 for dim in reference.shape) < 2:
        return ()
    if min(reference.min(), got.min()) < 0 or max(reference.max(), got.max()) >= _MAX_CLASSES:
        return ()
    wanted, found = reference.astype(np.int64).reshape(-1), got.astype(np.int64).reshape(-1)
    sizes = np.bincount(wanted, minlength=_MAX_CLASSES) + np.bincount(found, minlength=_MAX_CLASSES)
    both_sizes = np.bincount(wanted[wanted == found], minlength=_MAX_CLASSES)
    return tuple(
        (int(name), int(both_sizes[name]), int(sizes[name] - both_sizes[name])) for name in np.flatnonzero(sizes)
    )


def mean_iou(samples: Sequence[tuple[ClassCount, ...]]) -> float | None:
    """Returns the mean over classes of intersection / union (Jaccard 1912), each summed over all samples.

    As in the PASCAL VOC segmentation challenge (Everingham et al. 2010), but over the classes that occur on either
    side. None where no class occurs: two masks that are empty have nothing in common and nothing apart.
    """
    sums: dict[int, tuple[int, int]] = {}
    for sample in samples:
        for name, both, either in sample:
            before = sums.get(name, (0, 0))
            sums[name] = (before[0] + both, before[1] + either)
    shares = [both / either for both, either in sums.values() if either]
    return sum(shares) / len(shares) if shares else None


def _as_rows(value: Array) -> Floats:
    whole = np.asarray(value, dtype=np.float64)
    one_axis = max(whole.shape, default=1) == whole.size
    return whole.reshape(1, -1) if one_axis else whole.reshape(-1, whole.shape[-1])


def _rank(values: Floats) -> Floats:
    """Returns the rank of each value; equal values share the mean of their ranks."""
    order = np.argsort(values)
    ranked = values[order]
    if not np.any(ranked[1:] == ranked[:-1]):
        ranks = np.empty(values.size, dtype=np.float64)
        ranks[order] = np.arange(1.0, values.size + 1.0)
        return ranks
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[places], dtype=np.float64)
