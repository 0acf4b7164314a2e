"""Blocks of 4-bit weights on Qualcomm's HTP: its simulator computes what `convert --weights int4 --lpbq` writes."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import make_job, present
from onnx import TensorProto, helper, numpy_helper

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.weight_only.blocks import quantize_blocks
from edgekit.quantize.weight_only.convert import WeightOnlyOptions, compress_weights
from edgekit.target import Target, load_target

pytestmark = pytest.mark.slow

STEP_IN, STEP_OUT = np.float32(8 / 65535), np.float32(40 / 65535)


def make_product(path: Path) -> Path:
    """Writes one MatMul of [1,4,64] with a weight [64,16] whose blocks have very unequal sizes."""
    weight = np.random.default_rng(0).normal(size=(64, 16)) * np.repeat([1.0, 0.3], 32)[:, None]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mix")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 16])],
        [numpy_helper.from_array(weight.astype(np.float32), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), str(path))
    return path


def between_16_bits(path: Path, out: Path, *, free_scales: bool = False) -> Path:
    """Puts Q and DQ of uint16 around a model; with `free_scales` its blocks get positive ones that LPBQ cannot hold."""
    proto = onnx.load(str(path))
    graph, (node,) = proto.graph, list(proto.graph.node)
    if free_scales:
        stored = {tensor.name: tensor for tensor in graph.initializer}
        scales = numpy_helper.to_array(stored[node.input[2]]) * np.array([1.0, 0.93], np.float32)
        stored[node.input[2]].CopyFrom(numpy_helper.from_array(scales.astype(np.float32), node.input[2]))
    middle = np.array(32768, np.uint16)
    constants = {"step_in": STEP_IN, "step_out": STEP_OUT, "middle": middle}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    node.input[0], node.output[0] = "xd", "yf"
    pairs = (("x", "xq", "xd", "step_in"), ("yf", "yq", "y", "step_out"))
    for source, integers, made, step in pairs:
        graph.node.append(helper.make_node("QuantizeLinear", [source, step, "middle"], [integers], name=f"q_{made}"))
        graph.node.append(helper.make_node("DequantizeLinear", [integers, step, "middle"], [made], name=f"dq_{made}"))
    ordered = [graph.node[index] for index in (1, 2, 0, 3, 4)]
    nodes = [onnx.NodeProto.FromString(each.SerializeToString()) for each in ordered]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(proto, str(out))
    return out


def with_blocks(soc: str) -> Target:
    target = load_target("qnn", {"soc_model": soc})
    options = {**target.session.provider_options, "enable_block_quant_weight_optimization": "1"}
    return msgspec.structs.replace(target, session=msgspec.structs.replace(target.session, provider_options=options))


def error_in_steps(model: Path, soc: str, work: Path) -> float:
    target = with_blocks(soc)
    device = present("qnn-htp-sim", target)
    rng = np.random.default_rng(1)
    samples: list[Tensors] = [{"x": rng.uniform(-3, 3, (1, 4, 64)).astype(np.float32)} for _ in range(3)]
    work.mkdir()
    run = device.run_job(msgspec.structs.replace(make_job(model, "qnn", samples), target=target), work)
    assert (run.failure, run.notes) == (None, ())
    session = CpuSession(model, SessionSettings())
    pairs: list[tuple[Array, Array]] = [
        (session.run(sample)["y"], got["y"]) for sample, got in zip(samples, run.outputs, strict=True)
    ]
    return max(float(np.abs(want - got).max()) for want, got in pairs) / float(STEP_OUT)


@pytest.mark.parametrize(("soc", "most"), [("30", 40), ("69", 3)])
def test_the_htp_computes_blocks_of_lpbq_as_the_file_says(tmp_path: Path, soc: str, most: float) -> None:
    options = WeightOnlyOptions(form="int4", lpbq=True)
    light = compress_weights(load_model(make_product(tmp_path / "m.onnx")), options, tmp_path / "light.onnx").model
    model = between_16_bits(light.path, tmp_path / "q.onnx")
    assert error_in_steps(model, soc, tmp_path / "work") <= most


def test_blocks_of_other_scales_are_rounded_to_those(tmp_path: Path) -> None:
    options = WeightOnlyOptions(form="int4", lpbq=True)
    light = compress_weights(load_model(make_product(tmp_path / "m.onnx")), options, tmp_path / "light.onnx").model
    model = between_16_bits(light.path, tmp_path / "q.onnx", free_scales=True)
    assert error_in_steps(model, "69", tmp_path / "work") > 300


def test_plain_blocks_have_scales_that_are_not_of_lpbq(tmp_path: Path) -> None:
    weight = numpy_helper.to_array(onnx.load(str(make_product(tmp_path / "m.onnx"))).graph.initializer[0])
    plain, snapped = (quantize_blocks(weight, 4, 32, lpbq=lpbq)[1] for lpbq in (False, True))
    assert (plain < 0).any()
    assert (snapped > 0).all()


def test_an_input_without_elements_is_refused_in_one_line(tmp_path: Path) -> None:
    device, path = present("qnn-htp-sim", "qnn"), tmp_path / "m.onnx"
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 0]) for name in "xy")
    proto = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "g", [x], [y]))
    onnx.save(proto, str(path))
    run = device.run_job(make_job(path, "qnn", [{"x": np.zeros((1, 0), np.float32)}]), tmp_path)
    assert str(run.failure).startswith("input 'x' has no elements")
