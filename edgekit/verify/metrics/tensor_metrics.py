"""How far an output is from its reference: pure numpy, sample by sample.

Each metric has its formula in its docstring. A sketch reduces a result of any size to 16 numbers, from which distances
can be estimated.
"""

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.data.intervals import draw_sums, span_95
from edgekit.model.tensors import Array, is_numeric

# Masks are 8-bit images (PASCAL VOC, Cityscapes); wider integers are indices.
MAX_CLASSES = 256
# The sums of large tensors are computed in parts of so many values, which stay in a core's cache. Chosen by hand.
_AT_ONCE = 1 << 15
_COUNTS = frozenset({"matches", "non_finite", "reference_non_finite"})

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def count_masks(reference: Array, got: Array) -> Counts | None:
    """Returns intersection and union of each class of a mask, or None if the output is no mask.

    A mask consists of booleans, whose one class is True, or of integers with two axes longer than 1 and at most 256
    classes.
    """
    if reference.dtype.kind == "b":
        counts = count_classes(reference, got)
        counts[0] = 0
        return counts if reference.size > 1 else None
    if reference.dtype.kind not in "iu" or sum(dim > 1 for dim in reference.shape) < 2:
        return None
    if min(reference.min(), got.min()) < 0 or max(reference.max(), got.max()) >= MAX_CLASSES:
        return None
    return count_classes(reference, got)


def count_classes(reference: Array, got: Array) -> Counts:
    """Returns how many positions both sides give to a class, and how many at least one does: an array [256, 2]."""
    wanted, found = (side.astype(np.int64).reshape(-1) for side in (reference, got))
    both = np.bincount(wanted[wanted == found], minlength=MAX_CLASSES)
    sizes = np.bincount(wanted, minlength=MAX_CLASSES) + np.bincount(found, minlength=MAX_CLASSES)
    return np.stack([both, sizes - both], axis=1)


def mean_iou(counts: npt.NDArray[Any]) -> float | None:
    """Returns the mean over classes of intersection / union (Jaccard 1912), each summed over all samples.

    As in the PASCAL VOC segmentation challenge (Everingham et al. 2010), but over the classes that occur on either
    side. None if no class occurs: the ratio of two empty masks is undefined.
    """
    both, either = counts[counts[:, 1] > 0].T
    return float((both / either).mean()) if either.size else None


BUCKETS = 16
"""An estimate of a squared distance deviates by sqrt(2 / 16), a third, where factors of four are asked for."""
# Squares of larger sums would lose what float64 has of digits.
_LARGEST_SUM = 1e15


def sketch_samples(values: Array) -> Floats:
    """Returns the sketch of each of several results of one size, stacked along a first axis.

    Each value gets a sign and is added to one of 16 buckets (count sketch, Charikar, Chen and Farach-Colton 2002): the
    energy of the difference of two results is, on average, that of the difference of their sketches. Values that are
    not finite count as zero.
    """
    count, size = len(values), math.prod(values.shape[1:])
    rows = np.asarray(values, dtype=np.float64).reshape(count, size)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = float(np.einsum("ij,ij->", rows, rows))
    if not largest <= _LARGEST_SUM:
        rows = np.where(np.isfinite(rows), rows, 0.0).clip(-_LARGEST_SUM, _LARGEST_SUM)
    signed = np.zeros((count, size + -size % BUCKETS))
    np.multiply(rows, _draw_signs(size), out=signed[:, :size])
    return np.stack([row.reshape(-1, BUCKETS).sum(axis=0) for row in signed])


@lru_cache(maxsize=64)
def _draw_signs(size: int) -> npt.NDArray[np.int8]:
    # Seeded by the size, so that both sides of a comparison get the same signs.
    return np.random.default_rng(size).integers(0, 2, size, dtype=np.int8) * np.int8(2) - np.int8(1)


DB_LIMIT = 200.0
"""Decibels are clamped to plus and minus this, because JSON knows no infinity: 200 dB means no error at all."""


# Sums of 2^40 of these are still finite.
_LARGEST = sys.float_info.max * 2.0**-40


class SampleErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one tensor in one sample, from which every metric follows.

    `elements` counts all values, `non_finite` positions where either side is NaN or infinite; if there is one, the sums
    are zero and the sample is not measurable. `numeric` is False for labels, of which only the matches count; `matches`
    counts elements that are exactly equal, `reference_non_finite` values of the reference that are NaN or infinite.
    `position` is the flat index of the largest error, of the first label that differs, or of the first value that is
    not finite. `top1` says whether the best classes agree, None for an output that ranks no classes. `masks` counts the
    classes of a mask, as `count_classes` does.
    """

    elements: int
    non_finite: int
    numeric: bool
    matches: int = 0
    reference_non_finite: int = 0
    error_sum: float = 0.0
    error_energy: float = 0.0
    reference_energy: float = 0.0
    max_abs: float = 0.0
    abs_sum: float = 0.0
    energy: float = 0.0
    dot: float = 0.0
    position: int = 0
    top1: bool | None = None
    masks: Counts | None = None


def measure_samples(references: Array, gots: Array) -> list[SampleErrors]:
    """Returns the sums of several samples of one shape and type, stacked along a first axis.

    Integers of 8 and 16 bits are quantized reals and measured like floats. Wider integers, booleans and strings are
    labels or indices: only their exact matches count. For samples that rank classes it also tells if the best class is
    the same.
    """
    if not is_numeric(references):
        matched: list[SampleErrors] = []
        for reference, got in zip(references, gots, strict=True):
            same = np.asarray(reference == got).reshape(-1)
            one = SampleErrors(
                numeric=False,
                elements=reference.size,
                matches=int(np.count_nonzero(same)),
                non_finite=0,
                position=int(same.argmin()) if same.size else 0,
                masks=count_masks(reference, got) if same.size else None,
            )
            matched.append(one)
        return matched
    wanted, found = _as_rows(references), _as_rows(gots)
    errors = _measure_rows(wanted, found)
    if not max(references.shape[1:], default=1) == wanted.shape[1] > 1:
        return errors
    # Classes with the same score as the best one agree too.
    best = np.take_along_axis(wanted, found.argmax(axis=1)[:, np.newaxis], axis=1)
    agree: list[bool] = np.all(wanted <= best, axis=1).tolist()
    # The classes of samples that are not finite mean nothing.
    pairs = zip(errors, agree, strict=True)
    return [each if each.non_finite else msgspec.structs.replace(each, top1=same) for each, same in pairs]


def measure_errors(reference: Array, got: Array) -> SampleErrors:
    """Returns the sums of one sample of reals that `sqnr_db` and `bias_share` need, and the largest error.

    Arrays of different shapes are not measurable.
    """
    if reference.shape != got.shape:
        elements = max(1, reference.size)
        return SampleErrors(numeric=True, elements=elements, non_finite=elements)
    return _measure_rows(reference.reshape(1, -1), got.reshape(1, -1), whole=False)[0]


def _measure_rows(wanted: Array, found: Array, *, whole: bool = True) -> list[SampleErrors]:
    """Returns the sums of each row, all if `whole`; a row with a value that is not finite has none."""
    count, elements = wanted.shape
    if not elements:
        return [SampleErrors(numeric=True, elements=0, non_finite=0)] * count
    spans = [slice(start, start + _AT_ONCE) for start in range(0, elements, _AT_ONCE)]
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = ((wanted[:, span].astype(np.float64), found[:, span].astype(np.float64)) for span in spans)
        parts = [_measure_part(*pair, whole=whole) for pair in pairs]
        stacked = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
        columns = {name: values.sum(axis=0) for name, values in stacked.items()}
        columns["max_abs"] = stacked["max_abs"].max(axis=0)
        is_bad = columns["non_finite"] > 0
        for name in columns.keys() - _COUNTS:
            # Limited so that a million million sums stay finite; NaN becomes the least value.
            sums = np.minimum(np.fmax(columns[name], -_LARGEST), _LARGEST)
            columns[name] = np.where(is_bad, 0.0, sums)
        # The first part with a value that is not finite, or with the largest error.
        first = np.where(is_bad, stacked["non_finite"] > 0, stacked["max_abs"]).argmax(axis=0)
        if whole:
            columns["position"] = first * _AT_ONCE + stacked["position"][first, np.arange(count)]
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [SampleErrors(numeric=True, elements=elements, **dict(zip(columns, row, strict=True))) for row in rows]


def _measure_part(wanted: Floats, found: Floats, *, whole: bool) -> dict[str, npt.NDArray[Any]]:
    """Returns the sums, the extremes and the position of the worst value in each row of a part of all columns."""
    strange = ~np.isfinite(wanted)
    bad, error = strange | ~np.isfinite(found), found - wanted
    distance, non_finite = np.abs(error), np.count_nonzero(bad, axis=1)
    sums = {
        "non_finite": non_finite, "error_sum": error.sum(axis=1), "error_energy": _dot(error, error),
        "reference_energy": _dot(wanted, wanted), "max_abs": distance.max(axis=1),
    }  # fmt: skip
    return sums if not whole else sums | {
        "matches": np.count_nonzero(wanted == found, axis=1),
        "reference_non_finite": np.count_nonzero(strange, axis=1), "abs_sum": distance.sum(axis=1),
        "energy": _dot(found, found), "dot": _dot(wanted, found),
        "position": np.where(non_finite, bad.argmax(axis=1), distance.argmax(axis=1)),
    }  # fmt: skip


def mean_abs(samples: Sequence[SampleErrors]) -> float:
    """Returns sum |got - ref| / n, the mean absolute error."""
    return sum(sample.abs_sum for sample in samples) / _elements(samples)


def rmse(samples: Sequence[SampleErrors]) -> float:
    """Returns sqrt(sum (got - ref)^2 / n), the root of the mean squared error."""
    return math.sqrt(sum(sample.error_energy for sample in samples) / _elements(samples))


def cosine(samples: Sequence[SampleErrors]) -> float:
    """Returns ref . got / (|ref| |got|) over the samples laid end to end; 1 if both are zero, 0 if one of them is.

    Also 0 if they differ and have more energy than a float can hold.
    """
    if any(sample.error_energy and _LARGEST in (sample.reference_energy, sample.energy) for sample in samples):
        return 0.0
    reference = sum(sample.reference_energy for sample in samples)
    energy = sum(sample.energy for sample in samples)
    if reference == 0.0 or energy == 0.0:
        return 1.0 if reference == energy else 0.0
    value = sum(sample.dot for sample in samples) / (math.sqrt(reference) * math.sqrt(energy))
    return max(-1.0, min(1.0, value))


def sqnr_db(samples: Sequence[SampleErrors]) -> float:
    """Returns 10 log10(sum ref^2 / sum (got - ref)^2), the signal to quantization noise ratio in dB.

    The ratio of Jacob et al. 2018 and of `onnxruntime.quantization.qdq_loss_debug`, as energies. Clamped to
    `DB_LIMIT`; no error at all is the limit, an error on a reference of zeros is minus the limit.
    """
    return decibels(sum(sample.reference_energy for sample in samples), sum(sample.error_energy for sample in samples))


def bootstrap_sqnr(samples: Sequence[SampleErrors]) -> tuple[float, float] | None:
    """Returns the interval of the SQNR in dB by the percentile bootstrap over samples (Efron 1979), seeded.

    None for a single sample, which says nothing about the spread.
    """
    if len(samples) < 2:
        return None
    signal, noise = draw_sums(np.array([(one.reference_energy, one.error_energy) for one in samples])).T
    # Draws without noise have an infinite SQNR, draws of zeros have none: both are set to the limit.
    with np.errstate(divide="ignore", invalid="ignore"):
        values = 10.0 * np.log10(signal / noise)
    return span_95(np.nan_to_num(values, nan=DB_LIMIT, posinf=DB_LIMIT, neginf=-DB_LIMIT).clip(-DB_LIMIT, DB_LIMIT))


def bias_share(samples: Sequence[SampleErrors]) -> float:
    """Returns (sum error)^2 / (n sum error^2): the share of the error's energy that is one constant offset, 0 to 1."""
    energy = sum(sample.error_energy for sample in samples)
    offset = sum(sample.error_sum for sample in samples)
    return min(1.0, offset * offset / (_elements(samples) * energy)) if energy > 0.0 else 0.0


def decibels(signal: float, noise: float) -> float:
    """Returns 10 log10(signal / noise), clamped to `DB_LIMIT`; no noise is the upper limit."""
    if noise <= 0.0:
        return DB_LIMIT
    if signal <= 0.0:
        return -DB_LIMIT
    return max(-DB_LIMIT, min(DB_LIMIT, 10.0 * (math.log10(signal) - math.log10(noise))))


def _elements(samples: Sequence[SampleErrors]) -> int:
    return max(1, sum(sample.elements for sample in samples))


def _as_rows(values: Array) -> Floats:
    return np.asarray(values, dtype=np.float64).reshape(len(values), math.prod(values.shape[1:]))


def energy_of(values: Array) -> float:
    """Returns the sum of squares."""
    flat = np.asarray(values, np.float64).reshape(-1)
    return float(np.einsum("i,i->", flat, flat))


def _dot(first: Floats, second: Floats) -> Floats:
    # Not np.dot: the threads of BLAS compete with those of a waiting session, at 20 times the cost.
    found: Floats = np.einsum("ij,ij->i", first, second)
    return found
