"""Channels of unequal size: found, equalized out without changing what is computed, and brought back to accuracy."""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from collapsing_models import SEPARABLE, make_collapsing
from onnx import numpy_helper
from quantize_models import make_model, make_samples, random_samples, sqnr_db

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import UsageError
from edgekit.graph.graph import Graph
from edgekit.jobs.target_bundle import Strategy, change_plan
from edgekit.model.model import Model, save_proto
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.channel_pairs import find_equalization_pairs
from edgekit.quantize.equalize import (
    balance_channels,
    choose_factors,
    equalize_calibration,
    equalize_graph,
    measure_pairs,
)
from edgekit.quantize.graph.float_graph import float_activations, read_float_graph
from edgekit.quantize.mixed_precision.candidates import Memo
from edgekit.quantize.ranges import TensorRange
from edgekit.target import Precision, Target, load_target


@pytest.mark.parametrize(
    ("magnitude", "made_by", "read_by", "ceiling", "factors"),
    [
        ([16.0, 1.0], [0.0, 0.0], None, None, [1, 16]),
        ([16.0, 1.0], [0.0, 0.0], [1.0, 1.0], None, [1, 4]),
        ([16.0, 1.0], [0.0, 0.0], [1.0, 4.0], None, [1, 8]),
        ([16.0, 1.0], [0.0, 1.0], [1.0, 1.0], None, [1, 1]),
        ([16.0, 1.0], [1.0, 1.0], [1.0, 0.0], None, [1, 2**-7]),
        ([1.0, 0.0], [0.0, 0.0], None, None, [1, 2**13]),
        ([0.0, 0.0], [1.0, 1.0], None, None, [1, 1]),
        # A Clip at 6: channels that touch it stay, and the others grow to at most 6.
        ([6.0, 5.5, 1.0, 0.3], [0.0] * 4, None, 6.0, [1, 1, 4, 16]),
        ([6.0, 6.0], [0.0, 0.0], [1.0, 16.0], 6.0, [1, 1]),
        ([6.0, 1.0], [4.0, 0.0], None, 6.0, [1, 4]),
        ([3.0, 1.0, 0.3], [0.0] * 3, None, 6.0, [1, 4, 8]),
        ([3.0, 1.0, 0.3], [0.0] * 3, None, 300.0, [1, 4, 8]),
        ([4.0, 2.0], [0.0, 0.0], [0.25, 1.0], 100.0, [0.5, 2]),
    ],
)
def test_factors_equalize_channels_and_weights(
    magnitude: list[float],
    made_by: list[float],
    read_by: list[float] | None,
    ceiling: float | None,
    factors: list[float],
) -> None:
    weights = None if read_by is None else np.array(read_by)
    assert balance_channels(np.array(magnitude), np.array(made_by), weights, ceiling).tolist() == factors


@pytest.mark.parametrize(
    ("per_channel", "bias", "depthwise", "factor"),
    [
        # Of the second channel the bias takes three quarters away, so its weights of 1 beside 16 leave 0.25 of 16.
        ((), -0.75, False, 8.0),
        (("w1",), -0.75, False, 16.0),
        (("w2",), -0.75, False, 8.0),
        (("w1", "w2"), -0.75, False, 16.0),
        (("w1",), -0.75, True, 16.0),
        (("w1", "w2"), -0.75, True, 64.0),  # weights with a scale for each channel are never too small
        (("w1", "w2"), -2.0, True, 2.0**13),  # a channel that never fires grows once, and not with every pass
    ],
)
def test_shared_scales_count_weights(
    tmp_path: Path, per_channel: tuple[str, ...], bias: float, depthwise: bool, factor: float
) -> None:
    assert weighted_factors(tmp_path, per_channel, bias=bias, depthwise=depthwise) == {"r": (1.0, factor)}


def weighted_factors(
    tmp_path: Path, per_channel: tuple[str, ...], *, bias: float, depthwise: bool
) -> dict[str, tuple[float, ...]]:
    """The factors of two channels made with weights of 16 and 1, and a bias of the second."""
    text = "g (float[1,2,4,4] x) => (float[1,N,4,4] y) { c = Conv(x, w1, b1) r = Relu(c) y = Conv(r, w2) }"
    text = text.replace("Conv(r", "Conv<group=2>(r") if depthwise else text
    reading = np.array([[1.0], [4.0]]) if depthwise else np.linspace(-1, 1, 40)[:, None] * [1.0, 4.0]
    values = {"w1": np.diag([16.0, 1.0])[..., None, None], "b1": [0.0, bias], "w2": reading[..., None, None]}
    constants: dict[str, Array] = {name: np.asarray(value, np.float32) for name, value in values.items()}
    model = make_model(text, tmp_path / "weighted.onnx", constants=constants)
    rows = np.random.default_rng(0).uniform(-1, 1, (8, 1, 2, 4, 4)).astype(np.float32)
    rows[0, ..., 0], rows[1, ..., 0] = 1, -1
    calibration = calibrate_model(model, make_samples([{"x": row} for row in rows]), work=tmp_path / "work")
    return choose_measured(read_float_graph(model), calibration, per_channel)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Calibration]:
    tmp_path = tmp_path_factory.mktemp("unequal")
    model = make_collapsing(SEPARABLE, tmp_path)
    return model, calibrate_model(model, random_samples(model, count=48), work=tmp_path / "work")


def test_passes_are_more_where_weights_share_a_scale(unequal: tuple[Model, Calibration]) -> None:
    model, calibration = unequal
    graph = read_float_graph(model)
    weights = [node.input[1] for node in graph.nodes if node.op_type in {"Conv", "Gemm"}]
    own, shared = (choose_measured(graph, calibration, each)["r"][:4] for each in (weights, ()))
    # Three passes: 512, 64, 4, 16 and 128, 16, 2, 8; two with a shared scale: 128, 16, 1, 4.
    assert (own, shared) == ((256, 32, 4, 16), (128, 16, 2, 8))


def per_tensor(name: str) -> Target:
    target = load_target(name)
    return msgspec.structs.replace(
        target, quantization=msgspec.structs.replace(target.quantization, per_channel_ops=())
    )


def choose_measured(
    graph: Graph,
    calibration: Calibration,
    per_channel: Collection[str] = (),
    *,
    seen: Mapping[str, TensorRange] | None = None,
) -> dict[str, tuple[float, ...]]:
    pairs = measure_pairs(graph, Path(calibration.statistics), seen or {})
    return choose_factors(graph, pairs, per_channel)


def equalize(graph: Graph, factors: Mapping[str, tuple[float, ...]], model: Model, folder: Path) -> tuple[Graph, Model]:
    """Returns the equalized graph and its model, which computes the same as before to the last bit."""
    equalized = equalize_graph(graph, factors)
    other = save_proto(equalized.model, folder / "equalized.onnx")
    for sample in random_samples(model, count=4, seed=2):
        one, two = (CpuSession(each.path, SessionSettings()).run(sample)["y"] for each in (model, other))
        assert np.array_equal(one, two)
    return equalized, other


def ranges_again(model: Model, samples: Model, folder: Path) -> Mapping[str, TensorRange]:
    """Returns the ranges that calibrating an equalized model finds with the samples of the other."""
    again = calibrate_model(model, random_samples(samples, count=48), work=folder / "w")
    return again.ranges["minmax"]


def calibrate_twice(model: Model, folder: Path) -> Calibration:
    """Returns the calibration with each sample of `ranges_again` twice: no channel's extreme is that of one sample."""
    rows = list(random_samples(model, count=48))
    return calibrate_model(model, make_samples([*rows, *rows]), work=folder / "twice")


def test_the_pairs_are_behind_what_keeps_signs_and_factors(unequal: tuple[Model, Calibration]) -> None:
    pairs = {pair.tensor: pair for pair in find_equalization_pairs(read_float_graph(unequal[0]))}
    assert list(pairs) == ["r", "p", "c", "f"]
    assert [step.tensor for step in pairs["p"].steps] == ["d"]
    assert (pairs["c"].ceiling, pairs["r"].ceiling) == (6, None)


def test_a_normalisation_is_a_pair_through_the_reshapes_behind_it(tmp_path: Path) -> None:
    text = """g (float[1,6,32] x) => (float[1,6,40] y) {
      s = Constant<value_ints=[6,32]>() n = LayerNormalization<axis=-1>(x, gain, shift) one = Reshape(n, s)
      a = Gemm(one, wa) two = Reshape(n, s) b = Gemm(two, wb) m = Mul(a, b) y = MatMul(n, wc) z = Relu(m) }"""
    shapes: dict[str, tuple[int, ...]] = {
        "gain": (32,), "shift": (32,), "wa": (32, 8), "wb": (32, 8), "wc": (32, 40),
    }  # fmt: skip
    pairs = find_equalization_pairs(read_float_graph(make_model(text, tmp_path / "m.onnx", shapes)))
    assert [(pair.tensor, pair.reshaped, len(pair.consumers)) for pair in pairs] == [("n", ("one", "two"), 3)]


def test_scaled_channels_have_the_ranges_of_calibration(unequal: tuple[Model, Calibration], tmp_path: Path) -> None:
    model = unequal[0]
    graph, calibration = read_float_graph(model), calibrate_twice(model, tmp_path)
    factors = choose_measured(graph, calibration)
    assert set(factors) >= {"r", "p", "c"}
    equalized, other = equalize(graph, factors, model, tmp_path)
    derived = equalize_calibration(graph, calibration, factors).ranges["minmax"]
    assert set(derived) == set(float_activations(equalized))
    for name, span in ranges_again(other, model, tmp_path).items():
        wide = span.high - span.low
        assert derived[name].low == pytest.approx(span.low, abs=0.01 * wide)
        assert derived[name].high == pytest.approx(span.high, abs=0.01 * wide)


@pytest.mark.parametrize(
    ("activation", "outlier", "low", "high"),
    [("Relu", 1.0, [0, 0], [4, 1.5]), ("LeakyRelu<alpha=0.5>", -1.0, [4, -1.5], [4, 0.5])],
)
def test_a_channel_whose_extreme_is_that_of_one_sample_is_expected_to_go_as_far_again(
    tmp_path: Path, activation: str, outlier: float, low: list[float], high: list[float]
) -> None:
    """All equalized channels reach the limits of their tensor, so new samples would exceed those of some."""
    text = f"g (float[1,2] x) => (float[1,40] y) {{ h = MatMul(x, w1) r = {activation}(h) y = MatMul(r, w2) }}"
    weights = {"w1": np.diag([8.0, 1.0]), "w2": np.linspace(-1, 1, 80).reshape(2, 40)}
    constants: dict[str, Array] = {name: value.astype(np.float32) for name, value in weights.items()}
    model = make_model(text, tmp_path / "m.onnx", constants=constants)
    rows = np.full((12, 1, 2), 0.5, np.float32)
    # 8 x 0.5 = 4 is seen in each sample; 1 in one, 0.5 in all others: 1.5 is expected.
    rows[7, 0, 1] = outlier
    calibration = calibrate_model(model, make_samples([{"x": row} for row in rows]), work=tmp_path / "work")
    graph = read_float_graph(model)
    (ranges,) = [found["r"] for _, found in measure_pairs(graph, tmp_path / "work", {})]
    assert (ranges.low.tolist(), ranges.high.tolist()) == (low, high)
    derived = equalize_calibration(graph, calibration, {"r": (1.0, 4.0)}).ranges
    assert {its["r_equalized"].low for its in derived.values()} == {min(low[0], 4 * low[1])}
    assert {its["r_equalized"].high for its in derived.values()} == {max(high[0], 4 * high[1])}


def test_channels_are_scaled_through_slopes_below_zero(tmp_path: Path) -> None:
    text = """g (float[1,3,12,12] x) => (float[1,40,12,12] y) {
      a = Conv(x, w1, b1) p = PRelu(a, slope) h = Conv(p, w2, b2) q = PRelu(h, slope) y = Conv(q, w3, b3) }"""
    shapes: dict[str, tuple[int, ...]] = {
        "w1": (16, 3, 1, 1), "b1": (16,), "w2": (16, 16, 1, 1), "b2": (16,), "w3": (40, 16, 1, 1), "b3": (40,),
        "slope": (16, 1, 1),
    }  # fmt: skip
    model = make_model(text, tmp_path / "m.onnx", shapes)
    calibration = calibrate_model(model, random_samples(model, count=48), work=tmp_path / "work")
    graph, seen = read_float_graph(model), calibration.ranges["minmax"]
    assert (numpy_helper.to_array(graph.constants["slope"]) < 0).any()
    factors = choose_measured(graph, calibration, seen=seen)
    assert set(factors) == {"p", "q"}
    _, other = equalize(graph, factors, model, tmp_path)
    derived = equalize_calibration(graph, calibration, factors).ranges["minmax"]
    for name, span in ranges_again(other, model, tmp_path).items():
        # What a slope below zero hides is told by mean and spread.
        assert 0.9 * (span.high - span.low) <= derived[name].high - derived[name].low <= 2 * (span.high - span.low)


def rescue(
    calibrated: tuple[Model, Calibration], target: Target, folder: Path, *,
    ruined_db: float, saved_db: float, memo: Memo | None = None,
) -> tuple[QuantPlan, Model]:  # fmt: skip
    """The plan for a target and its model: it has more than some dB where minmax leaves less than others."""
    model, calibration = calibrated
    stock = plan_quantization(model, calibration, target, "int8", method="minmax")
    plan = plan_quantization(model, calibration, target, "int8", memo=memo)
    ruined, saved = (
        quantize_model(model, each, calibration, folder / f"{each.method}-{len(each.factors)}.onnx").model
        for each in (stock, plan)
    )
    assert plan.factors
    assert sqnr_db(model, ruined) < ruined_db
    assert sqnr_db(model, saved) > saved_db
    return plan, saved


@pytest.mark.parametrize(("target", "least_db"), [(load_target("qnn"), 25), (per_tensor("nnapi"), 22)])
def test_unequal_channels_that_minmax_ruins_are_saved_by_equalization(
    unequal: tuple[Model, Calibration], tmp_path: Path, target: Target, least_db: float
) -> None:
    plan, saved = rescue(unequal, target, tmp_path, ruined_db=least_db - 8, saved_db=least_db)
    assert not plan.wide
    same = msgspec.json.decode(msgspec.json.encode(plan), type=QuantPlan)
    assert quantize_model(unequal[0], same, unequal[1], tmp_path / "b.onnx").model.sha256 == saved.sha256


def test_roundings_that_learn_are_tried_with_and_without_equal_channels(unequal: tuple[Model, Calibration]) -> None:
    """Equalization may pay only with them: a person detector gains 4 dB by both together, and nothing by one."""
    plan = plan_quantization(*unequal, load_target("qnn"), "int8")
    assert {each.equalized for each in plan.judged if each.rounding in {"gptq", "refit"}} == {False, True}


@pytest.mark.parametrize("precision", ["int16", "w4a16"])
def test_weights_gain_by_equal_channels(unequal: tuple[Model, Calibration], precision: Precision) -> None:
    plan = plan_quantization(*unequal, load_target("qnn"), precision)
    best = {each.equalized: each.sqnr_db for each in reversed(plan.judged)}
    assert plan.factors
    assert best[True] > best[False] + 3


def test_factors_that_do_not_fit_the_graph_are_refused(unequal: tuple[Model, Calibration]) -> None:
    graph = read_float_graph(unequal[0])
    for factors in ({"y": (1.0,) * 40}, {"r": (1.0,)}, {"r": (0.3,) * 24}, {"r": (0.0,) * 24}, {"r": (1e300,) * 24}):
        with pytest.raises(UsageError, match="the plan cannot scale"):
            equalize_graph(graph, factors)


def test_a_plain_plan_knows_nothing_of_equalized_weights(tmp_path: Path) -> None:
    model = make_model(NET_OF_TWO, tmp_path / "m.onnx", {"w": (8, 8, 3, 3), "v": (8, 8, 3, 3)})
    calibration = calibrate_model(model, random_samples(model), work=tmp_path)
    target = load_target("xnnpack")
    best = plan_quantization(model, calibration, target, "int8", method="minmax")
    # As layers that share a weight leave it behind once they are equalized: each has one of its own.
    shared = msgspec.structs.replace(best, axes={"w_equalized.first": 0, "v": 0}, factors={"first": (2.0,) * 8})
    plain = change_plan(shared, Strategy(precision="int8", plan="plain"), model, calibration, target)
    assert plain.axes.keys() == {"w", "v"}
    assert not plain.factors
    assert quantize_model(model, plain, calibration, tmp_path / "q.onnx").quantized_nodes > 0


NET_OF_TWO = """g (float[1,8,8,8] x) => (float[1,8,4,4] y)
{ a = Conv(x, w) b = Relu(a) y = Conv(b, v) }
"""
