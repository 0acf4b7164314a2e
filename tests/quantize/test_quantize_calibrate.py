import contextlib
import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from quantize_models import CONV_NET, CONV_SHAPES, make_model, make_samples, random_samples, read_activations
from tiny_models import save_net

from edgekit import machine
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.data_check import check_samples
from edgekit.data.samples import spread_indices
from edgekit.errors import DataError, EdgekitError, ModelError, UsageError
from edgekit.model.external import ArrayFile
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.calibration.augment import picked_values
from edgekit.quantize.calibration.calibrate import MEASURED_SAMPLES, calibrate_for
from edgekit.quantize.calibration.moments import InputMoments, StoredMoments
from edgekit.quantize.calibration.passes import CalibrationOptions
from edgekit.quantize.calibration.store import CacheSettings, Checkpoint, read_checkpoint, write_checkpoint
from edgekit.quantize.graph import sessions
from edgekit.quantize.graph.sessions import open_quantized
from edgekit.quantize.ranges import EXACT, RANGE_METHODS
from edgekit.target import load_target


def check_ranges(model: Model, seen: Calibration, names: list[str], method: str = "minmax") -> None:
    """Holds ranges against the extremes of each sample; r1 is made by a Relu."""
    runs = read_activations(model, names, random_samples(model))
    least, most = (np.min, np.max) if method == "minmax" else (np.mean, np.mean)
    for name in names:
        low, high = least([run[name].min() for run in runs]), most([run[name].max() for run in runs])
        span = seen.ranges[method][name]
        assert (span.low, span.high) == pytest.approx((0 if name == "r1" else low, high), rel=2e-3)


def test_minmax_equals_what_numpy_sees_on_every_tensor(net: Model, calibration: Calibration) -> None:
    check_ranges(net, calibration, ["r1", "c2", "s", "p", "c3", "g", "f", "z"])


def test_extremes_of_images_in_any_layout_are_those_of_numpy(tmp_path: Path) -> None:
    text = """{ c1 = Conv<kernel_shape = [3, 3]>(x, w1) r1 = Relu(c1)
      c2 = Conv<kernel_shape = [3, 3]>(r1, w2) s2 = Sigmoid(c2)
      c3 = Conv<kernel_shape = [3, 3]>(s2, w3) t = Transpose<perm = [0, 3, 2, 1]>(c3) y = Neg(t) }"""
    text = "g (float[1,3,24,24] x) => (float[1,18,18,32] y) " + text
    weights: dict[str, tuple[int, ...]] = {"w1": (16, 3, 3, 3), "w2": (24, 16, 3, 3), "w3": (32, 24, 3, 3)}
    model = make_model(text, tmp_path / "m.onnx", weights)
    seen = calibrate_model(model, random_samples(model), work=tmp_path / "work")
    check_ranges(model, seen, ["r1", "c2", "c3", "t", "y"])


def test_a_layer_before_a_reshape_and_a_relu_has_the_range_after_the_relu(tmp_path: Path) -> None:
    text = """g (float[2,6] x) => (float[6,2] y, float[2,6] s) <int64[2] whole = {6,2}> {
      a = MatMul(x, w) b = Reshape(a, whole) c = Transpose<perm=[1,0]>(b) d = Relu(c) y = Reshape(d, whole)
      s = MatMul(x, v) t = Reshape(s, whole) u = Relu(t) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w": (6, 6), "v": (6, 6)})
    ranges = calibrate_model(model, random_samples(model), work=tmp_path / "work").ranges["minmax"]
    assert ranges["a"] == ranges["b"] == ranges["c"] == ranges["d"]
    assert (ranges["a"].low, ranges["t"]) == (0.0, ranges["u"])
    # What the graph gives back keeps its range.
    assert ranges["s"].low < 0


@pytest.mark.parametrize(("shift", "said"), [(-9, "at most"), (9, "at least"), (0, "")])
def test_a_probability_that_never_crosses_a_half_is_told(shift: float, said: str, tmp_path: Path) -> None:
    text = "(float[1,4] x) => (float[1,2] y) { a = MatMul(x, w) b = Add(a, s) c = Sigmoid(b) y = Identity(c) }"
    weight, bias = np.full((4, 2), 0.25, np.float32), np.array([shift], np.float32)
    model = save_net(text, tmp_path / "m.onnx", w=weight, s=bias)
    notes = calibrate_model(model, random_samples(model), work=tmp_path / "work").notes
    told = [note for note in notes if note.startswith(f"output 'y' is {said}")]
    assert len(told) == (1 if said else 0)
    assert not told or "0.5, add samples with the other answer" in told[0]


def test_no_method_cuts_the_probabilities_that_a_model_answers_with(tmp_path: Path) -> None:
    """Plans are judged by the logits: a percentile would cut the few high scores of a detector at no cost."""
    text = "(float[1,4096] x) => (float[4096,1] y) { z = Mul(x, s) a = Sigmoid(z) y = Transpose(a) }"
    model = save_net(text, tmp_path / "m.onnx", s=np.ones(1, np.float32))
    row = np.full((1, 4096), -4, np.float32)
    row[0, 7] = 3
    samples = make_samples([{"x": row}] * 4)
    ranges = calibrate_model(model, samples, work=tmp_path / "work", methods=tuple(RANGE_METHODS)).ranges
    assert ranges["percentile-99.9"]["z"].high < 0
    assert {ranges[method]["a"].high for method in RANGE_METHODS} == {1}


def test_moving_average_is_the_mean_of_the_extremes_of_each_sample(net: Model, calibration: Calibration) -> None:
    check_ranges(net, calibration, ["c2", "r1"], "moving-average")


def check_unseen(rows: list[dict[str, Array]], shares: tuple[float, float], steps: int) -> None:
    whole = [np.stack([row["x"] for row in rows[at : at + steps]]) for at in range(0, len(rows), steps)]
    count = min(3, len(whole) - 1)
    lows = sorted(float(each.min()) for each in whole)
    highs = sorted((float(each.max()) for each in whole), reverse=True)
    reached = [(tops[0] - tops[1], 1.1462 * float(np.mean(tops[:count]) - tops[count])) for tops in (lows, highs)]
    ends = lows[0] - min(reached[0]), highs[0] - max(reached[1])
    assert shares == pytest.approx(tuple(end / tops[0] for end, tops in zip(ends, (lows, highs), strict=True)))


def test_what_a_sample_adds_to_a_range_is_known_for_each_tensor(net: Model, tmp_path: Path) -> None:
    rows = [{"x": row["x"] * scale} for row, scale in zip(random_samples(net, count=9), range(1, 10), strict=True)]
    found = calibrate_model(net, make_samples(rows), work=tmp_path / "work").unseen_shares
    check_unseen(rows, found["x"], steps=1)
    # A tensor that is never negative has no lower end to lose, and one that a Relu follows is taken after it.
    low, high = found["r1"]
    assert found["c1"] == (low, high)
    assert low == 1.0
    assert 0 < high < 1
    # The steps of one sequence are alike, so all of them are left out.
    options = CalibrationOptions(work=tmp_path / "steps", steps=3)
    check_unseen(rows, calibrate_for(net, make_samples(rows), options).unseen_shares["x"], steps=3)


@pytest.mark.parametrize(
    ("ends", "shares"),
    [
        (((-1, 4), (-2, 3), (-1, 1)), (0.5, 1 - 2.5 * 1.1462 / 4)),
        (((1, 4), (2, 3)), (1, 1 - 1.1462 / 4)),
        (((-4, -1), (-3, -2)), (1 - 1.1462 / 4, 1)),
        # Without the first no value is negative, and without the second none positive.
        (((-2, -1), (1, 3)), (0, 0)),
        (((0, 5), (0, 0)), (1, 0)),
        (((-2, 4),), (1, 1)),
        (((-2, 4), (-2, 4)), (1, 1)),
        # The fifth largest tells nothing of the end.
        *((((0, 8), (0, 6), (0, 5), (0, 4), (0, last)), (1, 1 - (7 / 3) * 1.1462 / 8)) for last in (0, 3)),
    ],
)
def test_what_new_samples_lose_is_a_share_of_each_end(
    ends: tuple[tuple[float, float], ...], shares: tuple[float, float], tmp_path: Path
) -> None:
    model = make_model("(float[1,2] x) => (float[1,2] y) { y = MatMul(x, w) }", tmp_path / "m.onnx", {"w": (2, 2)})
    samples = make_samples([{"x": np.array([each], np.float32)} for each in ends])
    assert calibrate_model(model, samples, work=tmp_path / "work").unseen_shares["x"] == pytest.approx(shares)


def test_a_tensor_without_values_is_read_from_a_cache(tmp_path: Path) -> None:
    text = """(float[1,4] x) => (float[1,4] y, float z) <float far = {100}>
        { y = Add(x, x) c = Greater(y, far) n = NonZero(c) t = Transpose<perm=[1,0]>(n) e = GatherND(y, t)
          f = Mul(e, e) z = ReduceSum<keepdims=0>(f) }"""
    model = make_model(text, tmp_path / "m.onnx")
    samples = random_samples(model)
    cache = CacheSettings(folder=tmp_path / "cache", digests=check_samples(samples).digests)
    first, again = (calibrate_model(model, samples, work=tmp_path / name, cache=cache) for name in ("one", "two"))
    assert (first.known, again.known, again.notes) == (0, samples.count, first.notes)
    assert again.unseen_shares == first.unseen_shares


def test_extremes_come_from_every_sample_and_histograms_from_some(net: Model, tmp_path: Path) -> None:
    arrays = list(random_samples(net, count=MEASURED_SAMPLES + 30))
    outlier = next(index for index in range(len(arrays)) if index not in spread_indices(len(arrays), MEASURED_SAMPLES))
    arrays[outlier] = {"x": arrays[outlier]["x"] * 9}
    calibration = calibrate_model(net, make_samples(arrays), work=tmp_path / "many")
    assert (calibration.samples, calibration.measured) == (len(arrays), MEASURED_SAMPLES)
    assert calibration.ranges["minmax"]["x"].high == pytest.approx(
        max(float(row["x"].max()) for row in arrays), rel=2e-3
    )
    assert calibration.ranges["percentile-99.9"]["x"].high < calibration.ranges["minmax"]["x"].high / 2


def test_an_unknown_method_is_refused_before_work_starts(net: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no range method 'minmaks'") as caught:
        calibrate_model(net, random_samples(net), work=tmp_path / "no", methods=("minmaks",))
    assert "minmax" in caught.value.hint
    assert not (tmp_path / "no").exists()


RELU = "(float[1,4] x) => (float[1,4] y) { y = Relu(x) }"
INFINITY = "(float[1,4] x) => (float[1,4] y) { e = Exp(x) y = Relu(e) }"
# The outputs do not show the NaN.
HIDDEN = "(float[1,4] x) => (int64[1,1] y) { l = Sqrt(x) y = ArgMax<axis=1>(l) }"
DIVIDED = "(float[1,4] x) => (int64[1,1] y) <float[4] d = {1, 2, %s, 4}> { l = Div(x, d) y = ArgMax<axis=1>(l) }"
MASKED = """(float[1,4] x) => (float[1,4] y) <float never = {-inf}, float zero = {0},
    float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> {
    h = MatMul(x, w) c = Greater(h, zero) y = Where(c, h, never) }"""
# A mark of what is missing.
MISSING = """(float[1,4] x) => (float[1,4] y) <float mark = {nan}, float zero = {0}> {
    h = Exp(x) c = Greater(x, zero) y = Where(c, h, mark) }"""
WHOLE = "(int64[1,4] x) => (int64[1,4] y) { y = Neg(x) }"


@pytest.mark.parametrize(
    ("text", "opset", "values", "error", "message"),
    [
        (INFINITY, 17, [1, 1, 999], DataError, r"sample 2 of 'test data' gives infinity in tensor 'e' \(made by Exp\)"),
        (HIDDEN, 17, [-1], DataError, r"sample 0 .* NaN in tensor 'l' \(made by Sqrt\)"),
        (DIVIDED % "0", 17, [0], DataError, r"sample 0 .* NaN in tensor 'l' \(made by Div\)"),
        (DIVIDED % "nan", 17, [1], ModelError, "weight 'd' of Div .*NaN"),
        (MASKED, 17, [1, -1], DataError, "sample 1 of .* not finite in output 'y' .prepare --outputs"),
        (
            MISSING,
            17,
            [1, -1],
            ModelError,
            "weight 'mark' of Where .*NaN .prepare --outputs h ends the model before it",
        ),
        (RELU, 17, [math.nan], DataError, r"sample 0 .* NaN in input 'x'"),
        (RELU, 17, [], DataError, "holds no sample"),
        (RELU, 11, [1], ModelError, r"opset 11.*edgekit prepare"),
        (WHOLE, 17, [1], ModelError, r"no node of 'm\.onnx' can be quantized"),
    ],
)
def test_what_cannot_be_calibrated_is_named(
    text: str, opset: int, values: list[float], error: type[EdgekitError], message: str, tmp_path: Path
) -> None:
    model = make_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}', tmp_path / "m.onnx")
    dtype = np.int64 if text == WHOLE else np.float32
    samples = make_samples([{"x": np.full((1, 4), value, dtype)} for value in values])
    with pytest.raises(error, match=message):
        calibrate_model(model, samples, work=tmp_path / "work")


def test_a_sample_that_makes_another_shape_than_declared_is_named(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 20]> g (float[1,10,10,1] x, int64 axis) => (float[1,6,10,2] y)
      { y = DFT<onesided = 1>(x, , axis) }"""
    image = np.zeros((1, 10, 10, 1), np.float32)
    good, bad = (make_samples([{"x": image, "axis": np.array(axis)}] * 2) for axis in (1, 2))
    model = make_model(text, tmp_path / "m.onnx")
    assert calibrate_model(model, good, work=tmp_path / "good", methods=EXACT).ranges
    with pytest.raises(DataError, match=r"sample 0 of .* gives a tensor another shape than 'm.onnx'"):
        calibrate_model(model, bad, work=tmp_path / "bad", methods=EXACT)


def test_samples_may_have_different_batch_sizes(tmp_path: Path) -> None:
    model = make_model(CONV_NET.replace("float[1,3,8,8]", "float[N,3,8,8]"), tmp_path / "m.onnx", CONV_SHAPES)
    rng = np.random.default_rng(0)
    arrays = [{"x": rng.normal(size=(batch, 3, 8, 8)).astype(np.float32)} for batch in (1, 3, 2)]
    calibration = calibrate_model(model, make_samples(arrays), work=tmp_path / "work")
    assert calibration.ranges["minmax"]["x"].high == pytest.approx(
        max(float(array["x"].max()) for array in arrays), rel=2e-3
    )


def test_percentiles_of_picked_values_err_no_more_than_those_of_a_random_sample(tmp_path: Path) -> None:
    model = make_model("g (float[1,64,300] x) => (float[1,64,300] y) { y = Relu(x) }", tmp_path / "m.onnx")
    rng, misses = np.random.default_rng(0), 0
    percents = {"percentile-99.99": 99.99, "percentile-99.9": 99.9}
    for turn in range(10):
        arrays = [{"x": rng.standard_t(4, size=(1, 64, 300)).astype(np.float32)} for _ in range(8)]
        found = calibrate_model(
            model, make_samples(arrays), work=tmp_path / str(turn), methods=tuple(percents), fitting=False
        )
        every = np.sort(np.concatenate([array["x"].reshape(-1) for array in arrays]))
        for method, percent in percents.items():
            span, tail = found.ranges[method]["x"], (100 - percent) / 200
            allowed = 1.96 * (tail * (1 - tail) / (picked_values(8) * 8)) ** 0.5
            bin_width = 2 * float(np.abs(every).max()) / 1024  # a range ends in the middle of a bin, or beside it
            for end, sign in ((-span.low, -1), (span.high, 1)):
                beyond = [float((sign * every > end + shift).mean()) for shift in (bin_width, -bin_width)]
                misses += not beyond[0] - allowed <= tail <= beyond[1] + allowed
    assert misses <= 0.1 * 10 * 2 * 2


@pytest.mark.parametrize("size", [8, 5])
def test_channels_of_one_tensor_on_two_axes_have_extremes_of_their_own(tmp_path: Path, size: int) -> None:
    """A Conv reads channels on axis 1, a MatMul on the last: with equal sizes a mix-up would not be noticed."""
    # More rows than channels: a MatMul whose rows were taken from axis 1 would ask for some that are not there.
    text = f"""g (float[1,8,12,{size}] x)
      => (float[1,4,12,{size}] y, float[1,8,12,40] z) {{
      r = Abs(x) y = Conv<kernel_shape=[1,1]>(r, w1, b1) z = MatMul(r, w2) }}"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (4, 8, 1, 1), "b1": (4,), "w2": (size, 40)})
    rng = np.random.default_rng(0)
    scale = np.linspace(1, 8, 8)[None, :, None, None] * np.linspace(1, 50, size)
    rows = [{"x": (rng.normal(size=(1, 8, 12, size)) * scale).astype(np.float32)} for _ in range(16)]
    calibration = calibrate_model(model, make_samples(rows), work=tmp_path / "work")
    whole = np.abs(np.stack([row["x"][0] for row in rows]))
    read = StoredMoments(tmp_path / "work")
    conv, matmul = present(read("n1_Conv")), present(read("n2_MatMul"))
    # The highest value of each channel, and the highest of the other samples.
    assert np.allclose(conv.high, np.sort(whole.max(axis=(2, 3)), axis=0)[:-3:-1])
    assert np.allclose(matmul.high, np.sort(whole.max(axis=(1, 2)), axis=0)[:-3:-1])
    assert calibration.ranges["minmax"]["r"].high == pytest.approx(whole.max(), rel=2e-3)
    for name in ("nnapi", "qnn", "xnnpack", "cpu"):
        plan = plan_quantization(model, calibration, load_target(name), "int8")
        quantize_model(model, plan, calibration, tmp_path / f"{name}.onnx")


def test_an_array_in_a_file_keeps_what_was_written_while_it_rests(tmp_path: Path) -> None:
    file = ArrayFile(tmp_path / "arrays")
    first, none, second = (file.zeros(shape, np.float32) for shape in ((3, 5000), (0, 4), (2, 2)))
    first.values += 2
    second.values[1, 1] = 7
    for each in (first, none, second):
        each.release()
    assert (first.values == 2).all()
    assert second.values.tolist() == [[0, 0], [0, 7]]
    assert none.values.shape == (0, 4)


ARRAYS: dict[str, Array] = {
    "floats": np.arange(12, dtype=np.float32).reshape(3, 4),
    "count": np.array(5, np.int64),
    "none": np.zeros((0, 7)),
    "flags": np.array([True, False]),
    "half": np.ones((2, 3, 1), np.float16)[:, ::-1],
    "big endian": np.arange(3, dtype=">i4").astype("<i4"),
}


def test_bytes_changed_and_signed_again_are_refused_or_read_but_never_crash(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", "key", Checkpoint(seen={0: b"a" * 32}, arrays=ARRAYS))
    good, random = (tmp_path / "c").read_bytes()[:-32], np.random.default_rng(0)
    for _ in range(500):
        bad = bytearray(good)
        for at in random.integers(0, min(len(bad), 330), random.integers(1, 4)):
            bad[at] = random.integers(0, 256)
        (tmp_path / "c").write_bytes(bad + hashlib.sha256(bad).digest())
        with contextlib.suppress(DataError):
            read_checkpoint(tmp_path / "c", "key", 1 << 20)


def _write(path: Path, rows: str, opset: int) -> Model:
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]>
      g (float[1,{rows},6] x) => (float[1,{rows},4] y) {{ r = Relu(x)  [layer] y = MatMul(r, w) }}"""
    return make_model(text, path, {"w": (6, 4)})


def _measure(model: Model, lengths: list[int], work: Path, offset: float = 0, scale: float = 1) -> InputMoments:
    drawn = (np.random.default_rng(seed).normal(offset, scale, (1, length, 6)) for seed, length in enumerate(lengths))
    calibrate_model(model, make_samples([{"x": row.astype(np.float32)} for row in drawn]), work=work)
    return present(StoredMoments(work)("layer"))


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("rows", [5, 100])
def test_open_rows_give_the_moments_of_fixed_ones(tmp_path: Path, rows: int, opset: int) -> None:
    fixed = _measure(_write(tmp_path / "fixed.onnx", str(rows), opset), [rows] * 20, tmp_path / "a")
    free = _measure(_write(tmp_path / "open.onnx", "S", opset), [rows] * 20, tmp_path / "b")
    assert free.count == fixed.count > 0
    np.testing.assert_array_equal(free.covariance, fixed.covariance)
    np.testing.assert_array_equal(free.mean, fixed.mean)


def test_each_sample_adds_as_many_rows_to_the_moments_as_it_has(tmp_path: Path) -> None:
    every = _measure(_write(tmp_path / "open.onnx", "S", 17), [3] * 20, tmp_path / "a")
    mixed = _measure(load_model(tmp_path / "open.onnx"), [3, 4] * 10, tmp_path / "b")
    # Some samples are kept back, to judge by; no row is counted twice.
    assert every.count % 3 == 0
    assert every.count < mixed.count < every.count * 4 / 3


def test_inputs_that_hardly_vary_beside_their_mean_keep_a_covariance(tmp_path: Path) -> None:
    found = _measure(_write(tmp_path / "fixed.onnx", "40", 17), [40] * 20, tmp_path / "a", 3000, 0.05)
    # E[xx'] - E[x]E[x]' of sums in float32 is off by a hundred times the variance here, and has negative eigenvalues.
    assert np.diagonal(found.covariance[0]) == pytest.approx(0.05**2, rel=0.2)
    assert np.linalg.eigvalsh(found.covariance[0]).min() > 0
    assert found.second_moment()[0] == pytest.approx(np.full((6, 6), 9e6), rel=1e-3)


# A QDQ file is measured in a form that this machine computes faster, with the same numbers.

# A layer with a scale for each channel, then one with a single scale.
NET = """<ir_version: 10, opset_import: ["" : 21]> g (float[1,3,5,5] x) => (float[1,4] y)
<float s = {0.03}, KIND z = {7}, float[4] us = {0.01, 0.02, 0.03, 0.04}, int8[4] uz = {0, 0, 0, 0},
 float vs = {0.02}, LAST vz = {5}, float[2,4] bs = {1, 2, 3, 4, 5, 6, 7, 8}, LAST[2,4] bz = {1, 2, 3, 4, 5, 6, 7, 8}>
{
  xq = QuantizeLinear(x, s, z)  xd = DequantizeLinear(xq, s, z)
  ud = DequantizeLinear<axis = 0>(u, us, uz)
  a = Conv(xd, ud)  aq = QuantizeLinear(a, s, z)  ad = DequantizeLinear(aq, s, z)
  p = GlobalAveragePool(ad)  f = Flatten(p)
  fq = QuantizeLinear(f, s, z)  fd = DequantizeLinear(fq, s, z)
  vd = DequantizeLinear(v, vs, vz)
  y = MatMul(fd, vd)
}"""
SETTINGS = SessionSettings(level=Level.DISABLED)


def write_net(path: Path, kind: str, given: str = "", other: str = "") -> Path:
    rng, last = np.random.default_rng(3), "int8" if kind == "int8" else "uint8"
    weights = {"u": rng.integers(-99, 99, (4, 3, 2, 2), np.int8), "v": rng.integers(0, 99, (4, 4)).astype(last)}
    text = NET.replace("KIND", kind).replace("LAST", last).replace(given or "?", other)
    return save_net(text, path, **weights).path


def open_exactly(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[onnx.GraphProto, CpuSession]:
    """Returns the graph that is computed, and a session that computes it node by node, as ONNX defines it."""
    opened: list[bytes] = []

    def open_session(model: bytes, settings: SessionSettings, **kept: Any) -> CpuSession:
        opened.append(model)
        return CpuSession(model, msgspec.structs.replace(settings, level=Level.DISABLED), **kept)

    monkeypatch.setattr(sessions, "CpuSession", open_session)
    session = open_quantized(path)
    return onnx.load_from_string(opened[-1]).graph, session


def run(session: CpuSession) -> Array:
    return session.run({"x": np.random.default_rng(1).normal(size=(1, 3, 5, 5)).astype(np.float32)})["y"]


@pytest.mark.parametrize(
    ("kind", "flags", "types"),
    [
        ("int8", "avx512_vnni", {"uint8"}),
        ("int8", "avx512f", {"int8"}),
        ("uint8", "avx512_vnni", {"uint8"}),
        ("uint16", "avx512_vnni", {"uint16"}),
    ],
)
def test_numbers_are_the_same_and_int8_is_unsigned_where_products_of_it_are_computed_in_float(
    kind: str, flags: str, types: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_net(tmp_path / "q.onnx", kind)
    monkeypatch.setattr(machine, "read_cpu_flags", lambda: flags)
    graph, session = open_exactly(path, monkeypatch)
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert {str(stored[node.input[2]].dtype) for node in graph.node if node.op_type == "QuantizeLinear"} == types
    assert np.array_equal(run(session), run(CpuSession(path, SETTINGS)))


@pytest.mark.parametrize(
    ("kind", "given", "other", "kept"),
    [
        ("uint8", "", "", {"u", "v"}),
        ("uint16", "", "", set()),
        ("uint16", "v, vs, vz", "v, vs", {"v"}),
        ("uint16", "<axis = 0>(u, us, uz)", "<axis = 0>(u, us)", {"u"}),
        ("uint16", "vd = DequantizeLinear(v, vs", "vi = Identity(vs)  vd = DequantizeLinear(v, vi", {"v"}),
        ("uint16", "Linear(v, vs, vz)", "Linear<axis = 0, block_size = 2>(v, bs, bz)", {"v"}),
    ],
    ids=["beside 8 bits", "beside 16", "no zero point", "none of a channel", "scales that are computed", "blocks"],
)
def test_constants_beside_16_bits_with_scales_and_zero_points_in_the_file_are_folded_by_onnx_runtime(
    kind: str, given: str, other: str, kept: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_net(tmp_path / "q.onnx", kind, given, other)
    graph, session = open_exactly(path, monkeypatch)
    constants = {tensor.name for tensor in graph.initializer}
    assert {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"} & constants == kept
    assert np.array_equal(run(session), run(CpuSession(path, SETTINGS)))
