"""Quantizing a model for one target: with a plan of a method, or with the first plan that is good enough."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, digest_file, replacing_file, require_apart, require_place, work_folder
from edgekit.bundle.golden import plan_sequences
from edgekit.check.check import check_model
from edgekit.check.recommend import explain_no_gain
from edgekit.check.report import CheckReport
from edgekit.data.data_check import SampleFacts, accept_pixels, check_samples, warn_if_few
from edgekit.data.labels import Label, read_task_labels
from edgekit.data.samples import Samples, limit_samples
from edgekit.data.split import load_sequences
from edgekit.devices.register import choose_here
from edgekit.errors import UsageError
from edgekit.graph.graph import read_graph
from edgekit.graph.pixels import takes_raw_pixels
from edgekit.jobs.check import describe_share, gain_on_target
from edgekit.jobs.forms import warn_of_halves
from edgekit.machine import own_peak_bytes, release_memory
from edgekit.model.model import Model, load_model, move_data
from edgekit.model.outputs import StatedOutput, check_outputs
from edgekit.model.state import find_fed_back
from edgekit.prepare import Fix, ready_model
from edgekit.prepare.clean import freeze_model
from edgekit.prepare.fix import FixedModel
from edgekit.prepare.opset import lower_model
from edgekit.prepare.shapes import proposing_sizes
from edgekit.progress import Budget, Progress, say_nothing
from edgekit.quantize import QuantPlan, plan_quantization
from edgekit.quantize.accuracy.predict import FloatReference, Prediction
from edgekit.quantize.apply import QuantizedModel
from edgekit.quantize.calibration.calibrate import CalibrationOptions, calibrate_for
from edgekit.quantize.calibration.store import CacheSettings
from edgekit.quantize.check_plan import read_plan, require_origin, require_plan
from edgekit.quantize.mixed_precision.candidates import Memo, store_narrow
from edgekit.quantize.mixed_precision.goal_search import find_plan, write_chosen
from edgekit.quantize.mixed_precision.plan_search import Search, Searched
from edgekit.quantize.mixed_precision.sensitivity import rank_plan
from edgekit.quantize.mixed_precision.trials import State, open_state
from edgekit.quantize.qdq import plan_calibration
from edgekit.quantize.ranges import AUTO_METHODS, PLAIN_METHODS
from edgekit.recipe import Data, Recipe, choose_precision, load_targets, takes_any_size
from edgekit.report.summary import ActivationReport, QuantizeReport
from edgekit.report.tables import describe_calibration, describe_layers, describe_trials
from edgekit.target import INTEGERS, Precision, Target, TaskLimit
from edgekit.verify.task_metrics import MOST_SAMPLES as MOST_LABELLED
from edgekit.verify.task_metrics import TOP1, find_metric, measure_drop

# Methods that choose a range method by what they measure.
_OPEN_METHODS = frozenset({"auto", "best"})


class QuantizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to quantize: by a method of `plan_quantization`, or by the plan in a file.

    `state` is the file that a search goes on from, `cache` the folder where calibrations are kept. With `layers`
    each activation is also quantized alone. From `time_budget_s` seconds after the start on, no other plan is tried.
    """

    method: str = "auto"
    plan: Path | None = None
    state: Path | None = None
    cache: Path | None = None
    layers: bool = False
    time_budget_s: float | None = None

    def budget(self, start: float, progress: Progress) -> Budget:
        """Returns the time of a search that is part of what began at `start`, by `time.monotonic()`."""
        return Budget(end=start + (self.time_budget_s or math.inf), progress=progress)


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """A model prepared for one target, with its samples and all else that is known before the calibration.

    `given` is a plan that was read from a file. `reference` runs the prepared model once for all plans.
    """

    source: Model
    prepared: Model
    fixes: tuple[Fix, ...]
    given: QuantPlan | None
    outputs: dict[str, StatedOutput]
    samples: Samples
    facts: SampleFacts
    target: Target
    precision: Precision
    may_widen: bool
    max_drop: float | None
    narrow: bool
    measure: Callable[[Model], Prediction]
    reference: FloatReference
    is_labelled: bool
    feeds: Mapping[str, str]
    work: Path
    budget: Budget


def quantize_for(
    model: Path,
    data: Data,
    out: Path,
    recipe: Recipe,
    options: QuantizeOptions | None = None,
    progress: Progress = say_nothing,
) -> QuantizeReport:
    """Writes the QDQ form of a model for the one target of the recipe.

    With `max_drop` plans are searched for until one meets it. `data.labels` tell the true drop, by a metric or top-1.

    Raises:
        EdgekitError: the model, the data, the recipe, the plan or the state is wrong, or the target takes no integers.
    """
    start, how = time.monotonic(), options or QuantizeOptions()
    require_place(out)
    with work_folder() as work:
        job = _open_job(model, data, recipe, how, work, how.budget(start, progress))
        require_apart([out], [job.source.path, *(job.source.path.parent / name for name in job.source.external_files)])
        state, search = _open_state(job, how.state, data.labels, recipe.metric), _open_search(job, how)
        plan, searched = _choose_plan(job, search, how.method, state)
        quantized, predicted, check = _write_model(job, search, plan, searched, out)
        warning = warn_of_halves(job.prepared, [node.name for node in plan.float_nodes], job.target, job.samples)
        layers: tuple[ActivationReport, ...] = ()
        if how.layers:
            job.budget.progress("quantize each activation alone")
            seen = plan_calibration(job.prepared, plan, search.calibration).ranges["minmax"]
            layers = tuple(describe_layers(plan, seen, rank_plan(job.prepared, plan, search.calibration)))
    return QuantizeReport(
        model=job.source.name,
        out=out,
        target=job.target.name,
        precision=plan.precision,
        samples=job.samples.count,
        data_warnings=warn_if_few(job.facts),
        float_warning=warning,
        calibration=describe_calibration(search.calibration),
        fixes={fix.id: len(fix.nodes) for fix in job.fixes},
        size_before=job.source.size_bytes,
        size_after=quantized.size_after,
        float_constants=quantized.float_constants,
        narrow=plan.narrow,
        quantized_nodes=quantized.quantized_nodes,
        float_nodes=quantized.float_nodes,
        predicted=predicted,
        taken=describe_share(check),
        taken_macs=round(check.taken_macs, 4),
        refused=check.is_refused,
        steps=plan.judged,
        trials=describe_trials(searched, goal=job.max_drop is not None),
        max_drop=job.max_drop,
        met=searched.met if searched is not None and job.max_drop is not None else None,
        goal_note="" if searched is None else searched.note,
        advice="" if searched is None else searched.advice,
        layers=layers,
        left_out=tuple(job.budget.left_out),
        failed=dict(job.budget.failed),
        seconds=round(time.monotonic() - start, 2),
        peak_rss_bytes=own_peak_bytes(with_child=True),
    )


def plan_for(
    model: Path, data: Data, recipe: Recipe, options: QuantizeOptions | None = None, progress: Progress = say_nothing
) -> QuantPlan:
    """Returns what quantizing a model for the one target of the recipe would do, without writing a model.

    Raises:
        EdgekitError: the model, the data or the recipe is wrong, or the target takes no integers.
    """
    how = msgspec.structs.replace(options or QuantizeOptions(), plan=None)
    budget = how.budget(time.monotonic(), progress)
    with work_folder() as work:
        job = _open_job(model, data, recipe, how, work, budget)
        plan, _ = _choose_plan(job, _open_search(job, how), how.method, None)
    return plan


def _open_job(model: Path, data: Data, recipe: Recipe, how: QuantizeOptions, work: Path, budget: Budget) -> _Job:
    targets = load_targets(choose_here(recipe, alone=True))
    if len(targets) != 1:
        names = ", ".join(target.name for target in targets)
        raise UsageError("a model is quantized for one target at a time", hint=f"name one of {names}")
    target, plan = targets[0], None if how.plan is None else read_plan(how.plan)
    precision = _choose_integers(target, recipe, plan)
    source = freeze_model(lower_model(load_model(model), work / "lowered"), work / "frozen", recipe.freeze)
    with proposing_sizes(source.inputs, data.source, data.preprocess):
        fixed = ready_model(source, work, recipe.dims, may_stay_open=takes_any_size((target,)))
    if recipe.fix:
        known = {fix.id for fix in fixed.fixes}
        rewrite = partial(gain_on_target, fixed.model, work / "fixed", target, stays_float=False, known=known)
        gained = budget.attempt(f"rewrites for {target.name}", rewrite)
        if gained is not None:
            fixed = FixedModel(model=gained[0].model, fixes=(*fixed.fixes, *gained[0].fixes))
            budget.progress(gained[1])
    graph = read_graph(fixed.model)
    if reason := explain_no_gain(graph, target, precision, partial(check_model, fixed.model, target)):
        budget.progress(reason)
    outputs = check_outputs(recipe.outputs, fixed.model)
    sequences = plan_sequences(source, recipe.state, fixed.model.inputs, fixed.model.outputs, work)
    every = load_sequences(data.source, fixed.model.inputs, sequences.state, data.preprocess, idle=recipe.freeze)
    samples, limit = limit_samples(every, recipe.samples, sequences.state.steps), recipe.metric or TOP1
    labels: Sequence[Label] | None = None
    if data.labels is not None:
        # Labels belong to samples by position: with samples left out they would belong to the wrong ones.
        if samples.count < every.count:
            raise UsageError(
                "--labels with --samples", hint="give as many samples as there are labels, or leave one out"
            )
        # Before the calibration, which takes the most time.
        labels = read_task_labels(data.labels, find_metric(limit).labels, every)
    samples = sequences.unroll(samples, "calibration")
    most = None if labels is None else MOST_LABELLED
    reference = FloatReference(fixed.model, samples, outputs, state=sequences.state, most=most, work=work)
    measure = reference.predict_drop
    if labels is not None:
        measure = partial(measure_drop, reference, labels=labels, limit=limit)
    facts = accept_pixels(check_samples(samples, computed=sequences.computed), partial(takes_raw_pixels, graph))
    if plan is not None:
        require_origin(plan, fixed.model, facts.sha256, target)
    return _Job(
        source=source,
        prepared=fixed.model,
        fixes=fixed.fixes,
        given=plan,
        outputs=outputs,
        samples=samples,
        facts=facts,
        target=target,
        precision=precision,
        may_widen=recipe.precision == "auto",
        max_drop=recipe.max_drop,
        narrow=recipe.float_constants == "auto",
        measure=measure,
        reference=reference,
        is_labelled=labels is not None,
        feeds=find_fed_back(sequences.state),
        work=work,
        budget=budget,
    )


def _choose_integers(target: Target, recipe: Recipe, plan: QuantPlan | None) -> Precision:
    """Returns the integer precision to quantize with: that of a plan that is given, which the recipe may repeat."""
    if not any(precision in INTEGERS for precision in target.precisions):
        raise UsageError(
            f"target '{target.name}' takes no quantized model: {target.precision_reason}",
            hint=f"edgekit build MODEL --data DATA --target {target.name}, or edgekit convert MODEL --weights fp16",
        )
    if plan is None:
        return choose_precision(target, recipe.precision)
    if recipe.precision not in {"auto", plan.precision}:
        raise UsageError(f"the plan is of {plan.precision}", hint="leave --precision out, or plan again")
    return choose_precision(target, plan.precision)


def _open_state(job: _Job, path: Path | None, labels: Path | None, metric: TaskLimit | None) -> State | None:
    if path is None:
        return None
    files = [] if labels is None else [labels, *sorted(labels.rglob("*"))]
    # With other labels the measured drops would be others, so what a state remembers would be wrong.
    digests = "".join(digest_file(file) for file in files if file.is_file())
    measured = f"{metric or TOP1} of {digest_bytes(digests.encode())}" if files else "none"
    facts = {"labels": measured, "outputs": msgspec.json.encode(job.outputs, order="sorted").decode()}
    return open_state(path, job.prepared, job.facts.sha256, job.target, job.precision, facts)


def _choose_plan(job: _Job, search: Search, method: str, state: State | None) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan that was given, was searched for or is that of a method, and what was tried in a search."""
    if job.given is not None:
        require_plan(job.given, job.prepared, search.calibration, job.target)
        return job.given, None
    if job.max_drop is not None or method == "auto":
        goal = None if job.max_drop is None else job.max_drop / 100
        return find_plan(search, max_drop=goal, narrow=job.narrow, state=state)
    plan = plan_quantization(
        job.prepared, search.calibration, job.target, job.precision, method=method, memo=search.memo
    )
    if not job.narrow:
        return plan, None
    store = partial(store_narrow, job.prepared, plan, search.calibration)
    return job.budget.attempt("large constants in 8 or 16 bits", store) or plan, None


def _open_search(job: _Job, how: QuantizeOptions) -> Search:
    """Returns the search for a plan, with the statistics that the method, or the plan from a file, needs."""
    began, plan = time.monotonic(), job.given
    if plan is None:
        fitting = how.method in _OPEN_METHODS
        methods: Sequence[str] = AUTO_METHODS if fitting else (how.method,)
    else:
        # A plan holds its ranges: only what fits weights to statistics has to measure more.
        methods, fitting = PLAIN_METHODS, plan.rounding != "nearest" or bool(plan.factors)
    options = CalibrationOptions(
        work=job.work / "calibration",
        methods=tuple(methods),
        fitting=fitting or how.layers,
        cache=None if how.cache is None else CacheSettings(folder=how.cache, digests=job.facts.digests),
        outputs=job.outputs,
        progress=job.budget.progress,
        keep=job.reference.keep,
    )
    calibration = calibrate_for(job.prepared, job.samples, options)
    # What was planned is written and measured: running a plan over a sample takes about as long as calibrating it.
    budget = job.budget.keep_back((time.monotonic() - began) * len(job.reference.indices) / job.samples.count)
    search = Search(
        model=job.prepared,
        calibration=calibration,
        target=job.target,
        precision=job.precision,
        measure=job.measure,
        compare=job.reference.compare,
        work=job.work,
        memo=Memo(budget=budget),
        progress=job.budget.progress,
        may_widen=job.may_widen,
        feeds=job.feeds,
    )
    if job.is_labelled:
        # What labels say of a part of the samples is not known.
        return search
    return msgspec.structs.replace(search, race=job.reference.race, screen=job.reference.screen)


def _write_model(
    job: _Job, search: Search, plan: QuantPlan, searched: Searched | None, out: Path
) -> tuple[QuantizedModel, Prediction, CheckReport]:
    """Returns the model, written to `out` once it is whole, what it is expected to cost, and what is taken of it."""
    with replacing_file(out) as temporary:
        job.budget.progress("quantize")
        quantized = write_chosen(search, plan, searched, temporary)
        measured = searched is not None and plan == searched.chosen.plan
        # What graphs left behind would lie beside the sessions that measure.
        release_memory()
        if not measured:
            job.budget.progress("measure")
        predicted = searched.chosen.prediction if searched is not None and measured else job.measure(quantized.model)
        check = check_model(quantized.model, job.target)
        # Weights beyond 2 GB lie beside the model, under the name that stands in it.
        move_data(temporary, out)
    return quantized, predicted, check
