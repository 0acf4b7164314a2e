"""Compares time and memory of calibration with plain float inference over the same samples, in the same run.

    python tools/bench/calibrate_ratio.py [MODEL.onnx [DIM=SIZE]...] [--samples 256] [--method NAME]...

Without a model it measures the ResNet-50 of the onnx package (random weights) and the MobileNetV2 of ../shared/zoo.
Inputs are random images; the time to make them is not counted. "auto" also measures the statistics for all kinds of
rounding. Each measurement is a process of its own. Wall and CPU seconds are compared with a plain pass that follows, or
on a busy machine, with `--interleaved`, with a plain run before each sample (then the peak memory is that of both).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Tensors
from edgekit.prepare import ready_model
from edgekit.quantize import calibrate_model
from edgekit.quantize.ranges import AUTO_METHODS

ZOO = Path(__file__).parents[3] / "shared/zoo/models"
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
MODELS = ((str(LIGHT / "light_resnet50.onnx"),), (str(ZOO / "mobilenetv2_1.0_224_fp32.onnx"), "N=1"))
METHODS = ("minmax", "mse", "percentile-99.99", "auto")


def random_images(model: Model, count: int) -> Samples:
    """Returns inputs drawn from a normal distribution, the same at each pass."""
    pool = np.random.default_rng(0).normal(size=(8, 1 << 20)).astype(np.float32)

    def read() -> Iterator[Tensors]:
        for index in range(count):
            row = pool[index % 8] * (1 + index / count)
            yield {
                spec.name: np.resize(row, [dim for dim in spec.shape or () if isinstance(dim, int)]).astype(spec.dtype)
                for spec in model.inputs
            }

    return Samples(source="random", count=count, read=read)


def clock() -> tuple[float, float]:
    """Returns wall and CPU seconds."""
    return time.perf_counter(), time.process_time()


def peak_memory() -> float:
    """Returns the peak memory of this process in MB; the value of `getrusage` would begin with the parent's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def add_since(start: tuple[float, float], spent: list[float]) -> None:
    """Adds to `spent` the wall and CPU seconds since `start`."""
    for place, (begin, end) in enumerate(zip(start, clock(), strict=True)):
        spent[place] += end - begin


def read_timed(samples: Samples, spent: list[float]) -> Iterator[Tensors]:
    """Yields samples; adds to `spent` the time to make them."""
    every, start = iter(samples), clock()
    for sample in every:
        add_since(start, spent)
        yield sample
        start = clock()


def measure(path: str, method: str, count: int) -> dict[str, float]:
    """Returns the ratios of one method on a prepared model; called in a process of its own."""
    model = load_model(Path(path))
    samples, plain, made, named = random_images(model, count), [0.0, 0.0], [0.0, 0.0], method != "auto"
    given = msgspec.structs.replace(samples, read=lambda: read_timed(samples, made))
    start = clock()
    with tempfile.TemporaryDirectory() as work:
        calibrate_model(model, given, work=Path(work), methods=(method,) if named else AUTO_METHODS, fitting=not named)
    seconds = [end - begin - other for begin, end, other in zip(start, clock(), made, strict=True)]
    peak_mb = peak_memory()
    session = CpuSession(model.path, SessionSettings())
    for sample in samples:
        start = clock()
        session.run(sample)
        add_since(start, plain)
    wall_ratio, cpu_ratio = seconds[0] / plain[0], seconds[1] / plain[1]
    return {"wall_ratio": wall_ratio, "cpu_ratio": cpu_ratio, "seconds": seconds[0], "peak_mb": peak_mb}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="a model, then DIM=SIZE")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--method", action="append")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.model[0], args.child, args.samples)))
        return
    for source, *dims in [tuple(args.model)] if args.model else MODELS:
        with tempfile.TemporaryDirectory() as work:
            sizes = {name: int(size) for name, size in (dim.split("=") for dim in dims)}
            prepared = ready_model(load_model(Path(source)), Path(work), sizes).model
            print(f"{Path(source).stem}, {args.samples} samples, load {os.getloadavg()[0]:.1f}")
            for method in args.method or METHODS:
                command = [sys.executable, __file__, str(prepared.path), "--child", method]
                done = subprocess.run(
                    [*command, "--samples", str(args.samples)], check=True, capture_output=True, text=True
                )
                row = json.loads(done.stdout)
                print(f"  {method:18}" + "  ".join(f"{name} {value:7.2f}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
