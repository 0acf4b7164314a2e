from pathlib import Path

import msgspec
import numpy as np
import pytest
from quantize_models import make_model, make_samples, random_samples

from edgekit.check.check import check_model
from edgekit.errors import DataError, ModelError, UsageError
from edgekit.model.model import Model
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.relief import relieve_tensors
from edgekit.target import load_target


def test_plan_survives_json(net: Model, calibration: Calibration) -> None:
    plan = plan_quantization(net, calibration, load_target("qnn"), "int8")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=QuantPlan) == plan


def test_targets_differ_as_their_files_say(net: Model, calibration: Calibration) -> None:
    plans = {
        name: plan_quantization(net, calibration, load_target(name), "int8") for name in ("nnapi", "qnn", "xnnpack")
    }
    assert {name: plan.activation for name, plan in plans.items()} == {
        "nnapi": "uint8",
        "qnn": "uint8",
        "xnnpack": "int8",
    }
    assert plans["nnapi"].axes == {"w1": 0, "w2": 0, "w3": 0}
    assert plans["nnapi"].grids["y"].zero_point == 0
    assert [node.op for node in plans["xnnpack"].float_nodes] == ["Softmax"]


def test_int16_means_uint16_activations(net: Model, calibration: Calibration) -> None:
    assert plan_quantization(net, calibration, load_target("qnn"), "int16").activation == "uint16"


def test_float_precision_is_refused(net: Model, calibration: Calibration) -> None:
    with pytest.raises(UsageError, match="'fp16' is no integer precision"):
        plan_quantization(net, calibration, load_target("qnn"), "fp16")


def test_calibration_of_another_model_is_refused(net: Model, calibration: Calibration) -> None:
    other = msgspec.structs.replace(calibration, model_sha256="0" * 64)
    with pytest.raises(DataError, match=r"not of 'conv_net\.onnx'"):
        plan_quantization(net, other, load_target("qnn"), "int8")


def test_unknown_method_gets_a_suggestion(net: Model, calibration: Calibration) -> None:
    with pytest.raises(UsageError, match="did you mean 'minmax'"):
        plan_quantization(net, calibration, load_target("qnn"), "int8", method="minmx")


def test_16_bits_reach_through_what_only_moves_values(net: Model, calibration: Calibration) -> None:
    plan = plan_quantization(net, calibration, load_target("qnn"), "int8", method="minmax")
    wide = relieve_tensors(read_float_graph(net), plan, ("s", "g"), calibration, widens=True).wide
    assert list(wide) == ["s", "p", "g", "f"]


def test_a_float_tensor_takes_its_maker_and_readers_out_of_8_bits(net: Model, calibration: Calibration) -> None:
    plan = plan_quantization(net, calibration, load_target("nnapi"), "int8", method="minmax")
    relieved = relieve_tensors(read_float_graph(net), plan, ("s", "x"), calibration, widens=False)
    reasons = {node.name: node.reason for node in relieved.float_nodes if node not in plan.float_nodes}
    assert set(reasons) == {"n0_Conv", "n3_Add", "n4_MaxPool"}
    assert reasons["n0_Conv"] == "it makes or reads 'x', which 8 bits do not hold"
    assert relieved.float_nodes[: len(plan.float_nodes)] == plan.float_nodes
    assert relieved.wide == plan.wide == {}


@pytest.mark.parametrize(
    ("node", "weight", "axis"),
    [
        ("ConvTranspose(x, w)", (8, 5, 1, 1), 1),
        ("ConvTranspose<group=2>(x, w)", (8, 5, 1, 1), None),
        ("Conv<group=2>(x, w)", (6, 4, 1, 1), 0),
        ("Conv(x, w)", (6, 8, 1, 1), 0),
        ("MatMul(x, w)", (8, 6), 1),
        ("MatMul(x, w)", (8, 8, 6), None),
    ],
)
def test_weights_get_a_scale_per_output_channel_where_their_bias_can_follow(
    tmp_path: Path, node: str, weight: tuple[int, ...], axis: int | None
) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[1,8,8,8] x) => (float[N,C,H,W] y) {{ y = {node} }}'
    model = make_model(text, tmp_path / "m.onnx", {"w": weight})
    calibration = calibrate_model(model, random_samples(model, 4), work=tmp_path / "work")
    plan = plan_quantization(model, calibration, load_target("cpu"), "int8", method="minmax")
    assert plan.axes == ({} if axis is None else {"w": axis})


@pytest.mark.parametrize(
    ("node", "weight", "bias", "axis"),
    [
        ("Gemm<transB=1>(x, w, b)", (6, 8), (6,), 0),
        ("Gemm(x, w, b)", (8, 6), (6,), 1),
        ("Gemm(x, w)", (8, 6), (6,), 1),
        ("Gemm(x, w, b)", (8, 6), (1, 6), None),
    ],
)
def test_a_gemm_gets_a_scale_per_column_unless_its_bias_has_two_dimensions(
    tmp_path: Path, node: str, weight: tuple[int, ...], bias: tuple[int, ...], axis: int | None
) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[1,8] x) => (float[1,6] y) {{ y = {node} }}'
    model = make_model(text, tmp_path / "m.onnx", {"w": weight, "b": bias})
    calibration = calibrate_model(model, random_samples(model, 4), work=tmp_path / "work")
    plan = plan_quantization(model, calibration, load_target("cpu"), "int8", method="minmax")
    assert plan.axes == ({} if axis is None else {"w": axis})


def test_node_without_integer_form_says_why(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y) { a = Erf(x) y = Add(a, x) }'
    model = make_model(text, tmp_path / "m.onnx")
    calibration = calibrate_model(model, random_samples(model), work=tmp_path / "work")
    plan = plan_quantization(model, calibration, load_target("nnapi"), "int8")
    assert [(node.op, node.reason) for node in plan.float_nodes] == [("Erf", "no rule of this target quantizes Erf")]


def test_nothing_to_quantize_is_refused(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,4] x) => (float[1,4] y) { y = Erf(x) }'
    model = make_model(text, tmp_path / "m.onnx")
    calibration = calibrate_model(model, make_samples([{"x": np.ones((1, 4), np.float32)}]), work=tmp_path / "work")
    with pytest.raises(ModelError, match=r"no node of 'm\.onnx' can be quantized"):
        plan_quantization(model, calibration, load_target("nnapi"), "int8")


@pytest.mark.parametrize("api_level", ["28", "29"])
def test_nnapi_takes_the_convolutions_of_old_devices_with_one_scale(
    net: Model, calibration: Calibration, tmp_path: Path, api_level: str
) -> None:
    target = load_target("nnapi", {"api_level": api_level})
    plan = plan_quantization(net, calibration, target, "int8")
    assert bool(plan.axes) == (api_level == "29")
    quantized = quantize_model(net, plan, calibration, tmp_path / "q.onnx").model
    assert [node.op for node in check_model(quantized, target).node_list if node.op == "Conv" and not node.taken] == []


def test_what_computes_in_double_precision_stays_as_it_is(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,8] x) => (float[1,4] y, double[1,4] p) {
      h = MatMul(x, w1) r = Relu(h) y = MatMul(r, w2) d = Cast<to = 11>(y) s = Softmax(d) p = Mul(s, d) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 16), "w2": (16, 4)})
    calibration = calibrate_model(model, random_samples(model), work=tmp_path / "work")
    for name in ("qnn", "nnapi", "xnnpack", "cpu"):
        plan = plan_quantization(model, calibration, load_target(name), "int8")
        reasons = {node.op: node.reason for node in plan.float_nodes}
        assert reasons["Softmax"] == reasons["Mul"] == "it computes in double precision"
        quantized = quantize_model(model, plan, calibration, tmp_path / f"{name}.onnx")
        assert quantized.quantized_nodes == 2
