"""A plan applied: every node in integers, close to float, the bytes of ONNX Runtime, in a compact form."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper
from onnxruntime.quantization import base_quantizer, qdq_quantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.quant_utils import find_by_name
from quantize_models import (
    CONV_NET,
    CONV_SHAPES,
    dequantized_constants,
    make_model,
    plan_model,
    random_samples,
    sqnr_db,
)
from quantize_models import quantize as quantize_net
from tiny_models import parse_net

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit._proc import run_process
from edgekit.errors import DataError, ModelError
from edgekit.model.model import Model, save_proto
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize import _ort_quantizer as door
from edgekit.quantize._ort_quantizer import place_qdq
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.quantize.plan import draft_plan
from edgekit.quantize.qdq import compact_qdq, place_plan
from edgekit.target import Precision, load_target

TARGETS = ["nnapi", "qnn", "xnnpack"]
# Judgements have digests of all that they depend on, so these tests share them.
_KNOWN = Memo()


def quantize(
    model: Model, calibration: Calibration, target: str, folder: Path, precision: Precision = "int8"
) -> QuantizedModel:
    plan = plan_quantization(model, calibration, load_target(target), precision, memo=_KNOWN)
    return quantize_model(model, plan, calibration, folder / f"{target}-{precision}.onnx")


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
    assert "make it float: edgekit prepare MODEL --dequantize" in (caught.value.hint or "")


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


def test_only_ort_refuses(net: Model, calibration: Calibration, capsys: pytest.CaptureFixture[str]) -> None:
    graph = read_float_graph(net)
    plan = draft_plan(net, graph, calibration, load_target("nnapi"), "int8")
    empty = msgspec.structs.replace(plan, op_types=("Conv",), ranges={}, grids={}, axes={})
    with pytest.raises(ModelError, match=r"ONNX Runtime's quantizer refuses 'm': Quantization parameters are not"):
        place_qdq(graph, empty, "m")
    with pytest.raises(KeyError):
        place_qdq(graph, msgspec.structs.replace(empty, axes={"absent": 0}), "m")
    assert capsys.readouterr() == ("", "")


# A value read twice by one node and by several, a bias shared by two layers, Relu and Clip that ORT folds, outputs in
# the middle, and what has no name.
WEB = """g (float[1,4,8,8] x) => (float[1,4,8,8] seen, float[1,4,8,8] y)
{
  a = Conv<pads=[1,1,1,1]>(x, w1, b)
  r = Relu(a)
  d = Add(r, r)
  seen = Conv<pads=[1,1,1,1]>(d, w2, b)
  c = Clip(seen, , six)
  m = Mul(c, r)
  p = MaxPool<kernel_shape=[3,3],pads=[1,1,1,1]>(m)
  n = Concat<axis=1>(p, d)
  y = Conv<pads=[1,1,1,1]>(n, w3, )
}
"""
WEIGHTS = {"w1": (4, 4, 3, 3), "w2": (4, 4, 3, 3), "w3": (4, 8, 3, 3), "b": (4,), "six": ()}


def _place(model: Model, calibration: Calibration, target: str, precision: str = "int8") -> bytes:
    plan = plan_quantization(model, calibration, load_target(target), "int16" if precision == "int16" else "int8")
    return _write(model, plan)


def _write(model: Model, plan: QuantPlan) -> bytes:
    return place_plan(read_float_graph(model), plan, model.name).SerializeToString(deterministic=True)


def _spell_channels(scales: Any, axis: int, quant_type: Any) -> list[dict[str, Any]]:
    return [{"quant_type": quant_type, "axis": axis, "scale": scale, "zero_point": np.int8(0)} for scale in scales]


def _as_ort_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "ChannelQuantizer", qdq_quantizer.QDQQuantizer)
    monkeypatch.setattr(door, "channel_overrides", _spell_channels)
    for module in (base_quantizer, qdq_quantizer):
        monkeypatch.setattr(module, "find_by_name", find_by_name)


@pytest.mark.parametrize(
    ("target", "precision"),
    [("nnapi", "int8"), ("xnnpack", "int8"), ("cpu", "int8"), ("qnn", "int8"), ("qnn", "int16")],
)
def test_ort_writes_the_same_bytes(
    target: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(WEB, tmp_path / "web.onnx", WEIGHTS)
    calibration = calibrate_model(model, random_samples(model), work=tmp_path / "work")
    placed = _place(model, calibration, target, precision)
    _as_ort_does(monkeypatch)
    assert _place(model, calibration, target, precision) == placed


def test_the_copy_of_a_shared_bias_has_the_name_of_no_other_tensor(tmp_path: Path) -> None:
    """ONNX Runtime would call the first copy of b b0, as PyTorch numbers a computed tensor."""
    text = """g (float[1,4,8,8] x) => (float[1,4,8,8] y) { n = InstanceNormalization(x, w, b) b0 = Transpose(n)
        b1 = Transpose(b0) y = InstanceNormalization(b1, w, b) }"""
    model = make_model(text, tmp_path / "norms.onnx", {"w": (4,), "b": (4,)})
    calibration = calibrate_model(model, random_samples(model), work=tmp_path / "work")
    placed = onnx.ModelProto.FromString(_place(model, calibration, "qnn"))
    biases = [node.input[2] for node in placed.graph.node if node.op_type == "InstanceNormalization"]
    assert len({*biases}) == 2
    assert "b0" not in biases


def test_the_work_grows_with_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _count_visits(40, tmp_path, monkeypatch) <= 2.2 * _count_visits(20, tmp_path, monkeypatch)


def _count_visits(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns how often ONNX Runtime looks at a node's inputs to place Q and DQ in a chain of so many layers."""
    steps = "".join(f"t{i + 1} = Conv<pads=[1,1,1,1]>(t{i}, w, b) " for i in range(layers))
    text = f"g (float[1,4,8,8] t0) => (float[1,4,8,8] t{layers}) {{ {steps} }}"
    model = make_model(text, tmp_path / f"{layers}.onnx", {"w": (4, 4, 3, 3), "b": (4,)})
    _, plan = plan_model(model, tmp_path / f"{layers}", "cpu", random_samples(model, count=2), "auto")
    visits, replace = 0, ONNXModel.replace_node_input

    def count(node: onnx.NodeProto, old: str, new: str) -> None:
        nonlocal visits
        visits += 1
        replace(node, old, new)

    counting: Callable[[onnx.NodeProto, str, str], None] = count
    with monkeypatch.context() as patched:
        patched.setattr(ONNXModel, "replace_node_input", staticmethod(counting))
        _write(model, plan)
    return visits


TEXT = """net (float[1,2,4,4] x, bool flag) => (float[1,2,4,4] y)
<float s = {0.5}, uint8 z = {3}, float s2 = {0.5}, uint8 z2 = {3}, int8[2,1,1,1] w = {5, -7}, float[2] ws = {0.1, 0.2},
 int8[2] wz = {0, 0}, int8[2,1,1,1] v = {2, 9}, float[2] vs = {0.3, 0.4}, int8[2] vz = {0, 0}, int32[2] b = {9, -8},
 float[2] bs = {0.05, 0.1}, int32[2] bz = {0, 0}>
{
  long_x = QuantizeLinear(x, s, z)
  long_dx = DequantizeLinear(long_x, s, z)
  long_w = DequantizeLinear<axis = 0>(w, ws, wz)
  long_b = DequantizeLinear<axis = 0>(b, bs, bz)
  first = Conv<group = 2, auto_pad = "NOTSET", dilations = [1, 1], strides = [1, 1], pads = [0, 0, 0, 0]>
    (long_dx, long_w, long_b)
  long_f = QuantizeLinear(first, s2, z2)
  long_df = DequantizeLinear(long_f, s2, z2)
  long_v = DequantizeLinear<axis = 0>(v, vs, vz)
  second = Conv<group = 2, pads = [1, 0, 1, 0], strides = [1, 1]>(long_df, long_v)
  y = If(flag) <
    then_branch = one () => (float[1,2,4,4] a) { b1 = Slice(second, i0, i4, i2) a = Add(b1, long_df) },
    else_branch = two () => (float[1,2,4,4] c) { c = Neg(long_df) }>
}
"""


def qdq_model() -> onnx.ModelProto:
    proto = parse_net(TEXT, {name: np.array([value]) for name, value in (("i0", 0), ("i4", 4), ("i2", 2))})
    for index, node in enumerate(proto.graph.node):
        node.name, node.doc_string = f"node {index}", "where it was written"
    return proto


def run(proto: onnx.ModelProto, *, flag: bool) -> np.ndarray:
    session = CpuSession(proto.SerializeToString(), SessionSettings(level=Level.DISABLED))
    x = np.random.default_rng(0).normal(size=(1, 2, 4, 4)).astype(np.float32)
    return session.run({"x": x, "flag": np.array(flag)})["y"]


@pytest.fixture(scope="module")
def small() -> onnx.ModelProto:
    proto = qdq_model()
    compact_qdq(proto)
    return proto


def test_a_compact_model_is_smaller_and_computes_the_same_in_bodies_too(small: onnx.ModelProto) -> None:
    whole = qdq_model()
    for flag in (True, False):
        np.testing.assert_array_equal(run(whole, flag=flag), run(small, flag=flag))
    assert small.ByteSize() < 0.8 * whole.ByteSize()
    onnx.checker.check_model(small, full_check=True)


def test_attributes_with_their_default_and_doc_strings_are_left_out(small: onnx.ModelProto) -> None:
    first, second = ({item.name for item in node.attribute} for node in small.graph.node if node.op_type == "Conv")
    assert (first, second) == ({"group"}, {"group", "pads"})
    assert not any(node.doc_string for node in small.graph.node)


def test_activations_share_scales_and_zero_points_and_weights_do_not(small: onnx.ModelProto) -> None:
    stored = {tensor.name: tensor for tensor in small.graph.initializer}
    reads = [tuple(node.input) for node in small.graph.node if node.op_type.endswith("antizeLinear")]
    activations = {names[1:] for names in reads if names[0] not in stored}
    weights = {names for names in reads if names[0] in stored}
    assert len(activations) == 1
    assert len({names[2] for names in weights}) == len(weights) == 3


def test_short_names_do_not_hide_names_in_bodies(small: onnx.ModelProto) -> None:
    names = [tensor.name for tensor in small.graph.initializer]
    names += [name for node in small.graph.node for name in node.output]
    assert len(names) == len(set(names))
    assert {"a", "b1", "c"}.isdisjoint(names)
    assert {"first", "second", "long_df", "y"} <= set(names)
    assert {node.name for node in small.graph.node if node.op_type == "Conv"} == {"node 4", "node 8"}
