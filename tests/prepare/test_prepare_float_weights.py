"""ONNX Runtime rounds float weights between Q and DQ nodes; they are found, refused where we quantize, else kept."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from prepare_models import assert_same, make_model, rewrite, run_model
from tiny_models import parse_model, save_net

from edgekit._ort import CpuSession, Level, SessionSettings, optimize_graph
from edgekit.check.check import check_model
from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.model.model import Model, iterate_nodes, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.constants import (
    DISABLED,
    OPTIMIZER,
    TURNING,
    disable_harmful,
    find_float_weights,
    find_harmful,
    narrow_constants,
)
from edgekit.prepare.dequantize import dequantize_model
from edgekit.prepare.fix import fix_model
from edgekit.prepare.rewrites.signs import UNSIGNED_WEIGHTS
from edgekit.target import load_target

HEAD = """(float[1,4,4,4] x) => (float[1,4,4,4] y) <float s = {{0.02}}, uint8 z = {{128}}, float t = {{0.05}},
    float[1] s1 = {{0.02}}, float[4] s4 = {{0.02, 0.02, 0.02, 0.02}}, uint8[4] z4 = {{128, 128, 128, 128}}>
    {{ a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z) {body} y = DequantizeLinear(q, t, z) }}"""
OPEN = "[n] c = Conv(b, w) q = QuantizeLinear(c, t, z)"
BODIES = {
    OPEN: ("n",),
    "[n] c = Conv(b, w) r = Relu(c) q = QuantizeLinear(r, t, z)": ("n",),
    "[n] c = ConvTranspose(b, w) q = QuantizeLinear(c, t, z)": ("n",),
    "[n] c = Conv(b, w) r = Transpose<perm = [0, 1, 3, 2]>(c) q = QuantizeLinear(r, t, z)": ("n",),
    "m = Transpose<perm = [0, 1, 3, 2]>(b) [n] c = Conv(m, w) q = QuantizeLinear(c, t, z)": ("n",),
    "[n] c = Conv(x, w) q = QuantizeLinear(c, t, z)": (),
    "[n] c = Conv(b, w) r = Tanh(c) q = QuantizeLinear(r, t, z)": (),
    "[n] c = Conv(b, w) r = Add(c, c) q = QuantizeLinear(r, t, z)": (),
    "[n] c = Conv(b, w) q = QuantizeLinear(c, t, z) u = Relu(c)": (),
}


def write(body: str, path: Path) -> Path:
    weight = np.random.default_rng(0).normal(0, 1, (4, 4, 1, 1)).astype(np.float32)
    weight[0] *= 0.003
    return save_net(HEAD.format(body=body), path, w=weight).path


def run(path: Path, *, kept: bool) -> np.ndarray:
    sample = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 4, 4)).astype(np.float32)}
    return CpuSession(path, SessionSettings(config={DISABLED: OPTIMIZER} if kept else {})).run(sample)["y"]


@pytest.mark.parametrize("body", BODIES)
def test_what_is_found_is_what_a_session_rounds(tmp_path: Path, body: str) -> None:
    path = write(body, tmp_path / "m.onnx")
    found = find_float_weights(onnx.load(str(path)).graph)
    changes = bool(np.abs(run(path, kept=True) - run(path, kept=False)).max() > 0)
    assert (found, changes) == (BODIES[body], bool(BODIES[body]))


def test_float_weights_that_are_stored_as_integers_are_found_too(tmp_path: Path) -> None:
    path = write(OPEN, tmp_path / "m.onnx")
    proto = onnx.load(str(path))
    narrow_constants(proto.graph, {"w": 16})
    onnx.save(proto, str(path))
    assert find_float_weights(proto.graph) == ("n",)
    assert np.abs(run(path, kept=True) - run(path, kept=False)).max() > 0


def test_what_a_target_switches_off_itself_stays_off(tmp_path: Path) -> None:
    path = write(next(body for body in BODIES if BODIES[body]), tmp_path / "m.onnx")
    target = load_target("cpu", {})
    session = msgspec.structs.replace(target.session, config={DISABLED: "ConstantFolding"})
    target = msgspec.structs.replace(target, session=session)
    config = disable_harmful(target, onnx.load(str(path)).graph)[0].session.config
    assert config[DISABLED] == f"ConstantFolding;{OPTIMIZER}"
    sample = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 4, 4)).astype(np.float32)}
    got = CpuSession(path, SessionSettings(config=config)).run(sample)["y"]
    np.testing.assert_array_equal(got, run(path, kept=True))


SHRINKING = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,4,8,8] x) => (float[1,4,5,5] y)
  <float s = {0.05}, uint8 z = {128}, int8 t = {0}, int64[4] sizes = {1,4,5,5}, int8[4,4,1,1] w = {WEIGHTS}>
  { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, t) c = Conv(d, v)
    e = QuantizeLinear(c, s, z) f = DequantizeLinear(e, s, z) r = Resize<mode="cubic">(f, , , sizes)
    g = QuantizeLinear(r, s, z) h = DequantizeLinear(g, s, z) i = DequantizeLinear(w, s, t) j = Conv(h, i)
    k = QuantizeLinear(j, s, z) y = DequantizeLinear(k, s, z) }""".replace("WEIGHTS", ",".join(map(str, range(16))))


def test_a_cubic_resize_between_integers_runs_where_its_layout_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(SHRINKING), str(path))
    sample = {"x": np.random.default_rng(1).normal(0, 1, (1, 4, 8, 8)).astype(np.float32)}
    with pytest.raises(RuntimeRefusal, match="Cubic"):
        CpuSession(path, SessionSettings()).run(sample)
    target, told = disable_harmful(load_target("cpu", {}), onnx.load(str(path)).graph)
    got = CpuSession(path, SessionSettings(config=target.session.config)).run(sample)["y"]
    assert got.shape == (1, 4, 5, 5)
    assert "1 cubic Resize nodes" in told[0]


def test_xnnpack_s_products_of_a_transpose_are_kept_from_becoming_a_gemm_with_trans_a(tmp_path: Path) -> None:
    text = """g (float[4,2] x, float[1,2,4] u) => (float[2,3] y, float[2,3] z, float[1,4,3] t, float[2,3] v)
        <float[4,3] w = {1}, int64[2] k = {2,4}>
        { a = Transpose<perm=[1,0]>(x) y = Gemm(a, w) z = MatMul(a, w) b = Transpose<perm=[0,2,1]>(u)
        c = Transpose<perm=[0,2,1]>(b) s = Neg(c) t = MatMul(b, y)
        e = Reshape(a, k) v = Gemm(e, w) f = Reshape(x, k) g = Gemm(f, w) }"""
    graph = onnx.load(str(parse_model(text, tmp_path / "m.onnx"))).graph
    for index, node in enumerate(graph.node):
        node.name = f"n{index}"
    assert find_harmful(graph, "XnnpackExecutionProvider") == {TURNING: ("n1", "n2", "n8")}
    assert disable_harmful(load_target("xnnpack"), graph)[0].session.config[DISABLED] == TURNING
    assert disable_harmful(load_target("nnapi"), graph) == (load_target("nnapi"), ())


# The float model of one that ONNX Runtime's own dynamic quantization wrote.

# Each with its weights. "bodies" has a layer in the body of a loop that reads an activation from outside, "letters" an
# embedding whose rows go into layers as they are, "fused" products that ONNX Runtime's optimizer fuses, and "attention"
# what its optimizer for transformers makes.
MODELS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "words": (
        """g (int64[5] x) => (float[5,6] y)
        { e = Gather(table, x) t = Tanh(e) a = MatMul(t, v) r = Relu(a) b = MatMul(r, w) y = Add(b, bias) }""",
        {"table": (20, 8), "v": (8, 16), "w": (16, 6), "bias": (6,)},
    ),
    "image": (
        "g (float[1,3,8,8] x) => (float[1,4,6,6] y) { a = Conv(x, v) y = Add(a, bias) }",
        {"v": (4, 3, 3, 3), "bias": (1, 4, 1, 1)},
    ),
    "speech": (
        """g (float[6,1,8] x) => (float[2,1,4] y)
        { l, y = LSTM<hidden_size = 4, direction = "bidirectional">(x, v, w, b) }""",
        {"v": (2, 16, 8), "w": (2, 16, 4), "b": (2, 32)},
    ),
    "letters": (
        """g (int64[1,9] x) => (float[1,6,7] y, float[1,9,4] z)
        { e = Gather(table, x) z = MatMul(e, v) t = Transpose<perm = [0, 2, 1]>(e) a = Conv(t, w) y = Add(a, bias) }""",
        {"table": (20, 8), "v": (8, 4), "w": (6, 8, 3), "bias": (6, 1)},
    ),
    "bodies": (
        """g (float[1,8] x) => (float[1,8] y) <int64 n = {3}, bool go = {1}>
        { a = MatMul(x, v) y = Loop(n, go, a)<body = b (int64 i, bool c, float[1,8] s) => (bool d, float[1,8] t)
            { d = Identity(c) p = MatMul(x, w) q = MatMul(s, v) r = Add(p, q) t = Tanh(r) }> }""",
        {"v": (8, 8), "w": (8, 8)},
    ),
    "fused": (
        """g (float[5,8] x) => (float[5,16] y, float[5,6] z, float[5,6] r)
        { t = Tanh(x) y = MatMul(t, v) b = MatMul(t, w) z = Add(b, bias) u = Relu(x) p = MatMul(u, w) r = Add(p, bias) }
        """,
        {"v": (8, 16), "w": (8, 6), "bias": (6,)},
    ),
    "attention": (
        "g (float[1,6,8] x) => (float[1,6,8] y) { a = com.microsoft.Attention<num_heads = 2>(x, v, b) y = Relu(a) }",
        {"v": (8, 24), "b": (24,)},
    ),
}
FLOAT = {"Add", "Attention", "Conv", "Gather", "Identity", "Loop", "LSTM", "MatMul", "Relu", "Tanh", "Transpose"}


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_dynamic_quantized_model_is_float(kind: str, per_channel: bool, unsigned: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text, shapes = MODELS[kind]
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    model = make_model(text, tmp_path / "m.onnx", weights=weights, imports=', "com.microsoft" : 1')
    quantize_dynamic(
        model.path, tmp_path / "q.onnx", per_channel=per_channel,
        weight_type=QuantType.QUInt8 if unsigned else QuantType.QInt8, extra_options={"EnableSubgraph": True},
    )  # fmt: skip
    if kind == "fused":
        optimize_graph(tmp_path / "q.onnx", tmp_path / "fused.onnx", SessionSettings(level=Level.EXTENDED))
        (tmp_path / "fused.onnx").replace(tmp_path / "q.onnx")
        fused = {node.op_type for node in onnx.load(str(tmp_path / "q.onnx")).graph.node}
        assert fused >= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    made = dequantize_model(load_model(tmp_path / "q.onnx"), tmp_path / "out" / "f.onnx")
    assert {node.op_type for node in iterate_nodes(onnx.load(str(made.path)).graph)} <= FLOAT
    shape = tuple(dim for dim in model.inputs[0].shape or () if isinstance(dim, int))
    is_text = model.inputs[0].dtype == "int64"
    inputs = {"x": rng.integers(0, 20, shape) if is_text else rng.normal(size=shape).astype(np.float32)}
    results = (run_model(path, inputs).values() for path in (model.path, made.path))
    for wanted, found in zip(*results, strict=True):
        assert 0 < np.square(found - wanted).mean() < 4e-3 * np.square(wanted).mean()


PRODUCT = "g (float[6,8] x) => (float[6,6] y) { w = DequantizeLinear<>(q, s, z) y = MatMul(x, w) }"
SUM = """g (float[6,8] x) => (float[6,8] y)
    { w = DequantizeLinear<axis = 0, block_size = 3>(q, s, z) y = Add(x, w) }"""
CONVOLUTION = """g (float[1,6,8,1] x) => (float[1,8,8,1] y) { o, t, p = DynamicQuantizeLinear(x)
    a = ConvInteger(o, q, p, z) e = Cast<to = 1>(a) b = Mul(t, s) y = Mul(e, b) }"""


def assert_becomes_float(model: Model, x: Array, folder: Path) -> list[str]:
    """Asserts that a model becomes one that gives nearly the same for an input; returns the operators of that."""
    made = dequantize_model(model, folder / "f.onnx")
    found, rounded = (run_model(each.path, {"x": x})["y"] for each in (made, model))
    assert np.square(found - rounded).mean() < 1e-3 * np.square(found).mean()
    return [node.op_type for node in onnx.load(str(made.path)).graph.node]


@pytest.mark.parametrize(
    ("text", "weight", "scale", "zero"),
    [
        (PRODUCT.replace("<>", "<axis = 0>"), (8, 6), (8,), (8,)),
        (PRODUCT.replace("<>", ""), (8, 6), (6,), (6,)),
        (PRODUCT.replace("<>(q, s, z)", "<axis = -1>(q, s)"), (8, 6), (6,), ()),
        (PRODUCT.replace("<>", "<axis = 0, block_size = 3>"), (8, 6), (3, 6), (3, 6)),
        (SUM, (8,), (3,), (3,)),
        (CONVOLUTION, (8, 6, 1, 1), (8, 1, 1), ()),
    ],
)  # fmt: skip
def test_weights_with_a_scale_for_each_channel_or_block_become_float(
    text: str, weight: tuple[int, ...], scale: tuple[int, ...], zero: tuple[int, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "q": rng.integers(-127, 127, weight).astype(np.int8), "s": rng.uniform(0.01, 1, scale).astype(np.float32),
        "z": np.asarray(rng.integers(-9, 9, zero)).astype(np.int8),
    }  # fmt: skip
    # An absent zero point may be written as an empty name.
    edit = (lambda proto: proto.graph.node[0].input.append("")) if len(weight) < 3 and not zero else None
    model = make_model(text, tmp_path / "q.onnx", opset=21, weights=weights, edit=edit)
    shape = (6, 8) if len(weight) < 3 else (1, 6, 8, 1)
    assert {*assert_becomes_float(model, rng.normal(size=shape).astype(np.float32), tmp_path)} <= FLOAT


# A convolution whose activation function the range of its integers is; scale and zero point stand between the braces.
ROUNDED = """g (float[1,3,8,8] x) => (float[1,4,3,3] y) {{
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) w = DequantizeLinear <axis = 0> (v, vs)
    b = DequantizeLinear(bias, bs) c = Conv(d, w, b)
    o = QuantizeLinear(c, {0}, {1}) m = MaxPool <kernel_shape = [2,2], strides = [2,2]> (o)
    e = DequantizeLinear(m, {0}, {1}) y = Sub(e, one) }}"""


@pytest.mark.parametrize(
    ("scale", "zero", "activation"),
    [(6 / 255, 0, ["Clip"]), (6 / 255, -128, ["Clip"]), (0.05, 0, ["Relu"]), (0.05, 100, []), (0.05, -127, [])],
)
def test_a_static_quantized_model_is_float_and_keeps_what_its_ranges_clip(
    scale: float, zero: int, activation: list[str], tmp_path: Path
) -> None:
    rng, kind = np.random.default_rng(0), np.int8 if zero < 0 else np.uint8
    weights: dict[str, Array] = {
        "s": np.array(0.02, np.float32), "z": np.array(128, np.uint8), "one": np.array(1, np.float32),
        "v": rng.integers(-99, 99, (4, 3, 3, 3)).astype(np.int8), "vs": np.array([1, 2, 3, 4], np.float32) / 100,
        "bias": np.array([500, -900, 100, 0], np.int32), "bs": np.array(0.002, np.float32),
        "o_s": np.array(scale, np.float32), "o_z": np.array(zero, kind),
    }  # fmt: skip
    model = make_model(ROUNDED.format("o_s", "o_z"), tmp_path / "m.onnx", weights=weights)
    # On the grid of the input, so that only results are rounded.
    x = (weights["s"] * rng.integers(-20, 20, (1, 3, 8, 8))).astype(np.float32)
    made = dequantize_model(model, tmp_path / "f.onnx")
    ops = [node.op_type for node in onnx.load(str(made.path)).graph.node if node.op_type != "Identity"]
    assert ops == ["Conv", *activation, "MaxPool", "Sub"]
    found, rounded = (run_model(each.path, {"x": x})["y"] for each in (made, model))
    # Ranges that begin below 0 are those of the samples: here they are too small, and the float form does not clip.
    clips = rounded < rounded.min() + scale
    assert np.abs(found - rounded)[~clips].max() < scale
    assert activation == [] or np.abs(found - rounded)[clips].max() < scale


def test_inputs_and_outputs_of_integers_stay(tmp_path: Path) -> None:
    """As TensorFlow Lite's models have them."""
    body = """g (int8[1,8] x) => (int8[1,4] y) { d = DequantizeLinear(x, s, z) w = DequantizeLinear(v, s)
        m = MatMul(d, w) y = QuantizeLinear(m, t, z) }"""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "s": np.array(0.02, np.float32), "z": np.array(-3, np.int8), "t": np.array(0.05, np.float32),
        "v": rng.integers(-99, 99, (8, 4)).astype(np.int8),
    }  # fmt: skip
    model = make_model(body, tmp_path / "q.onnx", weights=weights)
    made = dequantize_model(model, tmp_path / "f.onnx")
    ops = {node.op_type for node in onnx.load(str(made.path)).graph.node}
    assert ops.isdisjoint({"DequantizeLinear", "QuantizeLinear"})
    x = rng.integers(-128, 128, (64, 1, 8)).astype(np.int8)
    wanted, found = ([run_model(each.path, {"x": row})["y"] for row in x] for each in (model, made))
    assert wanted[0].dtype == np.int8
    assert {-128, 127} < {*np.ravel(wanted)}
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("body", "ops"),
    [
        ("m = Clip(q, low, high)", ["Clip"]),
        ("k = Concat<axis = 0>(q, v) m = Transpose(k)", ["Concat", "Transpose"]),
        ("a, b = Split<axis = 1>(q) m = Max(b, a)", ["Max", "Split"]),
        ("m = Pad(q, pads, z)", ["Pad"]),
        ("m = Where(is_kept, v, q)", ["Where"]),
        ("m = ReduceMax<keepdims = 0>(q)", ["ReduceMax"]),
        ("a = QuantizeLinear<axis=0>(x, t, u) b = DequantizeLinear<axis=0>(a, t, u) m = QuantizeLinear(b, s, z)", []),
        # An integer 0 does not stand for 0.
        ("m = Pad(q, pads)", ["Add", "Cast", "Clip", "DequantizeLinear", "Div", "Pad", "Round"]),
        ("m = Add(q, one)", ["Add", "Add", "Cast", "Clip", "DequantizeLinear", "Div", "Round"]),
    ],
)
def test_integers_that_are_moved_are_moved_in_float(body: str, ops: list[str], tmp_path: Path) -> None:
    """The scale is computed in the graph, as PyTorch's exporters write it; Brevitas limits the integers by a Clip."""
    text = f"""g (float[2,8] x) => (float[] y) {{ s = Mul(r, half) q = QuantizeLinear(x, s, z)
        {body} d = DequantizeLinear(m, s, z) y = Identity(d) }}"""
    weights: dict[str, Array] = {
        "r": np.array(0.04, np.float32), "half": np.array(0.5, np.float32), "z": np.array(128, np.uint8),
        "low": np.array(128, np.uint8), "high": np.array(150, np.uint8), "pads": np.array([0, 1, 0, 1]),
        "v": np.arange(100, 116, dtype=np.uint8).reshape(2, 8), "is_kept": np.eye(2, 8, dtype=bool),
        "t": np.array([0.02, 0.04], np.float32), "u": np.array([100, 140], np.uint8), "one": np.array(1, np.uint8),
    }  # fmt: skip
    model = make_model(text, tmp_path / "q.onnx", weights=weights)
    x = np.random.default_rng(0).uniform(-1.5, 1.5, (2, 8)).astype(np.float32)
    found = assert_becomes_float(model, x, tmp_path)
    assert sorted(op for op in found if op != "Identity") == ops


def test_integers_are_moved_by_more_operators_than_python_recurses(tmp_path: Path) -> None:
    chain = " ".join(f"q{at + 1} = Max(q{at}, o)" for at in range(1200))
    body = f"""g (float[4] x) => (float[4] y) <float s = {{0.1}}, uint8 z = {{3}}, uint8 o = {{5}}>
        {{ q0 = QuantizeLinear(x, s, z) {chain} y = DequantizeLinear(q1200, s, z) }}"""
    made = dequantize_model(make_model(body, tmp_path / "m.onnx"), tmp_path / "f.onnx")
    ops = [node.op_type for node in onnx.load(str(made.path)).graph.node]
    assert ops == ["Max"] * 1200 + ["Identity"]


@pytest.mark.parametrize("format_", [QuantFormat.QDQ, QuantFormat.QOperator])
def test_what_onnx_runtime_quantizes_is_float_again(format_: QuantFormat, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = """g (float[1,3,8,8] x) => (float[1,4] y) { a = Conv(x, v) r = Relu(a) s = Add(r, r)
        p = GlobalAveragePool(s) f = Flatten(p) y = MatMul(f, w) }"""
    weights = {"v": rng.normal(size=(4, 3, 3, 3)), "w": rng.normal(size=(4, 4))}
    model = make_model(text, tmp_path / "m.onnx", weights={n: w.astype(np.float32) for n, w in weights.items()})
    inputs = [{"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)} for _ in range(8)]
    samples = iter(inputs)
    reader = type("Reader", (CalibrationDataReader,), {"get_next": lambda _: next(samples, None)})()
    quantize_static(model.path, tmp_path / "q.onnx", reader, quant_format=format_, per_channel=True)
    made = dequantize_model(load_model(tmp_path / "q.onnx"), tmp_path / "f.onnx")
    ops = {node.op_type for node in onnx.load(str(made.path)).graph.node}
    assert ops <= {"Add", "Conv", "Flatten", "GlobalAveragePool", "Identity", "MatMul", "Relu"}
    wanted, found = (run_model(path, inputs[0])["y"] for path in (model.path, made.path))
    # The weights alone are rounded now.
    assert np.square(found - wanted).mean() < 1e-3 * np.square(wanted).mean()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Relu(x)", "'m.onnx' is not quantized"),
        (
            "q, s, z = DynamicQuantizeLinear(x) y = Cast<to = 1>(q)",
            "quantized operators that cannot be made float: DynamicQuantizeLinear",
        ),
        (
            "s = Constant<value = float[4] {1, 2, 3, 4}>() q = QuantizeLinear<axis = 0>(x, s) y = Cast<to = 1>(q)",
            r"float: QuantizeLinear \(give the float model that it was made from\)",
        ),
    ],
)
def test_what_cannot_be_made_float_is_refused(body: str, message: str, tmp_path: Path) -> None:
    model = make_model(f"g (float[4] x) => (float[4] y) {{ {body} }}", tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=message):
        dequantize_model(model, tmp_path / "f.onnx")
    assert not (tmp_path / "f.onnx").exists()


def test_a_convolution_keeps_the_bias_that_was_added_as_integers(tmp_path: Path) -> None:
    """As an older quantizer of ONNX Runtime wrote it; ddddocr's reader of captchas is such a file."""
    body = """g (float[1,3,8,8] x) => (float[1,4,6,6] y) {
        q, s, z = DynamicQuantizeLinear(x) scales = Mul(s, vs) a = ConvInteger(q, v, z, vz)
        d = Div(bias, scales) f = Floor(d) i = Cast <to = 6> (f) b = Reshape(i, shape)
        c = Add(a, b) e = Cast <to = 1> (c) y = Mul(e, scales) }"""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "v": rng.integers(0, 255, (4, 3, 3, 3)).astype(np.uint8), "vs": np.array(0.01, np.float32),
        "vz": np.array(128, np.uint8), "bias": rng.normal(size=4).astype(np.float32), "shape": np.array([1, 4, 1, 1]),
    }  # fmt: skip
    dynamic = make_model(body, tmp_path / "q.onnx", weights=weights)
    x = rng.normal(size=(1, 3, 8, 8)).astype(np.float32)
    assert assert_becomes_float(dynamic, x, tmp_path) == ["Conv"]


# int8 weights stored as uint8: every value stays, and what something else reads too is left alone.

W = "int8[3,2] w = {127, -2, 3, -127, 5, -128}"
GEMM = """
g (float[2,3] x) => (float[2,2] y) <float xs = {0.02}, uint8 xz = {128}, float ys = {0.5}, uint8 yz = {128},
  int8[4,3] w = {127, -2, 3, -127, 5, -128, 1, 2, 3, 4, 5, 6}, float s = {0.01}, int8 z = {0}> {
  q = QuantizeLinear(x, xs, xz) d = DequantizeLinear(q, xs, xz) f = DequantizeLinear(w, s, z)
  a = Gemm<transB=1>(d, f) r = QuantizeLinear(a, ys, yz) y = DequantizeLinear(r, ys, yz)
}
"""


def constants(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}


def weights(path: Path) -> list[np.ndarray]:
    graph, stored = onnx.load(str(path)).graph, constants(path)
    return [stored[node.input[0]] for node in graph.node if node.input[0] in stored]


@pytest.mark.parametrize(
    "text",
    [
        f"<{W}, float s = {{0.5}}, int8 z = {{3}}> {{ f = DequantizeLinear(w, s, z) y = MatMul(x, f) }}",
        (
            f"<{W}, float[2] s = {{0.5, 2}}, int8[2] z = {{0, 0}}> "
            "{ f = DequantizeLinear<axis=1>(w, s, z) y = MatMul(x, f) }"
        ),
        f"<{W}, float[2] s = {{0.5, 2}}> {{ f = DequantizeLinear<axis=1>(w, s) y = Gemm(x, f) }}",
        (
            f"<{W}, float s = {{0.5}}, float t = {{2}}> "
            "{ f = DequantizeLinear(w, s) g = DequantizeLinear(w, t) a = MatMul(x, f) b = Gemm(x, g) y = Add(a, b) }"
        ),
    ],
)
def test_int8_weights_stored_as_uint8_keep_every_value(text: str, tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, f"g (float[2,3] x) => (float[2,2] y) {text}", UNSIGNED_WEIGHTS)
    assert [fix.id for fix in fixed.fixes] == [UNSIGNED_WEIGHTS]
    assert {weight.dtype.name for weight in weights(fixed.model.path)} == {"uint8"}
    assert_same(tmp_path, fixed, 0)
    onnx.checker.check_model(onnx.load(str(fixed.model.path)))


@pytest.mark.parametrize(
    "text",
    [
        f"(float[2,2] y, int8[3,2] w) <{W}, float s = {{0.5}}> {{ f = DequantizeLinear(w, s) y = MatMul(x, f) }}",
        (
            f"(float[2,2] y, float[3,2] c) <{W}, float s = {{0.5}}> "
            "{ f = DequantizeLinear(w, s) y = MatMul(x, f) c = Cast<to=1>(w) }"
        ),
        f"(float[2,2] y) <{W}, float s = {{0.5}}> {{ t = Neg(s) f = DequantizeLinear(w, t) y = MatMul(x, f) }}",
        f"(float[2,2] y) <{W}> {{ f = Cast<to=1>(w) y = MatMul(x, f) }}",
        (
            "(float[2,2] y) <uint8[3,2] w = {1, 2, 3, 4, 5, 6}, float s = {0.5}> "
            "{ f = DequantizeLinear(w, s) y = MatMul(x, f) }"
        ),
        f"(float[3,2] y) <{W}, float s = {{0.5}}> {{ f = DequantizeLinear(w, s) y = Identity(f) }}",
        # The CPU has no kernel for s8 activations with u8 weights.
        (
            f"(float[2,2] y) <{W}, float s = {{0.5}}, int8 z = {{0}}> {{ q = QuantizeLinear(x, s, z) "
            "d = DequantizeLinear(q, s, z) f = DequantizeLinear(w, s, z) y = MatMul(d, f) }"
        ),
    ],
)
def test_what_something_else_reads_or_makes_is_left_alone(text: str, tmp_path: Path) -> None:
    assert rewrite(tmp_path, f"g (float[2,3] x) => {text}", UNSIGNED_WEIGHTS).fixes == ()
    before, after = (weights(tmp_path / name) for name in ("m.onnx", "out.onnx"))
    assert [weight.dtype for weight in before] == [weight.dtype for weight in after]


def test_a_zero_point_that_others_read_stays(tmp_path: Path) -> None:
    text = f"""g (float[2,3] x) => (float[2,2] y) <{W}, int8[2] v = {{1, 2}}, float s = {{0.5}}, int8 z = {{0}}>
        {{ f = DequantizeLinear(w, s, z) h = DequantizeLinear(v, s, z) m = MatMul(x, f) y = Add(m, h) }}"""
    fixed = rewrite(tmp_path, text, UNSIGNED_WEIGHTS)
    assert [weight.dtype.name for weight in weights(fixed.model.path)] == ["uint8", "int8"]
    assert constants(fixed.model.path)["z"] == np.int8(0)
    assert_same(tmp_path, fixed, 0)


def big_gemm(folder: Path) -> Model:
    """A quantized Gemm with more weights than check reads."""
    path = make_model(GEMM, folder / "m.onnx").path
    proto = onnx.load(str(path))
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    stored["w"].CopyFrom(numpy_helper.from_array(np.full((4, 1 << 16), 3, np.int8), "w"))
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1 << 16
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    onnx.save(proto, str(path))
    return load_model(path)


def test_nnapi_is_said_to_refuse_a_signed_gemm_and_to_take_the_rewritten_one(tmp_path: Path) -> None:
    model, target = big_gemm(tmp_path), load_target("nnapi")
    report = check_model(model, target)
    (gemm,) = (node for node in report.node_list if node.op == "Gemm")
    assert (gemm.fatal, report.verdict) == (True, "no")
    assert "the model builder registers no int8 weight" in gemm.reasons[0]
    advice = {each.id: each for each in report.advice}
    assert (advice[UNSIGNED_WEIGHTS].nodes, advice[UNSIGNED_WEIGHTS].fix) == ((gemm.name,), "automatic")
    assert advice[UNSIGNED_WEIGHTS].gain_nodes > 0
    fixed = fix_model(model, tmp_path / "fixed.onnx", [UNSIGNED_WEIGHTS]).model
    again = check_model(fixed, target)
    assert (again.verdict, again.advice) == ("yes", ())
    assert (weights(fixed.path)[0] == 131).all()


def test_weights_in_another_file_are_left_alone_and_nothing_is_promised(tmp_path: Path) -> None:
    proto = onnx.load(str(big_gemm(tmp_path).path))
    onnx.save(proto, str(tmp_path / "e.onnx"), save_as_external_data=True, location="w.data", size_threshold=1 << 10)
    model = load_model(tmp_path / "e.onnx")
    assert UNSIGNED_WEIGHTS not in {each.id for each in check_model(model, load_target("nnapi")).advice}
    fixed = fix_model(model, tmp_path / "out" / "m.onnx", [UNSIGNED_WEIGHTS])
    assert fixed.fixes == ()
    assert (weights(fixed.model.path)[0] == 3).all()


def test_a_layer_in_integers_with_constant_scales_becomes_float(tmp_path: Path) -> None:
    """As ONNX Runtime's quantizer of 2019 wrote it, with IR version 3: each constant is an input too."""
    body = """g (float[2,8] x) => (float[2,4] y) {
        q = QuantizeLinear(x, s, z) a = MatMulInteger(q, v, z, vz)
        e = Cast <to = 1> (a) scales = Mul(s, vs) y = Mul(e, scales) }"""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "v": rng.integers(0, 255, (8, 4)).astype(np.uint8), "vs": np.array(0.01, np.float32),
        "vz": np.array(128, np.uint8), "s": np.array(0.02, np.float32), "z": np.array(128, np.uint8),
    }  # fmt: skip
    info = onnx.helper.make_tensor_value_info
    model = make_model(
        body, tmp_path / "q.onnx", weights=weights,
        edit=lambda it: it.graph.input.extend(info(w.name, w.data_type, w.dims) for w in it.graph.initializer),
    )  # fmt: skip
    assert assert_becomes_float(model, rng.uniform(-2, 2, (2, 8)).astype(np.float32), tmp_path) == ["MatMul"]


@pytest.mark.parametrize("made", ["q = QuantizeLinear(x, s, z)", "q, s, t = DynamicQuantizeLinear(x)"])
def test_a_layer_with_another_zero_point_than_its_integers_stays(made: str, tmp_path: Path) -> None:
    body = f"""g (float[2,8] x) => (float[2,4] y) {{
        {made} a = MatMulInteger(q, v, o) e = Cast <to = 1> (a) p = Mul(s, vs) y = Mul(e, p) }}"""
    weights: dict[str, Array] = {
        "v": np.ones((8, 4), np.uint8), "vs": np.array(0.01, np.float32), "o": np.array(7, np.uint8),
        "s": np.array(0.02, np.float32), "z": np.array(128, np.uint8),
    }  # fmt: skip
    read = {name: value for name, value in weights.items() if f"{name}, t" not in made}
    model = make_model(body, tmp_path / "q.onnx", weights=read)
    with pytest.raises(ModelError, match=r"cannot be made float: .*MatMulInteger"):
        dequantize_model(model, tmp_path / "f.onnx")
