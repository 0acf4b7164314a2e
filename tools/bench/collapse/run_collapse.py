"""Trains small nets of the five kinds that stock quantization ruins, and shows what edgekit brings back.

    python tools/bench/collapse/run_collapse.py [NET]... [--target nnapi]... [--cache ~/.cache/edgekit/collapse]
        [--state DIR]

Training needs jax, optax and scikit-learn (`pip install -r tools/lock/train.txt`) and takes some minutes; what was
trained is kept in the cache. "stock" is ONNX Runtime's quantize_static with MinMax, weights per tensor and
per channel, activations of the target's type. "auto" is plain `edgekit quantize`, "max-drop" that with --max-drop 0.5
and without labels. "!" marks what stays below.
Exit code 1: a net stays more than 1 point (0.3 dB) below its float model.
"""

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from collapse_families import CALIBRATE, EVALUATE, FAMILIES, Family
from collapse_later import LATER
from collapse_score import SCORES, UNITS

sys.path.insert(0, str(Path(__file__).parents[1]))
from row_state import add_state_option, resume_rows

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.prepare import prepare_model
from edgekit.quantize import calibrate_model, quantize_model
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.mixed_precision.goal_search import Search, plan_sparingly, search_quantization
from edgekit.target import Target, load_target

TARGETS = ("nnapi", "nnapi:api_level=28", "xnnpack", "qnn", "cpu")
NETS = FAMILIES | LATER
ALLOWED = {"image": 0.3}
"""How far below the float model a net may stay: 1 point, or these decibels."""


def find_net(cache: Path, name: str) -> Path:
    """Returns the file of a trained net; trains it where the cache has none."""
    path, family = cache / f"{name}.onnx", NETS[name]
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
    signed = quantization.QuantType.QInt8 if target in {"xnnpack", "cpu"} else quantization.QuantType.QUInt8

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


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a net on a target, and whether it came back."""

    text: str
    is_good: bool = True


def bench_net(path: Path, family: Family, targets: Sequence[str], work: Path) -> Iterator[Line]:
    """Yields a line for the net, and one for each target."""
    prepared = prepare_model(load_model(path), work / "prepared.onnx", {"N": 1} if family.batch == "N" else {})
    (calibrate, _), (evaluate, labels) = family.data(CALIBRATE), family.data(EVALUATE)
    samples = as_samples(prepared.inputs[0].name, calibrate)
    calibration = calibrate_model(prepared, samples, work=work / "calibration")

    def score(file: Path) -> float:
        return SCORES[family.task](run_rows(file, evaluate), labels)

    reference = score(prepared.path)
    yield Line(text=f"{path.stem}: float {reference:.2f} {UNITS[family.task]}, {len(evaluate)} samples")
    for name in targets:
        target = read_target(name)
        stock = [f"{score(file):6.2f}" for file in quantize_stock(prepared.path, calibrate, name, work / "stock.onnx")]
        cells = [f"stock {' / '.join(stock)}"]
        began = time.perf_counter()
        search = Search(
            model=prepared, calibration=calibration, target=target, precision="int8", work=work,
            measure=FloatReference(prepared, samples).predict_drop,
        )  # fmt: skip
        plan, _ = plan_sparingly(search)
        middle = time.perf_counter()
        searched = search_quantization(search, 0.005)
        ended = time.perf_counter()
        label = "max-drop" if searched.met else "NOT met"
        found_plans = (("auto", plan, middle - began), (label, searched.chosen.plan, ended - middle))
        good = True
        for label, chosen, seconds in found_plans:
            found = score(quantize_model(prepared, chosen, calibration, work / "edgekit.onnx").model.path)
            back = found >= reference - ALLOWED.get(family.task, 1.0)
            good &= back
            how = f"{chosen.method} {chosen.rounding}{' even' if chosen.factors else ''}"
            kept = f"{len(chosen.wide)} wide, {len(chosen.float_nodes)} float"
            cells.append(f"{label} {found:6.2f}{' ' if back else '!'} ({how}, {kept}, {seconds:.0f} s)")
        yield Line(text=f"  {name:20} {' | '.join(cells)}", is_good=good)


def as_samples(name: str, rows: Array) -> Samples:
    """Returns rows as samples of one input."""
    return Samples(source="bench", count=len(rows), read=lambda: ({name: row[None]} for row in rows))


def read_target(name: str) -> Target:
    """Returns a target given as NAME or NAME:KEY=VALUE."""
    name, _, setting = name.partition(":")
    return load_target(name, dict([setting.split("=")]) if setting else {})


def main() -> int:
    """Benches the nets named on the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(NETS))
    parser.add_argument("--target", action="append")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/edgekit/collapse")
    add_state_option(parser)
    args = parser.parse_args()
    good = True
    targets = args.target or TARGETS
    for name in args.nets:
        with tempfile.TemporaryDirectory() as folder:
            make = partial(bench_net, find_net(args.cache, name), NETS[name], targets, Path(folder))
            for line in resume_rows(args.state, f"run_collapse {name} {' '.join(targets)}", Line, make):
                print(line.text, flush=True)
                good &= line.is_good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
