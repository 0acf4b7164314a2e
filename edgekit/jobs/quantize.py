"""A model as the user has it, quantized for one target: planned, or searched for until it is good enough."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, digest_file, replacing_file, require_apart, require_place, work_folder
from edgekit.data.data_check import SampleFacts, check_samples, warn_if_few
from edgekit.data.labels import Label, read_task_labels
from edgekit.data.samples import Samples, limit_samples, load_samples
from edgekit.errors import UsageError
from edgekit.jobs.prepare import peak_rss_bytes
from edgekit.model.model import Model, load_model, measure_files, move_data
from edgekit.prepare import Fix, ready_model
from edgekit.progress import Progress, say_nothing
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization
from edgekit.quantize.accuracy.predict import Prediction, predict_drop
from edgekit.quantize.apply import QuantizedModel, quantize_model
from edgekit.quantize.calibration.cache import CacheSettings
from edgekit.quantize.check_plan import adopt_plan, require_origin
from edgekit.quantize.graph.graph import refuse_huge
from edgekit.quantize.mixed_precision.choose import plan_calibration
from edgekit.quantize.mixed_precision.goal_search import (
    Goal,
    Searched,
    State,
    open_state,
    plan_sparingly,
    search_quantization,
)
from edgekit.quantize.mixed_precision.sensitivity import rank_plan
from edgekit.quantize.ranges.methods import AUTO_METHODS, PERCENTS, PLAIN_METHODS, tail_error
from edgekit.recipe import Data, PrecisionChoice, Recipe, choose_precision, load_targets
from edgekit.report.summary import ActivationReport, CalibrationReport, QuantizeReport, TrialReport
from edgekit.target import Precision, Target, TaskLimit
from edgekit.verify.tasks.drop import TOP1, measure_drop
from edgekit.verify.tasks.tasks import find_metric

MAX_PLAN_BYTES = 1 << 26


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """A model prepared for one target, and samples that were judged: all that is known before anything is measured."""

    source: Model
    prepared: Model
    samples: Samples
    facts: SampleFacts
    labels: Path | None
    limit: TaskLimit
    max_drop: float | None
    measure: Callable[[Model], Prediction]
    fixes: tuple[Fix, ...]
    target: Target
    precision: Precision
    work: Path


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration must measure."""

    methods: tuple[str, ...]
    fitting: bool

    @staticmethod
    def of_method(method: str) -> "_Wanted":
        is_open = method in {"auto", "best"}
        return _Wanted(methods=AUTO_METHODS if is_open else (method,), fitting=is_open)

    @staticmethod
    def of_plan(plan: QuantPlan) -> "_Wanted":
        return _Wanted(methods=PLAIN_METHODS, fitting=plan.rounding != "nearest" or bool(plan.factors))


class QuantizeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to quantize: by a method of `plan_quantization`, or by the plan in a file.

    `state` is the file that a search goes on from, `cache` the folder where calibrations are kept. With `layers`
    each activation is also quantized alone.
    """

    method: str = "auto"
    plan: Path | None = None
    state: Path | None = None
    cache: Path | None = None
    layers: bool = False


def quantize_for(
    model: Path,
    data: Data,
    out: Path,
    recipe: Recipe,
    options: QuantizeOptions | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Writes the QDQ form of a model for the one target of the recipe.

    With `max_drop` in the recipe, plans are searched for until one meets it. `data.labels` holds the label of
    each sample, for the true drop by the metric of the recipe, or by top-1.

    Raises:
        EdgekitError: the model, the data, the recipe, the plan or the state is wrong, or the target takes no integers.
    """
    start, progress, how = time.monotonic(), progress or say_nothing, options or QuantizeOptions()
    given = None if how.plan is None else read_plan(how.plan)
    require_place(out)
    with work_folder() as work:
        job = _open_job(model, data, _with_precision(recipe, given), work)
        require_apart([out], [job.source.path, *(job.source.path.parent / name for name in job.source.external_files)])
        state = None if how.state is None else _open_state(job, how.state)
        if given is not None:
            require_origin(given, job.prepared, job.facts.sha256, job.target)
        wanted = _Wanted.of_method(how.method) if given is None else _Wanted.of_plan(given)
        wanted = msgspec.structs.replace(wanted, fitting=wanted.fitting or how.layers)
        calibration = _calibrate(job, wanted, how.cache, progress)
        searched: Searched | None = None
        if given is not None:
            chosen = adopt_plan(given, job.prepared, calibration, job.target)
        elif job.max_drop is None:
            chosen, searched = _plan(job, calibration, how.method, progress)
        else:
            searched = _search(job, calibration, job.max_drop / 100, state, progress)
            chosen = searched.chosen.plan
        with replacing_file(out) as temporary:
            progress("quantize")
            quantized = quantize_model(job.prepared, chosen, temporary)
            if searched is None:
                progress("measure")
            predicted = job.measure(quantized.model) if searched is None else searched.chosen.prediction
            move_data(temporary, out)
        if how.layers:
            progress("quantize each activation alone")
        layers = tuple(_describe_layers(job, calibration, chosen)) if how.layers else ()
    report = _report(job, calibration, chosen, quantized, predicted, searched, out, start)
    return msgspec.structs.replace(report, layers=layers)


def plan_for(
    model: Path,
    data: Data,
    recipe: Recipe,
    method: str = "auto",
    progress: Progress | None = None,
    *,
    cache: Path | None = None,
) -> QuantPlan:
    """Returns what quantizing a model for the one target of the recipe would do, without writing a model.

    Raises:
        EdgekitError: the model, the data or the recipe is wrong, or the target takes no integers.
    """
    with work_folder() as work:
        job = _open_job(model, data, recipe, work)
        progress = progress or say_nothing
        calibration = _calibrate(job, _Wanted.of_method(method), cache, progress)
        plan, _ = _plan(job, calibration, method, progress)
    return msgspec.structs.replace(plan, statistics="")


def _describe_calibration(calibration: Calibration) -> CalibrationReport:
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


def _describe_layers(job: _Job, calibration: Calibration, plan: QuantPlan) -> Iterator[ActivationReport]:
    seen = plan_calibration(job.prepared, plan, calibration).ranges["minmax"]
    plan = msgspec.structs.replace(plan, statistics=calibration.statistics)
    ranked = {error.name: error for error in rank_plan(job.prepared, plan)}
    for name in (name for name in plan.ranges if name in ranked):
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


def read_plan(path: Path) -> QuantPlan:
    """Returns the plan in a file.

    Raises:
        UsageError: the file cannot be read or holds no plan.
    """
    try:
        with path.open("rb") as stream:
            return msgspec.json.decode(stream.read(MAX_PLAN_BYTES), type=QuantPlan)
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}", hint="--plan takes a .json file") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"'{path}' is no plan: {error}", hint="make one: edgekit quantize --plan-only") from error


def _open_job(model: Path, data: Data, recipe: Recipe, work: Path) -> _Job:
    target = _one_target(recipe)
    precision = _choose_integers(target, recipe.precision)
    refuse_huge(model.name, measure_files(model))
    source = load_model(model)
    fixed = ready_model(source, work, recipe.dims)
    prepared = fixed.model
    every = load_samples(data.source, prepared.inputs, data.preprocess)
    samples = limit_samples(every, recipe.samples)
    limit = recipe.metric or TOP1
    labels = _read_labels(data.labels, limit, every, samples)
    return _Job(
        source=source,
        prepared=prepared,
        samples=samples,
        facts=check_samples(samples),
        labels=data.labels,
        limit=limit,
        max_drop=recipe.max_drop,
        measure=partial(predict_drop, prepared, samples=samples)
        if labels is None
        else partial(measure_drop, prepared, samples=samples, labels=labels, limit=limit),
        fixes=fixed.fixes,
        target=target,
        precision=precision,
        work=work,
    )


def _calibrate(job: _Job, wanted: _Wanted, cache: Path | None, progress: Progress) -> Calibration:
    return calibrate_model(
        job.prepared,
        job.samples,
        work=job.work / "calibration",
        methods=wanted.methods,
        fitting=wanted.fitting,
        cache=None if cache is None else CacheSettings(folder=cache, digests=job.facts.digests),
        progress=progress,
    )


def _one_target(recipe: Recipe) -> Target:
    targets = load_targets(recipe)
    if len(targets) != 1:
        names = ", ".join(target.name for target in targets)
        raise UsageError("a model is quantized for one target at a time", hint=f"name one of {names}")
    return targets[0]


def _with_precision(recipe: Recipe, plan: QuantPlan | None) -> Recipe:
    """Returns the recipe with the precision of a plan that is given.

    Raises:
        UsageError: the recipe wants another one.
    """
    if plan is None:
        return recipe
    if recipe.precision not in {"auto", plan.precision}:
        raise UsageError(f"the plan is of {plan.precision}", hint="leave --precision out, or plan again")
    return msgspec.structs.replace(recipe, precision=plan.precision)


def _read_labels(path: Path | None, limit: TaskLimit, every: Samples, samples: Samples) -> Sequence[Label] | None:
    if path is None:
        return None
    if samples.count < every.count:
        raise UsageError("--labels with --samples", hint="give as many samples as there are labels, or leave one out")
    return read_task_labels(path, find_metric(limit).labels, every)


def _choose_integers(target: Target, wanted: PrecisionChoice) -> Precision:
    """Returns the integer precision to quantize with."""
    if not any(precision.startswith("int") for precision in target.precisions):
        raise UsageError(
            f"target '{target.name}' takes no quantized model: {target.precision_reason}",
            hint=f"edgekit build MODEL --data DATA --target {target.name}, or edgekit convert MODEL --weights fp16",
        )
    return choose_precision(target, wanted)


def _plan(job: _Job, calibration: Calibration, method: str, progress: Progress) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan of a method, and what was tried where that took a search."""
    if method != "auto":
        return plan_quantization(job.prepared, calibration, job.target, job.precision, method=method), None
    return plan_sparingly(
        job.prepared, calibration, job.target, job.precision, job.measure, work=job.work, progress=progress
    )  # fmt: skip


def _open_state(job: _Job, path: Path) -> State:
    files = [] if job.labels is None else [job.labels, *sorted(job.labels.rglob("*"))]
    digests = "".join(digest_file(file) for file in files if file.is_file())
    labels = f"{job.limit} of {digest_bytes(digests.encode())}" if files else "none"
    return open_state(path, job.prepared, job.facts.sha256, job.target, job.precision, labels)


def _search(job: _Job, calibration: Calibration, max_drop: float, state: State | None, progress: Progress) -> Searched:
    goal = Goal(max_drop=max_drop, measure=job.measure)
    return search_quantization(
        job.prepared, calibration, job.target, job.precision, goal, work=job.work, state=state, progress=progress
    )  # fmt: skip


def _report(
    job: _Job, calibration: Calibration, plan: QuantPlan, quantized: QuantizedModel, predicted: Prediction,
    searched: Searched | None, out: Path, start: float,
) -> QuantizeReport:  # fmt: skip
    is_plain = job.max_drop is None and searched is not None and len(searched.trials) == 1
    trials = () if searched is None or is_plain else searched.trials
    return QuantizeReport(
        model=job.source.name,
        out=out,
        target=job.target.name,
        precision=plan.precision,
        samples=job.samples.count,
        data_warnings=warn_if_few(job.facts),
        calibration=_describe_calibration(calibration),
        fixes={fix.id: len(fix.nodes) for fix in job.fixes},
        size_before=job.source.size_bytes,
        size_after=quantized.size_after,
        quantized_nodes=quantized.quantized_nodes,
        float_nodes=quantized.float_nodes,
        predicted=predicted,
        steps=plan.judged,
        trials=tuple(
            TrialReport(
                step=trial.step,
                drop_estimate=trial.prediction.drop_estimate,
                sqnr_db=trial.prediction.sqnr_db,
                taken_macs=trial.taken_macs,
                integer_macs=trial.integer_macs,
            )
            for trial in trials
        ),
        max_drop=job.max_drop,
        met=searched is None or searched.met,
        goal_note="" if searched is None else searched.note,
        layers=(),
        seconds=round(time.monotonic() - start, 2),
        peak_rss_bytes=peak_rss_bytes(),
    )
