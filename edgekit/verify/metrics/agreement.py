"""How far two outputs agree in what they say: distributions, ranks and masks. Pure numpy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgekit.model.tensors import Array

# The logarithm of zero is no number; this is e^-28.
_LEAST_PROBABILITY = 1e-12
# Ranks of more values cost a sort each sample and say no more: no classifier has as many classes.
_MAX_RANKED = 100_000
# Masks are images of 8 bits (PASCAL VOC, Cityscapes); wider integers are indices.
_MAX_CLASSES = 256

Floats = npt.NDArray[np.float64]
ClassCount = tuple[int, int, int]
"""A class of a mask, how many positions both sides give it, and how many at least one does."""


def kl_divergences(reference: Floats, got: Floats, shape: tuple[int, ...]) -> list[float | None]:
    """Returns for each sample the mean over rows of sum p ln(p / q) in nats (Kullback and Leibler 1951).

    p is the reference. A sample of this shape lies flat in each row of the arrays; of a sample, a row is the last axis,
    or all of it where only one axis counts. None where the rows of the reference are no distributions. What came back
    is clipped to 1e-12 from below and scaled to a sum of one, so that a probability of zero costs much, but not
    infinity.
    """
    count, size = reference.shape
    width = size if max(shape, default=1) == size else shape[-1]
    fits = reference.min(axis=1) >= 0.0 if width > 1 else np.zeros(count, dtype=bool)
    sums = reference.reshape(count, -1, width).sum(axis=2)
    # Rounding to half precision leaves 2^-11; 1 % is granted for what clips small chances.
    fits &= ~np.any(np.abs(sums - 1.0) > 1e-2, axis=1)
    values: list[float | None] = [None] * count
    if not fits.any():
        return values
    p, q = (side[fits].reshape(-1, size // width, width) for side in (reference, got))
    q = np.clip(q, _LEAST_PROBABILITY, None)
    q = q / q.sum(axis=2, keepdims=True)
    p = p / p.sum(axis=2, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0.0, p * np.log(p / q), 0.0)
    found = np.maximum(0.0, terms.sum(axis=2).mean(axis=1)).tolist()
    for index, value in zip(np.flatnonzero(fits).tolist(), found, strict=True):
        values[index] = value
    return values


def rank_correlations(reference: Floats, got: Floats) -> list[float | None]:
    """Returns the correlation of the ranks of each row, -1 to 1 (Spearman 1904), equal values sharing a mean rank.

    None for fewer than three values, for more than 100,000, and where a side has only one value: then nothing is
    ranked.
    """
    count, size = reference.shape
    if not 3 <= size <= _MAX_RANKED:
        return [None] * count
    first, second = (_rank(side) - (size + 1) / 2.0 for side in (reference, got))
    sizes = np.sqrt(np.einsum("ij,ij->i", first, first) * np.einsum("ij,ij->i", second, second))
    pairs = zip(np.einsum("ij,ij->i", first, second).tolist(), sizes.tolist(), strict=True)
    return [None if size == 0.0 else max(-1.0, min(1.0, dot / size)) for dot, size in pairs]


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


def _rank(rows: Floats) -> Floats:
    """Returns the rank of each value in its row; equal values share the mean of their ranks."""
    order = np.argsort(rows, axis=1)
    ranked = np.take_along_axis(rows, order, axis=1)
    ranks = np.empty(rows.shape, dtype=np.float64)
    counting = np.arange(1.0, rows.shape[1] + 1.0)
    for rank, places in zip(ranks, order, strict=True):
        rank[places] = counting
    for index in np.flatnonzero(np.any(ranked[:, 1:] == ranked[:, :-1], axis=1)):
        _, places, counts = np.unique(rows[index], return_inverse=True, return_counts=True)
        ranks[index] = (np.cumsum(counts) - (counts - 1) / 2.0)[places]
    return ranks
