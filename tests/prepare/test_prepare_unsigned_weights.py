"""int8 weights stored as uint8: every value stays, and what something else reads too is left alone."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from prepare_models import assert_same, make_model, rewrite

from edgekit.check.check import check_model
from edgekit.model.model import Model, load_model
from edgekit.prepare.fix import fix_model
from edgekit.prepare.rewrites.signs import UNSIGNED_WEIGHTS
from edgekit.target import load_target

W = "int8[3,2] w = {127, -2, 3, -127, 5, -128}"
GEMM = """
g (float[2,3] x) => (float[2,2] y) <float xs = {0.02}, uint8 xz = {128}, float ys = {0.5}, uint8 yz = {128},
  int8[4,3] w = {127, -2, 3, -127, 5, -128, 1, 2, 3, 4, 5, 6}, float s = {0.01}, int8 z = {0}> {
  q = QuantizeLinear(x, xs, xz) d = DequantizeLinear(q, xs, xz) f = DequantizeLinear(w, s, z)
  a = Gemm<transB=1>(d, f) r = QuantizeLinear(a, ys, yz) y = DequantizeLinear(r, ys, yz)
}
"""


def constants(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}


def weights(path: Path) -> list[np.ndarray]:
    graph, stored = onnx.load(str(path)).graph, constants(path)
    return [stored[node.input[0]] for node in graph.node if node.input[0] in stored]


@pytest.mark.parametrize(
    "text",
    [
        f"<{W}, float s = {{0.5}}, int8 z = {{3}}> {{ f = DequantizeLinear(w, s, z) y = MatMul(x, f) }}",
        (
            f"<{W}, float[2] s = {{0.5, 2}}, int8[2] z = {{0, 0}}> "
            "{ f = DequantizeLinear<axis=1>(w, s, z) y = MatMul(x, f) }"
        ),
        f"<{W}, float[2] s = {{0.5, 2}}> {{ f = DequantizeLinear<axis=1>(w, s) y = Gemm(x, f) }}",
        (
            f"<{W}, float s = {{0.5}}, float t = {{2}}> "
            "{ f = DequantizeLinear(w, s) g = DequantizeLinear(w, t) a = MatMul(x, f) b = Gemm(x, g) y = Add(a, b) }"
        ),
    ],
)
def test_int8_weights_stored_as_uint8_keep_every_value(text: str, tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, f"g (float[2,3] x) => (float[2,2] y) {text}", UNSIGNED_WEIGHTS)
    assert [fix.id for fix in fixed.fixes] == [UNSIGNED_WEIGHTS]
    assert {weight.dtype.name for weight in weights(fixed.model.path)} == {"uint8"}
    assert_same(tmp_path, fixed, 0)
    onnx.checker.check_model(onnx.load(str(fixed.model.path)))


@pytest.mark.parametrize(
    "text",
    [
        f"(float[2,2] y, int8[3,2] w) <{W}, float s = {{0.5}}> {{ f = DequantizeLinear(w, s) y = MatMul(x, f) }}",
        (
            f"(float[2,2] y, float[3,2] c) <{W}, float s = {{0.5}}> "
            "{ f = DequantizeLinear(w, s) y = MatMul(x, f) c = Cast<to=1>(w) }"
        ),
        f"(float[2,2] y) <{W}, float s = {{0.5}}> {{ t = Neg(s) f = DequantizeLinear(w, t) y = MatMul(x, f) }}",
        f"(float[2,2] y) <{W}> {{ f = Cast<to=1>(w) y = MatMul(x, f) }}",
        (
            "(float[2,2] y) <uint8[3,2] w = {1, 2, 3, 4, 5, 6}, float s = {0.5}> "
            "{ f = DequantizeLinear(w, s) y = MatMul(x, f) }"
        ),
        f"(float[3,2] y) <{W}, float s = {{0.5}}> {{ f = DequantizeLinear(w, s) y = Identity(f) }}",
        # The CPU has no kernel for s8 activations with u8 weights.
        (
            f"(float[2,2] y) <{W}, float s = {{0.5}}, int8 z = {{0}}> {{ q = QuantizeLinear(x, s, z) "
            "d = DequantizeLinear(q, s, z) f = DequantizeLinear(w, s, z) y = MatMul(d, f) }"
        ),
    ],
)
def test_what_something_else_reads_or_makes_is_left_alone(text: str, tmp_path: Path) -> None:
    assert rewrite(tmp_path, f"g (float[2,3] x) => {text}", UNSIGNED_WEIGHTS).fixes == ()
    before, after = (weights(tmp_path / name) for name in ("m.onnx", "out.onnx"))
    assert [weight.dtype for weight in before] == [weight.dtype for weight in after]


def test_a_zero_point_that_others_read_stays(tmp_path: Path) -> None:
    text = f"""g (float[2,3] x) => (float[2,2] y) <{W}, int8[2] v = {{1, 2}}, float s = {{0.5}}, int8 z = {{0}}>
        {{ f = DequantizeLinear(w, s, z) h = DequantizeLinear(v, s, z) m = MatMul(x, f) y = Add(m, h) }}"""
    fixed = rewrite(tmp_path, text, UNSIGNED_WEIGHTS)
    assert [weight.dtype.name for weight in weights(fixed.model.path)] == ["uint8", "int8"]
    assert constants(fixed.model.path)["z"] == np.int8(0)
    assert_same(tmp_path, fixed, 0)


def big_gemm(folder: Path) -> Model:
    """A quantized Gemm with more weights than check reads."""
    path = make_model(GEMM, folder / "m.onnx").path
    proto = onnx.load(str(path))
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    stored["w"].CopyFrom(numpy_helper.from_array(np.full((4, 1 << 16), 3, np.int8), "w"))
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1 << 16
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    onnx.save(proto, str(path))
    return load_model(path)


def test_nnapi_is_said_to_refuse_a_signed_gemm_and_to_take_the_rewritten_one(tmp_path: Path) -> None:
    model, target = big_gemm(tmp_path), load_target("nnapi")
    report = check_model(model, target)
    (gemm,) = (node for node in report.node_list if node.op == "Gemm")
    assert (gemm.fatal, report.verdict) == (True, "no")
    assert "the model builder registers no int8 weight" in gemm.reasons[0]
    advice = {each.id: each for each in report.advice}
    assert (advice[UNSIGNED_WEIGHTS].nodes, advice[UNSIGNED_WEIGHTS].fix) == ((gemm.name,), "automatic")
    assert advice[UNSIGNED_WEIGHTS].gain_nodes > 0
    fixed = fix_model(model, tmp_path / "fixed.onnx", [UNSIGNED_WEIGHTS]).model
    again = check_model(fixed, target)
    assert (again.verdict, again.advice) == ("yes", ())
    assert (weights(fixed.path)[0] == 131).all()


def test_weights_in_another_file_are_left_alone_and_nothing_is_promised(tmp_path: Path) -> None:
    proto = onnx.load(str(big_gemm(tmp_path).path))
    onnx.save(proto, str(tmp_path / "e.onnx"), save_as_external_data=True, location="w.data", size_threshold=1 << 10)
    model = load_model(tmp_path / "e.onnx")
    assert UNSIGNED_WEIGHTS not in {each.id for each in check_model(model, load_target("nnapi")).advice}
    fixed = fix_model(model, tmp_path / "out" / "m.onnx", [UNSIGNED_WEIGHTS])
    assert fixed.fixes == ()
    assert (weights(fixed.model.path)[0] == 3).all()
