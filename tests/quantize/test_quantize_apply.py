import logging
import os
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper
from quantize_models import (
    CONV_NET,
    CONV_SHAPES,
    dequantized_constants,
    make_model,
    make_samples,
    op_types,
    random_samples,
    sqnr_db,
)
from quantize_models import quantize as quantize_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit._proc import run_process
from edgekit.errors import DataError, ModelError
from edgekit.model.model import Model, save_proto
from edgekit.quantize import Calibration, QuantizedModel, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize._ort_quantizer import place_qdq
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.quantize.plan import draft_plan
from edgekit.target import Precision, load_target

TARGETS = ["nnapi", "qnn", "xnnpack"]
# Judgements have digests of all that they depend on, so these tests share them.
_KNOWN = Memo()


def quantize(
    model: Model, calibration: Calibration, target: str, folder: Path, precision: Precision = "int8"
) -> QuantizedModel:
    plan = plan_quantization(model, calibration, load_target(target), precision, memo=_KNOWN)
    return quantize_model(model, plan, calibration, folder / f"{target}-{precision}.onnx")


@pytest.mark.parametrize("target", TARGETS)
def test_every_node_is_near_float(net: Model, calibration: Calibration, target: str, tmp_path: Path) -> None:
    quantized = quantize(net, calibration, target, tmp_path)
    assert [node.op for node in quantized.float_nodes] == (["Softmax"] if target == "xnnpack" else [])
    assert quantized.quantized_nodes == 9 - len(quantized.float_nodes)
    assert sqnr_db(net, quantized.model) > 25


def test_sixteen_bits_lose_less_than_eight(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    wide = quantize(net, calibration, "qnn", tmp_path, "int16")
    assert sqnr_db(net, wide.model) > sqnr_db(net, quantize(net, calibration, "qnn", tmp_path).model) + 2


def test_names_are_short_and_those_of_the_user_are_kept(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    graph = onnx.load(str(quantize(net, calibration, "qnn", tmp_path).model.path)).graph
    assert {"r1", "c2", "s", "p", "z"} <= {name for node in graph.node for name in node.output}
    quantizers = [node for node in graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]
    assert all(len(name) < 5 for node in quantizers for name in (node.name, *node.output))
    assert len({tensor.name for tensor in graph.initializer}) == len(graph.initializer)
    biases = {t.name: tuple(t.dims) for t in graph.initializer if t.data_type == onnx.TensorProto.INT32}
    zeros = {(biases[node.input[2]], node.input[2]) for node in quantizers if node.input[0] in biases}
    assert len({shape for shape, _ in zeros}) == len(zeros) > 0


@pytest.mark.slow
def test_hash_seed_does_not_change_the_bytes(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    plan = plan_quantization(net, calibration, load_target("qnn"), "int8")
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode((plan, calibration)))
    (tmp_path / "conv_net.onnx").write_bytes(net.path.read_bytes())
    script = (
        "import sys, pathlib, msgspec; from edgekit.model.model import load_model; from edgekit.quantize import *;"
        "folder = pathlib.Path(sys.argv[1]); model = load_model(folder / 'conv_net.onnx');"
        "plan, calibration = msgspec.json.decode("
        "(folder / 'plan.json').read_bytes(), type=tuple[QuantPlan, Calibration]);"
        "print(quantize_model(model, plan, calibration, folder / 'out.onnx').model.sha256)"
    )
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", script, str(tmp_path)]
    runs = [run_process(argv, timeout_s=60, env={**env, "PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    assert runs[0].stdout == runs[1].stdout != ""


def test_nothing_is_printed_or_logged(
    net: Model, calibration: Calibration, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = list(logging.getLogger().handlers)
    quantize(net, calibration, "qnn", tmp_path)
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger().handlers == handlers


def test_the_metadata_of_the_float_model_is_kept(net: Model, tmp_path: Path) -> None:
    proto = onnx.load(str(net.path))
    helper.set_model_props(proto, {"author": "me"})
    written = onnx.load(str(quantize_net(save_proto(proto, tmp_path / "m.onnx"), tmp_path, "qnn").model.path))
    assert [(entry.key, entry.value) for entry in written.metadata_props] == [("author", "me")]


def test_a_model_that_is_quantized_already_is_refused(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    quantized = quantize(net, calibration, "qnn", tmp_path).model
    with pytest.raises(ModelError, match="quantized already") as caught:
        calibrate_model(quantized, random_samples(quantized), work=tmp_path / "work")
    assert "one trained so: export it without Q and DQ" in (caught.value.hint or "")


def test_a_plan_for_another_model_is_refused(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    plan = plan_quantization(net, calibration, load_target("qnn"), "int8")
    with pytest.raises(DataError, match="the plan was made for another model than"):
        quantize_model(net, msgspec.structs.replace(plan, model_sha256="0" * 64), calibration, tmp_path / "out.onnx")


def test_weights_in_constant_nodes_are_quantized(tmp_path: Path) -> None:
    model = make_model(CONV_NET, tmp_path / "m.onnx", CONV_SHAPES)
    proto = onnx.load(str(model.path))
    constants = [helper.make_node("Constant", [], [t.name], f"k_{t.name}", value=t) for t in proto.graph.initializer]
    nodes = [*constants, *proto.graph.node]
    del proto.graph.initializer[:], proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = save_proto(proto, tmp_path / "constants.onnx")
    weight, *_ = dequantized_constants(quantize_net(model, tmp_path, "nnapi").model, "r1")
    assert weight.dtype == np.int8


def test_an_input_that_is_an_output_too_stays_float_and_all_else_is_quantized(tmp_path: Path) -> None:
    text = "g (float[1,4] x, float[1,2] m) => (float[1,2] m, float[1,4] y) { y = MatMul(x, w) }"
    quantized = quantize_net(make_model(text, tmp_path / "m.onnx", {"w": (4, 4)}), tmp_path, "qnn")
    assert quantized.float_nodes == ()
    assert dequantized_constants(quantized.model, "y")
    with pytest.raises(ModelError, match="is an input of it, with no node between"):
        read_float_graph(make_model("g (float[4] x) => (float[4] x, float[4] y) { y = Neg(x) }", tmp_path / "n.onnx"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_large_bias_of_a_layer_that_is_rounded_to_nearest_fits_its_32_bits(target: str, tmp_path: Path) -> None:
    text = "g (float[1,4,5,5] x) => (float[1,4,11,11] y) { y = ConvTranspose<group=4, strides=[2,2]>(x, w, b) }"
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(4, 1, 3, 3)) * 1e-7, "b": rng.normal(size=4)}
    constants = {name: value.astype(np.float32) for name, value in weights.items()}
    model = make_model(text, tmp_path / "m.onnx", constants=constants)
    assert sqnr_db(model, quantize_net(model, tmp_path, target).model) > 30


def test_products_that_wait_for_lora_weights_stay_float(tmp_path: Path) -> None:
    text = """g (float[1,4] x) => (float[1,4] y) <float[4,0] a = {}, float[0,4] b = {}> {
      p = MatMul(x, w) q = MatMul(x, a) r = MatMul(q, b) y = Add(p, r) }"""
    quantized = quantize_net(make_model(text, tmp_path / "m.onnx", {"w": (4, 4)}), tmp_path, "nnapi")
    assert [node.op for node in quantized.float_nodes] == ["MatMul", "MatMul"]
    assert dequantized_constants(quantized.model, "p")


def test_weight_kept_as_integers_behind_dequantize_is_a_float_weight(tmp_path: Path) -> None:
    text = """g (float[1,4] x) => (float[1,3] y)
      <int8[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[3] s = {0.1,0.2,0.3}> {
      d = DequantizeLinear<axis=1>(w, s) y = MatMul(x, d) }"""
    model = make_model(text, tmp_path / "m.onnx")
    quantized = quantize_net(model, tmp_path, "nnapi")
    assert sqnr_db(model, quantized.model, random_samples(model, seed=5)) > 25


def test_an_if_and_its_branches_stay_float(tmp_path: Path) -> None:
    text = """g (float[1,3,8,8] x, bool c) => (float[1,8,8,8] y) {
      a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w1, b1)
      r = Relu(a)
      y = If(c) <then_branch = t () => (float[1,8,8,8] p) { p = Add(a, r) },
                 else_branch = e () => (float[1,8,8,8] q) { q = Mul(r, r) }> }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 3, 3, 3), "b1": (8,)})
    rng = np.random.default_rng(0)
    arrays = [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32), "c": np.array(i % 2 == 0)} for i in range(8)]
    quantized = quantize_net(model, tmp_path, "nnapi", make_samples(arrays))
    session = CpuSession(quantized.model.path, SessionSettings())
    plain = CpuSession(model.path, SessionSettings())
    for sample in arrays:
        assert np.allclose(session.run(sample)["y"], plain.run(sample)["y"], atol=0.2)
    assert op_types(quantized.model).count("If") == 1


def test_only_ort_refuses(net: Model, calibration: Calibration, capsys: pytest.CaptureFixture[str]) -> None:
    graph = read_float_graph(net)
    plan = draft_plan(net, graph, calibration, load_target("nnapi"), "int8")
    empty = msgspec.structs.replace(plan, op_types=("Conv",), ranges={}, grids={}, axes={})
    with pytest.raises(ModelError, match=r"ONNX Runtime's quantizer refuses 'm': Quantization parameters are not"):
        place_qdq(graph, empty, "m")
    with pytest.raises(KeyError):
        place_qdq(graph, msgspec.structs.replace(empty, axes={"absent": 0}), "m")
    assert capsys.readouterr() == ("", "")
