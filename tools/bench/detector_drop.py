"""Holds the AP that detectors are expected to lose, without labels, against what labels show, over good and bad plans.

    python tools/bench/detector_drop.py [DETECTOR]... [--cache ~/.cache/edgekit/collapse] [--state DIR]

Detectors: FastestDet on COCO photographs (../shared/zoo) and small nets that are trained (run_collapse.py,
run_unseen.py). Each is quantized by the plans of predict_coverage.py. "spread" is what R2 of the raw numbers falls
by, by which detectors were judged before. `held` says that a detector was not looked at while the estimate was made.
Exit code 1: among plans that lose at most five points the estimate misses by more than half a point on average, or
its interval holds the truth in less than 90 %.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from predict_coverage import bad_plans
from row_state import add_state_option, resume_rows
from zoo_tasks import load_task

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.clean import prepare_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.predict import Prediction, predict_drop
from edgekit.target import load_target
from edgekit.verify.tasks.tasks import Detections, prepare_map

sys.path.insert(0, str(Path(__file__).parent / "collapse"))
_SMALL = 0.05
_SPREAD = "spread of the values (R2)"


class Detector(msgspec.Struct, frozen=True, kw_only=True):
    """A detector: its file, rows that calibrate and score it, labels, and the mean AP of what it gives."""

    path: Path
    calibration: dict[str, Array]
    scored: dict[str, Array]
    score: Callable[[list[Tensors]], float]
    dims: dict[str, int] = {}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One plan: what was expected, what was expected before detections were looked at, and what is true."""

    detector: str
    held: bool
    plan: str
    drop: float
    expected: Prediction
    spread: float

    @property
    def error(self) -> float:
        """The estimate less the truth, in points."""
        return 100 * ((self.expected.drop_estimate or 0.0) - self.drop)

    @property
    def holds(self) -> bool:
        """True if the interval holds the truth."""
        low, high = self.expected.drop_interval or (0.0, 0.0)
        return low - 1e-9 <= self.drop <= high + 1e-9


def _small_net(name: str, cache: Path) -> Detector:
    collapse_heads, run_collapse, collapse_score = (
        __import__(module) for module in ("collapse_heads", "run_collapse", "collapse_score")
    )
    families = run_collapse.NETS | collapse_heads.HEADS
    run_collapse.NETS.update(collapse_heads.HEADS)
    path = run_collapse.find_net(cache, name)
    (calibrate, _), (evaluate, labels) = families[name].data(1), families[name].data(2)
    key = load_model(path).inputs[0].name

    def score(rows: list[Tensors]) -> float:
        read = read_head(families[name].task)
        return float(collapse_score.score_boxes(np.concatenate([read(row) for row in rows]), labels)) / 100

    return Detector(path=path, calibration={key: calibrate}, scored={key: evaluate}, score=score)


def read_head(task: str) -> Callable[[Tensors], Array]:
    """Returns how the outputs of a small net become rows of boxes, objectness and classes, by its task."""
    collapse_heads = __import__("collapse_heads")
    readers: dict[str, Callable[[Tensors], Array]] = {
        "boxes": lambda row: next(iter(row.values())),
        "columns": lambda row: _with_objectness(next(iter(row.values())).transpose(0, 2, 1)),
        "bins": lambda row: _with_objectness(collapse_heads.decode_bins(next(iter(row.values())))),
        "ssd": lambda row: _with_objectness(_join_corners(row["boxes"], row["scores"][..., 1:])),
    }
    return readers[task]


def _centre_net(cache: Path) -> Detector:
    run_unseen, unseen_nets, unseen_score = (
        __import__(module) for module in ("run_unseen", "unseen_nets", "unseen_score")
    )
    path = run_unseen.find_net(cache.parent / "unseen", "centernet")
    (calibrate, _), (evaluate, labels) = (unseen_nets.scene_boxes(part) for part in (1, 2))

    def score(rows: list[Tensors]) -> float:
        return float(unseen_score.FIRST_SCORES["AP"](rows, labels)) / 100

    return Detector(path=path, calibration={"image": calibrate}, scored={"image": evaluate}, score=score)


def _with_objectness(rows: Array) -> Array:
    return np.insert(rows, 4, 1, axis=2)


def _join_corners(boxes: Array, chances: Array) -> Array:
    low, high = boxes[..., :2], boxes[..., 2:]
    return np.concatenate([(low + high) / 2, high - low, chances], axis=2)


def _zoo_detector(name: str) -> Detector:
    task = load_task(name)
    decode = task.decode or (lambda row: row)

    def score(rows: list[Tensors]) -> float:
        return mean_ap([decode(row) for row in rows], task.labels)

    return Detector(path=task.model, calibration=task.calibration, scored=task.scored, score=score, dims=task.dims)


def mean_ap(rows: list[Tensors], labels: Any) -> float:
    """Returns the mean AP of boxes, scores and classes, image by image, over IoU 0.50 to 0.95, a share."""
    records = [
        Detections(label=label, boxes=row["boxes"], scores=row["scores"], classes=row["classes"])
        for row, label in zip(rows, labels, strict=True)
    ]
    return prepare_map(records)(np.ones(len(records), np.int64))


def find_detectors(cache: Path) -> Mapping[str, tuple[bool, Callable[[], Detector]]]:
    """Returns how to make each detector, and whether it was held out."""
    return {
        "silu_detector": (False, lambda: _small_net("silu_detector", cache)),
        "yolo8_like": (False, lambda: _small_net("yolo8_like", cache)),
        "fastestdet": (False, lambda: _zoo_detector("fastestdet")),
        "centernet": (False, lambda: _centre_net(cache)),
        "ssd_like": (True, lambda: _small_net("ssd_like", cache)),
        "bins_like": (True, lambda: _small_net("bins_like", cache)),
    }


def as_samples(rows: dict[str, Array], model: Model) -> Samples:
    """Returns rows of arrays as samples of a model, each with its axis of samples where the model has one."""
    count = len(next(iter(rows.values())))
    ranks = {spec.name: len(spec.shape or ()) for spec in model.inputs}

    def read() -> Iterator[Tensors]:
        for index in range(count):
            yield {
                key: np.ascontiguousarray(value[index][None] if value[index].ndim < ranks[key] else value[index])
                for key, value in rows.items()
            }

    return Samples(source="bench", count=count, read=read)


def bench_detector(name: str, detector: Detector, target: str, *, held: bool) -> Iterator[Case]:
    """Yields a case for each plan."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = prepare_model(load_model(detector.path), work / "prepared.onnx", detector.dims)
        learn, scored = as_samples(detector.calibration, model), as_samples(detector.scored, model)
        calibration = calibrate_model(model, learn, work=work / "calibration")
        reference = _score(detector, model.path, scored)
        print(f"{name}: mean AP {100 * reference:.2f} over {scored.count} images", flush=True)
        spread = {spec.name: StatedOutput(kind="values") for spec in model.outputs}
        plan = plan_quantization(model, calibration, load_target(target), "int8", method="minmax")
        for label, bad in bad_plans(plan, calibration):
            quantized = quantize_model(model, bad, calibration, work / "bad.onnx").model
            yield Case(
                detector=name,
                held=held,
                plan=label,
                drop=reference - _score(detector, quantized.path, scored),
                expected=predict_drop(model, quantized, scored),
                spread=predict_drop(model, quantized, scored, spread).drop_estimate or 0.0,
            )


def _bench(name: str, held: bool, make: Callable[[], Detector], target: str) -> Iterator[Case]:  # noqa: FBT001
    return bench_detector(name, make(), target, held=held)


def _score(detector: Detector, path: Path, samples: Samples) -> float:
    session = CpuSession(path, SessionSettings())
    return detector.score([session.run(sample) for sample in samples])


def describe(case: Case) -> str:
    """Returns a case as a line."""
    low, high = (100 * end for end in case.expected.drop_interval or (0.0, 0.0))
    guess, known = 100 * (case.expected.drop_estimate or 0.0), "" if case.expected.measure != _SPREAD else " BY SPREAD"
    return (
        f"{case.detector:14} {case.plan:28} {case.expected.sqnr_db:5.1f} dB true {100 * case.drop:6.2f}"
        f" expected {guess:6.2f} ({low:.2f} to {high:.2f}) {'ok' if case.holds else 'NO'}; spread"
        f" {100 * case.spread:6.2f}{known}"
    )


def summarize(cases: list[Case], name: str) -> str:
    """Returns how good the estimates of some cases are."""
    if not cases:
        return f"{name}: no case"
    errors, holds = np.array([case.error for case in cases]), np.mean([case.holds for case in cases])
    before = np.abs([100 * (case.spread - case.drop) for case in cases]).mean()
    return (
        f"{name}: {len(cases)} plans, the estimate misses by {np.abs(errors).mean():.2f} points on average"
        f" ({errors.mean():+.2f}), the interval holds {100 * holds:.0f} %; by spread {before:.2f}"
    )


def main() -> int:
    """Benches the detectors named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("detectors", nargs="*")
    parser.add_argument("--target", default="nnapi")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/edgekit/collapse")
    add_state_option(parser)
    args = parser.parse_args()
    detectors, cases = find_detectors(args.cache), list[Case]()
    for name in args.detectors or detectors:
        make = functools.partial(_bench, name, *detectors[name], args.target)
        for case in resume_rows(args.state, f"detector_drop {name} {args.target}", Case, make):
            cases.append(case)
            print(describe(case), flush=True)
        print(summarize([case for case in cases if case.detector == name and case.drop <= _SMALL], f"  {name}"))
    small = [case for case in cases if case.drop <= _SMALL]
    print(summarize(cases, "all"))
    print(summarize(small, "true drop of at most 5 points"))
    print(summarize([case for case in small if case.held], "of these, detectors held out"))
    good = bool(small) and np.mean([abs(case.error) for case in small]) <= 0.5
    return int(not good or float(np.mean([case.holds for case in small])) < 0.9)


if __name__ == "__main__":
    sys.exit(main())
