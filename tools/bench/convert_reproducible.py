"""Converts models in many processes and counts distinct files: `python convert_reproducible.py RUNS MODEL...`.

Each run is a process with its own PYTHONHASHSEED, folder and name length. ONNX Runtime's own bytes are counted beside.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.convert import OrtOptions, write_ort
from edgekit.model.model import load_model

SAVE = {
    "session.save_model_format": "ORT",
    "session.qdqisint8allowed": "1",
    "optimization.minimal_build_optimizations": "save",
}


def convert_once(path: str) -> None:
    """Prints the digests of ONNX Runtime's file and of both canonical styles as JSON."""
    model = load_model(Path(path))
    with tempfile.TemporaryDirectory() as folder:
        raw, full, runtime = (Path(folder) / name for name in ("raw.ort", "full.ort", "runtime.ort"))
        optimize_graph(model.path, raw, SessionSettings(level=Level.ALL, config=SAVE))
        write_ort(model, full, OrtOptions(style="full", cpu="arm"))
        write_ort(model, runtime, OrtOptions(style="runtime", cpu="arm"))
        print(json.dumps([hashlib.sha256(file.read_bytes()).hexdigest() for file in (raw, full, runtime)]))


def main() -> int:
    """Returns 1 if a canonical file was not always the same."""
    if len(sys.argv) == 2:
        convert_once(sys.argv[1])
        return 0
    runs, stable = int(sys.argv[1]), True
    for path in map(Path, sys.argv[2:]):
        digests = []
        for run in range(runs):
            with tempfile.TemporaryDirectory(suffix="x" * run) as folder:
                copy = Path(folder) / f"{'m' * (run + 1)}.onnx"
                copy.write_bytes(path.read_bytes())
                argv = [sys.executable, __file__, str(copy)]
                child = subprocess.run(
                    argv,
                    capture_output=True,
                    text=True,
                    check=True,
                    env={"PYTHONPATH": sys.path[0] + "/../..", "PYTHONHASHSEED": str(run)},
                )
                digests.append(json.loads(child.stdout))
        raw, full, runtime = (len(set(column)) for column in zip(*digests, strict=True))
        stable &= full == runtime == 1
        print(f"{path.name:40} of {runs} runs: ONNX Runtime {raw}, full {full}, runtime {runtime} distinct", flush=True)
    return 0 if stable else 1


if __name__ == "__main__":
    sys.exit(main())
