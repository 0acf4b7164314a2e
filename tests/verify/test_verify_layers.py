from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tiny_models import parse_model
from verify_models import LAYERS, break_layer, make_images, quantize, save_network

from edgekit.data.samples import Samples
from edgekit.errors import ModelError, UsageError
from edgekit.model.model import Model, load_model
from edgekit.verify.layers.comparison import compare_layers, find_first_bad
from edgekit.verify.two_models import compare_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    return quantize(tmp_path_factory.mktemp("models"))


def test_a_model_equals_itself(models: tuple[Model, Model]) -> None:
    comparison = compare_models(models[0], models[0], make_images(), layers=True)
    assert {output.max_abs for output in comparison.outputs} == {0.0}
    assert {layer.own_sqnr_db for layer in comparison.layers} == {200.0}
    assert comparison.first_bad_layer is None


def test_every_layer_of_a_quantized_model_is_matched(models: tuple[Model, Model]) -> None:
    layers = compare_layers(*models, make_images())
    convs = [layer for layer in layers if layer.op == "Conv"]
    assert [layer.name for layer in convs] == [f"conv{index}" for index in range(LAYERS)]
    assert all(layer.own_sqnr_db is not None and layer.own_sqnr_db > 25 for layer in layers)
    assert find_first_bad(layers) is None


def test_a_folded_relu_is_compared_behind_its_rounding(models: tuple[Model, Model]) -> None:
    tensors = [layer.tensor for layer in compare_layers(*models, make_images(1))]
    assert tensors == ["x", "r0", "r1", "r2", "r3", "r4", "pooled", "y"]


def test_errors_pile_up_but_own_errors_do_not(models: tuple[Model, Model]) -> None:
    layers = {layer.tensor: layer for layer in compare_layers(*models, make_images())}
    deep = layers["r4"]
    assert deep.sqnr_db is not None
    assert deep.own_sqnr_db is not None
    assert deep.sqnr_db < deep.own_sqnr_db - 3


def swap_channels(weight: np.ndarray) -> np.ndarray:
    weight[[2, 3]] = weight[[3, 2]]
    return weight


@pytest.mark.parametrize("layer", [f"conv{index}" for index in (0, 2, 4)])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda weight: weight // 2, id="scale"),
        pytest.param(lambda weight: weight.transpose(0, 1, 3, 2), id="transposed"),
        pytest.param(swap_channels, id="swapped channels"),
    ],
)
def test_the_broken_layer_is_named(
    models: tuple[Model, Model], tmp_path: Path, layer: str, fault: Callable[[np.ndarray], np.ndarray]
) -> None:
    broken = break_layer(models[1], tmp_path / "broken.onnx", layer, fault)
    bad = find_first_bad(compare_layers(models[0], broken, make_images()))
    assert bad is not None
    assert bad.name == layer


def test_a_zero_point_off_by_one_is_named(models: tuple[Model, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(models[1].path))
    rounded = next(node.output[0] for node in proto.graph.node if "r2" in node.input[:1])
    node = next(node for node in proto.graph.node if rounded in node.input[:1])
    proto.graph.initializer.append(helper.make_tensor("wrong", TensorProto.UINT8, [], [1]))
    node.input[2] = "wrong"
    onnx.save(proto, str(tmp_path / "broken.onnx"))
    bad = find_first_bad(compare_layers(models[0], load_model(tmp_path / "broken.onnx"), make_images()))
    assert bad is not None
    assert bad.name == "conv2"


def test_memory_of_the_sums_does_not_grow(models: tuple[Model, Model]) -> None:
    few, many = (compare_layers(*models, make_images(count)) for count in (1, 8))
    assert [layer.tensor for layer in few] == [layer.tensor for layer in many]


def test_models_without_a_common_layer_are_refused(models: tuple[Model, Model], tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Abs", ["x"], ["other"])],
        "other",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 12, 12])],
        [helper.make_tensor_value_info("other", TensorProto.FLOAT, [1, 3, 12, 12])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(tmp_path / "other.onnx"))
    with pytest.raises(ModelError, match="no layer in common"):
        compare_layers(models[0], load_model(tmp_path / "other.onnx"), make_images(1))


def test_samples_of_another_model_are_refused(models: tuple[Model, Model]) -> None:
    samples = Samples(source="wrong", count=1, read=lambda: iter([{"z": np.zeros((1, 3, 12, 12), np.float32)}]))
    with pytest.raises(UsageError, match="wants the input x: float32"):
        compare_models(*models, samples)


def test_a_half_precision_model_is_compared_with_the_float_one(tmp_path: Path) -> None:
    model = save_network(tmp_path / "network.onnx")
    graph = onnx.load(str(model.path)).graph
    half = onnx.load(str(model.path))
    for tensor in half.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    onnx.save(half, str(tmp_path / "half.onnx"))
    comparison = compare_models(model, load_model(tmp_path / "half.onnx"), make_images(2), layers=True)
    assert comparison.outputs[0].mismatch is None
    assert len(comparison.layers) == len(graph.node)
    assert all(layer.own_sqnr_db is not None and layer.own_sqnr_db > 55 for layer in comparison.layers)


def test_rounding_behind_a_reshape_that_the_other_model_lacks_is_no_fault(tmp_path: Path) -> None:
    head = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,4,24] x) => (float[1,4,24] y)'
    plain = f"{head} <float c = {{9}}> {{ m = Mul(x, c)  y = Softmax<axis = -1>(m) }}"
    moved = (
        f"{head} <float c = {{9}}, float s = {{0.5}}, uint8 z = {{128}}, int64[3] n = {{1, 4, 24}}> {{ m = Mul(x, c)"
        "  f = Flatten<axis = 2>(m)  q = QuantizeLinear(f, s, z)  d = DequantizeLinear(q, s, z)  t = Softmax(ACT)"
        "  y = Reshape(t, n) }"
    )
    rows = np.random.default_rng(2).normal(size=(4, 1, 4, 24)).astype(np.float32)
    samples = Samples(source="x", count=4, read=lambda: ({"x": row} for row in rows))
    plain_model = load_model(parse_model(plain, tmp_path / "a.onnx"))
    for act, is_clean in (("d", True), ("z2", False)):
        text = moved.replace("t = Softmax(ACT)", f"z2 = Neg(d)  t = Softmax({act})")
        layers = compare_layers(plain_model, load_model(parse_model(text, tmp_path / f"{act}.onnx")), samples)
        assert (find_first_bad(layers) is None) is is_clean


def test_the_comparison_is_plain_data(models: tuple[Model, Model]) -> None:
    comparison = compare_models(*models, make_images(1), layers=True)
    assert msgspec.json.decode(msgspec.json.encode(comparison), type=type(comparison)) == comparison


def test_sequences_beside_the_layers_are_no_layers(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,8] x) => (float[1,8] y, seq(float[1,8]) s)'
        "{ y = Relu(x) s = SequenceConstruct(y, y) }"
    )
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    rows = [{"x": np.ones((1, 8), np.float32)}]
    layers = compare_layers(model, model, Samples(source="s", count=1, read=lambda: iter(rows)))
    assert [layer.tensor for layer in layers] == ["y"]
