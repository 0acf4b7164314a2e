"""What a metric of the task found, and the judgement on it."""

from typing import Literal

import msgspec

from edgekit.target import TaskLimit

Unit = Literal["share", "dB", "value"]


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of the task on the float model and on a device, over the same labelled samples.

    `got` is None where a sample did not come back whole; `mismatch` then says so. `difference` is `got` minus
    `reference`, `interval` its interval of 95 %; `share_interval` is that of `got` over `reference`. A `unit` of
    "share" lies between 0 and 1.
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

    @property
    def difference(self) -> float | None:
        """How far the device lies above the float model, None where it was not measured."""
        return None if self.got is None else self.got - self.reference


def judge_task(report: TaskReport | None, limit: TaskLimit | None) -> tuple[str, ...]:
    """Returns every reason why a metric does not keep its limit, one line each."""
    if limit is None:
        return ()
    name = f"metric '{limit.name}'"
    if report is None or report.name != limit.name:
        return (f"{name} was not measured: it needs labels (--labels)",)
    if report.got is None:
        return (f"{name} was not measured on every sample: {report.mismatch}",)
    found = (_judge_drop(report, report.got, limit), _judge_share(report, report.got, limit))
    least = limit.at_least
    missed = least is not None and not (report.got >= least if report.higher_is_better else report.got <= least)
    words = "below" if report.higher_is_better else "above"
    return tuple(
        f"{name} {line}"
        for line in (*found, f"is {format_score(report, report.got)}, {words} {least:g}" if missed else "")
        if line
    )


def format_score(report: TaskReport, value: float | None) -> str:
    """Returns a value of a metric with its unit, for people."""
    if value is None:
        return "not measured"
    return f"{value:.1%}" if report.unit == "share" else f"{value:.4g}" + (" dB" if report.unit == "dB" else "")


def describe_difference(report: TaskReport) -> str:
    """Returns the difference to the float model with its interval, in points."""
    if report.difference is None:
        return "not measured"
    factor = 100.0 if report.unit == "share" else 1.0
    words = f"{report.difference * factor:+.2f}"
    if report.interval is not None:
        words += f" ({report.interval[0] * factor:+.2f} to {report.interval[1] * factor:+.2f})"
    return words


def _judge_drop(report: TaskReport, got: float, limit: TaskLimit) -> str:
    if limit.max_drop is None:
        return ""
    factor = 100.0 if report.unit == "share" else 1.0
    sign = 1.0 if report.higher_is_better else -1.0
    drop = sign * (report.reference - got) * factor
    worst = drop if report.interval is None else max(-sign * end * factor for end in report.interval)
    if drop > limit.max_drop + 1e-9:
        return f"is {drop:.2f} points worse than the float model, more than {limit.max_drop:g}"
    if limit.gate == "estimate":
        return ""
    if report.interval is None:
        return f'has too few samples ({report.samples}) for an interval; give 30 or more, or set gate = "estimate"'
    if worst <= limit.max_drop + 1e-9:
        return ""
    return (
        f"is {drop:.2f} points worse than the float model, and with {report.samples} samples it could be {worst:.2f},"
        f" more than {limit.max_drop:g}{_advise_more(report, worst - drop, limit.max_drop - drop)}"
    )


def _judge_share(report: TaskReport, got: float, limit: TaskLimit) -> str:
    if limit.min_share is None:
        return ""
    if not report.higher_is_better or report.reference <= 0.0:
        return "cannot be held against a share of the float model; use max_drop"
    share = got / report.reference
    if share < limit.min_share - 1e-9:
        return f"is {share:.1%} of the float model's, less than {limit.min_share:.1%}"
    return "" if limit.gate == "estimate" else _judge_share_bound(report, share, limit.min_share)


def _judge_share_bound(report: TaskReport, share: float, min_share: float) -> str:
    if report.share_interval is None:
        return f'has too few samples ({report.samples}) for an interval; give 30 or more, or set gate = "estimate"'
    least = report.share_interval[0]
    if least >= min_share - 1e-9:
        return ""
    return (
        f"is {share:.1%} of the float model's, and with {report.samples} samples it could be {least:.1%},"
        f" less than {min_share:.1%}{_advise_more(report, share - least, share - min_share)}"
    )


def _advise_more(report: TaskReport, half: float, room: float) -> str:
    """Returns how many samples would do, as the width of an interval falls with the root of their number."""
    if room <= 0.0:
        return ""
    return f": about {round(report.samples * (half / room) ** 2 / 10 + 0.5) * 10} samples would tell"
