"""Quantizes a model for one target: with a plan of a range method, or with the best plan of a search."""

import math
import time
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import (
    AnyPath,
    as_path,
    digest_bytes,
    digest_file,
    list_below,
    read_state,
    replacing_file,
    require_apart,
    require_place,
    work_folder,
    write_state,
)
from edgekit.bundle.golden import plan_sequences
from edgekit.check.check import check_model
from edgekit.check.recommend import explain_no_gain
from edgekit.check.report import find_stopping
from edgekit.data.data_check import SampleFacts, accept_pixels, check_samples, find_missing, warn_if_few
from edgekit.data.samples import Samples, limit_samples
from edgekit.data.sets import load_sequences, read_task_labels
from edgekit.devices.find import choose_here
from edgekit.errors import UsageError
from edgekit.graph.graph import read_graph
from edgekit.graph.spatial import takes_raw_pixels
from edgekit.inspect.inspect import warn_if_random
from edgekit.jobs.check import describe_share, gain_on_target, list_versions
from edgekit.jobs.forms import warn_of_fp16_loss
from edgekit.machine import own_peak_bytes, release_memory
from edgekit.model.model import Model, load_model, move_data
from edgekit.model.tensors import check_outputs
from edgekit.prepare import ready_model
from edgekit.prepare.clean import make_runnable
from edgekit.prepare.fix import FixedModel
from edgekit.prepare.shapes import proposing_sizes
from edgekit.progress import Budget, Progress, say_nothing
from edgekit.quantize import QuantPlan, plan_quantization
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.apply import read_plan, require_origin, require_plan
from edgekit.quantize.calibration.calibrate import CalibrationReport, calibrate_for
from edgekit.quantize.calibration.passes import CalibrationOptions
from edgekit.quantize.calibration.store import CacheSettings
from edgekit.quantize.mixed_precision.candidates import Memo, store_narrow
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.plan_search import Search, Searched, Trial, write_chosen
from edgekit.quantize.mixed_precision.sensitivity import rank_plan
from edgekit.quantize.qdq import plan_calibration
from edgekit.quantize.ranges import AUTO_METHODS, EXACT
from edgekit.recipe import Data, Recipe, choose_precision, load_targets, takes_any_size
from edgekit.report.summary import ActivationReport, QuantizeReport
from edgekit.report.tables import describe_layers, describe_trials
from edgekit.serialize import fill
from edgekit.target import INTEGERS, Precision, Target
from edgekit.verify.task_metrics import MOST_SAMPLES as MOST_LABELLED
from edgekit.verify.task_metrics import TOP1, find_metric, measure_drop

# Methods that choose a range method by measurements.
_CHOOSING_METHODS = frozenset({"auto", "best"})


class QuantizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to quantize: by a method, or by the plan in a file.

    With the method "auto" plans are compared by their estimated drop until one loses little, with "best" until one
    loses nothing. Others are range methods, used without a search. A `max_drop` in the recipe replaces both goals.

    `state` is the file from which a search continues, `cache` the folder that keeps calibrations. With `layers` each
    activation is also quantized alone. After `time_budget_s` seconds no further plan is tried.
    """

    method: str = "auto"
    plan: AnyPath | None = None
    state: AnyPath | None = None
    cache: AnyPath | None = None
    layers: bool = False
    time_budget_s: float | None = None


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """A model prepared and calibrated for one target; `search` has everything from which a plan is made.

    `given` is a plan that was read from a file.
    """

    source: Model
    fixed: FixedModel
    recipe: Recipe
    given: QuantPlan | None
    samples: Samples
    facts: SampleFacts
    search: Search


def quantize_for(
    model: AnyPath,
    data: Data,
    out: AnyPath,
    recipe: Recipe,
    options: QuantizeOptions | None = None,
    progress: Progress = say_nothing,
) -> QuantizeReport:
    """Writes the QDQ form of a model for the one target of the recipe.

    With `max_drop` in the recipe, plans are tried until one meets it. With `data.labels` the drop is measured, by a
    metric or top-1; without, it is estimated.

    Raises:
        EdgekitError: the model, the data, the recipe, the plan or the state is wrong, or the target takes no integers.
    """
    start, options_given = time.monotonic(), options or QuantizeOptions()
    model, out = as_path(model), as_path(out)
    require_place(out)
    with work_folder() as work:
        job = _open_job(model, data, recipe, options_given, work, progress, out)
        search = job.search
        plan, searched = _choose_plan(job, options_given.method)
        with replacing_file(out) as temporary:
            progress("quantize")
            quantized = write_chosen(search, plan, searched, temporary)
            # The memory of graphs is freed before the sessions that measure are made.
            release_memory()
            if searched is not None and plan == searched.chosen.plan:
                predicted = searched.chosen.prediction
            else:
                progress("measure")
                predicted = search.measure(quantized.model)
            check = check_model(quantized.model, search.target)
            # Weights beyond 2 GB are in a file beside the model, with the name that the model states.
            move_data(temporary, out)
        data_warnings = (*warn_if_random(job.source), *warn_if_few(job.facts))
        warning = warn_of_fp16_loss(search.model, [node.name for node in plan.float_nodes], search.target, job.samples)
        layers: tuple[ActivationReport, ...] = ()
        if options_given.layers:
            progress("quantize each activation alone")
            seen = plan_calibration(search.model, plan, search.calibration).ranges["minmax"]
            layers = tuple(describe_layers(plan, seen, rank_plan(search.model, plan, search.calibration)))
    return fill(
        QuantizeReport,
        quantized,
        plan,
        model=job.source.name,
        out=out,
        target=search.target.name,
        samples=job.samples.count,
        data_warnings=data_warnings,
        float_warning=warning,
        calibration=fill(CalibrationReport, search.calibration),
        fixes={fix.id: len(fix.nodes) for fix in job.fixed.fixes},
        size_before=job.source.size_bytes,
        predicted=predicted,
        taken=describe_share(check),
        taken_macs=round(check.taken_macs, 4),
        refused=check.is_refused,
        refusal=find_stopping(check)[1] if check.is_refused else "",
        steps=plan.judged,
        trials=describe_trials(searched, goal=recipe.max_drop is not None),
        max_drop=recipe.max_drop,
        met=searched.met if searched is not None and recipe.max_drop is not None else None,
        goal_note="" if searched is None else searched.note,
        advice="" if searched is None else searched.advice,
        layers=layers,
        left_out=tuple(search.memo.budget.left_out),
        failed=dict(search.memo.budget.failed),
        seconds=round(time.monotonic() - start, 2),
        peak_rss_bytes=own_peak_bytes(),
    )


def plan_for(
    model: Path, data: Data, recipe: Recipe, options: QuantizeOptions | None = None, progress: Progress = say_nothing
) -> QuantPlan:
    """Returns the plan for the one target of the recipe, without writing a model.

    Raises:
        EdgekitError: the model, the data, the recipe or the state is wrong, or the target takes no integers.
    """
    how = msgspec.structs.replace(options or QuantizeOptions(), plan=None)
    with work_folder() as work:
        return _choose_plan(_open_job(model, data, recipe, how, work, progress, None), how.method)[0]


def _open_job(
    model: Path, data: Data, recipe: Recipe, how: QuantizeOptions, work: Path, progress: Progress, out: Path | None
) -> _Job:
    seconds = math.inf if how.time_budget_s is None else how.time_budget_s
    budget = Budget(end=time.monotonic() + seconds, progress=progress)
    targets = load_targets(choose_here(recipe, alone=True))
    if len(targets) != 1:
        names = ", ".join(target.name for target in targets)
        raise UsageError("a model is quantized for one target at a time", hint=f"name one of {names}")
    target, plan = targets[0], None if how.plan is None else read_plan(as_path(how.plan))
    precision = _choose_integers(target, recipe, plan)
    source = make_runnable(load_model(model), work, recipe.freeze)
    if out is not None:
        require_apart([out], [source.path, *(source.path.parent / name for name in source.external_files)])
    with proposing_sizes(source.inputs, data.source, data.preprocess):
        fixed = ready_model(source, work, recipe.dims, may_stay_open=takes_any_size((target,)))
    if recipe.fix:
        fixed_ids = {fix.id for fix in fixed.fixes}
        step, folder = f"rewrites for {target.name}", work / "fixed"
        if gained := budget.attempt(
            step, gain_on_target, fixed.model, folder, target, stays_float=False, known=fixed_ids
        ):
            fixed = FixedModel(model=gained[0].model, fixes=(*fixed.fixes, *gained[0].fixes))
            progress(gained[1])
    graph = read_graph(fixed.model)
    outputs = check_outputs(recipe.outputs, fixed.model.outputs, fixed.model.path.name)
    if reason := explain_no_gain(graph, target, precision, partial(check_model, fixed.model, target)):
        progress(reason)
    sequences = plan_sequences(source, recipe.state, fixed.model.inputs, fixed.model.outputs, work)
    all_samples = load_sequences(data.source, fixed.model.inputs, sequences.state, data.preprocess, idle=recipe.freeze)
    samples, labels = limit_samples(all_samples, recipe.samples, sequences.state.steps), None
    limit = recipe.metric or TOP1
    if data.labels is not None:
        # Labels belong to samples by position, so no sample may be left out.
        if samples.count < all_samples.count:
            raise UsageError("--labels with --samples", hint="give as many samples as labels, or leave one out")
        # Wrong labels are reported before the calibration, which takes the most time.
        labels = read_task_labels(data.labels, find_metric(limit).labels, all_samples)
    samples = sequences.unroll(samples, "calibration")
    checked = check_samples(samples, computed=sequences.computed, missing=find_missing(graph))
    facts = accept_pixels(checked, partial(takes_raw_pixels, graph))
    if plan is not None:
        require_origin(plan, fixed.model, facts.sha256, target)
    known, keep = dict[str, Trial](), None
    if how.state is not None:
        # The measured drops of a state are valid for the same labels only.
        measured = str([limit, *map(digest_file, list_below(data.labels) if data.labels is not None else ())])
        key = {
            "model": fixed.model.sha256,
            "samples": facts.sha256,
            "target": target.name,
            "settings": msgspec.json.encode(target.settings, order="sorted").decode(),
            "precision": precision,
            "labels": digest_bytes(measured.encode()),
            "outputs": msgspec.json.encode(outputs, order="sorted").decode(),
            **list_versions(),
        }
        known = {trial.step: trial for trial in read_state(as_path(how.state), key, tuple[Trial, ...]) or ()}
        keep = partial(write_state, as_path(how.state), key)
    max_labelled = None if labels is None else MOST_LABELLED
    reference = FloatReference(fixed.model, samples, outputs, state=sequences.state, most=max_labelled, work=work)
    start = time.monotonic()
    is_open = how.method in _CHOOSING_METHODS
    methods, fitting = AUTO_METHODS if is_open else (how.method,), how.layers or is_open
    if plan is not None:
        # A plan has its ranges: more statistics are needed only to fit weights.
        methods, fitting = EXACT, how.layers or plan.rounding != "nearest" or bool(plan.factors)
    options = CalibrationOptions(
        work=work / "calibration",
        methods=methods,
        fitting=fitting,
        cache=None if how.cache is None else CacheSettings(folder=as_path(how.cache), digests=facts.digests),
        outputs=outputs,
        progress=progress,
        keep=reference.keep,
        steps=sequences.state.steps,
    )
    search = Search(
        model=fixed.model,
        calibration=calibrate_for(fixed.model, samples, options),
        target=target,
        precision=precision,
        measure=reference.predict_drop,
        compare=reference.compare,
        is_noise=facts.is_noise,
        work=work,
        # The final model is measured after planning, which takes about as long per sample as the calibration.
        memo=Memo(budget=budget.keep_back((time.monotonic() - start) * len(reference.indices) / samples.count)),
        progress=progress,
        may_widen=recipe.precision == "auto",
        known=known,
        keep=keep,
    )
    # With labels, no plan is left out after a part of the samples.
    if labels is None:
        search = msgspec.structs.replace(search, look=reference.look)
    else:
        search = msgspec.structs.replace(search, measure=partial(measure_drop, reference, labels=labels, limit=limit))
    return _Job(source=source, fixed=fixed, recipe=recipe, given=plan, samples=samples, facts=facts, search=search)


def _choose_integers(target: Target, recipe: Recipe, plan: QuantPlan | None) -> Precision:
    """Returns the integer precision to quantize with: that of the `plan`, if there is one, else of the recipe.

    Raises:
        UsageError: the target takes no integers, or the recipe contradicts the plan.
    """
    if not any(precision in INTEGERS for precision in target.precisions):
        hint = f"edgekit build MODEL --data DATA --target {target.name}, or edgekit convert MODEL --weights fp16"
        raise UsageError(f"target '{target.name}' takes no quantized model: {target.precision_reason}", hint=hint)
    if plan is None:
        return choose_precision(target, recipe.precision)
    if recipe.precision not in {"auto", plan.precision}:
        raise UsageError(f"the plan is of {plan.precision}", hint="leave --precision out, or plan again")
    return choose_precision(target, plan.precision)


def _choose_plan(job: _Job, method: str) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan (given, searched for, or that of a range method), and the search, None if there was none."""
    search, narrow = job.search, job.recipe.float_constants == "auto"
    model, calibration = search.model, search.calibration
    if job.given is not None:
        require_plan(job.given, model, calibration, search.target)
        return job.given, None
    if job.recipe.max_drop is not None or method in _CHOOSING_METHODS:
        lossless = 0.0 if method == "best" else None
        goal = lossless if job.recipe.max_drop is None else job.recipe.max_drop / 100
        return find_plan(search, max_drop=goal, narrow=narrow)
    plan = plan_quantization(model, calibration, search.target, search.precision, method=method, memo=search.memo)
    attempt = search.memo.budget.attempt
    smaller = attempt("large constants in 8 or 16 bits", store_narrow, model, plan, calibration) if narrow else None
    return smaller or plan, None
