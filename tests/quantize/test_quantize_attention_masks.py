"""What attention hides does not stretch the ranges of its scores."""

import re
from pathlib import Path

import numpy as np
import pytest
from fixture_types import present
from quantize_models import make_model, make_samples, read_activations

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.target import load_target

TOKENS = 8
MASKS = {
    "added": "m = Add(s, hidden) p = Softmax(m)",
    "chosen": "m = Where(seen, s, lowest) p = Softmax<axis=2>(m)",
    "added, then reshaped": "m4 = Add(s, hidden) m = Reshape(m4, rows) p = Softmax(m)",
    "added, then flattened": "m4 = Add(s, hidden) m = Flatten<axis=2>(m4) p2 = Softmax(m) p = Reshape(p2, rows)",
    "computed": """one = Cast<to=1>(seen) zero = Constant<value_float=1.0>() n = Sub(zero, one) f = Mul(n, lowest)
                   m = Add(s, f) p = Softmax(m)""",
    "added beside a score of nothing": """m = Add(s, hidden) n = ReduceMean<axes=[2], keepdims=1>(s)
                   c = Concat<axis=2>(m, n) a = Softmax(c) p, nothing = Split<axis=2>(a, parts)""",
    "added to a bias": "b = Add(bias, f) m = Add(s, b) p = Softmax(m)",
}
MASK_VALUE = (-100.0, float(np.finfo(np.float32).min), -np.inf)
LOWEST = {"computed": MASK_VALUE[:2], "added to a bias": MASK_VALUE[:2]}
"""Zero times infinity is no number, and an input may not be infinite."""


def attention(mask: str, lowest: float, folder: Path, factor: float = 0.25) -> Model:
    text = f"""g (float[1,8,16] x, float[1,8,8] f) => (float[1,8,16] y) {{
      q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) t = Transpose<perm=[0,2,1]>(k)
      u = MatMul(q, t) s = Mul(u, factor)
      {MASKS[mask]} o = MatMul(p, v) y = MatMul(o, wo) }}"""
    if "(bias, f)" not in MASKS[mask]:
        text = text.replace(", float[1,8,8] f)", ")")
    path = folder / "m.onnx"
    seen = np.tril(np.ones((TOKENS, TOKENS), bool))
    constants: dict[str, Array] = {
        "seen": seen,
        "hidden": np.where(seen, 0, lowest).astype(np.float32),
        "lowest": np.array(lowest, np.float32),
        "factor": np.array(factor, np.float32),
        "rows": np.array([1, TOKENS, TOKENS]),
        "parts": np.array([TOKENS, 1]),
        "bias": np.random.default_rng(5).normal(size=(TOKENS, TOKENS)).astype(np.float32),
    }
    read = {name for name in constants if re.search(rf"\b{name}\b", text)}
    weights = dict.fromkeys(("wq", "wk", "wv", "wo"), (16, 16))
    return make_model(text, path, weights, {name: constants[name] for name in sorted(read)})


def rows(model: Model, lowest: float) -> Samples:
    random = np.random.default_rng(1)
    hidden = np.where(np.tril(np.ones((TOKENS, TOKENS))), 0, lowest).astype(np.float32)[None]
    every = [{"x": random.normal(size=(1, 8, 16)).astype(np.float32), "f": hidden} for _ in range(16)]
    names = {spec.name for spec in model.inputs}
    return make_samples([{name: value for name, value in each.items() if name in names} for each in every])


def quantize(model: Model, samples: Samples, target: str, folder: Path) -> tuple[Calibration, Model]:
    calibration = calibrate_model(model, samples, work=folder / "work", methods=("minmax",), fitting=False)
    plan = plan_quantization(model, calibration, load_target(target), "int8", method="minmax")
    return calibration, quantize_model(model, plan, calibration, folder / "q.onnx").model


@pytest.mark.parametrize(
    ("mask", "lowest"), [(mask, lowest) for mask in MASKS for lowest in LOWEST.get(mask, MASK_VALUE)]
)
def test_masked_scores_keep_their_precision(mask: str, lowest: float, tmp_path: Path) -> None:
    model = attention(mask, lowest, tmp_path)
    samples = rows(model, lowest)
    calibration, quantized = quantize(model, samples, "nnapi", tmp_path)
    scores = calibration.ranges["minmax"]["m"]
    assert -40 < scores.low < scores.high < 20
    # Samples differ in what they hide, which says nothing of how far new scores reach.
    assert "m" not in calibration.unseen_shares
    one, two = CpuSession(model.path, SessionSettings()), CpuSession(quantized.path, SessionSettings())
    for sample in samples:
        expected, found = one.run(sample)["y"], two.run(sample)["y"]
        assert 20 * np.log10(np.linalg.norm(expected) / np.linalg.norm(expected - found)) > 20


@pytest.mark.parametrize("mask", ["computed", "added to a bias"])
def test_a_mask_hides_scores_of_a_sharp_attention_too(mask: str, tmp_path: Path) -> None:
    model = attention(mask, -1e4, tmp_path, factor=3.0)
    samples = rows(model, -1e4)
    calibration, quantized = quantize(model, samples, "qnn", tmp_path)
    ranges = calibration.ranges["minmax"]
    scores = ranges["s"].high - ranges["s"].low
    assert scores > 40
    assert -2 * scores < ranges["f"].low < -scores
    session = CpuSession(quantized.path, SessionSettings())
    for sample in samples:
        # The first token sees nothing but itself: what others are must be of no matter to it.
        others = sample["x"].copy()
        others[:, 1:] = sample["x"][:, :0:-1]
        one, two = (session.run({**sample, "x": x})["y"][:, 0] for x in (sample["x"], others))
        assert np.array_equal(one, two)


def test_scores_without_a_mask_keep_their_exact_range(tmp_path: Path) -> None:
    model = attention("added", 0.0, tmp_path)
    samples = rows(model, 0.0)
    calibration, _ = quantize(model, samples, "qnn", tmp_path)
    lowest = min(float(found["m"].min()) for found in read_activations(model, ["m"], samples))
    assert calibration.ranges["minmax"]["m"].low == pytest.approx(lowest, rel=2e-3)
    assert "m" in calibration.unseen_shares


@pytest.mark.parametrize(
    "mask",
    [
        "c = Cast<to=1>(f) n = Sub(one, c) h = Mul(n, low) m = Add(s, h)",
        "c = Cast<to=1>(f) n = Sub(c, one) h = Mul(n, high) m = Add(s, h)",
        "c = Cast<to=1>(f) n = Sub(one, c) h = Mul(n, high) m = Sub(s, h)",
        "n = Sub(whole, f) i = Mul(n, whole_low) h = Cast<to=1>(i) m = Add(s, h)",
        "b = Cast<to=9>(f) m = Where(b, s, low)",
        "b = Cast<to=9>(f) h = Where(b, zero, low) m = Add(h, s)",
        "c = Cast<to=1>(f) r = Reshape(c, rows) n = Sub(one, r) h = Mul(low, n) e = Expand(h, rows) m = Add(s, e)",
    ],
)
def test_a_row_that_a_mask_hides_whole_does_not_count(mask: str, tmp_path: Path) -> None:
    """A row of padding sees nothing: all of its scores lie as low as the mask."""
    text = f"""g (float[1,8,16] x, int64[1,8,8] f) => (float[1,8,16] y) {{
      q = MatMul(x, wq) t = Transpose<perm=[0,2,1]>(x) s = MatMul(q, t) {mask} p = Softmax(m) y = MatMul(p, x) }}"""
    ten = np.float32(1e4)
    every = {"one": np.float32(1), "zero": np.float32(0), "high": ten, "low": -ten, "rows": np.array([1, 8, 8])}
    every |= {"whole": np.array(1), "whole_low": np.array(-10000)}
    constants = {name: np.array(value) for name, value in every.items() if re.search(rf"\b{name}\b", text)}
    model = make_model(text, tmp_path / "m.onnx", {"wq": (16, 16)}, constants)
    seen = np.tril(np.ones((1, TOKENS, TOKENS), np.int64))
    seen[:, :2] = 0
    random = np.random.default_rng(3)
    samples = make_samples([{"x": random.normal(size=(1, 8, 16)).astype(np.float32), "f": seen} for _ in range(16)])
    calibration, _ = quantize(model, samples, "nnapi", tmp_path)
    assert calibration.ranges["minmax"]["m"].low > -500


def test_low_scores_of_a_classifier_are_no_mask(tmp_path: Path) -> None:
    """A classifier may have no score above -1000 for some samples: its rows count, as nothing there can hide one."""
    text = "g (float[1,8] x) => (float[1,4] y) { m = Gemm(x, w, b) y = Softmax(m) }"
    bias = np.full(4, -3000, np.float32)
    model = make_model(text, tmp_path / "m.onnx", {"w": (8, 4)}, {"b": bias})
    random = np.random.default_rng(2)
    samples = make_samples([{"x": (3000 * random.normal(size=(1, 8))).astype(np.float32)} for _ in range(16)])
    calibration, _ = quantize(model, samples, "qnn", tmp_path)
    highest = [float(found["m"].max()) for found in read_activations(model, ["m"], samples)]
    assert min(highest) < -1000 < max(highest)
    assert calibration.ranges["minmax"]["m"].low < min(highest)


def test_a_huge_weight_that_hides_nothing_is_left_alone(tmp_path: Path) -> None:
    text = "g (float[1,4] x) => (float[1,4] y) { m = Add(x, b) y = Relu(m) }"
    model = make_model(text, tmp_path / "m.onnx", constants={"b": np.full(4, -1e9, np.float32)})
    assert present(read_float_graph(model).constant("b")).max() == -1e9
