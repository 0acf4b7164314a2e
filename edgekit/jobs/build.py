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
from edgekit.bundle.golden import KnownOutputs, read_inputs
from edgekit.convert.convert import read_stamp
from edgekit.data.data_check import warn_if_few
from edgekit.devices.android.android import NNAPI
from edgekit.devices.parallel import running_behind
from edgekit.devices.register import DeviceChoice, NamedDevice, choose_here
from edgekit.errors import EdgekitError, ModelError, quote_error
from edgekit.jobs.build_inputs import BuildInputs, BuildJob, Kept, calibrate_inputs, read_build_inputs
from edgekit.jobs.check import find_neglected_axes, list_versions
from edgekit.jobs.forecast import forecast_goal
from edgekit.jobs.target_bundle import BuiltBundle, ReadyBundle, ready_bundles, write_ready
from edgekit.machine import own_peak_bytes, release_memory
from edgekit.model.model import Model, load_model
from edgekit.progress import Budget, Progress, Stopwatch, say_nothing
from edgekit.quantize import Calibration
from edgekit.recipe import Data, Recipe, load_targets
from edgekit.report.charts import draw_worst
from edgekit.report.html import render_build
from edgekit.report.summary import BuildReport, BundleSummary
from edgekit.serialize import to_json
from edgekit.target import Target
from edgekit.verify.attribute import attribute_loss
from edgekit.verify.on_devices import find_devices
from edgekit.verify.report import Step, VerifyReport, write_report
from edgekit.verify.run import verify_bundle

# While a target is planned, one bundle is written and verified beside it: planning keeps a core busy, and needs the
# memory that a second emulator would take. When nothing is left to plan, two are verified at once.
_BESIDE = 1
_MORE_AFTERWARDS = 1


class _Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that was written, or why it was not, and what verifying it found."""

    built: BuiltBundle | EdgekitError
    report: VerifyReport | None = None


_Ladder = Generator[ReadyBundle, str]
_Made = TypeVar("_Made")


def build(
    model: AnyPath,
    data: Data,
    out: AnyPath,
    recipe: Recipe | None = None,
    *,
    verify: bool = True,
    cache: AnyPath | Kept | None = None,
    time_budget_s: float | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Makes a bundle of a model for each target, verifies it, and writes both and a report into `out`.

    `cache` is a folder that keeps the calibration for the next build of the same model and data; a `Kept` that several
    builds share keeps more. `time_budget_s` limits planning and verifying: each target gets an equal share of what is
    left when it begins, spends at most half of it on its plan, and verifies with fewer samples where the rest is too
    short. Notes tell what was left out. Preparing, calibrating, writing and starting a device are not limited.

    A target that cannot be built or does not pass is a finding of the report. Bundles appear whole or not at all.

    Raises:
        EdgekitError: the model, the data, the recipe or `out` is wrong; then `out` is as it was.
    """
    model, out = as_path(model), as_path(out)
    kept = cache if isinstance(cache, Kept) else Kept(folder=None if cache is None else as_path(cache))
    start, watch = time.monotonic(), Stopwatch()
    watch.begin("prepare")
    recipe, progress = choose_here(recipe or Recipe()), progress or say_nothing
    targets, given = load_targets(recipe), load_model(model)
    # First, so that a misspelled device name is reported before all the work.
    told = forecast_goal(model, recipe, targets)
    # Everything is made in a folder beside `out` and moved at the end: a build that fails leaves `out` as it was.
    with work_folder() as work, staged_entries(out) as staging:
        end = start + (time_budget_s or math.inf)
        job = BuildJob(
            recipe=recipe,
            targets=targets,
            work=work,
            staging=staging,
            kept=kept,
            progress=progress,
            origin=given.sha256,
            end=end,
            watch=watch,
            memo=msgspec.structs.replace(kept.memo, budget=Budget()),
        )
        inputs, ends = _build_all(read_build_inputs(given, data, job), job, verify=verify)
        facts, feeds = inputs.samples.facts, inputs.state.feeds
        warnings = list(warn_if_few(facts) if inputs.calibration else facts.warnings)
        if feeds and inputs.state.steps == 1:
            pairs = ", ".join(f"'{output}' feeds '{name}'" for name, output in list(feeds.items())[:4])
            said = f"the model has state ({pairs}), and each sample ran as a first step: --steps N runs sequences of N"
            warnings.insert(0, said)
        if isinstance(inputs.calibration, Calibration):
            warnings += inputs.calibration.notes
        report = BuildReport(
            model=inputs.source.name,
            sha256=job.origin,
            verified=verify,
            calibration_samples=inputs.samples.calibration.count,
            data_warnings=tuple(warnings),
            fixed_axes=find_neglected_axes(inputs.source, targets),
            golden_samples=inputs.golden.samples,
            fixes={fix.id: len(fix.nodes) for fix in inputs.fixes},
            bundles=tuple(_summarize(inputs.source, *each, out) for each in zip(targets, ends, strict=True)),
            seconds=round(time.monotonic() - start, 2),
            stages=job.watch.end(),
            peak_rss_bytes=own_peak_bytes(with_child=True),
            versions=list_versions(),
            report=out / "report.html",
            forecast=told,
        )
        write_file(staging / "report.json", to_json(report).encode())
        pictures = {
            target.name: draw_worst(read_inputs(end.built.bundle.golden), end.report)
            for target, end in zip(targets, ends, strict=True)
            if isinstance(end.built, BuiltBundle) and end.report is not None
        }
        write_file(staging / "report.html", render_build(report, pictures).encode())
    return report


def _build_all(inputs: BuildInputs, job: BuildJob, *, verify: bool) -> tuple[BuildInputs, list[_Finished]]:
    """Returns the inputs, calibrated if a target needs that, and what was built for each target.

    A bundle is written and verified while the next target is planned. Targets without a plan come first, before the
    calibration: their emulators, most of which keep one core busy, start early.
    """
    ends: dict[str, _Finished] = {}
    begun: dict[str, tuple[Future[_Finished], _Ladder, Target]] = {}
    order = sorted(job.targets, key=lambda target: (job.plans_for(target, inputs.floats), *_rank(target)))
    writing = Lock()
    finish = partial(_finish, job=job, verify=verify, writing=writing)
    planned_share = 1 / 2 if verify else 1.0
    with running_behind(finish, _BESIDE, _MORE_AFTERWARDS) as begin:
        for waiting, target in zip(range(len(order), 0, -1), order, strict=True):
            if job.plans_for(target, inputs.floats):
                # Beside layers that are compared, it would need the most memory of a build.
                with writing:
                    inputs = calibrate_inputs(inputs, job)
            limited = job.limit_planning(planned_share * job.seconds_left(waiting))
            ladder = ready_bundles(inputs, target, limited, job.work / target.name)
            made = _ready_target(ladder, target, job)
            # Freed memory would otherwise stay with this process while emulators need it.
            release_memory()
            if isinstance(made, ReadyBundle):
                begun[target.name] = begin((made, waiting)), ladder, target
            else:
                ends[target.name] = _Finished(built=made)
        job.watch.begin("verify" if verify else "write")
    ends |= {name: _step_down(end.result(), ladder, target, job) for name, (end, ladder, target) in begun.items()}
    return inputs, [ends[target.name] for target in job.targets]


def _rank(target: Target) -> tuple[bool, bool]:
    """Returns a key that sorts targets with a plan so that both cores have work for most of the time.

    Targets that a vendor's simulator verifies come first: it keeps one core busy for the longest time, while the others
    are planned. NNAPI comes last, since it is verified on two devices at once.
    """
    return target.provider == NNAPI, not any(planned.form == "context" for planned in target.verification)


def _ready_target(ladder: _Ladder, target: Target, job: BuildJob, refusal: str = "") -> ReadyBundle | EdgekitError:
    """Returns the best bundle of a target, or the next one where a device refused what came before."""
    job.watch.begin("quantize", target.name)
    job.progress(f"build for {target.name}")
    return _guard(partial(ladder.send, refusal) if refusal else partial(next, ladder), target, job)


def _step_down(end: _Finished, ladder: _Ladder, target: Target, job: BuildJob) -> _Finished:
    """Builds the next best bundle for as long as the device refuses to make a session; returns the last one built."""
    while isinstance(end.built, BuiltBundle) and end.report is not None:
        # A device that died said nothing of itself, not even its ONNX Runtime: that is no refusal.
        asked = (run for run in end.report.runs if not run.load_ms and "onnxruntime" in run.versions)
        refusal = next((run.failure for run in asked if run.failure), None)
        if refusal is None:
            break
        shutil.rmtree(end.built.bundle.folder)
        ready = _ready_target(ladder, target, job, refusal)
        if isinstance(ready, EdgekitError):
            return _Finished(built=ready)
        end = _finish((ready, 1), job, verify=True, writing=Lock())
    return end


def _finish(each: tuple[ReadyBundle, int], job: BuildJob, *, verify: bool, writing: Lock) -> _Finished:
    """Writes and verifies a bundle; of the time that is left it takes one share of as many as targets are left."""
    ready, waiting = each
    target = ready.contents.target
    # Comparing layers takes the most memory of a build: one bundle at a time.
    with writing:
        built = _guard(partial(write_ready, ready), target, job)
    if isinstance(built, EdgekitError) or not verify:
        return _Finished(built=built)
    report = _guard(partial(_verify, built, job, waiting), target, job, raises=True)
    if isinstance(report, EdgekitError):
        # The bundle is whole, and stays not verified.
        notes = (*built.notes, f"it was not verified: {report}")
        return _Finished(built=msgspec.structs.replace(built, notes=notes))
    return _Finished(built=built, report=report)


def _guard(make: Callable[[], _Made], target: Target, job: BuildJob, *, raises: bool = False) -> _Made | EdgekitError:
    """Returns what a step of one target makes, or why not: a fault of ours must leave the other targets whole.

    For a fault a file for a bug report is written beside the bundles; what is no fault is raised if it `raises`.
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
        return ModelError(
            f"edgekit ended in a fault of its own, {type(error).__name__}: {quote_error(error)}",
            hint=f"send '{name}' of this build to its makers: it holds no weights and no data",
        )


def _verify(result: BuiltBundle, job: BuildJob, waiting: int) -> VerifyReport:
    devices = find_devices(result.bundle, result.contents.target, DeviceChoice())
    if job.end < math.inf:
        seconds = round(job.seconds_left(waiting), 1)
        devices = [NamedDevice(label=device.name, device=device, budget_s=seconds) for device in devices]
    # The float model is the same for most targets, what it was quantized to is that of one.
    known: dict[Step, KnownOutputs] = {
        step: job.kept.know(model.sha256, stays=step == "prepare") for step, model in result.models.items()
    }
    manifest = result.bundle.manifest
    # A bundle's ONNX file mostly has the graph of the last step, so both give the same outputs: they are computed once.
    # The run of an fp16 bundle is compared with the form that the device loaded, which has another graph.
    has_own = "onnx" in manifest.forms and manifest.precision != "fp16"
    stamp = read_stamp(load_model(result.bundle.find_model("onnx"))) if has_own else ""
    report = verify_bundle(
        result.bundle,
        devices,
        task=result.contents.target.thresholds.task,
        float_model=result.models["prepare"].path,
        known=next((known[step] for step, model in result.models.items() if model.sha256 == stamp), None),
        progress=job.progress,
    )
    report = attribute_loss(result.bundle, report, result.models, known)
    # Verifications follow each other in one process: what one has freed is given back before the next begins.
    release_memory()
    write_report(result.bundle, report)
    return report


def _summarize(source: Model, target: Target, end: _Finished, out: Path) -> BundleSummary:
    result = end.built
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
        check=result.contents.check,
        verify=end.report,
    )
