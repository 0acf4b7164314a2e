"""What quantizing did, as its report says it."""

from collections.abc import Iterator, Mapping, Sequence

from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.mixed_precision.goal_search import Searched
from edgekit.quantize.mixed_precision.sensitivity import TensorError
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.ranges.methods import PERCENTS, TensorRange, tail_error
from edgekit.report.summary import ActivationReport, CalibrationReport, TrialReport


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
