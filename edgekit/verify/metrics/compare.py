"""Compares the outputs of two runs, sample by sample, in memory that does not grow with the number of samples."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import Golden, read_inputs, read_outputs
from edgekit.data.intervals import wilson_interval
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.errors import EdgekitError
from edgekit.model.state import find_fed_back
from edgekit.model.tensors import Array, Reading, Tensors, is_text
from edgekit.quantize.accuracy.head_search import DetectionList, find_image, find_list, find_silent, may_be_head
from edgekit.quantize.accuracy.heads import overlap_boxes
from edgekit.quantize.accuracy.output_kinds import KIND_SAMPLES, read_decisions, says_yes_or_no
from edgekit.verify.metrics import tensor_metrics as metrics
from edgekit.verify.metrics.agreement import measure_agreement, sum_shares
from edgekit.verify.metrics.outputs import Answers, OutputReport, count_changes, find_answers
from edgekit.verify.metrics.tensor_metrics import SampleErrors

_BLOCK_BYTES, _BLOCK_SAMPLES = 1 << 18, 256
"""The bytes and the number of samples that are measured at once: for small samples a call of numpy costs more than the
sums, and with large ones memory must not grow with their number."""


_UNRANKED: Mapping[str, Any] = {"top1_agreement": None, "top1_interval": None, "worst_answers": None, "changes": ()}
"""The figures of an output that names no class."""

_Row = tuple[int, Tensors, Tensors | None]
"""The number of a sample, its reference, and its outputs, None if none came back."""


class _Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one sample, by its number: its errors, or why there are none; and the answers of both sides.

    `shapes` are those of both sides, the second None if nothing came back.
    """

    sample: int
    errors: SampleErrors | None = None
    mismatch: str | None = None
    shapes: tuple[tuple[int, ...], tuple[int, ...] | None]
    answers: Answers | None = None


def compare_outputs(
    reference: Samples,
    got: Samples,
    readings: Mapping[str, Reading] | None = None,
    *,
    numbers: Sequence[int] | None = None,
) -> tuple[OutputReport, ...]:
    """Returns how far every output of `got` is from that of `reference`, over all samples.

    `readings` say what outputs are for. If given, each output also gets its agreement, and only outputs that rank
    classes get ranks. `numbers` are those by which the reports name the samples, else they are counted from 0.

    If an output cannot be compared (it is missing, has another shape or dtype, too few samples, or its file is cut
    off), `OutputReport.mismatch` says so and the output fails; it is never left out.
    """
    measured: dict[str, list[_Measured]] = {}
    troubles: list[str] = []
    for block in _stack_blocks(_pair(reference, got, troubles, numbers or range(reference.count))):
        for name in dict.fromkeys(name for _, wanted, _ in block for name in wanted):
            measured.setdefault(name, []).extend(_measure(name, block))
    trouble = troubles[0] if troubles else None
    reports = tuple(_report(name, rows, trouble) for name, rows in measured.items())
    if readings is None:
        return reports
    # Integers that are read as nothing else, such as indices, are labels: a share of them may be low by chance.
    labels = {report.name: Reading(kind="labels") for report in reports if report.exact_match is not None}
    read = {name: reading for name, reading in (labels | dict(readings)).items() if name in measured}
    shared = measure_agreement(reference, got, read)
    unranked = {name for name, reading in readings.items() if reading.kind not in {"classes", "labels"}}
    return tuple(
        msgspec.structs.replace(
            report,
            # If samples are missing or not finite, the other figures of the output say so.
            agreements=shared.get(report.name, ()) if report.samples and not report.non_finite else (),
            **(_UNRANKED if report.name in unranked else {}),
        )
        for report in reports
    )


def read_first(most: int, *runs: Samples) -> list[tuple[Tensors, ...]]:
    """Returns the first samples of several runs side by side, up to one that cannot be read."""
    rows: list[tuple[Tensors, ...]] = []
    with contextlib.suppress(EdgekitError):
        for _, *row in zip(range(most), *runs, strict=False):
            rows.append(tuple(row))
    return rows


def _pair(reference: Samples, got: Samples, troubles: list[str], numbers: Sequence[int]) -> Iterator[_Row]:
    """Yields each reference with its outputs, up to the first sample without any; `troubles` gets the reason."""

    def read() -> Iterator[Tensors]:
        try:
            yield from got
        except EdgekitError as error:
            troubles.append(f"cannot be read: {error.message}")

    for index, (wanted, found) in enumerate(itertools.zip_longest(reference, read())):
        if wanted is None:
            troubles.append(f"came back for more than {reference.count} samples")
            return
        yield numbers[index], wanted, found
        if found is None:
            troubles.append(f"came back for {index} of {reference.count} samples")
            return


def _stack_blocks(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    """Yields the rows in blocks that are measured at once; large ones come singly."""
    block: list[_Row] = []
    size_bytes = 0
    for row in rows:
        block.append(row)
        size_bytes += sum(value.nbytes for value in row[1].values())
        if size_bytes >= _BLOCK_BYTES or len(block) >= _BLOCK_SAMPLES:
            yield block
            block, size_bytes = [], 0
    if block:
        yield block


def _measure(name: str, block: Sequence[_Row]) -> Iterator[_Measured]:
    """Yields the result for one output in each sample of a block; samples of the same shape are measured at once."""
    came = [(one[name], two.get(name), index) for index, one, two in block if name in one and two is not None]
    for form, group in itertools.groupby(came, lambda row: _find_mismatch(*row) or (row[0].shape, row[0].dtype.str)):
        sides = list(group)
        if isinstance(form, str):
            for one, two, sample in sides:
                yield _Measured(sample=sample, mismatch=form, shapes=(one.shape, None if two is None else two.shape))
            continue
        wanted = np.stack([one for one, _, _ in sides])
        found = np.stack([two for _, two, _ in sides if two is not None])
        errors = metrics.measure_samples(wanted, found)
        answered = find_answers(wanted, found, errors)
        for (_, _, sample), error, answers in zip(sides, errors, answered, strict=True):
            yield _Measured(sample=sample, errors=error, shapes=(form[0], form[0]), answers=answers)


def _find_mismatch(wanted: Array, found: Array | None, sample: int) -> str | None:
    if found is None:
        return f"is missing in sample {sample}"
    if wanted.shape != found.shape:
        return f"has shape {list(found.shape)} in sample {sample}, the reference {list(wanted.shape)}"
    if wanted.dtype.kind != found.dtype.kind or (not is_text(wanted) and wanted.dtype != found.dtype):
        return f"has dtype {found.dtype} in sample {sample}, the reference {wanted.dtype}"
    return None


def _report(name: str, rows: Sequence[_Measured], trouble: str | None) -> OutputReport:
    errors = [row.errors for row in rows if row.errors is not None]
    # The shape depends on the data if it changes from sample to sample on either side.
    changes_shape = any(len({row.shapes[side] for row in rows if row.shapes[side] is not None}) > 1 for side in (0, 1))
    agreement = sum(row.shapes[0] == row.shapes[1] for row in rows) / len(rows) if changes_shape else None
    unexcused = [row for row in rows if row.mismatch and not (agreement and row.shapes[1] not in {None, row.shapes[0]})]

    non_finite = sum(sample.non_finite for sample in errors)
    elements = sum(sample.elements for sample in errors)
    facts = OutputReport(
        name=name,
        samples=len(errors),
        elements=elements,
        non_finite=non_finite,
        reference_non_finite=sum(sample.reference_non_finite for sample in errors),
        mismatch=next((row.mismatch for row in unexcused), trouble),
        shape_agreement=agreement,
    )
    if non_finite:
        bad = next(index for index, sample in enumerate(errors) if sample.non_finite)
        return _place_worst(facts, rows, bad)
    if not elements:
        return facts
    if not all(sample.numeric for sample in errors):
        worst = max(range(len(errors)), key=lambda index: errors[index].elements - errors[index].matches)
        matches = sum(sample.matches for sample in errors)
        masks = [sample.masks for sample in errors if sample.masks is not None]
        iou = metrics.mean_iou(np.sum(masks, axis=0)) if masks else None
        matched = msgspec.structs.replace(facts, exact_match=matches / elements, iou=iou)
        return _place_worst(matched, rows, worst)
    top1 = [sample.top1 for sample in errors if sample.top1 is not None]
    measured = msgspec.structs.replace(
        facts,
        max_abs=max(sample.max_abs for sample in errors),
        mean_abs=metrics.mean_abs(errors),
        rmse=metrics.rmse(errors),
        cosine=metrics.cosine(errors),
        sqnr_db=metrics.sqnr_db(errors),
        sqnr_interval_db=metrics.bootstrap_sqnr(errors),
        top1_agreement=sum(top1) / len(top1) if top1 else None,
        top1_interval=wilson_interval(sum(top1), len(top1)) if top1 else None,
        changes=count_changes((row.errors, row.answers) for row in rows if row.errors is not None),
    )
    return _place_worst(measured, rows, max(range(len(errors)), key=lambda index: errors[index].max_abs))


def _place_worst(facts: OutputReport, rows: Sequence[_Measured], worst: int) -> OutputReport:
    """Returns the figures over all samples that could be measured, with the worst sample."""
    row, errors = [(row, row.errors) for row in rows if row.errors is not None][worst]
    return msgspec.structs.replace(
        facts, worst_sample=row.sample, worst_position=errors.position, worst_answers=row.answers
    )


# The least IoU of boxes that count as the same: the stricter of the two thresholds that COCO reports, because both
# boxes come from the same network.
_SAME_BOX = 0.75
_ROUNDED = 1e-3


def read_list(golden: Golden) -> DetectionList | None:
    """Returns how the float model's outputs list detections, or None.

    None also if the outputs hold other values that vary between rows.
    """
    rows = spread_indices(golden.samples, KIND_SAMPLES)
    # As in planning: boxes are scaled by the size of the image, which differs between samples if it is open.
    is_open = any(not isinstance(dim, int) for spec in golden.inputs for dim in spec.shape or ())
    image = None if is_open else find_image(next(iter(read_inputs(golden))))
    outputs = list(select_samples(read_outputs(golden), rows))
    listed = None if image is None else find_list(outputs, image)
    if listed is None or any(np.ptp(listed.read_others(each), axis=0).any() for each in outputs):
        return None
    return listed


def find_listed(bundle: Bundle) -> DetectionList | None:
    """Returns the list that a bundle states, or None if it states none or its golden samples contradict it."""
    found = read_list(bundle.golden) if bundle.manifest.listed else None
    return found if found is not None and found.columns == bundle.manifest.listed else None


def describe_unlisted(bundle: Bundle) -> str | None:
    """Returns a failure if a bundle states a list of detections that its golden samples contradict, else None."""
    if not bundle.manifest.listed or find_listed(bundle) is not None:
        return None
    names = ", ".join(sorted(bundle.manifest.listed.outputs))
    return f"the manifest says that {names} list detections, which the float model's outputs do not: build it again"


def find_unseen(golden: Golden, reference: Samples, readings: Mapping[str, Reading]) -> frozenset[str]:
    """Returns the outputs in which the float model finds nothing in any sample, so that lost scores do not show.

    They say no (or yes) in every entry, or they are boxes and scores of a detector, and all scores are low.
    """
    answers = {name: set[int]() for name, reading in readings.items() if says_yes_or_no(reading)}
    for row in reference:
        for name in answers.keys() & row.keys():
            decided = read_decisions(row[name], readings[name])
            answers[name] |= {int(end(decided)) for end in (np.min, np.max) if decided.size}
    same = frozenset(name for name, seen in answers.items() if len(seen) < 2)
    image = find_image(next(iter(read_inputs(golden)), {}))
    if image is None or not may_be_head(next(iter(reference), {})):
        return same
    rows = select_samples(reference, spread_indices(reference.count, KIND_SAMPLES))
    return same | find_silent(list(rows), image, least_shown=1)


def compare_bundled(
    bundle: Bundle, reference: Samples, got: Samples, numbers: Sequence[int] | None = None
) -> tuple[OutputReport, ...]:
    """Returns how far outputs are from the float model's, each read as the bundle states, lists by their detections."""
    readings, listed = bundle.manifest.readings or {}, find_listed(bundle)
    outputs = compare_outputs(reference, got, readings, numbers=numbers)
    unseen = frozenset[str]() if listed else find_unseen(bundle.golden, reference, readings)
    outputs = tuple(msgspec.structs.replace(each, finds_nothing=each.name in unseen) for each in outputs)
    state = find_fed_back(bundle.manifest.state or None).values()
    if not {each.name for each in outputs}.issubset(state):
        outputs = tuple(msgspec.structs.replace(each, is_state=each.name in state) for each in outputs)
    # An output that is missing or has another shape has failed already.
    counts = [] if listed is None else [each.samples for each in outputs if each.name in listed.outputs]
    if listed is None or counts != [reference.count] * len(listed.outputs):
        return outputs
    shares = np.array([weigh_detections(listed, *pair) for pair in zip(reference, got, strict=False)])
    judged = dict.fromkeys(listed.outputs, (sum_shares("detections", shares),))
    return tuple(msgspec.structs.replace(it, agreements=judged.get(it.name, it.agreements)) for it in outputs)


def weigh_detections(listed: DetectionList, wanted: Tensors, found: Tensors) -> tuple[float, float]:
    """Returns the weight of the boxes that two lists share, and the mean of the weights of both lists.

    The weight of a row is its score squared, which like precision favours the top ranks: the tail of a list is noise.
    Rows pair within a class, the highest score first, with the box that overlaps most, and share the smaller weight of
    the two.
    """
    if not all(np.isfinite(side[name]).all() for side in (wanted, found) for name in listed.outputs):
        return 0.0, 1.0
    (boxes, chances), (others, theirs) = listed.decode(wanted), listed.decode(found)
    mine, got = chances.max(axis=1) ** 2, theirs.max(axis=1) ** 2

    # Apps take the first rows as the best: rising scores, or scores outside 0 to 1, are no list. Rounding is tolerated.
    steps = np.diff(listed.read_scores(found), prepend=1.0, append=0.0)
    if steps.max() > _ROUNDED or not np.array_equal(listed.read_others(wanted), listed.read_others(found)):
        return 0.0, float(mine.sum())
    fits = chances.argmax(axis=1)[None] == theirs.argmax(axis=1)[:, None]
    overlaps = np.where(fits, overlap_boxes(others, boxes), 0.0)
    both = 0.0
    for row in np.argsort(-got, kind="stable"):
        best = int(overlaps[row].argmax())
        if overlaps[row, best] >= _SAME_BOX:
            both += min(mine[best], got[row])
            overlaps[:, best] = 0.0
    return both, float(mine.sum() + got.sum()) / 2
