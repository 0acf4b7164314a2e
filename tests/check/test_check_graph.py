"""The view of a graph: constants, shapes, multiply-accumulates, and what is left unread."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from check_models import check_file, check_text, graph_of, save_text, why_not
from fixture_types import Shown
from tiny_models import parse_net, save_net

from edgekit.check.macs import count_work
from edgekit.cli.main import run_command
from edgekit.graph.graph import infer_graph, read_graph
from edgekit.graph.nhwc import find_orders
from edgekit.model.model import load_model


def test_an_initializer_that_is_an_input_is_constant_in_ir_3_only() -> None:
    text = "(float[2] x, float[2] c) => (float[2] y) <float[2] c = {1,2}> { y = Add(x, c) }"
    for ir_version, constant in ((3, True), (8, False)):
        model = parse_net(text, ir_version=ir_version, opset=8)
        assert ("c" in infer_graph(model).constants) is constant


def test_a_shape_that_cannot_be_inferred_is_a_reason() -> None:
    nodes = check_text("g (float[2] x) => (float y) { a = com.microsoft.NoSuchOperator(x) y = Relu(a) }", "nnapi")
    assert "the shape of input 0 is unknown" in nodes[1].reasons


def test_wrong_shapes_in_the_file_do_not_stop_the_check() -> None:
    graph = graph_of("g (float[2,3] x, float[5,7] w) => (float[2,7] y) { y = MatMul(x, w) }")
    assert graph.nodes[0].op_type == "MatMul"


def test_weights_are_not_kept_and_external_files_not_read(tmp_path: Path) -> None:
    path, weight = tmp_path / "m.onnx", np.zeros((64, 64, 8, 8), np.float32)
    read = read_graph(save_net("(float[1,64,8,8] x) => (float[N,C,H,W] y) { [conv] y = Conv(x, w) }", path, w=weight))
    assert read.constants["w"].ByteSize() < 100
    assert (read.array("w"), read.value("w").shape, read.value("y").shape) == (None, (64, 64, 8, 8), (1, 64, 1, 1))
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="m.data")
    model = load_model(path)
    (tmp_path / "m.data").unlink()
    assert read_graph(model).is_external("w")


@pytest.mark.parametrize(
    ("body", "macs"),
    [
        ("(float[1,3,8,8] x, float[4,3,3,3] w) => (float[1,4,6,6] y) { y = Conv(x, w) }", 4 * 36 * 27),
        ("(float[1,4,8,8] x, float[4,1,3,3] w) => (float[1,4,6,6] y) { y = Conv<group=4>(x, w) }", 4 * 36 * 9),
        ("(float[1,3,8,8] x, float[3,4,2,2] w) => (float[1,4,9,9] y) { y = ConvTranspose(x, w) }", 3 * 64 * 16),
        ("(float[5,3] x, float[3,7] w) => (float[5,7] y) { y = Gemm(x, w) }", 5 * 3 * 7),
        ("(float[3,5] x, float[3,7] w) => (float[5,7] y) { y = Gemm<transA=1>(x, w) }", 5 * 3 * 7),
        ("(float[2,5,3] x, float[2,3,7] w) => (float[2,5,7] y) { y = MatMul(x, w) }", 2 * 5 * 3 * 7),
        ("(float[6,1,4] x, float[1,20,4] w, float[1,20,5] r) => (float[6,1,1,5] y) { y = LSTM(x, w, r) }",
         6 * (20 * 4 + 20 * 5)),
        ('(float[2,3] x, float[3,4] w) => (float[2,4] y) { y = Einsum<equation="ij,jk->ik">(x, w) }', 24),
        ("(float[N,3] x, float[3,7] w) => (float[N,7] y) { y = MatMul(x, w) }", 21),
        ("(float[9] x) => (float[9] y) { y = Relu(x) }", 0),
        (("(float[1,2,8] q, float[1,2,4] k, float[1,2,4] v, float[1,1,5,4] p) => (float[1,2,8] y) "
         "{ y = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>(q, k, v, p) }"), 2 * 16 * 7),
        (("(float[1,5,8] x, float[8,24] w) => (float[1,5,8] y)"
         "{ y = com.microsoft.Attention<num_heads=2>(x, w) }"), 5 * 8 * 24 + 2 * 40 * 5),
        (("(float[1,5,8] x, int8[8,24] w, float s) => (y)"
         "{ y = com.microsoft.QAttention<num_heads=2>(x, w, b, s, s) }"), 5 * 8 * 24 + 2 * 40 * 5),
        (("(float[6,1,4] x, int8[1,4,20] w, int8[1,5,20] r) => (y) "
         "{ y, h = com.microsoft.DynamicQuantizeLSTM<hidden_size=5>(x, w, r) }"), 6 * (20 * 4 + 20 * 5)),
        (("(uint8[2,5] x, float s, uint8 o, int8[7,5] w, int8 z) => (uint8[2,7] y) "
         "{ y = com.microsoft.QGemm<transB=1>(x, s, o, w, s, z, , s, o) }"), 2 * 5 * 7),
        (("(float[1,5,64] x, uint8[7,2,16] w, float[14] s) => (float[1,5,7] y) "
         "{ y = com.microsoft.MatMulNBits<K=64, N=7, bits=4, block_size=32>(x, w, s) }"), 5 * 64 * 7),
        # A comparison for each row, as the lists of trees need not be there.
        ("(float[5,3] x) => (y, z) { y, z = ai.onnx.ml.TreeEnsembleClassifier<nodes_treeids = [0, 1]>(x) }", 5),
        (("(float[5,3] x) => (y, z) { y, z = ai.onnx.ml.SVMClassifier<coefficients = [1.0, 2.0], "
          "support_vectors = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]>(x) }"), 5 * 6),
        ("(float[3] x) => (y) { y = ai.onnx.ml.LinearRegressor<coefficients = [1.0, 2.0, 3.0]>(x) }", 3),
    ],
)  # fmt: skip
def test_multiply_accumulates_are_counted_by_operator(body: str, macs: int) -> None:
    graph = graph_of(f"g {body}")
    assert count_work(graph, graph.nodes[0]) == macs


# Where the change of the layout to NHWC leaves a Transpose at an output of the graph, as ONNX Runtime makes it.

_HEAD = "<float[5,4,1,1] w = {1}, float half = {0.5}, int64[1] axis = {1}, int64[4] pads = {0,0,1,1}, uint16 z = {0}>"
_LAST, _MOVED = (0, 3, 1, 2), (0, 2, 1)

# What follows a Conv, and the Transpose that is left behind it: None where it cancels, or stays before the last node.
TAILS = {
    "a = Relu(c) y = Cast<to=2>(a)": _LAST,
    "a = Greater(c, half) y = Cast<to=2>(a)": _LAST,
    "a = Add(c, x1) y = Cast<to=2>(a)": _LAST,
    "a = Neg(c) b = Concat<axis=1>(a, c) y = Cast<to=2>(b)": _LAST,
    "a = Concat<axis=1>(c, x) y = Cast<to=2>(a)": None,
    "a = Softmax<axis=1>(c) y = Cast<to=2>(a)": _LAST,
    "a = ReduceMean<axes=[1]>(c) y = Cast<to=2>(a)": _LAST,
    "a = ReduceMean<axes=[1], keepdims=0>(c) y = Cast<to=2>(a)": None,
    "a = ArgMax<axis=2, keepdims=0>(c) y = Cast<to=2>(a)": _MOVED,
    "a = ArgMax<axis=1, keepdims=0>(c) y = Cast<to=2>(a)": None,
    "a = ArgMax<axis=1>(c) b = Squeeze(a, axis) y = Cast<to=2>(b)": None,
    "a = ArgMax<axis=1, keepdims=0>(c) b = Unsqueeze(a, axis) y = Cast<to=2>(b)": None,
    "a = ArgMax<axis=3, keepdims=0>(c) b = Unsqueeze(a, axis) y = Cast<to=2>(b)": (0, 1, 3, 2),
    "a = com.microsoft.QuantizeLinear(c, half, z) y = com.microsoft.DequantizeLinear(a, half, z)": _LAST,
    "a = Transpose<perm=[0,2,3,1]>(c) y = Cast<to=2>(a)": None,
    "a = CumSum(c, axis) y = Cast<to=2>(a)": None,
    "a = GlobalAveragePool(x) y = Cast<to=2>(a)": _LAST,
    "y = Cast<to=2>(x)": None,
    "y = Add(half, half)": None,
}


@pytest.mark.parametrize("tail", TAILS)
def test_a_transpose_is_left_where_none_cancels_it(tail: str) -> None:
    body = f"g (float[1,4,8,6] x, float[1,1,8,6] x1) => (float[1,5,8,6] c) {_HEAD} {{ c = Conv(x, w) {tail} }}"
    assert find_orders(graph_of(body)).get("y") == TAILS[tail]


def test_integers_behind_a_quantizer_may_be_transposed() -> None:
    head = "<float[5,4,1,1] w = {1}, float s = {0.1}, uint8 z = {0}>"
    body = f"g (float[1,4,8,6] x) => (uint8[1,5,8,6] y) {head} {{ c = Conv(x, w) y = QuantizeLinear(c, s, z) }}"
    assert why_not(check_text(body, "qnn")) == ""


# Open dimensions in `check`: they stay open where a provider takes them; work is counted at sizes that are told.

PICTURE = (
    "g (float[batch,3,height,width] x) => (float[N,5,h,w] y) <float[8,3,3,3] a = {{{}}}, float[5,8,3,3] b = {{{}}}>"
    "{{ c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, a)  y = Conv<pads=[1,1,1,1], strides=[2,2]>(c, b) }}"
).format(",".join(["1"] * 216), ",".join(["1"] * 360))
# What sizes of 224 give: 112 x 112 and 56 x 56 places.
PICTURE_MACS = [112 * 112 * 8 * 27, 56 * 56 * 5 * 72]
CACHE = """g (float[batch,1,sequence,4] x, float[batch,2,total,4] k) => (float[batch,2,sequence,4] y)
    { t = Transpose<perm=[0,1,3,2]>(k)  z = MatMul(x, t)  y = MatMul(z, k) }"""
HIDDEN = """g (float[n,4] x, float[4,4] w) => (float[m,4] y) {
    axis = Constant<value_ints=[1]>()  four = Constant<value_ints=[1,4]>()
    i = NonZero(x)  t = Transpose(i)  r = GatherND(x, t)  u = Unsqueeze(r, axis)  e = Expand(u, four)
    y = MatMul(e, w) }"""


def check_json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run_command(["check", *words, "--json"]) in {0, 1}
    return json.loads(capsys.readouterr().out)["targets"]


def test_work_with_open_sides_is_counted_at_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: Shown
) -> None:
    model = str(save_text(PICTURE, tmp_path / "p.onnx"))
    report = check_json(capsys, model, "--target", "cpu")["cpu"]
    assert (report["counted_at"], report["unsized_nodes"]) == ({"batch": 1, "height": 224, "width": 224}, 0)
    assert [node["macs"] for node in report["node_list"]] == PICTURE_MACS
    assert [node["macs"] for node in report["model_nodes"]] == PICTURE_MACS
    said = shown(["check", model, "--target", "cpu", "--dim", "height=64"])
    counted = (
        "work is counted at batch=1, width=128; to check the model at your sizes, give --dim batch=INT --dim width="
    )
    assert f"- open dimensions: {counted}" in said
    fixed = check_json(capsys, model, "--target", "cpu", "--shape", "x=1,3,64,64")["cpu"]
    assert "counted_at" not in fixed


@pytest.mark.parametrize("target", ["nnapi", "coreml", "qnn"])
def test_a_provider_that_takes_nothing_without_sizes_is_asked_about_the_file_as_it_is(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: Shown
) -> None:
    model = str(save_text(PICTURE, tmp_path / "p.onnx"))
    found = check_json(capsys, model, "--target", target, "--target", "cpu")
    assert [(found[name]["taken"], found[name]["as_is"]["taken"]) for name in (target, "cpu")] == [(0, 0), (2, 2)]
    assert "give --dim batch=INT --dim height=INT --dim width=INT" in shown(["check", model, "--target", target], 1)
    assert check_json(capsys, model, "--target", target, "--shape", "x=1,3,64,64")[target]["taken"] == 2


def test_the_batch_of_a_state_is_one_and_the_length_of_a_sample_is_not(tmp_path: Path) -> None:
    text = "g (float[2,N,8] state, float[1,T,8] x) => (float[2,N,8] y, float[1,T,8] z) { y = Relu(state) z = Relu(x) }"
    assert check_file(save_text(text, tmp_path / "s.onnx"), "cpu").counted_at == {"N": 1, "T": 128}


def test_a_formula_is_counted_as_it_follows(tmp_path: Path) -> None:
    path = save_text(CACHE, tmp_path / "c.onnx")
    proto = onnx.load(str(path))
    # The text form has no formulas.
    proto.graph.input[1].type.tensor_type.shape.dim[2].dim_param = "past + sequence"
    onnx.save(proto, str(path))
    report = check_file(path, "cpu")
    assert report.counted_at == {"batch": 1, "sequence": 128, "past": 128}
    assert [node.macs for node in report.node_list] == [0, *[2 * 128 * 256 * 4] * 2]


def test_what_no_size_tells_is_said(tmp_path: Path, shown: Shown) -> None:
    model = save_text(HIDDEN, tmp_path / "n.onnx")
    report = check_file(model, "cpu")
    assert (report.verdict, report.unsized_nodes) == ("yes", 1)
    assert [node.macs for node in report.node_list if node.op == "MatMul"] == [4 * 4]
    assert "- the work of 1 node that multiplies is not known even so" in shown(
        ["check", str(model), "--target", "cpu"]
    )


def test_unknown_work_behind_an_unknown_operator_is_no_reason_to_say_yes(tmp_path: Path, shown: Shown) -> None:
    text = """g (float[1,2,8,8] x) => (float[A,B,C,D] y) <float[2,2,1,1] w = {1, 2, 3, 4}>
        { a = Conv(x, w) b = other.Foo(a) y = Conv(b, w) }"""
    proto = onnx.load(str(save_text(text, tmp_path / "n.onnx")))
    proto.opset_import.add(domain="other", version=1)
    onnx.save(proto, str(tmp_path / "n.onnx"))
    report = check_file(tmp_path / "n.onnx", "coreml")
    assert (report.verdict, report.unsized_nodes) == ("maybe", 1)
    assert "- the work of 1 node that multiplies is not known: each" in shown(
        ["check", str(tmp_path / "n.onnx"), "--target", "coreml"], 1
    )


def test_what_fixed_sizes_would_gain_is_counted_at_the_same_sizes(tmp_path: Path) -> None:
    report = check_file(save_text(PICTURE, tmp_path / "p.onnx"), "xnnpack")
    assert report.verdict == "no"
    (advice,) = report.advice
    assert (advice.gain_nodes, advice.gain_macs) == (2, sum(PICTURE_MACS))


@pytest.mark.parametrize(("target", "size", "told"), [("cpu", "1", True), ("cpu", "N", False), ("nnapi", "1", False)])
def test_a_batch_that_the_export_fixed_is_told_where_no_phone_wants_it(
    target: str, size: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_text(f"g (float[{size},4] x) => (float[{size},4] y) {{ y = Relu(x) }}", tmp_path / "p.onnx")
    proto = onnx.load(path)
    proto.producer_name = "pytorch"
    onnx.save(proto, path)
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(8, 1, 4)).astype(np.float32))
    line = "dynamic_axes={'x': {0: 'batch'}}"
    run_command(["check", str(path), "--target", target])
    assert (line in capsys.readouterr().out) is told
    run_command(["check", str(path), "--target", target, "--json"])
    assert any(line in each for each in json.loads(capsys.readouterr().out)["fixed_axes"]) is told
    build = ["--data", str(tmp_path / "d.npz"), "--no-verify", "--precision", "fp32", "--out", str(tmp_path / "out")]
    run_command(["build", str(path), "--target", target, *build])
    assert (line in capsys.readouterr().out) is told
