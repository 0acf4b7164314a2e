"""How far an output lies from its reference: pure numpy, one sample at a time, then over all samples.

A sample is reduced to sums (`measure_sample`), and sums add up, so that memory does not grow with the tensors and a
figure can be drawn for any subset of the samples. Everything is computed in float64.
"""

import math
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit.tensors import Array, is_numeric, ranks_classes
from edgekit.verify.agreement import ClassCount, Floats, count_masks, kl_divergence, rank_correlation

DB_LIMIT = 200.0
"""Decibels are clamped to plus and minus this, because JSON knows no infinity: 200 dB means no error at all."""


_LARGEST = sys.float_info.max * 2.0**-40


class SampleErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The sums of one output in one sample, from which every metric follows.

    `numeric` is False for labels, of which only the matches count. `elements` and `matches` count all elements and
    those that are exactly equal. `non_finite` counts positions where either side is NaN or infinite,
    `reference_non_finite` those of the reference; where there is one, the sums are zero and the sample is not
    measurable. `position` is the flat index of the largest error, of the first label that differs, or of the first
    value that is not finite. `top1` and `top5` say whether the classes agree and `rank` correlates their order, None
    for an output that ranks no classes; `kl` is None for one that is no distribution. `masks` counts the classes of a
    mask.
    """

    numeric: bool
    elements: int
    matches: int
    non_finite: int
    reference_non_finite: int = 0
    abs_sum: float = 0.0
    reference_abs_sum: float = 0.0
    error_sum: float = 0.0
    error_energy: float = 0.0
    reference_energy: float = 0.0
    energy: float = 0.0
    dot: float = 0.0
    max_abs: float = 0.0
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
    errors = measure_errors(reference, got)
    if not errors.numeric or errors.non_finite or not reference.size:
        return errors
    ranked, wanted, found = ranks_classes(reference), _flat(reference), _flat(got)
    with np.errstate(over="ignore", invalid="ignore"):
        return msgspec.structs.replace(
            errors,
            top1=agrees_at(wanted, found, 1) if ranked else None,
            top5=agrees_at(wanted, found, 5) if ranked else None,
            rank=rank_correlation(wanted, found) if ranked else None,
            kl=kl_divergence(reference, got) if reference.dtype.kind == "f" else None,
        )


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
    wanted, found = _flat(reference), _flat(got)
    bad = ~(np.isfinite(wanted) & np.isfinite(found))
    non_finite = int(np.count_nonzero(bad))
    matches = int(np.count_nonzero(wanted == found))
    if non_finite or not wanted.size:
        return SampleErrors(
            numeric=True,
            elements=wanted.size,
            matches=matches,
            non_finite=non_finite,
            reference_non_finite=int(np.count_nonzero(~np.isfinite(wanted))),
            position=int(bad.argmax()) if non_finite else 0,
        )
    with np.errstate(over="ignore", invalid="ignore"):
        error = found - wanted
        distance = np.abs(error)
        position = int(distance.argmax())
        return SampleErrors(
            numeric=True,
            elements=wanted.size,
            matches=matches,
            non_finite=0,
            abs_sum=_finite(float(distance.sum())),
            reference_abs_sum=_finite(float(np.abs(wanted).sum())),
            error_sum=_finite(float(error.sum())),
            error_energy=_energy(error, error),
            reference_energy=_energy(wanted, wanted),
            energy=_energy(found, found),
            dot=_energy(wanted, found),
            max_abs=_finite(float(distance[position])),
            position=position,
            low=float(wanted.min()),
            high=float(wanted.max()),
        )


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


def add_errors(first: SampleErrors, second: SampleErrors) -> SampleErrors:
    """Returns the sums of two samples together; which one was the worst, and the classes, are given up."""
    return SampleErrors(
        numeric=first.numeric and second.numeric,
        elements=first.elements + second.elements,
        matches=first.matches + second.matches,
        non_finite=first.non_finite + second.non_finite,
        abs_sum=first.abs_sum + second.abs_sum,
        reference_abs_sum=first.reference_abs_sum + second.reference_abs_sum,
        error_sum=first.error_sum + second.error_sum,
        error_energy=first.error_energy + second.error_energy,
        reference_energy=first.reference_energy + second.reference_energy,
        energy=first.energy + second.energy,
        dot=first.dot + second.dot,
        max_abs=max(first.max_abs, second.max_abs),
        low=min(first.low, second.low),
        high=max(first.high, second.high),
    )


def agrees_at(reference: Floats, got: Floats, k: int) -> bool:
    """Returns True if the class that `got` ranks first is among the first k of the reference; ties count as equal."""
    best = reference[int(got.argmax())]
    return int(np.count_nonzero(reference > best)) < k


def distance_energy(first: Array, second: Array) -> float:
    """Returns the sum of squared differences of two numeric arrays, infinity where they cannot be compared."""
    if first.shape != second.shape or first.dtype != second.dtype or not is_numeric(first):
        return math.inf
    with np.errstate(over="ignore", invalid="ignore"):
        error = _flat(first) - _flat(second)
        energy = float(np.dot(error, error))
    return energy if math.isfinite(energy) else math.inf


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


def sqnr_db(samples: Sequence[SampleErrors]) -> float:
    """Returns 10 log10(sum ref^2 / sum (got - ref)^2), the signal to quantization noise ratio in dB.

    The ratio of Jacob et al. 2018 and of `onnxruntime.quantization.qdq_loss_debug`, as energies. Clamped to
    `DB_LIMIT`; no error at all is the limit, an error on a reference of zeros is minus the limit.
    """
    return decibels(sum(sample.reference_energy for sample in samples), sum(sample.error_energy for sample in samples))


def psnr_db(samples: Sequence[SampleErrors]) -> float:
    """Returns 10 log10(peak^2 / MSE) in dB, the peak being the range of the reference over the samples."""
    peak = max(sample.high for sample in samples) - min(sample.low for sample in samples)
    return decibels(peak * peak, sum(sample.error_energy for sample in samples) / _elements(samples))


def bias_share(samples: Sequence[SampleErrors]) -> float:
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


def _elements(samples: Sequence[SampleErrors]) -> int:
    return max(1, sum(sample.elements for sample in samples))


def _flat(value: Array) -> Floats:
    return np.asarray(value, dtype=np.float64).reshape(-1)


def _energy(first: Floats, second: Floats) -> float:
    # Not np.dot: the threads of BLAS fight with those of a waiting session, at 20 times the cost.
    return _finite(float(np.einsum("i,i->", first, second)))


def _finite(value: float) -> float:
    """Returns a sum that stays finite when a million million of them are added; one that is no number is the least."""
    return max(-_LARGEST, min(_LARGEST, value)) if not math.isnan(value) else -_LARGEST
