"""How far one output lies from the float reference, and the judgement on it.

An answer is what both sides say in a sample: the class where an output ranks classes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from edgekit.model.tensors import Array
from edgekit.target import Thresholds
from edgekit.verify.metrics.intervals import describe_enough, find_enough, find_enough_hits
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT, SampleErrors

_MOST_CHANGES = 20

Place = Annotated[int, msgspec.Meta(ge=0)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A place in an output, flat, and the number there: the largest where the output ranks classes."""

    place: Place
    value: float


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What the reference answers in a sample, and what came back."""

    wanted: Answer
    got: Answer


class ClassChange(msgspec.Struct, frozen=True, kw_only=True):
    """How many samples of one class on the reference got another one."""

    wanted: Place
    got: Place
    samples: Place


def find_answers(wanted: Array, found: Array, errors: Sequence[SampleErrors]) -> list[Answers | None]:
    """Returns both answers in each sample of arrays `[samples, ...]`, None where nothing is a number or finite."""
    first, second = (side.reshape(len(errors), -1) for side in (wanted, found))
    return [
        _answer(one, other, sample) if sample.numeric and sample.elements and not sample.non_finite else None
        for one, other, sample in zip(first, second, errors, strict=True)
    ]


def count_changes(pairs: Iterable[tuple[SampleErrors, Answers | None]]) -> tuple[ClassChange, ...]:
    """Returns which class became which other one in how many samples, the most frequent first, 20 at most."""
    counts = Counter(
        (answers.wanted.place, answers.got.place)
        for errors, answers in pairs
        if answers is not None and errors.top1 is False
    )
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(
        ClassChange(wanted=wanted, got=got, samples=samples) for (wanted, got), samples in ranked[:_MOST_CHANGES]
    )


def _answer(wanted: Array, found: Array, errors: SampleErrors) -> Answers:
    ranks = errors.top1 is not None
    places = (int(np.argmax(side)) if ranks else errors.position or 0 for side in (wanted, found))
    one, other = (
        Answer(place=place, value=float(side[place])) for side, place in zip((wanted, found), places, strict=True)
    )
    return Answers(wanted=one, got=other)


Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Correlation = Annotated[float, msgspec.Meta(ge=-1, le=1)]
Decibels = Annotated[float, msgspec.Meta(ge=-DB_LIMIT, le=DB_LIMIT)]
"""What a figure can be: a report that is read with another one was not written by edgekit."""


class OutputReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far one output of a run lies from the float reference, over all samples.

    The figures are None where they are not defined: for integers, booleans and strings only `exact_match` (the share
    of equal elements) counts, and `iou` for those that are masks; where there is a value that is not finite, nothing
    can be measured; `top1_agreement`, `top5_agreement` and `rank_correlation` need an output that ranks classes,
    `kl_divergence` (in nats) one that is a distribution. Where the shape depends on the data, `shape_agreement` is the
    share of samples that have the reference's, and `samples` counts those alone. `elements` counts the values over all
    samples; an output that is empty on the float model in every sample has none and proves nothing. Decibels are
    clamped to plus and minus 200. `worst_sample` is the sample of the largest error, or the first that is not finite,
    `worst_position` the flat index in it, `worst_answers` what both sides say there; `changes` count which class became
    which other one. `detection_agreement` is that of the detections which the output lists, alone or with others: where
    there is one, no figure that compares row by row is judged. `mismatch` says in words why the output cannot be
    compared, or what is wrong with it beyond its distance, None if nothing is; `suspect` names a usual mistake that
    explains what came back.
    """

    name: str
    samples: Count
    elements: Count | None = None
    max_abs: Size | None = None
    mean_abs: Size | None = None
    rmse: Size | None = None
    relative_error: Size | None = None
    cosine: Correlation | None = None
    sqnr_db: Decibels | None = None
    sqnr_interval_db: tuple[Decibels, Decibels] | None = None
    psnr_db: Decibels | None = None
    top1_agreement: Share | None = None
    top1_interval: tuple[Share, Share] | None = None
    top5_agreement: Share | None = None
    rank_correlation: Correlation | None = None
    kl_divergence: Size | None = None
    exact_match: Share | None = None
    iou: Share | None = None
    shape_agreement: Share | None = None
    detection_agreement: Share | None = None
    detection_interval: tuple[Share, Share] | None = None
    non_finite: Count = 0
    reference_non_finite: Count = 0
    worst_sample: Count | None = None
    worst_position: Count | None = None
    worst_answers: Answers | None = None
    changes: tuple[ClassChange, ...] = ()
    mismatch: str | None = None
    suspect: str | None = None


def read_as_numbers(output: OutputReport) -> OutputReport:
    """Returns the report of an output whose largest entry names no class: nothing is ranked, the ratios count."""
    return msgspec.structs.replace(
        output, top1_agreement=None, top1_interval=None, top5_agreement=None, worst_answers=None, changes=()
    )


def judge_output(output: OutputReport, thresholds: Thresholds) -> tuple[str, ...]:
    """Returns every reason why the figures of an output do not reach the thresholds, one line each."""
    name = f"output '{output.name}'"
    if output.samples == 0:
        return (f"{name} was compared with no sample" + (f": {output.mismatch}" if output.mismatch else ""),)
    if output.non_finite:
        own = output.reference_non_finite
        return (
            f"{name} has {output.non_finite} values that are NaN or infinite"
            + (f", {own} of them on the float model already" if own else "")
            + (f", the first in sample {output.worst_sample}" if output.worst_sample is not None else "")
            + (f": it {output.suspect}" if output.suspect else ""),
        )
    judged = [f"{name} {output.mismatch}"] if output.mismatch else []
    granted = _count_granted(thresholds) / output.samples
    shaped = thresholds.min_top1_agreement - granted * (output.shape_agreement or 0.0)
    by_rows = (
        ("cosine", output.cosine, thresholds.min_cosine, ""),
        ("SQNR", output.sqnr_db, thresholds.min_sqnr_db, " dB"),
        ("top-1 agreement", output.top1_agreement, thresholds.min_top1_agreement - granted, ""),
        ("exact match", output.exact_match, thresholds.min_top1_agreement, ""),
    )
    for label, value, least, unit in (
        *(by_rows if output.detection_agreement is None else ()),
        ("shape agreement", output.shape_agreement, shaped, ""),
        ("detection agreement", output.detection_agreement, thresholds.min_top1_agreement, ""),
    ):
        if value is not None and not value >= least - 1e-12:
            judged.append(f"{name} has {label} {format_near(value, least)}{unit}, below {least:.12g}{unit}")
    if not judged and output.elements != 0 and output.cosine is None and output.exact_match is None:
        judged.append(f"{name} was not measured")
    if judged and output.suspect:
        judged.append(f"{name} {output.suspect}")
    return tuple(judged)


def doubt_output(output: OutputReport, thresholds: Thresholds) -> tuple[str, ...]:
    """Returns why figures that reach the thresholds prove nothing, one line each: with `gate = "bound"` alone."""
    if thresholds.gate != "bound" or not output.samples or output.non_finite:
        return ()
    found: list[str] = []
    share = thresholds.min_top1_agreement
    by_rows = (
        ("SQNR", output.sqnr_db, output.sqnr_interval_db, thresholds.min_sqnr_db, " dB"),
        ("top-1 agreement", output.top1_agreement, output.top1_interval, share, ""),
    )
    listed = (("detection agreement", output.detection_agreement, output.detection_interval, share, ""),)
    for label, value, interval, least, unit in by_rows if output.detection_agreement is None else listed:
        if value is None or interval is None or value < least - 1e-12 or interval[0] >= least - 1e-12:
            continue
        worst = f"{format_near(interval[0], least)}{unit}, below {least:.12g}{unit}"
        by_width = find_enough(output.samples, value - interval[0], value - least)
        by_hits = label == "top-1 agreement"
        enough = describe_enough(find_enough_hits(output.samples, value, least) if by_hits else by_width)
        found.append(
            f"output '{output.name}' has {label} {value:.4g}{unit}, and with {output.samples} samples it could be"
            f" {worst}{enough}"
        )
    return tuple(found)


def _count_granted(thresholds: Thresholds) -> int:
    return 0 if thresholds.gate == "bound" else thresholds.granted_samples


def format_near(value: float, limit: float) -> str:
    """Returns a figure with four digits, or as many more as it takes to see on which side of its limit it lies."""
    forms = (f"{value:.{digits}g}" for digits in range(4, 18))
    return next(form for form in forms if (float(form) < limit) == (value < limit))
