"""Asks how often the 95 % interval of a drop holds the true drop, where that is known to a fraction of a point.

    python tools/bench/interval_coverage.py [NET]... --state DIR [--targets nnapi,cpu] [--samples 256,100] [--only-kept]

Each net is quantized by the good and bad plans of predict_coverage.py and run over a thousand labelled samples or
more (digits: all that there are), which tell its true drop. Of these, some at a time are drawn without their labels,
as many as the command would have, and an estimate is made of each draw: so one plan gives many intervals. Where samples
are drawn by a program no other part of the bench has them.

What the estimates are made from is kept in DIR for each plan, so that another rule for the interval can be held against
the same plans in seconds: `--only-kept` quantizes nothing. Delete DIR after a change of what is recorded or quantized.

`loud` plans lose more than the truth may be off by (95 %, from ten parts of the samples), and a tenth of a point. Where
less is lost an interval of a share of answers cannot be right 95 times of 100: it moves in steps of one answer, and
where none changed it says only that few do, which holds.
`design` nets are those that factors of the interval were made from; the others test it.
Exit code 1: coverage lies outside 90 to 98 % over the plans that lose at most five points, or the estimate misses by
more than half a point on average.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from predict_coverage import bad_plans
from zoo_tasks import load_task, read_digits

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.errors import EdgekitError
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.clean import prepare_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.detections import estimate_drop
from edgekit.quantize.accuracy.loss import MEASURES, Loss
from edgekit.quantize.accuracy.predict import AP, FloatReference
from edgekit.target import load_target

sys.path.insert(0, str(Path(__file__).parent / "collapse"))
_CACHE = Path.home() / ".cache/edgekit"
_LEARN, _POOL = 1, 3
_SMALL = 0.05
_FOLDS, _STUDENT = 10, 2.26
"""Parts of the samples, and Student's t of one less."""
_DRAWS, _DEAR_DRAWS = 20, 6
"""How many sets of samples are drawn of a plan; figures that rank take their time."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A net, the samples that calibrate it, a pool of labelled ones, and its score in shares (dB in dB)."""

    path: Path
    calibration: dict[str, Array]
    pool: dict[str, Array]
    labels: Any
    score: Callable[[list[Tensors], Any], float]
    dims: dict[str, int] = {}


class Net(msgspec.Struct, frozen=True, kw_only=True):
    """Where a subject comes from, its family, and whether factors were made from it."""

    family: str
    make: Callable[[str], Subject]
    design: bool = False
    centred: bool = False
    decibels: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One plan: the true drop, its own reach of 95 %, and what is recorded of each sample, by what is measured."""

    net: str
    target: str
    name: str
    reference: float
    drop: float
    doubt: float
    records: dict[str, list[Array]]


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """One plan judged from some samples at a time, in points: estimates, and ends of their intervals [draws]."""

    net: str
    target: str
    plan: str
    samples: int
    drop: float
    doubt: float
    estimates: list[float]
    lows: list[float]
    highs: list[float]

    @property
    def holds(self) -> Array:
        """Which intervals hold the truth, bool [draws]."""
        return np.asarray((np.array(self.lows) <= self.drop + 1e-9) & (self.drop <= np.array(self.highs) + 1e-9))

    @property
    def figures(self) -> tuple[float, float, float, float]:
        """True drop, what was expected, by how much that misses, and how wide intervals are, means over the draws."""
        estimates = np.array(self.estimates)
        miss, width = np.abs(estimates - self.drop).mean(), np.subtract(self.highs, self.lows).mean()
        return self.drop, float(estimates.mean()), float(miss), float(width)

    @property
    def is_small(self) -> bool:
        """True if at most five points are lost, or one dB."""
        return self.drop <= (1.0 if NETS[self.net].decibels else 100 * _SMALL)

    @property
    def is_loud(self) -> bool:
        """True if more is lost than the truth may be off by, and a tenth of a point."""
        return self.drop > max(self.doubt, 0.1)


def _top1(rows: list[Tensors], labels: Any) -> float:
    return float(
        np.mean([int(next(iter(row.values())).argmax()) == one for row, one in zip(rows, labels, strict=True)])
    )


def _digits(name: str) -> Subject:
    task, (images, labels) = load_task(name), read_digits()
    ((key, _),) = task.scored.items()
    pixels = (images / 255 - 0.1307) / 0.3081 if name == "mnist_cnn_pytorch" else images
    return Subject(
        path=task.model, calibration=task.calibration, pool={key: pixels[2000:].astype(np.float32)},
        labels=labels[2000:].astype(int), score=_top1, dims=task.dims,
    )  # fmt: skip


def _zoo(name: str) -> Subject:
    task = load_task(name)
    return Subject(
        path=task.model, calibration=task.calibration, pool=task.scored, labels=task.labels, score=_top1, dims=task.dims
    )


def _trained(name: str) -> Subject:
    run_collapse, heads, score = (__import__(each) for each in ("run_collapse", "collapse_heads", "collapse_score"))
    run_collapse.NETS.update(heads.HEADS)
    family, path = run_collapse.NETS[name], run_collapse.find_net(_CACHE / "collapse", name)
    reader = __import__("detector_drop").read_head(family.task) if family.task != "class" else None

    def rate(rows: list[Tensors], labels: Any) -> float:
        found = [next(iter(row.values())) for row in rows] if reader is None else [reader(row) for row in rows]
        return float(score.SCORES["class" if reader is None else "boxes"](np.concatenate(found), labels)) / 100

    return _as_subject(path, family.data, rate, {"N": 1} if family.batch == "N" else {})


def _photographs(name: str) -> Subject:
    task, drop = load_task(name), __import__("detector_drop")
    decode = task.decode or (lambda row: row)

    def rate(rows: list[Tensors], labels: Any) -> float:
        return float(drop.mean_ap([decode(row) for row in rows], labels))

    return Subject(
        path=task.model, calibration=task.calibration, pool=task.scored, labels=task.labels, score=rate, dims=task.dims
    )


def _unseen(name: str) -> Subject:
    run_unseen, scores = (__import__(each) for each in ("run_unseen", "unseen_score"))
    family = run_unseen.FAMILIES[name]
    scale = 1 if family.score in scores.DECIBELS else 100

    def rate(rows: list[Tensors], labels: Any) -> float:
        return float(run_unseen.SCORES[family.score](rows, labels)) / scale

    return _as_subject(run_unseen.find_net(_CACHE / "unseen", name), family.data, rate, {})


def _as_subject(
    path: Path,
    data: Callable[[int], tuple[Array, Any]],
    rate: Callable[[list[Tensors], Any], float],
    dims: dict[str, int],
) -> Subject:
    key, (pool, labels) = load_model(path).inputs[0].name, data(_POOL)
    return Subject(
        path=path, calibration={key: data(_LEARN)[0]}, pool={key: pool}, labels=labels, score=rate, dims=dims
    )


NETS: Mapping[str, Net] = {
    "mnist_cnn_pytorch": Net(family="classes", make=_digits, design=True),
    "kwt_conv_front": Net(family="classes", make=_trained),
    "mnist8_cntk": Net(family="classes", make=_digits, design=True),
    "ppocr_cls_mbv3": Net(family="classes", make=_zoo),
    "depthwise_relu6": Net(family="classes", make=_trained),
    "ctc_reader": Net(family="sequence", make=_unseen),
    "dilated_prelu": Net(family="map", make=_unseen, design=True),
    "silu_detector": Net(family="detector", make=_trained, design=True),
    "yolo8_like": Net(family="detector", make=_trained, design=True),
    "centernet": Net(family="detector", make=_unseen, design=True, centred=True),
    "ssd_like": Net(family="detector", make=_trained),
    "bins_like": Net(family="detector", make=_trained),
    "fastestdet": Net(family="detector", make=_photographs, design=True),
    "embedding_se": Net(family="embedding", make=_unseen, design=True),
    "pose_heatmaps": Net(family="values", make=_unseen, design=True),
    "depth_unet": Net(family="values", make=_unseen),
    "wave_denoiser": Net(family="values", make=_unseen, decibels=True),
}


def run_plans(name: str, target: str) -> Iterator[Plan]:
    """Quantizes a net by plans of every quality, and yields what each gives over the whole pool."""
    net = NETS[name]
    subject = net.make(name)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = prepare_model(load_model(subject.path), work / "prepared.onnx", subject.dims)
        learn, pool = _as_samples(subject.calibration, model), _as_samples(subject.pool, model)
        calibration = calibrate_model(model, learn, work=work / "calibration")
        plan = plan_quantization(model, calibration, load_target(target), "int8", method="minmax")
        reference = FloatReference(model, pool, most=pool.count)
        run = CpuSession(model.path, SessionSettings()).run
        exact: list[Tensors] = [run(sample) for sample in pool]
        for label, bad in bad_plans(plan, calibration):
            try:
                quantized = quantize_model(model, bad, calibration, work / "bad.onnx").model
            except EdgekitError as error:
                print(f"  {name} {target} {label}: {error}", file=sys.stderr)
                continue
            rows, records = list[Tensors](), dict[str, list[Array]]()
            for pair in reference.run_pairs(quantized):
                rows.append(pair.found)
                for number, part in enumerate(reference.parts):
                    records.setdefault(f"{number} {part.measure}", []).append(part.record(pair.expected, pair.found))
            before, drop, doubt = _true_drop(subject, exact, rows)
            yield Plan(
                net=name, target=target, name=label, reference=before, drop=drop, doubt=doubt, records=records,
            )  # fmt: skip


def _true_drop(subject: Subject, exact: list[Tensors], rows: list[Tensors]) -> tuple[float, float, float]:
    """Returns the float model's score, what of it is lost, and how far that may be off, with 95 % certainty."""

    def rate(part: slice) -> tuple[float, float]:
        return (
            subject.score(exact[part], subject.labels[part]),
            subject.score(rows[part], subject.labels[part]),
        )

    drops = [one - two for one, two in (rate(slice(start, None, _FOLDS)) for start in range(_FOLDS))]
    before, after = rate(slice(None))
    return before, before - after, float(_STUDENT * np.std(drops, ddof=1) / np.sqrt(_FOLDS))


def _as_samples(rows: dict[str, Array], model: Model) -> Samples:
    as_samples: Callable[[dict[str, Array], Model], Samples] = __import__("detector_drop").as_samples
    return as_samples(rows, model)


def keep_plans(folder: Path, name: str, target: str, *, only_kept: bool) -> list[Plan]:
    """Returns the plans of a net and target that a folder keeps; where it has none they are run and kept."""
    path = folder / f"{name}-{target.replace(':', '_')}.npz"
    if path.is_file():
        return _read_plans(path)
    if only_kept:
        print(f"  {name} {target}: nothing is kept of it", file=sys.stderr)
        return []
    plans = list(run_plans(name, target))
    arrays: dict[str, Any] = {}
    for number, plan in enumerate(plans):
        facts = msgspec.to_builtins(msgspec.structs.replace(plan, records={}))
        arrays[f"{number}/facts"] = np.array(msgspec.json.encode(facts).decode())
        for measure, records in plan.records.items():
            arrays[f"{number}/{measure}/lengths"] = np.array([len(each) for each in records])
            arrays[f"{number}/{measure}/rows"] = np.concatenate(records).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)
    return plans


def _read_plans(path: Path) -> list[Plan]:
    plans = list[Plan]()
    with np.load(path) as arrays:
        while f"{len(plans)}/facts" in arrays:
            start = f"{len(plans)}/"
            measures = sorted({key.split("/")[1] for key in arrays if key.startswith(start)} - {"facts"})
            records = {
                each: np.split(
                    arrays[f"{start}{each}/rows"].astype(np.float64), arrays[f"{start}{each}/lengths"].cumsum()[:-1]
                )
                for each in measures
            }
            facts = msgspec.json.decode(str(arrays[f"{start}facts"]))
            plans.append(msgspec.convert({**facts, "records": {}}, Plan))
            plans[-1] = msgspec.structs.replace(plans[-1], records=records)
    return plans


def judge_plan(plan: Plan, samples: int) -> Tally:
    """Returns what estimates from so many samples say of a plan, draw by draw."""
    rng, net = np.random.default_rng(0), NETS[plan.net]
    count = len(next(iter(plan.records.values())))
    losses = list[Loss]()
    for _ in range(_DEAR_DRAWS if net.family in {"detector", "embedding"} else _DRAWS):
        chosen = np.sort(rng.choice(count, min(samples, count), replace=False))
        parts = [
            _find_judge(measure.partition(" ")[2], centred=net.centred)([records[index] for index in chosen])
            for measure, records in plan.records.items()
        ]
        losses.append(max(parts, key=lambda loss: loss.estimate))
    return Tally(
        net=plan.net,
        target=plan.target,
        plan=plan.name,
        samples=samples,
        drop=plan.drop if net.decibels else 100 * plan.drop,
        doubt=plan.doubt if net.decibels else 100 * plan.doubt,
        estimates=[_convert(plan, loss.estimate) for loss in losses],
        lows=[_convert(plan, loss.interval[0]) for loss in losses],
        highs=[_convert(plan, loss.interval[1]) for loss in losses],
    )


def _convert(plan: Plan, lost: float) -> float:
    """Returns an estimate in points, or in dB where the score is."""
    if not NETS[plan.net].decibels:
        return 100 * lost
    return float(__import__("unseen_score").as_decibels(lost, plan.reference))


def _find_judge(measure: str, *, centred: bool) -> Callable[[Sequence[Array]], Loss]:
    if measure == AP:
        return partial(_judge_detections, centred=centred)
    return next(each.judge for each in MEASURES.values() if each.name == measure)


def _judge_detections(records: Sequence[Array], *, centred: bool) -> Loss:
    found = estimate_drop(records, centred=centred)
    return Loss(estimate=found.drop, interval=found.interval)


def summarize(tallies: list[Tally], name: str) -> str:
    """Returns coverage, mean miss and mean width of plans as a line of a Markdown table."""
    if not tallies:
        return f"| {name} | 0 | | | | | |"
    loud = [tally for tally in tallies if tally.is_loud]
    # Points and dB are not added up.
    points = [tally for tally in tallies if not NETS[tally.net].decibels] or tallies
    true, expected, miss, width = np.mean([tally.figures for tally in points], axis=0)
    return (
        f"| {name} | {len(tallies)}, {len(loud)} | {true:.2f} | {expected:.2f} | {miss:.2f} | {width:.2f} |"
        f" {_cover(tallies)} | {_cover(loud)} |"
    )


def _cover(tallies: list[Tally]) -> str:
    return f"{100 * float(np.mean([tally.holds.mean() for tally in tallies])):.1f} %" if tallies else "-"


def main() -> int:
    """Judges the nets named on the command line, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS))
    parser.add_argument("--targets", default="nnapi,cpu")
    parser.add_argument("--samples", default="256,100")
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="keep what estimates are made from")
    parser.add_argument("--only-kept", action="store_true", help="judge what is kept, quantize nothing")
    parser.add_argument("--verbose", action="store_true", help="show each plan")
    args = parser.parse_args()
    tallies = list[Tally]()
    for name in args.nets:
        for target in args.targets.split(","):
            for plan in keep_plans(args.state, name, target, only_kept=args.only_kept):
                tallies += [judge_plan(plan, int(samples)) for samples in args.samples.split(",")]
                if args.verbose:
                    print("\n".join(describe(tally) for tally in tallies[-len(args.samples.split(",")) :]), flush=True)
    return report(tallies)


def describe(tally: Tally) -> str:
    """Returns a plan as a line."""
    true, expected, miss, _ = tally.figures
    low, high = np.mean(tally.lows), np.mean(tally.highs)
    return (
        f"{tally.net:18} {tally.target:6} {tally.plan:28} {tally.samples:4} true {true:6.2f} ± {tally.doubt:4.2f}"
        f" estimate {expected:6.2f} ({low:6.2f} to {high:6.2f}) misses {miss:5.2f} holds"
        f" {100 * tally.holds.mean():.0f} %"
    )


def report(tallies: list[Tally]) -> int:
    """Prints the table of plans that lose at most five points, and returns the exit code."""
    small = [tally for tally in tallies if tally.is_small]
    print("| nets | plans, loud | true drop | expected | miss | width | holds | loud holds |")
    print("|---|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(tally.net for tally in small):
        print(summarize([tally for tally in small if tally.net == name], f"{name} ({NETS[name].family})"))
    for family in dict.fromkeys(NETS[tally.net].family for tally in small):
        print(summarize([tally for tally in small if NETS[tally.net].family == family], f"all of {family}"))
    for samples in dict.fromkeys(tally.samples for tally in small):
        print(summarize([tally for tally in small if tally.samples == samples], f"from {samples} samples"))
    for design in (True, False):
        some = [tally for tally in small if NETS[tally.net].design == design]
        print(summarize(some, "nets of the design" if design else "other nets"))
    print(summarize(small, "all, at most 5 points lost"))
    print(summarize(tallies, "all, whatever is lost"))
    if not small:
        return 2
    held = float(np.mean([tally.holds.mean() for tally in small]))
    miss = float(np.mean([tally.figures[2] for tally in small if not NETS[tally.net].decibels] or [0.0]))
    return int(not 0.9 <= held <= 0.98 or miss > 0.5)


if __name__ == "__main__":
    sys.exit(main())
