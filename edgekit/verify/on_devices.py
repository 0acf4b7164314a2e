"""Verifies an existing bundle on devices chosen by name, with its own samples or with others, and a group of bundles.

A group runs from its inputs to its result, and is judged by the metric of its task. Each member is verified by itself
too: if the whole group does badly, that shows which model is responsible.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from edgekit._files import digest_file, work_folder, write_file
from edgekit.bundle.checks import bundled_task
from edgekit.bundle.folder import GOLDEN, VERIFY, Bundle, read_target, snapshot_bundle
from edgekit.bundle.golden import INPUTS, make_golden, plan_sequences, read_inputs, read_labels, read_outputs
from edgekit.bundle.group import Group
from edgekit.bundle.sign import require_private_key
from edgekit.bundle.wiring import run_pipeline
from edgekit.data.data_check import find_missing, refusing_bad
from edgekit.data.padding import free_axes, pad_samples
from edgekit.data.samples import (
    Samples,
    limit_samples,
    list_samples,
    load_samples,
    select_samples,
    spread_indices,
    spread_sequences,
)
from edgekit.data.sets import load_sequences, read_task_labels
from edgekit.devices.bundled import make_job, plan_run
from edgekit.devices.device import Device, find_present
from edgekit.devices.find import DeviceChoice, choose_devices
from edgekit.devices.parallel import run_each
from edgekit.devices.process.session import Turn, open_session
from edgekit.devices.recorded import Recording, open_recorded
from edgekit.errors import BundleError, CrashError, DeviceError, EdgekitError, OutputError, UsageError
from edgekit.evidence import DeviceResult, Judged, Judgement, Verdict, worst_verdict
from edgekit.graph.graph import view_model
from edgekit.model.external import skim_model
from edgekit.model.model import Model, load_model
from edgekit.model.state import State
from edgekit.model.tensors import Tensors, TensorSpec
from edgekit.progress import Progress, say_nothing
from edgekit.recipe import Data
from edgekit.serialize import fill, to_json
from edgekit.target import Target, TaskLimit
from edgekit.verify.attribute import keep_attribution
from edgekit.verify.more_runs import UnpaddedGolden
from edgekit.verify.report import VerifyReport, read_known, require_devices, write_report
from edgekit.verify.run import verify_bundle
from edgekit.verify.task_metrics import find_metric, measure_task
from edgekit.verify.task_scores import TaskReport, check_class_labels, judge_task

_INPUTS = f"{GOLDEN}/{INPUTS}"
# How many samples the float model runs at a time: more need more memory, and machines with two cores are common.
_AT_ONCE = 2


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded runs as files: runs to judge, and the path to which the run of the one chosen device is written.

    With a public `run_key`, its owner must have signed the runs to judge; the written run is signed with `sign_key`.
    """

    recorded: tuple[Path, ...] = ()
    run_key: Path | None = None
    export: Path | None = None
    sign_key: Path | None = None


_NO_FILES = RunFiles()


def verify_on(
    bundle: Bundle,
    choice: DeviceChoice,
    progress: Progress | None = None,
    *,
    task: TaskLimit | None = None,
    layers: bool = False,
    files: RunFiles = _NO_FILES,
) -> VerifyReport:
    """Verifies a bundle on the chosen devices (default: its target's), and writes `verify.json` into it if any ran.

    The file keeps the loss that the build attributed to its steps, because the models that this was measured with are
    gone. If the bundle cannot be written, a note of the report says so.

    Raises:
        UsageError: there is no such device, it runs another provider, or a run of several devices is to be written.
        DataError: a file is no recorded run.
        BundleError: a recorded run is not signed with the key that is asked for.
    """
    known = read_known(bundle)
    recorded: list[Device] = [open_recorded(path, bundle.sha256, files.run_key) for path in files.recorded]
    is_chosen = choice.names or choice.file is not None
    # If the user names recorded runs and no device, the target's devices do not run.
    devices = find_devices(bundle, read_target(bundle), choice) if is_chosen or not recorded else []
    if files.export is not None:
        if len(devices) != 1 or not is_chosen:
            raise UsageError("--export writes the run of one device", hint="name it: --on coreml")
        if files.sign_key is not None:
            require_private_key(files.sign_key)
        devices = [Recording(device=devices[0], path=files.export, bundle_sha256=bundle.sha256, key=files.sign_key)]
    report = verify_bundle(bundle, [*devices, *recorded], task=task, layers=layers, progress=progress)
    ancestry = _describe_ancestry(bundle, bundle.manifest.files[_INPUTS].sha256)
    report = keep_attribution(msgspec.structs.replace(report, ancestry=ancestry), known)
    if report.runs:
        try:
            write_report(bundle, report)
        except OutputError as error:
            note = f"the bundle has no new verify.json: {error.message}"
            return msgspec.structs.replace(report, notes=(*report.notes, note))
    return report


def verify_with(
    bundle: Bundle,
    reference: Path,
    data: Data,
    choice: DeviceChoice,
    progress: Progress | None = None,
    *,
    samples: int | None = None,
    task: TaskLimit | None = None,
    layers: bool = False,
) -> VerifyReport:
    """Verifies a bundle with other samples than its golden ones, at most `samples`; nothing is written into it.

    `reference` is the float model that the bundle was made from; its outputs are the reference. `data.source` gives the
    samples, `data.labels` the class of each.

    Raises:
        UsageError: the bundle was made of another model, or there is no such device.
        DataError: the samples or the labels do not fit.
    """
    source = _open_source(bundle, reference)
    devices = find_devices(bundle, read_target(bundle), choice)
    state = bundle.manifest.state or State()
    every = load_sequences(data.source, _list_inputs(bundle), state, data.preprocess)
    metric = task or bundled_task(bundle.manifest)
    kind = "class" if metric is None else find_metric(metric).labels
    labels = None if data.labels is None else read_task_labels(data.labels, kind, every)
    kept = spread_sequences(every.count, samples or every.count, state.steps)
    buckets = bundle.manifest.buckets
    with work_folder() as work:
        (progress or say_nothing)("run the float model")
        sequences = plan_sequences(source, state, bundle.golden.inputs, bundle.golden.outputs, work)
        given = select_samples(every, kept)
        filled = pad_samples(buckets.padding, given, buckets.sizes[-1].size) if buckets else given
        chosen = refusing_bad(sequences.unroll(filled, "evaluation"), find_missing(view_model(skim_model(source.path))))
        known = None if labels is None else [labels[index] for index in kept]
        golden = make_golden(source, chosen, work, labels=known, at_once=_AT_ONCE, ragged=True)
        check_class_labels(golden)
        if buckets:
            # The reference of each bucket is what the float model computes at the unpadded lengths.
            whole = make_golden(source, given, work / "unpadded", at_once=_AT_ONCE, ragged=True)
            lengths = tuple(buckets.padding.measure(sample) for sample in given)
            golden = fill(UnpaddedGolden, golden, lengths=lengths, whole=read_outputs(whole))
        report = verify_bundle(
            bundle,
            devices,
            golden=golden,
            task=task,
            float_model=source.path,
            layers=layers,
            progress=progress,
        )
        ancestry = _describe_ancestry(bundle, digest_file(golden.folder / INPUTS))
        return msgspec.structs.replace(report, ancestry=ancestry)


def _list_inputs(bundle: Bundle) -> Sequence[TensorSpec]:
    """Returns the inputs that samples are read for; their length is open if the bundle has several sizes."""
    inputs, buckets = bundle.manifest.inputs, bundle.manifest.buckets
    return free_axes(buckets.padding.inputs, inputs) if buckets else inputs


def _open_source(bundle: Bundle, reference: Path) -> Model:
    source, wanted = load_model(reference), bundle.manifest.ancestry.source
    if source.sha256 != wanted:
        words = f"'{reference}' is not the model that bundle '{bundle.folder}' was made of"
        digests = f"its sha256 is {source.sha256}, that of the bundle's source is {wanted}"
        raise UsageError(f"{words}: {digests}", hint="give the float model that edgekit build was given")
    return source


def open_inputs(bundle: Bundle, data: Data | None, samples: int | None) -> Samples:
    """Returns the inputs that a verification runs: at most `samples` samples of `data`, or all golden samples.

    Raises:
        DataError: the samples do not fit.
    """
    if data is None:
        return read_inputs(bundle.golden)
    return limit_samples(load_samples(data.source, _list_inputs(bundle), data.preprocess), samples)


def find_devices(bundle: Bundle, target: Target, choice: DeviceChoice) -> list[Device]:
    """Returns the chosen devices, or by default those that the bundle's target names.

    Raises:
        UsageError: there is no such device, it runs another provider, or the file is malformed.
    """
    planned = [planned.device for planned in bundle.manifest.verification]
    return choose_devices(choice, lambda _: target, default=planned)


def _describe_ancestry(bundle: Bundle, inputs: str) -> dict[str, str]:
    """Returns the digest or version of all that a verification depends on; `inputs` is the digest of the samples."""
    ancestry = bundle.manifest.ancestry
    made_from = {"calibration data": ancestry.data, "quantized model": ancestry.quantized}
    return {
        "model": ancestry.source,
        "data": inputs,
        "bundle": bundle.sha256,
        **{name: digest for name, digest in made_from.items() if digest is not None},
        "edgekit": bundle.manifest.versions.get("edgekit", "unknown"),
        "onnxruntime": bundle.manifest.versions.get("onnxruntime", "unknown"),
    }


class GroupRun(DeviceResult, frozen=True, kw_only=True):
    """What one device computed for whole samples: the metric of the task, and how often each member ran.

    `failure` says why the run stopped, None if it finished; `crashed` means that the program of an emulator died.
    """

    samples: int
    runs: dict[str, int]
    task: TaskReport | None
    limit: TaskLimit
    crashed: bool = False

    @property
    def judgement(self) -> Judgement:
        """Whether the run keeps the metric's limit, with one line for each reason why not."""
        if self.crashed:
            return Judgement(unproven=(f"the emulator crashed, which proves nothing: {self.failure}",))
        if self.failure is not None:
            return Judgement(failures=(f"the group did not run to its end: {self.failure}",))
        return judge_task(self.task, self.limit)

    @property
    def verdict(self) -> Verdict:
        """Whether the run passes, if that can be decided."""
        return self.judgement.verdict


class GroupReport(Judged, msgspec.Struct, frozen=True, kw_only=True):
    """Whether a group gives on its devices what the float models give: each member by itself, and all together.

    It passes if every member passes and every device that ran keeps the metric's limit.
    """

    group: str
    target: str
    sha256: str
    members: dict[str, VerifyReport]
    runs: tuple[GroupRun, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether the group passes, if that can be decided."""
        whole = Judgement(unproven=() if self.runs else ("no device ran",)).verdict
        members = self.members.values()
        return worst_verdict((whole, *(each.verdict for each in members), *(run.verdict for run in self.runs)))


def choosing(choice: DeviceChoice) -> Callable[[Bundle], Sequence[Device]]:
    """Returns a function that finds the chosen devices for a member, or by default those that its target names."""
    return lambda bundle: find_devices(bundle, read_target(bundle), choice)


def verify_group(
    group: Group,
    find: Callable[[Bundle], Sequence[Device]],
    *,
    required: Sequence[str] = (),
    progress: Progress | None = None,
) -> GroupReport:
    """Runs a group on the devices that `find` returns for a member; writes `verify.json` into its folder if one ran.

    Raises:
        UsageError: there is no such device, or it runs another provider.
        BundleError: the group was altered since it was opened.
        OutputError: the folder cannot be written.
    """
    say = progress or say_nothing
    with work_folder() as work:
        bundles = {name: each.extract(group.folder, work / name) for name, each in group.nested.items()}
        # All members are for one target, so they have the same devices.
        devices = find(next(iter(bundles.values())))
        reports = {name: verify_bundle(bundle, devices, progress=say) for name, bundle in bundles.items()}
        members = {name: require_devices(report, required) for name, report in reports.items()}

        def run(device: Device) -> GroupRun:
            say(f"verify {group.manifest.name} end to end on {device.name}")
            with work_folder() as place:
                return _run_device(group, bundles, device, place)

        runs = run_each(find_present(devices)[0], run)
    report = GroupReport(
        group=group.manifest.name, target=group.manifest.target, sha256=group.sha256, members=members, runs=runs
    )
    if report.runs:
        write_file(group.folder / VERIFY, to_json(report).encode())
    return report


def _run_device(group: Group, bundles: Mapping[str, Bundle], device: Device, work: Path) -> GroupRun:
    """Returns what a device computes for as many golden samples as its target plans for each member.

    Each stage has one session, even if it runs once for each token.
    """
    golden, wiring, metric = group.golden, group.manifest.wiring, group.manifest.metric
    plans = {name: plan_run(bundle, device, group.manifest.samples) for name, bundle in bundles.items()}
    # As for the bundle of a single model, a copy runs, whose digests were checked while it was written.
    private = {name: snapshot_bundle(it, [plans[name].form], work / "members" / name) for name, it in bundles.items()}
    if (labels := read_labels(golden)) is None:
        raise BundleError(f"group '{group.folder}' has no labels", hint="build the group again")
    rows = spread_indices(golden.samples, min(plan.samples for plan in plans.values()))
    turns = 1 if wiring.tokens is None else wiring.tokens.most
    counts, sessions, opened = dict.fromkeys(bundles, 0), ExitStack(), dict[str, Turn]()

    def run_member(name: str, samples: Sequence[Tensors]) -> Sequence[Tensors]:
        counts[name] += 1
        try:
            if name not in opened:
                # One at a time: a device may not have memory for two.
                sessions.close()
                opened.clear()
                given = Samples(source=name, count=len(samples) * turns, read=lambda: iter(()))
                job = make_job(private[name], plans[name], given)
                # The time limit of a single run holds for each token.
                job = msgspec.structs.replace(job, timeout_s=job.timeout_s * turns)
                place = work / "runs" / f"{name}-{counts[name]}"
                opened[name] = sessions.enter_context(open_session(device, job, place))
            return opened[name](samples)
        except DeviceError as error:
            raise type(error)(f"member '{name}': {error.message}", hint="see how it does by itself") from error

    task, failure, crashed = None, None, False
    try:
        with sessions:
            given = list(select_samples(read_inputs(golden), rows))
            got = list_samples(run_pipeline(wiring, group.interfaces, given, run_member), device.name)
        reference = select_samples(read_outputs(golden), rows)
        task = measure_task(metric, reference, got, [labels[row] for row in rows])
        task = msgspec.structs.replace(task, labelled=len(labels))
    except EdgekitError as error:
        failure, crashed = str(error), isinstance(error, CrashError)
    return GroupRun(
        device=device.name,
        evidence=device.evidence,
        samples=len(rows),
        runs=counts,
        task=task,
        limit=metric,
        failure=failure,
        crashed=crashed,
    )
