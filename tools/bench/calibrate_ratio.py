"""Time and memory of calibration against plain float inference over the same samples, in the same run.

    python tools/bench/calibrate_ratio.py [MODEL.onnx [DIM=SIZE]...] [--samples 256] [--method NAME]...

Without a model: the ResNet-50 of the onnx package (random weights) and the MobileNetV2 of ../shared/zoo. Inputs are
random images. "auto" measures what every rounding needs besides. Each measurement is a process of its own; wall and
CPU seconds are compared with a plain pass that follows it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model import Model, load_model
from edgekit.prepare import ready_model
from edgekit.quantize import calibrate_model
from edgekit.quantize.ranges import AUTO_METHODS
from edgekit.samples import Samples
from edgekit.tensors import Tensors

ZOO = Path(__file__).parents[3] / "shared/zoo/models"
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
MODELS = ((str(LIGHT / "light_resnet50.onnx"),), (str(ZOO / "mobilenetv2_1.0_224_fp32.onnx"), "N=1"))
METHODS = ("minmax", "mse", "percentile-99.99", "entropy", "auto")


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


def measure(path: str, method: str, count: int) -> dict[str, float]:
    """Returns the ratios of one method on a prepared model; called in a process of its own."""
    model = load_model(Path(path))
    samples = random_images(model, count)

    def infer() -> tuple[float, float]:
        start = clock()
        for sample in samples:
            session.run(sample)
        return tuple(end - begin for begin, end in zip(start, clock(), strict=True))  # type: ignore[return-value] # two

    start = clock()
    with tempfile.TemporaryDirectory() as work:
        named = method != "auto"
        calibrate_model(
            model, samples, work=Path(work), methods=(method,) if named else AUTO_METHODS, fitting=not named
        )
    seconds = [end - begin for begin, end in zip(start, clock(), strict=True)]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    session = CpuSession(model.path, SessionSettings())
    plain = infer()
    return {
        "wall_ratio": seconds[0] / plain[0],
        "cpu_ratio": seconds[1] / plain[1],
        "seconds": seconds[0],
        "peak_mb": peak_mb,
    }


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
