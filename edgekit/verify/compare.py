"""Comparing the outputs of two runs, sample by sample, in memory that does not grow with their number."""

from collections.abc import Iterator, Sequence

import msgspec

from edgekit.errors import EdgekitError
from edgekit.samples import Samples
from edgekit.tensors import Array, Tensors
from edgekit.verify import metrics
from edgekit.verify.agreement import mean_iou
from edgekit.verify.buckets import Floats, fill_buckets
from edgekit.verify.intervals import bootstrap_sqnr
from edgekit.verify.liars import find_deafness, find_order
from edgekit.verify.metrics import SampleErrors
from edgekit.verify.outputs import OutputReport
from edgekit.wilson import wilson_interval

_STILL = 100.0
"""A reference whose steps from sample to sample are 20 dB below its energy may be answered by a constant."""


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one sample: its errors, or why there are none; and what tells a liar.

    `shapes` are those of both sides, the second None where nothing came back. `stale_energy` is the error against the
    reference of the sample before, `reference_step` and `got_step` how far each side moved since that sample; all None
    for the first sample. `sketches` are those of reference and output.
    """

    errors: SampleErrors | None
    mismatch: str | None
    shapes: tuple[tuple[int, ...], tuple[int, ...] | None]
    stale_energy: float | None = None
    reference_step: float | None = None
    got_step: float | None = None
    sketches: tuple[Floats, Floats] | None = None


def compare_outputs(reference: Samples, got: Samples) -> tuple[OutputReport, ...]:
    """Returns how far every output of `reference` is met by `got`, over all samples.

    What cannot be compared (a missing output, another shape or dtype, too few samples, a file that is cut off) is told
    in `OutputReport.mismatch` and fails; it is never left out.
    """
    measured: dict[str, list[_Measured]] = {}
    troubles: list[str] = []
    before: tuple[Tensors, Tensors] | None = None
    for index, (wanted, found) in enumerate(_pair(reference, got, troubles)):
        for name in wanted:
            rows = measured.setdefault(name, [])
            if found is not None:
                rows.append(_measure(name, index, (wanted, found), before))
        before = None if found is None else (wanted, found)
    trouble = troubles[0] if troubles else None
    return tuple(_report(name, rows, trouble) for name, rows in measured.items())


def _pair(reference: Samples, got: Samples, troubles: list[str]) -> Iterator[tuple[Tensors, Tensors | None]]:
    """Yields each reference with what came back for it, up to the first that lacks one; says why in `troubles`."""
    others = iter(got)
    for index, wanted in enumerate(reference):
        found = _take(others, troubles)
        yield wanted, found
        if found is None:
            troubles.append(f"came back for {index} of {reference.count} samples")
            return
    if _take(others, troubles) is not None:
        troubles.append(f"came back for more than {reference.count} samples")


def _take(others: Iterator[Tensors], troubles: list[str]) -> Tensors | None:
    try:
        return next(others, None)
    except EdgekitError as error:
        troubles.append(f"cannot be read: {error.message}")
        return None


def _measure(name: str, index: int, pair: tuple[Tensors, Tensors], before: tuple[Tensors, Tensors] | None) -> _Measured:
    wanted, found = pair[0][name], pair[1].get(name)
    mismatch = _find_mismatch(wanted, found, index)
    shapes = (wanted.shape, None if found is None else found.shape)
    if found is None or mismatch:
        return _Measured(errors=None, mismatch=mismatch, shapes=shapes)
    errors = metrics.measure_sample(wanted, found)
    sketches = (fill_buckets(wanted), fill_buckets(found)) if errors.numeric and not errors.non_finite else None
    if before is None or name not in before[1]:
        return _Measured(errors=errors, mismatch=None, shapes=shapes, sketches=sketches)
    return _Measured(
        errors=errors,
        mismatch=None,
        shapes=shapes,
        stale_energy=metrics.distance_energy(before[0][name], found),
        reference_step=metrics.distance_energy(before[0][name], wanted),
        got_step=metrics.distance_energy(before[1][name], found),
        sketches=sketches,
    )


def _find_mismatch(wanted: Array, found: Array | None, index: int) -> str | None:
    if found is None:
        return f"is missing in sample {index}"
    if wanted.shape != found.shape:
        return f"has shape {list(found.shape)} in sample {index}, the reference {list(wanted.shape)}"
    if wanted.dtype.kind != found.dtype.kind or (wanted.dtype.kind not in "UO" and wanted.dtype != found.dtype):
        return f"has dtype {found.dtype} in sample {index}, the reference {wanted.dtype}"
    return None


def _report(name: str, rows: Sequence[_Measured], trouble: str | None) -> OutputReport:
    errors = [row.errors for row in rows if row.errors is not None]
    agreement = _agree_in_shape(rows)
    unexcused = [row for row in rows if row.mismatch and not (agreement and row.shapes[1] not in {None, row.shapes[0]})]
    mismatch = next((row.mismatch for row in unexcused), trouble)
    non_finite = sum(sample.non_finite for sample in errors)
    elements = sum(sample.elements for sample in errors)
    facts = OutputReport(
        name=name,
        samples=len(errors),
        elements=elements,
        non_finite=non_finite,
        reference_non_finite=sum(sample.reference_non_finite for sample in errors),
        mismatch=mismatch,
        shape_agreement=agreement,
    )
    if non_finite:
        bad = next(index for index, sample in enumerate(errors) if sample.non_finite)
        return _place_worst(facts, rows, bad)
    if not elements:
        return facts
    if not all(sample.numeric for sample in errors):
        worst = max(range(len(errors)), key=lambda index: errors[index].elements - errors[index].matches)
        return _place_worst(_match_all(facts, errors), rows, worst)
    worst = max(range(len(errors)), key=lambda index: errors[index].max_abs)
    stale = msgspec.structs.replace(facts, mismatch=mismatch or _find_staleness(rows))
    return _place_worst(_measure_all(stale, errors), rows, worst)


def _place_worst(facts: OutputReport, rows: Sequence[_Measured], worst: int) -> OutputReport:
    """Returns the facts with the worst of the samples that could be measured."""
    index, errors = [(index, row.errors) for index, row in enumerate(rows) if row.errors is not None][worst]
    return msgspec.structs.replace(facts, worst_sample=index, worst_position=errors.position)


def _agree_in_shape(rows: Sequence[_Measured]) -> float | None:
    """Returns the share of samples with the shape of the reference, None where the shape does not depend on the data.

    It does where it changes from sample to sample on either side.
    """
    changes = any(len({row.shapes[side] for row in rows if row.shapes[side] is not None}) > 1 for side in (0, 1))
    return sum(row.shapes[0] == row.shapes[1] for row in rows) / len(rows) if changes else None


def _match_all(facts: OutputReport, errors: Sequence[SampleErrors]) -> OutputReport:
    return msgspec.structs.replace(
        facts, exact_match=metrics.match_share(errors), iou=mean_iou([sample.masks for sample in errors])
    )


def _measure_all(facts: OutputReport, errors: Sequence[SampleErrors]) -> OutputReport:
    top1 = [sample.top1 for sample in errors if sample.top1 is not None]
    top5 = [sample.top5 for sample in errors if sample.top5 is not None]
    rank = [sample.rank for sample in errors if sample.rank is not None]
    kl = [sample.kl for sample in errors if sample.kl is not None]
    return msgspec.structs.replace(
        facts,
        max_abs=max(sample.max_abs for sample in errors),
        mean_abs=metrics.mean_abs(errors),
        rmse=metrics.rmse(errors),
        relative_error=metrics.relative_error(errors),
        cosine=metrics.cosine(errors),
        sqnr_db=metrics.sqnr_db(errors),
        sqnr_interval_db=bootstrap_sqnr(errors),
        psnr_db=metrics.psnr_db(errors),
        top1_agreement=sum(top1) / len(top1) if top1 else None,
        top1_interval=wilson_interval(sum(top1), len(top1)) if top1 else None,
        top5_agreement=sum(top5) / len(top5) if top5 else None,
        rank_correlation=sum(rank) / len(rank) if rank else None,
        kl_divergence=sum(kl) / len(kl) if len(kl) == len(errors) else None,
    )


def _find_staleness(rows: Sequence[_Measured]) -> str | None:
    """Names a device that answers with the sample before, or with the same where the reference varies."""
    later = [(row, row.errors) for row in rows if row.errors is not None and row.stale_energy is not None]
    error = sum(errors.error_energy for _, errors in later)
    if later and sum(row.stale_energy or 0.0 for row, _ in later) < error / 4.0:
        return "follows the sample before, not its own"
    moved = sum(row.reference_step or 0.0 for row, _ in later)
    signal = sum(errors.reference_energy for _, errors in later)
    if moved > signal / _STILL and not any(row.got_step for row, _ in later):
        return "is the same for every sample"
    sketches = [row.sketches for row in rows if row.sketches is not None]
    same_size = len({row.errors.elements for row in rows if row.errors is not None}) == 1
    if not sketches or not same_size:
        return None
    reference, got = zip(*sketches, strict=True)
    energy = sum(row.errors.reference_energy for row in rows if row.errors is not None)
    return find_order(reference, got) or find_deafness(reference, got, energy)
