"""How far one output is from the float reference, and the judgement on it.

An answer is the value that a sample is reported with: its first class, if the output ranks classes.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from edgekit.data.intervals import describe_enough, find_enough, find_enough_hits
from edgekit.evidence import Judgement
from edgekit.model.tensors import Array, OutputKind
from edgekit.target import Thresholds
from edgekit.verify.metrics.agreement import SHARED, Agreement, Of
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT, SampleErrors

_MOST_CHANGES = 20

Place = Annotated[int, msgspec.Meta(ge=0)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A flat index in an output and the number there: the largest number, if the output ranks classes."""

    place: Place
    value: float


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the reference in a sample, and the answer that came back."""

    wanted: Answer
    got: Answer


class ClassChange(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples with one class on the reference got another class."""

    wanted: Place
    got: Place
    samples: Place


def find_answers(wanted: Array, found: Array, errors: Sequence[SampleErrors]) -> list[Answers | None]:
    """Returns both answers in each sample of arrays `[samples, ...]`; None for values that are no finite numbers."""
    sides = [side.reshape(len(errors), -1) for side in (wanted, found)]
    answers: list[Answers | None] = []
    for sample, *rows in zip(errors, *sides, strict=True):
        if not sample.numeric or not sample.elements or sample.non_finite:
            answers.append(None)
            continue
        places = [sample.position if sample.top1 is None else int(np.argmax(row)) for row in rows]
        one, other = (Answer(place=place, value=float(row[place])) for place, row in zip(places, rows, strict=True))
        answers.append(Answers(wanted=one, got=other))
    return answers


def count_changes(pairs: Iterable[tuple[SampleErrors, Answers | None]]) -> tuple[ClassChange, ...]:
    """Returns which class changed to which other one in how many samples, the most frequent first, at most 20."""
    changed = (answers for errors, answers in pairs if answers is not None and errors.top1 is False)
    counts = Counter((answers.wanted.place, answers.got.place) for answers in changed)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    most = ranked[:_MOST_CHANGES]
    return tuple(ClassChange(wanted=wanted, got=got, samples=samples) for (wanted, got), samples in most)


Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Correlation = Annotated[float, msgspec.Meta(ge=-1, le=1)]
Decibels = Annotated[float, msgspec.Meta(ge=-DB_LIMIT, le=DB_LIMIT)]
"""The range of a figure: a report with a value outside it was not written by edgekit."""


class OutputReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far one output of a run is from the float reference, over all samples.

    Undefined figures are None. For integers, booleans and strings only `exact_match` (the share of equal elements)
    counts, and `iou` for those that are masks. If a value is not finite, nothing can be measured. `top1_agreement`
    needs an output that ranks classes. If the shape depends on the data, `shape_agreement` is the share of samples that
    have the reference's shape, and `samples` counts only those. `elements` counts the values over all samples; an
    output that is empty on the float model in every sample has none and proves nothing. Decibels are clamped to plus
    and minus 200.
    `worst_sample` is the sample with the largest error, or the first that is not finite, `worst_position` the flat
    index in it, `worst_answers` the answers of both sides there; `changes` count which class became which other one.
    `agreements` say how far the two sides agree in what the output is for, one for each of its possible kinds. If there
    is one, it is judged instead; and for a list of detections no figure compares row by row. `finds_nothing` says that
    the float model finds nothing in any sample, so that lost scores do not show. `mismatch` says why the output cannot
    be compared, or what is wrong with it besides its distance, None if nothing is; `suspect` names a usual mistake that
    explains the output. State (`is_state`) is judged by what it does to other outputs over whole sequences, and not by
    its own distance.
    """

    name: str
    samples: Count
    elements: Count | None = None
    max_abs: Size | None = None
    mean_abs: Size | None = None
    rmse: Size | None = None
    cosine: Correlation | None = None
    sqnr_db: Decibels | None = None
    sqnr_interval_db: tuple[Decibels, Decibels] | None = None
    top1_agreement: Share | None = None
    top1_interval: tuple[Share, Share] | None = None
    exact_match: Share | None = None
    iou: Share | None = None
    shape_agreement: Share | None = None
    agreements: tuple[Agreement, ...] = ()
    finds_nothing: bool = False
    non_finite: Count = 0
    reference_non_finite: Count = 0
    worst_sample: Count | None = None
    worst_position: Count | None = None
    worst_answers: Answers | None = None
    changes: tuple[ClassChange, ...] = ()
    mismatch: str | None = None
    suspect: str | None = None
    is_state: bool = False

    @property
    def agreed(self) -> float | None:
        """The agreement in what the output is for; None if that is unknown and the output ranks nothing."""
        return self.agreements[0].share if self.agreements else self.top1_agreement


_STATED: Mapping[Of, OutputKind] = {
    "classes": "classes", "places": "map", "findings": "map", "steps": "sequence", "letters": "sequence",
    "peaks": "heatmaps",
}  # fmt: skip
_MEASURED: frozenset[Of] = frozenset({"neighbours", "variance", "energy"})


def weigh_output(output: OutputReport, thresholds: Thresholds) -> Judgement:
    """Returns the judgement on an output, with one line for each reason why it fails, or why it is not proven.

    It is not proven if it does not fail and an agreement is below its limit, perhaps by chance; if it may be of two
    kinds and agrees as only one of them; or, with `gate = "bound"`, if the lower end of an interval is below the limit.
    """
    name = f"output '{output.name}'"
    if output.samples == 0:
        return _fail(f"{name} was compared with no sample" + (f": {output.mismatch}" if output.mismatch else ""))
    if output.non_finite:
        own = output.reference_non_finite
        return _fail(
            f"{name} has {output.non_finite} values that are NaN or infinite"
            + (f", {own} of them on the float model already" if own else "")
            + (f", the first in sample {output.worst_sample}" if output.worst_sample is not None else "")
            + (f": it {output.suspect}" if output.suspect else "")
        )
    failures = [f"{name} {output.mismatch}"] if output.mismatch else []
    if output.is_state:
        return _fail(*failures)
    figures = list(_list_figures(output, thresholds))
    for label, value, _, least, unit in figures:
        if not value >= least - 1e-12:
            failures.append(f"{name} has {label} {format_near(value, least)}{unit}, below {least:.12g}{unit}")
    of_classes, of_measured = thresholds.min_top1_agreement, thresholds.min_agreement
    limits = [(each, of_measured if each.of in _MEASURED else of_classes) for each in output.agreements]
    missed = [(each, least) for each, least in limits if each.share < least - 1e-12]
    is_beyond_chance = any(each.is_below(least) for each, least in missed)
    # It fails if the agreement of every possible kind is below its limit, and that of at least one by more than chance.
    if missed == limits and is_beyond_chance:
        failures.append(f"{name} has {'; '.join(_describe(*each) for each in limits)}")
    if not failures and output.elements != 0 and output.cosine is None and output.exact_match is None:
        failures.append(f"{name} was not measured")
    if failures:
        return _fail(*failures, *((f"{name} {output.suspect}",) if output.suspect else ()))
    doubts: list[str] = []
    if output.finds_nothing:
        unseen = "so scores that are lost do not show: give samples that show something"
        doubts.append(f"{name} finds nothing in any of {output.samples} samples, {unseen}")
    kept = [(each, least) for each, least in limits if (each, least) not in missed]
    if thresholds.gate == "bound":
        shared = [(SHARED[it.of], it.share, it.interval, least, "") for it, least in kept if not is_beyond_chance]
        for label, value, interval, least, unit in (*figures, *shared):
            if interval is not None and interval[0] < least - 1e-12:
                doubts.append(_doubt(output, label, value, interval, least, unit))
    if is_beyond_chance:
        others = ", ".join(f"{SHARED[each.of]} {each.share:.4g}" for each, _ in kept)
        kinds = " or ".join(f'"{kind}"' for kind in dict.fromkeys(_STATED.get(each.of, "values") for each, _ in limits))
        hint = f"state what it is, [outputs] {output.name} = {kinds}"
        if {each.of for each, _ in limits} <= {"variance", "energy"}:
            hint = "samples that differ more would tell"
        lines = "; ".join(_describe(*each) for each in missed)
        return Judgement(unproven=(*doubts, f"{name} has {others}, but {lines}: {hint}"))
    for each, least in missed:
        # Not beyond chance: that would be a failure.
        chance = f"which may be chance with {max(output.samples, each.samples)} samples"
        remedy = "more of them, or labels with a metric, would tell"
        doubts.append(f"{name} has {_describe(each, least)}, {chance}: {remedy}")
    return Judgement(unproven=tuple(doubts))


def _fail(*lines: str) -> Judgement:
    return Judgement(failures=lines)


def describe_agreements(outputs: Iterable[OutputReport]) -> Iterator[str]:
    """Yields which outputs are judged as lists of detections, and which on more samples than the device ran."""
    for output in outputs:
        for shared in (each for each in output.agreements if each.of == "detections"):
            doubt = "" if shared.interval is None else " ({:.1%} to {:.1%} at 95 %)".format(*shared.interval)
            agree = f"lists detections, of which {shared.share:.1%} agree{doubt}"
            yield f"output '{output.name}' {agree}: its other figures compare row by row, and are not judged"
        if (count := max((each.samples for each in output.agreements), default=0)) > output.samples:
            same = f"decides on all {output.samples} samples as the bundle's own model does on this machine"
            yield f"output '{output.name}' {same}, so the decisions of that model on {count} samples are judged"


_Figure = tuple[str, float, tuple[float, float] | None, float, str]
"""The name of a figure, its value and interval, its limit, and the unit."""


def _list_figures(output: OutputReport, thresholds: Thresholds) -> Iterator[_Figure]:
    """Yields figures with their limits; if it is known what the output is for, only those that the user set."""
    is_read, share = bool(output.agreements), thresholds.min_top1_agreement
    granted = 0.0 if thresholds.gate == "bound" else thresholds.granted_samples / output.samples
    shape_least = share - granted * (output.shape_agreement or 0.0)
    # For a list of detections no figure compares row by row.
    named = () if any(each.of == "detections" for each in output.agreements) else thresholds.named
    figures = (
        ("cosine", output.cosine, None, thresholds.min_cosine, "", not is_read or "min_cosine" in named),
        (
            "SQNR", output.sqnr_db, output.sqnr_interval_db, thresholds.min_sqnr_db, " dB",
            not is_read or "min_sqnr_db" in named,
        ),
        (SHARED["classes"], output.top1_agreement, output.top1_interval, share - granted, "", not is_read),
        ("exact match", output.exact_match, None, share, "", not is_read),
        ("shape agreement", output.shape_agreement, None, shape_least, "", True),
    )  # fmt: skip
    for label, value, interval, least, unit, counts in figures:
        if counts and value is not None:
            yield label, value, interval, least, unit


def _describe(agreement: Agreement, least: float) -> str:
    return f"{SHARED[agreement.of]} {format_near(agreement.share, least)}, below {least:.12g}"


def _doubt(output: OutputReport, label: str, value: float, ends: tuple[float, float], least: float, unit: str) -> str:
    """Returns in words that a figure keeps its limit, and the lower end of its interval does not."""
    low, samples = ends[0], max((output.samples, *(each.samples for each in output.agreements)))
    enough = find_enough(output.samples, value - low, value - least)
    if label == SHARED["classes"]:
        enough = find_enough_hits(output.samples, value, least)
    worst = f"{format_near(low, least)}{unit}, below {least:.12g}{unit}{describe_enough(enough)}"
    return f"output '{output.name}' has {label} {value:.4g}{unit}, and with {samples} samples it could be {worst}"


def format_near(value: float, limit: float) -> str:
    """Returns a figure with four digits, or with as many as show on which side of its limit it is."""
    forms = (f"{value:.{digits}g}" for digits in itertools.count(4))
    return next(form for form in forms if (float(form) < limit) == (value < limit))
