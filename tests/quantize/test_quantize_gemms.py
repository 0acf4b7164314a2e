"""Gemm with a computed bias or with factors: what it computes stays the same, and all of it is quantized."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from quantize_models import dequantized_constants, make_model, op_types, quantize, random_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.convert.convert import convert_model, find_integer_nodes
from edgekit.model.model import save_proto
from edgekit.model.tensors import Array
from edgekit.prepare import prepare_model
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.sessions import EXACT_PRODUCTS
from edgekit.target import load_target

CELL = """g (float[1,8] x, float[1,16] s) => (float[1,16] y) {
  [left] a = MatMul(x, w) [right] b = MatMul(s, u) [sum] c = Add(a, b) [bound] y = Relu(c) }"""
GEMM = "g (float[8,8] x, float[8,16] s) => (float[8,16] y) { [gemm] y = Gemm<FACTORS>(x, w, BIAS) }"
FACTORS = ["alpha = 1.0", "transA = 1, alpha = 0.5, beta = 2.0", "transB = 1, beta = 2.0"]


SHAPES = {"w": (8, 16), "u": (16, 16), "k": (16,)}


@pytest.mark.parametrize("factors", FACTORS)
def test_a_gemm_with_a_computed_bias_becomes_a_product_and_a_sum(factors: str, tmp_path: Path) -> None:
    text = GEMM.replace("FACTORS", factors).replace("BIAS", "s")
    model = make_model(text, tmp_path / "m.onnx", {"w": (16, 8) if "transB" in factors else (8, 16)})
    graph = read_float_graph(model)
    split = save_proto(graph.model, tmp_path / "split.onnx")
    sample = next(iter(random_samples(model)))
    one, two = (CpuSession(each.path, SessionSettings()).run(sample)["y"] for each in (model, split))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    product = next(node for node in graph.nodes if node.op_type == "MatMul")
    assert (product.name, graph.nodes[-1].op_type, product.input[1] in graph.constants) == ("gemm", "Add", True)
    assert len(graph.constants) == len({name for node in graph.nodes for name in node.input} & graph.constants.keys())


@pytest.mark.parametrize("bias", ["k", ""])
def test_a_gemm_whose_bias_is_constant_or_absent_stays_one(bias: str, tmp_path: Path) -> None:
    text = GEMM.replace("FACTORS", "alpha = 1.0").replace(", BIAS", f", {bias}" if bias else "")
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", SHAPES))
    assert [node.op_type for node in graph.nodes] == ["Gemm"]


# An earlier rewrite of the Gemm may have named its bias so.
@pytest.mark.parametrize("bias", ["k", "gemm/bias"])
@pytest.mark.parametrize("factors", ["beta = 2.0", "alpha = -0.5, beta = 0.5, transA = 1"])
def test_the_factor_of_a_constant_bias_is_in_its_values(factors: str, bias: str, tmp_path: Path) -> None:
    text = GEMM.replace("FACTORS", factors).replace("BIAS", f'"{bias}"' if "/" in bias else bias)
    model = make_model(text, tmp_path / "m.onnx", SHAPES | {bias: (16,)})
    quantized = quantize(model, tmp_path, method="minmax")
    sample = next(iter(random_samples(model)))
    exact, got = (CpuSession(each.path, SessionSettings()).run(sample)["y"] for each in (model, quantized.model))
    assert np.abs(exact - got).max() < 0.02 * np.abs(exact).max()


def test_all_products_of_a_recurrent_cell_are_integer(tmp_path: Path) -> None:
    model = prepare_model(
        make_model(CELL, tmp_path / "cell.onnx", {"w": (8, 16), "u": (16, 16)}), tmp_path / "prepared.onnx", {}
    )
    # This is how ONNX Runtime shows it: the sum is in the second product.
    assert [node.op_type for node in onnx.load(str(model.path)).graph.node] == ["MatMul", "Gemm", "Relu"]
    quantized = quantize(model, tmp_path, method="minmax")
    assert quantized.float_nodes == ()
    seen = find_integer_nodes(quantized.model, signed=True)
    assert (sum(seen.values()), len(seen)) == (3, 3)
    convert_model(quantized.model, load_target("cpu"), tmp_path / "converted")


SHARED = """g (float[8,8] x, float[8,16] s) => (float[8,16] y, float[8,16] z) {
  [first] a = Gemm(x, w, k) [second] y = Gemm(a, u, k) [sum] z = Add(s, k) }"""


def test_a_bias_that_nodes_share_has_a_scale_for_each(tmp_path: Path) -> None:
    model = make_model(SHARED, tmp_path / "m.onnx", SHAPES)
    quantized = quantize(model, tmp_path, method="minmax")
    # Had a Gemm the sum's 8 bits, or the other's scale, ONNX Runtime would compute it in float.
    seen = find_integer_nodes(quantized.model, signed=True)
    assert (sum(seen.values()), len(seen)) == (3, 3)
    convert_model(quantized.model, load_target("cpu"), tmp_path / "converted")
    sample = next(iter(random_samples(model)))
    exact, got = (CpuSession(each.path, SessionSettings()).run(sample) for each in (model, quantized.model))
    for name, value in exact.items():
        np.testing.assert_allclose(got[name], value, atol=0.05 * float(np.abs(value).max()))


NORM = "g (float[1,4,8] x) => (float[1,4,8] y) { h = LayerNormalization(x, gain, shift) y = MatMul(h, eye) }"


@pytest.mark.parametrize(("target", "step"), [("qnn", 12 / 255), ("cpu", None), ("xnnpack", None)])
def test_the_gain_of_a_normalization_has_all_255_steps_on_qnn(target: str, step: float | None, tmp_path: Path) -> None:
    gain = np.ones(8, np.float32)
    gain[3] = 12
    constants: dict[str, Array] = {"gain": gain, "shift": np.zeros(8, np.float32), "eye": np.eye(8, dtype=np.float32)}
    model = make_model(NORM, tmp_path / "m.onnx", constants=constants)
    written = quantize(model, tmp_path, target, random_samples(model, count=16)).model
    graph = onnx.load(str(written.path)).graph
    norm = next(node for node in graph.node if node.op_type == "LayerNormalization")
    assert any(name.startswith("gain") for name in norm.input) == (step is None)
    if step is not None:
        integers, scale, zero = dequantized_constants(written, norm.output[0])
        assert (str(integers.dtype), int(zero), int(integers.max())) == ("uint8", 0, 255)
        assert float(scale) == pytest.approx(step, rel=1e-5)


def test_a_computed_gain_stays_as_it_is_beside_16_bits(tmp_path: Path) -> None:
    text = NORM.replace("{ h =", "{ mean = ReduceMean <axes = [0, 1], keepdims = 0> (x) gain = Sigmoid(mean) h =")
    constants: dict[str, Array] = {"shift": np.zeros(8, np.float32), "eye": np.eye(8, dtype=np.float32)}
    model = make_model(text, tmp_path / "m.onnx", constants=constants)
    assert "Mul" not in op_types(quantize(model, tmp_path, "qnn", precision="int16").model)


@pytest.mark.parametrize("shift", [0.5, None])
@pytest.mark.parametrize("loudest", [12, 1])
def test_a_large_gain_is_a_product_beside_16_bits(tmp_path: Path, shift: float | None, loudest: float) -> None:
    gain = np.linspace(1, 1.1, 8).astype(np.float32)
    gain[3] = loudest
    # The loudest channel reaches one output alone, so that the other outputs show how exact their gains are.
    weights = np.triu(np.random.default_rng(6).uniform(-0.5, 0.5, (8, 8)), 1)
    weights[3] = 0
    constants: dict[str, Array] = {"gain": gain, "eye": (weights + np.eye(8)).astype(np.float32)}
    if shift is not None:
        constants["shift"] = np.full(8, shift, np.float32)
    text = NORM if shift is not None else NORM.replace(", shift)", ")")
    model = make_model(text, tmp_path / "m.onnx", constants=constants)
    samples = random_samples(model, count=16)
    assert "Mul" not in op_types(quantize(model, tmp_path, "qnn", samples).model)
    wide = quantize(model, tmp_path, "qnn", samples, precision="int16").model
    assert op_types(wide).count("Mul") == (loudest > 1)
    if loudest > 1:
        norm = next(node for node in onnx.load(str(wide.path)).graph.node if node.op_type == "LayerNormalization")
        integers, scale, zero = dequantized_constants(wide, norm.output[0])
        assert (integers.astype(float) - float(zero)) * float(scale) == pytest.approx(1.0)
    for sample in random_samples(model):
        settings = SessionSettings(config={**EXACT_PRODUCTS})
        exact, got = (CpuSession(each.path, settings).run(sample)["y"] for each in (model, wide))
        # Steps of 12 / 255 would be wrong by 2 % of up to 2.8.
        np.testing.assert_allclose(got[..., :3], exact[..., :3], atol=0.01)


@pytest.mark.parametrize(
    ("text", "products"),
    [
        (NORM, 1),
        (NORM.replace("MatMul(h, eye)", "Gemm<transB=1>(f, turned)").replace(") y", ") f = Reshape(h, rows) y"), 1),
        (NORM.replace("eye", "drawn"), 0),
        (NORM.replace("(x, gain", "<axis=1>(x, gain"), 0),
        (NORM.replace("(x, gain", "(x, zeros"), 0),
        (
            NORM.replace("y = ", "m = ").replace(
                " }", " n = LayerNormalization(m, gain, shift) y = MatMul(n, turned) }"
            ),
            2,
        ),
    ],
    ids=[
        "exact weights",
        "a Gemm behind a Reshape",
        "coarse weights",
        "two axes",
        "zero gains",
        "a gain that two share",
    ],
)
def test_a_gain_that_loses_more_than_weights_is_a_product(text: str, products: int, tmp_path: Path) -> None:
    gain = np.linspace(1, 1.1, 8).astype(np.float32)
    gain[3] = 12
    drawn: Array = np.random.default_rng(7).normal(size=(8, 8)).astype(np.float32)
    constants: dict[str, Array] = {"gain": gain, "zeros": gain * (np.arange(8) > 0), "drawn": drawn}
    constants |= {"shift": np.zeros(8, np.float32), "rows": np.array([4, 8])}
    constants |= {name: np.eye(8, dtype=np.float32) for name in ("eye", "turned")}
    model = make_model(
        text.replace("(float[1,4,8] y)", "(float[4,8] y)") if "rows" in text else text,
        tmp_path / "m.onnx",
        constants={name: value for name, value in constants.items() if name in text},
    )
    made = quantize(model, tmp_path, "qnn", random_samples(model, count=16), precision="int16").model
    assert op_types(made).count("Mul") == products
