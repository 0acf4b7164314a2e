"""From a model to verified bundles: the only module that knows the order of the stages."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import staged_entries, work_folder, write_file
from edgekit.bundle.describe import Contents
from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden.golden import Golden, make_golden, read_inputs
from edgekit.bundle.golden.recorded import Recorded, adopt_reference
from edgekit.bundle.manifest.manifest import Ancestry
from edgekit.bundle.opening import open_recorded
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.convert.convert import ConvertedModel, convert_model
from edgekit.data.data_check import SampleFacts, check_samples, refusing_bad, warn_if_few
from edgekit.data.images import Preprocess
from edgekit.data.labels import read_task_labels
from edgekit.data.samples import Samples, limit_samples, load_samples, select_samples, spread_indices
from edgekit.devices.lab import run_together
from edgekit.devices.register import DeviceChoice
from edgekit.errors import DataError, EdgekitError, MissingExtraError, ModelError, RuntimeRefusal, UsageError
from edgekit.jobs.prepare import list_versions, peak_rss_bytes
from edgekit.machine import release_memory
from edgekit.model.model import Model, find_integer_ops, load_model, read_proto
from edgekit.plain import to_json
from edgekit.prepare import ready_model
from edgekit.prepare.fix import Fix
from edgekit.prepare.weights.float_weights import keep_float_weights
from edgekit.progress import Progress, say_nothing
from edgekit.quantize import Calibration, QuantizedModel, calibrate_model, quantize_model
from edgekit.quantize.accuracy.predict import predict_drop
from edgekit.quantize.calibration.cache import CacheSettings
from edgekit.quantize.mixed_precision.goal_search import Goal, plan_sparingly, search_quantization
from edgekit.quantize.weight_only.fp16 import convert_to_fp16
from edgekit.recipe import Data, Recipe, choose_precision, load_targets
from edgekit.report.pages.charts import Picture, draw_worst
from edgekit.report.pages.html import render_build
from edgekit.report.summary import BuildReport, BundleSummary
from edgekit.target import Precision, Target
from edgekit.verify.causes.attribute import explain_report
from edgekit.verify.causes.fingerprints import fingerprint_model
from edgekit.verify.on_devices import find_devices
from edgekit.verify.report import Step, VerifyReport
from edgekit.verify.run import verify_bundle, write_report
from edgekit.verify.tasks.accuracy import refuse_impossible
from edgekit.verify.tasks.tasks import find_metric

GOLDEN_SHARE = 4
"""Without data of its own for verification, one sample in four is kept from calibration and verifies."""
MAX_GOLDEN_SAMPLES = 64


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a build was asked for, and where it works: `work` is gone afterwards, `staging` becomes the result."""

    recipe: Recipe
    targets: tuple[Target, ...]
    work: Path
    staging: Path
    cache: Path | None
    progress: Progress

    def wants_integers(self) -> bool:
        return any(choose_precision(target, self.recipe.precision).startswith("int") for target in self.targets)


class _Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """The model made ready, its samples split, and what the float model makes of the golden ones.

    `calibration` is None where nothing is to be quantized, and an error where no node can be quantized.
    """

    source: Model
    prepared: Model
    fixes: tuple[Fix, ...]
    is_quantized: bool
    samples: Samples
    facts: SampleFacts
    golden: Golden
    calibration: Calibration | ModelError | None
    preprocess: Preprocess | None
    recorded: Mapping[str, Recorded]


class _Built(msgspec.Struct, frozen=True, kw_only=True):
    bundle: Bundle
    target: Target
    check: CheckReport
    models: dict[Step, Model]
    converted: ConvertedModel
    quantized: QuantizedModel | None
    notes: tuple[str, ...]


def build(
    model: Path,
    data: Data,
    out: Path,
    recipe: Recipe | None = None,
    *,
    verify: bool = True,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Makes a bundle of a model for each target, verifies it, and writes both and a report into `out`.

    `cache` is a folder where the calibration is kept, for the next build of the same model and data.

    A target that cannot be built or does not pass is a finding of the report. Bundles appear whole or not at all.

    Raises:
        EdgekitError: the model, the data, the recipe or `out` is wrong; then `out` is as it was.
    """
    start = time.monotonic()
    recipe, progress = recipe or Recipe(), progress or say_nothing
    targets = load_targets(recipe)
    source = load_model(model)
    with work_folder() as work, staged_entries(out) as staging:
        job = _Job(recipe=recipe, targets=targets, work=work, staging=staging, cache=cache, progress=progress)
        inputs = _read_inputs(source, data, job)
        built = [_build_target(inputs, target, job) for target in targets]
        reports = _verify_all(built, progress) if verify else {}
        report = BuildReport(
            model=source.name,
            sha256=source.sha256,
            verified=verify,
            calibration_samples=inputs.samples.count,
            data_warnings=_list_doubts(inputs),
            golden_samples=inputs.golden.samples,
            fixes={fix.id: len(fix.nodes) for fix in inputs.fixes},
            bundles=tuple(
                _summarize(source, target, result, reports.get(target.name), out)
                for target, result in zip(targets, built, strict=True)
            ),
            seconds=round(time.monotonic() - start, 2),
            peak_rss_bytes=peak_rss_bytes(),
            versions=list_versions(),
            report=out / "report.html",
        )
        write_file(staging / "report.json", to_json(report).encode())
        write_file(staging / "report.html", render_build(report, _draw_worst(built, reports)).encode())
    return report


def _list_doubts(inputs: _Inputs) -> tuple[str, ...]:
    warnings = warn_if_few(inputs.facts) if inputs.calibration else inputs.facts.warnings
    return (*warnings, *inputs.calibration.notes) if isinstance(inputs.calibration, Calibration) else warnings


def _draw_worst(
    built: Sequence[_Built | EdgekitError], reports: Mapping[str, VerifyReport]
) -> dict[str, tuple[Picture, ...]]:
    whole = [result for result in built if isinstance(result, _Built) and result.target.name in reports]
    return {
        result.target.name: draw_worst(read_inputs(result.bundle.golden), reports[result.target.name])
        for result in whole
    }


def _read_inputs(source: Model, data: Data, job: _Job) -> _Inputs:
    metric = next((target.thresholds.task for target in job.targets if target.thresholds.task), None)
    if metric is not None and (data.labels is None or data.evaluation is None):
        raise UsageError(f"metric '{metric.name}' needs labels", hint="give --eval DATA with --labels FILE")
    job.progress("prepare the model")
    fixed = ready_model(source, job.work, job.recipe.dims)
    prepared = fixed.model
    job.progress("read the samples")
    samples = load_samples(data.source, prepared.inputs, data.preprocess)
    if data.evaluation is None:
        samples, held_out = _hold_out(samples)
    else:
        held_out = load_samples(data.evaluation, prepared.inputs, data.preprocess)
    samples = limit_samples(samples, job.recipe.samples)
    facts = check_samples(samples)
    kind = "class" if metric is None else find_metric(metric).labels
    labels = None if data.labels is None else read_task_labels(data.labels, kind, held_out)
    job.progress("run the float model")
    golden = make_golden(source, refusing_bad(held_out), job.work / "golden", labels=labels)
    refuse_impossible(golden)
    targets = [target.name for target in job.targets]
    recorded = {} if data.golden is None else open_recorded(data.golden, source.name, targets)
    for bundle in recorded.values():
        adopt_reference(golden, bundle)
    is_quantized = bool(find_integer_ops(read_proto(prepared, weights=False)))
    return _Inputs(
        source=source,
        prepared=prepared,
        fixes=fixed.fixes,
        is_quantized=is_quantized,
        samples=samples,
        facts=facts,
        golden=golden,
        calibration=None if is_quantized else _calibrate(prepared, samples, facts, job),
        preprocess=data.preprocess,
        recorded=recorded,
    )


def _hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """Returns the samples to calibrate with and those to verify with: apart, unless there is only one."""
    if samples.count == 1:
        return samples, samples
    kept = spread_indices(samples.count, min(MAX_GOLDEN_SAMPLES, max(1, samples.count // GOLDEN_SHARE)))
    others = sorted(set(range(samples.count)) - set(kept))
    return select_samples(samples, others), select_samples(samples, kept)


def _calibrate(prepared: Model, samples: Samples, facts: SampleFacts, job: _Job) -> Calibration | ModelError | None:
    if not job.wants_integers():
        return None
    cache = None if job.cache is None else CacheSettings(folder=job.cache, digests=facts.digests)
    try:
        return calibrate_model(prepared, samples, work=job.work / "calibration", cache=cache, progress=job.progress)
    except ModelError as error:
        return error


def _build_target(inputs: _Inputs, target: Target, job: _Job) -> _Built | EdgekitError:
    job.progress(f"build for {target.name}")
    try:
        return _make_bundle(inputs, target, job, job.work / target.name)
    except EdgekitError as error:
        return error


def _make_bundle(inputs: _Inputs, target: Target, job: _Job, work: Path) -> _Built:
    work.mkdir()
    precision, notes = choose_precision(target, job.recipe.precision), list[str]()
    quantized: QuantizedModel | None = None
    if inputs.is_quantized:
        precision = "int8"
        notes.append("the model is quantized already: taken as it is")
    elif precision.startswith("int"):
        try:
            quantized = _quantize(inputs, target, precision, job, notes)
        except ModelError as error:
            precision = _fall_back(error, target, job, notes)
    model = inputs.prepared if quantized is None else quantized.model
    check = check_model(model, target)
    ort_source: Model | None = None
    if precision == "fp16":
        try:
            ort_source, model = model, _halve(model, check, work / "half.onnx", notes)
            check = check_model(model, target)
        except (ModelError, RuntimeRefusal) as error:
            precision = _fall_back(error, target, job, notes)
    target, told = keep_float_weights(target, read_proto(model, weights=False).graph)
    notes += told
    converted = _convert(_converter(model, ort_source, inputs, work / "converted"), target, notes)
    contents = _collect(inputs, target, precision, quantized, converted, check, job.recipe)
    models: dict[Step, Model] = {"prepare": inputs.prepared}
    if quantized is not None:
        models["quantize"] = quantized.model
    return _Built(
        bundle=write_bundle(contents, job.staging / f"{inputs.source.name}-{target.name}"),
        target=target,
        check=check,
        models=models,
        converted=converted,
        quantized=quantized,
        notes=tuple(notes),
    )


def _collect(
    inputs: _Inputs,
    target: Target,
    precision: Precision,
    quantized: QuantizedModel | None,
    converted: ConvertedModel,
    check: CheckReport,
    recipe: Recipe,
) -> Contents:
    return Contents(
        source=inputs.source,
        target=target,
        precision=precision,
        files={form: tuple(converted.folder / name for name in names) for form, names in converted.files.items()},
        golden=inputs.golden,
        check=check,
        ancestry=Ancestry(
            source=inputs.source.sha256,
            prepared=inputs.prepared.sha256,
            quantized=None if quantized is None else quantized.model.sha256,
            data=None if quantized is None else inputs.facts.sha256,
        ),
        versions={**list_versions(), **converted.versions},
        recipe=recipe,
        preprocess=inputs.preprocess,
        recorded=inputs.recorded.get(target.name),
        layers=_fingerprint(converted),
    )


def _fingerprint(converted: ConvertedModel) -> bytes | None:
    names = converted.files.get("onnx")
    return fingerprint_model(load_model(converted.folder / names[0])) if names else None


def _fall_back(error: EdgekitError, target: Target, job: _Job, notes: list[str]) -> Precision:
    """Returns fp32 where the precision was left to edgekit, and says why in `notes`; raises the error otherwise."""
    if job.recipe.precision != "auto" or "fp32" not in target.precisions:
        raise error
    notes.append(f"built as fp32, because {error.message}")
    return "fp32"


def _quantize(inputs: _Inputs, target: Target, precision: Precision, job: _Job, notes: list[str]) -> QuantizedModel:
    if not isinstance(inputs.calibration, Calibration):
        raise inputs.calibration or DataError("there is no calibration", hint="give --data")
    model, known, out = inputs.prepared, inputs.calibration, job.work / target.name / "quantized.onnx"
    measure = partial(predict_drop, model, samples=inputs.samples)
    if job.recipe.max_drop is None:
        plan, _ = plan_sparingly(model, known, target, precision, measure, work=out.parent, progress=job.progress)
        return quantize_model(model, plan, out)
    goal = Goal(max_drop=job.recipe.max_drop / 100, measure=measure)
    searched = search_quantization(model, known, target, precision, goal, work=out.parent, progress=job.progress)
    if not searched.met:
        notes.append(f"no plan is expected to drop at most {job.recipe.max_drop:g} points; this is the best")
    return quantize_model(model, searched.chosen.plan, out)


def _halve(prepared: Model, check: CheckReport, out: Path, notes: list[str]) -> Model:
    left = [node.name for node in check.node_list if not node.taken]
    halved = convert_to_fp16(prepared, left, out)
    if halved.clamped:
        notes.append(f"weights beyond 65504 were clamped to fp16's range in {', '.join(halved.clamped[:5])}")
    return halved.model


def _converter(model: Model, ort_source: Model | None, inputs: _Inputs, out: Path) -> Callable[..., ConvertedModel]:
    golden = read_inputs(inputs.golden)
    return partial(convert_model, model, out=out, ort_source=ort_source, origin=inputs.source, samples=golden)


def _convert(convert: Callable[..., ConvertedModel], target: Target, notes: list[str]) -> ConvertedModel:
    """Converts to every form, or to those that need no absent extra: then `notes` says what is missing."""
    try:
        return convert(target=target)
    except MissingExtraError as error:
        forms = tuple(form for form in target.conversion.forms if form != "context")
        if not forms:
            raise
        notes.append(f"no context model: {error}")
        conversion = msgspec.structs.replace(target.conversion, forms=forms)
        return convert(target=msgspec.structs.replace(target, conversion=conversion))


def _verify_all(built: Sequence[_Built | EdgekitError], progress: Progress) -> dict[str, VerifyReport]:
    """Verifies bundles two at a time: an emulator mostly keeps one core busy."""
    whole = [result for result in built if isinstance(result, _Built)]

    def verify(result: _Built) -> VerifyReport:
        devices = find_devices(result.bundle, result.target, DeviceChoice())
        float_model = result.models["prepare"].path
        report = verify_bundle(result.bundle, devices, float_model=float_model, progress=progress)
        report = explain_report(result.bundle, report, result.models)
        release_memory()
        write_report(result.bundle, report)
        return report

    reports = run_together([partial(verify, result) for result in whole], at_once=2)
    return {result.target.name: report for result, report in zip(whole, reports, strict=True)}


def _summarize(
    source: Model, target: Target, result: _Built | EdgekitError, verify: VerifyReport | None, out: Path
) -> BundleSummary:
    if isinstance(result, EdgekitError):
        return BundleSummary(target=target.name, title=target.title, failure=str(result))
    manifest = result.bundle.manifest
    return BundleSummary(
        target=target.name,
        title=target.title,
        path=out / result.bundle.folder.name,
        notes=result.notes,
        precision=manifest.precision,
        precision_reason=target.precision_reason,
        forms=manifest.forms,
        form_reason=target.conversion.reason,
        sha256=result.bundle.sha256,
        files={name: entry.sha256 for name, entry in manifest.files.items()},
        size_before=source.size_bytes,
        size_after=manifest.model_size_bytes,
        quantized_nodes=0 if result.quantized is None else result.quantized.quantized_nodes,
        float_nodes=0 if result.quantized is None else len(result.quantized.float_nodes),
        census={form: dict(counts) for form, counts in result.converted.census.items()},
        check=result.check,
        verify=verify,
    )
