import time
from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model, make_samples, op_types, quantize, random_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.float_regions import find_float_regions, find_high_precision_regions

FRONT = """g (float[1,64] x) => (float[1,4] y)
  <float eps = {1e-6}> {
  s = MatMul(x, dft) p = Mul(s, s) e = Add(p, eps) l = Log(e) h = MatMul(l, w1) r = Relu(h) y = MatMul(r, w2) }"""
SHAPES: dict[str, tuple[int, ...]] = {"dft": (64, 32), "w1": (32, 16), "w2": (16, 4)}


def test_a_front_end_with_more_layers_than_the_network_is_one_all_the_same(tmp_path: Path) -> None:
    text = """g (float[1,64] x) => (float[1,4] y) <float eps = {1e-6}> {
      re = MatMul(x, wr) im = MatMul(x, wi) re2 = Mul(re, re) im2 = Mul(im, im) p = Add(re2, im2) m = MatMul(p, mel)
      e = Max(m, eps) l = Log(e) y = MatMul(l, w) }"""
    shapes: dict[str, tuple[int, ...]] = {"wr": (64, 33), "wi": (64, 33), "mel": (33, 16), "w": (16, 4)}
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", shapes))
    assert len(find_float_regions(graph)) == len(graph.nodes) - 1


def test_log_behind_a_network_keeps_only_its_neighbours(tmp_path: Path) -> None:
    text = "g (float[1,8] x) => (float[1,4] y) { h = MatMul(x, w) s = Softmax(h) y = Log(s) }"
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (8, 4)}))
    assert set(find_float_regions(graph)) == {"n1_Softmax", "n2_Log"}


def test_front_end_reads_the_input_itself(tmp_path: Path) -> None:
    model = make_model(FRONT, tmp_path / "m.onnx", SHAPES)
    rng = np.random.default_rng(0)
    rows = [{"x": (rng.normal(size=(1, 64)) * 10.0 ** rng.uniform(-3, 1)).astype(np.float32)} for _ in range(40)]
    quantized = quantize(model, tmp_path, "nnapi", make_samples(rows))
    assert op_types(quantized.model)[0] == "MatMul"
    assert [node.op for node in quantized.float_nodes] == ["MatMul", "Mul", "Add", "Log"]
    one, two = CpuSession(model.path, SessionSettings()), CpuSession(quantized.model.path, SessionSettings())
    errors = [np.abs(one.run(row)["y"] - two.run(row)["y"]).max() for row in rows]
    assert max(errors) < 1


MAGNITUDE = """g (float[1,1,400] x) => (float[1,8] y) {
  re = Conv<strides=[20]>(x, wr) im = Conv<strides=[20]>(x, wi)
  re2 = Mul(re, re) im2 = Mul(im, im) power = Add(re2, im2) ROOT
  h = Conv(root, wh) a = Relu(h) c = Conv(a, wc) g1 = GlobalAveragePool(c) y = Flatten(g1) }"""
ROOTS = {
    "magnitude": "root = Sqrt(power)",
    "power": "p = Constant<value_float=0.33>() root = Pow(power, p)",
    "gain": """s = AveragePool<kernel_shape=[3], pads=[1,1]>(power) e = Constant<value_float=0.000001>() se = Add(s, e)
        alpha = Constant<value_float=0.98>() gain = Pow(se, alpha) even = Div(power, gain)
        two = Constant<value_float=2.0>() up = Add(even, two) half = Constant<value_float=0.5>()
        rooted = Pow(up, half) off = Constant<value_float=1.4>()
        root = Sub(rooted, off)""",
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_the_root_of_a_spectrum_and_all_before_it_stay_float(tmp_path: Path, root: str) -> None:
    text = MAGNITUDE.replace("ROOT", root)
    weights: dict[str, tuple[int, ...]] = {"wr": (16, 1, 40), "wi": (16, 1, 40), "wh": (8, 16, 3), "wc": (8, 8, 3)}
    regions = find_float_regions(read_float_graph(make_model(text, tmp_path / "m.onnx", weights)))
    kinds = [name.split("_")[1] for name in regions]
    assert {"Conv", "Mul", "Add"} <= set(kinds)
    assert kinds.count("Conv") == 2
    assert "Relu" not in kinds


def test_a_root_within_a_network_is_no_spectrum(tmp_path: Path) -> None:
    text = """g (float[1,4,8,8] x) => (float[1,4,6,6] y) {
      c = Conv(x, w) r = Relu(c) s = Mul(r, r) q = Sqrt(s) y = Conv(q, v) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w": (4, 4, 1, 1), "v": (4, 4, 3, 3)})
    assert not find_float_regions(read_float_graph(model))


def test_a_transform_that_is_an_operator_is_calibrated_and_stays_float(tmp_path: Path) -> None:
    text = """g (float[1,320] x) => (float[1,8,40] y)
      <int64 step = {32}, int64 length = {64}, float eps = {1e-10}, int64[1] last = {-1}> {
      s = STFT(x, step, window, length) two = Mul(s, s) p = ReduceSum<keepdims=0>(two, last) m = MatMul(p, mel)
      c = Max(m, eps) l = Log(c) h = MatMul(l, w1) r = Relu(h) y = MatMul(r, w2) }"""
    shapes: dict[str, tuple[int, ...]] = {"window": (64,), "mel": (33, 20), "w1": (20, 16), "w2": (16, 40)}
    model = make_model(text, tmp_path / "m.onnx", shapes)
    floats = quantize(model, tmp_path, "qnn").float_nodes
    assert [node.op for node in floats] == ["STFT", "Mul", "ReduceSum", "MatMul", "Max", "Log"]


def test_infinity_that_a_constant_puts_in_stays_float_and_refuses_nothing(tmp_path: Path) -> None:
    text = """g (float[1,8] x) => (float[1,4] y, int64[1,1] i, float[1,18] z)
      <float never = {-inf}, float zero = {0}, int64[4] pads = {0, 1, 0, 1}> {
      h = MatMul(x, w1) c = Greater(h, zero) m = Where(c, h, never) i = ArgMax<axis=1>(m) p = Pad(m, pads, never)
      z = Max(p, zero) r = Relu(h) y = MatMul(r, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 16), "w2": (16, 4)})
    samples = random_samples(model, 24)
    for name in ("qnn", "xnnpack"):
        quantized = quantize(model, tmp_path, name, samples)
        reasons = {node.op: node.reason for node in quantized.float_nodes}
        assert {"Where", "Pad", "ArgMax"} <= reasons.keys()
        assert "infinity" in reasons["ArgMax"]
        assert op_types(quantized.model).count("MatMul") + op_types(quantized.model).count("Gemm") == 2
        assert quantized.quantized_nodes >= 2
        for sample in samples:
            found = CpuSession(quantized.model.path, SessionSettings()).run(sample)
            assert all(np.isfinite(found[key]).all() for key in ("y", "z"))


def test_many_normalisations_cost_no_walk_to_the_inputs_each(tmp_path: Path) -> None:
    layers = "\n".join(
        f"m{at} = MatMul(y{at}, w) s{at} = Mul(m{at}, m{at}) r{at} = ReduceMean<axes=[1]>(s{at})"
        f" q{at} = Sqrt(r{at}) y{at + 1} = Div(m{at}, q{at})"
        for at in range(400)
    )
    text = f"g (float[4,8] y0) => (float[4,8] y400) {{ {layers} }}"
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (8, 8)}))
    start = time.process_time()
    assert not find_float_regions(graph)
    assert len(find_high_precision_regions(graph)) == 4 * 400
    assert time.process_time() - start < 1.5  # 0.03 s; a walk from each root takes 8 s
