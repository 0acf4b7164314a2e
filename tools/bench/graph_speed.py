"""Seconds and memory of reading a model for its graph: ours beside onnx-ir, on the same files in the same run.

    python tools/bench/graph_speed.py [MODEL ...] [--runs N] [--ir FOLDER]

Without models it takes two of ../shared/zoo and three that it makes, of 5,000 nodes: with 2 MB of weights, with 600 MB,
and with these in an external file. `--ir` is a folder with onnx-ir, which is no dependency
(`pip install --target FOLDER onnx-ir`). Each cell is a process of its own: processor seconds beyond the imports, the
least of N runs, and the megabytes by which the peak of memory grew. *graph* loads, and finds producers, consumers,
constants, types and shapes; *proto* makes what onnx's checker and ONNX Runtime's quantizer take; *bytes* reads and
writes, and says whether both are equal (y or n).
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import view_model
from edgekit.graph.inference import infer_model
from edgekit.model.skim import skim_model

ROOT = Path(__file__).parents[2]
ZOO = ROOT.parent / "shared/zoo/models"
MATRICES = 2500


def main() -> int:
    """Prints a table; a child process runs one job and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ir", type=Path, default=None)
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ir is not None:
        sys.path.append(str(options.ir))
    if options.job:
        return _run(options.job, options.models[0])
    jobs = JOBS if options.ir else [job for job in JOBS if not job.startswith("ir")]
    with tempfile.TemporaryDirectory() as folder:
        print(f"{'seconds, MB':28}" + "".join(f"{job:>13}" for job in jobs))
        for model in options.models or _make_models(Path(folder)):
            cells = [_measure(job, model, options) for job in jobs]
            print(f"{model.name[:27]:28}" + "".join(f"{cell:>13}" for cell in cells), flush=True)
    return 0


def _load_ir(path: Path) -> Any:
    return importlib.import_module("onnx_ir").load(path)


def _write_ir(path: Path) -> bytes:
    return bytes(importlib.import_module("onnx_ir").to_proto(_load_ir(path)).SerializeToString())


def _load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


JOBS: dict[str, Callable[[Path], Any]] = {
    "graph": lambda path: view_model(infer_model(skim_model(path)), path.parent),
    "ir graph": lambda path: importlib.import_module("onnx_ir.passes.common").ShapeInferencePass()(_load_ir(path)),
    "proto": _load,
    "ir proto": lambda path: importlib.import_module("onnx_ir").to_proto(_load_ir(path)),
    "bytes": lambda path: _load(path).SerializeToString() == path.read_bytes(),
    "ir bytes": lambda path: _write_ir(path) == _load(path).SerializeToString(),
}


def _run(job: str, path: Path) -> int:
    if job.startswith("ir"):
        importlib.import_module("onnx_ir.passes.common")
    before, start = _peak_mb(), time.process_time()
    found = JOBS[job](path)
    seconds, verdict = time.process_time() - start, "ny"[found] if isinstance(found, bool) else ""
    print(f"{seconds:.3f} {_peak_mb() - before:.0f} {verdict}")
    return 0


def _peak_mb() -> float:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1000


def _measure(job: str, model: Path, options: argparse.Namespace) -> str:
    argv = [sys.executable, __file__, str(model), "--job", job, *(["--ir", str(options.ir)] if options.ir else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    rows = [
        subprocess.run(argv, capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(options.runs)
    ]
    return min(rows, key=lambda row: float(row.split()[0])).strip()


def _make_models(folder: Path) -> list[Path]:
    zoo = [path for path in (ZOO / "mobilenetv2_1.0_224_fp32.onnx", ZOO / "silero_vad.onnx") if path.exists()]
    made = [folder / name for name in ("5000_nodes_2MB.onnx", "5000_nodes_600MB.onnx", "5000_nodes_external.onnx")]
    onnx.save(_make(8), made[0])
    onnx.save(_make(245), made[1])
    onnx.save(_make(245), made[2], save_as_external_data=True, location="weights.data")
    return [*zoo, *made]


def _make(width: int) -> onnx.ModelProto:
    rng, value = np.random.default_rng(0), helper.make_tensor_value_info
    weights = [numpy_helper.from_array(rng.random((width, width), np.float32), f"w{at}") for at in range(MATRICES)]
    nodes = [
        node
        for at in range(MATRICES)
        for node in (
            helper.make_node("MatMul", [f"y{at}", f"w{at}"], [f"m{at}"], f"matmul{at}"),
            helper.make_node("Relu", [f"m{at}"], [f"y{at + 1}"], f"relu{at}"),
        )
    ]
    ends = ([value("y0", 1, [1, width])], [value(f"y{MATRICES}", 1, [1, width])])
    graph = helper.make_graph(nodes, "made", *ends, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


if __name__ == "__main__":
    sys.exit(main())
