"""INT8 for ONNX Runtime's own CPU kernels: what each architecture gets, and what it computes on one without VNNI."""

from pathlib import Path

import pytest
from quantize_models import dequantized_constants

from edgekit.convert.convert import find_integer_nodes
from edgekit.model.model import Model
from edgekit.quantize import Calibration, QuantizedModel, plan_quantization, quantize_model
from edgekit.target import load_target

pytestmark = pytest.mark.slow

SETTINGS = {
    "arm64": {"arch": "arm64"},
    "x64-vnni": {"arch": "x64-vnni"},
    "x64": {"arch": "x64"},
    "x64-7bit": {"arch": "x64", "weights": "7bit"},
}


def quantize(model: Model, calibration: Calibration, arch: str, folder: Path) -> QuantizedModel:
    plan = plan_quantization(model, calibration, load_target("cpu", SETTINGS[arch]), "int8", method="minmax")
    return quantize_model(model, plan, calibration, folder / f"{arch}.onnx")


@pytest.mark.parametrize("arch", SETTINGS)
def test_nodes_with_kernels_run_in_integers(net: Model, calibration: Calibration, arch: str, tmp_path: Path) -> None:
    quantized = quantize(net, calibration, arch, tmp_path)
    seen = find_integer_nodes(quantized.model, signed=arch == "arm64")
    assert (quantized.float_nodes, all(seen.values()), len(seen)) == ((), True, 9)


def test_unsigned_weights_stand_for_the_same_numbers(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    one, other = (quantize(net, calibration, arch, tmp_path).model for arch in ("x64-vnni", "x64"))
    for tensor in ("r1", "c2", "z"):
        (signed, scale, _), (unsigned, same, zero) = (dequantized_constants(model, tensor) for model in (one, other))
        assert (scale == same).all()
        assert (signed.astype(int) == unsigned.astype(int) - int(zero[0])).all()


@pytest.mark.parametrize("method", ["minmax", "auto"])
def test_seven_bits_hold_two_products(net: Model, calibration: Calibration, method: str, tmp_path: Path) -> None:
    plan = plan_quantization(net, calibration, load_target("cpu", SETTINGS["x64-7bit"]), "int8", method=method)
    model = quantize_model(net, plan, calibration, tmp_path / "q.onnx").model
    weights = [dequantized_constants(model, tensor)[0].astype(int) for tensor in ("r1", "c2", "c3", "z")]
    assert max(abs(weight).max() for weight in weights) == 64
    assert 2 * 255 * 64 < 2**15
