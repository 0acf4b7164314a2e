from pathlib import Path

import numpy as np
from quantize_models import make_model, make_samples, op_types

from edgekit._ort import CpuSession, SessionSettings
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.graph import read_graph
from edgekit.quantize.islands import float_islands
from edgekit.target import load_target

FRONT = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,64] x) => (float[1,4] y)
  <float eps = {1e-6}> {
  s = MatMul(x, dft) p = Mul(s, s) e = Add(p, eps) l = Log(e) h = MatMul(l, w1) r = Relu(h) y = MatMul(r, w2) }"""
SHAPES: dict[str, tuple[int, ...]] = {"dft": (64, 32), "w1": (32, 16), "w2": (16, 4)}


def test_spectral_front_end_stays_float_up_to_its_log(tmp_path: Path) -> None:
    graph = read_graph(make_model(FRONT, tmp_path / "m.onnx", SHAPES))
    ops = {node.op_type for node in graph.proto.graph.node if node.name in float_islands(graph)}
    assert ops == {"MatMul", "Mul", "Add", "Log"}
    assert sum(node.op_type == "MatMul" and node.name in float_islands(graph) for node in graph.proto.graph.node) == 1


def test_log_behind_a_network_keeps_only_its_neighbours(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,8] x) => (float[1,4] y) {
      h = MatMul(x, w) s = Softmax(h) y = Log(s) }"""
    graph = read_graph(make_model(text, tmp_path / "m.onnx", {"w": (8, 4)}))
    assert set(float_islands(graph)) == {"n1_Softmax", "n2_Log"}


def test_front_end_reads_the_input_itself(tmp_path: Path) -> None:
    model = make_model(FRONT, tmp_path / "m.onnx", SHAPES)
    rng = np.random.default_rng(0)
    rows = [{"x": (rng.normal(size=(1, 64)) * 10.0 ** rng.uniform(-3, 1)).astype(np.float32)} for _ in range(40)]
    calibration = calibrate_model(model, make_samples(rows), work=tmp_path / "work")
    quantized = quantize_model(
        model, plan_quantization(model, calibration, load_target("nnapi"), "int8"), tmp_path / "q.onnx"
    )
    assert op_types(quantized.model)[0] == "MatMul"
    assert {node.op for node in quantized.float_nodes} == {"MatMul", "Mul", "Add", "Log"}
    one, two = CpuSession(model.path, SessionSettings()), CpuSession(quantized.model.path, SessionSettings())
    errors = [np.abs(one.run(row)["y"] - two.run(row)["y"]).max() for row in rows]
    assert max(errors) < 1
