"""What became of a group of models: each target, and its lines for a terminal."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekit.evidence import Verdict, worst_verdict
from edgekit.plain import Shown
from edgekit.report.tables import format_bytes
from edgekit.verify.groups import GroupReport, GroupRun
from edgekit.verify.tasks.scores import describe_difference, format_score


class GroupTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A group for one target; `failure` says why there is none.

    `notes` are those of the members' builds. `shared_bytes` are weights that several members use and the folder has
    once, `size_bytes` all model files that an app loads, with these counted once.
    """

    target: str
    path: Path | None = None
    failure: str | None = None
    notes: tuple[str, ...] = ()
    size_bytes: int = 0
    shared_bytes: int = 0
    verify: GroupReport | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the group was made and passed; one that was not verified is not proven."""
        if self.path is None:
            return "fail"
        return "not proven" if self.verify is None else self.verify.verdict


class GroupBuild(Shown, msgspec.Struct, frozen=True, kw_only=True):
    """What became of a group: the sha256 of its models, the samples it was made and judged with, and each target."""

    group: str
    members: dict[str, str]
    calibration_samples: int
    golden_samples: int
    targets: tuple[GroupTarget, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst of the targets'."""
        return worst_verdict(target.verdict for target in self.targets)


def describe_group_build(report: GroupBuild) -> Iterator[str]:
    """Yields the lines of a group's build."""
    yield f"{report.group}: {', '.join(report.members)}; {report.golden_samples} samples judge the whole"
    for target in report.targets:
        if target.path is None:
            yield f"- {target.target}: {target.failure}"
            continue
        shared = f", {format_bytes(target.shared_bytes)} of them shared" if target.shared_bytes else ""
        yield f"{target.path}: {format_bytes(target.size_bytes)}{shared}: {target.verdict}"
        yield from () if target.verify is None else describe_group(target.verify)
        yield from (f"- {note}" for note in target.notes)


def headline_group(target: GroupTarget) -> str:
    """Returns in a sentence what became of a group on a target."""
    if target.path is None:
        return f"It cannot be built: {target.failure}."
    if target.verify is None or not target.verify.runs:
        return "It ran nowhere."
    bad = next((run for run in target.verify.runs if run.verdict != "pass"), target.verify.runs[0])
    weak = next((name for name, member in target.verify.members.items() if member.verdict != "pass"), None)
    member = "" if weak is None else f"; {weak} by itself: {target.verify.members[weak].verdict}"
    return f"{bad.device}: {_describe_metric(bad)}: {bad.verdict}{member}."


def describe_group(report: GroupReport) -> Iterator[str]:
    """Yields the lines of a group's verification: each device with the whole, and each member."""
    for run in report.runs:
        yield f"  {run.device} ({run.evidence}): {_describe_metric(run)}: {run.verdict}"
        yield from (f"  - {line}" for line in (*run.judgement.failures, *run.judgement.unproven))
    for name, member in report.members.items():
        yield f"  {name} by itself: {member.verdict}"
        yield from (f"  - {line}" for line in (*member.failures, *member.unproven))
        for found in member.runs:
            yield from (f"  - {found.device}: {line}" for line in (*found.failures, *found.unproven))
        yield from (f"  - {skip.device} did not run: {skip.reason}" for skip in member.skipped)


def _describe_metric(run: GroupRun) -> str:
    calls = ", ".join(f"{name} {count}" for name, count in run.runs.items())
    if run.task is None:
        return f"{run.samples} samples, runs: {calls}"
    scores = f"{format_score(run.task, run.task.got)}, float {format_score(run.task, run.task.reference)}"
    return f"{run.task.name} {scores}, {describe_difference(run.task)} points, {run.samples} samples, runs: {calls}"
