"""What edgekit asks of a system: Windows has no fcntl, no resource and no process groups; any folder may be hostile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import parse_model

pytestmark = pytest.mark.slow

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
CNN = """<ir_version: 9, opset_import: ["" : 17]>
net (float[1,3,8,8] x) => (float[1,4] y)
<float[4,3,1,1] w = {0.1, 0.2, -0.3, 0.4, -0.5, 0.6, 0.7, -0.8, 0.9, 1.0, -1.1, 1.2}> {
  a = Conv(x, w) r = Relu(a) p = GlobalAveragePool(r) y = Flatten(p) }"""
HIDDEN = """
import json, os, signal, sys
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
    commands = [
        ["inspect", model, "--json"],
        ["inspect", model, "--sizes"],
        ["check", model, "--compare-ort"],
        ["prepare", model, "--fix", "--target", "nnapi", "--out", out["p.onnx"]],
        ["quantize", model, "--data", data, "--target", "cpu", "--cache", out["cache"], "--out", out["q.onnx"]],
        ["convert", out["q.onnx"], "--out", out["c"]],
        ["compare", model, out["q.onnx"], "--data", data, "--layers"],
        ["build", model, "--data", data, "--target", "cpu", "--target", "nnapi", "--no-verify", "--out", out["b"]],
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
