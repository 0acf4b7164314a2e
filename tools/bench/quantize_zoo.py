"""Quantizes zoo models for each INT8 target and compares with ONNX Runtime's own static quantization.

    python tools/bench/quantize_zoo.py [MODEL]... [--method auto|best|minmax|...] [--zoo ../shared/zoo]

Calibrates on half of the data and scores on the other half: SQNR of the outputs, agreement of the best class with the
float model, and accuracy where there are labels. "ort" rows are `quantize_static`: MinMax, the types of the target.
"""

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model import Model, load_model
from edgekit.prepare import prepare_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.samples import Samples, fit_sample
from edgekit.target import load_target
from edgekit.tensors import Array, Tensors

TARGETS = ("nnapi", "xnnpack", "qnn")
DEFAULT = (
    "mobilenetv2_1.0_224_fp32",
    "squeezenet1.1_fp32",
    "superres_core_224",
    "vww_96_float",
    "kws_dscnn_float",
    "magika_v3_3",
)


def read_inputs(zoo: Path, name: str) -> tuple[dict[str, Array], Array | None]:
    """Returns the arrays of a zoo model, sample i at index i, and the labels if there are any."""
    spec = importlib.util.spec_from_file_location("zoo_inputs", zoo / "inputs.py")
    if spec is None or spec.loader is None:
        sys.exit(f"there is no {zoo / 'inputs.py'}")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs, labels = module.MODELS[name]()
    return inputs, labels


def as_samples(inputs: dict[str, Array], model: Model, start: int) -> Samples:
    """Returns every second sample, from `start` on."""
    count = len(next(iter(inputs.values())))
    indices = range(start, count, 2)

    def read() -> Iterator[Tensors]:
        for index in indices:
            row = {name: np.ascontiguousarray(value[index]) for name, value in inputs.items()}
            # Some of the zoo's arithmetic ends in double precision.
            row = {name: value.astype(np.float32) if value.dtype.char == "d" else value for name, value in row.items()}
            yield fit_sample(row, model.inputs, f"sample {index}")

    return Samples(source="zoo", count=len(indices), read=read)


def run_model(path: Path, samples: Samples) -> Array:
    """Returns the float outputs of a model in a row for each sample."""
    session = CpuSession(path, SessionSettings())
    rows = (session.run(sample).values() for sample in samples)
    return np.stack([np.concatenate([value.ravel() for value in row if value.dtype.kind == "f"]) for row in rows])


def quantize_stock(model: Model, samples: Samples, target_name: str, out: Path) -> Path:
    """Writes what ONNX Runtime's quantize_static makes of a model with its own calibration."""
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    rules = load_target(target_name).quantization
    types = {"uint8": quantization.QuantType.QUInt8, "int8": quantization.QuantType.QInt8}

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped base
        def __init__(self) -> None:
            self.rows = iter(samples)

        def get_next(self) -> Any:
            return next(self.rows, None)

    quantization.quantize_static(
        str(model.path), str(out), Reader(), per_channel=True, activation_type=types[rules.activation],
        weight_type=types[rules.weight],
    )  # fmt: skip
    return out


def score(name: str, expected: Array, found: Array, labels: Array | None, seconds: float) -> None:
    """Prints a line."""
    noise = float(((expected - found) ** 2).sum())
    sqnr_db = 10 * np.log10(float((expected**2).sum()) / max(noise, 1e-30))
    agreement = float((expected.argmax(1) == found.argmax(1)).mean())
    accuracy = "" if labels is None else f" accuracy {float((found.argmax(1) == labels[: len(found)]).mean()):.3f}"
    print(f"  {name:28} sqnr {sqnr_db:6.2f} dB  agreement {agreement:.3f}{accuracy}  {seconds:5.1f} s", flush=True)


def bench_model(zoo: Path, name: str, method: str, work: Path) -> None:
    """Prints the table of a model."""
    inputs, labels = read_inputs(zoo, name)
    source = load_model(zoo / "models" / f"{name}.onnx")
    model = prepare_model(source, work / "prepared.onnx", dict.fromkeys(_batch_dims(source), 1))
    learn, judge = as_samples(inputs, model, 0), as_samples(inputs, model, 1)
    expected, held = run_model(model.path, judge), None if labels is None else labels[1::2]
    began = time.perf_counter()
    calibration = calibrate_model(model, learn, work=work / "calibration")
    print(f"{name}: {learn.count} samples, calibration {time.perf_counter() - began:.1f} s")
    score("float", expected, expected, held, 0.0)
    for target in TARGETS:
        began = time.perf_counter()
        plan = plan_quantization(model, calibration, load_target(target), "int8", method=method)
        quantized = quantize_model(model, plan, work / f"{target}.onnx").model.path
        seconds = time.perf_counter() - began
        label = f"{target} {plan.method} {plan.rounding}" + (f" wide {len(plan.wide)}" if plan.wide else "")
        score(label, expected, run_model(quantized, judge), held, seconds)
        began = time.perf_counter()
        try:
            stock = quantize_stock(model, learn, target, work / f"{target}-ort.onnx")
        except ValueError as error:
            print(f"  {target} ort per channel: fails: {error}")
            continue
        seconds = time.perf_counter() - began
        score(f"{target} ort per channel", expected, run_model(stock, judge), held, seconds)


def _batch_dims(model: Model) -> Sequence[str]:
    named = {dim for spec in model.inputs for dim in spec.shape or () if isinstance(dim, str)}
    unnamed = {
        f"{spec.name}:{axis}" for spec in model.inputs for axis, dim in enumerate(spec.shape or ()) if dim is None
    }
    return sorted(named | unnamed)


def main() -> None:
    """Benches the models named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--zoo", type=Path, default=Path(__file__).parents[3] / "shared/zoo")
    args = parser.parse_args()
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            bench_model(args.zoo, name, args.method, Path(folder))


if __name__ == "__main__":
    main()
