"""A weight that is not the float model's is found by itself, through scaled channels too, and so is a scale."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from verify_models import break_layer, make_images, quantize

from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.verify.layers.biases import find_mismatched_scales
from edgekit.verify.layers.comparison import compare_layers
from edgekit.verify.layers.outliers import find_first_bad, judge_layers
from edgekit.verify.layers.weights import FAR_STEPS, Initializers, measure_weights
from edgekit.verify.matching.match import match_tensors
from edgekit.verify.matching.regions import find_regions


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    return quantize(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def scaled(models: tuple[Model, Model], tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The float model with rows and columns of its weights scaled by powers of two."""
    rng = np.random.default_rng(0)
    proto = onnx.load(str(models[0].path))
    for tensor in proto.graph.initializer:
        if len(tensor.dims) == 4:
            values = numpy_helper.to_array(tensor)
            powers = rng.integers(-4, 5, (tensor.dims[0], 1, 1, 1)) + rng.integers(-4, 5, (1, tensor.dims[1], 1, 1))
            tensor.CopyFrom(numpy_helper.from_array(np.ldexp(values, powers).astype(np.float32), tensor.name))
    path = tmp_path_factory.mktemp("scaled") / "scaled.onnx"
    onnx.save(proto, str(path))
    return load_model(path)


def measure(a: Model, b: Model) -> dict[str, float]:
    """Returns the steps of the worst weight by layer."""
    floats, stored = Initializers(a), Initializers(b)
    graphs = floats.graph, stored.graph
    matched = match_tensors(*graphs)
    facts = measure_weights(floats, stored, matched, find_regions(*graphs, matched))
    return {item.layer: facts[item.tensor].steps or 0.0 for item in matched}


def flip(bit: int) -> Callable[[Array], Array]:
    def change(weight: Array) -> Array:
        weight.reshape(-1).view(np.uint8)[100] ^= np.uint8(1 << bit)
        return weight

    return change


def test_clean_weights_lie_within_a_step(models: tuple[Model, Model], scaled: Model) -> None:
    assert max(measure(models[0], models[1]).values()) < 2.0
    assert max(measure(scaled, models[1]).values()) < 2.0


@pytest.mark.parametrize("bit", [4, 5, 6, 7])
@pytest.mark.parametrize("layer", ["conv1", "conv3"])
def test_a_flipped_bit_is_found_through_scaled_channels(
    models: tuple[Model, Model], scaled: Model, tmp_path: Path, layer: str, bit: int
) -> None:
    broken = break_layer(models[1], tmp_path / "broken.onnx", layer, flip(bit))
    for reference in (models[0], scaled):
        assert [name for name, steps in measure(reference, broken).items() if steps > FAR_STEPS] == [layer]


def test_a_zero_point_of_a_weight_is_found(models: tuple[Model, Model], tmp_path: Path) -> None:
    broken = break_layer(models[1], tmp_path / "broken.onnx", "conv2", lambda weight: weight + weight.dtype.type(1))
    assert [name for name, steps in measure(models[0], broken).items() if steps > FAR_STEPS] == ["conv2"]


def save_biased(path: Path, changes: dict[str, float]) -> Model:
    """Saves three convolutions in a row between Q and DQ nodes; `changes` multiplies scales by name."""
    scales = {"x": 0.1, **{f"{kind}{index}": 0.01 * (index + 1) for kind in "wr" for index in range(3)}}
    reads = ["x", "r0", "r1"]
    scales |= {f"b{index}": scales[reads[index]] * scales[f"w{index}"] for index in range(3)}
    scales = {name: scale * changes.get(name, 1.0) for name, scale in scales.items()}
    weights = [numpy_helper.from_array(np.asarray(scale, np.float32), f"{name}.s") for name, scale in scales.items()]
    weights += [numpy_helper.from_array(np.ones((2, 2, 1, 1), np.int8), f"w{index}.i") for index in range(3)]
    weights += [numpy_helper.from_array(np.ones(2, np.int32), f"b{index}.i") for index in range(3)]
    nodes = [node for index in range(3) for node in _make_layer(index, reads[index])]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2, 4, 4]) for name in ("x", "r2")]
    graph = helper.make_graph(nodes, "biased", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return load_model(path)


def _make_layer(index: int, read: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [read, f"{read}.s"], [f"{read}.q"]),
        helper.make_node("DequantizeLinear", [f"{read}.q", f"{read}.s"], [f"{read}.d"]),
        helper.make_node("DequantizeLinear", [f"w{index}.i", f"w{index}.s"], [f"w{index}.d"]),
        helper.make_node("DequantizeLinear", [f"b{index}.i", f"b{index}.s"], [f"b{index}.d"]),
        helper.make_node("Conv", [f"{read}.d", f"w{index}.d", f"b{index}.d"], [f"r{index}"], name=f"conv{index}"),
    ]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"r0": 0.5}, "r0"),
        ({"r1": 2.0}, "r1"),
        ({"x": 1.5}, "x"),
        ({"b0": 1.0001}, None),
        ({"b0": 2.0, "b1": 3.0}, None),
    ],
)
def test_a_scale_that_does_not_fit_its_bias_is_found(
    tmp_path: Path, changes: dict[str, float], named: str | None
) -> None:
    unfit = find_mismatched_scales(Initializers(save_biased(tmp_path / "biased.onnx", changes)))
    assert list(unfit) == ([] if named is None else [named])


def test_a_changed_scale_of_an_activation_is_named(tmp_path: Path) -> None:
    clean = save_biased(tmp_path / "clean.onnx", {})
    broken = save_biased(tmp_path / "broken.onnx", {"r0": 0.5})
    images = make_images(2)
    rows = [{"x": sample["x"][:, :2, :4, :4]} for sample in images]
    few = type(images)(source="rows", count=2, read=lambda: iter(rows))
    assert judge_layers(compare_layers(clean, clean, few)) == ()
    bad = find_first_bad(compare_layers(clean, broken, few))
    assert bad is not None
    assert bad.name == "conv0"
    assert "does not fit the bias of 'conv1', by a factor of 0.5" in bad.unfit


def test_a_float_layer_whose_constant_is_stored_as_bytes_is_granted_their_rounding(tmp_path: Path) -> None:
    text = "g (float[1,8] x, float[8,4] w) => (float[1,4] y) { y = MatMul(x, w) }"
    narrow = (
        "g (float[1,8] x) => (float[1,4] y) <int8[8,4] w = {"
        + ",".join(str(number) for number in range(-16, 16))
        + "}, float s = {0.1}> { c = Cast<to=1>(w) f = Mul(c, s) y = MatMul(x, f) }"
    )
    graphs = []
    for name, body in (("a", text), ("b", narrow)):
        onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {body}'), tmp_path / f"{name}.onnx")
        graphs.append(Initializers(load_model(tmp_path / f"{name}.onnx")).graph)
    regions = find_regions(graphs[0], graphs[1], match_tensors(graphs[0], graphs[1]))
    assert regions["y"].arithmetic == "int8"
    assert find_regions(graphs[0], graphs[0], match_tensors(graphs[0], graphs[0]))["y"].arithmetic == "float"


def test_the_largest_float_has_no_next_one_and_that_is_no_warning(models: tuple[Model, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(models[0].path))
    weight = next(tensor for tensor in proto.graph.initializer if len(tensor.dims) == 4)
    values = numpy_helper.to_array(weight).copy()
    values.reshape(-1)[0] = np.finfo(np.float32).max
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(proto, str(tmp_path / "huge.onnx"))
    huge = load_model(tmp_path / "huge.onnx")
    assert max(measure(huge, huge).values()) == 0.0
