"""What quantizing did: as its report says it, and in lines for a terminal."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from edgekit.quantize.accuracy.loss import MEASURES
from edgekit.quantize.accuracy.predict import Prediction, wanted_samples
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.mixed_precision.goal_search import Searched
from edgekit.quantize.mixed_precision.sensitivity import TensorError
from edgekit.quantize.plan import NarrowConstants, QuantPlan
from edgekit.quantize.ranges import PERCENTS, TensorRange, tail_error
from edgekit.report.summary import ActivationReport, CalibrationReport, QuantizeReport, TrialReport


def describe_calibration(calibration: Calibration) -> CalibrationReport:
    """Returns what ranges come from."""
    values, percents = calibration.picked * calibration.measured, PERCENTS if calibration.picked else {}
    errors = {name: 0.0 if calibration.is_exact else tail_error(percent, values) for name, percent in percents.items()}
    return CalibrationReport(
        samples=calibration.samples,
        measured=calibration.measured,
        values=values,
        is_exact=calibration.is_exact,
        tail_errors={name: round(error, 7) for name, error in errors.items() if name in calibration.ranges},
        sample_error=round(calibration.sample_error, 4),
        known=calibration.known,
        notes=calibration.notes,
    )


def describe_trials(searched: Searched | None, *, goal: bool) -> tuple[TrialReport, ...]:
    """Returns what was tried, in order; without a `goal` a single trial is no search."""
    if searched is None or (not goal and len(searched.trials) == 1):
        return ()
    return tuple(
        TrialReport(
            step=trial.step,
            drop_estimate=trial.prediction.drop_estimate,
            sqnr_db=trial.prediction.sqnr_db,
            taken_macs=trial.taken_macs,
            integer_macs=trial.integer_macs,
        )
        for trial in searched.trials
    )


def describe_layers(
    plan: QuantPlan, seen: Mapping[str, TensorRange], errors: Sequence[TensorError]
) -> Iterator[ActivationReport]:
    """Yields the quantized activations of a plan in graph order, with the range that was seen and what each costs."""
    ranked = {error.name: error for error in errors}
    for name in (name for name in plan.ranges if name in ranked):
        # A tensor that left 8 bits has its own range, for the wider grid.
        wide = plan.wide.get(name)
        planned = wide or plan.ranges[name]
        yield ActivationReport(
            tensor=name,
            op=ranked[name].op,
            bits=16 if wide is not None or plan.activation == "uint16" else 8,
            low=planned.low,
            high=planned.high,
            seen_low=seen[name].low,
            seen_high=seen[name].high,
            sqnr_db=ranked[name].sqnr_db,
        )


# Less is no part of a size that anybody counts.
_NOTABLE_BYTES = 500
_LARGE_BYTES = 10_000
_MOST_LINES = 5


def describe_quantization(report: QuantizeReport) -> Iterator[str]:
    """Yields what was made and what it costs, what was tried, and what looks wrong with the samples."""
    size = f"{report.size_before / 1e3:.0f} to {report.size_after / 1e3:.0f} kB"
    kept = f"{report.quantized_nodes} nodes are {report.precision}, {len(report.float_nodes)} stay float"
    size += f", {report.float_bytes / 1e3:.0f} kB of it float constants" if report.float_bytes >= _NOTABLE_BYTES else ""
    yield f"{report.out}: {kept}; {size}"
    yield from _describe_floats(report)
    yield f"expected: {describe_prediction(report.predicted)}"
    share = f"{report.target} takes {report.taken} of it, {100 * report.taken_macs:.1f} % of the work"
    yield f"{share}; no session of it is expected" if report.refused else share
    if report.advice:
        yield f"much is lost; {report.advice}"
    wanted, samples = wanted_samples(report.predicted), report.predicted.samples
    if wanted is not None:
        more = "only --labels would tell more" if math.isinf(wanted) else f"about {wanted:g} would do"
        yield f"{samples} samples leave more than half a point of doubt; {more}"
    note = f" {report.goal_note}" if report.goal_note else ""
    if report.max_drop is not None:
        yield f"the goal of {report.max_drop:g} points is {'met' if report.met else 'not met by any plan'}{note}:"
    elif report.trials:
        yield "plans that were measured:"
    for trial in report.trials:
        drop = "no classes" if trial.drop_estimate is None else f"drop {100 * trial.drop_estimate:.2f} points"
        work = f"{100 * trial.taken_macs:.1f} % of the work on the target, {100 * trial.integer_macs:.1f} % in integers"
        yield f"- {trial.step}: {drop}, {trial.sqnr_db:.1f} dB, {work}"
    for tried in report.steps:
        more = ", channels equalized" if tried.equalized else ""
        more += f", {tried.eight_bit_share:.1%} of the weights keep 8 bits" if tried.eight_bit_share else ""
        more += f", {len(tried.relieved)} out of 8 bits" if tried.relieved else ""
        yield f"- {tried.method}, {tried.rounding}{more}: {tried.sqnr_db:.1f} dB on held-out samples"
    if report.left_out:
        yield f"the time budget ended; left out: {', '.join(report.left_out)}"
    yield from (f"left out, since it failed: {step} ({why})" for step, why in report.failed.items())
    seen = report.calibration
    if seen.sample_error and seen.tail_errors:
        share = f"{100 * seen.sample_error:.2g} % of a tensor's values"
        yield f"histograms are of {seen.measured} of {seen.samples} samples: shares hold for all to within {share}"
    yield from (f"warning: {warning}" for warning in (*report.data_warnings, *report.calibration.notes))


def _describe_floats(report: QuantizeReport) -> Iterator[str]:
    """Yields why nodes stay float, each reason once, and which constants that leaves large."""
    reasons = Counter(node.reason for node in report.float_nodes)
    for reason, count in reasons.most_common(_MOST_LINES):
        yield f"- {count} in float: {reason}"
    if len(reasons) > _MOST_LINES:
        yield f"- {len(report.float_nodes)} in float for {len(reasons)} reasons in all: --json lists them"
    large = [f"'{name}' {size / 1e3:.0f} kB" for name, size in report.float_constants.items() if size >= _LARGE_BYTES]
    if large:
        more = f" and {len(large) - _MOST_LINES} more" if len(large) > _MOST_LINES else ""
        yield f"- large constants in float: {', '.join(large[:_MOST_LINES])}{more}"
    if report.narrow.bits:
        yield f"- {describe_narrow(report.narrow)}"


def describe_narrow(narrow: NarrowConstants) -> str:
    """Returns in one line what fewer bits save of constants that stay float, and what that costs."""
    counts = Counter(narrow.bits.values())
    stored = " and ".join(f"{counts[bits]} in {bits} bits" for bits in sorted(counts))
    saved = f"{narrow.saved_bytes / 1e3:.0f} kB less"
    return f"of these constants {stored}: {saved}; that alone keeps {narrow.ratio_db:.0f} dB on held-out samples"


def describe_prediction(predicted: Prediction) -> str:
    """Returns a prediction in one line."""
    ratio = f"{predicted.sqnr_db:.1f} dB over {predicted.samples} samples"
    if predicted.drop_estimate is None:
        return f"{ratio}; {predicted.source}"
    same = "" if predicted.top1_agreement is None else f", {100 * predicted.top1_agreement:.1f} % of decisions the same"
    known = "" if predicted.got is None else f" from {predicted.reference:.4g} to {predicted.got:.4g},"
    low, high = (100 * end for end in predicted.drop_interval or (math.nan, math.nan))
    if predicted.measure == MEASURES["values"].name:
        lost = f"{100 * predicted.drop_estimate:.2f} % ({low:.2f} to {high:.2f})"
        return f"{ratio}; the outputs decide nothing that is known, and their spread (R2) falls by {lost}"
    ends = "too few samples for an interval" if predicted.drop_interval is None else f"{low:.2f} to {high:.2f}"
    return (
        f"{ratio}{same}; {predicted.measure} down{known} by {100 * predicted.drop_estimate:.2f} points"
        f" ({ends}; from {predicted.source})"
    )
