import math
from pathlib import Path

import numpy as np
import pytest
from collapsing_models import SUBPIXEL, make_collapsing
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from quantize_models import make_model, make_samples, make_search
from tiny_models import parse_model

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.state import State
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, calibrate_model, quantize_model
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.calibration.calibrate import add_image_headroom
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.plan_search import Goal, search_plan
from edgekit.quantize.ranges import (
    Histogram,
    HistogramCollector,
    TensorRange,
    clip_saturated,
    find_nonlinearities,
    mse_range,
    percentile_range,
    quantization_errors,
    sigmoid,
    snap_range,
    softmax,
)
from edgekit.target import load_target

WIDE = TensorRange(low=-99.0, high=99.0)


def histogram_of(values: Array) -> Histogram:
    collector = HistogramCollector()
    collector.add(values.reshape(1, -1))
    return collector.freeze()


def whole(values: Array) -> TensorRange:
    return TensorRange(low=float(values.min()), high=float(values.max()))


def few_values(*pairs: tuple[float, int]) -> Histogram:
    centers, counts = (np.array(part) for part in zip(*pairs, strict=True))
    return Histogram(centers=centers, counts=counts)


def test_the_error_of_a_range_is_that_of_its_integers() -> None:
    seen = few_values((-0.6, 1), (0.0, 5), (1.4, 2), (300.0, 1))
    ranges = [(-55.0, 200.0), (55.0, 255.0), (-255.0, -55.0), (0.0, 0.0)]
    # Steps of 1 from -55 to 200: 0.6 errs by 0.4, 1.4 twice by 0.4, 300 is cut to 200.
    errors = [0.48 + 100.0**2, 0.68 + 45.0**2, 4.08 + 300.0**2, 4.28 + 300.0**2]
    assert quantization_errors(seen)(ranges) == pytest.approx(errors)
    assert quantization_errors(seen, lambda x: 2 * x)(ranges) == pytest.approx([4 * error for error in errors])


def test_a_percentile_leaves_half_of_the_rest_at_each_end() -> None:
    seen, span = few_values((-9.0, 1), (-1.0, 9), (1.0, 80), (5.0, 9), (9.0, 1)), TensorRange(low=-9.5, high=9.5)
    assert percentile_range(span, seen, 100) == TensorRange(low=-9.0, high=9.0)
    assert percentile_range(span, seen, 98.5) == TensorRange(low=-9.0, high=9.0)
    assert percentile_range(span, seen, 97) == TensorRange(low=-1.0, high=5.0)
    assert percentile_range(span, seen, 78) == TensorRange(low=1.0, high=1.0)
    assert percentile_range(TensorRange(low=-0.5, high=0.5), seen, 97) == TensorRange(low=-0.5, high=0.5)
    nothing = Histogram(centers=np.zeros(0), counts=np.zeros(0))
    assert percentile_range(span, nothing, 97) == mse_range(span, nothing) == span


def test_ends_keep_nine_bits() -> None:
    assert snap_range(TensorRange(low=-1 - 2**-9, high=1 + 2**-8)) == TensorRange(low=-1.0, high=1 + 2**-8)
    assert snap_range(TensorRange(low=0.0, high=3 + 3 * 2**-9)) == TensorRange(low=0.0, high=3 + 2**-7)
    assert snap_range(TensorRange(low=-3.4e38, high=3.4028e38)).high == np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("low", "high", "percent", "cut"),
    [(-50, 50, 100, (-8, 8)), (-50, -20, 100, (-8, -8)), (20, 50, 100, (8, 8)), (-2, 3, 100, (-2, 3))],
)
def test_a_flat_sigmoid_gets_no_steps(low: float, high: float, percent: float, cut: tuple[float, float]) -> None:
    seen, span = few_values((-60.0, 5), (60.0, 5)), TensorRange(low=low, high=high)
    assert percentile_range(span, seen, percent, sigmoid) == TensorRange(low=cut[0], high=cut[1])
    assert percentile_range(span, seen, percent) == span


def test_mse_clips_a_long_tail_and_keeps_a_flat_one() -> None:
    rng = np.random.default_rng(0)
    heavy, flat = rng.laplace(size=100_000), rng.uniform(-1, 1, 100_000)
    assert mse_range(whole(heavy), histogram_of(heavy)).high < 0.9 * heavy.max()
    assert mse_range(whole(flat), histogram_of(flat)).high > 0.97 * flat.max()


def test_silu_gives_up_the_negative_tail() -> None:
    values = np.concatenate([np.linspace(-40, 0, 10_000), np.linspace(0, 4, 10_000)])
    assert mse_range(whole(values), histogram_of(values), lambda x: x / (1 + np.exp(-x))).low > -15
    assert mse_range(whole(values), histogram_of(values)).low < -30


@pytest.mark.parametrize(
    ("body", "is_elu"),
    [
        ("y = Elu(a)", True),
        ("y = Elu<alpha = 0.5>(a)", False),
        ("m = Min(a, zero) e = Exp(m) l = Sub(e, one) h = Max(a, zero) y = Add(l, h)", True),
        ("m = Min(a, zero) e = Exp(m) l = Sub(e, one) h = Max(a, one) y = Add(l, h)", False),
    ],
)
def test_an_elu_is_found_whole_and_in_parts(body: str, is_elu: bool, tmp_path: Path) -> None:
    text = f"""g (float[1,4] x) => (float[1,4] y) <float zero = {{0}}, float one = {{1}}> {{ a = Mul(x, x) {body} }}"""
    readers = find_nonlinearities(read_float_graph(make_model(text, tmp_path / "m.onnx")))
    assert ("a" in readers) is is_elu
    if is_elu:
        assert readers["a"](np.array([-50.0, -1.0, 2.0])) == pytest.approx([-1, math.exp(-1) - 1, 2])
        assert clip_saturated(WIDE, readers["a"]).low == -6


HARD_SWISHES = {
    "paddle": "h = Add(a, three) c = Clip(h, zero, six) p = Mul(a, c) y = Div(p, six)",
    "split": "h = Add(a, three) c = Clip(h, zero, six) g = Mul(c, sixth) y = Mul(a, g)",
    "thrice": "h = Add(a, three) c = Clip(h, zero, six) d = Mul(c, three) g = Div(d, eighteen) y = Mul(a, g)",
    "sigmoid": "g = HardSigmoid<alpha = 0.16666667, beta = 0.5>(a) y = Mul(a, g)",
    "whole": "y = HardSwish(a)",
}


@pytest.mark.parametrize("body", HARD_SWISHES.values(), ids=HARD_SWISHES)
def test_what_hard_swish_makes_zero_gets_no_steps(tmp_path: Path, body: str) -> None:
    text = f"""g (float[1,4] x) => (float[1,4] y)
      <float[1] three = {{3}}, float zero = {{0}}, float six = {{6}}, float sixth = {{0.16666667}},
       float eighteen = {{18}}> {{ a = Neg(x) {body} }}"""
    reader = find_nonlinearities(read_float_graph(make_model(text, tmp_path / "m.onnx")))["a"]
    assert reader(np.array([-4.0, 1.0])) == pytest.approx([0, 4 / 6])
    values = np.random.default_rng(0).normal(size=100_000) * 20
    assert percentile_range(whole(values), histogram_of(values), 99.9, reader).low == -3
    assert percentile_range(whole(values), histogram_of(values), 99.9, reader).high > 50


@pytest.mark.parametrize(
    "body",
    [
        "h = Add(a, two) c = Clip(h, zero, six) y = Mul(a, c)",
        "h = Add(a, three) c = Clip(h, three, six) y = Mul(a, c)",
        "h = Add(a, threes) c = Clip(h, zero, six) y = Mul(a, c)",
        "h = Sub(a, three) c = Clip(h, zero, six) y = Mul(a, c)",
        "h = Add(a, three) c = Clip(h, zero, six) g = Sub(c, six) y = Mul(a, g)",
        "g = HardSigmoid(a) y = Mul(a, g)",
        "h = HardSwish(a) y = Sub(h, a)",
        "g = Sigmoid(a) y = Add(a, g)",
        "g = Sigmoid(a) y = Mul(g, g) z = Neg(a)",
        "g = Sigmoid(a) h = Sigmoid(g) y = Mul(a, h)",
        "g = Sigmoid(a) h = Neg(g) i = Abs(g) y = Mul(a, x)",
        "h = Add(a, three) c = Clip(h, zero, six) i = Neg(c) j = Abs(c) y = Mul(a, x)",
        "y = Mul(a, x) z = Sigmoid(y)",  # an output is read outside too
    ],
)
def test_a_product_with_something_else_is_read_as_it_is(tmp_path: Path, body: str) -> None:
    text = f"""g (float[1,4] x) => (float[1,4] y)
      <float two = {{2}}, float three = {{3}}, float[4] threes = {{3, 3, 3, 2}},
       float zero = {{0}}, float six = {{6}}> {{ a = Neg(x) {body} }}"""
    found = find_nonlinearities(read_float_graph(make_model(text, tmp_path / "m.onnx")))
    assert {"a", "y"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("node", "least", "most"),
    [
        ("y = Sigmoid(a)", -8.0, 8.0), ("y = Tanh(a)", -4.0, 4.0), ("y = HardSwish(a)", -3.0, np.inf),
        ("s = Sigmoid(a) y = Mul(a, s)", -8.0, np.inf),
    ],
)  # fmt: skip
def test_functions_are_saturated_outside_these_ends(tmp_path: Path, node: str, least: float, most: float) -> None:
    text = f"g (float[1,4] x) => (float[1,4] y) {{ a = Neg(x) {node} }}"
    function = find_nonlinearities(read_float_graph(make_model(text, tmp_path / "m.onnx")))["a"]
    assert clip_saturated(WIDE, function) == TensorRange(low=least, high=min(most, WIDE.high))
    assert clip_saturated(WIDE, None) == WIDE
    far = np.array([least - 1.0, least - 9.0])
    assert function(far) == pytest.approx(function(np.array([least, least])), abs=4e-3)
    if most < np.inf:
        assert function(-far) == pytest.approx(function(np.array([most, most])), abs=4e-3)


def test_a_softmax_of_far_values_does_not_overflow() -> None:
    values = np.array([[0.0, 800.0], [-800.0, -800.0]])
    np.testing.assert_allclose(softmax(values), [[0.0, 1.0], [0.5, 0.5]], atol=1e-12)
    np.testing.assert_allclose(softmax(values, axis=None), [[0.0, 1.0], [0.0, 0.0]], atol=1e-12)


floats = npst.arrays(np.float32, st.integers(1, 60), elements=st.floats(-1e6, 1e6, width=32))


@given(floats, floats)
@example(np.array([32768], np.float32), np.array([-1e-44], np.float32))
def test_order_does_not_matter_and_nothing_is_lost(one: np.ndarray, two: np.ndarray) -> None:
    forward, backward = HistogramCollector(), HistogramCollector()
    for collector, parts in ((forward, (one, two)), (backward, (two, one))):
        for part in parts:
            collector.add(part[None])
    left, right = forward.freeze(), backward.freeze()
    assert left.total == one.size + two.size
    assert np.array_equal(left.centers, right.centers)
    assert np.array_equal(left.counts, right.counts)


def test_bins_double_when_a_value_falls_outside() -> None:
    collector = HistogramCollector()
    collector.add(np.array([[0.75, -0.25, 0.0, 0.7501]], np.float32))
    first = collector.freeze()
    assert first.centers.tolist() == [(-512 + 0.5) / 2048, 0.0, (1536 + 0.5) / 2048]
    assert (first.counts.tolist(), first.total) == ([1, 1, 2], 4)
    collector.add(np.array([[0.0, 0.0, 3.0]], np.float32))
    second = collector.freeze()
    assert second.centers.tolist() == [(-128 + 0.5) / 512, 0.0, (384 + 0.5) / 512, (1536 + 0.5) / 512]
    assert second.counts.tolist() == [1, 3, 2, 1]


def test_a_histogram_is_the_same_over_calls_and_restarts() -> None:
    whole, some = HistogramCollector(), HistogramCollector()
    values = np.random.default_rng(0).normal(size=(26, 40)).astype(np.float32)
    values[3:5] = 0
    whole.add(values)
    for block in (values[:5], values[5:6], values[6:]):
        again = HistogramCollector()
        again.add(np.zeros((1, 0), np.float32))
        for name, array in again.arrays().items():
            array[...] = some.arrays()[name]
        again.add(block)
        some = again
    for name, array in whole.arrays().items():
        assert np.array_equal(array, some.arrays()[name])
    assert whole.freeze().total == values.size
    assert whole.freeze().counts[whole.freeze().centers == 0] == 80


# State that a model feeds back to itself: plans are judged over whole sequences.

STEPS = 8
# The state is summed up, and 0.1 more at each step in the second model.
SUM = """g (float[1,4] x, float[1,4] h) => (float[1,4] y, float[1,4] new_h) <float more = {MORE_RELIEF}> {
  sum = Add(h, x) new_h = Add(sum, more) y = Neg(sum) }"""


def test_a_quantized_model_gets_its_own_state(tmp_path: Path) -> None:
    exact, other = (load_model(parse_model(SUM.replace("MORE_RELIEF", more), tmp_path / more)) for more in ("0", "0.1"))
    rng, rows, state = np.random.default_rng(0), [], np.zeros((1, 4), np.float32)
    for step in range(4 * STEPS):
        state = state if step % STEPS else np.zeros((1, 4), np.float32)
        x = rng.normal(size=(1, 4)).astype(np.float32)
        rows.append({"x": x, "h": state})
        state = state + x
    samples, feeds = make_samples(rows), {"h": "new_h"}
    alone = FloatReference(exact, samples).predict_drop(other)
    assert alone.outputs == ("new_h",)  # by single steps y is right, and the state by itself is not
    reference = FloatReference(exact, samples, state=State(steps=STEPS, feeds=feeds))
    found = [pair.found["y"] - pair.expected["y"] for pair in reference.run_pairs(other)]
    wanted = [np.full((1, 4), -0.1 * (step % STEPS), np.float32) for step in range(4 * STEPS)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert reference.predict_drop(exact).drop_estimate == 0
    # A part of the samples would be no whole sequences.
    assert reference.look(other, rival=exact).samples == 4 * STEPS
    for most, counted in ((2 * STEPS + 3, 2 * STEPS), (STEPS - 3, STEPS - 3)):
        few = FloatReference(exact, samples, state=State(steps=STEPS, feeds=feeds), most=most)
        assert list(few.indices) == [*range(counted)]
        assert len([*few.run_pairs(other)]) == counted


# Nets that make images: white that no sample showed, and losses that only smooth images show.


def smooth_images(count: int, brightest: float) -> list[Array]:
    rng = np.random.default_rng(5)
    ramps = np.linspace(0, 1, 12, dtype=np.float32)
    images = (rng.uniform(0, 1) * ramps[:, None] + rng.uniform(0, 1) * ramps for _ in range(count))
    return [(image / image.max() * brightest).reshape(1, 1, 12, 12).astype(np.float32) for image in images]


def as_samples(images: list[Array]) -> Samples:
    return make_samples([{"x": image} for image in images])


@pytest.fixture(scope="module")
def dim(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Samples, Calibration]:
    tmp_path = tmp_path_factory.mktemp("dim")
    model, samples = make_collapsing(SUBPIXEL, tmp_path), as_samples(smooth_images(24, 0.85))
    return model, samples, calibrate_model(model, samples, work=tmp_path / "work")


def test_ranges_reach_as_far_as_white_would(dim: tuple[Model, Samples, Calibration]) -> None:
    model, _, calibration = dim
    before, after = (each.ranges for each in (calibration, add_image_headroom(read_float_graph(model), calibration)))
    assert before["minmax"]["x"].high == pytest.approx(0.85, abs=0.01)
    assert {method: spans["x"].high for method, spans in after.items()} == dict.fromkeys(after, 1.0)
    assert after["minmax"]["n"].high == 1.0
    assert after["minmax"]["r"].high == pytest.approx(before["minmax"]["r"].high / 0.85, rel=0.01)


@pytest.mark.parametrize(("brightest", "shift"), [(0.5, 0.0), (1.0, 0.0), (0.9, -0.3)])
def test_what_is_no_pixel_keeps_its_range(tmp_path: Path, brightest: float, shift: float) -> None:
    model = make_collapsing(SUBPIXEL, tmp_path)
    samples = as_samples([image + np.float32(shift) for image in smooth_images(24, brightest)])
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    found = add_image_headroom(read_float_graph(model), calibration).ranges["minmax"]
    assert found["r"] == calibration.ranges["minmax"]["r"]


def test_a_classifier_of_images_keeps_its_ranges(tmp_path: Path) -> None:
    text = """g (float[1,1,12,12] x) => (float[1,5] y) {
      c = Conv(x, w1, b1) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) y = Gemm<transB=1>(f, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 1, 3, 3), "b1": (8,), "w2": (5, 8)})
    calibration = calibrate_model(model, as_samples(smooth_images(12, 0.85)), work=tmp_path / "work")
    assert add_image_headroom(read_float_graph(model), calibration) == calibration


@pytest.mark.parametrize("name", ["qnn", "nnapi"])
def test_smooth_images_are_kept(dim: tuple[Model, Samples, Calibration], tmp_path: Path, name: str) -> None:
    model, samples, calibration = dim
    reference, goal = FloatReference(model, samples), Goal(max_drop=0.0005, is_given=True)
    search = make_search((model, calibration), reference, load_target(name), tmp_path)
    plan, searched = search_plan(search, goal)
    assert searched is not None
    assert not searched.trials[0].prediction.meets(goal.max_drop)
    assert searched.chosen.step == "relieve 3"
    assert searched.chosen.integer_macs > 0.75
    made = quantize_model(model, plan, calibration, tmp_path / "q.onnx").model
    white = smooth_images(1, 1.0)[0]
    one, two = (CpuSession(path, SessionSettings()).run({"x": white})["y"] for path in (model.path, made.path))
    assert np.abs(one - two).max() < 0.05
