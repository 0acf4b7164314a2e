"""Models that are quantized already: weights get the type that a target opens, and only where that helps."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tiny_models import parse_model

from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe


@pytest.mark.parametrize(("activation", "zero", "stored"), [("uint8", 128, "uint8"), ("int8", 0, "int8")])
def test_weights_of_a_gemm_become_unsigned_where_nnapi_then_takes_it(
    activation: str, zero: int, stored: str, tmp_path: Path
) -> None:
    model = parse_model(
        "g (float[1,3] x) => (float[1,4] y)"
        f" <float xs = {{0.02}}, {activation} xz = {{{zero}}}, float ys = {{0.1}}, {activation} yz = {{{zero}}},"
        " int8[4,3] w = {127, -2, 3, -127, 5, -128, 1, 2, 3, 4, 5, 6}, float s = {0.01}, int8 z = {0}>"
        " { q = QuantizeLinear(x, xs, xz) d = DequantizeLinear(q, xs, xz) f = DequantizeLinear(w, s, z)"
        " a = Gemm<transB=1>(d, f) r = QuantizeLinear(a, ys, yz) y = DequantizeLinear(r, ys, yz) }",
        tmp_path / "m.onnx",
    )
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(40, 1, 3)).astype(np.float32))
    data, recipe = Data(source=str(tmp_path / "d.npz")), Recipe(targets=("nnapi",))
    (bundle,) = build(model, data, tmp_path / "out", recipe, verify=False).bundles
    assert bundle.path is not None, bundle.failure
    told = "int8 weights of Gemm and MatMul are stored as uint8, the same values: 1 nodes"
    assert (told in bundle.notes) == (stored == "uint8")
    tensors = onnx.load(str(bundle.path / "model.onnx")).graph.initializer
    assert {numpy_helper.to_array(tensor).dtype.name for tensor in tensors if list(tensor.dims) == [4, 3]} == {stored}


def test_a_quantized_model_of_which_no_session_starts_is_not_shipped(tmp_path: Path) -> None:
    text = (
        "g (float[1,2,4,4] x) => (float[1,2,4,4] y)"
        " <int8[2,2,1,1] w = {1,2,3,4}, float s = {0.1}, float[1] t = {0.1}, int8 z = {0}>"
        " { q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) b = DequantizeLinear(w, t)"
        " c = ConvTranspose(a, b) r = QuantizeLinear(c, s, z) y = DequantizeLinear(r, s, z) }"
    )
    model = parse_model(text, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32))
    data = Data(source=str(tmp_path / "data.npz"))
    (bundle,) = build(model, data, tmp_path / "out", Recipe(targets=("xnnpack",)), verify=False).bundles
    assert bundle.path is None
    told = str(bundle.failure)
    assert told.startswith("no session of the int8 model starts on xnnpack, 1 nodes stop it: ConvTr")
    assert "must be a scalar" in told
    assert "give the float model" in told
