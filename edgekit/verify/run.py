"""Runs a bundle on devices and judges the outputs that come back."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edgekit._files import work_folder
from edgekit.bench.latency import describe_drift, find_false_times, find_impossible_time, summarize_latency
from edgekit.bundle.checks import bundled_task
from edgekit.bundle.folder import Bundle, snapshot_bundle
from edgekit.bundle.golden import Golden, KnownOutputs, read_classes, read_inputs, read_labels, read_outputs
from edgekit.data.data_check import digest_samples
from edgekit.data.samples import Samples, keep_small, order_for_runs, select_samples, spread_indices
from edgekit.devices.bundled import find_tuned, make_job, plan_run, set_job
from edgekit.devices.device import LEAST_SAMPLES, STOPPED, Device, DeviceRun, Job, find_present
from edgekit.devices.observe import count_nodes
from edgekit.devices.parallel import run_each, run_together
from edgekit.devices.recorded import Recorded
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.machine import describe_machine
from edgekit.progress import Progress, say_nothing
from edgekit.serialize import fill
from edgekit.target import INTEGERS, Form, TaskLimit, Verification
from edgekit.verify import more_runs, own_model, placement, suspects
from edgekit.verify.layers.comparison import LAYER_SAMPLES, Located, read_evidence
from edgekit.verify.layers.on_device import look_at_layers
from edgekit.verify.metrics.agreement import Agreement, measure_agreement
from edgekit.verify.metrics.compare import compare_bundled, describe_unlisted
from edgekit.verify.metrics.fidelity import find_unfaithful
from edgekit.verify.metrics.outputs import OutputReport, describe_agreements, weigh_output
from edgekit.verify.report import VerifyReport, recheck_report
from edgekit.verify.run_report import RunReport
from edgekit.verify.task_metrics import measure_task
from edgekit.verify.task_scores import describe_chance, measure_accuracy


class _Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    golden: Golden | None
    task: TaskLimit | None
    float_model: Path | None
    layers: bool
    known: KnownOutputs


class _Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run of a device, with the job that it was given.

    `rows` are the golden samples that ran, `reference` the float model's outputs for them, `elapsed_ms` how long
    edgekit waited for the device.
    """

    request: _Request
    bundle: Bundle
    golden: Golden
    plan: Verification
    job: Job
    run: DeviceRun
    rows: tuple[int, ...]
    reference: Samples
    elapsed_ms: float
    own: Samples | None
    notes: tuple[str, ...]

    @property
    def false_times(self) -> str | None:
        """Why the times of the device are left out, or None if they count."""
        return self.impossible_time or find_false_times(self.run.latency_ms, self.elapsed_ms)

    @property
    def impossible_time(self) -> str | None:
        """The first reported time that is impossible, or None if all are plausible."""
        return find_impossible_time((*self.run.latency_ms, self.run.load_ms))


def verify_bundle(
    bundle: Bundle,
    devices: Sequence[Device],
    *,
    golden: Golden | None = None,
    task: TaskLimit | None = None,
    float_model: Path | None = None,
    layers: bool = False,
    known: KnownOutputs | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Runs the golden samples on each device and returns how far the outputs are from the float reference.

    A device of the manifest's verification list runs the form and the samples given there; any other runs the form that
    an app would load, with all samples. An absent device is skipped; one that crashes or reports false results fails.
    `golden` and `task` replace the bundle's own. If outputs are wrong, or with `layers`, the layer that the device
    computes differently is looked for; else wrong outputs are compared with what `float_model`, or the bundle's own,
    gives for inputs with a usual mistake. `known` holds earlier outputs of the bundle's ONNX file; new ones are added.
    Each model file that this machine can run takes the self-test. Devices run at the same time, on a checked copy of
    the bundle.

    Raises:
        BundleError: the bundle lacks the form of the model that a device is to run, or was altered since it was opened.
        DataError: the golden samples cannot be read, or their labels are not those that the metric needs.
        UsageError: there is no such metric.
        MissingExtraError: the metric needs a package that is not installed.
    """
    manifest, evidence = bundle.manifest, read_evidence(bundle)
    present, skipped = find_present(devices)

    request = _Request(
        golden=golden,
        task=task or bundled_task(manifest),
        float_model=float_model,
        layers=layers,
        # Several devices run the same samples.
        known=known or KnownOutputs(),
    )
    runs, broken = _run_devices(bundle, present, request, progress or say_nothing) if present else ((), ())
    report = VerifyReport(
        bundle=f"{manifest.name}-{manifest.target}",
        target=manifest.target,
        runs=runs,
        skipped=skipped,
        chance=describe_chance(request.golden or bundle.golden),
        taken_macs=manifest.placement.taken_macs,
        bundle_sha256=bundle.sha256,
        size_bytes=manifest.model_size_bytes,
        source_size_bytes=manifest.source_size_bytes,
        machine=describe_machine(),
        # What a provider was observed to take on a device outweighs what the rules predict.
        alterations=(
            *broken,
            *(() if any(run.observes_placement for run in runs) else own_model.find_other_model(bundle)),
        ),
        layers=evidence.layers,
        notes=tuple(filter(None, (evidence.note, own_model.describe_untested(bundle)))),
    )
    return recheck_report(report, manifest.thresholds)


def _run_devices(
    bundle: Bundle, devices: Sequence[Device], request: _Request, progress: Progress
) -> tuple[tuple[RunReport, ...], tuple[str, ...]]:
    """Returns the result of each device, and what is wrong with the files that this machine can run."""
    forms: list[Form] = [plan_run(bundle, device, bundle.manifest.golden.samples).form for device in devices]
    forms.extend(form for form in own_model.TESTED_FORMS if bundle.manifest.forms.get(form))
    with work_folder() as work:
        private = snapshot_bundle(bundle, forms, work / bundle.folder.name)

        def run(device: Device) -> RunReport:
            progress(f"verify {bundle.manifest.name} on {device.name}")
            return _run_device(private, device, request)

        runs, broken = list[RunReport](), list[str]()
        # Devices start slowly: this process finishes its own checks in the meantime.
        run_together(
            [lambda: runs.extend(run_each(devices, run)), lambda: broken.extend(own_model.list_broken_forms(private))]
        )
        return tuple(runs), tuple(broken)


def _run_device(bundle: Bundle, device: Device, request: _Request) -> RunReport:
    golden = request.golden or bundle.golden
    plan = plan_run(bundle, device, golden.samples)
    rows = order_for_runs(golden.samples, plan.samples, bundle.manifest.steps)
    job = make_job(bundle, plan, keep_small(select_samples(read_inputs(golden), rows)))
    if (tuned := find_tuned(bundle.manifest, device)) is not None:
        # The file of the manifest's plan, one run at a time: what an app does around its session is not verified.
        job = set_job(job, msgspec.structs.replace(tuned, concurrency=1))
    with work_folder() as work:
        begun = time.monotonic()
        run = device.try_job(job, work)
        elapsed_ms = 1000.0 * (time.monotonic() - begun)
        if run.stopped_early and run.outputs.count >= min(LEAST_SAMPLES, len(rows)):
            rows = rows[: run.outputs.count]
        ran = select_samples(job.samples, range(len(rows)))
        if run.failure is None:
            own, notes = own_model.run_own_model(bundle, plan.form, ran, request.known)
        else:
            own, notes = None, ()
        trial = _Trial(
            request=request,
            bundle=bundle,
            golden=golden,
            plan=plan,
            job=job,
            run=msgspec.structs.replace(run, outputs=keep_small(run.outputs)),
            rows=rows,
            reference=keep_small(select_samples(read_outputs(golden), rows)),
            elapsed_ms=run.waited_ms or elapsed_ms,
            own=own,
            notes=notes,
        )
        report, run, by_size = _measure_run(trial), trial.run, None
        if bundle.manifest.open_dims and run.failure is None:
            by_size = more_runs.compare_sizes(bundle.manifest, ran, trial.reference, run.outputs)
        elif request.golden is None or isinstance(request.golden, more_runs.UnpaddedGolden):
            # Buckets need the lengths that the samples had before padding.
            by_size = more_runs.run_buckets(bundle, device, job, run, rows, work / "sizes", request.golden)
        located = _look_inside(trial, device, report, work / "layers")
        return msgspec.structs.replace(
            report,
            traps=() if report.passed else tuple(_list_traps(trial, report.outputs, located)),
            located=located,
            state=more_runs.run_sequences(bundle.manifest, device, job, run, golden, trial.reference, work / "steps"),
            sizes=by_size,
            files=tuple(more_runs.try_model_files(bundle, device, plan, golden, work / "files")),
        )


def _measure_run(trial: _Trial) -> RunReport:
    """Returns the facts of a run; possible explanations are not looked for yet."""
    bundle, run = trial.bundle, trial.run
    classes, labels = read_classes(trial.golden), read_labels(trial.golden)
    accuracy, task, limit, digest = None, None, trial.request.task, ""
    if classes is not None:
        accuracy = measure_accuracy(trial.reference, run.outputs, [classes[row] for row in trial.rows])
    if run.failure is None:
        with contextlib.suppress(EdgekitError):
            digest = digest_samples(run.outputs)
    if limit is not None and labels is not None:
        task = measure_task(limit, trial.reference, run.outputs, [labels[row] for row in trial.rows])
        task = msgspec.structs.replace(task, labelled=len(labels))
        if task.is_partial and digest:
            golden, known = trial.golden, trial.request.known
            task = own_model.extend_task(bundle, trial.plan.form, golden, limit, trial.rows, run.outputs, known) or task
    older = own_model.describe_older(run, bundle.manifest.minimum_ort)
    is_device, is_runtime = run.evidence is Evidence.DEVICE, trial.plan.form == "runtime"
    # What fails a run whatever its figures are: the device did not do what it reports.
    findings = (
        trial.impossible_time,
        older if is_device else None,
        placement.describe_unmatched(run, trial.job),
        describe_unlisted(bundle),
        suspects.find_ignored_optimisations(run, bundle.manifest.session_config) if is_runtime else None,
    )
    is_own = run.failure is None and trial.request.golden is None
    self_test = own_model.find_self_test_fault(bundle, trial.rows, run.outputs) if is_own else ()
    gap, outputs = placement.find_gap(run, trial.job), _compare(trial)
    return fill(
        RunReport,
        run,
        provider=bundle.manifest.provider,
        form=trial.plan.form,
        samples=len(trial.rows),
        planned_samples=trial.job.samples.count,
        steps=bundle.manifest.steps,
        findings=(*filter(None, findings), *self_test),
        provider_nodes=count_nodes(run, trial.job),
        gap=gap,
        placed=placement.find_placed(run, trial.job),
        outputs=outputs,
        accuracy=accuracy,
        task=task,
        outdated="" if is_device else older,
        latency_ms=None if trial.false_times else summarize_latency(run.latency_ms),
        versions=dict(sorted(run.versions.items())),
        thresholds=bundle.manifest.thresholds,
        notes=(
            *run.notes,
            *_list_notes(trial),
            *filter(None, (placement.describe_hidden(gap),)),
            *describe_agreements(outputs),
        ),
        outputs_sha256=digest,
    )


def _compare(trial: _Trial) -> tuple[OutputReport, ...]:
    """Returns the comparison of outputs with the float model's.

    `mismatch` says which outputs came from something else than the bundle's own model. Failing outputs get a suspect if
    a usual mistake explains them.
    """
    got, reference = trial.run.outputs, trial.reference
    reports = tuple(_judge_by_all_samples(compare_bundled(trial.bundle, reference, got, trial.rows), trial))
    manifest, unfaithful = trial.bundle.manifest, dict[str, str]()
    if trial.own is not None:
        # The source model was quantized already.
        is_given = manifest.precision in INTEGERS and manifest.ancestry.quantized is None
        names = {output.name for output in manifest.outputs} if is_given else own_model.list_moved_outputs(trial.bundle)
        unfaithful = find_unfaithful(trial.own, reference, got, may_be_equal=names)
    faults = [(output, output.mismatch or unfaithful.get(output.name)) for output in reports]
    outputs = [msgspec.structs.replace(output, mismatch=fault) for output, fault in faults]
    failing = _name_wrong(outputs, trial)
    is_half = manifest.precision == "fp16"
    found = suspects.find_suspects(reference, got, failing, is_half=is_half) if failing else {}
    return tuple(msgspec.structs.replace(output, suspect=found.get(output.name)) for output in outputs)


def _judge_by_all_samples(outputs: Sequence[OutputReport], trial: _Trial) -> Iterator[OutputReport]:
    """Yields the reports; if few samples leave open whether a device's decisions agree, all golden samples decide.

    The device must decide as the bundle's own model does on each sample that it ran. Then that model's decisions on the
    other samples are taken to be the device's too.
    """
    manifest, done = trial.bundle.manifest, len(trial.rows)
    doubtful = {each.name for each in outputs if each.agreements and weigh_output(each, manifest.thresholds).unproven}
    readings = {name: each for name, each in (manifest.readings or {}).items() if name in doubtful}
    if trial.own is None or done == trial.golden.samples or not readings:
        yield from outputs
        return
    same = measure_agreement(trial.own, trial.run.outputs, readings)
    readings = {name: readings[name] for name, shared in same.items() if all(each.share == 1 for each in shared)}
    whole: dict[str, tuple[Agreement, ...]] = {}
    if readings:
        own, _ = own_model.run_own_model(trial.bundle, trial.plan.form, read_inputs(trial.golden), trial.request.known)
        whole = {} if own is None else measure_agreement(read_outputs(trial.golden), own, readings)
    for output in outputs:
        yield msgspec.structs.replace(output, agreements=whole.get(output.name, output.agreements))


def _name_wrong(outputs: Sequence[OutputReport], trial: _Trial) -> list[str]:
    return [output.name for output in outputs if weigh_output(output, trial.bundle.manifest.thresholds).failures]


def _list_notes(trial: _Trial) -> Iterator[str]:
    """Yields what a reader of the figures should know, such as that the times of an emulator mean nothing."""
    latency = None if trial.impossible_time else summarize_latency(trial.run.latency_ms)
    if trial.false_times:
        yield trial.false_times
    elif latency is not None and latency.drift is not None and trial.run.evidence is Evidence.DEVICE:
        yield describe_drift(latency.drift)
    if trial.run.failure is not None:
        return
    if not trial.run.versions.get("onnxruntime"):
        yield "it does not say which ONNX Runtime ran"
    yield from own_model.find_equal_outputs(trial.reference)
    done, planned = len(trial.rows), trial.job.samples.count
    # A device that ran out of time says so itself.
    if done < planned and not any(note.startswith(STOPPED) for note in trial.run.notes):
        yield f"it stopped after {done} of {planned} samples: only these were compared"
    own = trial.request.golden
    if trial.bundle.manifest.buckets and own is not None and not isinstance(own, more_runs.UnpaddedGolden):
        yield "samples of your own run in the largest size alone: the others were not judged"
    yield from trial.notes
    if trial.bundle.manifest.precision != "fp16":
        yield from own_model.find_half_values(trial.own or trial.reference, trial.run.outputs)


def _list_traps(trial: _Trial, outputs: Sequence[OutputReport], located: Located | None) -> Iterator[str]:
    """Yields the known traps that may explain why a run does not pass."""
    yield from suspects.list_traps(trial.bundle, trial.run, trial.job)
    # A device that shows what is inside also shows its inputs; a recorded run, such as an app's, does not.
    wrong = () if located is not None and located.layer is not None else _name_wrong(outputs, trial)
    own = trial.bundle.find_model("onnx") if "onnx" in trial.bundle.manifest.forms else trial.job.model
    model = trial.request.float_model or own
    if wrong and model.suffix == ".onnx":
        mistake = suspects.find_input_mistake(model, trial.job.samples, trial.run.outputs, wrong[0])
        yield from () if mistake is None else (f"output '{wrong[0]}' {mistake}",)


def _look_inside(trial: _Trial, device: Device, report: RunReport, work: Path) -> Located | None:
    """Returns the layer that the device computes differently, or None if it was not looked for."""
    is_wrong = bool(report.findings or _name_wrong(report.outputs, trial))
    wants_layers = (trial.request.layers or is_wrong) and not isinstance(device, Recorded)
    if trial.run.failure is not None or not wants_layers or "onnx" not in trial.bundle.manifest.forms:
        return None
    # A fault may show in a single sample: the worst ones are looked at first.
    worst = [trial.rows.index(each.worst_sample) for each in report.outputs if each.worst_sample in trial.rows]
    places = (*dict.fromkeys((*worst[:1], *spread_indices(len(trial.rows), LAYER_SAMPLES))),)[:LAYER_SAMPLES]
    samples = select_samples(trial.job.samples, places)
    traced = msgspec.structs.replace(trial.job, model=trial.bundle.find_model("onnx"), samples=samples)
    # The first run opened another file if the form is not ONNX.
    before = select_samples(trial.run.outputs, places) if trial.plan.form == "onnx" else None
    located = look_at_layers(device, traced, work, may_cut=trial.request.layers, before=before)
    if trial.plan.form == "onnx":
        return located
    note = f"the layers are those of the bundle's ONNX file, the run loaded its form '{trial.plan.form}'"
    return msgspec.structs.replace(located, notes=(*located.notes, note))
