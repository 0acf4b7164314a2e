"""Quantizes nets of families that no rule was made from, in plain mode, and holds the estimate against the true drop.

    python tools/bench/collapse/run_unseen.py [NET]... [--target nnapi]... [--cache ~/.cache/edgekit/unseen]
        [--state DIR]

Training needs jax, optax and scikit-learn (`pip install -r tools/lock/train.txt`), up to three minutes of CPU a net;
what was trained is kept in the cache. 256 samples calibrate and give the estimate, others are scored. Exit code 1: a
net loses more than half a point (0.1 dB) beyond its sampling error, or estimates miss by half a point on average.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from run_collapse import read_target
from unseen_nets import UNSEEN, Unseen
from unseen_score import DECIBELS, FIRST_SCORES, as_decibels

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "unseen"))
from row_state import add_state_option, resume_rows
from second_data import SECOND_SCORES
from second_nets import SECOND
from third_nets import THIRD, THIRD_SCORES

from edgekit._ort import CpuSession, SessionSettings
from edgekit.check.check import check_model
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare import ready_model
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, quantize_model
from edgekit.quantize.accuracy.predict import FloatReference, Prediction
from edgekit.quantize.mixed_precision.goal_search import Search, find_plan
from edgekit.target import Target

TARGETS = ("cpu", "qnn", "nnapi", "nnapi:api_level=28", "xnnpack")
CALIBRATE, EVALUATE = 1, 2
ALLOWED = {True: 0.1, False: 0.5}
"""How much a net may lose: decibels, or points."""
FAMILIES = UNSEEN | SECOND | THIRD
SCORES = FIRST_SCORES | SECOND_SCORES | THIRD_SCORES
_FOLDS, _STUDENT = 10, 2.26
"""Parts of the samples, and Student's t of one less."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One net on one target: figures in points, or dB."""

    net: str
    target: str
    score: str
    reference: float
    drop: float
    doubt: float
    expected: Prediction
    method: str
    float_nodes: int
    wide: int
    outside: float
    seconds: float

    @property
    def estimate(self) -> tuple[float, float, float]:
        """The drop that was expected and the ends of its interval, in the unit of the score."""
        shares = (self.expected.drop_estimate or 0.0, *(self.expected.drop_interval or (0.0, 0.0)))
        if self.score in DECIBELS:
            return tuple(as_decibels(share, self.reference) for share in shares)  # type: ignore[return-value]
        return tuple(100.0 * share for share in shares)  # type: ignore[return-value]

    @property
    def is_good(self) -> bool:
        """True if no more is lost than may be, as far as the samples tell."""
        return self.drop - self.doubt <= ALLOWED[self.score in DECIBELS]


def find_net(cache: Path, name: str) -> Path:
    """Returns the file of a trained net; trains it where the cache has none."""
    path = cache / f"{name}.onnx"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        began = time.process_time()
        onnx.save(FAMILIES[name].make().to_onnx(), str(path))
        print(f"{name}: trained in {time.process_time() - began:.0f} s of CPU", flush=True)
    return path


def run_rows(path: Path, samples: Samples) -> list[Tensors]:
    """Returns all outputs of a model for each sample."""
    session = CpuSession(path, SessionSettings())
    return [session.run(sample) for sample in samples]


def as_tensors(rows: Array | dict[str, Array], model: Model) -> Samples:
    """Returns rows as samples: those of a model's only input, or of each by its name."""
    named = {model.inputs[0].name: rows} if isinstance(rows, np.ndarray) else rows
    count = len(next(iter(named.values())))
    return Samples(
        source="bench", count=count,
        read=lambda: ({name: each[index][None] for name, each in named.items()} for index in range(count)),
    )  # fmt: skip


def bench_net(path: Path, family: Unseen, targets: list[str], work: Path) -> Iterator[Row]:
    """Yields a row for each target."""
    began = time.process_time()
    model = ready_model(load_model(path), work, {}).model
    samples = as_tensors(family.data(CALIBRATE)[0], model)
    rows, labels = family.data(EVALUATE)
    evaluate = as_tensors(rows, model)
    calibration = calibrate_model(model, samples, work=work / "calibration")
    exact = run_rows(model.path, evaluate)
    reference = SCORES[family.score](exact, labels)
    print(f"{path.stem}: float {reference:.2f} {family.score}, read in {time.process_time() - began:.0f} s", flush=True)
    for name in targets:
        target, began = read_target(name), time.process_time()
        plan, expected = _plan(model, calibration, target, samples, work)
        seconds = time.process_time() - began
        quantized = quantize_model(model, plan, calibration, work / "edgekit.onnx")
        found = run_rows(quantized.model.path, evaluate)
        yield Row(
            net=path.stem,
            target=name,
            score=family.score,
            reference=round(reference, 3),
            drop=round(reference - SCORES[family.score](found, labels), 3),
            doubt=round(_doubt(family.score, exact, found, labels), 3),
            expected=expected,
            method=f"{plan.method} {plan.rounding}{' even' if plan.factors else ''}",
            float_nodes=len(plan.float_nodes),
            wide=len(plan.wide),
            outside=round(_outside(model, plan, target), 3),
            seconds=round(seconds, 1),
        )


def _doubt(score: str, exact: list[Tensors], rows: list[Tensors], labels: Any) -> float:
    """Returns how far the drop may be off, with 95 % certainty, by how much it differs between parts of the samples."""
    drops = []
    for part in range(_FOLDS):
        one, two, known = (each[part::_FOLDS] for each in (exact, rows, labels))
        drops.append(SCORES[score](one, known) - SCORES[score](two, known))
    return float(_STUDENT * np.std(drops, ddof=1) / np.sqrt(_FOLDS))


def _plan(
    model: Model, calibration: Calibration, target: Target, samples: Samples, work: Path
) -> tuple[QuantPlan, Prediction]:
    """Returns the plan of the plain mode, and what the command says of it."""
    search = Search(
        model=model, calibration=calibration, target=target, precision="int8", work=work,
        measure=FloatReference(model, samples).predict_drop,
    )  # fmt: skip
    plan, searched = find_plan(search, max_drop=None, narrow=False)
    if searched is not None:
        return plan, searched.chosen.prediction
    return plan, search.measure(quantize_model(model, plan, calibration, work / "plain.onnx").model)


def _outside(model: Model, plan: QuantPlan, target: Target) -> float:
    """Returns the share of the multiplications that read or make more than 8 bits, or float."""
    proto = onnx.load(str(model.path), load_external_data=False)
    tensors = {node.name: {*node.input, *node.output} for node in proto.graph.node}
    kept = {node.name for node in plan.float_nodes}
    nodes = check_model(model, target).node_list
    total = sum(node.macs for node in nodes)
    lost = [node for node in nodes if node.name in kept or tensors.get(node.name, set()) & plan.wide.keys()]
    return sum(node.macs for node in lost) / max(total, 1)


def describe(row: Row) -> str:
    """Returns a row as a line of a Markdown table."""
    estimate, low, high = row.estimate
    unit = " dB" if row.score in DECIBELS else ""
    return (
        f"| {row.net} | {row.target} | {row.score} | {row.reference:.2f} | {row.drop:+.2f} ± {row.doubt:.2f}{unit}"
        f"{'' if row.is_good else ' !'} | {estimate:.2f} ({low:.2f} to {high:.2f}) | {row.expected.measure} |"
        f" {row.expected.sqnr_db:.1f} | {row.float_nodes}, {row.wide} | {row.outside:.0%} | {row.method} |"
        f" {row.seconds:.0f} |"
    )


def main() -> int:
    """Benches the nets named on the command line, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(FAMILIES))
    parser.add_argument("--target", action="append")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/edgekit/unseen")
    parser.add_argument("--json", type=Path)
    add_state_option(parser)
    args = parser.parse_args()
    rows: list[Row] = []
    targets = args.target or list(TARGETS)
    for name in args.nets:
        with tempfile.TemporaryDirectory() as folder:
            make = partial(bench_net, find_net(args.cache, name), FAMILIES[name], targets, Path(folder))
            for row in resume_rows(args.state, f"run_unseen {name} {' '.join(targets)}", Row, make):
                rows.append(row)
                print(describe(row), flush=True)
    missed = [abs(row.estimate[0] - row.drop) for row in rows if row.score not in DECIBELS]
    held = [row.estimate[1] <= row.drop <= row.estimate[2] for row in rows]
    if missed:
        print(f"the estimate misses by {np.mean(missed):.2f} points on average, the interval holds {np.mean(held):.0%}")
    if args.json:
        args.json.write_text(json.dumps([msgspec.to_builtins(row) for row in rows]))
    return int(not all(row.is_good for row in rows) or (bool(missed) and float(np.mean(missed)) > 0.5))


if __name__ == "__main__":
    sys.exit(main())
