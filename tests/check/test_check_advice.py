"""Advice names what to change and says truly what it gains."""

from pathlib import Path

import onnx
import pytest
from check_models import check_file, quantized_net, save_text
from onnx import parser
from onnxruntime.quantization import QuantType

from edgekit.check.report import Advice, find_stopping
from edgekit.model.model import load_model
from edgekit.prepare.clean import prepare_model


def _advice(tmp_path: Path, body: str, target: str) -> dict[str, Advice]:
    return {entry.id: entry for entry in check_file(save_text(f"g {body}", tmp_path / "m.onnx"), target).advice}


@pytest.mark.parametrize(
    ("target", "body", "id_", "gain"),
    [
        ("nnapi", "(float[4] x) => (float[4] y) { a = Relu(x) y = Sum(a, x) }", "sum-to-add", 1),
        (
            "coreml",
            "(float[1,2,3,3] x) => (float[1,2,3,3] y) <float[1,2,1,1] s = {0.25, -2}> { a = Relu(x) y = PRelu(a, s) }",
            "plain-slope",
            1,
        ),
        ("coreml", "(float[1,4] x) => (float[1,4] y) { a = Flatten(x) y = Relu(a) }", "flatten-to-reshape", 1),
        (
            "xnnpack",
            """(float[1,2,4,4] x) => (float[1,2,8,8] y) <float[0] e = {}, int64[4] s = {1,2,8,8}>
                { y = Resize<mode="cubic">(x, e, e, s) }""",
            "resize-empty-inputs",
            0,
        ),
        ("nnapi", "(float[N,4] x) => (float[N,4] y) { a = Relu(x) y = Tanh(a) }", "fix-dims", 2),
        (
            "coreml",
            """(float[1,1,4] x) => (float[1,1,2] h) <float[1,8,4] w = {WIDE}, float[1,8,2] r = {NARROW}>
                { a = Relu(x) s, h = LSTM<hidden_size=2>(a, w, r) }""".replace("WIDE", ",".join("1" * 32)).replace(
                "NARROW", ",".join("1" * 16)
            ),
            "step-lstm",
            1,
        ),
        (
            "nnapi",
            "(float[1] x) => (float y) <int64[0] s = {}> { a = Relu(x) y = Reshape(a, s) }",
            "squeeze-to-scalar",
            1,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "-" in value and "(" not in value else "",
)
def test_what_can_be_mended_is_named_with_its_gain(tmp_path: Path, target: str, body: str, id_: str, gain: int) -> None:
    advice = _advice(tmp_path, body, target)[id_]
    assert (advice.gain_nodes, advice.fix) == (gain, "automatic")


def test_what_a_rewrite_mends_needs_no_other_operator(tmp_path: Path) -> None:
    body = """(float[20] x, float[1] u) => (float[20] y) <int64[1] s = {20}>
        { a = Acos(x) e = Expand(u, s) b = Mul(a, e) y = Sum(b, x, x) }"""
    advice = _advice(tmp_path, body, "nnapi")
    assert (advice["sum-to-add"].nodes, advice["idle-expand"].nodes) == (("Sum_y",), ("Mul_b",))
    assert advice["no-builder"].subject == "Acos"


def test_of_several_rewrites_of_the_same_nodes_the_first_that_gains_is_named(tmp_path: Path) -> None:
    both = "(float[2,9] x) => (float[2,9] y) { a = com.microsoft.FastGelu(x) y = Relu(a) }"
    assert _advice(tmp_path, both, "qnn").keys() == {"exact-gelu"}
    # NNAPI has no Gelu of either form, and no Erf: the first of the two rewrites gains nothing there.
    assert _advice(tmp_path, both, "nnapi").keys() == {"split-tanh-gelu"}
    exact = both.replace("FastGelu", "Gelu")
    assert _advice(tmp_path, exact, "nnapi").keys() == {"tanh-for-erf"}
    assert _advice(tmp_path, exact, "coreml").keys() == {"split-gelu"}


_CHOICE = """(float[4] x, int64 rate, bool loud) => (float[4] y) <int64 low = {{8000}}, float level = {{2}}> {{
    a = Relu(x) b = ReduceMean<keepdims=0>(x) d = Equal(rate, low) c = {choice}
    y = If(c)<then_branch = t () => (float[4] u) {{ u = Relu(a) }}, else_branch = e () => (float[4] v) {{ v = Neg(a) }}>
    }}"""


def test_a_choice_by_one_number_is_told_to_be_made_in_advance(tmp_path: Path) -> None:
    advice = _advice(tmp_path, _CHOICE.format(choice="Not(d)"), "nnapi")
    assert (advice["freeze-input"].subject, advice["freeze-input"].nodes) == ("rate", ("If_y", "Not_c", "Equal_d"))
    assert advice["freeze-input"].message.endswith("--freeze rate=NUMBER")
    assert "no-builder" not in advice
    prepared = prepare_model(load_model(tmp_path / "m.onnx"), tmp_path / "p.onnx", constants={"rate": 8000})
    assert check_file(prepared.path, "nnapi").taken > 0


@pytest.mark.parametrize("choice", ["Greater(b, level)", "Or(loud, d)"])
def test_a_choice_by_the_data_or_by_two_inputs_is_not(tmp_path: Path, choice: str) -> None:
    assert "freeze-input" not in _advice(tmp_path, _CHOICE.format(choice=choice), "nnapi")


@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("Lgamma", "nor has ONNX of opset 17, so that no session starts."),
        # Of opset 20.
        ("Gelu", "nor has ONNX of opset 17, so that no session starts."),
        ("my.ops.Lgamma", "a library of custom operators computes it on the CPU."),
        ("Acos", "the CPU computes it."),
        ("com.microsoft.BiasGelu", "the CPU computes it."),
    ],
)
def test_the_cpu_is_said_to_compute_only_what_it_has(tmp_path: Path, op: str, told: str) -> None:
    given = "x, b" if "Bias" in op else "x"
    body = f"(float[4] x, float[4] b) => (float[4] y) {{ a = {op}({given}) y = Relu(a) }}"
    message = _advice(tmp_path, body, "nnapi")["no-builder"].message
    assert message.startswith(f"the provider has no {op.rpartition('.')[2]}: {told}")


def test_a_recurrent_net_is_told_where_to_go(tmp_path: Path) -> None:
    body = (
        "(float[4,1,3] x) => (float[4,1,1,2] y) <float[1,8,3] w = {{{}}}, float[1,8,2] r = {{{}}}> "
        "{{ a = Relu(x) y = LSTM<hidden_size=2>(a, w, r) }}"
    ).format(",".join(["1"] * 24), ",".join(["1"] * 16))
    message = _advice(tmp_path, body, "nnapi")["no-builder"].message
    assert message.startswith("the provider has no LSTM: the CPU computes it in float. Leave it there")
    assert message.endswith("edgekit check")


@pytest.mark.parametrize(
    ("sign", "target", "id_"),
    [
        (QuantType.QInt8, "nnapi", "uint8-activations"),
        (QuantType.QUInt8, "xnnpack", "int8-activations"),
    ],
)
def test_a_quantization_of_another_target_is_named(tmp_path: Path, sign: QuantType, target: str, id_: str) -> None:
    best = check_file(quantized_net(tmp_path / "q.onnx", sign), target).advice[0]
    assert best.id == id_
    assert best.gain_nodes > 10


def test_dynamic_quantization_is_named(tmp_path: Path) -> None:
    body = """(float[1,4] x) => (float[1,2] y)
        <uint8[4,2] w = {1,2,3,4,5,6,7,8}, float scale = {0.5}, uint8 zero = {7}, uint8[4] table = {1,2,3,4}>
        { q, s, z = DynamicQuantizeLinear(x) m = MatMulInteger(q, w, z) f = Cast<to=1>(m) g = Mul(f, s)
        e = DequantizeLinear(table, scale, zero) h = Shape(e) i = Cast<to=1>(h) y = Add(g, i) }"""
    advice = _advice(tmp_path, body, "xnnpack")
    assert "The float form of the model may be taken" in advice["no-builder"].message


def test_no_size_is_asked_for_where_values_decide_it(tmp_path: Path) -> None:
    body = "(float[4] x, bool[{size}] c) => (float[M] y) {{ a = Compress(x, c) y = Relu(a) }}"
    for size, asks in (("4", False), ("N", True)):
        assert ("fix-dims" in _advice(tmp_path, body.format(size=size), "qnn")) is asks


def test_a_node_that_stops_the_session_is_named(tmp_path: Path) -> None:
    body = "(float[2,0,2] x) => (float[2,1,2] y) { y = ReduceMax<axes=[1]>(x) }"
    assert "input 0 has a dimension of 0" in _advice(tmp_path, body, "qnn")["session-fails"].message


_HEAD = "(float[1,2,4,4] x) => (float[1,2] y) <float[2,2,1,1] w = {1, 2, 3, 4}> { c = Conv(x, w) r = Relu(c)"


def test_a_target_that_wants_the_whole_model_is_given_it_without_its_end(tmp_path: Path) -> None:
    advice = _advice(tmp_path, f"{_HEAD} d = Det(r) y = Relu(d) }}", "qnn")["cut-end"]
    assert (advice.nodes, advice.gain_nodes, advice.fix) == (("Det_d", "Relu_y"), 1, "manual")
    assert advice.message.endswith("edgekit prepare --outputs r")
    cut = prepare_model(load_model(tmp_path / "m.onnx"), tmp_path / "cut.onnx", outputs=["r"])
    report = check_file(cut.path, "qnn")
    assert (report.verdict, report.taken) == ("yes", report.nodes)


@pytest.mark.parametrize(("low", "end"), [("-1", "p"), ("-inf", "r")])
def test_a_model_does_not_end_with_infinite_scores(tmp_path: Path, low: str, end: str) -> None:
    """They hide classes from a maximum, and no calibration takes an output that is infinite in all samples."""
    body = f"""{_HEAD} p = Pad(r, pads, low) d = Cast<to=11>(p) e = Det(d) y = Cast<to=1>(e) }}"""
    body = body.replace("{1, 2, 3, 4}>", f"{{1, 2, 3, 4}}, float low = {{{low}}}, int64[8] pads = {{0,0,1,1,0,0,1,1}}>")
    assert _advice(tmp_path, body, "qnn")["cut-end"].message.endswith(f"edgekit prepare --outputs {end}")


@pytest.mark.parametrize("reads_start", [False, True])
def test_a_target_of_whole_models_is_given_one_without_its_start(tmp_path: Path, *, reads_start: bool) -> None:
    last = "y = Add(h, f)" if reads_start else "y = Relu(h)"
    body = f"""(int16[1,4] x, float[1,4] z) => (float[1,N] y) <float[4,1] w = {{1, 2, 3, 4}}> {{
        f = Cast<to=1>(x) g = Add(f, z) h = MatMul(g, w) {last} }}"""
    advice = _advice(tmp_path, body, "qnn")["cut-start"]
    assert (advice.nodes, advice.fix) == (("Cast_f",), "manual")
    assert advice.message.endswith("edgekit prepare --inputs z,f")
    cut = prepare_model(load_model(tmp_path / "m.onnx"), tmp_path / "cut.onnx", inputs=["z", "f"])
    report = check_file(cut.path, "qnn")
    assert (report.verdict, report.taken) == ("yes", report.nodes)


@pytest.mark.parametrize(
    ("body", "target"),
    [
        pytest.param(f"{_HEAD} d = Det(r) y = Relu(d) }}", "nnapi", id="the target computes a part"),
        pytest.param(
            "(float[1,2,4,4] x) => (float[1,2] y) <float[2,2] w = {1, 2, 3, 4}> { d = Det(x) y = MatMul(d, w) }",
            "qnn",
            id="the work stands behind",
        ),
    ],
)
def test_a_model_is_not_cut_where_that_gives_no_more(tmp_path: Path, body: str, target: str) -> None:
    assert "cut-end" not in _advice(tmp_path, body, target)


def test_a_model_whose_output_stands_before_its_work_is_not_begun_behind_it(tmp_path: Path) -> None:
    body = """(int16[1,4] x) => (float[1,1] y, float[1,4] f) <float[4,1] w = {1, 2, 3, 4}>
        { f = Cast<to=1>(x) y = MatMul(f, w) }"""
    assert "cut-start" not in _advice(tmp_path, body, "qnn")


def test_a_target_that_wants_the_whole_model_is_told_to_have_no_float64_at_its_ends(tmp_path: Path) -> None:
    body = "(double[2] x, float[2] z) => (double[2] y) { a = Cast<to=1>(x) b = Add(a, z) y = Cast<to=11>(b) }"
    advice = _advice(tmp_path, body, "qnn")["float-interface"]
    assert (advice.nodes, advice.fix) == (("Cast_a", "Cast_y"), "manual")
    assert advice.message.startswith("export 'x', 'y' as float32: ")
    assert "float-interface" not in _advice(tmp_path, body, "coreml")


def test_where_all_is_taken_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert _advice(tmp_path, "(float[4] x) => (float[4] y) { y = Relu(x) }", "nnapi") == {}


@pytest.mark.parametrize("target", ["cpu", "nnapi", "qnn"])
def test_a_model_in_the_layout_of_one_pc_is_refused_on_all_targets(tmp_path: Path, target: str) -> None:
    """A session saves such a model at its default level; no processor of a phone has the kernels."""
    body = """(float[1,8,4,4] x) => (float[1,8,4,4] y) <float[8,8,1,1] w = {WEIGHTS}>
        { c = Conv(x, w) r = com.microsoft.nchwc.ReorderInput(c) p = com.microsoft.nchwc.MaxPool<kernel_shape=[1,1]>(r)
        y = com.microsoft.nchwc.ReorderOutput<channels=8>(p) }"""
    text = body.replace("WEIGHTS", ",".join(["0.5"] * 64))
    path = tmp_path / "m.onnx"
    imports = '"" : 17, "com.microsoft.nchwc" : 1'
    onnx.save(parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]> g {text}"), path)
    report = check_file(path, target)
    assert (report.verdict, report.is_refused) == ("no", True)
    assert [node.fatal for node in report.node_list] == [False, True, True, True]
    # A build, which stops there, says the same.
    assert find_stopping(report)[1].endswith("for the CPU of one PC. Give the model as it was before")
    told = [advice for advice in report.advice if advice.id == "session-fails"]
    assert all(each.message.endswith("for the CPU of one PC. Give the model as it was before") for each in told)
    assert {name for each in told for name in each.nodes} == {node.name for node in report.node_list[1:]}
    assert not any(each.id == "no-builder" for each in report.advice)


def test_a_rewrite_by_which_more_nodes_and_less_of_the_work_stay_on_the_cpu_is_advised(tmp_path: Path) -> None:
    """Of the nodes that become several XNNPACK takes the convolution, and no Concat."""
    body = """(float[1,2,4,4] x) => (float[1,4,4,4] y) <float s = {0.01}, int8 z = {-128}, int8 o = {0},
        int8[2,2,1,1] w = {1,2,3,4}>
        { q = QuantizeLinear(x, s, z) c = QLinearConv(q, s, z, w, s, o, s, z)
        a = com.microsoft.QLinearConcat<axis=1>(s, z, c, s, z, c, s, z) b = com.microsoft.QLinearSigmoid(a, s, z, s, z)
        d = com.microsoft.QLinearSigmoid(b, s, z, s, z) y = DequantizeLinear(d, s, z) }"""
    advice = _advice(tmp_path, body, "xnnpack")["split-qlinear"]
    assert (advice.gain_nodes, advice.gain_macs) == (0, 64)
