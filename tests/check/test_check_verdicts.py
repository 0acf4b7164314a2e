"""Convolutional networks are judged as the providers judge them, float and quantized both ways."""

from pathlib import Path

import msgspec
import pytest
from check_models import check_file, check_text, conv_net, quantized_net, why_not
from onnx import parser
from onnxruntime.quantization import QuantType

from edgekit.check.check import check_graph
from edgekit.check.graph import view_graph
from edgekit.check.report import CheckReport
from edgekit.check.rules.rulebook import load_rules
from edgekit.target import load_target

RELU = parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[1,3,4,4] x) => (float[1,3,4,4] y) { y = Relu(x) }'
)


def _taken(report: CheckReport, op: str) -> set[bool]:
    return {node.taken for node in report.node_list if node.op == op}


def test_the_float_net_is_taken_by_all(tmp_path: Path) -> None:
    model = conv_net(tmp_path / "net.onnx")
    for target in ("nnapi", "qnn"):
        report = check_file(model, target)
        assert (report.verdict, report.taken, report.partitions) == ("yes", 9, 1)
    assert why_not(list(check_file(model, "coreml").node_list)) == "it needs model_format NeuralNetwork, not MLProgram"
    assert _taken(check_file(model, "xnnpack"), "Conv") == {True}


@pytest.mark.parametrize(
    ("activation", "target", "taken"),
    [
        (QuantType.QUInt8, "nnapi", True),
        (QuantType.QInt8, "nnapi", False),
        (QuantType.QUInt8, "xnnpack", False),
        (QuantType.QInt8, "xnnpack", True),
        (QuantType.QUInt8, "qnn", True),
        (QuantType.QInt8, "qnn", True),
        (QuantType.QUInt8, "coreml", False),
        (QuantType.QInt8, "coreml", False),
    ],
)
def test_the_sign_of_activations_decides(tmp_path: Path, activation: QuantType, target: str, *, taken: bool) -> None:
    report = check_file(quantized_net(tmp_path / "q.onnx", activation), target)
    assert _taken(report, "Conv") == {taken}
    assert (report.verdict == "yes") is taken


def test_per_channel_weights_need_api_29(tmp_path: Path) -> None:
    report = check_file(quantized_net(tmp_path / "q.onnx", QuantType.QUInt8), "nnapi", {"api_level": "28"})
    assert _taken(report, "Conv") == {False}
    assert "per channel needs api_level 29" in why_not(list(report.node_list))


def test_a_node_that_stops_the_session_makes_the_verdict_no() -> None:
    body = "g (float[2,4] x) => (float[2,4] y) { y = Elu(x) }"
    on_v68, on_v79 = (check_text(body, "qnn", {"soc_model": soc})[0] for soc in ("30", "69"))
    assert (on_v68.fatal, on_v68.taken) == (True, False)
    assert (on_v79.fatal, on_v79.taken) == (False, True)


def test_a_quantized_resize_stops_xnnpack() -> None:
    body = (
        "g (int8[1,2,4,4] x) => (int8[1,2,8,8] y) <float s = {0.1}, int8 z = {0}, float[4] f = {1,1,2,2}> "
        '{ a = DequantizeLinear(x, s, z) b = Resize<mode="linear">(a, , f) y = QuantizeLinear(b, s, z) }'
    )
    assert all(node.fatal and not node.taken for node in check_text(body, "xnnpack"))


def test_a_risk_makes_the_verdict_maybe_at_best(tmp_path: Path) -> None:
    model = conv_net(tmp_path / "net.onnx")
    on_v68, on_v79 = (check_file(model, "qnn", {"soc_model": soc}) for soc in ("30", "69"))
    assert (on_v68.taken, on_v68.verdict, len(on_v68.risks)) == (9, "maybe", 1)
    assert (on_v79.taken, on_v79.verdict, on_v79.risks) == (9, "yes", ())


def test_work_counts_and_not_nodes() -> None:
    body = (
        "g (float[1,64,56,56] x, float[64,64,3,3] w) => (float[1,64,56,56] z) "
        "{ c = Conv <pads=[1,1,1,1]> (x, w) a = Neg(c) b = Neg(a) z = Neg(b) }"
    )
    nodes = check_text(body, "coreml")
    assert [node.taken for node in nodes] == [True, False, False, False]
    assert nodes[0].macs == 64 * 64 * 9 * 56 * 56
    assert nodes[0].bytes == (2 * 64 * 56 * 56 + 64 * 64 * 9) * 4


@pytest.mark.parametrize(("opset", "inside"), [(12, False), (13, True), (17, True), (18, False)])
def test_a_model_is_judged_from_the_first_opset_to_the_last(opset: int, *, inside: bool) -> None:
    book = load_rules(load_target("nnapi"))
    book = msgspec.structs.replace(book, provider=msgspec.structs.replace(book.provider, opset_min=13, opset_max=17))
    (node,) = check_graph(view_graph(RELU), book, load_target("nnapi").settings, opset=opset)
    assert node.taken is inside
    assert ("is outside 13 to 17" in why_not([node])) is not inside


@pytest.mark.parametrize(
    ("since", "most", "reason"),
    [
        ((1, 14), 99, ""),
        ((14, 99), 14, ""),
        ((15, 99), 99, "Relu of opset 14 is older than 15, the first that is taken"),
        ((1, 13), 99, "Relu of opset 14 is newer than 13, the last that is taken"),
        ((1, 99), 13, "Relu of opset 14 is newer than 13, the last that is taken"),
    ],
)
def test_an_operator_is_taken_from_its_first_version_to_its_last(
    since: tuple[int, int], most: int, reason: str
) -> None:
    book = load_rules(load_target("nnapi"))
    ops = tuple(msgspec.structs.replace(op, since=since) if "Relu" in op.types else op for op in book.op)
    book = msgspec.structs.replace(book, op=ops, provider=msgspec.structs.replace(book.provider, since_max=most))
    assert why_not(list(check_graph(view_graph(RELU), book, load_target("nnapi").settings, opset=17))) == reason
