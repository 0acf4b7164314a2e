"""Groups verified end to end: an honest device passes, one that is wrong, or stops on the way, fails."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
from devices_models import require_device
from fixture_types import MakeOnce
from group_models import make_speech
from msgspec.structs import replace
from verify_devices import InProcess

from edgekit.bundle.folder import VERIFY
from edgekit.bundle.group.group import Group, open_group, opened_group
from edgekit.bundle.sign import make_key
from edgekit.cli.main import run_command
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.errors import BundleError, DeviceError
from edgekit.jobs.group import build_group
from edgekit.jobs.release import Allowed, sign_verified
from edgekit.model.tensors import Tensors
from edgekit.recipe import Data, Recipe
from edgekit.report.tables import GroupBuild
from edgekit.verify.on_devices import GroupReport, verify_group


def make(folder: Path) -> None:
    path, source = make_speech(folder), str(folder / "speech.npz")
    data = Data(source=source, evaluation=source, labels=folder / "speech.txt")
    report: GroupBuild = build_group(path, data, folder / "out", Recipe(targets=("cpu",)), verify=False)
    assert (report.targets[0].failure, report.verdict, report.golden_samples) == (None, "not proven", 40)


@pytest.fixture(scope="module")
def speech(make_once: MakeOnce) -> Group:
    return open_group(make_once("speech", make) / "out" / "speech-cpu")


class Deaf(InProcess, frozen=True, kw_only=True):
    """Forgets what the encoder heard."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        def read() -> Iterator[Tensors]:
            for sample in job.samples:
                yield {**sample, "memory": sample["memory"] * 0} if "memory" in sample else sample

        forgetful = Samples(source="", count=job.samples.count, read=read)
        return super().run_job(replace(job, samples=forgetful), work)


class Tired(InProcess, frozen=True, kw_only=True):
    """Runs single models, and not for as long as a text takes."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        def read() -> Iterator[Tensors]:
            yield from islice(job.samples, 60)
            raise DeviceError("the battery is empty", hint="charge it")

        tiring = replace(job, samples=Samples(source="", count=job.samples.count, read=read))
        return super().run_job(tiring if work.name.startswith("decoder-") else job, work)


class Dying(InProcess, frozen=True, kw_only=True):
    """Runs single models, and dies within a text."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        if not work.name.startswith("decoder-"):
            return super().run_job(job, work)
        first = Samples(source="", count=job.samples.count, read=lambda: islice(job.samples, 60))
        run = super().run_job(replace(job, samples=first), work)
        return replace(run, failure="was ended by SIGSEGV", crashed=True)


def run(group: Group, device: InProcess) -> GroupReport:
    return verify_group(group, lambda _: [device])


def test_a_device_that_stops_within_a_text_fails_and_an_emulator_that_crashes_proves_nothing(speech: Group) -> None:
    report = run(speech, Tired())
    assert {member.verdict for member in report.members.values()} == {"pass"}
    assert report.verdict == "fail"
    assert "the battery is empty" in report.runs[0].judgement.failures[0]
    report = run(speech, Dying())
    assert {member.verdict for member in report.members.values()} == {"pass"}
    assert report.verdict == "not proven"
    (doubt,) = report.runs[0].judgement.unproven
    assert "the emulator crashed, which proves nothing: member 'decoder': was ended by SIGSEGV" in doubt


def test_a_device_that_does_not_hear_fails_by_the_metric_and_none_proves_nothing(speech: Group) -> None:
    report = run(speech, Deaf())
    assert report.verdict == "fail"
    assert "points worse than the float model" in report.runs[0].judgement.failures[0]
    report = verify_group(speech, lambda _: [])
    assert (report.verdict, report.runs) == ("not proven", ())


@pytest.mark.slow
def test_a_group_passes_in_qnns_simulator(tmp_path: Path) -> None:
    require_device("qnn-htp-sim", "qnn")
    path, source = make_speech(tmp_path, samples=4), str(tmp_path / "speech.npz")
    data = Data(source=source, evaluation=source, labels=tmp_path / "speech.txt")
    build_group(path, data, tmp_path / "out", Recipe(targets=("qnn",), forms=("onnx",)), verify=False)
    folder = tmp_path / "out" / "speech-qnn"
    assert run_command(["group", "verify", str(folder), "--require", "qnn-htp-sim", "-q"]) == 0
    (whole,) = json.loads((folder / VERIFY).read_bytes())["runs"]
    assert (whole["evidence"], whole["task"]["got"], whole["runs"]["encoder"]) == ("simulator", 1.0, 1)
    # As many turns of one session as the longest text has tokens.
    assert whole["runs"]["decoder"] > 2


@pytest.fixture
def passed(speech: Group, tmp_path: Path) -> Path:
    """A group that passed on an honest device."""
    folder = Path(shutil.copytree(speech.folder, tmp_path / "speech-cpu"))
    assert verify_group(open_group(folder), lambda _: [InProcess()]).passed
    return folder


def test_a_signed_group_says_what_was_verified_and_shows_every_change(passed: Path, tmp_path: Path) -> None:
    public, other = make_key(tmp_path / "release.pem"), make_key(tmp_path / "other.pem")
    signed, doubts = sign_verified(passed, tmp_path / "release.pem")
    assert (doubts, signed.attested.result) == ((), "PASSED")
    group = open_group(passed, key=public)
    assert group.attested == signed.attested
    whole = [run for run in signed.attested.edgekit_runs if run.bundle == "speech-cpu"]
    assert whole[0].metric == {"exact-match": 1.0}
    assert {"speech-cpu", "speech-cpu/encoder", "speech-cpu/decoder"} <= set(signed.attested.passed_tests)
    with pytest.raises(BundleError, match="another key"):
        open_group(passed, key=other)
    (passed / "README.md").write_bytes(b"x" * (passed / "README.md").stat().st_size)
    with pytest.raises(BundleError, match="was altered"):
        open_group(passed, key=public)


def test_a_group_that_did_not_pass_is_signed_only_where_that_is_allowed(speech: Group, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(speech.folder, tmp_path / "speech-cpu", ignore=shutil.ignore_patterns(VERIFY)))
    make_key(tmp_path / "release.pem")
    with pytest.raises(BundleError, match="was not verified as it is now"):
        sign_verified(folder, tmp_path / "release.pem")
    verify_group(open_group(folder), lambda _: [Deaf()])
    with pytest.raises(BundleError, match="did not pass its verification"):
        sign_verified(folder, tmp_path / "release.pem")
    signed, (doubt,) = sign_verified(folder, tmp_path / "release.pem", allowed=Allowed(failed=True))
    assert (doubt.verdict, signed.attested.result) == ("fail", "FAILED")
    assert "speech-cpu" in signed.attested.failed_tests


def test_a_group_is_packed_as_an_archive_that_verifies(
    passed: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    make_key(tmp_path / "release.pem")
    sign_verified(passed, tmp_path / "release.pem")
    words = ["package", str(passed), "--as", "tar", "--key", str(tmp_path / "release.pem.pub")]
    for name in ("a.tar", "b.tar"):
        assert run_command([*words, "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with opened_group(tmp_path / "a.tar", key=tmp_path / "release.pem.pub") as group:
        assert group.attested is not None
    said = refused("package", str(passed), "--as", "aar", "--out", str(tmp_path / "aar"))
    assert "has no code that runs several models" in said
    said = refused("package", str(passed), "--as", "zip", "--name", "mine", "--out", str(tmp_path / "z.zip"))
    assert "under its own name" in said
