"""From a model to verified bundles: the only module that knows the order of the stages."""

import math
import shutil
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TypeVar

import msgspec

from edgekit._files import AnyPath, as_path, staged_entries, work_folder, write_file
from edgekit.bundle.golden import read_inputs
from edgekit.convert.convert import read_stamp
from edgekit.data.data_check import warn_if_few
from edgekit.devices.android.android import NNAPI
from edgekit.devices.find import DeviceChoice, NamedDevice, choose_here
from edgekit.devices.parallel import in_background
from edgekit.errors import EdgekitError, ModelError, quote_error
from edgekit.inspect.inspect import warn_if_random
from edgekit.jobs.build_inputs import BuildCache, BuildInputs, BuildJob, calibrate_inputs, read_build_inputs
from edgekit.jobs.check import find_fixed_axes, list_versions
from edgekit.jobs.forecast import forecast_goal
from edgekit.jobs.target_bundle import BuiltBundle, ReadyBundle, ready_bundles, write_ready
from edgekit.machine import own_peak_bytes, release_memory
from edgekit.model.model import Model, load_model
from edgekit.progress import Budget, Progress, Stopwatch, say_nothing
from edgekit.quantize import Calibration
from edgekit.recipe import Data, Recipe, load_targets
from edgekit.report.html import draw_worst, render_page
from edgekit.report.summary import BuildReport, BundleSummary
from edgekit.serialize import fill, to_json
from edgekit.target import Target
from edgekit.verify.attribute import attribute_loss
from edgekit.verify.on_devices import find_devices
from edgekit.verify.report import VerifyReport, write_report
from edgekit.verify.run import verify_bundle

# While a target is planned, one bundle is written and verified in the background: planning keeps a core busy, and needs
# the memory that a second emulator would take. When nothing is left to plan, two are verified at once.
_AT_ONCE = 1
_MORE_AT_THE_END = 1
FAULT = "edgekit ended in a fault of its own"
"""How the failure of a bundle begins if an exception caused it that is no EdgekitError."""


class _Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that was written, or the error why it was not, and the report of its verification, if there was one."""

    built: BuiltBundle | EdgekitError
    report: VerifyReport | None = None


_Candidates = Generator[ReadyBundle, str]
_Made = TypeVar("_Made")


def build(
    model: AnyPath,
    data: Data,
    out: AnyPath,
    recipe: Recipe | None = None,
    *,
    verify: bool = True,
    cache: AnyPath | BuildCache | None = None,
    time_budget_s: float | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Makes a bundle of a model for each target, verifies it, and writes both and a report into `out`.

    `cache` is a folder that keeps the calibration for the next build of the same model and data; a `BuildCache` that
    several builds share keeps more. `time_budget_s` limits planning and verifying: each target gets an equal share of
    the time that is left when it begins, spends at most half of it on its plan, and is verified with fewer samples if
    the rest is too short. Notes say what was left out. Preparing, calibrating, writing and starting a device are not
    limited.

    A target that cannot be built or does not pass is a finding of the report. Bundles are written whole or not at all.

    Raises:
        EdgekitError: the model, the data, the recipe or `out` is wrong; then `out` is unchanged.
    """
    model, out = as_path(model), as_path(out)
    if not isinstance(cache, BuildCache):
        cache = BuildCache(folder=None if cache is None else as_path(cache))
    start, watch = time.monotonic(), Stopwatch()
    watch.begin("prepare")
    recipe, progress = choose_here(recipe or Recipe()), progress or say_nothing
    targets, original = load_targets(recipe), load_model(model)
    # First, so that a misspelled device name is reported at once.
    forecast = forecast_goal(model, recipe, targets)
    # Everything is written into a folder beside `out` and moved at the end: a failed build leaves `out` unchanged.
    with work_folder() as work, staged_entries(out) as staging:
        deadline = start + (math.inf if time_budget_s is None else time_budget_s)
        job = BuildJob(
            recipe=recipe,
            targets=targets,
            work=work,
            staging=staging,
            cache=cache,
            progress=progress,
            origin=original.sha256,
            end=deadline,
            watch=watch,
            memo=msgspec.structs.replace(cache.memo, budget=Budget()),
        )
        inputs = read_build_inputs(original, data, job)
        calibration, results = _build_all(inputs, job, verify=verify)
        facts, feeds = inputs.samples.facts, inputs.state.feeds
        warnings = [*warn_if_random(inputs.source), *(warn_if_few(facts) if calibration else facts.warnings)]
        if feeds and inputs.state.steps == 1:
            pairs = ", ".join(f"'{output}' feeds '{name}'" for name, output in list(feeds.items())[:4])
            first = f"the model has state ({pairs}), and each sample ran as a first step"
            warnings.insert(0, f"{first}: --steps N runs sequences of N")
        if isinstance(calibration, Calibration):
            warnings += calibration.notes
        report = BuildReport(
            model=inputs.source.name,
            sha256=job.origin,
            verified=verify,
            calibration_samples=inputs.samples.calibration.count,
            data_warnings=tuple(warnings),
            fixed_axes=find_fixed_axes(inputs.source, targets),
            golden_samples=inputs.golden.samples,
            fixes={fix.id: len(fix.nodes) for fix in inputs.fixes},
            bundles=tuple(_summarize(inputs.source, *each, out) for each in zip(targets, results, strict=True)),
            seconds=round(time.monotonic() - start, 2),
            stages=job.watch.end(),
            peak_rss_bytes=own_peak_bytes(),
            versions=list_versions(),
            report=out / "report.html",
            forecast=forecast,
        )
        write_file(staging / "report.json", to_json(report).encode())
        pictures = {
            target.name: draw_worst(read_inputs(result.built.bundle.golden), result.report)
            for target, result in zip(targets, results, strict=True)
            if isinstance(result.built, BuiltBundle) and result.report is not None
        }
        write_file(staging / "report.html", render_page(report, pictures).encode())
    return report


def _build_all(
    inputs: BuildInputs, job: BuildJob, *, verify: bool
) -> tuple[Calibration | ModelError | None, list[_Finished]]:
    """Returns the calibration, None if no target needs one, and the result for each target.

    A bundle is written and verified while the next target is planned. Targets that are not quantized come first, before
    the calibration, so that their verification starts early: most emulators keep only one core busy.
    """
    results: dict[str, _Finished] = {}
    verifying: dict[str, tuple[Future[_Finished], _Candidates, Target]] = {}
    forms = {target.name: inputs.choose_form(target) for target in job.targets}
    order = sorted(job.targets, key=lambda each: (job.plans_for(each, forms[each.name].floats), *_rank(each)))
    write_lock = Lock()
    finish = partial(_finish, job=job, verify=verify, write_lock=write_lock)
    planned_share = 1 / 2 if verify else 1.0
    with in_background(finish, _AT_ONCE, _MORE_AT_THE_END) as begin:
        for targets_left, target in zip(range(len(order), 0, -1), order, strict=True):
            form = forms[target.name]
            if job.plans_for(target, form.floats):
                # Calibrating while layers are compared would take too much memory.
                with write_lock:
                    calibrated = calibrate_inputs(form, job)
                forms |= {name: calibrated for name, each in forms.items() if each.is_quantized == form.is_quantized}
            limited = job.limit_planning(planned_share * job.seconds_left(targets_left))
            candidates = ready_bundles(forms[target.name], target, limited, job.work / target.name)
            ready = _ready_target(candidates, target, job, "")
            # Freed memory would otherwise stay with this process while emulators need it.
            release_memory()
            if isinstance(ready, ReadyBundle):
                verifying[target.name] = begin((ready, targets_left)), candidates, target
            else:
                results[target.name] = _Finished(built=ready)
        job.watch.begin("verify" if verify else "write")
    for name, (end, candidates, target) in verifying.items():
        finished = end.result()
        # While a device refuses to make a session of a bundle, the next best one is built.
        while isinstance(finished.built, BuiltBundle) and finished.report is not None:
            # A device that crashed reports no version of ONNX Runtime: that is no refusal.
            responsive = (run for run in finished.report.runs if not run.load_ms and "onnxruntime" in run.versions)
            if (refusal := next((run.failure for run in responsive if run.failure), None)) is None:
                break
            shutil.rmtree(finished.built.bundle.folder)
            ready = _ready_target(candidates, target, job, refusal)
            if isinstance(ready, ReadyBundle):
                finished = _finish((ready, 1), job, verify=True, write_lock=Lock())
            else:
                finished = _Finished(built=ready)
        results[name] = finished
    calibration = next((form.calibration for form in forms.values() if form.calibration is not None), None)
    return calibration, [results[target.name] for target in job.targets]


def _rank(target: Target) -> tuple[bool, bool]:
    """Returns a key that sorts quantized targets so that two cores are busy for most of the time.

    Targets that a vendor's simulator verifies come first: it keeps one core busy for the longest time, while the others
    are planned. NNAPI comes last, since it is verified on two devices at once.
    """
    return target.provider == NNAPI, not any(planned.form == "context" for planned in target.verification)


def _ready_target(candidates: _Candidates, target: Target, job: BuildJob, refusal: str) -> ReadyBundle | EdgekitError:
    """Returns the best bundle of a target, or with `refusal`, a device's reason against the last one, the next best."""
    job.watch.begin("quantize", target.name)
    job.progress(f"build for {target.name}")
    return _catch_faults(partial(candidates.send, refusal) if refusal else partial(next, candidates), target, job)


def _finish(each: tuple[ReadyBundle, int], job: BuildJob, *, verify: bool, write_lock: Lock) -> _Finished:
    """Writes a bundle and verifies it, in an equal share of the time that is left; `each` has the number of shares."""
    ready, targets_left = each
    target = ready.contents.target
    # Comparing layers takes the most memory of a build: one bundle at a time.
    with write_lock:
        built = _catch_faults(partial(write_ready, ready), target, job)
    if isinstance(built, EdgekitError) or not verify:
        return _Finished(built=built)
    report = _catch_faults(partial(_verify, built, job, targets_left), target, job, raises=True)
    if isinstance(report, EdgekitError):
        # The bundle is whole, and stays not verified.
        notes = (*built.notes, f"it was not verified: {report}")
        return _Finished(built=msgspec.structs.replace(built, notes=notes))
    return _Finished(built=built, report=report)


def _catch_faults(
    make: Callable[[], _Made], target: Target, job: BuildJob, *, raises: bool = False
) -> _Made | EdgekitError:
    """Returns the result of a step for one target, or its error, so that a fault does not stop the other targets.

    An exception that is no EdgekitError is a fault of edgekit: a file for a bug report is written beside the bundles.
    With `raises` an EdgekitError is raised again.
    """
    try:
        return make()
    except EdgekitError as error:
        if raises:
            raise
        return error
    except Exception as error:  # noqa: BLE001 - see above
        name = f"fault-{target.name}.txt"
        facts = {"target": target.name, "settings": target.settings, "model sha256": job.origin, **list_versions()}
        lines = [*(f"{key}: {value}" for key, value in facts.items()), "", *traceback.format_exception(error)]
        write_file(job.staging / name, "\n".join(lines).encode())
        hint = f"send '{name}' of this build to its makers: it holds no weights and no data"
        return ModelError(f"{FAULT}, {type(error).__name__}: {quote_error(error)}", hint=hint)


def _verify(result: BuiltBundle, job: BuildJob, targets_left: int) -> VerifyReport:
    devices = find_devices(result.bundle, result.contents.target, DeviceChoice())
    if job.end < math.inf:
        seconds = round(job.seconds_left(targets_left), 1)
        devices = [NamedDevice(label=device.name, device=device, budget_s=seconds) for device in devices]
    manifest = result.bundle.manifest
    # A bundle's ONNX file, which ran for its self-test, mostly has the graph of the last step: the outputs are the
    # same. One in half precision has another graph.
    has_same_graph = "onnx" in manifest.forms and manifest.precision != "fp16"
    stamp = read_stamp(load_model(result.bundle.find_model("onnx"))) if has_same_graph else ""
    # The float model is the same for most targets; a quantized model belongs to one target.
    known = {
        step: result.outputs if model.sha256 == stamp else job.cache.find_outputs(model.sha256, stays=step == "prepare")
        for step, model in result.models.items()
    }
    report = verify_bundle(
        result.bundle,
        devices,
        task=result.contents.target.thresholds.task,
        float_model=result.models["prepare"].path,
        known=result.outputs,
        progress=job.progress,
    )
    report = attribute_loss(result.bundle, report, result.models, known)
    # The freed memory is given back before the next verification in this process.
    release_memory()
    write_report(result.bundle, report)
    return report


def _summarize(source: Model, target: Target, finished: _Finished, out: Path) -> BundleSummary:
    result = finished.built
    if isinstance(result, EdgekitError):
        return BundleSummary(target=target.name, title=target.title, failure=str(result))
    manifest = result.bundle.manifest
    return fill(
        BundleSummary,
        manifest,
        target,
        path=out / result.bundle.folder.name,
        notes=result.notes,
        form_reason=target.conversion.reason,
        sha256=result.bundle.sha256,
        files={name: entry.sha256 for name, entry in manifest.files.items()},
        size_before=source.size_bytes,
        size_after=manifest.model_size_bytes,
        quantized_nodes=0 if result.quantized is None else result.quantized.quantized_nodes,
        float_nodes=0 if result.quantized is None else len(result.quantized.float_nodes),
        census={form: dict(counts) for form, counts in result.converted.census.items()},
        check=result.contents.check,
        verify=finished.report,
    )
