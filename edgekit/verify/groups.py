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
from edgekit.devices.device import Device
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
        present = [device for device in devices if device.find_missing() is None]
        runs = _run_devices(group, bundles, present, say)
    report = GroupReport(
        group=group.manifest.name, target=group.manifest.target, sha256=group.sha256, members=members, runs=runs
    )
    if report.runs:
        write_file(group.folder / VERIFY, to_json(report).encode())
    return report


def _run_devices(
    group: Group, bundles: Mapping[str, Bundle], devices: Sequence[Device], progress: Progress
) -> tuple[GroupRun, ...]:
    if not devices:
        return ()

    def run(device: Device) -> GroupRun:
        progress(f"verify {group.manifest.name} end to end on {device.name}")
        with work_folder() as place:
            return _Runner(group, bundles, device, place).run()

    return run_each(devices, run)


class _Runner:
    """A device that runs the members of a group. Each stage has one session, even if it runs once for each token."""

    def __init__(self, group: Group, bundles: Mapping[str, Bundle], device: Device, work: Path) -> None:
        self._group, self._device, self._work = group, device, work
        count = group.manifest.samples
        self._plans = {name: plan_run(bundle, device, count) for name, bundle in bundles.items()}
        # A copy runs whose digests were just compared, as for the bundle of a single model.
        self._bundles = {
            name: snapshot_bundle(bundle, [self._plans[name].form], work / "members" / name)
            for name, bundle in bundles.items()
        }
        self._runs = dict.fromkeys(bundles, 0)
        self._sessions = ExitStack()
        self._open: tuple[str, Turn] | None = None

    def run(self) -> GroupRun:
        """Returns what the device computes for as many golden samples as its target plans for each member."""
        golden, manifest = self._group.golden, self._group.manifest
        labels = read_labels(golden)
        if labels is None:
            raise BundleError(f"group '{self._group.folder}' has no labels", hint="build the group again")
        rows = spread_indices(golden.samples, min(plan.samples for plan in self._plans.values()))
        reference = select_samples(read_outputs(golden), rows)
        found = GroupRun(
            device=self._device.name,
            evidence=self._device.evidence,
            samples=len(rows),
            runs={},
            task=None,
            limit=manifest.metric,
        )
        try:
            samples = list(select_samples(read_inputs(golden), rows))
            with self._sessions:
                results = run_pipeline(manifest.wiring, self._group.interfaces, samples, self._run_member)
            got = list_samples(results, self._device.name)
            task = measure_task(manifest.metric, reference, got, [labels[row] for row in rows])
        except EdgekitError as error:
            crashed = isinstance(error, CrashError)
            return msgspec.structs.replace(found, failure=str(error), crashed=crashed, runs=self._runs)
        return msgspec.structs.replace(found, task=msgspec.structs.replace(task, labelled=len(labels)), runs=self._runs)

    def _run_member(self, name: str, samples: Sequence[Tensors]) -> Sequence[Tensors]:
        self._runs[name] += 1
        try:
            if self._open is None or self._open[0] != name:
                # One at a time: a device may not have memory for two.
                self._sessions.close()
                tokens = self._group.manifest.wiring.tokens
                turns = tokens.most if tokens is not None else 1
                given = Samples(source=name, count=len(samples) * turns, read=lambda: iter(()))
                job = make_job(self._bundles[name], self._plans[name], given)
                # The time limit of a single run holds for each token.
                job = msgspec.structs.replace(job, timeout_s=job.timeout_s * turns)
                place = self._work / "runs" / f"{name}-{self._runs[name]}"
                place.mkdir(parents=True)
                self._open = name, self._sessions.enter_context(open_session(self._device, job, place))
            return self._open[1](samples)
        except DeviceError as error:
            raise type(error)(f"member '{name}': {error.message}", hint="see how it does by itself") from error
