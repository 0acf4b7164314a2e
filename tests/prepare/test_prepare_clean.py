"""The clean graph: what goes, what stays, and that it computes the same."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from prepare_models import ZOO, assert_near, make_inputs, make_model, op_names, prepare, run_model

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.errors import ModelError, RuntimeRefusal, UsageError
from edgekit.graph.inference import infer_model
from edgekit.model.model import Model, load_model
from edgekit.prepare.clean import guard_half, prepare_model, show_model, spread_scalars, strip_casts, write_scalers
from edgekit.prepare.fix import fix_model
from edgekit.prepare.opset import MAX_IR_VERSION, MAX_OPSET, choose_opset, convert_opset, lower_ir_version
from edgekit.prepare.rewrites.fused import split_fused
from edgekit.prepare.rewrites.planes import squeeze_late

CONV = """g (float[1,1,4,4] x, float[1,1,3,3] w, float[1] b) => (float[1,1,2,2] y)
    <float[1,1,3,3] w = {1,2,3,4,5,6,7,8,9}, float[1] b = {0.5}>
    { c = Conv(x, w, b)  i = Identity(c)  d = Dropout(i)  y = Relu(d) }"""
QDQ = """g (float[1,4] x) => (float[1,4] y) <float s = {0.1}, uint8 z = {128}, float t = {0.2}>
    { a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)  c = Relu(b)
    d = QuantizeLinear(c, t, z)  e = DequantizeLinear(d, t, z)  f = Transpose<perm = [0, 1]>(e)
    h = QuantizeLinear(f, t, z)  y = DequantizeLinear(h, t, z) }"""


PREVIEW = """g (float[1,3,6,7] x) => (float[A,B,C,D] y) {
    a = ImageScaler<scale=0.5, bias=[1.0,-2.0,3.0]>(x) b = Affine<alpha=2.0, beta=-1.0>(a) y = CROP(b) }"""


def reverse_nodes(proto: onnx.ModelProto) -> None:
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def test_an_old_model_becomes_new_and_clean(tmp_path: Path) -> None:
    model, prepared = prepare(CONV, tmp_path, opset=7, ir_version=3)
    assert (prepared.opsets, prepared.ir_version) == ({"ai.onnx": 17}, 8)
    assert [value.name for value in onnx.load(str(prepared.path)).graph.input] == ["x"]
    # From IR version 4 on a caller may override an initializer that is an input, so that it is no constant.
    newer = make_model(CONV, tmp_path / "n.onnx", ir_version=4)
    shown = [[spec.name for spec in show_model(each, tmp_path / "s.onnx").inputs] for each in (model, newer)]
    assert shown == [["x"], ["x", "w", "b"]]


def test_the_erfc_of_keras_is_the_gelu_of_onnx(tmp_path: Path) -> None:
    """Keras exports an exact GELU by tf2onnx, which leaves TensorFlow's Erfc and turns both its factors."""
    text = """g (float[1,3,4] x) => (float[1,4,3] y, float[1,3,4] z) <float r = {0.70710677}, float h = {0.5}>
        { n = Neg(x) a = Mul(n, r) b = Transpose<perm = [0, 2, 1]>(a) c = Erfc(b) d = Mul(h, x)
        e = Transpose<perm = [0, 2, 1]>(d) y = Mul(e, c) z = Erfc(x) }"""
    _, prepared = prepare(text, tmp_path, opset=15)
    x = np.linspace(-3, 3, 12, dtype=np.float32).reshape(1, 3, 4)
    outputs, erfc = run_model(prepared.path, {"x": x}), np.vectorize(math.erfc)
    np.testing.assert_allclose(outputs["y"], (x / 2 * erfc(-x * math.sqrt(0.5))).swapaxes(1, 2), atol=1e-6)
    np.testing.assert_allclose(outputs["z"], erfc(x), atol=1e-6)
    fixed = fix_model(prepared, tmp_path / "fixed.onnx", ["join-gelu"])
    assert sorted(op_names(fixed.model.path)) == ["Add", "Erf", "Gelu", "Neg", "Transpose"]
    assert_near(prepared, fixed.model, 1e-5)


def test_attributes_that_an_older_runtime_lacks_are_not_added(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 writes `causal` and others in a changed graph, and 1.29 refuses what it does not know."""
    text = """g (float[1,1,16] q, float[1,1,8] k, float[1,1,8] v, float[1,1,2,8] a, float[1,1,2,8] b, int32[1] n,
        int32 t) => (float[1,1,16] y, float[1,1,3,8] c, float[1,1,3,8] d)
        { i = Identity(q)
        y, c, d = com.microsoft.GroupQueryAttention<kv_num_heads=1, num_heads=2>(i, k, v, a, b, n, t) }"""
    _, prepared = prepare(text, tmp_path)
    (node,) = onnx.load(str(prepared.path)).graph.node
    assert sorted(each.name for each in node.attribute) == ["kv_num_heads", "num_heads"]


SAME: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a convolution of old": (CONV, "Conv Relu", {"opset": 7, "ir_version": 3}),
    # ONNX Runtime takes such a file, and some exporters write it.
    "nodes before those that they read from": (CONV, "Conv Relu", {"edit": reverse_nodes}),
    "the same in an older opset": (CONV, "Conv Relu", {"edit": reverse_nodes, "opset": 11}),
    "q and dq stay where they are": (QDQ, "Q DQ Relu Q DQ Transpose Q DQ", {"opset": 18}),
    "fp16 gets no casts": (
        "g (float16[1,8] x) => (float16[1,8] y) { a = Relu(x)  b = Softmax(a)  c = Sigmoid(b)  y = Mul(c, a) }",
        "Relu Softmax Sigmoid Mul",
        {"opset": 18},
    ),
    "operators without a CPU kernel stay whole": (
        "g (float[1,8] x) => (float[1,8] y) { a = HardSwish(x)  b = Mish(a)  c = Identity(b)  y = HardSwish(c) }",
        "HardSwish Mish HardSwish",
        {"opset": 18},
    ),
    "a scaler": (
        """g (float[2,3] x, int64[2,3] i) => (float[2,1] y, float[2,3] z) <float[3,1] w = {1,2,3}, float[1,1] b = {7}>
        { s = ai.onnx.ml.Scaler<offset = [1.5, -2.0, 40.0], scale = [0.3, 7.0, 0.01]>(x) m = MatMul(s, w) y = Add(m, b)
        z = ai.onnx.ml.Scaler<offset = [2.5], scale = [0.7]>(i) }""",
        "Sub Mul Gemm Cast Sub Mul",
        {"imports": ', "ai.onnx.ml" : 1'},
    ),
    "the names of classes": (
        """g (float[1,3] x, int64[4] h) => (int64[?,?] y, float[1,1] z, int64[?,?] w) <int64[3] c = {5,6,-7}>
        { a = ArgMax<axis = 1>(x) y = ai.onnx.ml.ArrayFeatureExtractor(c, a)
        z = ai.onnx.ml.ArrayFeatureExtractor(x, a) w = ai.onnx.ml.ArrayFeatureExtractor(h, a) }""",
        "ArgMax Reshape Reshape Gather Gather Gather",
        {"imports": ', "ai.onnx.ml" : 1'},
    ),
    "labels that have the shape of their input": (
        """g (int64[2,3] i) => (float[?,?] y) <float[3,1] w = {1,2,3}>
        { s = ai.onnx.ml.LabelEncoder<classes_strings = ["a", "b"]>(i)
        n = ai.onnx.ml.LabelEncoder<classes_strings = ["b"], default_int64 = 4>(s) f = Cast<to=1>(n)
        y = MatMul(f, w) }""",
        "LabelEncoder Reshape LabelEncoder Reshape Cast MatMul",
        {"imports": ', "ai.onnx.ml" : 1'},
    ),
    "lists of tensors": (
        """g (float[1,2] x) => (float[2,2] y, float[2,1,2] z, float[1,2] w, float[1,2] v) <int64 i = {-1}> {
        a = Relu(x) b = Abs(x) o = Optional(a) p = OptionalGetElement(o) s = SequenceConstruct(p, b)
        y = ConcatFromSequence<axis = 0>(s) z = ConcatFromSequence<axis = 0, new_axis = 1>(s) c = SequenceAt(s, i)
        w = Neg(c) v = Neg(p) }""",
        "Relu Neg Abs Neg Unsqueeze Unsqueeze Concat Concat",
        {"opset": 17},
    ),
    "the constant that a DQ gives a Q": (
        """g (float[1,2] x) => (float[1,2] y) <float s = {0.1}, int8[2,2] w = {1,-2,3,4}, float[2] v = {0.1, 0.3},
        int8[2] o = {0, 1}, uint8 z = {7}> {
        a = DequantizeLinear(w, v, o) b = Identity(a) c = QuantizeLinear(b, s, z) d = DequantizeLinear(c, s, z)
        y = MatMul(x, d) }""",
        "DQ MatMul",
        {"opset": 17},
    ),
    "zero points that ONNX defines": (
        """g (float[1,2,3] x) => (float[1,3,2] y) <float s = {0.1}, float[3] t = {0.1, 0.2, 0.3}, int8 z = {3}> {
        a = QuantizeLinear(x, s) b = DequantizeLinear(a, s) c = QuantizeLinear(b, s, z)
        d = Transpose<perm = [0, 2, 1]>(c) e = DequantizeLinear(d, s)
        f = QuantizeLinear(e, t) y = DequantizeLinear(f, t) }""",
        "Q DQ Q Transpose DQ Q DQ",
        {"opset": 13},
    ),
    # OnnxMLTools wrote what ONNX had as a preview, and ONNX Runtime's CPU still has it.
    **{
        f"a preview with {crop}": (
            PREVIEW.replace("CROP", f"Crop<{crop}>"), "Mul Add Mul Add Slice", {"opset": 7, "ir_version": 8}
        )
        for crop in ("border=[1,2,0,3]", "border=[0,0,0,0]", "border=[1,2,0,0], scale=[3,4]")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_the_graph_holds_these_operators_and_computes_the_same(tmp_path: Path, name: str) -> None:
    text, ops, how = SAME[name]
    model, prepared = prepare(text, tmp_path, **how)
    short = {"QuantizeLinear": "Q", "DequantizeLinear": "DQ"}
    assert " ".join(short.get(op, op) for op in op_names(prepared.path)) == ops
    assert_near(model, prepared)


def test_a_shape_that_constants_determine_is_folded(tmp_path: Path) -> None:
    text = """g (float[2,6] x) => (float[?,?] y) { s = Shape(x)  t = Constant<value = int64[1] {0}>()
        n = Gather(s, t)  m = Constant<value = int64[1] {-1}>()  r = Concat<axis = 0>(m, n)  y = Reshape(x, r) }"""
    _, prepared = prepare(text, tmp_path)
    assert (op_names(prepared.path), prepared.outputs[0].shape) == (["Reshape"], (6, 2))


def test_an_output_whose_axes_are_named_as_the_inputs_has_the_sizes_that_follow(tmp_path: Path) -> None:
    text = """g (float[1,1,h,w] x) => (float[1,1,h,w] y) <float[1,1,4,4] k = {1,2,3,4,5,6,7,8,9,0,1,2,3,4,5,6}>
        { y = ConvTranspose<strides = [2, 2], pads = [3, 3, 3, 3]>(x, k) }"""
    assert prepare(text, tmp_path, {"h": 6, "w": 8})[1].outputs[0].shape == (1, 1, 8, 12)


@pytest.mark.parametrize(
    ("values", "opset", "op"),
    [("offset = [1.5], scale = [0.3]", 7, "Mul"), ("offset = [1.5], scale = [0.3]", 6, "Scaler"),
     ("scale = [0.3]", 7, "Scaler"), ("offset = [1.5]", 7, "Scaler")],
)  # fmt: skip
def test_a_scaler_stays_where_no_operators_can_replace_it(tmp_path: Path, values: str, opset: int, op: str) -> None:
    text = f"g (float[2,3] x) => (float[2,3] y) {{ y = ai.onnx.ml.Scaler<{values}>(x) }}"
    model = make_model(text, tmp_path / "m.onnx", opset=opset, imports=', "ai.onnx.ml" : 1')
    proto = onnx.load(str(model.path))
    write_scalers(proto.graph, opset)
    assert proto.graph.node[-1].op_type == op


@pytest.mark.parametrize(
    ("nodes", "left"),
    [("c = Conv(x, w, b)  m = Mul(s, c)  y = Add(m, t)", ["Conv"]),
     ("c = Conv(x, w)  m = Mul(c, s)  y = Add(t, m)", ["Conv"]),
     ("c = Conv(x, w, b)  y = Add(t, c)", ["Conv"]),
     ("c = Conv(x, w, b)  m = Mul(s, c)  a = Add(m, t)  y = Add(a, c)", ["Conv", "Mul", "Add", "Add"]),
     ("c = Conv(x, w, b)  m = Mul(s, c)  a = Add(m, t)  y = Add(a, m)", ["Conv", "Add", "Add"]),
     ("c = Conv(x, w, b)  m = Mul(c, c)  y = Add(m, t)", ["Conv", "Mul", "Add"]),
     ("c = Conv(x, w, b)  m = Mul(s, c)  y = Mul(m, t)", ["Conv"]),
     ("c = Relu(x)  m = Mul(s, c)  y = Add(m, t)", ["Relu", "Mul", "Add"])],
)  # fmt: skip
def test_numbers_that_scale_and_shift_a_convolution_are_folded(tmp_path: Path, nodes: str, left: list[str]) -> None:
    text = f"""g (float[1,2,4,4] x) => (float[1,2,4,4] y)
        <float[2,2,1,1] w = {{1,-2,3,0.5}}, float[2] b = {{0.5,-1}}, float[1] s = {{1.5}}, float t = {{-0.25}}>
        {{ {nodes} }}"""
    model, prepared = prepare(text, tmp_path)
    assert op_names(prepared.path) == left
    assert_near(model, prepared, 1e-5)
    for tensor in onnx.load(str(prepared.path)).graph.initializer:
        assert len(left) == 1 or list(tensor.dims) != [2, 1, 1]  # what cannot be folded stays a number


FUSED = """g (float[1,2,4,4] x, float[1,3,4,4] s) => (float[1,3,4,4] z, float[1,3,4,4] c, float[1,3,4,4] n,
    float[8,2] e, float[8,2] q, float[8,2] p, float[1,2,4,4] a, float[1,2,4,4] b)
    <float[3,2,1,1] w = {1,-2,3,4,-5,6}, float[3] v = {1,-2,3}, float[2,4] m = {1,-2,3,4,-5,6,7,-8},
    float[2] u = {1,-1}, int64[2] t = {8,4}>
    { z = com.microsoft.FusedConv<activation="HardSigmoid", activation_params=[0.1, 0.4]>(x, w, v, s)
    c = com.microsoft.FusedConv<activation="Clip", activation_params=[-1.0, 2.0]>(x, w)
    n = com.microsoft.FusedConv(x, w, v, s) r = Reshape(x, t)
    e = com.microsoft.FusedGemm<transB=1, alpha=0.5, activation="Elu", activation_alpha=0.3>(r, m, u)
    q = com.microsoft.FusedGemm<transB=1, activation="Selu", activation_alpha=0.3, activation_gamma=2.0>(r, m)
    p = com.microsoft.FusedGemm<transB=1, activation="Relu">(r, m, u)
    a = com.microsoft.FusedMatMul<transB=1, alpha=0.5>(x, x) b = com.microsoft.FusedMatMul<transA=1>(x, x) }"""


@pytest.mark.parametrize("opset", [10, 13])
def test_what_a_session_fused_is_split(tmp_path: Path, opset: int) -> None:
    # Before opset 11 each Gemm has a bias.
    text = FUSED if opset > 10 else FUSED.replace("(r, m)", "(r, m, u)")
    model, prepared = prepare(text, tmp_path, opset=opset, to=opset)
    assert {node.domain for node in onnx.load(str(prepared.path)).graph.node} == {""}
    plain = "Conv Gemm MatMul Add Transpose Mul HardSigmoid Clip Elu Selu Relu Reshape"
    assert set(op_names(prepared.path)) == set(plain.split())
    assert_near(model, prepared, 1e-5, seeds=range(3))


def test_a_vector_is_not_transposed_and_a_fused_clip_may_have_one_bound(tmp_path: Path) -> None:
    text = """g (float[3] x, float[2,3] w, float[1,2,4] k) => (float[2] y, float[1,1,4] z) <float[1,2,1] c = {1,-2}>
        { y = com.microsoft.FusedMatMul<transA=1, transB=1>(x, w)
        z = com.microsoft.FusedConv<activation="Clip", activation_params=[0.5]>(k, c) }"""
    proto = infer_model(onnx.load(str(make_model(text, tmp_path / "m.onnx").path)))
    assert len(split_fused(proto.graph, 13)) == 2
    assert [(node.op_type, len(node.input)) for node in proto.graph.node] == [
        ("Transpose", 1), ("MatMul", 2), ("Conv", 2), ("Clip", 3)
    ]  # fmt: skip
    assert (proto.graph.node[1].input[0], proto.graph.node[-1].input[2]) == ("x", "")


def test_what_a_session_saved_is_prepared_as_its_source(tmp_path: Path) -> None:
    """Its weights too, also those that shape inference leaves out because they are large."""
    text = """g (float[1,2,6,6] x) => (float[1,2000] y)
        <float[3,2,3,3] w = {W}, float[3] b = {1,-2,3}, float[3,2000] v = {V}>
        { c = Conv(x, w, b) r = LeakyRelu<alpha=0.3>(c) p = GlobalAveragePool(r) f = Flatten(p)
        g = Gemm(f, v) y = Tanh(g) }"""
    for name, count in {"W": 54, "V": 6000}.items():
        text = text.replace(f"{{{name}}}", f"{{{','.join(f'{(7 * i) % 11 - 5}.5' for i in range(count))}}}")
    model = make_model(text, tmp_path / "m.onnx")
    optimize_graph(model.path, tmp_path / "saved.onnx", SessionSettings(level=Level.EXTENDED))
    saved = load_model(tmp_path / "saved.onnx")
    assert {"FusedConv", "FusedGemm"} <= set(op_names(saved.path))
    one, two = (prepare_model(each, tmp_path / f"{each.name}-out.onnx") for each in (model, saved))
    assert op_names(one.path) == op_names(two.path)
    assert_near(one, two, 1e-5)


@pytest.mark.parametrize(
    "nodes",
    [
        "y = com.microsoft.FusedMatMul<transBatchA=1>(x, x)",
        'y = com.microsoft.FusedConv<activation="Gelu">(x, w)',
        "y = my.FusedMatMul(x, x)",
        "f = com.microsoft.Opaque(x) y = com.microsoft.FusedMatMul(f, f)",
        "f = com.microsoft.Opaque(x) y = com.microsoft.FusedMatMul<transA=1>(x, f)",
        "y = com.microsoft.FusedMatMul(x)",
        "y = com.microsoft.FusedMatMul(x, x, x)",
        'y = com.microsoft.FusedConv<activation="Clip", activation_params="ab">(x, w)',
        'y = com.microsoft.FusedConv<activation="Clip", activation_params=["a", "b"]>(x, w)',
    ],
)
def test_what_cannot_be_split_stays(tmp_path: Path, nodes: str) -> None:
    text = f"g (float[2,3,3] x) => (float[2,3,3] y) <float[3,3,1] w = {{1,2,3,4,5,6,7,8,9}}> {{ {nodes} }}"
    proto = onnx.load(str(make_model(text, tmp_path / "m.onnx").path))
    assert split_fused(infer_model(proto).graph, 13) == ()


@pytest.mark.parametrize(("axis", "kept"), [(3, 13), (-1, 13), (2, 11)])
def test_an_old_qlinear_softmax_gets_the_definition_of_today(tmp_path: Path, axis: int, kept: int) -> None:
    """ONNX Runtime moves a Transpose through it, and then the old definition runs over all axes behind."""
    text = f"""g (float[1,4,3,5] x) => (float[1,4,3,5] y)
        <float s = {{0.0625}}, uint8 z = {{0}}, float p = {{0.00390625}}>
        {{ q = QuantizeLinear(x, s, z) t = Transpose<perm=[0,2,3,1]>(q)
        c = com.microsoft.QLinearSoftmax<axis={axis}, opset=11>(t, s, z, p, z)
        u = Transpose<perm=[0,3,1,2]>(c) y = DequantizeLinear(u, p, z) }}"""
    model, prepared = prepare(text, tmp_path)
    (node,) = (node for node in onnx.load(str(prepared.path)).graph.node if node.op_type == "QLinearSoftmax")
    assert {each.name: each.i for each in node.attribute}["opset"] == kept
    if kept == 13:
        assert_near(model, prepared)


@pytest.mark.parametrize(("opset", "spread"), [(6, ()), (7, ("Add_y",))])
def test_a_number_is_spread_where_operators_broadcast(tmp_path: Path, opset: int, spread: tuple[str, ...]) -> None:
    text = """g (float[1,2,4,4] x) => (float[1,2,4,4] y) <float[2,2,1,1] w = {1,-2,3,0.5}, float t = {-0.25}>
        { c = Conv(x, w) [Add_y] y = Add(c, t) }"""
    proto = onnx.load(str(make_model(text, tmp_path / "m.onnx", opset=opset).path))
    assert spread_scalars(proto.graph, opset) == spread


KERAS = "g ({dims} x) => (float[1,2,7] y, float[1,2,8] z) {constants} {{ {body} }}"
LINE_CONSTANTS = """<float[2,2,1,2] w = {1,-2,3,0.5,2,1,-1,0.25}, float[1,2,1] b = {1,-3}, float[2,1] s = {0.5,2},
    float h = {9}, float[2] g = {1,2}, float[2] v = {3,4}, int64[1] a = {2}, int64[1] m = {-2}>"""


@pytest.mark.parametrize(
    ("body", "left"),
    [
        # tf2onnx writes so what was a Conv1D with a bias in Keras.
        (
            """c = Conv<pads=[0,1,0,1]>(x, w) d = Squeeze(c, a) e = Add(d, b) f = Relu(e) u = Unsqueeze(f, m)
            i = Conv(u, w) j = Squeeze(i, m) k = Add(j, b) z = Sigmoid(k) l = Unsqueeze(k, a) n = Conv(l, w)
            y = Squeeze(n, a)""",
            ["Conv", "Relu", "Conv", "Squeeze", "Sigmoid", "Conv", "Squeeze"],
        ),
        # What an app or another operator reads too, has the axis no more.
        (
            """c = Conv<pads=[0,1,0,1]>(x, w) d = Squeeze(c, m) e = PRelu(d, s) f = BatchNormalization(e, g, g, g, v)
            k = Mul(e, f) o = Concat<axis=1>(k, e) p = Clip(o, , h) q, t = Split<axis=1>(p) l = Unsqueeze(p, m)
            r, i = Split<axis=1>(l) n = Conv(i, w) j = Squeeze(n, m) z = Add(j, b) y = MaxPool<kernel_shape=[2]>(z)""",
            None,
        ),
    ],
)
def test_elementwise_nodes_follow_a_conv_before_the_squeeze_behind_it(
    body: str, left: list[str] | None, tmp_path: Path
) -> None:
    text = KERAS.format(dims="float[1,2,1,8]", constants=LINE_CONSTANTS, body=body)
    model, prepared = prepare(text, tmp_path)
    made = [node.op_type for node in onnx.load(str(prepared.path)).graph.node]
    assert_near(model, prepared)
    if left is not None:
        assert sorted(made) == sorted(left)
    producers = {node.output[0]: node for node in onnx.load(str(prepared.path)).graph.node}
    for node in producers.values():
        assert not (node.op_type in {"Add", "Relu", "PRelu"} and producers[node.input[0]].op_type == "Squeeze")


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("c = Conv(x, w) d = Squeeze<axes=[2]>(c) [at] e = Relu(d) [up] u = Unsqueeze<axes=[-2]>(e)", ("at", "up")),
        ("c = Conv(x, w) d = Squeeze<axes=[-1]>(c) [at] e = Mul(d, s)", ("at",)),
        # Another axis comes back; the channels go; two axes go; no Conv, or one of lines; a sum with what has no axis.
        ("c = Conv(x, w) d = Squeeze<axes=[2]>(c) u = Unsqueeze<axes=[3]>(d)", ()),
        ("c = Conv(x, t) d = Squeeze<axes=[1]>(c) e = Relu(d)", ()),
        ("c = Conv(x, w) d = Squeeze<axes=[2,3]>(c) e = Relu(d)", ()),
        ("d = Squeeze<axes=[2]>(x) e = Relu(d)", ()),
        ("k = Squeeze<axes=[2]>(x) c = Conv(k, r) d = Squeeze<axes=[2]>(c) e = Relu(d)", ()),
        ("c = Conv(x, w) d = Squeeze<axes=[2]>(c) k = Squeeze<axes=[2]>(x) e = Add(d, k)", ()),
        ("c = Conv(x, w) d = Squeeze<axes=[2]>(c) e = Concat<axis=2>(d, d)", ()),
        ("c = Conv(x, w) d = Squeeze<axes=[2]>(c) e = Add(d, f)", ()),
    ],
)
def test_only_a_squeeze_of_a_plane_goes_late(body: str, names: tuple[str, ...], tmp_path: Path) -> None:
    constants = """<float[2,2,1,1] w = {1,-2,3,0.5}, float[1,2,1,1] t = {1,2}, float[2,2,1] r = {1,2,3,4},
        float[2,1] s = {0.5,2}, float[1,1,2,1] f = {1,2}>"""
    text = f"g (float[1,2,1,1] x) => (float[1,2,1,1] y) {constants} {{ {body} y = Neg(x) }}"
    proto = onnx.load(str(make_model(text, tmp_path / "m.onnx", opset=11).path))
    before = [node.op_type for node in proto.graph.node]
    assert squeeze_late(proto.graph, 11) == names
    assert names or [node.op_type for node in proto.graph.node] == before
    onnx.checker.check_model(proto, full_check=True)


def test_names_are_unique_stable_and_kept_where_they_can_be(tmp_path: Path) -> None:
    text = "g (float[3] x) => (float[3] y) { [same] a = Abs(x) [same] b = Neg(a) y = Exp(b) }"
    graph = onnx.load(str(prepare(text, tmp_path)[1].path)).graph
    assert [node.name for node in graph.node] == ["same", "same_1", "Exp_y"]


def test_metadata_and_producer_stay_and_stamps_go(tmp_path: Path) -> None:
    def describe(proto: onnx.ModelProto) -> None:
        proto.producer_name = "exporter"
        helper.set_model_props(proto, {"author": "me", "stride": "32"})

    written = onnx.load(str(prepare(CONV, tmp_path, edit=describe)[1].path))
    assert {entry.key: entry.value for entry in written.metadata_props} == {"author": "me", "stride": "32"}
    assert (written.producer_name, written.graph.name) == ("exporter", "g")
    assert [(entry.domain, entry.version) for entry in written.opset_import] == [("", 17)]


@pytest.mark.parametrize(
    ("inputs", "weights"),
    [
        ("float[1,8] x", "int64[2] s = {4, 2}, float16[2] w = {1, 2}, float f = {2}"),
        ("float[1,8] x, float16[2] w", "int64[2] s = {4, 2}, float f = {2}"),
        ("float[1,8] x, int64[2] s, float f", "float16[2] w = {1, 2}"),
    ],
)
def test_fp16_weights_or_inputs_alone_get_no_casts_either(tmp_path: Path, inputs: str, weights: str) -> None:
    text = f"""g ({inputs}) => (float16[4,2] y) <{weights}> {{ m = Mul(x, f)  c = Cast<to = 10>(m)
        h = Reshape(c, s)  a = Mul(h, w)  b = Softmax(a)  y = HardSwish(b) }}"""
    assert op_names(prepare(text, tmp_path)[1].path) == ["Mul", "Cast", "Reshape", "Mul", "Softmax", "HardSwish"]


def test_only_functions_that_read_fp16_are_guarded(tmp_path: Path) -> None:
    text = """g (float16[1,8] x, float[1,8] f) => (float16[1,8] y, float[1,8] z)
        { a = Neg(x)  b = HardSwish(a)  y = Add(b, x)  n = Nonsense(x)  z = HardSwish(f)
        o = my.HardSwish(x)  c = Cast<to = 1>(x) }"""
    proto = onnx.load(str(make_model(text, tmp_path / "m.onnx", imports=', "my" : 1').path))
    guard_half(proto)
    reads = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type != "Cast"}
    assert [node.output[0] for node in proto.graph.node if node.op_type == "Cast"] == ["EdgekitGuard1_a", "b", "c"]
    assert reads == {"a": "x", "EdgekitGuard1_b": "EdgekitGuard1_a", "y": "b", "n": "x", "z": "f", "o": "x"}
    proto.graph.value_info.extend(onnx.ValueInfoProto(name=name) for name in ("EdgekitGuard1_b", "b"))
    assert strip_casts(proto.graph)
    assert [value.name for value in proto.graph.value_info] == ["b"]
    assert [list(node.input) for node in proto.graph.node] == [["x"], ["a"], ["b", "x"], ["x"], ["f"], ["x"], ["x"]]
    assert not strip_casts(proto.graph)


def test_an_output_without_a_type_stays_one(tmp_path: Path) -> None:
    def forget(proto: onnx.ModelProto) -> None:
        proto.graph.output[0].ClearField("type")
        proto.graph.ClearField("name")

    text = "g (float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Relu(x) z = Neg(x) }"
    _, prepared = prepare(text, tmp_path, edit=forget)
    assert [(spec.name, spec.shape) for spec in prepared.outputs][1] == ("z", (2, 3))
    assert onnx.load(str(prepared.path)).graph.name == "graph"  # ONNX wants one


def test_what_no_output_needs_is_gone_but_not_what_a_body_reads(tmp_path: Path) -> None:
    text = (
        "g (bool c, float[2] x) => (float[2] y) <float[2] k = {1, 2}, float[2] idle = {3, 4}>"
        "{ dead = Add(x, idle)  m = Mul(x, k)  y = If(c) <"
        "then_branch = t () => (float[2] p) { p = Identity(m) }, else_branch = e () => (float[2] q) { q = Neg(x) }> }"
    )
    _, prepared = prepare(text, tmp_path)
    assert op_names(prepared.path) == ["Mul", "If"]
    assert [tensor.name for tensor in onnx.load(str(prepared.path)).graph.initializer] == ["k"]


def test_constants_of_fp16_functions_are_those_of_the_model_again(tmp_path: Path) -> None:
    text = """g (float16[1,2,8] x) => (float16[2,8] y) <int64[2] s = {2, 8},
        float16[8] k = {15360, 16384, 17408, 15360, 16384, 17408, 15360, 16384},
        float16[8] j = {15360, 16384, 17408, 15360, 16384, 17408, 15360, 15360}>
        { o = Constant<value = int64[1] {1}>()  t = Squeeze(o)
          a = LayerNormalization<axis = -1>(x, k, k)  b = LayerNormalization<axis = -1>(a, j)
          c = Reshape(b, s)  y = Add(c, k) }"""
    model, prepared = prepare(text, tmp_path)
    assert op_names(prepared.path) == ["LayerNormalization", "LayerNormalization", "Reshape", "Add"]
    constants = {each.name: each.data_type for each in onnx.load(str(prepared.path)).graph.initializer}
    assert constants == {"k": TensorProto.FLOAT16, "j": TensorProto.FLOAT16, "s": TensorProto.INT64}
    assert_near(model, prepared)


def test_casts_that_onnx_runtime_merges_with_its_own_come_back(tmp_path: Path) -> None:
    text = """g (float[1,2,4] x) => (float[1,2,4] y, float[1,2,4] z)
        <float16[2,2,1] w = {15360, 14336, 13312, 15360}>
        { d = Shape(x)  r = Reshape(x, d)  c = Cast<to = 10>(r)  h = Conv(c, w)  k = Conv(h, w)  y = Cast<to = 1>(k)
        f = Cast<to = 1>(h)  e = Exp(f)  z = Add(e, x) }"""
    model, prepared = prepare(text, tmp_path)
    assert sorted(op_names(prepared.path)) == ["Add", "Cast", "Cast", "Cast", "Conv", "Conv", "Exp", "Reshape"]
    assert_near(model, prepared, 1e-2)


def test_strings_and_sequences_pass_through(tmp_path: Path) -> None:
    text = "g (string[2] x) => (seq(string[2]) y) { a = Identity(x)  y = SequenceConstruct(a, x) }"
    _, prepared = prepare(text, tmp_path)
    assert [spec.dtype for spec in (*prepared.inputs, *prepared.outputs)] == ["string", "sequence"]


def test_the_same_model_gives_the_same_bytes_anywhere(tmp_path: Path) -> None:
    first = prepare_model(make_model(CONV, tmp_path / "a" / "m.onnx"), tmp_path / "a" / "out.onnx", {})
    second = prepare_model(make_model(CONV, tmp_path / "bb" / "n.onnx"), tmp_path / "cc" / "other.onnx", {})
    assert first.sha256 == second.sha256


def test_sparse_initializers_become_dense_and_an_output_is_listed_once(tmp_path: Path) -> None:
    def make_sparse(proto: onnx.ModelProto) -> None:
        values = numpy_helper.from_array(np.array([2, -1], np.float32), "w")
        places = numpy_helper.from_array(np.array([1, 4]), "at")
        proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [3, 2]))
        proto.graph.output.append(proto.graph.output[0])

    _, prepared = prepare("g (float[1,3] x) => (float[1,2] y) { y = MatMul(x, w) }", tmp_path, edit=make_sparse)
    graph = onnx.load(str(prepared.path)).graph
    assert [list(tensor.dims) for tensor in graph.initializer] == [[3, 2]]
    assert not graph.sparse_initializer
    assert [spec.name for spec in prepared.outputs] == ["y"]
    assert run_model(prepared.path, {"x": np.array([[1, 10, 100]], np.float32)})["y"].tolist() == [[-100, 2]]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (PREVIEW.replace("CROP", "Crop<border=[1,2,0]>"), "Crop"),
        (PREVIEW.replace("CROP", "Crop<border=[1,-2,0,1]>"), "Crop"),
        (PREVIEW.replace("CROP", "Crop<border=[1,2,0,1], scale=[3]>"), "Crop"),
        ('g (float[2,3] x) => (float[2,3] y) { y = Affine<alpha="x">(x) }', "Affine"),
        ("g (float16[2,3] x) => (float16[2,3] y) { y = Affine(x) }", "Affine"),
    ],
)
def test_a_preview_that_no_session_runs_or_of_other_floats_is_refused(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(ModelError, match=f"it uses {name}"):
        prepare(text, tmp_path, opset=7)


def test_an_impossible_opset_is_refused(tmp_path: Path) -> None:
    model = make_model("g (float[1,4] x) => (float[1,4] y) { y = HardSwish(x) }", tmp_path / "m.onnx")
    proto = onnx.load(str(model.path))
    assert [choose_opset(proto, opset) for opset in (1, MAX_OPSET)] == [1, MAX_OPSET]
    for own, chosen in ((12, 17), (13, 13), (MAX_OPSET + 1, MAX_OPSET)):
        proto.opset_import[0].version = own
        assert choose_opset(proto, None) == chosen
    for opset in (0, MAX_OPSET + 1):
        with pytest.raises(UsageError, match=f"no opset '{opset}'"):
            prepare_model(model, tmp_path / "out.onnx", {}, opset=opset)
    text = "g (float[1,3,4,4] x) => (float[1,3,2,2] y, int64[1,3,2,2] i) { y, i = MaxPool<kernel_shape = [3, 3]>(x) }"
    with pytest.raises(ModelError, match="cannot convert opset 8 to 7: it uses MaxPool"):
        prepare(text, tmp_path, opset=8, ir_version=3, to=7)
    text = "g (float[1,3,4,4] x) => (float[1,3,4,4] y) { y = ScaledTanh(x) }"
    with pytest.raises(ModelError, match="cannot convert opset 7 to 17: it uses ScaledTanh") as refusal:
        prepare(text, tmp_path, opset=7, ir_version=3)
    assert refusal.value.hint == "export the model with operators of ONNX, which has no ScaledTanh"


@pytest.mark.parametrize("opset", [13, 17])
def test_an_axis_that_is_a_number_becomes_a_list(tmp_path: Path, opset: int) -> None:
    text = """g (float[1,3] x) => (float[1,1,3] y, float[1,3,1] z) <int64 a = {0}, int64[1] b = {2}>
        { y = Unsqueeze(x, a) z = Unsqueeze(x, b) }"""
    model, prepared = prepare(text, tmp_path, opset=opset)
    assert [list(tensor.dims) for tensor in onnx.load(str(prepared.path)).graph.initializer] == [[1], [1]]
    assert_near(model, prepared)


def test_of_several_imports_of_a_domain_the_last_one_counts(tmp_path: Path) -> None:
    def import_twice(proto: onnx.ModelProto) -> None:
        del proto.opset_import[:]
        proto.opset_import.extend(helper.make_opsetid(*each) for each in (("", 18), ("ai.onnx", 12)))

    text = "g (float[1,4] x) => (float[1,1] y) { y = ReduceMean<axes=[1]>(x) }"
    assert prepare(text, tmp_path, edit=import_twice)[1].opsets == {"ai.onnx": 17}


def test_bodies_of_control_flow_are_converted_too(tmp_path: Path) -> None:
    text = (
        "g (bool c, float[2] x) => (float[1,2] y) { y = If(c) <"
        "then_branch = t () => (float[1,2] p) { p = Unsqueeze<axes = [0]>(x) },"
        "else_branch = e () => (float[1,2] q) { n = Clip<min = 0.0, max = 1.0>(x)  q = Unsqueeze<axes = [0]>(n) }> }"
    )
    model, prepared = prepare(text, tmp_path, opset=10, ir_version=5)
    for condition in (True, False):
        inputs = {"c": np.array(condition), "x": np.array([3, -2], np.float32)}
        assert np.array_equal(run_model(prepared.path, inputs)["y"], run_model(model.path, inputs)["y"])


@pytest.mark.parametrize(
    ("body", "opset"),
    [
        ('y = Upsample<mode = "linear", scales = [1.0, 1.0, 1.5, 3.0]>(x)', 7),
        ("y = Upsample(x, up)", 9),
        ('y = Resize<mode = "linear">(x, down)', 10),
        ("y = Resize(x, up)", 10),
        ("y = Resize(x, down)", 10),
        ("y = Resize(x, up, down)", 11),
        ("y = Hardmax(x)", 11),
    ],
)
def test_what_an_old_opset_means_by_a_node_stays(body: str, opset: int, tmp_path: Path) -> None:
    text = f"""g (float[1,2,8,8] x) => (float[A,B,C,D] y)
        <float[4] up = {{1, 1, 1.2, 2.5}}, float[4] down = {{1, 1, 0.7, 0.3}}> {{ {body} }}"""
    assert_near(*prepare(text, tmp_path, opset=opset, ir_version=4))


def test_the_constants_that_a_cast_like_makes_are_folded(tmp_path: Path) -> None:
    """As PyTorch's functions write their numbers: ONNX Runtime has no kernel for it, and folds its parts later."""
    text = "g (float[2,3] x) => (float[2,3] y) <int64 h = {3}> { c = CastLike(h, x) d = Neg(c) y = Mul(x, d) }"
    model, prepared = prepare(text, tmp_path, opset=17)
    assert_near(model, prepared)
    assert [node.op_type for node in onnx.load(str(prepared.path)).graph.node] == ["Mul"]


@pytest.mark.parametrize(("own", "opset"), [(18, 18), (18, 20), (18, 21), (18, 23), (21, 18), (21, 20), (21, 22)])
def test_a_group_normalization_has_scales_of_its_groups_or_channels(own: int, opset: int, tmp_path: Path) -> None:
    scales = "1, 2, 3, 4, 5, 6" if own >= 21 else "1, 2, 3"
    count = scales.count(",") + 1
    text = f"""g (float[2,6,4] x) => (float[2,6,4] y) <float[{count}] s = {{{scales}}}, float[{count}] b = {{{scales}}}>
        {{ y = GroupNormalization<num_groups = 3>(x, s, b) }}"""
    model, prepared = prepare(text, tmp_path, opset=own, ir_version=10, to=opset)
    assert_near(model, prepared, 2e-6)
    assert prepared.opsets["ai.onnx"] == opset
    # Its parts have the shapes of constants, which every provider wants.
    assert "Shape" not in {node.op_type for node in onnx.load(str(prepared.path)).graph.node}


@pytest.mark.parametrize(
    ("own", "opset", "node"),
    [
        (21, 20, "GroupNormalization<num_groups = 3>(x, s, s)"),
        (20, 19, 'GridSample<mode = "linear">(x, g)'),
        (16, 15, "RoiAlign(x, r, i)"),
        (16, 15, 'RoiAlign<coordinate_transformation_mode = "half_pixel">(x, r, i)'),
        *((13, 12, f"{name}<axis = {axis}>(x)") for name in ("Hardmax", "LogSoftmax", "Softmax") for axis in (1, -2)),
        (13, 12, "Softmax<axis = 3>(open)"),
        (13, 11, "Pow(x, i)"),
        (13, 11, "Resize(x, , s)"),
        (11, 10, "Resize(x, r, s)"),
        (15, 14, "Shape<start = 1>(x)"),
        (21, 20, "QuantizeLinear(x, t, z)"),
        (17, 13, "HardSwish(x)"),
        (13, 12, "Softmax(x)"),
        (6, 5, "Selu(x)"),
        (13, 12, "Abs(h)"),
        (11, 10, "Clip(x)"),
        (11, 10, "Gemm(x, x)"),
        (19, 18, "AveragePool<kernel_shape = [2, 2], dilations = [2, 2]>(x)"),
        (24, 23, 'Cast<to = 1, round_mode = "down">(x)'),
    ],
)
def test_what_an_older_opset_has_not_or_means_otherwise_is_refused(own: int, opset: int, node: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["" : {own}]> g (float[2,6,4,4] x, float[6] s, float[2,4,4,2] g,
        float[1,4] r, int64[1] i, float t, uint16 z, bfloat16 h, float open) => (y) {{ y = {node} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.input[-1].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match=f"opset {own} to {opset}: it uses {node[:3]}"):
        convert_opset(proto, opset)


@pytest.mark.parametrize(
    ("own", "opset", "node", "left"),
    [
        *((17, 11, f"Softmax<axis = {axis}>(x)", ["axis"]) for axis in (-1, 3)),
        (15, 14, "Shape<start = 0>(x)", []),
        (11, 10, 'DepthToSpace<blocksize = 2, mode = "DCR">(x)', ["blocksize"]),
        (18, 17, "ReduceMax<keepdims = 0, noop_with_empty_axes = 0>(x)", ["keepdims"]),
        (19, 13, "Cast<to = 6, saturate = 1>(x)", ["to"]),
        (13, 11, "Clip(x, , t)", []),
        (13, 12, "Dropout(x)", []),
        (22, 20, "GridSample(x, g)", []),
    ],
)
def test_an_older_opset_lacks_defaults(own: int, opset: int, node: str, left: list[str], tmp_path: Path) -> None:
    text = f"g (float[2,4,4,4] x, float t, float[2,4,4,2] g) => (y) {{ y = {node} }}"
    model = make_model(text, tmp_path / "m.onnx", opset=own)
    lowered, inputs = convert_opset(onnx.load(str(model.path)), opset), make_inputs(model)
    assert [each.name for each in lowered.graph.node[0].attribute] == left
    onnx.save(lowered, str(tmp_path / "o.onnx"))
    assert load_model(tmp_path / "o.onnx").opsets == {"ai.onnx": opset}
    assert np.array_equal(run_model(tmp_path / "o.onnx", inputs)["y"], run_model(model.path, inputs)["y"])


def test_a_scan_with_a_batch_axis_is_refused(tmp_path: Path) -> None:
    text = """g (float[1,2] i, float[1,3,2] x) => (float[1,2] y, float[1,3,2] z) { y, z = Scan<num_scan_inputs = 1,
        body = b (float[2] s, float[2] n) => (float[2] t, float[2] o) { t = Add(s, n)  o = Identity(t) }>(, i, x) }"""
    with pytest.raises(ModelError, match="Scan had a batch axis before opset 9"):
        prepare(text, tmp_path, opset=8, ir_version=4)


def test_a_model_that_ort_refuses_is_refused_by_name(tmp_path: Path) -> None:
    text = "g (float[1,4] x) => (float[1,4] y) { y = com.acme.Magic(x) }"
    with pytest.raises(RuntimeRefusal, match=r"m\.onnx"):
        prepare(text, tmp_path, imports=', "com.acme" : 1')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]


ZOO_DIMS = {
    "fastestdet": {}, "kws_dscnn_int8_qdq": {"unk__232": 1}, "magika_v3_3": {"unk__214": 1}, "mnist8_cntk": {},
    "ppocr_cls_mbv3": {"x:0": 1, "x:2": 48, "x:3": 192}, "gbr_diabetes": {"X:0": 1}, "squeezenet1.1_fp16": {},
    "silero_vad_micro_transformer": {"batch": 1, "samples": 8000}, "superres_core_224": {}, "ultraface_rfb320": {},
    "vww_96_float_ext": {"unk__337": 1},
}  # fmt: skip


@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
@pytest.mark.parametrize("name", sorted(ZOO_DIMS))
def test_real_models_compute_the_same(tmp_path: Path, name: str) -> None:
    model = load_model(ZOO / f"models/{name}.onnx")
    prepared: Model = prepare_model(model, tmp_path / "out.onnx", ZOO_DIMS[name])
    assert prepared.is_static
    inputs = make_inputs(prepared)
    level = Level.BASIC if "fp16" in name else Level.DISABLED
    expected, got = run_model(model.path, inputs, level), run_model(prepared.path, inputs, level)
    for key, value in expected.items():
        assert np.allclose(value, got[key], rtol=1e-4, atol=1e-5)


def test_an_older_model_needs_no_import_of_the_operators_of_onnx_runtime(tmp_path: Path) -> None:
    text = "g (float[4] x) => (float[4] y) { r = Relu(x) y = com.microsoft.QuickGelu(r) }"
    _, prepared = prepare(text, tmp_path, opset=11, ir_version=7)
    assert prepared.opsets == {"ai.onnx": 17, "com.microsoft": 1}


@pytest.mark.parametrize(
    ("ir_version", "opset", "kind", "newest", "lowered"),
    [
        (3, 17, TensorProto.FLOAT, 13, 8),
        (10, 20, TensorProto.FLOAT8E5M2FNUZ, 13, 9),
        (10, 20, TensorProto.UINT4, 13, 10),
        (10, 21, TensorProto.FLOAT, 13, 10),
        (13, 21, TensorProto.FLOAT, 12, 12),
        (99, 21, TensorProto.FLOAT, None, MAX_IR_VERSION),
    ],
)
def test_the_ir_version_is_lowered(ir_version: int, opset: int, kind: int, newest: int | None, lowered: int) -> None:
    """As onnx's table of versions pairs them: opset 20 came with IR version 9, and UINT4 with 10."""
    weight = TensorProto(name="w", data_type=kind, dims=[0])
    proto = helper.make_model(helper.make_graph([], "g", [], [], [weight]), ir_version=ir_version)
    lower_ir_version(proto, opset, *filter(None, [newest]))
    assert proto.ir_version == lowered


def test_constants_that_onnx_runtime_made_have_names_that_it_would_not_make_again(tmp_path: Path) -> None:
    # Where a session optimizes again and makes "gemm_input_shape_token_6" a second time, it fails.
    text = """
        g (float[1,4,8] x) => (float[1,4,8] y) { w = Constant<value_floats=[0.5]>() s = Constant<value_ints=[8,8]>()
        v = Expand(w, s)  b = Constant<value_floats=[1.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0]>()  m = MatMul(x, v)
        n = Add(m, b)  o = MatMul(n, v)  y = Add(o, b) }"""
    model, prepared = prepare(text, tmp_path)
    assert "Gemm" in op_names(prepared.path)
    made = {tensor.name for tensor in onnx.load(str(prepared.path)).graph.initializer} - set("wsvb")
    assert made
    assert all(name.endswith(".prepared") for name in made)
    assert_near(model, prepared, 1e-5)


def test_a_half_model_with_float_inputs_is_folded_too(tmp_path: Path) -> None:
    # ONNX Runtime merges these casts with those that it puts around each fp16 node.
    text = """g (float[1,2,8,8] x) => (float[1,2,8,8] y, float[1,2,4,4] z)
        <float16[2,2,1,1] w = {1,2,3,4}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4}, float f = {2.0}>
        { h = Cast<to = 10>(x)  p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(h)  c = Conv(p, w)
        z = Cast<to = 1>(c)  a = Shape(p)  b = Slice(a, zero, two, zero)  d = Shape(h)  e = Slice(d, two, four, zero)
        s = Concat<axis = 0>(b, e)  r = Resize(z, , , s)  i = Cast<to = 10>(r)  g = Cast<to = 10>(f)
        m = Mul(i, g)  y = Cast<to = 1>(m) }"""
    model, prepared = prepare(text, tmp_path, edit=lambda it: it.CopyFrom(onnx.shape_inference.infer_shapes(it)))
    kept = ["Cast", "MaxPool", "Conv", "Cast", "Resize", "Cast", "Mul", "Cast"]
    assert op_names(prepared.path) == kept
    assert op_names(show_model(model, tmp_path / "shown.onnx").path) == kept
    assert_near(model, prepared)
