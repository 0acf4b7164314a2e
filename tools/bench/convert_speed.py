"""Times both ORT styles of a ResNet-50 against ONNX Runtime's own converter: `python convert_speed.py [RUNS]`.

The model is the onnx package's light ResNet-50 with random weights (102 MB). Each conversion is a process of its own,
and the two converters take turns, so that what else the machine does falls on both; printed are the least CPU time and
wall time inside the process, without imports and the digest of the model, the highest peak of memory, and the ratios.
The canonical form and the load of the finished file, which the stock converter does not do, are included. Returns 1
where the ratio of CPU time, which other processes disturb least, or of memory is over 1.2.
"""

import collections
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

from edgekit.convert import OrtOptions, write_ort
from edgekit.model.model import Model, load_model

MOST = 1.2
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"


def make_resnet(path: Path) -> None:
    """Writes the light ResNet-50 with random weights in place of its constant ones."""
    proto = onnx.load(str(LIGHT))
    rng = np.random.default_rng(0)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    nodes = []
    for node in proto.graph.node:
        if node.op_type != "ConstantOfShape":
            nodes.append(node)
            continue
        values = np.abs(rng.standard_normal(shapes[node.input[0]])) * 0.05 + 0.01
        proto.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), node.output[0]))
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.ir_version = max(proto.ir_version, 4)
    onnx.save(proto, str(path))


def convert_stock(model: Model, style: str, out: Path) -> None:
    """Converts with ONNX Runtime's own converter."""
    styles = {"full": OptimizationStyle.Fixed, "runtime": OptimizationStyle.Runtime}
    convert_onnx_models_to_ort(model.path, output_dir=out, optimization_styles=[styles[style]], target_platform="arm")


def convert_ours(model: Model, style: str, out: Path) -> None:
    """Converts with edgekit, canonical form included."""
    write_ort(model, out / "model.ort", OrtOptions(style="full" if style == "full" else "runtime", cpu="arm"))


CONVERTERS: dict[str, Callable[[Model, str, Path], None]] = {"stock": convert_stock, "edgekit": convert_ours}


def measure(who: str, style: str, model: str) -> None:
    """Converts once and prints seconds and peak memory as JSON."""
    with tempfile.TemporaryDirectory() as out:
        loaded = load_model(Path(model))
        start, start_cpu = time.perf_counter(), time.process_time()
        CONVERTERS[who](loaded, style, Path(out))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sys.stdout.write("\n" + json.dumps([cpu_seconds, peak, seconds]))


def main() -> int:
    """Prints a line for each converter and style."""
    if len(sys.argv) == 4:
        measure(*sys.argv[1:])
        return 0
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "resnet50.onnx"
        make_resnet(model)
        figures: dict[tuple[str, str], list[list[float]]] = collections.defaultdict(list)
        for _ in range(runs):
            for style in ("full", "runtime"):
                for who in CONVERTERS:
                    argv = [sys.executable, __file__, who, style, str(model)]
                    done = subprocess.run(argv, capture_output=True, text=True, check=True)
                    figures[style, who].append(json.loads(done.stdout.splitlines()[-1]))
    within = True
    for style in ("full", "runtime"):
        runs_of = {who: list(zip(*figures[style, who], strict=True)) for who in CONVERTERS}
        best = {who: (min(cpu), max(peaks), min(wall)) for who, (cpu, peaks, wall) in runs_of.items()}
        for who, (cpu, peak, wall) in best.items():
            print(f"{style:8} {who:8} {cpu:6.2f} s CPU  {peak / 1e6:6.0f} MB  {wall:6.2f} s")
        ratios = [ours / theirs for ours, theirs in zip(best["edgekit"], best["stock"], strict=True)]
        print(f"{style:8} ratio    {ratios[0]:6.2f}        {ratios[1]:6.2f}     {ratios[2]:6.2f}", flush=True)
        within &= max(ratios[:2]) <= MOST
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
