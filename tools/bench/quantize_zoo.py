"""Quantizes every labelled model of ../shared/zoo automatically, and compares it with ONNX Runtime's settings.

    python tools/bench/quantize_zoo.py [MODEL]... [--targets nnapi,nnapi:api_level=28] [--no-ort]
        [--state DIR]

No sample is used both to score a model and to calibrate it. `edgekit` is the automatic mode, `--max-drop 0.5`, without
labels. `ORT` is the best of all of ONNX Runtime's settings, chosen by the very score that is printed, which favours it;
therefore the 95 % interval of that difference is one that holds for all settings at once. Each row has two verdicts:
`drop` is "ok" if at most half a point is lost (images: 0.15 dB) or the interval of the difference reaches that; `ORT`
is "ok" if edgekit is not worse than the best setting, or only within the sampling error. `--state` stores rows as long
as the code stays the same, and the scores of ONNX Runtime's settings by the digests of model and data and its version:
so an interrupted run continues, and a later one repeats only edgekit's part. Without targets (`--targets ""`) only the
scores of ONNX Runtime are computed. It returns 1 if a verdict is no.
"""

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
import onnxruntime
from fault_subjects import listed
from row_state import list_options, resume_rows
from stock_ort import quantize_stock
from zoo_tasks import TASKS, ZooTask, load_task, require_zoo, write_calibration

from edgekit._files import digest_bytes, digest_file, write_file
from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.intervals import Z95
from edgekit.data.samples import Samples, fit_sample, load_samples
from edgekit.errors import EdgekitError
from edgekit.jobs.quantize import quantize_for
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Tensors
from edgekit.prepare.clean import prepare_model
from edgekit.recipe import Data, Recipe
from edgekit.target import load_target, target_names
from edgekit.verify.task_metrics import find_metric, measure_task
from edgekit.verify.task_scores import TaskReport

MAX_DROP = 0.5
_Stock = tuple[str, list[Tensors], int]
"""The best setting, its outputs, and the number of settings from which it was chosen."""

_DB_OF_POINT = 0.3
"""The equivalent of a point for scores in decibels."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one target: scores, and their differences in points to the float model and ONNX Runtime's best."""

    model: str
    target: str
    metric: str
    samples: int
    reference: float = 0.0
    ort: float | None = None
    ort_setting: str = ""
    edgekit: float | None = None
    difference: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    over_ort: float | None = None
    over_ort_interval: tuple[float, float] | None = None
    size_share: float = 0.0
    seconds: float = 0.0
    expected_drop: float | None = None
    expected_interval: tuple[float, float] | None = None
    sqnr_db: float = 0.0
    steps: str = ""
    failure: str = ""

    @property
    def keeps(self) -> bool:
        """True if the drop is small enough, or could be within the sampling error."""
        return not self.failure and max(self.difference, self.interval[1]) >= -MAX_DROP

    @property
    def leads(self) -> bool:
        """True if no setting of ONNX Runtime is better beyond the sampling error."""
        ends = (self.over_ort or 0.0, (self.over_ort_interval or (0.0, 0.0))[1])
        return not self.failure and (self.over_ort is None or max(ends) >= 0)


def int8_targets() -> tuple[str, ...]:
    """Returns the targets that take 8-bit integers."""
    return tuple(name for name in target_names() if "int8" in load_target(name).precisions)


def read_target_name(target: str) -> tuple[str, dict[str, str]]:
    """Returns a target given as NAME or NAME:KEY=VALUE, and its settings."""
    name, _, setting = target.partition(":")
    return name, dict([setting.split("=", 1)]) if setting else {}


def score_outputs(task: ZooTask, path: Path, model: Model) -> list[Tensors]:
    """Returns a model's decoded outputs for each scored sample."""
    session = CpuSession(path, SessionSettings())
    if task.stream:
        count = len(task.labels)
        return [
            task.stream(session.run, {key: rows[index] for key, rows in task.scored.items()}) for index in range(count)
        ]
    rows = (session.run(sample) for sample in read_scored(task, model))
    return [task.decode(row) if task.decode else row for row in rows]


def read_scored(task: ZooTask, model: Model) -> Iterator[Tensors]:
    """Yields the scored samples."""
    for index in range(len(task.labels)):
        yield fit_sample({name: value[index] for name, value in task.scored.items()}, model.inputs, f"sample {index}")


def score(task: ZooTask, rows: list[Tensors]) -> float:
    """Returns the score of outputs."""
    metric = find_metric(task.limit)
    records = [metric.read(row, label, task.limit) for row, label in zip(rows, task.labels, strict=True)]
    return metric.prepare(records)(np.ones(len(records), np.int64))


def best_of_ort(task: ZooTask, model: Model, samples: Samples, work: Path, state: Path) -> _Stock | None:
    """Returns ONNX Runtime's best setting by the score of the task, None if all fail.

    The file `state` stores each setting's score, or why it gave no model, so that no run repeats another's work.
    """
    found: dict[str, float | str] = json.loads(state.read_bytes()) if state.is_file() else {}
    outputs: dict[str, list[Tensors]] = {}

    def run(wanted: Callable[[str], bool]) -> None:
        for setting in quantize_stock(model, samples, work, wanted):
            found[setting.name] = setting.failure
            if setting.path is not None:
                rows = score_outputs(task, setting.path, model)
                found[setting.name] = score(task, rows)
                if setting.name == best():
                    outputs.clear()
                    outputs[setting.name] = rows
            print(
                f"  {task.name}: ort {setting.name} ({setting.samples} samples): {found[setting.name]}", file=sys.stderr
            )
            write_file(state, json.dumps(found, indent=1).encode())

    def scores() -> dict[str, float]:
        return {name: value for name, value in found.items() if isinstance(value, float)}

    def best() -> str:
        return max(scores(), key=scores().__getitem__, default="")

    with contextlib.redirect_stdout(sys.stderr):
        run(lambda name: name not in found)
        if best() and best() not in outputs:  # scored by a run before
            run(lambda name: name == best())
    return (best(), outputs[best()], len(scores())) if best() else None


def stock_state(task: ZooTask, folder: Path) -> Path:
    """Returns the file for a model's scores with some calibration data, scoring data and version of ONNX Runtime."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = [onnxruntime.__version__, digest_file(task.model), task.limit.name, repr(task.dims)]
    facts += [repr(task.labels) if task.limit.name != "psnr" else ""]
    for arrays in (task.calibration, task.scored):
        facts += [f"{key} {digest_bytes(np.ascontiguousarray(value).tobytes())}" for key, value in arrays.items()]
    return folder / f"{task.name}-{digest_bytes(' '.join(facts).encode())[:16]}.json"


def bench_model(name: str, targets: tuple[str, ...], *, with_ort: bool, state: Path | None = None) -> Iterator[Row]:
    """Yields a row for each target."""
    task = load_task(name)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_calibration(task, work / "calib.npz")
        source = load_model(task.model)
        model = prepare_model(source, work / "prepared.onnx", task.dims)
        samples = load_samples(str(work / "calib.npz"), model.inputs)
        reference = score_outputs(task, model.path, model)
        stock = None
        if with_ort:
            stock = best_of_ort(task, model, samples, work, stock_state(task, state or work / "state"))
        for target in targets:
            yield _bench_target(task, target, work, model, reference, stock)


def _bench_target(
    task: ZooTask, target: str, work: Path, model: Model, reference: list[Tensors], stock: _Stock | None
) -> Row:
    name, settings = read_target_name(target)
    recipe = Recipe(targets=(name,), settings=settings, dims=task.dims, max_drop=MAX_DROP)
    out = work / "edgekit.onnx"
    try:
        report = quantize_for(task.model, Data(source=str(work / "calib.npz")), out, recipe)
    except EdgekitError as error:
        return _failed(task, target, str(error))
    rows = score_outputs(task, out, model)
    found, over = _measure(task, reference, rows), None if stock is None else _measure(task, stock[1], rows)
    relieved = report.trials[-1].step if report.trials else ""
    return Row(
        model=task.name,
        target=target,
        metric=task.limit.name,
        samples=len(task.labels),
        reference=found.reference,
        ort=None if over is None else over.reference,
        ort_setting="" if stock is None else stock[0],
        edgekit=found.got,
        difference=_points(found, found.difference),
        interval=_interval(found),
        over_ort=None if over is None else _points(over, over.difference),
        over_ort_interval=None if over is None or stock is None else _interval(over, among=stock[2]),
        size_share=report.size_after / report.size_before,
        seconds=report.seconds,
        expected_drop=report.predicted.drop_estimate,
        expected_interval=report.predicted.drop_interval,
        sqnr_db=report.predicted.sqnr_db,
        steps=f"{relieved} of {len(report.trials)}, {len(report.float_nodes)} float",
    )


def _failed(task: ZooTask, target: str, why: str) -> Row:
    return Row(model=task.name, target=target, metric=task.limit.name, samples=len(task.labels), failure=why)


def _measure(task: ZooTask, reference: list[Tensors], got: list[Tensors]) -> TaskReport:
    return measure_task(task.limit, listed(reference), listed(got), task.labels)


def _points(report: TaskReport, value: float | None) -> float:
    factor = 100.0 if report.unit == "share" else 1.0 / _DB_OF_POINT
    return (value or 0.0) * factor


def _interval(report: TaskReport, *, among: int = 1) -> tuple[float, float]:
    """Returns the interval of a difference, for so many differences at once (Bonferroni)."""
    middle = report.difference or 0.0
    low, high = report.interval or (middle, middle)
    wider = NormalDist().inv_cdf(1 - 0.025 / among) / Z95
    return _points(report, middle + wider * (low - middle)), _points(report, middle + wider * (high - middle))


def describe(row: Row) -> str:
    """Returns a row as a line."""
    if row.failure:
        return f"{row.model:28} {row.target:8} FAILS: {row.failure}"
    low, high = row.interval
    line = f"{row.model:28} {row.target:8} {row.metric:5} {row.samples:5} float {row.reference:8.4f}"
    line += f" edgekit {row.edgekit:8.4f} drop {-row.difference:6.2f} ({-high:.2f} to {-low:.2f})"
    line += f" {'ok' if row.keeps else 'NO'}"
    if row.ort is not None and row.over_ort_interval is not None:
        line += f"; ORT {row.ort:8.4f} ({row.ort_setting}) ahead {row.over_ort:.2f}"
        line += f" ({row.over_ort_interval[0]:.2f} to {row.over_ort_interval[1]:.2f}) {'ok' if row.leads else 'NO'}"
    guess = "" if row.expected_drop is None else f" expected {100 * row.expected_drop:.2f}"
    return f"{line}; {row.sqnr_db:.1f} dB{guess}, {row.size_share:.1%} of float, {row.seconds:.0f} s, {row.steps}"


def _in_child(name: str, target: str, args: argparse.Namespace) -> Iterator[Row]:
    """Measures a model on a target in a process of its own, so that memory is counted separately."""
    command = [sys.executable, __file__, name, "--child", "--targets", target]
    command += ["--no-ort"] if args.no_ort else []
    command += ["--state", str(args.state)] if args.state else []
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        yield _failed(load_task(name), target or "all", f"the process ended with {done.returncode}")
    for line in done.stdout.decode().splitlines():
        yield msgspec.json.decode(line, type=Row)


def main() -> int:
    """Runs the benchmark for the models named on the command line, by default for all."""
    parser = list_options(__doc__, TASKS, int8_targets())
    parser.add_argument("--no-ort", action="store_true", help="leave ONNX Runtime's settings out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    require_zoo()
    targets = tuple(filter(None, args.targets.split(",")))
    if args.child:
        (model,) = args.models
        for row in bench_model(model, targets, with_ort=not args.no_ort, state=args.state):
            print(msgspec.json.encode(row).decode(), flush=True)
        return 0
    rows: list[Row] = []
    for name, target in product(args.models, targets or ("",)):
        key = f"quantize_zoo {name} {target} {'alone' if args.no_ort else 'ort'}"
        for row in resume_rows(args.state, key, Row, functools.partial(_in_child, name, target, args)):
            rows.append(row)
            print(describe(row), flush=True)
    return int(not all(row.keeps and row.leads for row in rows))


if __name__ == "__main__":
    sys.exit(main())
