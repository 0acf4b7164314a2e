"""An operator that is not the float model's is named, however little it moves; one that only looks other is not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.prepare.clean import prepare_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.weight_only.fp16 import convert_to_fp16
from edgekit.target import load_target
from edgekit.verify.layers.comparison import compare_layers
from edgekit.verify.layers.outliers import find_first_bad
from edgekit.verify.two_models import compare_models

WIDTH = 24


def draw(count: int = 4) -> Samples:
    rows = np.random.default_rng(3).normal(scale=8.0, size=(count, 1, WIDTH, 10)).astype(np.float32)
    return Samples(source="drawn", count=count, read=lambda: ({"x": row} for row in rows))


def save_network(path: Path) -> Model:
    """A normalization of large values, a difference, a padded pool, a clip, a linear layer."""
    rng = np.random.default_rng(4)
    weights = {
        "scale": rng.uniform(0.6, 1.4, 10), "shift": rng.normal(scale=0.2, size=10),
        "other": rng.normal(size=(1, WIDTH, 1)), "low": np.array(-1.5), "high": np.array(2.5),
        "w": rng.normal(scale=0.3, size=(5, 16)), "b": rng.normal(scale=0.3, size=16),
    }  # fmt: skip
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "shift"], ["n"], name="norm", axis=-1),
        helper.make_node("Sub", ["n", "other"], ["s"], name="minus"),
        helper.make_node("AveragePool", ["s"], ["p"], name="pool", kernel_shape=[2], strides=[2], auto_pad="VALID"),
        helper.make_node("Clip", ["p", "low", "high"], ["c"], name="clip"),
        helper.make_node("MatMul", ["c", "w"], ["m"], name="linear"),
        helper.make_node("Add", ["m", "b"], ["a"], name="plus"),
        helper.make_node("Softmax", ["a"], ["y"], name="shares", axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, WIDTH, 10])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, WIDTH, 16])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))
    return load_model(path)


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    folder = tmp_path_factory.mktemp("forms")
    source = save_network(folder / "network.onnx")
    prepared = prepare_model(source, folder / "prepared.onnx", {})
    calibration = calibrate_model(prepared, draw(), work=folder / "calibration")
    plan = plan_quantization(prepared, calibration, load_target("xnnpack"), "int8")
    return {
        "source": source,
        "fp32": prepared,
        "int8": quantize_model(prepared, plan, calibration, folder / "quantized.onnx").model,
        "fp16": convert_to_fp16(prepared, [], folder / "half.onnx").model,
    }


def change(model: Model, path: Path, layer: str, edit: Callable[[onnx.NodeProto], None]) -> Model:
    proto = onnx.load(str(model.path))
    edit(next(node for node in proto.graph.node if node.name == layer))
    onnx.save(proto, str(path))
    return load_model(path)


def set_attribute(name: str, value: float | list[int] | str) -> Callable[[onnx.NodeProto], None]:
    def edit(node: onnx.NodeProto) -> None:
        kept = [item for item in node.attribute if item.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return edit


def swap(node: onnx.NodeProto) -> None:
    node.input[0], node.input[1] = node.input[1], node.input[0]


def test_clean_forms_are_named_nothing(forms: dict[str, Model]) -> None:
    for form in ("fp32", "int8", "fp16"):
        for reference in ("source", "fp32"):
            assert find_first_bad(compare_layers(forms[reference], forms[form], draw())) is None


@pytest.mark.parametrize("form", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("layer", "edit", "said"),
    [
        pytest.param("norm", set_attribute("epsilon", 0.5), "'epsilon' is 0.5", id="epsilon"),
        pytest.param("minus", swap, "", id="swapped"),
        pytest.param("shares", set_attribute("axis", 1), "'axis' is 1", id="axis"),
    ],
)
def test_an_operator_that_is_not_the_float_models_is_named(
    forms: dict[str, Model], tmp_path: Path, form: str, layer: str, edit: Callable[[onnx.NodeProto], None], said: str
) -> None:
    report = compare_models(forms["fp32"], change(forms[form], tmp_path / "b.onnx", layer, edit), draw(), layers=True)
    bad = find_first_bad(report.layers)
    assert bad is not None
    assert bad.name == layer
    assert said in bad.altered
    assert not report.reaches(None)


def test_an_epsilon_within_a_grid_step_is_named(forms: dict[str, Model], tmp_path: Path) -> None:
    broken = change(forms["int8"], tmp_path / "b.onnx", "norm", set_attribute("epsilon", 0.5))
    layers = compare_layers(forms["fp32"], broken, draw())
    norm = next(layer for layer in layers if layer.name == "norm")
    assert norm.channel_steps is not None
    assert norm.channel_steps[0] < 1.0
    assert find_first_bad(layers) == norm


@pytest.mark.parametrize(
    ("layer", "edit"),
    [
        pytest.param("norm", set_attribute("axis", 2), id="axis from the other end"),
        pytest.param("norm", set_attribute("epsilon", 1.0001e-5), id="an epsilon that changes nothing"),
        pytest.param("shares", set_attribute("axis", 2), id="last axis"),
    ],
)
def test_what_only_looks_other_counts_for_nothing(
    forms: dict[str, Model], tmp_path: Path, layer: str, edit: Callable[[onnx.NodeProto], None]
) -> None:
    for form in ("fp32", "int8"):
        other = change(forms[form], tmp_path / f"{form}.onnx", layer, edit)
        assert find_first_bad(compare_layers(forms["fp32"], other, draw())) is None


def test_a_constant_that_is_not_the_float_models_is_named(forms: dict[str, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(forms["fp16"].path))
    for tensor in proto.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.shape == () and float(values) == 2.5:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(2.25, values.dtype), tensor.name))
    onnx.save(proto, str(tmp_path / "b.onnx"))
    bad = find_first_bad(compare_layers(forms["fp32"], load_model(tmp_path / "b.onnx"), draw()))
    assert bad is not None
    assert (bad.name, "constant" in bad.altered) == ("clip", True)


def test_a_result_of_another_size_is_named(forms: dict[str, Model], tmp_path: Path) -> None:
    pair: list[Model] = []
    for stride in (2, 1):
        model = onnx.load(str(forms["source"].path))
        del model.graph.node[3:]
        set_attribute("strides", [stride])(model.graph.node[2])
        model.graph.node.append(helper.make_node("GlobalAveragePool", ["p"], ["y"], name="all"))
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, WIDTH, 1]))
        onnx.save(model, str(tmp_path / f"{stride}.onnx"))
        pair.append(load_model(tmp_path / f"{stride}.onnx"))
    bad = find_first_bad(compare_layers(pair[0], pair[1], draw()))
    assert bad is not None
    assert bad.name == "pool"
    assert "(1, 24, 9), in the float model (1, 24, 5)" in bad.altered


def test_a_weight_stored_the_other_way_round_is_no_fault(tmp_path: Path) -> None:
    values = np.random.default_rng(5).normal(size=(10, 10)).astype(np.float32)
    pair: list[Model] = []
    for turned in (0, 1):
        scale = np.asarray(np.abs(values).max() / 127, np.float32)
        held = np.rint(values / scale).astype(np.int8)
        weights = [numpy_helper.from_array(held.T if turned else held, "i"), numpy_helper.from_array(scale, "s")]
        weights = weights if turned else [numpy_helper.from_array(values, "w")]
        nodes = [helper.make_node("DequantizeLinear", ["i", "s"], ["w"])] if turned else []
        nodes.append(helper.make_node("Gemm", ["x", "w"], ["y"], name="linear", transB=turned))
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [WIDTH, 10]) for name in "xy"]
        graph = helper.make_graph(nodes, "turned", ends[:1], ends[1:], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        onnx.save(model, str(tmp_path / f"{turned}.onnx"))
        pair.append(load_model(tmp_path / f"{turned}.onnx"))
    rows = [{"x": sample["x"][0]} for sample in draw()]
    samples = Samples(source="drawn", count=len(rows), read=lambda: iter(rows))
    assert find_first_bad(compare_layers(pair[0], pair[1], samples)) is None
