"""The README's commands and its Python run as they stand."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import parse_model

from edgekit.cli.main import run_command
from edgekit.evidence import Evidence
from edgekit.target import target_names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def _block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_quickstart_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edgekit").symlink_to(ROOT / "edgekit")
    for line in _block("tests run these commands").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "edgekit"
        assert run_command(arguments) == 0, line


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As it is copied: with no name and no folder but those of a clone.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "edgekit").symlink_to(ROOT / "edgekit")
    exec(_block("tests run this"), {})  # noqa: S102 - our own README
    assert capsys.readouterr().out.startswith("yes ")


def test_every_command_stands_in_the_readme_or_its_help() -> None:
    assert all(
        word in README for word in ("make demo", "make test", "edgekit build", "edgekit check", "edgekit verify")
    )


def test_no_paragraph_is_longer_than_five_lines() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    paragraphs = [part.strip() for part in prose.split("\n\n") if not part.strip().startswith(("|", "#"))]
    # As a page shows them: five lines of 160 letters, however the source is broken.
    assert not [part for part in paragraphs if len(part.splitlines()) > 5 or len(part) > 5 * 160]


def test_one_picture_and_one_table_of_what_is_proved() -> None:
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", README)
    assert (ROOT / picture).is_file()
    (proved,) = re.findall(r"## What is proved, and how\n\n(\|.*?)\n\n", README, re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)` \|", proved, re.MULTILINE)) == set(target_names())
    kinds = {word for row in proved.splitlines()[2:] for word in re.findall(r"`([\w-]+)`", row.rsplit("|", 2)[1])}
    assert kinds <= {kind.value for kind in Evidence}
    assert README.count("## What is proved") == 1


# What edgekit asks of a system: Windows has no fcntl, no resource and no process groups; any folder may be hostile.

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
CNN = """<ir_version: 9, opset_import: ["" : 17]>
net (float[1,3,8,8] x) => (float[1,4] y)
<float[4,3,1,1] w = {0.1, 0.2, -0.3, 0.4, -0.5, 0.6, 0.7, -0.8, 0.9, 1.0, -1.1, 1.2}> {
  a = Conv(x, w) r = Relu(a) p = GlobalAveragePool(r) y = Flatten(p) }"""
HIDDEN = """
import json, os, shutil, signal, sys
shutil._use_fd_functions = False  # as on Windows, which has no folders as file descriptors
for name in ("fcntl", "resource", "pwd", "grp", "termios", "_posixshmem"):
    sys.modules[name] = None
gone = "O_NOFOLLOW O_NONBLOCK wait4 wait3 killpg setsid getpgid geteuid getuid getgid mkfifo fork forkpty".split()
for name in gone:
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGQUIT", "SIGALRM", "setitimer"):
    delattr(signal, name)
from edgekit.cli.main import run_command
for arguments in json.loads(sys.argv[1]):
    code = run_command(arguments)
    print("::", arguments[0], code, flush=True)
"""


def test_the_pure_stages_run_without_what_windows_lacks(tmp_path: Path) -> None:
    model = str(parse_model(CNN, tmp_path / "net.onnx"))
    data = str(tmp_path / "s.npz")
    np.savez(data, x=np.random.default_rng(0).normal(size=(8, 1, 3, 8, 8)).astype(np.float32))
    out = {name: str(tmp_path / name) for name in ("p.onnx", "q.onnx", "c", "b", "j", "cache")}
    targets = ["--target", "cpu", "--target", "nnapi"]
    commands = [
        ["inspect", model, "--json"],
        ["inspect", model, "--sizes"],
        ["check", model, "--compare-ort"],
        ["prepare", model, "--fix", "--target", "nnapi", "--out", out["p.onnx"]],
        ["quantize", model, "--data", data, "--target", "cpu", "--cache", out["cache"], "--out", out["q.onnx"]],
        ["convert", out["q.onnx"], "--out", out["c"]],
        ["compare", model, out["q.onnx"], "--data", data, "--layers"],
        ["build", model, "--data", data, *targets, "--precision", "fp32", "--no-verify", "--out", out["b"]],
        ["verify", f"{out['b']}/net-cpu", "--files-only"],
        ["diff", f"{out['b']}/net-cpu", f"{out['b']}/net-nnapi"],
        ["join", f"{out['b']}/net-cpu", f"{out['b']}/net-nnapi", "--allow-failed", "--out", out["j"]],
        ["package", f"{out['b']}/net-cpu", "--as", "zip", "--allow-failed", "--out", str(tmp_path / "n.zip")],
        ["verify", f"{out['b']}/net-cpu", "--on", "host"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, json.dumps(commands)],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=ENV,
    )  # fmt: skip
    ended = [tuple(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith(":: ")]
    wanted = [(arguments[0], "1" if arguments[0] == "diff" else "0") for arguments in commands]
    assert ended == wanted, done.stderr[-3000:]


def test_a_file_of_the_working_folder_is_no_module(tmp_path: Path) -> None:
    for name in ("msgspec", "numpy", "click", "typing", "onnx"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('a stranger runs: {name}')")
    model = parse_model(CNN, tmp_path / "net.onnx")
    done = subprocess.run(
        [sys.executable, "-m", "edgekit", "inspect", model.name],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=ENV,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Conv" in done.stdout


# CI's rule: what can run there may not be skipped.

TESTS = Path(__file__).parents[1]


SKIPPING = """
import pytest

@pytest.mark.parametrize(("ci", "reason"), [
    ("true", "qemu is missing: apt-get install qemu-user-static"),
    ("", "qemu is missing: apt-get install qemu-user-static"),
    ("true", "needs a Mac"),
])
def test_one_is_skipped(ci, reason, monkeypatch):
    monkeypatch.setenv("CI", ci)
    pytest.skip(reason)
"""


def test_a_skip_fails_in_ci_unless_ci_cannot_mend_it(tmp_path: Path) -> None:
    for path in TESTS.glob("*.py"):
        if not path.name.startswith("test_"):
            shutil.copy(path, tmp_path)
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "CI": ""}, capture_output=True, check=False)
    assert b"skipped in CI, where it can run: Skipped: qemu is missing" in done.stdout
    assert b"1 failed, 2 skipped" in done.stdout
