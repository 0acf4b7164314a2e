"""The node inside a branch that is not the float model's is named, not the If around it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.verify.layers.comparison import compare_layers
from edgekit.verify.layers.outliers import find_first_bad

SAMPLES = Samples(
    source="drawn",
    count=3,
    read=lambda: (
        {"x": np.random.default_rng(seed).normal(size=(6, 6)).astype(np.float32), "first": np.array(True)}
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
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 6]),
            helper.make_tensor_value_info("first", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [6, 6])],
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


def drop_activation(body: onnx.GraphProto) -> None:
    body.node[2].op_type = "Identity"
    del body.node[2].attribute[:]


def swap_inputs(body: onnx.GraphProto) -> None:
    body.node[1].input[:] = [body.node[1].input[1], body.node[1].input[0]]


@pytest.mark.parametrize("branch", ["one", "two"])
@pytest.mark.parametrize(
    ("change", "named"),
    [(turn_weight, "linear"), (change_slope, "leaky"), (drop_activation, "leaky"), (swap_inputs, "linear")],
)
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


def test_a_choice_by_the_input_is_no_excuse(model: Model, tmp_path: Path) -> None:
    proto = onnx.load(str(model.path))
    graph = proto.graph
    graph.input[1].CopyFrom(helper.make_tensor_value_info("rate", TensorProto.INT64, []))
    graph.initializer.append(numpy_helper.from_array(np.array(16000), "sixteen"))
    graph.node.insert(0, helper.make_node("Equal", ["rate", "sixteen"], ["first"], name="same"))
    onnx.save(proto, str(tmp_path / "a.onnx"))
    for item in graph.node[1].attribute:
        del item.g.node[2:]
        item.g.node.append(helper.make_node("Neg", [item.g.node[1].output[0]], [item.g.output[0].name], name="other"))
    onnx.save(proto, str(tmp_path / "b.onnx"))
    rows = [{"x": sample["x"], "rate": np.array(16000)} for sample in SAMPLES]
    samples = Samples(source="drawn", count=3, read=lambda: iter(rows))
    bad = find_first_bad(compare_layers(load_model(tmp_path / "a.onnx"), load_model(tmp_path / "b.onnx"), samples))
    assert bad is not None
    assert bad.name == "choice"
