"""The metric of a slow device, measured over all labelled samples on a faster device that computes the same.

An emulator runs a few samples, too few for a narrow interval. So it only has to get the same score as a faster device
on each sample that both ran; how good the model is, the faster device measures on all samples.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import Golden, read_inputs, read_labels, read_outputs
from edgekit.data.labels import Label
from edgekit.data.samples import Samples, order_for_runs, select_samples
from edgekit.devices.bundled import make_job
from edgekit.devices.find import find_device
from edgekit.errors import EdgekitError
from edgekit.target import Form, TaskLimit, Verification
from edgekit.verify.own_model import TESTED_FORMS
from edgekit.verify.run_report import RunReport, StandIn
from edgekit.verify.task_metrics import TaskMetric, compare_records, find_metric, read_records
from edgekit.verify.task_scores import TaskReport, Unit

_SAME_SCORE: Mapping[Unit, tuple[float, float]] = {"share": (0.01, 0.0), "dB": (0.5, 0.0), "value": (0.0, 0.01)}
"""How far apart two devices may score one sample if they compute the same and only round differently: the absolute
distance, and the distance as a share of the score. They are one point, half a decibel and 1 %, chosen by hand."""
_BUDGET_S = 120.0


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What a metric keeps of each sample that a device ran, by the sample's number, and how long the device took."""

    device: str
    records: dict[int, Any]
    elapsed_ms: float


def score_run(
    limit: TaskLimit, labels: Sequence[Label], rows: Sequence[int], outputs: Samples, device: str, elapsed_ms: float
) -> Scored | None:
    """Returns what a metric keeps of the samples that a device ran, or None if it cannot read the outputs."""
    try:
        records = list(read_records(limit, outputs, [labels[row] for row in rows]))
    except EdgekitError:
        return None
    return Scored(device=device, records=dict(zip(rows, records, strict=False)), elapsed_ms=elapsed_ms)


def add_stand_ins(
    bundle: Bundle,
    golden: Golden,
    limit: TaskLimit,
    found: Sequence[tuple[RunReport, Scored | None]],
    work: Path,
) -> tuple[RunReport, ...]:
    """Returns the runs; a run of few samples gets the metric of the fastest device that ran more samples.

    If no device did, the bundle's own model runs on this machine, if it can.
    """
    labels = read_labels(golden)
    reports = tuple(report for report, _ in found)
    known = [scored for report, scored in found if scored is not None and report.failure is None]
    if labels is None or all(len(scored.records) == len(labels) for scored in known):
        return reports
    whole = [scored for scored in known if len(scored.records) == len(labels)]
    best = min(whole, key=lambda scored: scored.elapsed_ms) if whole else _run_here(bundle, golden, limit, labels, work)
    if best is None:
        return reports
    metric, rows = find_metric(limit), sorted(best.records)
    mine = read_records(limit, select_samples(read_outputs(golden), rows), [labels[row] for row in rows])
    task = compare_records(limit, list(mine), [best.records[row] for row in rows])
    task = msgspec.structs.replace(task, labelled=len(labels))

    def stand_in(scored: Scored, best: Scored) -> StandIn:
        common = sorted(scored.records.keys() & best.records.keys())
        here, there = ([one.records[row] for row in common] for one in (scored, best))
        got, wanted = _score(metric, here), _score(metric, there)
        return StandIn(
            device=best.device,
            task=_shift(task, 0.0 if got is None or wanted is None else got - wanted),
            compared=len(common),
            agreeing=sum(_agree(metric, *pair) for pair in zip(here, there, strict=True)),
        )

    return tuple(
        report
        if scored is None or report.failure is not None or len(scored.records) >= len(best.records)
        else msgspec.structs.replace(report, stand_in=stand_in(scored, best))
        for report, scored in found
    )


def _run_here(bundle: Bundle, golden: Golden, limit: TaskLimit, labels: Sequence[Label], work: Path) -> Scored | None:
    forms: list[Form] = [form for form in TESTED_FORMS if bundle.manifest.forms.get(form)]
    samples = read_inputs(golden)
    order = order_for_runs(samples.count, samples.count, bundle.manifest.steps)
    samples = select_samples(samples, order)
    for form in forms:
        plan = Verification(device="host", form=form, samples=samples.count)
        job = msgspec.structs.replace(make_job(bundle, plan, samples), budget_s=_BUDGET_S)
        place = work / form
        place.mkdir(parents=True)
        try:
            run = find_device("host", job.target).run_job(job, place)
        except EdgekitError:
            continue
        rows = order[: run.outputs.count]
        if run.failure is None:
            return score_run(limit, labels, rows, run.outputs, f"host ({form})", sum(run.latency_ms))
    return None


def _agree(metric: TaskMetric, mine: Any, theirs: Any) -> bool:
    here, there = (_score(metric, [record]) for record in (mine, theirs))
    if here is None or there is None:
        # A metric that ranks samples gives no figure for a single sample: it keeps only the score and the label of
        # each.
        here, there = float(mine[0]), float(theirs[0])
    absolute, relative = (0.0, 0.0) if metric.hits else _SAME_SCORE[metric.unit]
    return abs(here - there) <= absolute + relative * abs(there)


def _score(metric: TaskMetric, records: Sequence[Any]) -> float | None:
    try:
        return metric.prepare(records)(np.ones(len(records), dtype=np.int64))
    except EdgekitError:
        return None


def _shift(task: TaskReport, by: float) -> TaskReport:
    """Returns a metric whose figures are all higher by this amount."""
    if task.got is None or not by:
        return task
    share = by / task.reference if task.reference > 0.0 else 0.0
    interval, shares = task.interval, task.share_interval
    return msgspec.structs.replace(
        task,
        got=task.got + by,
        interval=None if interval is None else (interval[0] + by, interval[1] + by),
        share_interval=None if shares is None else (shares[0] + share, shares[1] + share),
    )
