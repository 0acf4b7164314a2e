"""Weights of a ConvTranspose are rounded for what its inputs do, and its bias takes the mean error."""

from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.tensors import Array
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.mixed_precision.candidates import choose_ranges
from edgekit.target import load_target

NET = """g (float[1,16,6,6] x) => (float[1,8,12,12] y) {
  y = ConvTranspose<kernel_shape=[4,4], strides=[2,2], pads=[1,1,1,1]>(x, w, b) }"""


@pytest.mark.parametrize("target", ["qnn", "cpu"])
def test_roundings_reach_transposed_convolutions(target: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # Channels that move together make up for each other's errors, and all of them have a mean.
    mix = rng.normal(size=(16, 4))
    rows: list[Array] = [3 + np.einsum("ck,khw->chw", mix, rng.normal(size=(4, 6, 6)))[None] for _ in range(48)]
    samples = make_samples([{"x": row.astype(np.float32)} for row in rows])
    weight = rng.normal(size=(16, 8, 4, 4)).astype(np.float32)
    weight[0] *= 20
    model = make_model(NET, tmp_path / "m.onnx", constants={"w": weight, "b": np.zeros(8, np.float32)})
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    plan = plan_quantization(model, calibration, load_target(target), "int8", method="minmax")
    session, noise = CpuSession(model.path, SessionSettings()), dict[str, float]()
    for rounding in ("nearest", "bias", "gptq"):
        chosen = choose_ranges(plan, calibration, "minmax", rounding)
        made = quantize_model(model, chosen, calibration, tmp_path / f"{rounding}.onnx").model
        other = CpuSession(made.path, SessionSettings())
        noise[rounding] = sum(float(((session.run(row)["y"] - other.run(row)["y"]) ** 2).sum()) for row in samples)
    assert noise["bias"] < noise["nearest"]
    assert noise["gptq"] < 0.5 * noise["bias"]
