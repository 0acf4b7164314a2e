"""How far an output lies from its reference: pure numpy, sample by sample, then over all samples.

A sample is reduced to sums (`measure_sample`), and sums add up, so that memory does not grow with the tensors and a
figure can be drawn for any subset of the samples. Everything is computed in float64.
"""

import math
import sys
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from edgekit.model.tensors import Array, is_numeric
from edgekit.verify.metrics.agreement import ClassCount, Floats, count_masks, kl_divergences, rank_correlations

DB_LIMIT = 200.0
"""Decibels are clamped to plus and minus this, because JSON knows no infinity: 200 dB means no error at all."""


# Sums of 2^40 of these are still finite.
_LARGEST = sys.float_info.max * 2.0**-40


class ErrorSums(msgspec.Struct, frozen=True, kw_only=True):
    """The few sums of one tensor in one sample that a layer is judged by.

    `elements` counts all, `non_finite` positions where either side is NaN or infinite; where there is one, the sums are
    zero and the sample is not measurable.
    """

    elements: int
    non_finite: int
    error_sum: float = 0.0
    error_energy: float = 0.0
    reference_energy: float = 0.0
    max_abs: float = 0.0


class SampleErrors(ErrorSums, frozen=True, kw_only=True):
    """The sums of one output in one sample, from which every metric follows.

    `numeric` is False for labels, of which only the matches count; `matches` counts elements that are exactly equal,
    `reference_non_finite` values of the reference that are NaN or infinite. `position` is the flat index of the largest
    error, of the first label that differs, or of the first value that is not finite. `top1` and `top5` say whether the
    classes agree and `rank` correlates their order, None for an output that ranks no classes; `kl` is None for one that
    is no distribution. `masks` counts the classes of a mask.
    """

    numeric: bool
    matches: int
    reference_non_finite: int = 0
    abs_sum: float = 0.0
    reference_abs_sum: float = 0.0
    energy: float = 0.0
    dot: float = 0.0
    position: int = 0
    low: float = 0.0
    high: float = 0.0
    top1: bool | None = None
    top5: bool | None = None
    rank: float | None = None
    kl: float | None = None
    masks: tuple[ClassCount, ...] = ()


def measure_sample(reference: Array, got: Array) -> SampleErrors:
    """Returns the sums of one sample as `measure_errors`, and what an output that ranks classes or chances says."""
    if reference.shape != got.shape:
        return measure_errors(reference, got)
    return measure_samples(reference[np.newaxis], got[np.newaxis])[0]


def measure_samples(references: Array, gots: Array) -> list[SampleErrors]:
    """Returns what `measure_sample` does for each of several samples of one shape and type, laid along a first axis."""
    shape = references.shape[1:]
    if not is_numeric(references):
        return [_match_sample(*pair) for pair in zip(references, gots, strict=True)]
    wanted, found = _as_rows(references), _as_rows(gots)
    errors = _measure_rows(wanted, found)
    good = [index for index, sample in enumerate(errors) if not sample.non_finite]
    if not good or not wanted.shape[1]:
        return errors
    if len(good) < len(errors):
        wanted, found = wanted[good], found[good]
    with np.errstate(over="ignore", invalid="ignore"):
        meanings = _read_meanings(wanted, found, shape, is_float=references.dtype.kind == "f")
    for index, meaning in zip(good, meanings, strict=True):
        top1, top5, rank, kl = meaning
        errors[index] = msgspec.structs.replace(errors[index], top1=top1, top5=top5, rank=rank, kl=kl)
    return errors


def measure_errors(reference: Array, got: Array) -> SampleErrors:
    """Returns the sums of one sample; both arrays have the same dtype.

    Integers of 8 and 16 bits are quantized reals and measured like floats. Wider integers, booleans and strings are
    labels or indices: only their exact matches count. Arrays of two shapes have nothing in common: no value matches.
    """
    if reference.shape != got.shape:
        elements = max(1, reference.size)
        return SampleErrors(numeric=is_numeric(reference), elements=elements, matches=0, non_finite=elements)
    if not is_numeric(reference):
        return _match_sample(reference, got)
    return _measure_rows(_as_rows(reference[np.newaxis]), _as_rows(got[np.newaxis]))[0]


def sum_errors(reference: Array, got: Array) -> ErrorSums:
    """Returns the few sums of `measure_errors`, with a third of its passes over the values; both are floats."""
    if reference.shape == got.shape and reference.size:
        wanted = _as_rows(reference[np.newaxis])
        with np.errstate(over="ignore", invalid="ignore"):
            error = _as_rows(got[np.newaxis]) - wanted
            energies = [float(np.einsum("ij,ij->i", each, each)[0]) for each in (error, wanted)]
        # A value that is not finite shows in an energy.
        if all(energy <= _LARGEST for energy in energies):
            return ErrorSums(
                elements=reference.size,
                non_finite=0,
                error_sum=float(error.sum(axis=1)[0]),
                error_energy=energies[0],
                reference_energy=energies[1],
                max_abs=abs(max(-float(error.min()), float(error.max()))),
            )
    return measure_errors(reference, got)


_Meaning = tuple[bool | None, bool | None, float | None, float | None]


def _read_meanings(wanted: Floats, found: Floats, shape: tuple[int, ...], *, is_float: bool) -> Iterator[_Meaning]:
    """Returns top-1, top-5, rank correlation and divergence of each row, None where an output has no such meaning."""
    none: list[None] = [None] * len(wanted)
    chances = kl_divergences(wanted, found, shape) if is_float else none
    if wanted.shape[1] < 2 or max(shape) != wanted.shape[1]:
        return zip(none, none, none, chances, strict=True)
    top1, top5 = (agree_at(wanted, found, k) for k in (1, 5))
    return zip(top1, top5, rank_correlations(wanted, found), chances, strict=True)


def _measure_rows(wanted: Floats, found: Floats) -> list[SampleErrors]:
    """Returns the sums of each row; one that is not finite somewhere has none."""
    with np.errstate(over="ignore", invalid="ignore"):
        bad = ~(np.isfinite(wanted) & np.isfinite(found))
        non_finite = np.count_nonzero(bad, axis=1)
        matches = np.count_nonzero(wanted == found, axis=1)
        spoiled = non_finite.nonzero()[0].tolist()
        if not wanted.shape[1] or len(spoiled) == len(wanted):
            sums = [SampleErrors(numeric=True, elements=wanted.shape[1], matches=0, non_finite=0)] * len(wanted)
        else:
            sums = _sum_rows(wanted, found, found - wanted)
    counted = [msgspec.structs.replace(row, matches=int(count)) for row, count in zip(sums, matches, strict=True)]
    for index in spoiled:
        counted[index] = SampleErrors(
            numeric=True,
            elements=wanted.shape[1],
            matches=int(matches[index]),
            non_finite=int(non_finite[index]),
            reference_non_finite=int(np.count_nonzero(~np.isfinite(wanted[index]))),
            position=int(bad[index].argmax()),
        )
    return counted


def _sum_rows(wanted: Floats, found: Floats, error: Floats) -> list[SampleErrors]:
    distance = np.abs(error)
    positions = distance.argmax(axis=1)
    columns = {
        "abs_sum": _finite(distance.sum(axis=1)),
        "reference_abs_sum": _finite(np.abs(wanted).sum(axis=1)),
        "error_sum": _finite(error.sum(axis=1)),
        "error_energy": _energy(error, error),
        "reference_energy": _energy(wanted, wanted),
        "energy": _energy(found, found),
        "dot": _energy(wanted, found),
        "max_abs": _finite(distance.max(axis=1)),
        "position": positions,
        "low": wanted.min(axis=1),
        "high": wanted.max(axis=1),
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [
        SampleErrors(
            numeric=True, elements=wanted.shape[1], matches=0, non_finite=0, **dict(zip(columns, row, strict=True))
        )
        for row in rows
    ]


def _match_sample(reference: Array, got: Array) -> SampleErrors:
    same = np.asarray(reference == got).reshape(-1)
    return SampleErrors(
        numeric=False,
        elements=reference.size,
        matches=int(np.count_nonzero(same)),
        non_finite=0,
        position=int(same.argmin()) if same.size else 0,
        masks=count_masks(reference, got) if same.size else (),
    )


def add_sums(first: ErrorSums, second: ErrorSums) -> ErrorSums:
    """Returns the sums of two samples together."""
    return ErrorSums(
        elements=first.elements + second.elements,
        non_finite=first.non_finite + second.non_finite,
        error_sum=first.error_sum + second.error_sum,
        error_energy=first.error_energy + second.error_energy,
        reference_energy=first.reference_energy + second.reference_energy,
        max_abs=max(first.max_abs, second.max_abs),
    )


def agree_at(reference: Floats, got: Floats, k: int) -> list[bool]:
    """Returns for each row if the class that `got` ranks first is among the first k of the reference.

    Ties count as equal.
    """
    best = np.take_along_axis(reference, got.argmax(axis=1)[:, np.newaxis], axis=1)
    above: list[int] = np.count_nonzero(reference > best, axis=1).tolist()
    return [count < k for count in above]


def distance_energy(first: Array, second: Array) -> float:
    """Returns the sum of squared differences of two numeric arrays, infinity where they cannot be compared."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    return distance_energies(first[np.newaxis], second[np.newaxis])[0]


def distance_energies(first: Array, second: Array) -> list[float]:
    """Returns `distance_energy` of each of several samples of one shape and type, laid along a first axis."""
    if not is_numeric(first):
        return [math.inf] * len(first)
    with np.errstate(over="ignore", invalid="ignore"):
        error = _as_rows(first) - _as_rows(second)
        energies = np.einsum("ij,ij->i", error, error)
    return [energy if math.isfinite(energy) else math.inf for energy in energies.tolist()]


def mean_abs(samples: Sequence[SampleErrors]) -> float:
    """Returns sum |got - ref| / n, the mean absolute error."""
    return sum(sample.abs_sum for sample in samples) / _elements(samples)


def rmse(samples: Sequence[SampleErrors]) -> float:
    """Returns sqrt(sum (got - ref)^2 / n), the root of the mean squared error."""
    return math.sqrt(sum(sample.error_energy for sample in samples) / _elements(samples))


def relative_error(samples: Sequence[SampleErrors]) -> float | None:
    """Returns sum |got - ref| / sum |ref|, the error relative to the size of the reference.

    Summed before it is divided, so that values near zero do not blow it up. 0 where there is no error, None for an
    error on a reference of zeros.
    """
    error, size = sum(sample.abs_sum for sample in samples), sum(sample.reference_abs_sum for sample in samples)
    if error == 0.0:
        return 0.0
    return error / size if size else None


def cosine(samples: Sequence[SampleErrors]) -> float:
    """Returns ref . got / (|ref| |got|) over the samples laid end to end; 1 if both are zero, 0 if one of them is.

    Also 0 for what differs and has more energy than a float can hold.
    """
    if any(sample.error_energy and _LARGEST in (sample.reference_energy, sample.energy) for sample in samples):
        return 0.0
    reference = sum(sample.reference_energy for sample in samples)
    energy = sum(sample.energy for sample in samples)
    if reference == 0.0 or energy == 0.0:
        return 1.0 if reference == energy else 0.0
    value = sum(sample.dot for sample in samples) / (math.sqrt(reference) * math.sqrt(energy))
    return max(-1.0, min(1.0, value))


def sqnr_db(samples: Sequence[ErrorSums]) -> float:
    """Returns 10 log10(sum ref^2 / sum (got - ref)^2), the signal to quantization noise ratio in dB.

    The ratio of Jacob et al. 2018 and of `onnxruntime.quantization.qdq_loss_debug`, as energies. Clamped to
    `DB_LIMIT`; no error at all is the limit, an error on a reference of zeros is minus the limit.
    """
    return decibels(sum(sample.reference_energy for sample in samples), sum(sample.error_energy for sample in samples))


def psnr_db(samples: Sequence[SampleErrors]) -> float:
    """Returns 10 log10(peak^2 / MSE) in dB, the peak being the range of the reference over the samples."""
    peak = max(sample.high for sample in samples) - min(sample.low for sample in samples)
    return decibels(peak * peak, sum(sample.error_energy for sample in samples) / _elements(samples))


def bias_share(samples: Sequence[ErrorSums]) -> float:
    """Returns (sum error)^2 / (n sum error^2): the share of the error's energy that is one constant offset, 0 to 1."""
    energy = sum(sample.error_energy for sample in samples)
    offset = sum(sample.error_sum for sample in samples)
    return min(1.0, offset * offset / (_elements(samples) * energy)) if energy > 0.0 else 0.0


def match_share(samples: Sequence[SampleErrors]) -> float:
    """Returns the share of elements that are exactly equal, 0 to 1."""
    return sum(sample.matches for sample in samples) / _elements(samples)


def decibels(signal: float, noise: float) -> float:
    """Returns 10 log10(signal / noise), clamped to `DB_LIMIT`; no noise is the upper limit."""
    if noise <= 0.0:
        return DB_LIMIT
    if signal <= 0.0:
        return -DB_LIMIT
    return max(-DB_LIMIT, min(DB_LIMIT, 10.0 * (math.log10(signal) - math.log10(noise))))


def _elements(samples: Sequence[ErrorSums]) -> int:
    return max(1, sum(sample.elements for sample in samples))


def _as_rows(values: Array) -> Floats:
    return np.asarray(values, dtype=np.float64).reshape(len(values), math.prod(values.shape[1:]))


def _energy(first: Floats, second: Floats) -> Floats:
    # Not np.dot: the threads of BLAS fight with those of a waiting session, at 20 times the cost.
    return _finite(np.einsum("ij,ij->i", first, second))


def _finite(values: Floats) -> Floats:
    """Returns sums that stay finite when a million million of them are added; what is no number is the least."""
    return np.nan_to_num(values, nan=-_LARGEST).clip(-_LARGEST, _LARGEST)
