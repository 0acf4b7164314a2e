"""Groups verified end to end: an honest device passes, one that is wrong, or stops on the way, fails."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from group_models import make_speech
from verify_devices import InProcess

from edgekit.bundle.folder import VERIFY
from edgekit.bundle.group.group import Group, open_group
from edgekit.cli.main import run_command
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.errors import DeviceError
from edgekit.jobs.group import build_group
from edgekit.model.tensors import Tensors
from edgekit.recipe import Data, Recipe
from edgekit.report.grouped import GroupBuild, describe_group
from edgekit.verify.groups import GroupReport, verify_group


def make(folder: Path) -> None:
    path, source = make_speech(folder), str(folder / "speech.npz")
    data = Data(source=source, evaluation=source, labels=folder / "speech.txt")
    report: GroupBuild = build_group(path, data, folder / "out", Recipe(targets=("cpu",)), verify=False)
    assert (report.targets[0].failure, report.verdict, report.golden_samples) == (None, "not proven", 40)


@pytest.fixture(scope="module")
def speech(make_once: Callable[[str, Callable[[Path], None]], Path]) -> Group:
    return open_group(make_once("speech", make) / "out" / "speech-cpu")


class Deaf(InProcess, frozen=True, kw_only=True):
    """Forgets what the encoder heard."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        if any(spec.name == "logits" for spec in job.outputs):
            samples = [{**sample, "memory": sample["memory"] * 0} for sample in job.samples]
            job = _give(job, samples)
        return super().run_job(job, work)


class Tired(InProcess, frozen=True, kw_only=True):
    """Runs single models, and not for as long as a text takes: `work` tells which run of a member it is."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        if work.name == "decoder-2":
            raise DeviceError("the battery is empty", hint="charge it")
        return super().run_job(job, work)


def _give(job: Job, samples: Sequence[Tensors]) -> Job:
    return msgspec.structs.replace(job, samples=Samples(source="", count=len(samples), read=lambda: iter(samples)))


def run(group: Group, device: InProcess) -> GroupReport:
    return verify_group(group, lambda _: [device])


def test_an_honest_device_spells_what_was_heard(speech: Group) -> None:
    report = run(speech, InProcess())
    (whole,) = report.runs
    assert whole.task is not None
    assert (report.verdict, whole.task.got, whole.task.reference, whole.samples) == ("pass", 1.0, 1.0, 40)
    assert whole.runs == {"encoder": 1, "decoder": 8}
    assert (speech.folder / VERIFY).is_file()
    assert any("exact-match 100.0%" in line for line in describe_group(report))


def test_a_device_that_does_not_hear_fails_by_the_metric(speech: Group) -> None:
    report = run(speech, Deaf())
    assert report.verdict == "fail"
    assert "points worse than the float model" in report.runs[0].judgement.failures[0]


def test_a_device_that_stops_within_a_text_fails(speech: Group) -> None:
    report = run(speech, Tired())
    assert {member.verdict for member in report.members.values()} == {"pass"}
    assert report.verdict == "fail"
    assert "the battery is empty" in report.runs[0].judgement.failures[0]


def test_a_group_that_ran_nowhere_is_not_proven(speech: Group) -> None:
    report = verify_group(speech, lambda _: [])
    assert (report.verdict, report.runs) == ("not proven", ())


@pytest.mark.slow
def test_a_group_passes_on_this_machine(speech: Group) -> None:
    assert run_command(["group", "verify", str(speech.folder), "--require", "host", "-q"]) == 0
