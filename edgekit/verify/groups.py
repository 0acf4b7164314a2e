"""A group run on devices from its inputs to its result, and judged by the metric of its task.

Each member is verified by itself too: if the whole group does badly, that shows which model is responsible.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from edgekit._files import work_folder, write_file
from edgekit.bundle.folder import VERIFY, Bundle, read_target, snapshot_bundle
from edgekit.bundle.golden import read_inputs, read_labels, read_outputs
from edgekit.bundle.group.group import Group, extract_member
from edgekit.bundle.group.wiring import run_pipeline
from edgekit.data.samples import Samples, list_samples, select_samples, spread_indices
from edgekit.devices.bundled import make_job, plan_run
from edgekit.devices.device import Device, find_present
from edgekit.devices.parallel import run_each
from edgekit.devices.process.session import Turn, open_session
from edgekit.devices.register import DeviceChoice
from edgekit.errors import BundleError, CrashError, DeviceError, EdgekitError
from edgekit.evidence import Evidence, Judgement, Verdict, worst_verdict
from edgekit.model.tensors import Tensors
from edgekit.progress import Progress, say_nothing
from edgekit.serialize import to_json
from edgekit.target import TaskLimit
from edgekit.verify.on_devices import find_devices
from edgekit.verify.report import VerifyReport, require_devices
from edgekit.verify.run import verify_bundle
from edgekit.verify.task_metrics import measure_task
from edgekit.verify.task_scores import TaskReport, judge_task


class GroupRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one device computed for whole samples: the metric of the task, and how often each member ran.

    `failure` says why the run stopped, None if it finished; `crashed` means that the program of an emulator died.
    """

    device: str
    evidence: Evidence
    samples: int
    runs: dict[str, int]
    task: TaskReport | None
    limit: TaskLimit
    failure: str | None = None
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


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
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

    @property
    def passed(self) -> bool:
        """True if nothing failed and nothing is unproven."""
        return self.verdict == "pass"


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
        bundles = {name: extract_member(group, name, work / name) for name in group.manifests}
        # All members are for one target, so they have the same devices.
        devices = find(next(iter(bundles.values())))
        members = {
            name: require_devices(verify_bundle(bundle, devices, progress=say), required)
            for name, bundle in bundles.items()
        }

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
    # A copy runs whose digests were just compared, as for the bundle of a single model.
    private = {
        name: snapshot_bundle(bundle, [plans[name].form], work / "members" / name) for name, bundle in bundles.items()
    }
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
                place.mkdir(parents=True)
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
