"""Smaller weights alone: what each form changes, keeps, weighs and computes; QOperator form."""

from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from quantize_models import make_model, make_samples, sqnr_db
from tiny_models import parse_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.samples import Samples
from edgekit.errors import ModelError, UsageError
from edgekit.model.model import Model, find_quantized_form, load_model, read_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare import prepare_model
from edgekit.quantize.calibration.moments import InputMoments
from edgekit.quantize.qdq import write_qoperator
from edgekit.quantize.weight_blocks import BlockForm, pack_weights, quantize_blocks, round_blocks
from edgekit.quantize.weight_only import (
    BlockRounding,
    WeightForm,
    WeightOnlyOptions,
    compress_weights,
    convert_to_fp16,
)


def make_perceptron(path: Path) -> Model:
    """Writes MatMul, Gemm with a turned weight and a bias, and Softmax: float32[2,100] to [2,10]."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "w1": rng.standard_normal((100, 64)).astype(np.float32) / 10,
        "w2": rng.standard_normal((10, 64)).astype(np.float32) / 8,
        "b2": rng.standard_normal(10).astype(np.float32),
    }
    text = """g (float[2,100] x) => (float[2,10] y) {
      [first] a = MatMul(x, w1) [relu] r = Relu(a) [second] y = Gemm<transB=1>(r, w2, b2) }"""
    return make_model(text, path, constants=weights)


LEAST_SQNR_DB = {"fp16": 55, "dynamic-int8": 30, "int8": 38, "int4": 14}


@pytest.mark.parametrize("form", get_args(WeightForm))
def test_each_form_makes_weights_smaller_and_stays_close(tmp_path: Path, form: WeightForm) -> None:
    model = make_perceptron(tmp_path / "m.onnx")
    light = compress_weights(model, WeightOnlyOptions(form=form), tmp_path / "c.onnx")
    assert set(light.changed) >= {"first", "second"}
    assert light.size_after < light.size_before * 0.6
    assert sqnr_db(model, light.model) > LEAST_SQNR_DB[form]
    again = compress_weights(model, WeightOnlyOptions(form=form), tmp_path / "d.onnx")
    assert again.model.sha256 == light.model.sha256
    kept = compress_weights(model, WeightOnlyOptions(form=form, kept=("first",)), tmp_path / "k.onnx")
    assert "first" not in kept.changed
    graph = read_proto(kept.model).graph
    assert next(node.op_type for node in graph.node if node.name == "first") == "MatMul"
    assert next(tensor.data_type for tensor in graph.initializer if tensor.name == "w1") == TensorProto.FLOAT


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_hold_the_largest_weight_exactly_and_zeros_as_zero(bits: int) -> None:
    weight = np.random.default_rng(2).standard_normal((40, 3)).astype(np.float32)
    weight[:32, 1] = 0.0
    values, scales = quantize_blocks(weight, bits, 32)
    assert (values.shape, scales.shape) == ((3, 2, 32), (3, 2))
    back = ((values.astype(np.float32) - 2 ** (bits - 1)) * scales[..., None]).reshape(3, -1)[:, :40].T
    assert np.array_equal(back[:32, 1], np.zeros(32, np.float32))
    assert np.abs(back - weight).max() <= np.abs(scales).max()
    place = np.abs(weight[:32, 0]).argmax()
    assert back[place, 0] == pytest.approx(weight[place, 0], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        (WeightOnlyOptions(form="int4", kept=("frst",)), 0, "no node 'frst' to keep.*first"),
        (WeightOnlyOptions(form="int4", block=7), 0, "no block of 7 weights"),
        (WeightOnlyOptions(form="int4", accuracy_level=5), 0, "no accuracy level 5"),
        (WeightOnlyOptions(form="int4", rounding="gptq"), 0, "rounds 4-bit weights by samples"),
        (WeightOnlyOptions(form="int8", rounding="gptq"), 8, "rounds 4-bit weights by samples"),
        (WeightOnlyOptions(form="int8", lpbq=True), 8, "LPBQ is a form of 4-bit"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: WeightOnlyOptions, samples: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compress_weights(
            make_perceptron(tmp_path / "m.onnx"), options, tmp_path / "c.onnx", drawn(samples, 1) if samples else None
        )


@pytest.mark.parametrize("form", ["dynamic-int8", "int8", "int4"])
def test_weights_of_float16_are_refused_with_the_next_step(form: WeightForm, tmp_path: Path) -> None:
    light = compress_weights(make_perceptron(tmp_path / "m.onnx"), WeightOnlyOptions(form="fp16"), tmp_path / "h.onnx")
    with pytest.raises(ModelError, match=f"'h' .*{form}") as refusal:
        compress_weights(light.model, WeightOnlyOptions(form=form), tmp_path / "c.onnx")
    assert refusal.value.hint == "give the float32 model"


def make_trained_qdq(path: Path) -> Model:
    """Writes what quantisation-aware training exports: Q and DQ around a Conv, with scales of its own."""
    rng = np.random.default_rng(3)
    weights: dict[str, Array] = {
        "s_in": np.array(0.0123456, np.float32), "z_in": np.array(117, np.uint8),
        "w": rng.integers(-127, 127, (4, 3, 1, 1)).astype(np.int8),
        "s_w": rng.uniform(0.001, 0.01, 4).astype(np.float32), "z_w": np.zeros(4, np.int8),
        "s_out": np.array(0.0777777, np.float32), "z_out": np.array(121, np.uint8),
    }  # fmt: skip
    text = """g (float[1,3,4,4] x) => (float[1,4,4,4] y) {
      [q_in] xq = QuantizeLinear(x, s_in, z_in) [dq_in] xd = DequantizeLinear(xq, s_in, z_in)
      [dq_w] wd = DequantizeLinear<axis=0>(w, s_w, z_w) [conv] c = Conv(xd, wd)
      [q_out] cq = QuantizeLinear(c, s_out, z_out) [dq_out] y = DequantizeLinear(cq, s_out, z_out) }"""
    return make_model(text, path, constants=weights)


def constants(model: Model) -> dict[bytes, int]:
    tensors = [numpy_helper.to_array(tensor) for tensor in read_proto(model).graph.initializer]
    return {value.tobytes(): value.size for value in tensors}


def test_a_trained_qdq_model_passes_through_untouched(tmp_path: Path) -> None:
    model = make_trained_qdq(tmp_path / "m.onnx")
    assert find_quantized_form(read_proto(model)) == "qdq"
    prepared = prepare_model(model, tmp_path / "p.onnx", {})
    assert constants(prepared) == constants(model)
    assert [node.op_type for node in read_proto(prepared).graph.node].count("DequantizeLinear") == 3
    with pytest.raises(ModelError, match=r"quantized already \(qdq\)"):
        compress_weights(prepared, WeightOnlyOptions(form="int8"), tmp_path / "c.onnx")


def test_the_qoperator_form_has_the_same_numbers(tmp_path: Path) -> None:
    prepared = prepare_model(make_trained_qdq(tmp_path / "m.onnx"), tmp_path / "p.onnx", {})
    written = write_qoperator(prepared, tmp_path / "q.onnx", "x64")
    assert written.operators == {"QLinearConv": 1}
    assert [node.op_type for node in read_proto(written.model).graph.node] == [
        "QuantizeLinear", "QLinearConv", "DequantizeLinear",
    ]  # fmt: skip
    assert constants(written.model).items() <= constants(prepared).items()
    sample = {"x": np.random.default_rng(4).standard_normal((1, 3, 4, 4)).astype(np.float32)}
    wanted, got = (CpuSession(each.path, SessionSettings()).run(sample)["y"] for each in (prepared, written.model))
    assert np.array_equal(got, wanted)
    assert find_quantized_form(read_proto(written.model)) == "qoperator"


def test_a_float_model_has_no_qoperator_form(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no node of 'm' became an integer operator"):
        write_qoperator(make_perceptron(tmp_path / "m.onnx"), tmp_path / "q.onnx", "arm")


def drawn(count: int, seed: int) -> Samples:
    """Samples whose 100 inputs follow ten signals, as activations do."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(9).standard_normal((10, 100))
    rows = [rng.standard_normal((2, 10)) @ mix + 0.1 * rng.standard_normal((2, 100)) for _ in range(count)]
    return make_samples([{"x": row.astype(np.float32)} for row in rows])


@pytest.mark.parametrize(("level", "written"), [(0, []), (4, [4])])
def test_nodes_of_weights_in_blocks_have_the_accuracy_level(tmp_path: Path, level: int, written: list[int]) -> None:
    model = make_perceptron(tmp_path / "m.onnx")
    light = compress_weights(model, WeightOnlyOptions(form="int4", accuracy_level=level), tmp_path / "c.onnx")
    node = next(node for node in onnx.load(str(light.model.path)).graph.node if node.name == "first")
    assert [item.i for item in node.attribute if item.name == "accuracy_level"] == written


def test_blocks_of_zeros_stay_zero() -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((70, 5)).astype(np.float32)
    weight[32:64, 2] = 0.0
    inputs = (rng.standard_normal((500, 20)) @ rng.standard_normal((20, 70))).astype(np.float32)
    moments = InputMoments(
        count=500, mean=inputs.mean(axis=0)[None], spread=np.ptp(inputs, axis=0)[None], low=inputs.min(axis=0),
        high=inputs.max(axis=0), covariance=np.cov(inputs.T, bias=True)[None].astype(np.float32),
    )  # fmt: skip
    values, scales = round_blocks(weight, moments, BlockForm(bits=4, block=32))
    assert (values.shape, scales.shape) == ((5, 3, 32), (5, 3))
    assert (values[2, 1] == 8).all()
    assert (values[:, 2, 6:] == 8).all()
    back = ((values.astype(np.float32) - 8) * scales[..., None]).reshape(5, -1)[:, :70].T
    plain, sizes = quantize_blocks(weight, 4, 32)
    nearest = ((plain.astype(np.float32) - 8) * sizes[..., None]).reshape(5, -1)[:, :70].T
    assert np.linalg.norm(inputs @ (back - weight)) < 0.7 * np.linalg.norm(inputs @ (nearest - weight))


@pytest.mark.parametrize("rounding", get_args(BlockRounding))
def test_scales_of_lpbq_are_sixteenths_of_their_columns_largest(tmp_path: Path, rounding: BlockRounding) -> None:
    model = make_perceptron(tmp_path / "m.onnx")
    options = WeightOnlyOptions(form="int4", rounding=rounding, lpbq=True)
    light = compress_weights(model, options, tmp_path / "c.onnx", drawn(64, 1))
    proto = onnx.load(str(light.model.path))
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for node in (node for node in proto.graph.node if node.op_type == "MatMulNBits"):
        scales = stored[node.input[2]].reshape(-1, 4 if node.name == "first" else 2).astype(np.float64)
        counts = 16 * scales / scales.max(axis=1, keepdims=True)
        assert counts == pytest.approx(np.rint(counts), abs=1e-4)
        assert counts.min() >= 1 - 1e-4
    assert sqnr_db(model, light.model) > 12


def make_table() -> Array:
    table = np.random.default_rng(6).standard_normal((40, 64)).astype(np.float32)
    table[3, 32:] = 0.0
    return table


def make_tied(path: Path, head: str) -> Model:
    """Writes an embedding of 40 rows, a MatMul, and a head tied to it: ids int64[1,6] to float32[6,40]."""
    rng, table = np.random.default_rng(6), make_table()
    rng.standard_normal((40, 64))
    weights: dict[str, Array] = {"table": table, "w": rng.standard_normal((64, 64)).astype(np.float32) / 8}
    weights |= {"flat": np.array([-1, 64]), "turned": np.ascontiguousarray(table.T), "other": table[::-1].copy()}
    product = "MatMul(f, turned)" if head == "turned" else f"Gemm<transB=1>(f, {head})"
    text = f"""g (int64[1,6] ids) => (float[6,40] y) {{
      [embed] e = Gather(table, ids) [mix] h = MatMul(e, w) [flatten] f = Reshape(h, flat) [head] y = {product} }}"""
    return make_model(text, path, constants=weights)


@pytest.mark.parametrize(("form", "least_db"), [("int8", 38), ("int4", 14)])
@pytest.mark.parametrize("head", ["table", "turned", "other"])
def test_a_tied_head_is_stored_once(tmp_path: Path, form: WeightForm, least_db: float, head: str) -> None:
    model = make_tied(tmp_path / "m.onnx", head)
    light = compress_weights(model, WeightOnlyOptions(form=form), tmp_path / "c.onnx")
    assert set(light.changed) == {"embed", "mix", "head"}
    graph = read_proto(light.model).graph
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = {node.name: node for node in graph.node}
    tables = [value for value in stored.values() if value.dtype == np.uint8 and value.shape[0] == 40]
    assert len(tables) == (2 if head == "other" else 1)
    assert nodes["embed"].op_type == "GatherBlockQuantized"
    assert (nodes["embed"].input[2] == nodes["head"].input[2]) == (head != "other")
    assert sqnr_db(model, light.model, [{"ids": np.array([[0, 39, -1, 3, 7, 12]])}]) > least_db


def test_a_tied_head_is_rounded_by_samples_and_its_embedding_loses_nothing(tmp_path: Path) -> None:
    model = make_tied(tmp_path / "m.onnx", "turned")

    def draw(seed: int) -> dict[str, Array]:
        return {"ids": np.random.default_rng(seed).integers(0, 12, (1, 6))}

    samples = Samples(source="drawn", count=64, read=lambda: map(draw, range(64)))
    found: dict[BlockRounding, tuple[float, float]] = {}
    for rounding in get_args(BlockRounding):
        options = WeightOnlyOptions(form="int4", rounding=rounding, kept=("mix",))
        light = compress_weights(model, options, tmp_path / f"{rounding}.onnx", samples)
        stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in read_proto(light.model).graph.initializer}
        packed, scales = stored["table_q4t"], stored["table_scalest"]
        values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(40, 2, 32).astype(np.float32) - 8
        table = (values * scales[..., None]).reshape(40, 64)
        # The table has rows that are not in the samples: its own error is judged apart.
        error = float(np.linalg.norm(table - make_table()))
        found[rounding] = sqnr_db(model, light.model, map(draw, range(64, 96))), error
    assert found["gptq"][0] > found["nearest"][0] + 0.3, found
    assert found["gptq"][1] < found["nearest"][1] * 1.035, found


def test_tables_that_blocks_do_not_fit_stay_float(tmp_path: Path) -> None:
    model = make_tied(tmp_path / "m.onnx", "other")
    light = compress_weights(model, WeightOnlyOptions(form="int4", block=128), tmp_path / "c.onnx")
    assert set(light.changed) == {"mix", "head"}
    kept = compress_weights(model, WeightOnlyOptions(form="int4", kept=("embed",)), tmp_path / "d.onnx")
    assert set(kept.changed) == {"mix", "head"}
    columns = onnx.load(str(model.path))
    columns.graph.node[0].attribute.append(helper.make_attribute("axis", 1))
    assert not pack_weights(columns, BlockForm(bits=4, block=32), ("mix", "head"))


# The fp16 form of a model: half the size, the same answers, float32 at its ends.

HEAD = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]> g '


def feed(**values: object) -> dict[str, Array]:
    return {name: np.array(value, bool if name == "c" else np.float32) for name, value in values.items()}


SQUARE = feed(x=[[1, -2], [3, -4]])
# A text, the nodes that are kept, samples, the outputs that are the float model's to the last bit, and how many casts.
HALVES: dict[str, tuple[str, tuple[str, ...], list[Tensors], str, int | None]] = {
    "bodies stand after what they read": (
        """(bool c, float[2,2] x) => (float[2,2] y) { a = Relu(x) r = If(c)
        <then_branch = t () => (float[2,2] u) { u = Add(a, x) }, else_branch = e () => (float[2,2] v) { v = Abs(a) }>
        y = Neg(r) }""",
        (), [SQUARE | feed(c=c) for c in (True, False)], "", None,
    ),
    "bodies of a kept node read floats": (
        """(bool c, float[2,2] x) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> {
        a = Relu(x) b = Add(a, w) h = Cast<to=10>(x) s = Neg(h) [r] r = If(c) <then_branch = t () => (float[2,2] u) {
        q = Cast<to=10>(b) d = Add(s, q) k = Cast<to=1>(d) u = Mul(k, w) },
        else_branch = e () => (float[2,2] v) { v = Sub(b, x) }> y = Neg(r) }""",
        ("r",), [SQUARE | feed(c=c) for c in (True, False)], "y", None,
    ),
    "an input that is an output too stays float32": (
        "(float[2] x, float[2] m) => (float[2] m, float[2] y) { y = Neg(x) }",
        (), [feed(x=[1, -2], m=[1e-9, 1e9])], "my", None,
    ),
    "a constant that is an output stays float32": (
        "(float[2] x) => (float[2] m, float[2] y) <float[2] m = {0.1, 1e9}> { y = Min(x, m) }",
        (), [feed(x=[1, -2])], "m", None,
    ),
    "two kept nodes read one value": (
        "(float[2,2] x) => (float[2,2] y) { a = Relu(x) [b] b = Abs(a) [c] c = Neg(a) d = Add(b, c) y = Add(d, x) }",
        ("b", "c"), [SQUARE], "", None,
    ),
    # What lies between them may be beyond half; where a half node reads it too, it reads a half.
    "kept nodes hand each other floats": (
        """(float[2] x) => (float[2] y, float[2] z, bool[2] n) { [a] h = Abs(x) [b] s = Mul(h, h) [c] r = Sqrt(s)
        [d] y = Neg(r) [e] z = Relu(r) [f] m = Sigmoid(r) [g] n = IsNaN(m) }""",
        ("b", "c", "f"), [feed(x=[300, 1e-5])], "n", 6,
    ),
    # Numbers beyond half precision reach a kept node, and leave it, though half nodes read them as well.
    "kept nodes read inputs and write outputs as they are": (
        """(float[2] x, float[2] v) => (float[2] y, float[2] z, float[2] w)
        { [a] y = Mul(x, x) [b] t = Sigmoid(y) [c] z = Neg(t) [d] w = Abs(v) }""",
        ("a", "d"), [feed(x=[300.1, -2], v=[-1e9, 1e-9])], "yw", 2,
    ),
    # Nothing tells onnx that it gives floats, and no cast stood between it and the nodes behind it.
    "kept nodes stand behind an operator of ONNX Runtime's own": (
        """(float[2] x) => (float[2] y) { [a] h = Abs(x) [b] s = com.microsoft.Gelu(h) [c] r = Sqrt(s) [d] q = Neg(r)
        [e] p = Mul(r, q) [f] y = Neg(p) }""",
        ("b", "d"), [feed(x=[9, 4])], "", None,
    ),
    **{
        f"{node[:4]} has no half precision": (
            f"(float[1,4] x) => (float[1,4] y) {{ a = Relu(x) b = Neg(x) f = IsInf(b) n = {node} y = Abs(n) }}",
            (), [feed(x=[[1, -2, 3, 0.5]])], "", None,
        )
        for node in ("Celu(a)", "MeanVarianceNormalization<axes = [1]>(a)", "Where(f, a, b)")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_the_fp16_form_computes_the_same_with_what_is_kept_in_float32(name: str, tmp_path: Path) -> None:
    text, kept, samples, exact, casts = HALVES[name]
    model = load_model(parse_model(f"{HEAD} {text}", tmp_path / "m.onnx"))
    half = convert_to_fp16(model, kept, tmp_path / "h.onnx").model
    for sample in samples:
        wanted, got = (
            CpuSession(each.path, SessionSettings(level=Level.DISABLED)).run(sample) for each in (model, half)
        )
        assert [*got] == [*wanted]
        for output, value in wanted.items():
            np.testing.assert_allclose(got[output], value, rtol=0 if output in exact else 2e-3, atol=1e-3)
            assert output not in exact or np.array_equal(got[output], value)
    proto = read_proto(half)
    # ONNX asks that nodes stand after those that they read, in bodies too; edgekit refuses a model where it is not so.
    onnx.checker.check_model(proto)
    nodes = proto.graph.node
    assert len({node.name for node in nodes}) == len(nodes)
    assert casts is None or sum(node.op_type == "Cast" for node in nodes) == casts


def test_weights_stored_as_integers_become_halves(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[1,2] x) => (float[1,2] y)
        <int8[2,2] w = {1, 2, 3, -4}, float s = {0.5}> { d = DequantizeLinear(w, s) y = MatMul(x, d) }"""
    half = convert_to_fp16(load_model(parse_model(text, tmp_path / "m.onnx")), (), tmp_path / "h.onnx").model
    sample = {"x": np.array([[1, 2]], np.float32)}
    assert np.array_equal(CpuSession(half.path, SessionSettings()).run(sample)["y"], [[3.5, -3]])
    assert [tensor.data_type for tensor in read_proto(half).graph.initializer] == [onnx.TensorProto.FLOAT16]


def test_weights_beyond_the_largest_half_are_named(tmp_path: Path) -> None:
    text = f"{HEAD} (float[2] x) => (float[2] y) <float[2] w = {{1.0, 100000.0}}> {{ y = Mul(x, w) }}"
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    assert convert_to_fp16(model, (), tmp_path / "h.onnx").clamped == ("w",)


def test_an_epsilon_that_half_precision_rounds_to_zero_is_raised(tmp_path: Path) -> None:
    norms = " ".join(
        f"[{name}] {name} = LayerNormalization<axis=-1, epsilon={epsilon}>(x, w)"
        for name, epsilon in (("a", "1.0e-12"), ("b", "1.0e-5"), ("c", "1.0e-12"))
    )
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[2,4] x) => (float[2,4] a, float[2,4] b, float[2,4] c)
        <float[4] w = {{1, 2, 3, 4}}> {{ {norms} }}"""
    half = convert_to_fp16(load_model(parse_model(text, tmp_path / "m.onnx")), ("c",), tmp_path / "h.onnx")
    assert half.raised == ("a",)
    found = {node.name: node.attribute for node in read_proto(half.model).graph.node if node.attribute}
    epsilons = [next(each.f for each in found[name] if each.name == "epsilon") for name in "abc"]
    assert epsilons == pytest.approx([1e-7, 1e-5, 1e-12])


@pytest.mark.parametrize(
    "body",
    [
        "(float[1,8] x) => (float[1,8] y) { h = com.microsoft.QuickGelu(x) [n] t = MatMul(h, w) y = Relu(t) }",
        # A prepared file states the shapes of weights that were Constant nodes.
        "(float[1,8] x) => (float[1,8] y) <float[8,8] w> { [n] y = Gemm<transB = 1>(x, w) }",
        """(float[1,4,8] x) => (float[1,4,8] y)
        { [n] q = MatMul(x, w) [a] y = Attention<q_num_heads = 2, kv_num_heads = 2>(q, q, q) }""",
    ],
    ids=["behind ONNX Runtime's own operator", "with a stated shape", "before the Attention of opset 23"],
)
def test_weights_are_quantized_dynamically(body: str, tmp_path: Path) -> None:
    versions = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>'
    model = make_model(f"{versions} g {body}", tmp_path / "m.onnx", {"w": (8, 8)})
    assert compress_weights(model, WeightOnlyOptions(form="dynamic-int8"), tmp_path / "q.onnx").changed == ("n",)
