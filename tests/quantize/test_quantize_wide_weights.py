"""Weights that 8 bits do not hold have 16, as the sum of two of 8 bits, where a plan may miss its goal."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from exported_models import draw_inputs, export_bert
from fixture_types import present
from quantize_models import (
    Units,
    find_searched,
    make_model,
    make_samples,
    op_types,
    random_samples,
    sqnr_db,
)

from edgekit.errors import UsageError
from edgekit.graph.constants import read_dequantized
from edgekit.graph.graph import read_graph
from edgekit.jobs.build import build
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, OutputKind, StatedOutput
from edgekit.prepare import prepare_model
from edgekit.quantize import Calibration, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.apply import require_plan
from edgekit.quantize.calibration.calibrate import open_float_graph
from edgekit.quantize.calibration.moments import InputMoments
from edgekit.quantize.finer_weights import bound_outputs
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.mixed_precision.candidates import Subject
from edgekit.quantize.mixed_precision.relief import relieve_step
from edgekit.quantize.mixed_precision.weights import widen_weights
from edgekit.quantize.plan import QuantPlan, draft_plan
from edgekit.quantize.ranges import TensorRange
from edgekit.recipe import Data, Recipe, choose_precision
from edgekit.target import Precision, load_target
from edgekit.verify.report import VerifyReport

# Equalization does not scale inputs, so the first weight must hold what compensates their sizes.
UNEQUAL = """g (float[1,16] x) => (float[1,16] y) {
  h = MatMul(x, w1) r = Relu(h) z = MatMul(r, w2) y = MatMul(z, w3) }"""


def make_unequal(folder: Path, ratio: float) -> tuple[Model, list[dict[str, Array]]]:
    """A net whose inputs differ in size by a ratio, which its first weight compensates, and 48 samples."""
    rng, sizes = np.random.default_rng(3), np.where(np.arange(16) % 2, 1.0, ratio)
    first = (rng.normal(size=(16, 16)) / (4 * sizes[:, None])).astype(np.float32)
    model = make_model(UNEQUAL, folder / "m.onnx", {"w2": (16, 64), "w3": (64, 16)}, {"w1": first})
    return model, [{"x": row} for row in (rng.normal(size=(48, 1, 16)) * sizes).astype(np.float32)]


@pytest.mark.parametrize(
    ("ratio", "target", "precision"),
    [
        (1.0, "qnn", "int8"),
        (60.0, "qnn", "int8"),
        (1.0, "qnn", "int16"),
        (60.0, "qnn", "int16"),
        (60.0, "xnnpack", "int8"),
    ],
)
def test_a_missed_goal_gives_weights_16_bits(ratio: float, target: str, precision: Precision, tmp_path: Path) -> None:
    model, samples = make_unequal(tmp_path, ratio)
    searched = find_searched(tmp_path, model, samples, load_target(target), precision)
    has_wide, chosen = ratio > 1 and target == "qnn", searched.chosen
    assert chosen.plan.bits.get("w1") == (16 if has_wide else None)
    assert (", weights in 16 bits" in chosen.step) == has_wide
    assert [each.step.endswith(", weights in 16 bits") for each in searched.trials].count(True) == has_wide
    assert ({"x", "r"} <= chosen.plan.wide.keys()) == (has_wide and precision == "int8")
    assert chosen.prediction.sqnr_db > 30


def calibrate(model: Model, folder: Path, samples: list[dict[str, Array]] | None = None) -> Calibration:
    return calibrate_model(
        model, random_samples(model, 24) if samples is None else make_samples(samples), work=folder / "work"
    )


def test_as_many_weights_get_16_bits_as_gain_a_decibel_and_fit(tmp_path: Path) -> None:
    model, samples = make_unequal(tmp_path, 60)
    calibration = calibrate(model, tmp_path, samples)
    first = plan_quantization(model, calibration, load_target("qnn"), "int8")
    subject = Subject(model=model, calibration=calibration, target=load_target("qnn"), precision="int8")
    plan = present(relieve_step(subject, first, 1, before=first))
    # 256 of 2,304 products.
    assert present(widen_weights(subject, plan, 0.12)).bits == {"w1": 16}
    assert widen_weights(subject, plan, 0.11) is None
    longer = plan.wide | {"x": TensorRange(low=-200, high=200)}
    given = msgspec.structs.replace(plan, wide=longer)
    assert present(widen_weights(subject, given, 0.12)).wide["x"] == longer["x"]
    # Plans that differ in the activations of 16 bits share the ranking.
    (ranking,) = subject.memo.weights.values()
    assert max(ranking, key=lambda error: error.noise).name == "w1"
    # Without its noise, activations of 8 bits add more than the other weights do.
    assert present(widen_weights(subject, plan, 1.0)).bits == {"w1": 16}
    assert widen_weights(subject, msgspec.structs.replace(plan, bits={"w3": 4}), 1.0) is None
    every = plan_quantization(model, calibration, load_target("qnn"), "int16")
    wide = present(widen_weights(subject, every, 1.0))
    assert wide.bits.keys() == {"w1", "w2", "w3"}
    assert wide.wide == every.wide
    # Of the two with 1,024 products the worse fits.
    assert [*present(widen_weights(subject, every, 0.6)).bits] == [*wide.bits][:2]


LAYERS = {
    "padded": "y = Conv<kernel_shape=[3,3],pads=[1,1,1,1]>(x, w, b)",
    "depthwise": "y = Conv<kernel_shape=[3,3],pads=[1,1,1,1],group=8>(x, d, c)",
    "transposed": "y = ConvTranspose<kernel_shape=[3,3]>(x, v, b)",
    "relu": "a = Conv<kernel_shape=[3,3]>(x, w, b) y = Relu(a)",
    "product": "y = MatMul(x, m)",
    "gemm": "f = Reshape(x, rows) y = Gemm<transB=1>(f, g, b)",
}
SHAPES = {
    "w": (16, 8, 3, 3),
    "b": (16,),
    "d": (8, 1, 3, 3),
    "c": (8,),
    "v": (8, 16, 3, 3),
    "m": (12, 16),
    "g": (16, 12),
}


def quantize_wide(text: str, folder: Path) -> tuple[Model, Model, Model]:
    """The net of a text, quantized with all activations in 16 bits, and with weights in 16 bits too."""
    words = {word for part in text.split("(")[1:] for word in part.split(")")[0].replace(",", " ").split()}
    output = "float[80,16]" if "rows" in words else "float[1,a,b,c]"
    model = make_model(
        f"g (float[1,8,10,12] x) => ({output} y) {{ {text} }}",
        folder / "m.onnx",
        {name: shape for name, shape in SHAPES.items() if name in words},
        {"rows": np.array([80, 12])} if "rows" in words else None,
    )
    calibration = calibrate(model, folder)
    plan = plan_quantization(model, calibration, load_target("qnn"), "int16")
    weights = [layer.weight for layer in read_layers(open_float_graph(model, calibration))]
    wide = msgspec.structs.replace(plan, bits=dict.fromkeys(weights, 16))
    one, two = (
        quantize_model(model, each, calibration, folder / f"{index}.onnx").model
        for index, each in enumerate((plan, wide))
    )
    return model, one, two


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_of_two_weights_is_as_exact_as_its_activations(name: str, tmp_path: Path) -> None:
    model, one, two = quantize_wide(LAYERS[name], tmp_path)
    seen = list(random_samples(model, 24).read())
    assert sqnr_db(model, one, seen) < 55
    assert sqnr_db(model, two, seen) > 70
    ops = op_types(two)
    assert ops.count("Add") == 1
    assert [ops.count(op) for op in ("Conv", "ConvTranspose", "MatMul", "Gemm")].count(2) == 1
    assert list_layers(two).keys() == {"first", "rest"}


def list_layers(model: Model) -> dict[str, tuple[Array, tuple[float, float]]]:
    """The weight of each layer, rounded, and the range of its output, by the end of the output's name."""
    units, found = Units(model), dict[str, tuple[Array, tuple[float, float]]]()
    for node in (node for node in units.nodes if node.op_type in {"Conv", "ConvTranspose", "Gemm", "MatMul"}):
        assert units.constant(node, 1).dtype == np.int8
        step, zero = units.write(node)
        assert zero.dtype == np.uint16
        ends = (0 - int(zero)) * float(step), (65535 - int(zero)) * float(step)
        weight = read_dequantized(units.makers[node.input[1]], units.stored.__getitem__)
        found[node.output[0].rpartition(".")[2]] = weight, ends
    return found


@pytest.mark.parametrize(
    ("precision", "weights", "sums"), [("int16", "wv", 1), ("int16", "v", 1), ("int16", "w", 0), ("int8", "wv", 0)]
)
def test_weights_that_8_bits_hold_stay(precision: Precision, weights: str, sums: int, tmp_path: Path) -> None:
    integers = np.random.default_rng(0).integers(-127, 128, (16, 16))
    integers[0] = 127
    exact = (integers / 128).astype(np.float32)
    text = "g (float[4,16] x) => (float[4,16] y) { h = MatMul(x, w) z = MatMul(h, v) y = MatMul(z, u) }"
    model = make_model(text, tmp_path / "m.onnx", {"v": (16, 16), "u": (16, 16)}, {"w": exact})
    calibration = calibrate(model, tmp_path)
    plan = plan_quantization(model, calibration, load_target("qnn"), precision, method="minmax")
    wide = msgspec.structs.replace(plan, bits=dict.fromkeys(weights, 16))
    made = quantize_model(model, wide, calibration, tmp_path / "q.onnx")
    assert op_types(made.model).count("Add") == sums


@pytest.mark.parametrize(("ends", "bounds"), [((1, 2), (-6, 2)), ((-2, -1), (-2, 6)), ((-1, 2), (-7, 5))])
def test_outputs_are_bounded(ends: tuple[float, float], bounds: tuple[float, float], tmp_path: Path) -> None:
    model = make_model(
        "g (float[1,1,4] x) => (float[1,1,4] y) { y = Conv<kernel_shape=[2],pads=[0,1]>(x, w) }",
        tmp_path / "m.onnx",
        None,
        {"w": np.ones((1, 1, 2), np.float32)},
    )
    (layer,) = read_layers(read_graph(model))
    low, high = (np.array([[end], [0]], np.float32) for end in ends)
    zeros = np.zeros((1, 2), np.float32)
    moments = InputMoments(count=1, mean=zeros, spread=zeros, low=low, high=high, covariance=np.zeros((1, 2, 2)))
    assert bound_outputs(layer, np.array([[[1.0, -3.0]]]), moments) == bounds


def test_a_channel_of_tiny_weights_keeps_a_scale_that_the_htp_multiplies_rightly(tmp_path: Path) -> None:
    """In a channel whose scales, input times weight over output, are below 2**-24, the HTP is wrong."""
    drawn = np.random.default_rng(0).normal(size=(16, 12)).astype(np.float32)
    drawn[3] *= 1e-9
    model = make_model(
        "g (float[4,12] x) => (float[4,16] y) { y = Gemm<transB=1>(x, w) }", tmp_path / "m.onnx", None, {"w": drawn}
    )
    calibration = calibrate(model, tmp_path)
    plan = plan_quantization(model, calibration, load_target("qnn"), "int16")
    made = quantize_model(model, msgspec.structs.replace(plan, bits={"w": 16}), calibration, tmp_path / "q.onnx").model
    units = Units(made)
    layers = [node for node in units.nodes if node.op_type == "Gemm"]
    assert len(layers) == 2
    for node in layers:
        (step, _), (scale, _), (after, _) = units.read(node, 0), units.read(node, 1), units.write(node)
        assert 2**-24 <= (step * scale / after).min() < 2**-23


@pytest.mark.parametrize(
    ("target", "precision", "weight", "is_taken"),
    [
        ("qnn", "int8", "w2", True),
        ("qnn", "int16", "w2", True),
        ("qnn", "int8", "x", False),
        ("qnn", "w4a16", "w2", False),
        ("xnnpack", "int8", "w2", False),
    ],
)
def test_a_plan_may_give_16_bits_to_a_weight_of_a_target_that_has_them(
    target: str, precision: Precision, weight: str, tmp_path: Path, *, is_taken: bool
) -> None:
    model, samples = make_unequal(tmp_path, 1)
    calibration = calibrate(model, tmp_path, samples)
    plan = plan_quantization(model, calibration, load_target(target), precision, method="minmax")
    plan = msgspec.structs.replace(plan, bits=plan.bits | {weight: 16})
    if is_taken:
        require_plan(plan, model, calibration, load_target(target))
        return
    with pytest.raises(UsageError, match=f"gives '{weight}' 16 bits"):
        require_plan(plan, model, calibration, load_target(target))


# Weights of products in blocks that Qualcomm's LPBQ can hold, between Q and DQ of 16 bits.

TARGET = load_target("qnn", {"blocks": "32"})


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Calibration]:
    folder = tmp_path_factory.mktemp("bert")
    model = prepare_model(export_bert(folder / "bert.onnx", "torchscript17"), folder / "ready.onnx", {})
    samples = make_samples([draw_inputs(model, seed) for seed in range(8)])
    return model, calibrate_model(model, samples, work=folder / "calibration")


def plan_blocks(model: Model, calibration: Calibration, **changes: object) -> QuantPlan:
    plan = draft_plan(model, read_float_graph(model), calibration, TARGET, "w4a16")
    return msgspec.structs.replace(plan, **changes)


def products(path: Path) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(str(path)).graph.node if node.op_type == "MatMulNBits"]


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_products_of_3_axes_get_lpbq(bert: tuple[Model, Calibration], tmp_path: Path, rounding: str) -> None:
    plan = plan_blocks(*bert, rounding=rounding)
    require_plan(plan, bert[0], bert[1], TARGET)
    made = quantize_model(bert[0], plan, bert[1], tmp_path / "q.onnx")
    units, found = Units(made.model), products(made.model.path)
    assert len(found) == 4
    assert {units.makers[node.input[0]].op_type for node in found} == {"DequantizeLinear"}
    for node in found:
        scales = units.stored[node.input[2]]
        steps = scales / scales.max(axis=1, keepdims=True) * 16
        assert np.allclose(steps, np.rint(steps), atol=1e-4)
        assert (scales > 0).all()
    # Nothing of what the blocks replace is left.
    assert set(units.stored) <= {name for node in units.makers.values() for name in node.input}
    gemms = [node for node in units.nodes if node.op_type == "Gemm"]
    assert {units.makers[node.input[1]].op_type for node in gemms} == {"DequantizeLinear"}


def test_a_weight_that_keeps_8_bits_is_in_no_block(bert: tuple[Model, Calibration], tmp_path: Path) -> None:
    plan = plan_blocks(*bert)
    first = next(iter(plan.bits))
    few = msgspec.structs.replace(plan, bits={name: bits for name, bits in plan.bits.items() if name != first})
    made = quantize_model(bert[0], few, bert[1], tmp_path / "q.onnx")
    assert f"{first}_q4" not in {name for node in products(made.model.path) for name in node.input}


def test_only_a_target_with_blocks_gets_blocks(bert: tuple[Model, Calibration]) -> None:
    with pytest.raises(UsageError, match="has blocks of 64 weights, but w4a16 of target 'qnn' takes 32"):
        require_plan(plan_blocks(*bert, block=64), bert[0], bert[1], TARGET)
    with pytest.raises(UsageError, match="has blocks of 32 weights, but w4a16 of target 'qnn' takes none"):
        require_plan(plan_blocks(*bert), bert[0], bert[1], load_target("qnn"))


def test_blocks_are_refused_beside_another_precision_than_w4a16() -> None:
    assert TARGET.session.provider_options["enable_block_quant_weight_optimization"] == "1"
    assert choose_precision(TARGET, "auto") == "w4a16"
    with pytest.raises(UsageError, match="16 bits"):
        choose_precision(TARGET, "int8")


@pytest.mark.long
@pytest.mark.slow
def test_a_build_with_blocks_passes_in_the_simulator(tmp_path: Path) -> None:
    model = export_bert(tmp_path / "bert.onnx", "torchscript17")
    drawn = [draw_inputs(load_model(model.path), seed) for seed in range(24)]
    np.savez(tmp_path / "d.npz", **{name: np.stack([sample[name] for sample in drawn]) for name in drawn[0]})  # type: ignore[arg-type]
    # Random weights give all samples one class: unless classes are stated, values count, and most weights get 8 bits.
    outputs: dict[str, OutputKind | StatedOutput] = {spec.name: "classes" for spec in model.outputs}
    recipe = Recipe(targets=("qnn",), settings={"blocks": "32"}, outputs=outputs)
    (bundle,) = build(model.path, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", recipe).bundles
    assert any("gemm-to-matmul (2 nodes)" in note for note in bundle.notes)
    assert len(products(tmp_path / "out" / "bert-qnn" / "model.onnx")) >= 4
    found: VerifyReport | None = bundle.verify
    assert found is not None
    assert found.verdict == "pass"
    assert list(found.runs[0].provider_nodes) == ["QNNExecutionProvider"]
