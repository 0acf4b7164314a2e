import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bundle_models import flip_byte
from demo_paths import CALIBRATION, MODEL
from fixture_types import Answer, Refused, Shown
from tiny_models import write_small_net

from edgekit.cli.main import run_command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    argv = ["build", str(MODEL), "--data", str(CALIBRATION), "--samples", "8", "--precision", "fp32", "--no-verify"]
    targets = ["--target", "coreml", "--target", "cpu"]
    assert run_command([*argv, *targets, "--out", str(folder / "out")]) == 0
    assert run_command(["sign", "--new-key", str(folder / "key")]) == 0
    return folder


@pytest.fixture
def bundle(build: Path, tmp_path: Path) -> Path:
    """A copy of the bundle for the CPU."""
    return shutil.copytree(build / "out" / "digits_mobilenet-cpu", tmp_path / "digits_mobilenet-cpu")


@pytest.fixture(scope="module")
def on_host(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle for the CPU after its verification on this machine; tests must not change it."""
    bundle = shutil.copytree(build / "out" / "digits_mobilenet-cpu", tmp_path_factory.mktemp("host") / "cpu")
    assert run_command(["verify", str(bundle), "--on", "host"]) == 0
    return bundle


@pytest.fixture
def verified(on_host: Path, tmp_path: Path) -> Path:
    """A copy of that bundle."""
    return shutil.copytree(on_host, tmp_path / "digits_mobilenet-cpu")


def test_a_bundle_is_signed_and_checked(build: Path, capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    bundle, key, public = str(build / "out" / "digits_mobilenet-coreml"), str(build / "key"), str(build / "key.pub")
    assert run_command(["verify", bundle, "--key", public, "--files-only"]) == 2
    error = capsys.readouterr().err
    assert "is not signed" in error
    assert error.count("\n") == 1
    signed = answer(["sign", bundle, "--key", key, "--allow-failed"])
    assert "digits_mobilenet-coreml was not verified" in str(signed["attested"])
    whole = answer(["verify", bundle, "--key", public, "--files-only"])
    assert whole["sha256"] == signed["sha256"]
    assert whole["signed"] is True
    assert whole["attested"] == signed["attested"]
    assert answer(["verify", bundle, "--files-only"])["attested"] is None
    assert run_command(["verify", bundle, "--key", public, "--on", "emulated"]) == 3


def test_joined_targets_are_opened_from_an_archive(build: Path, refused: Refused, answer: Answer) -> None:
    archive, public = str(build / "all.zip"), str(build / "key.pub")
    join = ("join", str(build / "out"), "--allow-failed", "--out")
    joined = answer([*join, archive, "--key", str(build / "key")])
    assert joined["sha256"] == answer([*join, str(build / "folder")])["sha256"]
    assert run_command(["verify", archive, "--key", public, "--files-only"]) == 0
    emulated = ["--target", "coreml", "--on", "emulated", "--accept-unproven"]
    assert run_command(["verify", archive, "--key", public, *emulated]) == 0
    assert "--target coreml or cpu" in refused("verify", archive, "--on", "emulated")
    flip_byte(Path(shutil.copy(archive, build / "bad.zip")))
    assert run_command(["verify", str(build / "bad.zip"), "--key", public, "--files-only"]) == 2


def test_a_signature_says_what_was_verified(
    build: Path, on_host: Path, tmp_path: Path, shown: Shown, answer: Answer
) -> None:
    shutil.copytree(on_host, tmp_path / "in" / "cpu")
    shutil.copytree(build / "out" / "digits_mobilenet-coreml", tmp_path / "in" / "coreml")
    assert run_command(["verify", str(tmp_path / "in" / "coreml"), "--on", "host"]) == 3
    joined, public = tmp_path / "all.tar", str(build / "key.pub")
    join = ["join", str(tmp_path / "in"), "--out", str(joined), "--key", str(build / "key"), "--accept-unproven"]
    assert run_command(join) == 0
    said = answer(["verify", str(joined), "--key", public, "--files-only"])["attested"]
    assert isinstance(said, dict)
    names = [f"digits_mobilenet-{target}" for target in ("coreml", "cpu")]
    # No run of Core ML's provider is in it: the bundle is warned of, what ran on the host passed.
    assert (said["result"], said["failed_tests"], said["warned_tests"]) == ("WARNED", [], names[:1])
    assert said["passed_tests"] == [f"{names[0]} on host", names[1], f"{names[1]} on host"]
    for name, run in zip(names, said["edgekit_runs"], strict=True):
        report = json.loads((tmp_path / "in" / name.partition("-")[2] / "verify.json").read_bytes())["runs"][0]
        assert (run["bundle"], run["device"], run["evidence"]) == (name, "host", report["evidence"])
        for ours, theirs in zip(run["outputs"], report["outputs"], strict=True):
            assert all(ours[key] == theirs[key] for key in ("name", "sqnr_db", "cosine"))
        assert run["latency_ms"] == report["latency_ms"]["median"]
    told = shown(["verify", str(joined), "--key", public, "--files-only"])
    assert "signed with that key: its verification WARNED on host" in told


def test_a_build_with_another_ones_outputs_has_its_digest(build: Path, refused: Refused, answer: Answer) -> None:
    argv = ["build", str(MODEL), "--data", str(CALIBRATION), "--samples", "8", "--precision", "fp32", "--no-verify"]
    first = json.loads((build / "out" / "report.json").read_bytes())
    again = answer([*argv, "--target", "coreml", "--golden", str(build / "out"), "--out", str(build / "again")])
    assert again["bundles"][0]["sha256"] == first["bundles"][0]["sha256"]
    assert "holds no bundle" in refused(*argv, "--golden", str(build), "--out", str(build / "no"))
    assert not (build / "no").exists()


def test_a_build_that_is_not_proven_is_exit_code_3(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    without_arm: Callable[[str], str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("metric.toml").write_text('[metric]\nname = "top1"\nmax_drop = 0.1\n')
    write_small_net(tmp_path / "small.onnx", tmp_path / "small.npz")
    np.save("labels.npy", np.arange(32) % 10)
    data = ["--data", "small.npz", "--eval", "small.npz", "--labels", "labels.npy"]
    fast = ["--samples", "8", "--target", without_arm("cpu"), "--precision", "fp32", "--recipe", "metric.toml"]
    argv = ["build", "small.onnx", *data, *fast, "--out", "out"]
    # 32 labelled samples on which both sides agree leave points of doubt.
    code = run_command([*argv, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["verdict"], report["bundles"][0]["verdict"]) == (3, "not proven", "not proven")
    assert all(not run["failures"] for run in report["bundles"][0]["verify"]["runs"])
    assert "not proven; cpu: " in Path("out/report.html").read_text()
    assert run_command([*argv, "--accept-unproven"]) == 0


def release(folder: Path, work: Path, key: Path) -> list[list[str]]:
    """The commands that let a bundle go."""
    return [
        ["sign", str(folder), "--key", str(key)],
        ["join", str(folder), "--out", str(work / "joined.zip")],
        ["package", str(folder), "--as", "tar", "--out", str(work / "model.tar")],
    ]


def test_an_unverified_one_stays(
    build: Path, bundle: Path, on_host: Path, tmp_path: Path, refused: Refused, answer: Answer
) -> None:
    for command in release(bundle, tmp_path, build / "key"):
        assert "was not verified" in refused(*command)
        allowed = answer([*command, "--allow-failed"])["allowed"]
        assert allowed == [{"bundle": str(bundle), "reason": "was not verified", "verdict": "fail"}]
    shutil.copy(on_host / "verify.json", bundle)
    (tmp_path / "again").mkdir()
    for command in release(bundle, tmp_path / "again", build / "key"):
        assert answer([*command])["allowed"] == []


def test_an_unproven_bundle_is_released_only_by_option(
    build: Path, verified: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Refused, answer: Answer
) -> None:
    bundle, report = verified, json.loads((verified / "verify.json").read_bytes())
    # The figures pass, and their intervals on so few samples do not.
    limits = {"gate": "bound", "min_top1_agreement": 0.999}
    report["runs"] = [{**run, "thresholds": {**run["thresholds"], **limits}} for run in report["runs"]]
    (bundle / "verify.json").write_text(json.dumps(report))
    for command in release(bundle, tmp_path, build / "key"):
        assert run_command(command) == 2
        said = capsys.readouterr().err
        assert "is not proven: output 'logits' has top-1 agreement 1" in said
        assert "--accept-unproven to release it" in said
        allowed = answer([*command, "--accept-unproven"])["allowed"]
        assert [doubt["verdict"] for doubt in allowed] == ["not proven"]
    attested = answer(["verify", str(bundle), "--key", str(build / "key.pub"), "--files-only"])["attested"]
    assert attested["result"] == "WARNED"
    assert len(attested["edgekit_allowed"]) == 1
    # What failed is not let through by it.
    report["runs"][0]["outputs"][0]["agreements"][0]["share"] = 0.1
    (bundle / "verify.json").write_text(json.dumps(report))
    for command in release(bundle, tmp_path, build / "key"):
        assert "did not pass its verification" in refused(*command, "--accept-unproven")


def test_a_bundle_changed_afterwards_is_not_released(
    build: Path, verified: Path, tmp_path: Path, refused: Refused
) -> None:
    report = json.loads((verified / "verify.json").read_bytes())
    (verified / "verify.json").write_text(json.dumps({**report, "bundle_sha256": "0" * 64}))
    assert "was changed after its verification" in refused(*release(verified, tmp_path, build / "key")[0])


def test_a_pipe_in_place_of_a_report_is_not_read(build: Path, bundle: Path, tmp_path: Path) -> None:
    os.mkfifo(bundle / "verify.json")
    assert run_command(release(bundle, tmp_path, build / "key")[0]) == 2
