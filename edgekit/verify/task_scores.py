"""The result of a metric of the task and its judgement; and how often the first class is the label."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.bundle.golden import Golden, read_classes, read_outputs
from edgekit.data.intervals import describe_enough, find_enough, find_enough_pairs, interval_of_pairs, wilson_interval
from edgekit.data.samples import Samples
from edgekit.errors import DataError, EdgekitError
from edgekit.evidence import Judgement, join_judgements
from edgekit.model.tensors import Array, ranks_classes
from edgekit.target import TaskLimit

Unit = Literal["share", "dB", "value"]


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of the task on the float model and on a device, over the same labelled samples.

    `got` is None if a sample did not come back whole; `mismatch` then says so. `difference` is `got` minus `reference`,
    `interval` its 95 % interval; `share_interval` is that of `got` over `reference`. A `unit` of "share" is between 0
    and 1. `labelled` counts the samples that have labels, of which `samples` were measured; `gained` and `lost` count
    those that became right or wrong, if a sample is either right or wrong. If `ran` is above 0, the device ran so many
    samples, with the scores that the bundle's own model has there, and that model ran the others.
    """

    name: str
    output: str
    samples: int
    unit: Unit
    higher_is_better: bool
    reference: float
    got: float | None
    interval: tuple[float, float] | None = None
    share_interval: tuple[float, float] | None = None
    mismatch: str | None = None
    labelled: int = 0
    ran: int = 0
    gained: int | None = None
    lost: int | None = None

    @property
    def is_partial(self) -> bool:
        """True if there are labelled samples that were not measured."""
        return self.labelled > self.samples

    @property
    def difference(self) -> float | None:
        """How far the device is above the float model, or None if it was not measured."""
        return None if self.got is None else self.got - self.reference


def judge_task(report: TaskReport | None, limit: TaskLimit | None) -> Judgement:
    """Returns whether a metric keeps its limit, with one line for each reason why it fails or is not proven.

    A figure over all labelled samples that misses the limit fails. It is not proven if the figure keeps the limit and
    its interval does not, or if it misses the limit on a part of the samples and chance may be the reason.
    """
    if limit is None:
        return Judgement()
    name = f"metric '{limit.name}'"
    if report is None or report.name != limit.name:
        return Judgement(unproven=(f"{name} was not measured: it needs labels (--labels)",))
    if report.got is None:
        return Judgement(failures=(f"{name} was not measured on every sample: {report.mismatch}",))
    found = join_judgements(_judge_limits(report, report.got, limit))
    return Judgement(
        failures=tuple(f"{name} {line}" for line in found.failures),
        unproven=tuple(f"{name} {line}" for line in found.unproven),
    )


def format_score(report: TaskReport, value: float | None) -> str:
    """Returns a value of a metric with its unit, for people."""
    if value is None:
        return "not measured"
    return f"{value:.1%}" if report.unit == "share" else f"{value:.4g}" + (" dB" if report.unit == "dB" else "")


def describe_difference(report: TaskReport) -> str:
    """Returns the difference from the float model with its interval, in points."""
    if report.difference is None:
        return "not measured"
    factor = 100.0 if report.unit == "share" else 1.0
    words = f"{report.difference * factor:+.2f}"
    if report.interval is not None:
        words += f" ({report.interval[0] * factor:+.2f} to {report.interval[1] * factor:+.2f})"
    return words


def _judge_limits(report: TaskReport, got: float, limit: TaskLimit) -> Iterator[Judgement]:
    """Yields the judgement by each limit that is set."""
    most, share, least = limit.max_drop, limit.min_share, limit.at_least

    def judge(
        said: str, worst: str, bound: str, value: float, ends: tuple[float, float] | None, most: float, least: float
    ) -> Judgement:
        """Returns the judgement on a loss `value` whose limit is `most`; `ends` are those of its interval, if known.

        `said` tells the loss in words, `worst` its worse end, `bound` the limit; `least` is the limit as the difference
        of the two scores.
        """
        if value > most + 1e-9:
            return _refuse(report, f"{said}, {bound}", may_be_luck=ends is None or ends[0] <= most)
        if limit.gate == "estimate" or (ends is not None and ends[1] <= most + 1e-9):
            return Judgement()
        if ends is None:
            words = f'has too few samples ({report.samples}) for an interval; give 30 or more, or set gate = "estimate"'
            return Judgement(unproven=(words,))
        # How many samples would be enough follows from those that became right or wrong, or without these counts from
        # the width of the interval.
        if report.gained is None or report.lost is None:
            enough = find_enough(report.samples, ends[1] - value, most - value)
        else:
            enough = find_enough_pairs(report.samples, report.gained, report.lost, least)
        could = f"{said}, and with {report.samples} samples it could be {worst}, {bound}"
        return Judgement(unproven=(could + describe_enough(enough),))

    if most is not None:
        factor = 100.0 if report.unit == "share" else 1.0
        sign = factor if report.higher_is_better else -factor
        drop = sign * (report.reference - got)
        low, high = sorted(-sign * end for end in report.interval or (0.0, 0.0))
        ends = None if report.interval is None else (low, high)
        said, bound = f"is {drop:.2f} points worse than the float model", f"more than {most:g}"
        yield judge(said, f"{high:.2f}", bound, drop, ends, most, -most / factor)
    if share is not None and (not report.higher_is_better or report.reference <= 0.0):
        reason = "lower is better" if not report.higher_is_better else "the float model's is not above 0"
        yield Judgement(failures=(f"cannot be limited by min_share, since {reason}; use max_drop",))
    elif share is not None:
        low, high = report.share_interval or (0.0, 0.0)
        ends, kept = None if report.share_interval is None else (-high, -low), got / report.reference
        said, bound = f"is {kept:.1%} of the float model's", f"less than {share:.1%}"
        yield judge(said, f"{low:.1%}", bound, -kept, ends, -share, (share - 1.0) * report.reference)
    if least is not None and not (got >= least if report.higher_is_better else got <= least):
        words = "below" if report.higher_is_better else "above"
        # Where right answers are counted, the interval of their share tells what more samples could still show.
        is_counted = report.gained is not None and report.unit == "share"
        best = wilson_interval(round(got * report.samples), report.samples)[1] if is_counted else least
        yield _refuse(report, f"is {format_score(report, got)}, {words} {least:g}", may_be_luck=best >= least)


def _refuse(report: TaskReport, line: str, *, may_be_luck: bool) -> Judgement:
    """Returns a failure, or "not proven" if some samples were not measured and chance may be the reason."""
    if may_be_luck and report.is_partial:
        return Judgement(unproven=(f"{line}, on {report.samples} of {report.labelled} labelled samples",))
    return Judgement(failures=(line,))


# On fewer samples even a good model may miss as many by chance.
_LEAST_LABELLED = 20


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """The share of samples whose first class is the label, on the float model and on the device.

    `interval` is the 95 % interval of `got` minus `reference`, over the same samples.
    """

    output: str
    samples: int
    reference: float
    got: float
    interval: tuple[float, float] | None = None


def measure_accuracy(reference: Samples, got: Samples, labels: Sequence[int]) -> Accuracy | None:
    """Returns the top-1 accuracy of both sides on the first output that ranks classes, or None if none does.

    A sample that did not come back, or came back with values that are not finite, counts as wrong.
    """
    if (ranking := _find_ranking(reference)) is None:
        return None
    name, _ = ranking
    before, now = _list_right(reference, name, labels), _list_right(got, name, labels)
    return Accuracy(
        output=name,
        samples=len(labels),
        reference=float(before.mean()),
        got=float(now.mean()),
        interval=interval_of_pairs(len(labels), int((now & ~before).sum()), int((before & ~now).sum())),
    )


def describe_accuracy(found: Accuracy) -> str:
    """Returns both accuracies and the difference with its interval, in points."""
    words = f"{found.reference:.1%} -> {found.got:.1%}, {100 * (found.got - found.reference):+.1f}"
    if found.interval is None:
        return words
    return f"{words} ({100 * found.interval[0]:+.1f} to {100 * found.interval[1]:+.1f})"


def describe_chance(golden: Golden) -> str:
    """Returns, in words, that the float model is no better than chance on the labels; "" if it is, or has none.

    Chance is right in one of N samples for N classes. The float model is better if the lower end of Wilson's interval
    of its accuracy is above that; fewer than 20 samples are not judged.
    """
    labels, outputs = read_classes(golden), read_outputs(golden)
    found = None if labels is None else measure_accuracy(outputs, outputs, labels)
    ranking = _find_ranking(outputs)
    if found is None or ranking is None:
        return ""
    _, classes = ranking
    chance, right = 1.0 / classes, round(found.reference * found.samples)
    if found.samples < _LEAST_LABELLED or wilson_interval(right, found.samples)[0] > chance:
        return ""
    score = f"the float model is right on {right} of {found.samples} labelled samples ({found.reference:.1%})"
    expected = f"no better than chance among {classes} classes ({chance:.1%})"
    return f"{score}, {expected}: the labels, their order or the inputs may be wrong"


def check_class_labels(golden: Golden) -> None:
    """Refuses labels of a golden set that are no class of the first output that ranks classes.

    Raises:
        DataError: a label is below 0, or there are not that many classes.
    """
    if (ranking := _find_ranking(read_outputs(golden))) is None:
        return
    for label in read_classes(golden) or ():
        if not 0 <= label < ranking[1]:
            raise DataError(f"label {label} is no class of an output of {ranking[1]}", hint="classes count from 0")


def _find_ranking(samples: Samples) -> tuple[str, int] | None:
    """Returns the name of the first output that ranks classes, and how many it ranks, or None if none does."""
    first = next(iter(samples), dict[str, Array]())
    return next(((name, value.size) for name, value in first.items() if ranks_classes(value)), None)


def _list_right(samples: Samples, name: str, labels: Sequence[int]) -> npt.NDArray[np.bool_]:
    right = np.zeros(len(labels), dtype=np.bool_)
    with contextlib.suppress(EdgekitError):
        for index, (sample, label) in enumerate(zip(samples, labels, strict=False)):
            value = sample.get(name)
            if value is not None and value.size and value.dtype.kind in "fiu" and np.isfinite(value).all():
                right[index] = int(value.argmax()) == label
    return right
