"""Range methods chosen tensor by tensor, against the one method for the whole net that a plan has.

    python tools/bench/range_mix.py [NET]... [--targets nnapi,qnn] [--certainty 1.0] [--unseen DIR]

NET is a labelled model of ../shared/zoo, or a net of `collapse/run_unseen.py`. From the plan of the plain mode on, the
tensors whose range another method changes by 5 % or more are switched to it, those that change most first: all of them,
then halves of what did not help, at most eight runs over the held-out samples a method. A switch stays where fewer
decisions change, or the ratio gains 0.05 dB where none are made, by `--certainty` standard errors over the samples.
Shown are the ratio and the changed decisions of both plans on samples that chose nothing.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from zoo_tasks import TASKS, load_task

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples, fit_sample
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare import ready_model
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, quantize_model
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.accuracy.sqnr import join_ratios, ratio_db
from edgekit.quantize.calibration.decided_logits import find_decisions
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.mixed_precision.candidates import Draft
from edgekit.quantize.mixed_precision.goal_search import Search, plan_sparingly
from edgekit.quantize.mixed_precision.relief import adapt_ranges
from edgekit.quantize.qdq.build import plan_calibration, plan_graph
from edgekit.quantize.ranges.methods import AUTO_METHODS, TensorRange
from edgekit.target import load_target

sys.path.insert(0, str(Path(__file__).parent / "collapse"))

_NETS = ("dilated_prelu", "kws_dscnn_float", "vww_96_float", "mnist_cnn_pytorch", "ppocr_cls_mbv3",
         "silero_vad_micro_transformer")  # fmt: skip
_LEAST_CHANGE = 0.07  # of the binary logarithm of a range: 5 %
_MOST_RUNS = 8
_SCORED = 300


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The ratio of each sample in dB, that of all, and the share of decisions that changed in each sample."""

    each_db: Array
    ratio_db: float
    changed: Array

    def describe(self) -> str:
        """Returns both figures of all samples."""
        return f"{self.ratio_db:.2f} dB, {100 * self.changed.mean():.2f} % changed"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model, what calibrates it, and samples that nothing else sees."""

    model: Model
    samples: Samples
    scored: Sequence[Tensors]


def load_subject(name: str, unseen: Path, work: Path) -> Subject:
    """Returns a net of the zoo or of the unseen families, which are trained where the cache has none."""
    if name in TASKS:
        task = load_task(name)
        model = ready_model(load_model(task.model), work, task.dims).model
        parts = (task.calibration, {key: rows[:_SCORED] for key, rows in task.scored.items()})
        rows, scored = (list(_split(part, model)) for part in parts)
    else:
        from run_unseen import CALIBRATE, EVALUATE, FAMILIES, as_tensors, find_net  # noqa: PLC0415 - needs jax

        model = ready_model(load_model(find_net(unseen, name)), work, {}).model
        rows, scored = (list(as_tensors(FAMILIES[name].data(seed)[0], model)) for seed in (CALIBRATE, EVALUATE))
    samples = Samples(source="bench", count=len(rows), read=lambda: iter(rows))
    return Subject(model=model, samples=samples, scored=scored[:_SCORED])


def _split(arrays: Mapping[str, Array], model: Model) -> Iterator[Tensors]:
    for index in range(len(next(iter(arrays.values())))):
        yield fit_sample({key: rows[index] for key, rows in arrays.items()}, model.inputs, f"sample {index}")


def judge(model: Path, pairs: Sequence[tuple[Tensors, Tensors]], axes: Mapping[str, int]) -> Judged:
    """Returns how near a model's outputs come; `axes` holds that of the classes of outputs that decide."""
    session = CpuSession(model, SessionSettings(threads=1))
    each, changed, powers = list[float](), list[float](), dict[str, Array]()
    for inputs, expected in pairs:
        found, ratios, shares = session.run(inputs), list[float](), list[float]()
        for name, one in expected.items():
            if name not in found or one.dtype.kind != "f":
                continue
            error = one.astype(np.float64) - found[name]
            power = np.array([np.square(one, dtype=np.float64).sum(), np.square(error).sum()])
            powers[name] = powers.get(name, np.zeros(2)) + power
            ratios.append(ratio_db(*power))
            if name in axes:
                shares.append(float(np.mean(one.argmax(axes[name]) != found[name].argmax(axes[name]))))
        each.append(join_ratios(ratios))
        changed.append(float(np.mean(shares)) if shares else 0.0)
    total = join_ratios([ratio_db(*power) for power in powers.values()])
    return Judged(each_db=np.array(each), ratio_db=total, changed=np.array(changed))


def helps(before: Judged, after: Judged, certainty: float) -> bool:
    """Returns True if fewer decisions change, or the ratio is better where none do, beyond the noise of samples."""
    decides = bool(before.changed.any() or after.changed.any())
    gain = before.changed - after.changed if decides else after.each_db - before.each_db
    least = 0.02 * before.changed.mean() if decides else 0.05
    noise = gain.std(ddof=1) / np.sqrt(len(gain))
    return bool(gain.mean() > least and gain.mean() > certainty * noise)


def mix_ranges(subject: Subject, calibration: Calibration, draft: Draft, certainty: float, work: Path) -> QuantPlan:
    """Returns the plan with the ranges of other methods where these help on the held-out samples."""
    axes = find_output_axes(draft)
    reference = CpuSession(subject.model.path, SessionSettings(threads=1))
    held = [(inputs, reference.run(inputs)) for inputs, _ in read_held_out(draft.statistics)]

    def measure(ranges: Mapping[str, TensorRange]) -> Judged:
        plan = msgspec.structs.replace(draft.plan, ranges=dict(ranges), rounding="nearest")
        return judge(quantize_model(subject.model, plan, calibration, work / "trial.onnx").model.path, held, axes)

    ranges = dict(draft.plan.ranges)
    reached = measure(ranges)
    for method in AUTO_METHODS:
        other = draft.calibration.ranges[method]
        change = {name: abs(np.log2(_span(other[name]) / _span(span))) for name, span in ranges.items()}
        groups = [[name for name in sorted(change, key=lambda key: -change[key]) if change[name] > _LEAST_CHANGE]]
        for _ in range(_MOST_RUNS):
            group = groups.pop() if groups else []
            if not group:
                break
            trial = {**ranges, **{name: other[name] for name in group}}
            found = measure(trial)
            if helps(reached, found, certainty):
                ranges, reached = trial, found
            elif len(group) > 1:
                groups += [group[len(group) // 2 :], group[: len(group) // 2]]
    return msgspec.structs.replace(draft.plan, ranges=ranges)


def _span(its: TensorRange) -> float:
    return max(max(its.high, 0.0) - min(its.low, 0.0), 1e-30)


def find_output_axes(draft: Draft) -> dict[str, int]:
    """Returns the outputs that decide places or steps, or one class, and the axis of the classes."""
    axes = {name: -1 for name in draft.graph.outputs if len(draft.graph.dims(name)) == 2}
    return axes | find_decisions(draft.graph, draft.calibration)


def bench_net(name: str, targets: Sequence[str], certainty: float, unseen: Path) -> None:
    """Prints a line for each target."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        subject = load_subject(name, unseen, work)
        calibration = calibrate_model(subject.model, subject.samples, work=work / "calibration")
        reference = CpuSession(subject.model.path, SessionSettings(threads=1))
        pairs = [(row, reference.run(row)) for row in subject.scored]
        for each in targets:
            began = time.process_time()
            search = Search(
                model=subject.model, calibration=calibration, target=load_target(each, {}), precision="int8", work=work,
                measure=FloatReference(subject.model, subject.samples).predict_drop,
            )  # fmt: skip
            plan, _ = plan_sparingly(search)
            planned = time.process_time()
            graph = plan_graph(subject.model, plan, calibration)
            seen = adapt_ranges(graph, plan_calibration(subject.model, plan, calibration))
            draft = Draft(graph=graph, calibration=seen, plan=plan)
            mixed = mix_ranges(subject, calibration, draft, certainty, work)
            ended = time.process_time()
            axes = find_output_axes(draft)
            before, after = (
                judge(quantize_model(subject.model, one, calibration, work / "q.onnx").model.path, pairs, axes)
                for one in (plan, mixed)
            )
            switched = sum(mixed.ranges[key] != span for key, span in plan.ranges.items())
            print(
                f"| {name} | {each} | {plan.method} | {switched} of {len(plan.ranges)} | {before.describe()} |"
                f" {after.describe()} | {planned - began:.1f} + {ended - planned:.1f} |",
                flush=True,
            )


def main() -> int:
    """Benches the nets named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(_NETS))
    parser.add_argument("--targets", default="nnapi")
    parser.add_argument("--certainty", type=float, default=1.0)
    parser.add_argument("--unseen", type=Path, default=Path.home() / ".cache/edgekit/unseen")
    args = parser.parse_args()
    for name in args.nets:
        bench_net(name, args.targets.split(","), args.certainty, args.unseen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
