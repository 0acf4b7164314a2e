"""A layer that does not compute what the float model computes is named; two models are compared by their outputs."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from bundle_models import make_contents, make_samples
from fixture_types import present
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper
from tiny_models import parse_model, save_net
from verify_devices import InProcess, from_list
from verify_models import LAYERS, break_layer, make_images, save_network

from edgekit.bundle.folder import write_bundle
from edgekit.bundle.golden import make_golden
from edgekit.data.samples import Samples
from edgekit.errors import ModelError, UsageError
from edgekit.graph.graph import read_graph
from edgekit.model.model import Model, load_model, save_proto
from edgekit.model.tensors import Array, Reading
from edgekit.quantize.channel_pairs import NOTE, SUFFIX, read_scaling, scale_channels, write_scaling
from edgekit.quantize.weight_only import convert_to_fp16
from edgekit.report.text import list_comparison_remarks
from edgekit.target import TaskLimit, load_target
from edgekit.tune.race import judge_outputs
from edgekit.verify.layers import matching
from edgekit.verify.layers.comparison import (
    LayerReport,
    choose_layer_samples,
    compare_layers,
    explain_layers,
    find_first_bad,
    name_first_bad,
)
from edgekit.verify.layers.grids import StepErrors
from edgekit.verify.layers.overflows import align_infinities
from edgekit.verify.run import verify_bundle
from edgekit.verify.two_models import compare_models

TENSORS = ["x", "r0", "r1", "r2", "r3", "r4", "pooled", "y"]
"""What each layer of the network gives, behind its Relu."""


def test_every_layer_of_a_quantized_model_is_matched(models: tuple[Model, Model]) -> None:
    layers = compare_layers(*models, make_images())
    convs = [layer for layer in layers if layer.op == "Conv"]
    assert [layer.name for layer in convs] == [f"conv{index}" for index in range(LAYERS)]
    assert all(layer.own_sqnr_db is not None and layer.own_sqnr_db > 25 for layer in layers)
    assert find_first_bad(layers) is None
    # A folded Relu is compared behind its rounding.
    assert [layer.tensor for layer in layers] == TENSORS
    # Errors pile up, but a layer's own error does not.
    (deep,) = (layer for layer in layers if layer.tensor == "r4")
    assert present(deep.sqnr_db) < present(deep.own_sqnr_db) - 3


def test_what_a_qlinear_operator_clips_was_right_before(tmp_path: Path) -> None:
    text = """g (float[1,4] x) => (float[1,4] y)
      <float s = {0.01}, int8 z = {0}, int8[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> {
      r = Relu(x) q = QuantizeLinear(r, s, z) p = QLinearMatMul(q, s, z, w, s, z, s, z)
      y = DequantizeLinear(p, s, z) }"""
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    layers = compare_layers(model, model, from_list([{"x": np.full((1, 4), 5.0, np.float32)}]))
    assert [layer.tensor for layer in layers] == ["r", "y"]
    assert explain_layers(layers) == ()


def test_layers_are_compared_on_four_samples(models: tuple[Model, Model], tmp_path: Path) -> None:
    images = make_images(8)
    golden = make_golden(models[0], images, tmp_path / "golden")
    wanted = list(images)[::2]
    chosen = choose_layer_samples(golden)
    assert [sample["x"].tobytes() for sample in chosen] == [sample["x"].tobytes() for sample in wanted]


def swap_channels(weight: Array) -> Array:
    weight[[2, 3]] = weight[[3, 2]]
    return weight


def test_a_zero_point_off_by_one_is_named(models: tuple[Model, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(models[1].path))
    rounded = next(node.output[0] for node in proto.graph.node if "r2" in node.input[:1])
    node = next(node for node in proto.graph.node if rounded in node.input[:1])
    proto.graph.initializer.append(helper.make_tensor("wrong", TensorProto.UINT8, [], [1]))
    node.input[2] = "wrong"
    broken = save_proto(proto, tmp_path / "broken.onnx")
    assert name_first_bad(compare_layers(models[0], broken, make_images())) == "conv2"


def test_models_and_samples_that_do_not_fit_are_refused(models: tuple[Model, Model], tmp_path: Path) -> None:
    text = "(float[1,3,12,12] x) => (float[1,3,12,12] other) { other = Abs(x) }"
    with pytest.raises(ModelError, match="no layer in common"):
        compare_layers(models[0], save_net(text, tmp_path / "other.onnx"), make_images(1))
    samples = Samples(source="wrong", count=1, read=lambda: iter([{"z": np.zeros((1, 3, 12, 12), np.float32)}]))
    with pytest.raises(UsageError, match="wants the input x: float32"):
        compare_models(*models, samples)
    for text in ("(float[1,3,12,9] x)", "(int64[1,3,12,12] x)", "(float[1,3,12,12] x, float[1] w)"):
        other = save_net(f"{text} => (float[a,b,c,d] out) {{ t = Abs(x)  out = Cast<to=1>(t) }}", tmp_path / "in.onnx")
        with pytest.raises(UsageError, match=r"in.onnx' wants the input [xw]: .*the samples have x: float32\[1, 3, 12"):
            compare_models(models[0], other, make_images(1))
    text = "(float[1,3,12,12] x) => (float[1,3,12,12] p, float[1,3,12,12] q) { p = Abs(x)  q = Neg(x) }"
    (lost,) = compare_models(models[0], save_net(text, tmp_path / "out.onnx"), make_images(1)).outputs
    assert lost.mismatch == f"is no output of '{tmp_path}/out.onnx', which has p, q"


def halve_model(model: Model, path: Path) -> Model:
    half = onnx.load(str(model.path))
    for tensor in half.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for value in (*half.graph.input, *half.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return save_proto(half, path)


def test_a_half_precision_model_is_compared_with_the_float_one(tmp_path: Path) -> None:
    model = save_network(tmp_path / "network.onnx")
    graph = onnx.load(str(model.path)).graph
    comparison = compare_models(model, halve_model(model, tmp_path / "half.onnx"), make_images(2), layers=True)
    assert comparison.outputs[0].mismatch is None
    assert len(comparison.layers) == len(graph.node)
    assert all(layer.own_sqnr_db is not None and layer.own_sqnr_db > 55 for layer in comparison.layers)


def test_values_too_small_for_half_precision_are_no_fault(tmp_path: Path) -> None:
    # The weights of a dead branch decay to 1e-40, and half precision has nothing between 0 and 6e-8.
    text = """(float[1,3,12,12] x) => (float[1,3,12,12] y) <float k = {1e-10}>
        { t = Mul(x, k)  r = Relu(t)  y = Sub(x, r) }"""
    model = save_net(text, tmp_path / "dead.onnx")
    layers = compare_layers(model, halve_model(model, tmp_path / "half.onnx"), make_images(2))
    assert [layer.tensor for layer in layers if layer.own_sqnr_db == 0.0] == ["t", "r"]
    assert name_first_bad(layers) is None


def test_rounding_behind_a_reshape_that_the_other_model_lacks_is_no_fault(tmp_path: Path) -> None:
    head = "(float[1,4,24] x) => (float[1,4,24] y)"
    plain = f"{head} <float c = {{9}}> {{ m = Mul(x, c)  y = Softmax<axis = -1>(m) }}"
    moved = (
        f"{head} <float c = {{9}}, float s = {{0.5}}, uint8 z = {{128}}, int64[3] n = {{1, 4, 24}}> {{ m = Mul(x, c)"
        "  f = Flatten<axis = 2>(m)  q = QuantizeLinear(f, s, z)  d = DequantizeLinear(q, s, z)  t = Softmax(ACT)"
        "  y = Reshape(t, n) }"
    )
    rows = np.random.default_rng(2).normal(size=(4, 1, 4, 24)).astype(np.float32)
    samples = Samples(source="x", count=4, read=lambda: ({"x": row} for row in rows))
    plain_model = save_net(plain, tmp_path / "a.onnx")
    for act, is_clean in (("d", True), ("z2", False)):
        text = moved.replace("t = Softmax(ACT)", f"z2 = Neg(d)  t = Softmax({act})")
        layers = compare_layers(plain_model, save_net(text, tmp_path / f"{act}.onnx"), samples)
        assert (find_first_bad(layers) is None) is is_clean


def test_a_layer_whose_first_output_has_no_name_is_compared_by_the_other(tmp_path: Path) -> None:
    """As a GRU of which only the last step is read."""
    numbers = ",".join(["0.25", "-0.5"] * 6)
    weights = f"float[1,6,4] w = {{{numbers},{numbers}}}, float[1,6,2] r = {{{numbers}}}"
    head = f"(float[3,1,4] x) => (float[1,1,2] y) <{weights}, float s = {{0.02}}, int8 z = {{0}}>"
    plain = f"{head} {{ , h = GRU<hidden_size=2>(x, w, r)  y = Neg(h) }}"
    rounded = f"""{head} {{ a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)
        , h = GRU<hidden_size=2>(b, w, r)  c = QuantizeLinear(h, s, z)  d = DequantizeLinear(c, s, z)  y = Neg(d) }}"""
    rows = np.random.default_rng(0).uniform(-2, 2, (4, 3, 1, 4)).astype(np.float32)
    one, other = (save_net(text, tmp_path / f"{at}.onnx") for at, text in enumerate((plain, rounded)))
    layers = compare_layers(one, other, from_list([{"x": row} for row in rows]))
    assert ([layer.tensor for layer in layers], name_first_bad(layers)) == (["x", "h", "y"], None)


def test_a_result_on_a_grid_with_several_scales_is_not_counted_in_steps(tmp_path: Path) -> None:
    """Its channels have steps of their own, and no single step tells how far a value may be off."""
    head = "(float[1,2,4] x) => (float[1,2,4] y)"
    models = [
        save_net(f"{head} {{ [double] m = Add(x, x) y = Relu(m) }}", tmp_path / "float.onnx"),
        *(
            save_net(
                f"{head} <float{dims} s = {{{scales}}}, uint8{dims} z = {{{zeros}}}> {{ [double] m = Add(x, x)"
                "  q = QuantizeLinear<axis = 1>(m, s, z)  d = DequantizeLinear<axis = 1>(q, s, z)  y = Relu(d) }",
                tmp_path / f"{name}.onnx",
            )
            for name, dims, scales, zeros in (("one", "", "0.05", "128"), ("two", "[2]", "0.05, 0.05", "128, 128"))
        ),
    ]
    samples = from_list([{"x": np.linspace(-3, 3, 8, dtype=np.float32).reshape(1, 2, 4)}])
    found = ([*compare_layers(models[0], model, samples)] for model in models[1:])
    one, two = (next(layer for layer in layers if layer.tensor == "m") for layers in found)
    assert one.channel_steps is not None
    assert (two.channel_steps, two.offset_steps, two.rounding_steps) == (None, None, None)
    assert two.own_sqnr_db == one.own_sqnr_db


def test_sequences_beside_the_layers_are_no_layers(tmp_path: Path) -> None:
    text = "(float[1,8] x) => (float[1,8] y, seq(float[1,8]) s) { y = Relu(x) s = SequenceConstruct(y, y) }"
    model = save_net(text, tmp_path / "m.onnx")
    layers = compare_layers(model, model, from_list([{"x": np.ones((1, 8), np.float32)}]))
    assert [layer.tensor for layer in layers] == ["y"]


@pytest.fixture(scope="module")
def forms(models: tuple[Model, Model], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The prepared network in each precision."""
    half = convert_to_fp16(models[0], [], tmp_path_factory.mktemp("half") / "half.onnx").model
    return {"fp32": models[0], "fp16": half, "int8": models[1]}


def rename(model: Model, path: Path, *, outside: bool = False) -> Model:
    """Saves the model with other names of nodes and tensors, as another exporter would give them."""
    proto = onnx.load(str(model.path))
    graph = proto.graph
    kept = set() if outside else {value.name for value in (*graph.input, *graph.output)}
    names: dict[str, str] = {}

    def new(name: str) -> str:
        return name if not name or name in kept else names.setdefault(name, f"/module/t{len(names)}")

    for node in graph.node:
        node.name = f"/module/n{len(node.name)}.{new(node.output[0])}"
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
    for value in (*graph.input, *graph.output):
        value.name = new(value.name)
    for tensor in graph.initializer:
        tensor.name = new(tensor.name)
    del graph.value_info[:]
    return save_proto(proto, path)


@pytest.mark.parametrize("form", ["fp32", "fp16"])
def test_a_clean_float_deployment_has_no_outlier(forms: dict[str, Model], form: str) -> None:
    assert explain_layers(compare_layers(forms["fp32"], forms[form], make_images())) == ()


@pytest.mark.parametrize("form", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("layer", "fault"),
    [
        pytest.param("conv0", lambda weight: weight // 2 if weight.dtype == np.int8 else weight * 2, id="scale"),
        pytest.param("conv2", lambda weight: weight.transpose(0, 1, 3, 2), id="transposed"),
        pytest.param("conv4", swap_channels, id="swapped channels"),
    ],
)
def test_the_broken_layer_is_named(
    forms: dict[str, Model], tmp_path: Path, form: str, layer: str, fault: Callable[[Array], Array]
) -> None:
    broken = break_layer(forms[form], tmp_path / "broken.onnx", layer, fault)
    assert name_first_bad(compare_layers(forms["fp32"], broken, make_images())) == layer


def test_renamed_nodes_and_tensors_are_matched_by_their_order(models: tuple[Model, Model], tmp_path: Path) -> None:
    plain = compare_layers(*models, make_images())
    renamed = compare_layers(models[0], rename(models[1], tmp_path / "renamed.onnx"), make_images())
    assert [layer.tensor for layer in renamed] == [layer.tensor for layer in plain]
    assert [layer.own_sqnr_db for layer in renamed] == [layer.own_sqnr_db for layer in plain]
    broken = break_layer(models[1], tmp_path / "broken.onnx", "conv3", swap_channels)
    bad = present(find_first_bad(compare_layers(models[0], rename(broken, tmp_path / "other.onnx"), make_images())))
    assert bad.tensor == "r3"


def test_matched_names_need_no_search(models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """In time that grows with the cube: 400 equal layers took seconds."""
    graphs = [read_graph(model) for model in models]
    monkeypatch.setattr(matching, "SequenceMatcher", None)
    assert [item.tensor for item in matching.match_tensors(*graphs)] == TENSORS


def test_unlike_inputs_and_outputs_go_by_their_places(models: tuple[Model, Model], tmp_path: Path) -> None:
    renamed = rename(models[1], tmp_path / "renamed.onnx", outside=True)
    plain, other = (compare_models(models[0], model, make_images(), layers=True) for model in (models[1], renamed))
    assert other.outputs == plain.outputs
    assert [layer.own_sqnr_db for layer in other.layers] == [layer.own_sqnr_db for layer in plain.layers]
    assert set(other.renamed.values()) == {"x", "y"}
    assert not plain.renamed


def test_a_layer_that_stands_out_explains_and_decides_nothing(models: tuple[Model, Model], tmp_path: Path) -> None:
    broken = break_layer(models[1], tmp_path / "broken.onnx", "conv2", swap_channels)
    clean, wrong = (compare_models(models[0], model, make_images(), layers=True) for model in (models[1], broken))
    assert clean.judge(None) == "pass"
    assert wrong.first_bad_layer == "conv2"
    # Two channels exchanged change what the outputs say: that is what is told, and not the layer.
    assert wrong.judge(None) != "pass"
    assert not any("conv2" in line for line in (*wrong.weigh().failures, *wrong.weigh().unproven))


def test_every_reader_of_a_rounded_tensor_is_looked_at(models: tuple[Model, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(models[1].path))
    graph = proto.graph
    given = next(node for node in graph.node if node.op_type == "DequantizeLinear" and "conv2" in {
        other.name for other in graph.node if node.output[0] in other.input[:1]})  # fmt: skip
    twin = helper.make_node("DequantizeLinear", [given.input[0], given.input[1], "wrong"], ["twin"])
    graph.initializer.append(helper.make_tensor("wrong", TensorProto.UINT8, [], [9]))
    graph.node.append(helper.make_node("QuantizeLinear", ["r1", given.input[1], given.input[2]], ["again"]))
    twin.input[0] = "again"
    graph.node.append(twin)
    next(node for node in graph.node if node.name == "conv2").input[0] = "twin"
    broken = save_proto(proto, tmp_path / "broken.onnx")
    assert name_first_bad(compare_layers(models[0], broken, make_images())) == "conv1"


LAYER = LayerReport(
    name="a", op="Conv", tensor="a", sqnr_db=40.0, max_abs=0.1, own_sqnr_db=40.0, own_bias=0.0, arithmetic="int8",
    offset_steps=0.02, channel_steps=(0.7, 0.3),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "is_bad"),
    [
        ({}, False),
        ({"channel_steps": (9.4, 0.3)}, True),
        ({"channel_steps": (9.4, 0.3), "rounding_steps": (2.0, 0.1)}, False),
        ({"channel_steps": (4.0, 0.3), "roundings": 1}, False),
        ({"channel_steps": (4.0, 0.3), "jumps": True}, False),
        ({"offset_steps": 1.0}, True),
        ({"offset_steps": 1.0, "rounding_steps": (0.0, 0.7)}, False),
        ({"own_sqnr_db": None, "own_bias": None}, True),
        ({"arithmetic": "half", "own_sqnr_db": None, "own_bias": None, "overflows": True}, True),
        ({"arithmetic": "half", "channel_steps": (1.2, 0.1)}, True),
        ({"arithmetic": None, "channel_steps": (9.4, 0.3)}, False),
    ],
)
def test_a_layer_stands_out_by_its_own_error(changes: dict[str, object], is_bad: bool) -> None:
    said = explain_layers([replace(LAYER, **changes), LAYER])
    assert bool(said) is is_bad
    assert all("layer 'a' (Conv) is the first whose result is not the float model's" in line for line in said)


def test_an_overflow_counts_where_no_other_layer_stands_out_and_a_mask_is_none() -> None:
    over = replace(LAYER, own_sqnr_db=None, own_bias=None, overflows=True, arithmetic="half")
    other = replace(LAYER, name="other", offset_steps=3.0)
    assert find_first_bad([over, LAYER]) is over
    assert find_first_bad([over, other]) is other
    wanted = np.array([1.0, -1e9, -np.inf, np.nan, 2.0, -np.inf, -np.inf])
    settled = align_infinities(wanted, np.array([1.0, -65504.0, -np.inf, np.nan, np.inf, -12.0, 1.1]))
    assert [np.flatnonzero(~np.isfinite(side)).tolist() for side in settled] == [[6], [4]]
    assert settled[0][1] == settled[1][1] == settled[1][5] == 0.0


def test_scaled_channels_are_told_from_broken_ones(models: tuple[Model, Model], tmp_path: Path) -> None:
    """The second layer's channels are scaled by powers of two, and the third layer's weights scale them back."""
    factors = np.ldexp(1.0, np.random.default_rng(0).integers(-3, 4, 24))
    proto = onnx.load(str(models[0].path))
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    for name, shape, scale in (("conv1", (-1, 1, 1, 1), factors), ("conv2", (1, -1, 1, 1), 1 / factors)):
        node = next(node for node in proto.graph.node if node.name == name)
        values = numpy_helper.to_array(tensors[node.input[1]]) * scale.astype(np.float32).reshape(shape)
        tensors[node.input[1]].CopyFrom(numpy_helper.from_array(values, node.input[1]))
    for node in proto.graph.node:
        node.input[:] = [name + SUFFIX if name in {"c1", "r1"} else name for name in node.input]
        node.output[:] = [name + SUFFIX if name in {"c1", "r1"} else name for name in node.output]
    write_scaling(proto, dict.fromkeys(("c1", "r1"), factors))
    scaled = save_proto(proto, tmp_path / "scaled.onnx")
    layers = compare_layers(models[0], scaled, make_images())
    assert "r1" in {layer.tensor for layer in layers}
    assert explain_layers(layers) == ()
    wrong = break_layer(scaled, tmp_path / "wrong.onnx", "conv1", lambda weight: (weight * 2).astype(weight.dtype))
    assert name_first_bad(compare_layers(models[0], wrong, make_images())) == "conv1"


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": "\u0000\uffff"}', "[" * 100_000])
def test_a_note_of_a_stranger_does_no_harm(text: str) -> None:
    proto = onnx.ModelProto()
    proto.metadata_props.add(key=NOTE, value=text)
    found = read_scaling(proto)
    assert all(np.isfinite(factors).all() and (factors > 0).all() for factors in found.values())


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 5, 5)])
def test_factors_that_do_not_fit_change_nothing(shape: tuple[int, ...]) -> None:
    value = np.ones(shape, np.float32)
    assert np.array_equal(scale_channels(value, np.full(7, 2.0)), value)


WEIGHT = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)


def save_softmax(weight: npt.NDArray[np.float32], path: Path) -> Model:
    text = "(float[1,8] x) => (float[1,5] y) { [mul] xw = MatMul(x, w) [softmax] y = Softmax<axis = 1>(xw) }"
    return save_net(text, path, w=weight)


def test_two_classes_exchanged_fail_without_any_limit_and_sharper_ones_pass(tmp_path: Path) -> None:
    first = save_softmax(WEIGHT, tmp_path / "first.onnx")
    sharper = compare_models(first, save_softmax(3 * WEIGHT, tmp_path / "sharper.onnx"), make_samples(64))
    assert (sharper.judge(None), sharper.judge(30.0)) == ("pass", "fail")
    exchanged = compare_models(
        first, save_softmax(WEIGHT[:, [1, 0, 2, 3, 4]], tmp_path / "other.onnx"), make_samples(64)
    )
    assert exchanged.judge(None) == "fail"
    assert next(list_comparison_remarks(exchanged)).startswith("output 'y' has top-1 agreement 0.")


def test_a_metric_of_two_models_is_that_of_the_device(tmp_path: Path) -> None:
    model, samples = save_softmax(WEIGHT, tmp_path / "m.onnx"), make_samples(8)
    labels = [int(row["y"].argmax()) for row in matching.run_unoptimized(model, samples)]
    wrong = InProcess(lie=lambda rows: [{"y": -row["y"]} for row in rows])
    on, limit = (wrong, load_target("cpu")), TaskLimit(name="top1", max_drop=1.0)
    found = compare_models(model, model, samples, on, task=(limit, labels))
    assert (present(found.task).reference, present(found.task).got) == (1.0, 0.0)
    assert present(compare_models(model, model, samples, task=(limit, labels)).task).got == 1.0


def test_a_setting_is_tuned_by_what_the_outputs_of_a_bundle_are_for(tmp_path: Path) -> None:
    readings = {"y": Reading(kind="classes", axis=1)}
    bundle = write_bundle(replace(make_contents(tmp_path), readings=readings), tmp_path / "read")
    limits = bundle.manifest.thresholds
    rows = [{"y": row} for row in np.random.default_rng(2).normal(size=(16, 1, 5)).astype(np.float32)]

    def give(factor: float) -> Samples:
        return Samples(source="t", count=16, read=lambda: ({"y": np.float32(factor) * row["y"]} for row in rows))

    ratio, fault = judge_outputs(give(1), give(3), limits, bundle)
    assert ratio == pytest.approx(-6.0, abs=0.1)
    assert fault is None
    for factor, kept in ((3.0, None), (-1.0, bundle)):
        _, fault = judge_outputs(give(1), give(factor), limits, kept)
        assert fault is not None


@pytest.fixture
def model(tmp_path: Path) -> Model:
    text = "(float[1,8] x) => (float[1,8] up, float[1,8] down) { [up] up = Relu(x) [down] down = Neg(x) }"
    return save_net(text, tmp_path / "two.onnx")


def reorder(model: Model, path: Path) -> Model:
    proto = onnx.load(str(model.path))
    outputs = list(proto.graph.output)[::-1]
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)
    return save_proto(proto, path)


def test_a_model_with_its_outputs_in_another_order_is_another_model(model: Model, tmp_path: Path) -> None:
    found = compare_models(model, reorder(model, tmp_path / "other.onnx"), make_samples())
    assert found.judge(None) == "fail"
    assert {output.name: output.mismatch for output in found.outputs} == {
        "up": "is output 1, in the reference 0",
        "down": "is output 0, in the reference 1",
    }
    assert compare_models(model, model, make_samples()).judge(None) == "pass"


def test_a_file_of_a_bundle_with_its_outputs_in_another_order_fails(model: Model, tmp_path: Path) -> None:
    other = reorder(model, tmp_path / "two.other.onnx")
    contents = replace(make_contents(tmp_path, model=model), files={"onnx": (other.path,)})
    report = verify_bundle(write_bundle(contents, tmp_path / "two-nnapi"), [InProcess()])
    assert not report.passed
    assert "its outputs are down, up, those in the manifest up, down" in report.failures[0]


@pytest.mark.parametrize(("noise", "expected"), [((1.5, 0.1), 0.85), ((1.0,), 1.0), ((1.0, 1.0, 1.0), 1.0)])
def test_rounding_is_expected_of_each_channel_by_its_own_scale(noise: tuple[float, ...], expected: float) -> None:
    steps = StepErrors(count=2, total=0.0, energies=(np.array([36.0, 9.0]),), low=0.0, high=1.0)
    of_channel, of_all = steps.expect_rounding(1.0, np.array(noise), 4.0)
    assert of_channel == pytest.approx(expected)
    assert of_all == pytest.approx(np.sqrt(np.square(noise).mean() / 2) + np.sqrt(0.5))
