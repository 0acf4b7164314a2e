"""Trains small nets of the five kinds that stock quantization ruins, and shows what edgekit brings back.

    python tools/bench/collapse/run_collapse.py [NET]... [--target nnapi]... [--cache ~/.cache/edgekit/collapse]

Training needs jax, optax and scikit-learn (`pip install -r tools/lock/train.txt`) and takes some minutes; what was
trained is kept in the cache. "stock" is the best of ONNX Runtime's quantize_static with MinMax: weights per tensor and
per channel, activations of the target's type. "auto" is plain `edgekit quantize`, "max-drop" that with --max-drop 0.5.
Exit code 1: a net stays more than 1 point (0.3 dB) below its float model.
"""

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from collapse_families import CALIBRATE, EVALUATE, FAMILIES, Family
from collapse_score import SCORES, UNITS

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model import load_model
from edgekit.prepare import prepare_model
from edgekit.quantization import quantize_for
from edgekit.recipe import Data, Recipe
from edgekit.tensors import Array

TARGETS = ("nnapi", "nnapi:api_level=28", "xnnpack", "qnn", "cpu")
ALLOWED = {"image": 0.3}
"""How far below the float model a net may stay: 1 point, or these decibels."""


def find_net(cache: Path, name: str) -> Path:
    """Returns the file of a trained net; trains it where the cache has none."""
    path, family = cache / f"{name}.onnx", FAMILIES[name]
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        print(f"{name}: training")
        onnx.save(family.make().to_onnx(family.batch, constant_nodes=family.constant_nodes), str(path))
    return path


def run_rows(path: Path, inputs: Array) -> Array:
    """Returns the first output of a model for each sample."""
    model = load_model(path)
    session = CpuSession(path, SessionSettings())
    (spec,) = model.inputs
    return np.concatenate([next(iter(session.run({spec.name: row[None]}).values())) for row in inputs])


def quantize_stock(prepared: Path, inputs: Array, target: str, out: Path) -> Iterator[Path]:
    """Yields what ONNX Runtime's quantize_static makes of a prepared model, per tensor and per channel."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    name = load_model(prepared).inputs[0].name
    signed = quantization.QuantType.QInt8 if target == "xnnpack" else quantization.QuantType.QUInt8

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped base
        def __init__(self) -> None:
            self.rows = iter(inputs)

        def get_next(self) -> Any:
            row = next(self.rows, None)
            return None if row is None else {name: row[None]}

    for per_channel in (False, True):
        quantization.quantize_static(
            str(prepared), str(out), Reader(), per_channel=per_channel, activation_type=signed,
            weight_type=quantization.QuantType.QInt8,
        )  # fmt: skip
        yield out


def bench_net(path: Path, family: Family, targets: Sequence[str], work: Path) -> bool:
    """Prints a table of a net, and returns True if it comes back on every target."""
    dims = {"N": 1} if isinstance(family.batch, str) else {}
    prepared = prepare_model(load_model(path), work / "prepared.onnx", dims).path
    (calibrate, _), (evaluate, labels) = family.data(CALIBRATE), family.data(EVALUATE)
    np.savez(work / "data.npz", allow_pickle=False, **{load_model(prepared).inputs[0].name: calibrate})
    data = Data(source=str(work / "data.npz"), labels=None, preprocess=None)

    def score(file: Path) -> float:
        return SCORES[family.task](run_rows(file, evaluate), labels)

    reference = score(prepared)
    print(f"{path.stem}: float {reference:.2f} {UNITS[family.task]}, {len(evaluate)} samples", flush=True)
    good = True
    for target in targets:
        name, _, setting = target.partition(":")
        settings = dict([setting.split("=")]) if setting else {}
        stock = [score(file) for file in quantize_stock(prepared, calibrate, name, work / "stock.onnx")]
        cells = [f"stock {stock[0]:6.2f} / {stock[1]:6.2f}"]
        for label, max_drop in (("auto", None), ("max-drop", 0.5)):
            began = time.perf_counter()
            recipe = Recipe(targets=(name,), settings=settings, dims=dims, max_drop=max_drop)
            report = quantize_for(path, data, work / "edgekit.onnx", recipe)
            found = score(work / "edgekit.onnx")
            back = found >= reference - ALLOWED.get(family.task, 1.0)
            good &= back
            floats = sum(node.op != "Softmax" for node in report.float_nodes)
            step = report.steps[0] if report.steps else None
            cells.append(
                f"{label} {found:6.2f}{' ' if back else '!'} ({report.predicted.sqnr_db:.1f} dB, {floats} float, "
                f"{'' if step is None else f'{step.method} {step.rounding} -{len(step.relieved)}'}, "
                f"{'met' if report.met else 'NOT met'}, {time.perf_counter() - began:.0f} s)"
            )
        print(f"  {target:20} {' | '.join(cells)}", flush=True)
    return good


def main() -> int:
    """Benches the nets named on the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(FAMILIES))
    parser.add_argument("--target", action="append")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/edgekit/collapse")
    args = parser.parse_args()
    good = True
    for name in args.nets:
        with tempfile.TemporaryDirectory() as folder:
            good &= bench_net(find_net(args.cache, name), FAMILIES[name], args.target or TARGETS, Path(folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
