"""Running a bundle on devices and judging what comes back."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgekit._files import open_regular, work_folder, write_file
from edgekit.bench.latency import describe_drift, summarize_latency
from edgekit.bundle.folder import VERIFY, Bundle
from edgekit.bundle.golden.golden import Golden, read_classes, read_inputs, read_labels, read_outputs
from edgekit.bundle.manifest.trust import bundled_task
from edgekit.bundle.snapshot import snapshot_bundle
from edgekit.data.data_check import digest_samples
from edgekit.data.samples import Samples, keep_small, select_samples, spread_indices
from edgekit.devices.bundled import make_job, plan_run
from edgekit.devices.device import LEAST_SAMPLES, Device, DeviceRun, Job
from edgekit.devices.lab import run_each, run_together
from edgekit.errors import DataError, EdgekitError
from edgekit.evidence import Evidence
from edgekit.machine import describe_machine
from edgekit.plain import to_json
from edgekit.progress import Progress, say_nothing
from edgekit.target import Form, TaskLimit, Verification
from edgekit.verify.causes.alterations import COMPARED_FORMS, Alteration, find_alterations
from edgekit.verify.causes.honesty import find_half_values, find_replay, find_sameness
from edgekit.verify.causes.suspects import find_suspects
from edgekit.verify.causes.traps import find_ignored_optimisations, find_input_mistake, list_traps, read_cpu_flags
from edgekit.verify.devices.device_layers import look_at_layers
from edgekit.verify.devices.placement import find_gap
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport, judge_output
from edgekit.verify.report import RunReport, SkippedDevice, VerifyReport
from edgekit.verify.tasks.accuracy import measure_accuracy
from edgekit.verify.tasks.tasks import measure_task

_MAX_REPORT_BYTES = 64 << 20
"""A report of a thousand layers on eight devices has some megabytes."""


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    golden: Golden | None
    task: TaskLimit | None
    float_model: Path | None
    layers: bool


def verify_bundle(
    bundle: Bundle,
    devices: Sequence[Device],
    *,
    golden: Golden | None = None,
    task: TaskLimit | None = None,
    float_model: Path | None = None,
    layers: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Runs the golden samples on each device and returns how far the outputs lie from the float reference.

    A device of the manifest's verification list runs the form and as many samples as stand there, any other device
    runs what an app would load, with all samples. A device that is not there is skipped, with the command that
    installs it; one that dies or lies fails. `golden` takes the place of the bundle's own golden samples, `task` names
    a metric in place of that of the bundle. With `float_model` an output that is wrong is held against what that model
    makes of inputs with a usual mistake. Where outputs are wrong, or `layers` asks for it, the layer is looked for that
    the device computes otherwise. What is not as it was built is told of. Devices run at once, on a copy of the bundle
    whose digests were checked.

    Raises:
        BundleError: the bundle lacks the form of the model that a device is to run, or was altered since it was opened.
        DataError: the golden samples cannot be read, or their labels are not those that the metric needs.
        UsageError: there is no such metric.
        MissingExtraError: the metric needs a package that is not installed.
    """
    present, skipped = _find_present(devices)
    asked = _Asked(golden=golden, task=task or bundled_task(bundle.manifest), float_model=float_model, layers=layers)
    runs, altered = _run_devices(bundle, present, asked, progress or say_nothing) if present else ((), ())
    return VerifyReport(
        bundle=f"{bundle.manifest.name}-{bundle.manifest.target}",
        target=bundle.manifest.target,
        runs=runs,
        skipped=skipped,
        taken_macs=bundle.manifest.placement.taken_macs,
        min_taken_macs=bundle.manifest.thresholds.min_taken_macs,
        bundle_sha256=bundle.sha256,
        size_bytes=bundle.manifest.model_size_bytes,
        source_size_bytes=bundle.manifest.source_size_bytes,
        max_size_bytes=bundle.manifest.thresholds.max_size_bytes,
        max_size_share=bundle.manifest.thresholds.max_size_share,
        needs_placement=bundle.manifest.thresholds.needs_placement,
        machine=describe_machine(),
        alterations=tuple(alteration.words for alteration in altered),
        first_bad_layer=next((alteration.layer for alteration in altered if alteration.layer), None),
    )


def write_report(bundle: Bundle, report: VerifyReport) -> Path:
    """Writes `verify.json` into the bundle, beside what the manifest covers, and returns its path.

    Raises:
        OutputError: the bundle cannot be written.
    """
    path = bundle.folder / VERIFY
    write_file(path, to_json(report).encode())
    return path


def read_report(path: Path) -> VerifyReport:
    """Returns the facts of a `verify.json`; the verdicts in it are not believed but computed again.

    Raises:
        DataError: the file is missing or malformed.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_REPORT_BYTES + 1)
        if len(data) > _MAX_REPORT_BYTES:
            raise DataError(f"'{path}' has more than {_MAX_REPORT_BYTES} bytes", hint="edgekit verify BUNDLE writes it")
        return msgspec.json.decode(data, type=VerifyReport)
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}", hint="edgekit verify BUNDLE writes it") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"'{path}' is malformed: {error}", hint="edgekit verify BUNDLE writes it again") from error


def read_known(bundle: Bundle) -> VerifyReport | None:
    """Returns what an earlier verification of exactly this bundle found, None where there is none that can be read."""
    try:
        report = read_report(bundle.folder / VERIFY)
    except DataError:
        return None
    return report if report.bundle_sha256 == bundle.sha256 else None


def _find_present(devices: Sequence[Device]) -> tuple[list[Device], tuple[SkippedDevice, ...]]:
    found = [(device, device.find_missing()) for device in devices]
    skipped = (
        SkippedDevice(device=device.name, reason=missing.reason, command=missing.command)
        for device, missing in found
        if missing is not None
    )
    return [device for device, missing in found if missing is None], tuple(skipped)


def _run_devices(
    bundle: Bundle, devices: Sequence[Device], asked: _Asked, progress: Progress
) -> tuple[tuple[RunReport, ...], tuple[Alteration, ...]]:
    forms: list[Form] = [plan_run(bundle, device, bundle.manifest.golden.samples).form for device in devices]
    forms.extend(form for form in COMPARED_FORMS if bundle.manifest.forms.get(form))
    with work_folder() as work:
        private = snapshot_bundle(bundle, forms, work / bundle.folder.name)

        def run(device: Device) -> RunReport:
            progress(f"verify {bundle.manifest.name} on {device.name}")
            return _run_device(private, device, asked)

        runs, altered = list[RunReport](), list[Alteration]()
        # Devices start slowly: what this process looks at itself is done by then.
        run_together([lambda: runs.extend(run_each(devices, run)), lambda: altered.extend(find_alterations(private))])
        return tuple(runs), tuple(altered)


def _run_device(bundle: Bundle, device: Device, asked: _Asked) -> RunReport:
    golden, task = asked.golden or bundle.golden, asked.task
    plan = plan_run(bundle, device, golden.samples)
    indices = spread_indices(golden.samples, plan.samples)
    reference = select_samples(read_outputs(golden), indices)
    classes, labels = read_classes(golden), read_labels(golden)
    job = make_job(bundle, plan, select_samples(read_inputs(golden), indices))
    with work_folder() as work:
        try:
            run = device.run_job(job, work)
        except EdgekitError as error:
            return _describe_absent(bundle, device, plan, error)
        if run.stopped_early and run.outputs.count >= min(LEAST_SAMPLES, len(indices)):
            indices = indices[: run.outputs.count]
            reference = select_samples(read_outputs(golden), indices)
            plan = msgspec.structs.replace(plan, samples=len(indices))
        reference = keep_small(reference)
        run = msgspec.structs.replace(run, outputs=keep_small(run.outputs))
        report = _describe_run(bundle, plan, run, _compare(reference, run.outputs, bundle))
        report = msgspec.structs.replace(report, gap=find_gap(run, job), planned_samples=job.samples.count)
        report = _look_for_lies(bundle, run, report, job.samples.count, None if asked.golden else indices, reference)
        if not report.passed:
            model = asked.float_model or job.model
            report = msgspec.structs.replace(report, traps=_find_traps(bundle, run, job, model, report.outputs))
        is_wrong = any(judge_output(output, report.thresholds) for output in report.outputs)
        if run.failure is None and (asked.layers or is_wrong) and "onnx" in bundle.manifest.forms:
            traced = msgspec.structs.replace(job, model=bundle.find_model("onnx"))
            located = look_at_layers(device, traced, work / "layers", may_cut=asked.layers)
            if plan.form != "onnx":
                note = f"the layers are those of the bundle's ONNX file, the run loaded its form '{plan.form}'"
                located = msgspec.structs.replace(located, notes=(*located.notes, note))
            report = msgspec.structs.replace(report, located=located)
        if classes is not None:
            accuracy = measure_accuracy(reference, run.outputs, [classes[index] for index in indices])
            report = msgspec.structs.replace(report, accuracy=accuracy)
        if task is None or labels is None:
            return report
        measured = measure_task(task, reference, run.outputs, [labels[index] for index in indices])
        return msgspec.structs.replace(report, task=measured)


def _look_for_lies(
    bundle: Bundle, run: DeviceRun, report: RunReport, asked: int, rows: Sequence[int] | None, reference: Samples
) -> RunReport:
    """Returns the report of a run with what it did otherwise than it seems; `rows` are those of the golden samples."""
    if run.failure is not None:
        return report
    notes = [*report.notes, *find_sameness(reference)]
    if report.samples < asked:
        notes.append(f"it stopped after {report.samples} of {asked} samples: only these were compared")
    if bundle.manifest.precision != "fp16":
        notes.extend(find_half_values(reference, run.outputs))
    replay = None if rows is None else find_replay(bundle, rows, reference, run.outputs)
    findings = (*report.findings, *(() if replay is None else (replay,)))
    return msgspec.structs.replace(report, notes=tuple(notes), findings=findings)


def _find_traps(
    bundle: Bundle, run: DeviceRun, job: Job, model: Path, outputs: Sequence[OutputReport]
) -> tuple[str, ...]:
    """Returns the known traps that may explain a run that does not pass."""
    found = list(list_traps(bundle, run, job.model, read_cpu_flags()))
    wrong = next((output.name for output in outputs if judge_output(output, bundle.manifest.thresholds)), None)
    if wrong is not None and model.suffix == ".onnx":
        mistake = find_input_mistake(model, job.samples, run.outputs, wrong)
        found += [] if mistake is None else [f"output '{wrong}' {mistake}"]
    return tuple(found)


def _compare(reference: Samples, got: Samples, bundle: Bundle) -> tuple[OutputReport, ...]:
    """Returns the comparison of the outputs, with a suspect for those that fail."""
    outputs = compare_outputs(reference, got)
    failing = [output.name for output in outputs if judge_output(output, bundle.manifest.thresholds)]
    is_half = bundle.manifest.precision == "fp16"
    suspects = find_suspects(reference, got, failing, is_half=is_half) if failing else {}
    return tuple(msgspec.structs.replace(output, suspect=suspects.get(output.name)) for output in outputs)


def _describe_run(bundle: Bundle, plan: Verification, run: DeviceRun, outputs: tuple[OutputReport, ...]) -> RunReport:
    counts: dict[str, int] = {}
    for node in run.placement:
        counts[node.provider] = counts.get(node.provider, 0) + 1
    ignored = find_ignored_optimisations(run, bundle.manifest.session_config) if plan.form == "runtime" else None
    return RunReport(
        device=run.device,
        evidence=run.evidence,
        provider=bundle.manifest.provider,
        form=plan.form,
        samples=plan.samples,
        findings=() if ignored is None else (ignored,),
        provider_nodes=dict(sorted(counts.items())),
        placement_source=run.placement_source,
        outputs=outputs,
        accuracy=None,
        latency_ms=summarize_latency(run.latency_ms),
        load_ms=run.load_ms,
        peak_rss_bytes=run.peak_rss_bytes,
        versions=dict(sorted(run.versions.items())),
        thresholds=bundle.manifest.thresholds,
        failure=run.failure,
        notes=(*run.notes, *_describe_drift(run)),
        log=run.log,
        outputs_sha256="" if run.failure is not None else _digest_outputs(run),
    )


def _describe_absent(bundle: Bundle, device: Device, plan: Verification, error: EdgekitError) -> RunReport:
    return RunReport(
        device=device.name,
        evidence=device.evidence,
        provider=bundle.manifest.provider,
        form=plan.form,
        samples=0,
        provider_nodes={},
        placement_source="predicted",
        outputs=(),
        accuracy=None,
        latency_ms=None,
        load_ms=0.0,
        peak_rss_bytes=0,
        versions={},
        thresholds=bundle.manifest.thresholds,
        failure=str(error),
    )


def _digest_outputs(run: DeviceRun) -> str:
    try:
        return digest_samples(run.outputs)
    except EdgekitError:
        return ""


def _describe_drift(run: DeviceRun) -> tuple[str, ...]:
    """Returns a warning where the times of a real device changed under way; those of an emulator mean nothing."""
    latency = summarize_latency(run.latency_ms)
    if latency is None or latency.drift is None or run.evidence is not Evidence.DEVICE:
        return ()
    return (describe_drift(latency.drift),)
