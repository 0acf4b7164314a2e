"""Compares the CPU seconds of `quantize` with ONNX Runtime's `quantize_static`, for architectures at true size.

    python tools/bench/quantize_ratio.py [NAME...] [--samples 32] [--target cpu] [--growth]

ONNX Runtime's settings are MinMax and per channel, in QDQ form, with the same samples. Each measurement is a process of
its own, and all of its CPU seconds count; the modules of both are compiled to bytecode before, as in an installation.
The limit for the ratio is 3. With `--growth` convolutional networks of 100 to 1,600 nodes are quantized, and the
exponent by which CPU seconds grow with the number of nodes may be 1.2.
"""

import argparse
import compileall
import importlib
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from architectures import ARCHITECTURES, GROWING, Architecture, conv_net

LIMIT, EXPONENT = 3.0, 1.2


def write_model(architecture: Architecture, folder: Path, samples: int) -> tuple[Path, Path]:
    """Writes a model and its samples; returns both files."""
    rng = np.random.default_rng(0)
    rows = [architecture.draw(rng) for _ in range(samples)]
    data, model = folder / "data.npz", folder / "model.onnx"
    np.savez(data, allow_pickle=False, **{name: np.stack([row[name] for row in rows]) for name in rows[0]})
    proto = architecture.net.to_onnx()
    for value in proto.graph.input:
        # State is not random: a sequence begins with zeros.
        if value.name in rows[0] and rows[0][value.name].dtype == np.int64:
            value.type.tensor_type.elem_type = onnx.TensorProto.INT64
    onnx.save(proto, str(model))
    return model, data


def quantize_stock(model: Path, data: Path, out: Path) -> None:
    """Quantizes with ONNX Runtime's own function; called in a process of its own."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped base
        def __init__(self) -> None:
            arrays = dict(np.load(data))
            count = len(next(iter(arrays.values())))
            self.rows = iter([{name: rows[index] for name, rows in arrays.items()} for index in range(count)])

        def get_next(self) -> Any:
            return next(self.rows, None)

    quantization.quantize_static(str(model), str(out), Reader(), per_channel=True)


def compile_package() -> None:
    """Compiles edgekit's modules to bytecode, as `pip install` does for ONNX Runtime's."""
    compileall.compile_dir(Path(__file__).parents[2] / "edgekit", quiet=1)


def measure(command: list[str]) -> tuple[float, float]:
    """Returns the CPU seconds of a command and its peak of memory in MB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, error = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: {error.decode()[-600:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss / 1024


def compare(name: str, architecture: Architecture, samples: int, target: str) -> tuple[float, float]:
    """Prints a line; returns edgekit's CPU seconds, and their ratio to ONNX Runtime's."""
    with tempfile.TemporaryDirectory() as folder:
        model, data = write_model(architecture, Path(folder), samples)
        out = Path(folder) / "quantized.onnx"
        size, nodes = model.stat().st_size, len(architecture.net.nodes)
        stock, _ = measure([__file__, "--stock", str(model), str(data), str(out)])
        options = ["--data", str(data), "--target", target, "--out", str(out), "-q"]
        ours, _ = measure(["-m", "edgekit", "quantize", str(model), *options])
    print(
        f"{name:14} {nodes:5} nodes {size / 1e6:6.1f} MB  ORT {stock:7.2f}  edgekit {ours:7.2f} CPU-s"
        f"  {ours / stock:5.2f}x  load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return ours, ours / stock


def main() -> int:
    """Compares the architectures that are named, all by default; returns 1 if one is above a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(ARCHITECTURES))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--growth", action="store_true", help="conv nets of 100 to 1,600 nodes")
    parser.add_argument("--stock", nargs=3, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stock:
        quantize_stock(*args.stock)
        return 0
    compile_package()
    if args.growth:
        nets = {count: conv_net(count, side=32) for count in GROWING}
        rows = [(count, compare(f"conv{count}", net, args.samples, args.target)[0]) for count, net in nets.items()]
        counts, seconds = np.log(np.array(rows, np.float64)).T
        exponent = float(np.polyfit(counts, seconds, 1)[0])
        print(f"exponent {exponent:.2f}, allowed {EXPONENT}")
        return int(exponent > EXPONENT)
    chosen = args.names or list(ARCHITECTURES)
    ratios = [compare(name, ARCHITECTURES[name](), args.samples, args.target)[1] for name in chosen]
    return int(max(ratios) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
