"""ONNX Runtime's quantizer on an indexed graph: the same bytes, without looking through all nodes for each tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import base_quantizer, qdq_quantizer
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.quantization.quant_utils import find_by_name
from quantize_models import make_model, plan_model, random_samples

from edgekit.model.model import Model
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization
from edgekit.quantize import _ort_quantizer as door
from edgekit.quantize._ort_quantizer import find_plan_grids
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.score import grids_to_inputs
from edgekit.quantize.qdq import place_plan
from edgekit.target import load_target

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


@pytest.mark.parametrize("target", ["nnapi", "cpu", "qnn"])
def test_scales_for_other_ranges_are_those_of_another_placement(target: str, tmp_path: Path) -> None:
    model = make_model(WEB, tmp_path / "m.onnx", WEIGHTS)
    calibration, plan = plan_model(model, tmp_path, target, random_samples(model, count=32))
    if target == "qnn":
        plan = msgspec.structs.replace(plan, wide={"m": plan.ranges["m"]})
    other = msgspec.structs.replace(plan, ranges=calibration.ranges["mse"])
    graph = read_float_graph(model)
    one, two = place_plan(graph, plan, "m"), place_plan(graph, other, "m")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in two.graph.initializer}
    grids = find_plan_grids(graph, other, "m")
    names = grids_to_inputs(one, grids)
    assert len(names) > 8
    assert all((grids[name] == stored[name]).all() and grids[name].dtype == stored[name].dtype for name in names)
    # What is fed now stands in the other graph.
    two.graph.ClearField("initializer")
    one.graph.ClearField("initializer")
    assert list(one.graph.node) == list(two.graph.node)
