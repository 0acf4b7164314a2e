"""Each rewrite finds its pattern, leaves what only looks like it, and changes no result beyond what it says."""

import contextlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import pytest
from prepare_models import CASES, Spelling, assert_same, make_model, op_names, rewrite

from edgekit.check.check import check_model
from edgekit.errors import EdgekitError, ModelError, RuntimeRefusal
from edgekit.graph.graph import read_graph
from edgekit.model.model import iterate_tensors, load_model
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.fix import FIXES, REQUIRED_REWRITES, REWRITES, TARGET_REWRITES, fix_model
from edgekit.target import load_target


@pytest.mark.parametrize("id_", [id_ for id_, case in CASES.items() if case.pattern])
def test_the_pattern_is_rewritten_and_the_result_stays(tmp_path: Path, id_: str) -> None:
    case = CASES[id_]
    edit = (lambda proto: proto.graph.node[0].input.append("")) if id_ == "trailing-inputs" else None
    model = make_model(case.pattern, tmp_path / "m.onnx", opset=case.opset, edit=edit)
    fixed = fix_model(model, tmp_path / "out.onnx", [id_])
    assert [(fix.id, len(fix.nodes)) for fix in fixed.fixes] == [(id_, case.sites)]
    # onnx does not know what ONNX Runtime has in ONNX's own domain.
    if "SimplifiedLayerNormalization" not in op_names(fixed.model.path):
        onnx.checker.check_model(onnx.load(str(fixed.model.path)))
    assert set(case.gone.split()).isdisjoint(op_names(fixed.model.path))
    assert_same(tmp_path, fixed, case.tolerance, seeds=range(4))


SPELLINGS = [(id_, each) for id_, case in CASES.items() for each in case.spellings]
FOUND = [(id_, each, text) for id_, each in SPELLINGS for text in each.list_found()]
APART = [(id_, each, text) for id_, each in SPELLINGS for text in each.list_apart()]


@pytest.mark.parametrize(("id_", "each", "text"), FOUND)
def test_a_pattern_is_known_in_other_spellings(tmp_path: Path, id_: str, each: Spelling, text: str) -> None:
    fixed = rewrite(tmp_path, text, id_, opset=each.opset)
    found = op_names(fixed.model.path)
    assert len([op for op in found if op in each.made.split()]) == 1
    assert set(CASES[id_].gone.split()).isdisjoint(found)
    assert_same(tmp_path, fixed, CASES[id_].tolerance, seeds=[1])


@pytest.mark.parametrize(("id_", "each", "text"), APART)
def test_what_is_nearly_a_pattern_stays(tmp_path: Path, id_: str, each: Spelling, text: str) -> None:
    assert rewrite(tmp_path, text, id_, opset=each.opset).fixes == ()


@pytest.mark.parametrize(("id_", "text"), [(id_, text) for id_, case in CASES.items() for text in case.unrunnable])
def test_a_node_that_no_session_runs_stays(tmp_path: Path, id_: str, text: str) -> None:
    """A check judges such a model too, and says why no session opens it."""
    assert rewrite(tmp_path, text, id_, opset=20).fixes == ()


@pytest.mark.parametrize(
    ("moves", "is_spread"),
    [
        ("m = Pad(q, p, z)", True),
        ("m = Pad(q, p, k)", False),
        ("m = Pad(q, p)", False),
        ("m = Pad(q, p, h)", False),
        ('m = Pad<mode="reflect">(q, p, z)', True),
        ("r = Transpose(q) m = Pad(r, p, z)", True),
        ('m = Resize<mode="linear">(q, , e)', False),
        ("m = Resize(q, , e)", True),
        ("m, n = MaxPool<kernel_shape=[1,1]>(q)", False),
        ("r = Abs(q) m = Transpose(r)", False),
        ("m = Relu(q)", False),
    ],
)
def test_what_moves_quantized_integers_gets_quantizers(tmp_path: Path, moves: str, *, is_spread: bool) -> None:
    text = f"""g (float[2,2,4,4] x, uint8 h) => (float[A,B,C,D] y) <float s = {{0.0625}}, uint8 z = {{7}},
        uint8 k = {{8}}, int64[8] p = {{0,0,1,1,0,0,1,1}}, float[4] e = {{1,1,2,2}}>
        {{ q = QuantizeLinear(x, s, z) {moves} c = com.microsoft.QLinearSigmoid(m, s, z, s, z)
        y = DequantizeLinear(c, s, z) }}"""
    fixed = rewrite(tmp_path, text, "spread-quantizers")
    moving = sum(name in moves for name in ("Pad", "Transpose", "Resize"))
    assert [len(fix.nodes) for fix in fixed.fixes] == [moving] * is_spread
    if is_spread:
        assert_same(tmp_path, fixed, 0)


@pytest.mark.parametrize(
    ("id_", "text"),
    [
        (
            "matmul-to-2d",
            "g (float[1,3,4] x) => (float[1,2,4] y) <float[2,3] w = {1,2,3,4,5,6}> { [y] y = MatMul(w, x) }",
        ),
        ("planar-resize", CASES["planar-resize"].pattern.replace("{ y =", "{ [y] y =")),
    ],
)
def test_a_node_may_have_the_name_of_its_output(id_: str, text: str, tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, text, id_)
    assert fixed.fixes
    assert_same(tmp_path, fixed, 1e-6)


@pytest.mark.parametrize("id_", [id_ for id_, case in CASES.items() if case.stays])
def test_what_only_looks_like_it_stays(tmp_path: Path, id_: str) -> None:
    assert rewrite(tmp_path, CASES[id_].stays, id_, opset=CASES[id_].opset).fixes == ()
    assert op_names(tmp_path / "out.onnx") == op_names(tmp_path / "m.onnx")


@pytest.mark.parametrize(("pads", "shift", "left"), [("0,0,0,0", 100, 0), ("0,1,0,1", 8, 1), ("1,0,1,0", -8, 1)])
def test_before_padding_a_conv_takes_up_the_scale_alone(tmp_path: Path, pads: str, shift: float, left: int) -> None:
    text = f"""g (float[1,2,3,4] x) => (float[1,2,M,N] y) <float a = {{0.5}}, float b = {{{shift}}},
        float[2,2,1,1] w = {{1,2,3,4}}> {{ d = Mul(x, a) e = Add(d, b) y = Conv<pads=[{pads}]>(e, w) }}"""
    fixed = rewrite(tmp_path, text, "scale-to-conv")
    assert op_names(fixed.model.path).count("Add") == left
    assert "Mul" not in op_names(fixed.model.path)
    assert_same(tmp_path, fixed, 1e-6)


@pytest.mark.parametrize(("steps", "direction"), [(3, "reverse"), (3, "forward"), (1, "forward")])
def test_an_lstm_may_return_its_last_state_alone(tmp_path: Path, steps: int, direction: str) -> None:
    text = f"""g (float[{steps},2,4] x, float[1,8,4] w, float[1,8,2] r) => (float[1,2,2] h)
        {{ y, h = LSTM<hidden_size=2, direction="{direction}">(x, w, r) }}"""
    model = make_model(text, tmp_path / "m.onnx", edit=lambda proto: proto.graph.node[0].output.__setitem__(0, ""))
    fixed = fix_model(model, tmp_path / "out.onnx", ["split-lstm"])
    assert op_names(fixed.model.path).count("Tanh") == 2 * steps
    assert_same(tmp_path, fixed, 1e-6, seeds=range(4))


FLAX_NORM = CASES["join-layer-norm"].spellings[0].graph


@pytest.mark.parametrize(
    ("part", "instead", "left"),
    [
        ("i = Mul(n, w)", "i = Mul(n, full)", ["LayerNormalization", "Mul", "Add"]),
        ("y = Add(i, w)", "y = Add(i, full)", ["LayerNormalization", "Add"]),
        ("y = Add(i, w)", "y = Sub(i, w)", ["LayerNormalization", "Sub"]),
        ("y = Add(i, w)", "y = Add(n, w)", ["LayerNormalization"]),
    ],
)
def test_a_scale_along_another_axis_stays(tmp_path: Path, part: str, instead: str, left: list[str]) -> None:
    fixed = rewrite(tmp_path, FLAX_NORM.replace(part, instead), "join-layer-norm")
    assert op_names(fixed.model.path) == left
    assert_same(tmp_path, fixed, 1e-5)


def test_an_older_model_gets_the_opset_of_layer_norms_only_where_it_needs_it(tmp_path: Path) -> None:
    product = FLAX_NORM.replace("n = Div(c, r)", "n = Mul(c, r)")
    fused = "g (float[2,3] x, float[3] w) => (float[2,3] y) { y = com.microsoft.SkipLayerNormalization(x, x, w) }"
    keras = CASES["join-moments"].pattern
    for text, own, opset in (
        (keras, 16, 17), (FLAX_NORM, 15, 17), (product, 15, 15), (fused, 15, 17), (fused, 18, 18),
    ):  # fmt: skip
        model = make_model(text, tmp_path / "m.onnx", opset=own)
        assert prepare_model(model, tmp_path / "out.onnx", {}).opsets["ai.onnx"] == opset


SOFTMAX = "g (float[4,4] x) => (float[4,4] y) { e = Exp(x) s = ReduceSum<axes=[1]>(e) y = Div(e, s) }"


@pytest.mark.parametrize(
    ("id_", "text", "opset", "joined"),
    [
        *(("join-layer-norm", FLAX_NORM, opset, opset == 17) for opset in (16, 17)),
        *(("join-hard-swish", CASES["join-hard-swish"].pattern, opset, opset == 14) for opset in (13, 14)),
        # Before opset 13 a Softmax normalises over all axes from its own to the last.
        ("join-softmax", SOFTMAX, 12, True),
        ("join-softmax", SOFTMAX.replace("[1]", "[0]"), 12, False),
    ],
)
def test_operators_are_written_for_their_opsets(tmp_path: Path, id_: str, text: str, opset: int, joined: bool) -> None:
    assert bool(rewrite(tmp_path, text, id_, opset=opset).fixes) == joined


READ_BY_A_BODY = """g (bool c, float[2] x) => (float[2] y) { a = Identity(x) y = If (c)
    <then_branch = t () => (float[2] u) { u = Neg(a) }, else_branch = e () => (float[2] v) { v = Abs(a) }> }"""
MOVES = " ".join(f"t{at + 1} = Transpose(t{at})" for at in range(1200))
FAR = f"""g (float[3,3] x) => (float[3,3] y)
    <float s = {{0.5}}, int8 z = {{0}}, int8[3,3] w = {{1,-2,3,4,5,-6,7,8,9}}>
    {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) f = DequantizeLinear(w, s) t0 = Gemm(d, f)
    {MOVES} r = QuantizeLinear(t1200, s, z) y = DequantizeLinear(r, s, z) }}"""


@pytest.mark.parametrize(
    ("id_", "text"),
    [
        *((id_, CASES[id_].pattern.replace("float", "double")) for id_ in ("split-hard-swish", "split-hard-sigmoid")),
        ("join-hard-swish", CASES["join-hard-swish"].pattern.replace("float", "double")),
        ("drop-copies", READ_BY_A_BODY),
        # A quantizer far behind a layer is found.
        *((id_, FAR) for id_ in ("float-weights", "complete-units")),
    ],
)
def test_doubles_what_a_body_reads_and_what_is_quantized_far_behind_stay(tmp_path: Path, id_: str, text: str) -> None:
    assert rewrite(tmp_path, text, id_).fixes == ()


def test_a_clip_of_fp16_is_rewritten_in_fp16(tmp_path: Path) -> None:
    rewrite(tmp_path, "g (float16[2,9] x) => (float16[2,9] y) { y = HardSwish(x) }", "split-hard-swish")
    onnx.checker.check_model(onnx.load(str(tmp_path / "out.onnx")), full_check=True)


def test_what_computed_in_float16_computes_in_float32_with_the_same_inputs_and_outputs(tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, CASES["half-to-float"].pattern, "half-to-float").model
    proto = onnx.load(str(fixed.path))
    assert [spec.dtype for spec in (*fixed.inputs, *fixed.outputs)] == [
        "bool", "float16", "float32", "float16", "float32", "float16",
    ]  # fmt: skip
    # One for the input, one for each output of float16, and that which made an output.
    assert op_names(fixed.path).count("Cast") == 4
    assert all(tensor.data_type != onnx.TensorProto.FLOAT16 for tensor in iterate_tensors(proto.graph))
    onnx.checker.check_model(proto, full_check=True)
    assert fix_model(fixed, tmp_path / "again.onnx", ["half-to-float"]).fixes == ()


def test_thresholds_of_trees_stay_float64(tmp_path: Path) -> None:
    text = """g (double[1,3] x) => (double[1,3] y, double[1,3] z)
        <double[3,3] w = {1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0,9.0}>
        { z = MatMul(x, w) y = ai.onnx.ml.Binarizer<threshold=0.5>(x) }"""
    model = make_model(text, tmp_path / "m.onnx", imports=', "ai.onnx.ml" : 1')
    assert fix_model(model, tmp_path / "out.onnx", ["double-to-float"]).fixes == ()
    other = text.replace("y = ai.onnx.ml.Binarizer<threshold=0.5>(x)", "y = Abs(x)")
    assert rewrite(tmp_path, other, "double-to-float").fixes


@pytest.mark.parametrize(
    ("id_", "kind", "share"), [("double-to-float", "double", 1e-6), ("half-to-float", "float16", 2e-3)]
)
def test_weights_of_another_file_become_float32(tmp_path: Path, id_: str, kind: str, share: float) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(kind)}
    text = f"g ({kind}[2,64] x) => ({kind}[2,64] y) {{ y = MatMul(x, w) }}"
    model = make_model(text, tmp_path / "m.onnx", weights=weights, external=True)
    assert model.external_files
    fixed = fix_model(model, tmp_path / "out.onnx", [id_])
    (weight,) = onnx.load(str(fixed.model.path)).graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT
    assert np.array_equal(onnx.numpy_helper.to_array(weight), weights["w"].astype(np.float32))
    assert_same(tmp_path, fixed, share)


def test_float_weights_are_stored_beside_a_node_that_makes_nothing() -> None:
    text = """g (float[1,2] x) => (float[1,2] y) <int8[2,2] w = {1,2,3,4}, float s = {0.5}>
        { d = DequantizeLinear(w, s) y = MatMul(x, d) }"""
    graph = onnx.parser.parse_graph(text)
    graph.node.append(onnx.helper.make_node("Log", ["x"], [], domain="my.domain"))
    assert len(REWRITES["float-weights"](graph, 17)) == 1
    assert [node.op_type for node in graph.node] == ["MatMul", "Log"]


def test_an_input_of_float16_that_is_an_output_stays_so(tmp_path: Path) -> None:
    text = "g (float16[2] x) => (float16[2] x, float16[2] y, float16[2] w) <float16[2] w = {1, 2}> { y = Mul(x, w) }"
    fixed = rewrite(tmp_path, text, "half-to-float")
    assert [spec.name for spec in fixed.model.outputs] == ["x", "y", "w"]
    assert_same(tmp_path, fixed, 2e-3)


def test_a_concat_of_one_tensor_that_makes_an_output_becomes_an_identity(tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, "g (float[2,3] x) => (float[2,3] y) { a = Neg(x) y = Concat<axis=0>(a) }", "drop-copies")
    assert [node.op_type for node in read_graph(fixed.model).nodes] == ["Neg", "Identity"]


def test_a_kernel_is_mirrored_for_a_check_too_but_not_on_the_disk(tmp_path: Path) -> None:
    text = "g (float[1,64,4,4] x) => (float[1,64,6,6] y) { y = ConvTranspose(x, w) }"
    weights = {"w": np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype(np.float32)}
    inside = make_model(text, tmp_path / "m.onnx", weights=weights)
    advice = check_model(inside, load_target("nnapi")).advice
    assert [(each.id, each.gain_nodes) for each in advice] == [("transposed-to-conv", 1)]
    fixed = fix_model(inside, tmp_path / "out.onnx")
    assert (op_names(fixed.model.path), fixed.model.size_bytes < inside.size_bytes + 1000) == (["Conv"], True)
    assert_same(tmp_path, fixed, 1e-6)
    outside = make_model(text, tmp_path / "o.onnx", weights=weights, external=True)
    assert fix_model(outside, tmp_path / "out.onnx").fixes == ()


@pytest.mark.parametrize("wrong", ["group=0", "group=3", "dilations=[1]", "pads=[1], output_padding=[0,1]"])
def test_a_transposed_layer_that_no_session_takes_can_be_checked(tmp_path: Path, wrong: str) -> None:
    text = f"""g (float[1,4,4,4] x) => (float[1,4,A,B] y) <float[4,4,1,1] w = {{1,-2,3,4,5,-6,7,8,9,1,2,3,-4,5,6,7}}>
        {{ y = ConvTranspose<{wrong}>(x, w) }}"""
    assert check_model(make_model(text, tmp_path / "m.onnx"), load_target("nnapi")).verdict == "no"
    assert fix_model(load_model(tmp_path / "m.onnx"), tmp_path / "out.onnx", ["pad-transposed"]).model.node_count == 1


def test_what_helps_some_targets_only_is_not_done_unasked(tmp_path: Path) -> None:
    fixed = fix_model(make_model(CASES["pad-reflect"].pattern, tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert fixed.fixes == ()


def test_an_invalid_node_is_refused_before_any_rewrite(tmp_path: Path) -> None:
    text = CASES["plain-gemm"].pattern
    with pytest.raises(ModelError, match="has 0 inputs, the operator takes 2 to 3"):
        make_model(text, tmp_path / "m.onnx", edit=lambda proto: proto.graph.node[0].ClearField("input"))


@pytest.mark.parametrize("id_", [id_ for id_, case in CASES.items() if case.contradicts])
def test_a_model_that_contradicts_itself_is_refused_or_left_as_it_is(id_: str, tmp_path: Path) -> None:
    with contextlib.suppress(EdgekitError):
        assert rewrite(tmp_path, CASES[id_].contradicts, id_).fixes == ()


def test_an_error_of_a_rewrite_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: onnx.ModelProto, ids: Collection[str]) -> None:
        raise KeyError(*ids)

    monkeypatch.setattr("edgekit.prepare.fix.apply_rewrites", fail)
    with pytest.raises(KeyError):
        rewrite(tmp_path, CASES["plain-gemm"].pattern, "plain-gemm")
    with pytest.raises(RuntimeRefusal, match="ONNX Runtime refuses"):
        rewrite(tmp_path, CASES["conv-to-planes"].contradicts, "conv-to-planes")


def test_every_rewrite_is_tested() -> None:
    elsewhere = {
        "split-attention", "split-grouped-attention", "split-rotary", "idle-add", "idle-nan-guard",
        "sum-to-add", "resize-empty-inputs", "idle-relu", "flatten-to-reshape", "plain-reshape",
    }  # fmt: skip
    assert set(REWRITES) == set(FIXES) | set(TARGET_REWRITES) | set(REQUIRED_REWRITES) == set(CASES) | elsewhere


def test_a_network_along_one_axis_needs_two_reshapes_and_one_for_what_leaves_it(tmp_path: Path) -> None:
    text = """g (float[1,2,9] x, float[1,1,2,7] u)
        => (float[1,2,5] y, float[1,1,2,7] z, float[1,7,2] t, float[1,1,2,7] s)
        <float[2,2,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[1,1,1,1] one = {1}>
        { a = Conv(x, w) b = Relu(a) y = Conv(b, w) z = Add(u, b) t = Transpose<perm=[0,2,1]>(b) s = Add(b, one) }"""
    fixed = rewrite(tmp_path, text, "conv-to-planes")
    found = ["Reshape", "Conv", "Relu", "Reshape", "Conv", "Reshape", "Add", "Transpose"]
    assert [op for op in op_names(fixed.model.path) if op in found] == [*found, "Add"]
    assert [fix.nodes for fix in fixed.fixes] == [("Conv_a", "Relu_b", "Conv_y")]
    assert_same(tmp_path, fixed, 1e-6)


def test_constant_nodes_of_a_graph_that_was_not_optimized_stay_constants(tmp_path: Path) -> None:
    text = """g (float[1,1,4] x) => (float[1,1,4] y) <float[1,1,1] w = {2}>
        { k = Constant<value_float = 3.0>()  m = Mul(x, k)  a = Conv(x, w)  y = Add(a, m) }"""
    fixed = fix_model(make_model(text, tmp_path / "m.onnx"), tmp_path / "out.onnx", ["conv-to-planes"])
    assert op_names(fixed.model.path) == ["Mul", "Reshape", "Conv", "Reshape", "Add", "Reshape"]
    assert "k" in {each.name for each in onnx.load(str(fixed.model.path)).graph.initializer}
