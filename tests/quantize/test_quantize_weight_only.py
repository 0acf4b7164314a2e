"""Smaller weights without samples: what each form changes, keeps, weighs and computes; QOperator form."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.errors import ModelError, UsageError
from edgekit.model.model import Model, find_quantized_form, load_model, read_proto
from edgekit.model.tensors import Array
from edgekit.prepare import prepare_model
from edgekit.quantize.qdq.qoperator import write_qoperator
from edgekit.quantize.weight_only.blocks import quantize_blocks
from edgekit.quantize.weight_only.convert import WEIGHT_FORMS, WeightForm, WeightOnlyOptions, compress_weights


def make_perceptron(path: Path) -> Model:
    """Writes MatMul, Gemm with a turned weight and a bias, and Softmax: float32[2,100] to [2,10]."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "w1": rng.standard_normal((100, 64)).astype(np.float32) / 10,
        "w2": rng.standard_normal((10, 64)).astype(np.float32) / 8,
        "b2": rng.standard_normal(10).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["y"], name="second", transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 100])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return load_model(path)


def run(model: Model) -> Array:
    sample = {"x": np.random.default_rng(1).standard_normal((2, 100)).astype(np.float32)}
    return CpuSession(model.path, SessionSettings(level=Level.DISABLED)).run(sample)["y"]


LEAST_SQNR_DB = {"fp16": 55, "dynamic-int8": 30, "int8": 38, "int4": 14}


def sqnr_db(wanted: Array, got: Array) -> float:
    return float(10 * np.log10(np.square(wanted).sum() / np.square(wanted - got).sum()))


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_each_form_makes_weights_smaller_and_stays_close(tmp_path: Path, form: WeightForm) -> None:
    model = make_perceptron(tmp_path / "m.onnx")
    light = compress_weights(model, WeightOnlyOptions(form=form), tmp_path / "c.onnx")
    assert set(light.changed) >= {"first", "second"}
    assert light.size_after < light.size_before * 0.6
    assert sqnr_db(run(model), run(light.model)) > LEAST_SQNR_DB[form]
    again = compress_weights(model, WeightOnlyOptions(form=form), tmp_path / "d.onnx")
    assert again.model.sha256 == light.model.sha256


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_a_kept_node_keeps_its_weights(tmp_path: Path, form: WeightForm) -> None:
    model = make_perceptron(tmp_path / "m.onnx")
    light = compress_weights(model, WeightOnlyOptions(form=form, kept=("first",)), tmp_path / "c.onnx")
    proto = read_proto(light.model)
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "w1")
    assert weight.data_type == TensorProto.FLOAT
    assert "first" not in light.changed
    assert next(node.op_type for node in proto.graph.node if node.name == "first") == "MatMul"


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_hold_the_largest_weight_exactly_and_zeros_as_zero(bits: int) -> None:
    weight = np.random.default_rng(2).standard_normal((40, 3)).astype(np.float32)
    weight[:32, 1] = 0.0
    values, scales = quantize_blocks(weight, bits, 32)
    assert (values.shape, scales.shape) == ((3, 2, 32), (3, 2))
    back = ((values.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]).reshape(3, -1)[:, :40].T
    assert np.array_equal(back[:32, 1], np.zeros(32, np.float32))
    step = np.abs(scales).max()
    assert np.abs(back - weight).max() <= step
    place = np.abs(weight[:32, 0]).argmax()
    assert back[place, 0] == pytest.approx(weight[place, 0], rel=1e-6)


def test_wrong_names_and_blocks_are_refused(tmp_path: Path) -> None:
    model = make_perceptron(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=r"no node 'frst' to keep.*first"):
        compress_weights(model, WeightOnlyOptions(form="int4", kept=("frst",)), tmp_path / "c.onnx")
    with pytest.raises(UsageError, match="no block of 7 weights"):
        compress_weights(model, WeightOnlyOptions(form="int4", block=7), tmp_path / "c.onnx")


def make_trained_qdq(path: Path) -> Model:
    """Writes what quantisation-aware training exports: Q and DQ around a Conv, with scales of its own."""
    rng = np.random.default_rng(3)
    weights: dict[str, Array] = {
        "s_in": np.array(0.0123456, np.float32), "z_in": np.array(117, np.uint8),
        "w": rng.integers(-127, 127, (4, 3, 1, 1)).astype(np.int8),
        "s_w": rng.uniform(0.001, 0.01, 4).astype(np.float32), "z_w": np.zeros(4, np.int8),
        "s_out": np.array(0.0777777, np.float32), "z_out": np.array(121, np.uint8),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s_in", "z_in"], ["xq"], name="q_in"),
        helper.make_node("DequantizeLinear", ["xq", "s_in", "z_in"], ["xd"], name="dq_in"),
        helper.make_node("DequantizeLinear", ["w", "s_w", "z_w"], ["wd"], name="dq_w", axis=0),
        helper.make_node("Conv", ["xd", "wd"], ["c"], name="conv"),
        helper.make_node("QuantizeLinear", ["c", "s_out", "z_out"], ["cq"], name="q_out"),
        helper.make_node("DequantizeLinear", ["cq", "s_out", "z_out"], ["y"], name="dq_out"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 4, 4])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return load_model(path)


def constants(model: Model) -> dict[bytes, int]:
    tensors = [numpy_helper.to_array(tensor) for tensor in read_proto(model).graph.initializer]
    return {value.tobytes(): value.size for value in tensors}


def test_a_trained_qdq_model_passes_through_untouched(tmp_path: Path) -> None:
    model = make_trained_qdq(tmp_path / "m.onnx")
    assert find_quantized_form(read_proto(model)) == "qdq"
    prepared = prepare_model(model, tmp_path / "p.onnx", {})
    assert constants(prepared) == constants(model)
    assert [node.op_type for node in read_proto(prepared).graph.node].count("DequantizeLinear") == 3
    with pytest.raises(ModelError, match=r"quantized already \(qdq\)"):
        compress_weights(prepared, WeightOnlyOptions(form="int8"), tmp_path / "c.onnx")


def test_the_qoperator_form_has_the_same_numbers(tmp_path: Path) -> None:
    prepared = prepare_model(make_trained_qdq(tmp_path / "m.onnx"), tmp_path / "p.onnx", {})
    written = write_qoperator(prepared, tmp_path / "q.onnx", "x64")
    assert written.operators == {"QLinearConv": 1}
    assert [node.op_type for node in read_proto(written.model).graph.node] == [
        "QuantizeLinear", "QLinearConv", "DequantizeLinear",
    ]  # fmt: skip
    assert constants(written.model).items() <= constants(prepared).items()
    sample = {"x": np.random.default_rng(4).standard_normal((1, 3, 4, 4)).astype(np.float32)}
    wanted = CpuSession(prepared.path, SessionSettings()).run(sample)["y"]
    assert np.array_equal(CpuSession(written.model.path, SessionSettings()).run(sample)["y"], wanted)
    assert find_quantized_form(read_proto(written.model)) == "qoperator"


def test_a_float_model_has_no_qoperator_form(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no node of 'm' became an integer operator"):
        write_qoperator(make_perceptron(tmp_path / "m.onnx"), tmp_path / "q.onnx", "arm")
