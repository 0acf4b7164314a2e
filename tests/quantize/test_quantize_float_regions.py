import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from quantize_models import (
    find_searched,
    make_model,
    make_samples,
    make_search,
    op_types,
    predicted,
    quantize,
    random_samples,
)

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model import external
from edgekit.model import model as model_file
from edgekit.model.model import Model, load_model, read_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare import prepare_model
from edgekit.quantize import calibrate_model
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.float_regions import (
    find_float_regions,
    find_high_precision_regions,
    find_sized_by_sample,
)
from edgekit.quantize.mixed_precision import plan_search
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.plan_search import Searched
from edgekit.quantize.weight_blocks import quantize_blocks
from edgekit.quantize.weight_only import WeightForm, WeightOnlyOptions, compress_weights
from edgekit.target import Precision, Target, load_target

FRONT = """g (float[1,64] x) => (float[1,4] y)
  <float eps = {1e-6}> {
  s = MatMul(x, dft) p = Mul(s, s) e = Add(p, eps) l = Log(e) h = MatMul(l, w1) r = Relu(h) y = MatMul(r, w2) }"""
SHAPES: dict[str, tuple[int, ...]] = {"dft": (64, 32), "w1": (32, 16), "w2": (16, 4)}


POWER = "re = MatMul(x, wr) im = MatMul(x, wi) re2 = Mul(re, re) im2 = Mul(im, im) p = Add(re2, im2) m = MatMul(p, mel)"


@pytest.mark.parametrize(
    ("body", "floats"),
    [
        # A front end with more layers than the network is one all the same.
        (f"{POWER} e = Max(m, eps) l = Log(e) y = MatMul(l, w)", 8),
        # The form of a Clip that NNAPI gets.
        (f"{POWER} d = Max(m, eps) e = Min(d, eps) l = Log(e) y = MatMul(l, w)", 9),
        # A Log behind a network keeps only its neighbours.
        ("h = MatMul(x, v) s = Softmax(h) y = Log(s)", 2),
        # A root within a network is no spectrum.
        ("c = MatMul(x, v) r = Relu(c) s = Mul(r, r) q = Sqrt(s) y = MatMul(q, u)", 0),
    ],
)
def test_the_nodes_before_a_log_stay_float(body: str, floats: int, tmp_path: Path) -> None:
    shapes = {"wr": (64, 33), "wi": (64, 33), "mel": (33, 16), "w": (16, 4), "v": (64, 4), "u": (4, 4)}
    text = f"g (float[1,64] x) => (float[1,4] y) <float eps = {{1e-6}}> {{ {body} }}"
    given = {name: shape for name, shape in shapes.items() if f", {name})" in body}
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", given))
    regions = find_float_regions(graph)
    assert len(regions) == floats
    assert not floats or {node.name for node in graph.nodes if node.op_type == "Log"} <= regions.keys()


def test_front_end_reads_the_input_itself(tmp_path: Path) -> None:
    model = make_model(FRONT, tmp_path / "m.onnx", SHAPES)
    rng = np.random.default_rng(0)
    rows = [{"x": (rng.normal(size=(1, 64)) * 10.0 ** rng.uniform(-3, 1)).astype(np.float32)} for _ in range(40)]
    quantized = quantize(model, tmp_path, "nnapi", make_samples(rows))
    assert op_types(quantized.model)[0] == "MatMul"
    assert [node.op for node in quantized.float_nodes] == ["MatMul", "Mul", "Add", "Log"]
    one, two = CpuSession(model.path, SessionSettings()), CpuSession(quantized.model.path, SessionSettings())
    assert max([np.abs(one.run(row)["y"] - two.run(row)["y"]).max() for row in rows]) < 1


MAGNITUDE = """g (float[1,1,400] x) => (float[1,8] y) {
  re = Conv<strides=[20]>(x, wr) im = Conv<strides=[20]>(x, wi)
  re2 = Mul(re, re) im2 = Mul(im, im) power = Add(re2, im2) ROOT
  h = Conv(root, wh) a = Relu(h) c = Conv(a, wc) g1 = GlobalAveragePool(c) y = Flatten(g1) }"""
ROOTS = {
    "magnitude": "root = Sqrt(power)",
    "power": "p = Constant<value_float=0.33>() root = Pow(power, p)",
    "gain": """s = AveragePool<kernel_shape=[3], pads=[1,1]>(power) e = Constant<value_float=0.000001>() se = Add(s, e)
        alpha = Constant<value_float=0.98>() gain = Pow(se, alpha) even = Div(power, gain)
        two = Constant<value_float=2.0>() up = Add(even, two) half = Constant<value_float=0.5>()
        rooted = Pow(up, half) off = Constant<value_float=1.4>()
        root = Sub(rooted, off)""",
}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_the_root_of_a_spectrum_and_all_before_it_stay_float(tmp_path: Path, root: str) -> None:
    text = MAGNITUDE.replace("ROOT", root)
    weights: dict[str, tuple[int, ...]] = {"wr": (16, 1, 40), "wi": (16, 1, 40), "wh": (8, 16, 3), "wc": (8, 8, 3)}
    regions = find_float_regions(read_float_graph(make_model(text, tmp_path / "m.onnx", weights)))
    kinds = [name.split("_")[1] for name in regions]
    assert {"Conv", "Mul", "Add"} <= set(kinds)
    assert kinds.count("Conv") == 2
    assert "Relu" not in kinds


def test_a_transform_that_is_an_operator_is_calibrated_and_stays_float(tmp_path: Path) -> None:
    text = """g (float[1,320] x) => (float[1,8,40] y)
      <int64 step = {32}, int64 length = {64}, float eps = {1e-10}, int64[1] last = {-1}> {
      s = STFT(x, step, window, length) two = Mul(s, s) p = ReduceSum<keepdims=0>(two, last) m = MatMul(p, mel)
      c = Max(m, eps) l = Log(c) h = MatMul(l, w1) r = Relu(h) y = MatMul(r, w2) }"""
    shapes: dict[str, tuple[int, ...]] = {"window": (64,), "mel": (33, 20), "w1": (20, 16), "w2": (16, 40)}
    floats = quantize(make_model(text, tmp_path / "m.onnx", shapes), tmp_path, "qnn").float_nodes
    assert [node.op for node in floats] == ["STFT", "Mul", "ReduceSum", "MatMul", "Max", "Log"]


def test_infinity_that_a_constant_puts_in_stays_float_and_refuses_nothing(tmp_path: Path) -> None:
    text = """g (float[1,8] x) => (float[1,4] y, int64[1,1] i, float[1,18] z)
      <float never = {-inf}, float zero = {0}, int64[4] pads = {0, 1, 0, 1}> {
      h = MatMul(x, w1) c = Greater(h, zero) m = Where(c, h, never) i = ArgMax<axis=1>(m) p = Pad(m, pads, never)
      z = Max(p, zero) r = Relu(h) y = MatMul(r, w2) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w1": (8, 16), "w2": (16, 4)})
    samples = random_samples(model, 24)
    for name in ("qnn", "xnnpack"):
        quantized = quantize(model, tmp_path, name, samples)
        reasons = {node.op: node.reason for node in quantized.float_nodes}
        assert {"Where", "Pad", "ArgMax"} <= reasons.keys()
        assert "infinity" in reasons["ArgMax"]
        assert op_types(quantized.model).count("MatMul") + op_types(quantized.model).count("Gemm") == 2
        assert quantized.quantized_nodes >= 2
        for sample in samples:
            found = CpuSession(quantized.model.path, SessionSettings()).run(sample)
            assert all(np.isfinite(found[key]).all() for key in ("y", "z"))


CUBE = "s = Mul(h, h) c = Mul(s, b) d = Mul(c, h) e = Add(h, d) f = Mul(e, a)"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (f"{CUBE} t = Tanh(f) u = Add(t, one) v = Mul(h, u) z = Mul(v, half)", 9),
        (f"{CUBE} t = Tanh(f) u = Add(t, one) g = Mul(h, half) z = Mul(g, u)", 9),
        ("s = Pow(h, three) c = Mul(s, b) e = Add(c, h) f = Mul(e, a) t = Tanh(f) u = Add(one, t) z = Mul(h, u)", 7),
        # What follows the Gelu is none of it: here another branch.
        (f"{CUBE} t = Tanh(f) u = Add(t, one) v = Mul(h, u) z = Mul(v, k)", 8),
        ("m = Mul(h, a) n = Add(m, one) z = Tanh(n)", 0),
        ("n = Min(h, zero) e = Exp(n) l = Sub(e, one) m = Max(h, zero) z = Add(m, l)", 5),
        ("n = Min(h, zero) e = Exp(n) f = Mul(e, a) l = Sub(f, a) m = Max(h, zero) z = Add(l, m)", 6),
        ("n = Min(h, zero) e = Exp(n) l = Sub(e, one) m = Max(h, zero) z = Mul(m, l)", 0),
        ("n = Min(h, zero) e = Exp(n) z = Sub(e, one)", 0),
    ],
)
def test_the_parts_of_a_gelu_with_tanh_and_of_an_elu_need_more_than_8_bits(
    body: str, count: int, tmp_path: Path
) -> None:
    text = f"""g (float[1,4] x) => (float[1,4] y) <float a = {{0.8}}, float b = {{0.04}}, float zero = {{0}},
      float one = {{1}}, float half = {{0.5}}, float three = {{3}}> {{
      m0 = MatMul(x, w) h = Add(m0, r) k = Mul(x, b) {body} y = MatMul(z, w) }}"""
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (4, 4), "r": (4,)}))
    found = find_high_precision_regions(graph)
    assert len(found) == count
    assert "MatMul" not in {node.op_type for node in graph.nodes if node.name in found}
    assert graph.producers["h"].name not in found


DEVIATION = "m = ReduceMean<axes=[1]>(x) c = Sub(x, m) q = Mul(c, c) v = ReduceMean<axes=[1]>(q) s = Sqrt(v)"
SIZED = "a = Abs(x) s = ReduceMean<axes=[1]>(a)"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (f"{SIZED} d = Div(x, s) h = MatMul(d, w1) r = Relu(h) f = MatMul(r, w2) y = Mul(f, s)", 4),
        # What one target's rewrites join: the division is inside the normalization.
        (
            f"{DEVIATION} d = LayerNormalization(x, gain) f = MatMul(d, w) g = Mul(s, f) y = Add(m, g)",
            8,
        ),
        ("s = ReduceMax<axes=[1]>(x) i = Reciprocal(s) d = Mul(x, i) f = MatMul(d, w) y = Mul(f, s)", 4),
        ("s = Slice(x, last, end, one) d = Sub(x, s) f = MatMul(d, w) y = Add(f, s)", 3),
        # A state and its change.
        ("s = Gather<axis=1>(x, turn) f = MatMul(x, w) y = Add(f, s)", 0),
        # A layer makes the number, or follows the product.
        (f"h = MatMul(x, w1) {SIZED.replace('Abs(x)', 'Abs(h)')} f = MatMul(h, w2) y = Mul(f, s)", 0),
        (f"{SIZED} d = Div(x, s) h = MatMul(d, w) g = Mul(h, s) y = MatMul(g, w3)", 0),
        # Each place has a number of its own.
        ("a = Abs(x) h = MatMul(x, w1) f = MatMul(h, w2) y = Mul(f, a)", 0),
    ],
)
def test_what_is_as_large_as_its_sample_needs_more_than_8_bits(body: str, count: int, tmp_path: Path) -> None:
    shapes = {"w1": (16, 24), "w2": (24, 16), "w": (16, 16), "w3": (16, 16), "gain": (16,)}
    given = {name: shape for name, shape in shapes.items() if f" {name})" in body}
    numbers = "int64[1] last = {-1}, int64[1] end = {16}, int64[1] one = {1}, int64[16] turn = {" + "3, " * 15 + "0}"
    text = f"g (float[1,16] x) => (float[1,16] y) <{numbers}> {{ {body} }}"
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", given))
    assert {*find_high_precision_regions(graph)} == {*find_sized_by_sample(graph)}
    assert len(find_sized_by_sample(graph)) == count


@pytest.mark.parametrize("target", ["qnn", "xnnpack"])
def test_a_series_of_any_size_keeps_its_forecast(target: str, tmp_path: Path) -> None:
    body = f"{SIZED} d = Div(x, s) h = MatMul(d, w1) r = Relu(h) f = MatMul(r, w2) y = Mul(f, s)"
    text = f"g (float[1,16] x) => (float[1,16] y) {{ {body} }}"
    model = make_model(text, tmp_path / "m.onnx", {"w1": (16, 24), "w2": (24, 16)})
    rng = np.random.default_rng(0)
    rows = [{"x": (rng.normal(size=(1, 16)) * 10.0 ** rng.uniform(-2, 0)).astype(np.float32)} for _ in range(40)]
    others = [{"x": row["x"] * np.float32(3)} for row in rows]
    quantized = quantize(model, tmp_path, target, make_samples(rows))
    one, two = (CpuSession(each.path, SessionSettings()) for each in (model, quantized.model))
    for row in rows + others:
        expected = one.run(row)["y"]
        assert np.abs(two.run(row)["y"] - expected).max() < 0.2 * np.abs(expected).max()


def test_many_normalisations_cost_no_walk_to_the_inputs_each(tmp_path: Path) -> None:
    layers = "\n".join(
        f"m{at} = MatMul(y{at}, w) s{at} = Mul(m{at}, m{at}) r{at} = ReduceMean<axes=[1]>(s{at})"
        f" q{at} = Sqrt(r{at}) y{at + 1} = Div(m{at}, q{at})"
        for at in range(400)
    )
    text = f"g (float[4,8] y0) => (float[4,8] y400) {{ {layers} }}"
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (8, 8)}))
    start = time.process_time()
    assert not find_float_regions(graph)
    assert len(find_high_precision_regions(graph)) == 4 * 400
    assert time.process_time() - start < 1.5  # 0.03 s; a walk from each root takes 8 s


# Tensors that 16 bits do not hold, as the powers of a spectrum, are in float where the target's float holds them.

# Small powers count, where they pass a threshold, and large ones too.
POWERS = """g (float[1,24] x) => (float[1,16] y) <float gain = {GAIN}, float largest = {LARGEST}> {
  g = Mul(x, gain) t = Tanh(g) l = Div(x, largest) c = Concat<axis=1>(t, l)
  h = MatMul(c, w1) r = Relu(h) y = MatMul(r, w2) }"""


def make_powers(folder: Path, largest: float, decades: float) -> Model:
    """A net whose inputs span some decades below the largest; the threshold lies at 0.6 of them."""
    folder.mkdir(exist_ok=True)
    text = POWERS.replace("GAIN", f"{10 ** (0.6 * decades) / largest}").replace("LARGEST", f"{largest}")
    return make_model(text, folder / "m.onnx", {"w1": (48, 64), "w2": (64, 16)})


def draw_powers(largest: float, decades: float) -> list[Tensors]:
    drawn = np.random.default_rng(0).uniform(-decades, 0, (48, 1, 24))
    return [{"x": (largest * 10**row).astype(np.float32)} for row in drawn]


def search(folder: Path, target: Target, largest: float, decades: float, precision: Precision = "int8") -> Searched:
    model = make_powers(folder, largest, decades)
    return find_searched(folder, model, draw_powers(largest, decades), target, precision)


def list_floats(searched: Searched) -> set[str]:
    return {node.op for node in searched.chosen.plan.float_nodes}


@pytest.mark.parametrize("precision", ["int8", "int16"])
def test_what_16_bits_do_not_hold_is_in_float(precision: Precision, tmp_path: Path) -> None:
    searched = search(tmp_path, load_target("qnn"), 100.0, 9, precision)
    assert searched.chosen.prediction.sqnr_db > 30 > searched.trials[0].prediction.sqnr_db
    assert "Mul" in list_floats(searched)
    assert "MatMul" not in list_floats(searched)
    assert "which 16 bits do not hold" in searched.chosen.plan.float_nodes[0].reason
    assert searched.wide_range == ()


def search_powers(folder: Path, precision: Precision, tell: Callable[[str], tuple[float, float]]) -> Searched:
    """The search of `make_powers`, of which `tell` says how many decisions stay and what is lost in a step."""
    model = make_powers(folder, 100.0, 9)
    calibration = calibrate_model(model, make_samples(draw_powers(100.0, 9)), work=folder / "work")

    def measure(quantized: Model) -> Prediction:
        same, drop = tell(quantized.path.stem)
        return predicted(drop, sqnr_db=15.0, same=same)

    search = make_search((model, calibration), measure, load_target("qnn"), folder, precision)
    return present(find_plan(search, max_drop=None, narrow=False)[1])


@pytest.mark.parametrize(("kept", "is_float"), [(0.93, True), (0.985, False)])
def test_float_is_as_strict_on_decisions_as_16_bits(tmp_path: Path, kept: float, *, is_float: bool) -> None:
    """A twentieth for qnn; the drop itself misses the goal and stays as it is."""

    def tell(step: str) -> tuple[float, float]:
        return 0.99 if "in float" in step else 0.85 if step == "all" else kept, 0.006

    assert bool(list_floats(search_powers(tmp_path, "int8", tell))) == is_float


def test_what_16_bits_do_not_hold_is_sought_in_plans_that_lose_as_much(tmp_path: Path) -> None:
    """A table's columns of ten thousands and of tenths: with it in 16 bits no less was lost, so 8 bits were kept."""

    def tell(step: str) -> tuple[float, float]:
        return (0.99, 0.003) if "in float" in step else (0.75, 0.045) if step == "all" else (0.73, 0.052)

    assert "Mul" in list_floats(search_powers(tmp_path, "int8", tell))


@pytest.mark.parametrize(
    ("limits", "value"), [(("DEFAULT_INTEGER_SHARE", "LEAST_INTEGER_SHARE"), 1.01), (("SAME_SHARE",), -1.01)]
)
@pytest.mark.parametrize(
    ("before", "after", "is_float"), [(0.14, 0.004, True), (0.14, 0.03, False), (0.015, 0.006, False)]
)
def test_a_plan_that_loses_much_may_get_little_work_in_integers_or_on_the_target_if_that_saves_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[str, ...],
    value: float,
    before: float,
    after: float,
    *,
    is_float: bool,
) -> None:
    """A speaker encoder lost 14 points in 16 bits, and 0.4 with 71 % of its work in integers, where 75 % are wanted."""
    for name in limits:
        monkeypatch.setattr(plan_search, name, value)  # any tensor in float is too much

    def tell(step: str) -> tuple[float, float]:
        drop = after if "in float" in step else before
        return 1 - drop, drop

    found = search_powers(tmp_path, "int16", tell)
    assert any("in float" in trial.step for trial in found.trials)
    assert bool(list_floats(found)) == is_float


def test_what_16_bits_hold_is_in_16_bits(tmp_path: Path) -> None:
    searched = search(tmp_path, load_target("qnn"), 100.0, 4)
    assert searched.chosen.plan.wide
    assert list_floats(searched) == set()


def test_what_half_precision_does_not_hold_is_named(tmp_path: Path) -> None:
    target = load_target("qnn")
    assert target.float_bits == 16
    searched = search(tmp_path / "half", target, 1e-5, 9)
    assert list_floats(searched) == set()
    assert "x" in searched.wide_range
    assert (
        "'x' loses most, in 16 bits as in fp16, in which qnn computes floats: it holds 6e-08 to 65504"
        in searched.advice
    )
    full = msgspec.structs.replace(target, float_bits=32)
    assert "Mul" in list_floats(search(tmp_path / "full", full, 1e-5, 9))


def test_an_app_scales_what_neither_16_bits_nor_half_precision_hold(tmp_path: Path) -> None:
    """A table with columns of millions and of thousandths was told that 16 bits are no better, and nothing else."""
    sizes = np.float32(10.0) ** np.arange(6, -4, -1, dtype=np.float32)
    text = """g (float[1,10] x) => (float[1,4] y) { s = Sub(x, mean) d = Div(s, size) h = MatMul(d, w1) r = Relu(h)
        y = MatMul(r, w2) }"""
    layers = {"w1": (10, 32), "w2": (32, 4)}
    model = make_model(text, tmp_path / "m.onnx", layers, constants={"mean": 2 * sizes, "size": sizes})
    drawn = np.random.default_rng(0).normal(2, 1, (48, 1, 10)).astype(np.float32)
    searched = find_searched(tmp_path, model, [{"x": row * sizes} for row in drawn], load_target("qnn"), "int8")
    assert searched.chosen.prediction.sqnr_db < 20
    assert searched.advice.endswith("let the app compute 'd' from it: edgekit prepare MODEL --inputs 'd' --out FILE")


# Weights of a Gemm that adds what is no bias of one dimension, as ONNX Runtime makes it of a residual, in blocks.

ROWS, WIDTH, HIDDEN = 3, 64, 96
BIASES: dict[str, Array] = {
    "one": np.arange(WIDTH, dtype=np.float32),
    "row": np.arange(WIDTH, dtype=np.float32)[None],
    "column": np.arange(ROWS, dtype=np.float32)[:, None],
    "single": np.array([0.5], np.float32),
}


HEAD = f"g (float[{ROWS},{WIDTH}] x) => (float[{ROWS},{WIDTH}] y) "


def make_residuals(path: Path, weights: dict[str, Array]) -> Model:
    """Writes x + MatMul(Relu(MatMul x)) twice."""
    layer = (
        "[upN] uN = MatMul({0}, upN) [reluN] rN = Relu(uN) [downN] dN = MatMul(rN, downN) [addN] {1} = Add({0}, dN) "
    )
    layers = layer.format("x", "middle").replace("N", "0") + layer.format("middle", "y").replace("N", "1")
    return make_model(f"{HEAD}{{ {layers} }}", path, constants=weights)


def draw_weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {
        f"{name}{index}": rng.standard_normal(shape).astype(np.float32) / 8
        for index in range(2)
        for name, shape in shapes.items()
    }


def round_weight(weight: Array, bits: int) -> Array:
    values, scales = quantize_blocks(weight, bits, 32)
    middle = np.float32(2 ** (bits - 1))
    return np.asarray(((values - middle) * scales[..., None]).reshape(weight.shape[1], -1)[:, : len(weight)].T)


def run(model: Model) -> Array:
    sample = {"x": np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)}
    return CpuSession(model.path, SessionSettings(level=Level.DISABLED)).run(sample)["y"]


@pytest.mark.parametrize(("form", "bits"), [("int4", 4), ("int8", 8)])
def test_all_weights_of_a_chain_with_residuals_get_blocks(tmp_path: Path, form: WeightForm, bits: int) -> None:
    weights = draw_weights()
    prepared = prepare_model(make_residuals(tmp_path / "m.onnx", weights), tmp_path / "p.onnx", {})
    assert [node.op_type for node in read_proto(prepared).graph.node].count("Gemm") == 2
    light = compress_weights(prepared, WeightOnlyOptions(form=form), tmp_path / "c.onnx")
    assert len(light.changed) == 4
    graph = read_proto(light.model).graph
    assert [node.op_type for node in graph.node] == ["MatMulNBits", "Relu", "MatMulNBits", "Add"] * 2
    assert {tensor.name for tensor in graph.initializer}.isdisjoint(weights)
    rounded = make_residuals(tmp_path / "r.onnx", {name: round_weight(value, bits) for name, value in weights.items()})
    assert run(light.model) == pytest.approx(run(rounded), abs=1e-4)


def test_a_gemm_that_is_to_be_kept_keeps_its_sum(tmp_path: Path) -> None:
    prepared = prepare_model(make_residuals(tmp_path / "m.onnx", draw_weights()), tmp_path / "p.onnx", {})
    kept = next(node for node in read_proto(prepared).graph.node if node.op_type == "Gemm")
    light = compress_weights(prepared, WeightOnlyOptions(form="int4", kept=(kept.name,)), tmp_path / "c.onnx")
    assert len(light.changed) == 3
    assert kept in read_proto(light.model).graph.node


def test_external_data_loads_where_weights_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_residuals(tmp_path / "m.onnx", draw_weights())
    onnx.save(read_proto(model), str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.data")
    # As of 64 MB and more, and of weights of 128 kB and more.
    monkeypatch.setattr(model_file, "LARGE_BYTES", 1)
    monkeypatch.setattr(external, "MAX_DATA_BYTES", 1000)
    options = WeightOnlyOptions(form="int4", kept=("down0", "up1"))
    light = compress_weights(load_model(tmp_path / "e.onnx"), options, tmp_path / "c.onnx")
    assert light.changed == ("up0", "down1")
    assert run(light.model).shape == (ROWS, WIDTH)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_gemm_gets_blocks_with_any_bias_but_no_factors(tmp_path: Path, bias: str, factor: float) -> None:
    first, second = draw_weights()["up0"], draw_weights()["down0"]

    def make(path: Path, weight: Array) -> Model:
        text = f"[matmul] h = MatMul(x, w) [gemm] y = Gemm<transB=1, alpha={factor}>(h, turned, c)"
        turned = np.ascontiguousarray(weight.T)
        weights = {"w": round_weight(first, 8), "turned": turned, "c": BIASES[bias]}
        return make_model(f"{HEAD}{{ {text} }}", path, constants=weights)

    light = compress_weights(make(tmp_path / "m.onnx", second), WeightOnlyOptions(form="int8"), tmp_path / "c.onnx")
    assert light.changed == (("matmul", "gemm") if factor == 1 else ("matmul",))
    adds = [node.name for node in read_proto(light.model).graph.node if node.op_type == "Add"]
    assert adds == (["gemm/sum"] if factor == 1 and bias != "one" else [])
    wanted = make(tmp_path / "r.onnx", round_weight(second, 8) if factor == 1 else second)
    assert run(light.model) == pytest.approx(run(wanted), abs=1e-3)
