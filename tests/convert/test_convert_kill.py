"""A conversion that is killed at any point leaves each file whole or not there at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from convert_models import make_float

pytestmark = pytest.mark.slow

ATTEMPTS = 12
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from edgekit.convert.convert import convert_model
from edgekit.model.model import load_model
from edgekit.target import load_target

model, target, folder = load_model(Path(sys.argv[1])), load_target("nnapi"), Path(sys.argv[2])

def convert(out):
    pid = os.fork()
    if pid == 0:
        convert_model(model, target, out)
        os._exit(0)
    return pid

def read(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} if out.exists() else {}

start = time.perf_counter()
os.waitpid(convert(folder / "whole"), 0)
longest = (time.perf_counter() - start) * 1.5
expected, counts, damaged, attempts = read(folder / "whole"), [], [], int(sys.argv[3])
for attempt in range(attempts):
    out = folder / str(attempt)
    pid = convert(out)
    time.sleep(longest * attempt / (attempts - 1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = read(out)
    counts.append(len(found))
    longest *= 1.0 if found else 1.1  # the first run may have had the machine to itself
    damaged += [name for name, data in found.items() if data != expected[name]]
print(json.dumps({"expected": sorted(expected), "counts": counts, "damaged": damaged}))
"""
"""The children fork from one process that has done its imports, before it makes any session."""


def test_kill_9_leaves_whole_files_or_none(tmp_path: Path) -> None:
    model = str(make_float(tmp_path / "m.onnx").path)
    argv = [sys.executable, "-c", PROGRAM, model, str(tmp_path / "o"), str(ATTEMPTS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(argv, check=True, env=environment, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["expected"] == ["model.onnx", "model.runtime.ort"]
    assert report["damaged"] == []
    assert len(report["counts"]) == ATTEMPTS
    assert {0, 2} <= set(report["counts"]), "no child was killed before, or none after, its files were there"
