"""Compares the drop that is estimated without labels with the true one, over models, targets and bad plans.

    python tools/bench/predict_coverage.py [MODEL]... [--targets nnapi,qnn] [--state DIR]

Each labelled classifier of ../shared/zoo is quantized by plans that are good, bad and very bad: with ranges that are
too wide (bits lost) or too narrow (values clipped), or one scale for all channels. `same` asks whether the interval
from some samples contains the drop that labels show on the same samples; `other` takes the interval from the
calibration samples, as the command does, and the drop from other samples. The interval is for the drop over all samples
of the kind, and a few labels have a sampling error of their own: so estimate and truth may differ by the root of the
sum of the squares of both half-widths. The goal is 90 %.
"""

import functools
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from quantize_zoo import int8_targets, read_scored
from row_state import list_options, resume_rows
from zoo_tasks import TASKS, ZooTask, load_task, require_zoo, write_calibration

from edgekit.data.intervals import Z95
from edgekit.data.samples import Samples, load_samples, select_samples, spread_indices
from edgekit.errors import EdgekitError
from edgekit.model.model import Model, load_model
from edgekit.prepare.clean import prepare_model
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.predict import MOST_SAMPLES, FloatReference, Prediction
from edgekit.quantize.ranges import TensorRange
from edgekit.target import load_target
from edgekit.verify.task_metrics import MOST_SAMPLES as MOST_LABELLED
from edgekit.verify.task_metrics import measure_drop

CLASSIFIERS = tuple(name for name in TASKS if name not in {"superres_core_224", "fastestdet", "silero_vad"})
SCALES = (0.25, 0.5, 0.75, 1.0, 2.0, 4.0, 8.0, 16.0)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One plan: the estimates on two sets of samples, and what the labels of the second show."""

    model: str
    target: str
    plan: str
    samples: int
    elsewhere: Prediction
    here: Prediction
    truth: Prediction

    @property
    def same(self) -> bool:
        """True if it contains that drop within the sampling error of the labels."""
        return _reaches(self.here, self.truth)

    @property
    def other(self) -> bool:
        """True if the interval from other samples contains the drop."""
        return _reaches(self.elsewhere, self.truth)

    @property
    def moved(self) -> bool:
        """True if at least one answer changed."""
        return (self.here.top1_agreement or 0.0) < 1.0


def _reaches(guess: Prediction, truth: Prediction) -> bool:
    ends, known = guess.drop_interval or (0.0, 0.0), truth.drop_interval or (0.0, 0.0)
    one, two = guess.drop_estimate or 0.0, truth.drop_estimate or 0.0
    reaches = (ends[1] - one, two - known[0]) if two > one else (one - ends[0], known[1] - two)
    return abs(one - two) <= float(np.hypot(*reaches)) + 1e-9


def bad_plans(plan: QuantPlan, calibration: Calibration) -> Iterator[tuple[str, QuantPlan]]:
    """Yields plans of every quality."""
    for scale in SCALES:
        ranges = _scaled(calibration.ranges["minmax"], scale)
        wide = msgspec.structs.replace(plan, ranges=ranges, wide={})
        yield f"ranges x {scale:g}", wide
        if scale in {1.0, 4.0}:
            yield f"ranges x {scale:g}, per tensor", msgspec.structs.replace(wide, axes={})
    ranges = calibration.ranges["percentile-99.9"]
    yield "percentile-99.9", msgspec.structs.replace(plan, ranges=ranges)
    yield "percentile-99.9, per tensor", msgspec.structs.replace(plan, ranges=ranges, axes={})


def _scaled(ranges: Mapping[str, TensorRange], scale: float) -> dict[str, TensorRange]:
    return {name: TensorRange(low=span.low * scale, high=span.high * scale) for name, span in ranges.items()}


def bench_model(name: str, targets: tuple[str, ...]) -> Iterator[Case]:
    """Yields a case for each target and plan."""
    task = load_task(name)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_calibration(task, work / "calib.npz")
        model = prepare_model(load_model(task.model), work / "prepared.onnx", task.dims)
        learn = load_samples(str(work / "calib.npz"), model.inputs)
        calibration = calibrate_model(model, learn, work=work / "calibration")
        for target in targets:
            plan = plan_quantization(model, calibration, load_target(target), "int8", method="minmax")
            for label, bad in bad_plans(plan, calibration):
                try:
                    quantized = quantize_model(model, bad, calibration, work / "bad.onnx").model
                    yield _measure(task, model, quantized, learn, f"{target}:{label}")
                except EdgekitError as error:
                    print(f"  {name} {target} {label}: {error}", file=sys.stderr)


def _measure(task: ZooTask, model: Model, quantized: Model, learn: Samples, label: str) -> Case:
    target, _, plan = label.partition(":")
    every = Samples(source="zoo", count=len(task.labels), read=lambda: read_scored(task, model))
    kept = spread_indices(every.count, MOST_SAMPLES)
    scored, labels = select_samples(every, kept), [task.labels[index] for index in kept]
    return Case(
        model=task.name,
        target=target,
        plan=plan,
        samples=scored.count,
        elsewhere=FloatReference(model, learn).predict_drop(quantized),
        here=FloatReference(model, scored).predict_drop(quantized),
        truth=measure_drop(FloatReference(model, scored, most=MOST_LABELLED), quantized, labels),
    )


def describe(case: Case) -> str:
    """Returns a case as a line."""
    low, high = (100 * end for end in case.here.drop_interval or (0.0, 0.0))
    guess, truth = 100 * (case.here.drop_estimate or 0.0), 100 * (case.truth.drop_estimate or 0.0)
    line = f"{case.model:28} {case.target:8} {case.plan:28} {case.truth.sqnr_db:6.1f} dB"
    line += f" true {truth:6.2f} estimate {guess:6.2f} ({low:.2f} to {high:.2f}) {'ok' if case.same else 'NO'}"
    return f"{line} from elsewhere {100 * (case.elsewhere.drop_estimate or 0.0):6.2f} {'ok' if case.other else 'NO'}"


def summarize(cases: list[Case], name: str) -> str:
    """Returns coverage and bias over cases."""
    if not cases:
        return f"{name}: no case"
    errors = np.array([(case.here.drop_estimate or 0.0) - (case.truth.drop_estimate or 0.0) for case in cases]) * 100
    # The mean absolute error of a normal distribution: sqrt(2 / pi) of its deviation.
    reaches = [np.ptp(case.truth.drop_interval or (0.0, 0.0)) / 2 for case in cases]
    doubt = 100 * float(np.mean(reaches)) / Z95 * (2 / np.pi) ** 0.5
    same, other = (100 * float(np.mean([getattr(case, key) for case in cases])) for key in ("same", "other"))
    return (
        f"{name}: {len(cases)} cases, interval holds the true drop in {same:.1f} % (same samples),"
        f" {other:.1f} % (other samples); estimate less truth"
        f" {errors.mean():+.2f} points on average, {np.abs(errors).mean():.2f} in size;"
        f" labels alone are off by {doubt:.2f}"
    )


def main() -> int:
    """Runs the benchmark for the classifiers named on the command line, by default for all."""
    args = list_options(__doc__, CLASSIFIERS, int8_targets()).parse_args()
    require_zoo()
    cases: list[Case] = []
    for name, target in product(args.models, args.targets.split(",")):
        make = functools.partial(bench_model, name, (target,))
        for case in resume_rows(args.state, f"predict_coverage {name} {target}", Case, make):
            cases.append(case)
            print(describe(case), flush=True)
    small = [case for case in cases if abs(case.truth.drop_estimate or 0.0) <= 0.05]
    print(summarize(cases, "all"))
    print(summarize([case for case in cases if case.moved], "where an answer changed"))
    print(summarize(small, "true drop of at most 5 points"))
    return int(float(np.mean([case.same for case in cases])) < 0.9) if cases else 2


if __name__ == "__main__":
    sys.exit(main())
