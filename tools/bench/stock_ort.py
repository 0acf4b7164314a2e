"""The results of ONNX Runtime's own static quantization of a model, in each of its settings."""

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import onnx

from edgekit.data.samples import Samples, limit_samples
from edgekit.model.model import Model

_HISTOGRAM_BYTES = 300_000_000
"""A limit for float activations, which ONNX Runtime's histogram methods keep several times, for all samples at once."""

METHODS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "minmax": ("MinMax", {}),
    "entropy": ("Entropy", {}),
    "percentile": ("Percentile", {}),
    "percentile-99.9": ("Percentile", {"CalibPercentile": 99.9}),
}
_TYPES = {"u8u8": ("QUInt8", "QUInt8"), "u8s8": ("QUInt8", "QInt8"), "s8s8": ("QInt8", "QInt8")}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One of ONNX Runtime's settings, and the file that it gave; `failure` says why there is none."""

    name: str
    samples: int
    path: Path | None = None
    failure: str = ""


def quantize_stock(model: Model, samples: Samples, work: Path, wanted: Callable[[str], bool]) -> Iterator[Setting]:
    """Yields every setting: method x types x per tensor or channel, after ONNX Runtime's own preprocessing.

    The histogram methods get fewer samples if all would not fit into memory. `wanted` chooses settings by name.
    """
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    shape: Any = importlib.import_module("onnxruntime.quantization.shape_inference")
    ready = work / "ort-ready.onnx"
    shape.quant_pre_process(str(model.path), str(ready), skip_symbolic_shape=True)
    most = max(8, _HISTOGRAM_BYTES // max(1, _activation_bytes(ready)))

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped base
        def __init__(self, chosen: Samples) -> None:
            self.rows = iter(chosen)

        def get_next(self) -> Any:
            return next(self.rows, None)

    for method, (kind, extra) in METHODS.items():
        chosen = samples if method == "minmax" else limit_samples(samples, most)
        for (types, (activation, weight)), channels in itertools.product(_TYPES.items(), (False, True)):
            name = f"{method} {types} {'per channel' if channels else 'per tensor'}"
            if not wanted(name):
                continue
            out = work / f"ort-{name.replace(' ', '-')}.onnx"
            try:
                quantization.quantize_static(
                    str(ready),
                    str(out),
                    Reader(chosen),
                    per_channel=channels,
                    activation_type=quantization.QuantType[activation],
                    weight_type=quantization.QuantType[weight],
                    calibrate_method=quantization.CalibrationMethod[kind],
                    calibration_cache_path=str(work / f"ort-{method}.json"),
                    extra_options=dict(extra),
                )
            except Exception as error:  # noqa: BLE001 # whatever it dies of is the finding
                yield Setting(name=name, samples=chosen.count, failure=f"{type(error).__name__}: {error}"[:120])
                continue
            yield Setting(name=name, samples=chosen.count, path=out)
            out.unlink()


def _activation_bytes(path: Path) -> int:
    """Returns the bytes of the float tensors of one sample."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(str(path))).graph
    total = 0
    for value in graph.value_info:
        count = 4
        for dim in value.type.tensor_type.shape.dim:
            count *= max(1, dim.dim_value)
        total += count
    return total
