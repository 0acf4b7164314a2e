"""The node inside a branch that is not the float model's is named, not the If around it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgekit.model import Model, load_model
from edgekit.samples import Samples
from edgekit.verify.layers import compare_layers
from edgekit.verify.outliers import find_first_bad

SAMPLES = Samples(
    source="drawn",
    count=3,
    read=lambda: (
        {"x": np.random.default_rng(seed).normal(size=(2, 6)).astype(np.float32), "first": np.array(True)}
        for seed in range(3)
    ),
)


def make_branch(name: str, seed: int) -> onnx.GraphProto:
    values = np.random.default_rng(seed).normal(size=(6, 6)).astype(np.float32)
    nodes = [
        helper.make_node("Constant", [], [f"{name}.w"], value=numpy_helper.from_array(values)),
        helper.make_node("MatMul", ["x", f"{name}.w"], [f"{name}.m"], name=f"{name}.linear"),
        helper.make_node("LeakyRelu", [f"{name}.m"], [f"{name}.y"], name=f"{name}.leaky", alpha=0.1),
    ]
    return helper.make_graph(nodes, name, [], [onnx.ValueInfoProto(name=f"{name}.y")])


@pytest.fixture
def model(tmp_path: Path) -> Model:
    branches = make_branch("one", 1), make_branch("two", 2)
    graph = helper.make_graph(
        [helper.make_node("If", ["first"], ["y"], name="choice", then_branch=branches[0], else_branch=branches[1])],
        "branching",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 6]),
            helper.make_tensor_value_info("first", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 6])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "a.onnx")
    return load_model(tmp_path / "a.onnx")


def turn_weight(body: onnx.GraphProto) -> None:
    tensor = body.node[0].attribute[0].t
    values = numpy_helper.to_array(tensor).copy()
    values[2, 3] *= -1
    tensor.CopyFrom(numpy_helper.from_array(values))


def change_slope(body: onnx.GraphProto) -> None:
    body.node[2].attribute[0].f = 0.2


@pytest.mark.parametrize("branch", ["one", "two"])
@pytest.mark.parametrize(("change", "named"), [(turn_weight, "linear"), (change_slope, "leaky")])
def test_the_node_inside_is_named(
    model: Model, tmp_path: Path, branch: str, change: Callable[[onnx.GraphProto], None], named: str
) -> None:
    proto = onnx.load(str(model.path))
    change(next(item.g for item in proto.graph.node[0].attribute if item.g.name == branch))
    onnx.save(proto, str(tmp_path / "b.onnx"))
    bad = find_first_bad(compare_layers(model, load_model(tmp_path / "b.onnx"), SAMPLES))
    assert bad is not None
    assert bad.name == f"{branch}.{named}"
    assert "(inside 'choice')" in bad.altered


def test_the_same_model_is_named_nothing(model: Model) -> None:
    assert find_first_bad(compare_layers(model, model, SAMPLES)) is None
