from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_model

from edgekit.model.tensors import Array
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.ranges import (
    Histogram,
    HistogramCollector,
    TensorRange,
    find_nonlinearities,
    mse_range,
    percentile_range,
    quantization_error,
    saturation_of,
    sigmoid,
    snap_range,
    softmax,
    tail_error,
)


def histogram_of(values: Array) -> Histogram:
    collector = HistogramCollector()
    collector.add(values.reshape(1, -1))
    return collector.freeze()


def whole(values: Array) -> TensorRange:
    return TensorRange(low=float(values.min()), high=float(values.max()))


def few_values(*pairs: tuple[float, int]) -> Histogram:
    centers, counts = (np.array(part) for part in zip(*pairs, strict=True))
    return Histogram(centers=centers, counts=counts, parts=counts[None])


def test_the_error_of_a_range_is_that_of_its_integers() -> None:
    seen = few_values((-0.6, 1), (0.0, 5), (1.4, 2), (300.0, 1))
    # Steps of 1 from -55 to 200: 0.6 errs by 0.4, 1.4 twice by 0.4, 300 is cut to 200.
    assert quantization_error(seen)((-55.0, 200.0)) == pytest.approx(0.16 + 2 * 0.16 + 100.0**2)
    assert quantization_error(seen)((55.0, 255.0)) == pytest.approx(0.36 + 2 * 0.16 + 45.0**2)
    assert quantization_error(seen)((-255.0, -55.0)) == pytest.approx(0.16 + 2 * 1.96 + 300.0**2)
    assert quantization_error(seen)((0.0, 0.0)) == pytest.approx(0.36 + 2 * 1.96 + 300.0**2)
    assert quantization_error(seen, lambda x: 2 * x)((-55.0, 200.0)) == pytest.approx(4 * (0.16 + 2 * 0.16 + 100.0**2))


def test_a_percentile_leaves_half_of_the_rest_at_each_end() -> None:
    seen, span = few_values((-9.0, 1), (-1.0, 9), (1.0, 80), (5.0, 9), (9.0, 1)), TensorRange(low=-9.5, high=9.5)
    assert percentile_range(span, seen, 100) == TensorRange(low=-9.0, high=9.0)
    assert percentile_range(span, seen, 97) == TensorRange(low=-1.0, high=5.0)
    assert percentile_range(span, seen, 78) == TensorRange(low=1.0, high=1.0)
    assert percentile_range(TensorRange(low=-0.5, high=0.5), seen, 97) == TensorRange(low=-0.5, high=0.5)
    nothing = Histogram(centers=np.zeros(0), counts=np.zeros(0), parts=np.zeros((8, 0)))
    assert percentile_range(span, nothing, 97) == mse_range(span, nothing) == span


def test_what_is_cut_off_is_known_by_the_number_of_values() -> None:
    assert tail_error(99.9, 10_000) == pytest.approx(1.96 * (0.0005 * 0.9995 / 10_000) ** 0.5)
    assert tail_error(80, 0) == tail_error(80, 1) == pytest.approx(1.96 * 0.3)


def test_ends_keep_nine_bits() -> None:
    assert snap_range(TensorRange(low=-1 - 2**-9, high=1 + 2**-8)) == TensorRange(low=-1.0, high=1 + 2**-8)
    assert snap_range(TensorRange(low=0.0, high=3 + 3 * 2**-9)) == TensorRange(low=0.0, high=3 + 2**-7)
    assert snap_range(TensorRange(low=-3.4e38, high=3.4028e38)).high == np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("low", "high", "percent", "cut"),
    [(-50, 50, 100, (-8, 8)), (-50, -20, 100, (-8, -8)), (20, 50, 100, (8, 8)), (-2, 3, 100, (-2, 3))],
)
def test_where_a_sigmoid_is_flat_there_are_no_steps(
    low: float, high: float, percent: float, cut: tuple[float, float]
) -> None:
    seen, span = few_values((-60.0, 5), (60.0, 5)), TensorRange(low=low, high=high)
    assert percentile_range(span, seen, percent, sigmoid) == TensorRange(low=cut[0], high=cut[1])
    assert percentile_range(span, seen, percent) == span


def test_mse_clips_a_long_tail_and_keeps_a_flat_one() -> None:
    rng = np.random.default_rng(0)
    heavy, flat = rng.laplace(size=100_000), rng.uniform(-1, 1, 100_000)
    assert mse_range(whole(heavy), histogram_of(heavy)).high < 0.9 * heavy.max()
    assert mse_range(whole(flat), histogram_of(flat)).high > 0.97 * flat.max()


def test_mse_is_never_worse_than_minmax() -> None:
    for seed in range(5):
        values = np.random.default_rng(seed).standard_t(3, 20_000)
        histogram, span = histogram_of(values), mse_range(whole(values), histogram_of(values))
        error = quantization_error(histogram, lambda x: x)
        assert error((span.low, span.high)) <= error((values.min(), values.max()))


def test_a_percentile_cuts_off_both_ends() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, 100_000)
    span = percentile_range(whole(values), histogram_of(values), 90)
    assert (span.low, span.high) == pytest.approx((-0.9, 0.9), abs=0.01)


def test_silu_gives_up_the_negative_tail() -> None:
    values = np.concatenate([np.linspace(-40, 0, 10_000), np.linspace(0, 4, 10_000)])
    assert mse_range(whole(values), histogram_of(values), lambda x: x / (1 + np.exp(-x))).low > -15
    assert mse_range(whole(values), histogram_of(values)).low < -30


def test_silu_is_found_in_the_graph(tmp_path: Path) -> None:
    text = "g (float[1,4] x) => (float[1,4] y) { a = Neg(x) s = Sigmoid(a) m = Mul(a, s) t = Tanh(m) y = Mul(t, x) }"
    readers = find_nonlinearities(read_float_graph(make_model(text, tmp_path / "m.onnx")))
    assert set(readers) == {"a", "m"}
    assert readers["a"](np.array([2.0])) == pytest.approx(2 / (1 + np.exp(-2)))


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


def test_constant_zero_tensor_keeps_its_range() -> None:
    zero = TensorRange(low=0.0, high=0.0)
    assert mse_range(zero, histogram_of(np.zeros(10))) == zero


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
    assert saturation_of(function) == (least, most)
    assert saturation_of(None) == (-np.inf, np.inf)
    far = np.array([least - 1.0, least - 9.0])
    assert function(far) == pytest.approx(function(np.array([least, least])), abs=4e-3)
    if most < np.inf:
        assert function(-far) == pytest.approx(function(np.array([most, most])), abs=4e-3)


def test_a_softmax_of_far_values_does_not_overflow() -> None:
    values = np.array([[0.0, 800.0], [-800.0, -800.0]])
    np.testing.assert_allclose(softmax(values), [[0.0, 1.0], [0.5, 0.5]], atol=1e-12)
    np.testing.assert_allclose(softmax(values, axis=None), [[0.0, 1.0], [0.0, 0.0]], atol=1e-12)
