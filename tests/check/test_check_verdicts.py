"""Convolutional networks are judged as the providers judge them, float and quantized both ways."""

from pathlib import Path
from typing import Any

import onnx
import pytest
from check_models import TARGETS, check_file, check_text, conv_net, graph_of, quantized_net, why_not
from msgspec.structs import replace
from onnx import parser
from onnxruntime.quantization import QuantType
from tiny_models import parse_net

from edgekit.check.check import check_graph, count_crossings
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.check.rules.rulebook import load_rules
from edgekit.graph.graph import infer_graph
from edgekit.target import load_target

RELU = parse_net("(float[1,3,4,4] x) => (float[1,3,4,4] y) { y = Relu(x) }")


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
def test_the_sign_of_int8_decides_what_is_taken(
    tmp_path: Path, activation: QuantType, target: str, *, taken: bool
) -> None:
    report = check_file(quantized_net(tmp_path / "q.onnx", activation), target)
    assert _taken(report, "Conv") == {taken}
    assert (report.verdict == "yes") is taken
    assert {node.integers for node in report.node_list if node.op == "Conv"} == {taken}
    assert not any(node.integers for node in report.node_list if node.is_quantizer)


def test_per_channel_weights_need_api_29(tmp_path: Path) -> None:
    report = check_file(quantized_net(tmp_path / "q.onnx", QuantType.QUInt8), "nnapi", {"api_level": "28"})
    assert _taken(report, "Conv") == {False}
    assert "per channel needs api_level 29" in why_not(list(report.node_list))


def test_a_node_that_stops_the_session_makes_the_verdict_no() -> None:
    body = "g (float[2,4] x) => (float[2,4] y) { y = Elu(x) }"
    on_v68, on_v79 = (check_text(body, "qnn", {"soc_model": soc})[0] for soc in ("30", "69"))
    assert (on_v68.fatal, on_v68.taken) == (True, False)
    assert (on_v79.fatal, on_v79.taken) == (False, True)


@pytest.mark.parametrize("behind", ["y = Cast<to=2>(m)", "c = Cast<to=1>(m) y = Cast<to=2>(c)"])
def test_bytes_that_are_pooled_make_no_session_also_where_the_graph_ends(behind: str) -> None:
    pool = "m = MaxPool<kernel_shape=[2,2]>(x)"
    for body in (f"{{ {pool} {behind} }}", f"{{ {pool.replace('m =', 'y =')} }}"):
        first, *_ = check_text(f"(uint8[1,2,4,4] x) => (uint8[1,2,3,3] y) {body}", "qnn")
        assert (first.fatal, first.taken) == (True, False)


@pytest.mark.parametrize("attributes", ["", "<output_shape=[8,8]>", "<output_padding=[1,1], strides=[2,2]>"])
@pytest.mark.parametrize(("weight", "fatal"), [("<float[1,1,2,2] w = {1,1,1,1}>", True), ("", False)])
def test_a_crash_is_not_prevented_by_what_is_refused_after_it(attributes: str, weight: str, *, fatal: bool) -> None:
    given = "float[1,1,3,3] x" + (", float[1,1,2,2] w" if not weight else "")
    body = f"g ({given}) => (float[1,1,H,W] y) {weight} {{ y = ConvTranspose{attributes}(x, w) }}"
    (node,) = check_text(body, "coreml", {"ios": "18"})
    assert (node.taken, node.fatal) == (False, fatal)


@pytest.mark.parametrize(("before", "after"), [("1,2,4,4", "1,2,8"), ("1,2,0,4", "1,2,0,8")])
@pytest.mark.parametrize("scales", [", f", ""])
def test_a_resize_with_contradictory_or_empty_shapes_has_a_verdict(before: str, after: str, scales: str) -> None:
    body = f"g (float[{before}] x) => (float[{after}] y) <float[4] f = {{1,1,2,2}}> {{ y = Resize(x, {scales}) }}"
    for target in ("qnn", "coreml", "nnapi", "xnnpack"):
        assert len(check_text(body.replace(", )", ")"), target)) == 1


def test_a_quantized_resize_stops_xnnpack_before_1_29() -> None:
    body = """g (int8[1,2,4,4] x) => (int8[1,2,8,8] y) <float s = {0.1}, int8 z = {0}, float[4] f = {1,1,2,2}>
        { a = DequantizeLinear(x, s, z) b = Resize<mode="linear">(a, , f) y = QuantizeLinear(b, s, z) }"""
    assert all(node.fatal and not node.taken for node in check_text(body, "xnnpack", {"ort": "1.26.0"}))
    assert all(node.taken and not node.fatal for node in check_text(body, "xnnpack"))


@pytest.mark.parametrize("listed", ["x", "w", "y"])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_a_scale_in_a_list_stops_xnnpack_at_a_transposed_convolution(op: str, listed: str) -> None:
    scales = ", ".join(f"float{'[1]' * (name == listed)} s{name} = {{0.1}}" for name in "xwy")
    body = f"""g (int8[1,2,4,4] x) => (int8[1,2,4,4] y) <int8[2,2,1,1] w = {{1,2,3,4}}, {scales}>
        {{ a = DequantizeLinear(x, sx) b = DequantizeLinear(w, sw) c = {op}(a, b) y = QuantizeLinear(c, sy) }}"""
    body = body.replace("QuantizeLinear(c, sy)", "QuantizeLinear(c, sy, z)").replace("<int8", "<int8 z = {0}, int8", 1)
    assert {node.fatal for node in check_text(body, "xnnpack")} == {op == "ConvTranspose"}
    scalar = body.replace("float[1]", "float")
    assert all(node.taken and not node.fatal for node in check_text(scalar, "xnnpack"))


def test_a_risk_makes_the_verdict_maybe_at_best(tmp_path: Path) -> None:
    model = conv_net(tmp_path / "net.onnx")
    on_v68, on_v79 = (check_file(model, "qnn", {"soc_model": soc}) for soc in ("30", "69"))
    assert (on_v68.taken, on_v68.verdict, len(on_v68.risks)) == (9, "maybe", 1)
    assert (on_v79.taken, on_v79.verdict, on_v79.risks) == (9, "yes", ())


@pytest.mark.parametrize(("second", "risks"), [("s", 0), ("t", 1)])
def test_a_reshape_between_two_scales_is_a_risk_for_qnn(second: str, risks: int, tmp_path: Path) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[1,4,4] x) => (float[4,4] y)
        <float s = {{0.1}}, float t = {{0.3}}, uint8 z = {{0}}, int64[2] shape = {{4, 4}}>
        {{ a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z) c = Reshape(b, shape)
        d = QuantizeLinear(c, {second}, z) y = DequantizeLinear(d, {second}, z) }}"""
    onnx.save(parser.parse_model(text), str(tmp_path / "m.onnx"))
    assert len(check_file(tmp_path / "m.onnx", "qnn").risks) == risks


def test_the_verdict_counts_work_and_not_nodes() -> None:
    body = """g (float[1,64,56,56] x, float[64,64,3,3] w) => (float[1,64,56,56] z)
        { c = Conv <pads=[1,1,1,1]> (x, w) a = Neg(c) b = Neg(a) z = Neg(b) }"""
    nodes = check_text(body, "coreml")
    assert [node.taken for node in nodes] == [True, False, False, False]
    assert nodes[0].macs == 64 * 64 * 9 * 56 * 56
    assert nodes[0].bytes == (2 * 64 * 56 * 56 + 64 * 64 * 9) * 4


@pytest.mark.parametrize(
    ("opset", "op", "runtime", "taken", "known"),
    [
        (28, "Relu", "1.32.0", True, True),
        (28, "Celu", "1.32.0", True, False),
        (26, "Celu", "1.32.0", True, True),
        (28, "Relu", "1.31.1", False, True),
        (29, "Relu", "1.32.0", False, True),
    ],
)
def test_a_list_of_kernels_speaks_for_its_opsets(opset: int, op: str, runtime: str, taken: bool, known: bool) -> None:
    cpu, proto = load_target("cpu"), onnx.ModelProto()
    proto.CopyFrom(RELU)
    proto.opset_import[0].version, proto.graph.node[0].op_type = min(opset, 28), op
    (node,) = check_graph(infer_graph(proto), load_rules(cpu), cpu.settings, opset=opset, runtime=runtime)
    assert (node.taken, node.fatal, not node.risks) == (taken, not taken, known), (node.reasons, node.risks)


@pytest.mark.parametrize(("opset", "inside"), [(12, False), (13, True), (17, True), (18, False)])
def test_a_model_is_judged_from_the_first_opset_to_the_last(opset: int, *, inside: bool) -> None:
    book = load_rules(load_target("nnapi"))
    book = replace(book, provider=replace(book.provider, opset_min=13, opset_max=17))
    (node,) = check_graph(infer_graph(RELU), book, load_target("nnapi").settings, opset=opset)
    assert (node.taken, node.fatal) == (inside, False)
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
def test_an_operator_is_taken_in_the_versions_listed(since: tuple[int, int], most: int, reason: str) -> None:
    book = load_rules(load_target("nnapi"))
    ops = tuple(replace(op, since=since) if "Relu" in op.types else op for op in book.op)
    book = replace(book, op=ops, provider=replace(book.provider, since_max=most))
    assert why_not(list(check_graph(infer_graph(RELU), book, load_target("nnapi").settings, opset=17))) == reason


def report_of(*nodes: tuple[int, int, int | None], **more: Any) -> CheckReport:
    """Returns a report of nodes, each (macs, bytes, partition); None is not taken."""
    listed = tuple(
        CheckedNode(
            name=f"n{index}", op="Conv", domain="", taken=place is not None, reasons=(), macs=macs, bytes=size,
            partition=place, fatal=more.get("fatal", False), risks=more.get("risks", ()),
        )
        for index, (macs, size, place) in enumerate(nodes)
    )  # fmt: skip
    return CheckReport(
        target="t", model="m", sha256="", evidence="predicted", settings={}, node_list=listed, advice=(),
        crossing_bytes=more.get("crossing_bytes", 0), wants_whole=more.get("wants_whole", False),
        unsized_nodes=more.get("unsized_nodes", 0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "more", "verdict"),
    [
        ([(90, 50, 0), (10, 50, None)], {}, "yes"),
        ([(89, 50, 0), (11, 50, None)], {}, "maybe"),
        ([(90, 49, 0), (10, 51, None)], {}, "maybe"),
        ([(50, 50, 0), (50, 50, None)], {}, "maybe"),
        ([(49, 50, 0), (51, 50, None)], {}, "no"),
        ([(50, 50, 0), (50, 50, 1)], {}, "maybe"),
        ([(90, 50, 0), (10, 50, 1)], {}, "yes"),
        ([(90, 50, 0), (10, 50, 1)], {"wants_whole": True}, "maybe"),
        ([(90, 50, 0), (10, 50, None)], {"wants_whole": True}, "maybe"),
        ([(90, 50, 0), (10, 50, 0)], {"wants_whole": True}, "yes"),
        ([(90, 50, 0), (10, 50, 0)], {"crossing_bytes": 50}, "yes"),
        ([(90, 50, 0), (10, 50, 0)], {"crossing_bytes": 51}, "maybe"),
        ([(90, 50, 0), (10, 50, 0)], {"risks": ("it may fail",)}, "maybe"),
        ([(90, 50, 0), (10, 50, 0)], {"fatal": True}, "no"),
        ([(0, 90, 0), (0, 10, None)], {}, "yes"),
        ([(0, 49, 0), (0, 51, None)], {}, "no"),
        ([(0, 0, 0), (0, 0, None)], {}, "maybe"),
        ([(0, 0, 0), (0, 0, None), (0, 0, None)], {}, "no"),
        ([(90, 50, 0), (10, 50, None)], {"unsized_nodes": 1}, "maybe"),
        ([(90, 50, 0), (10, 50, 0)], {"unsized_nodes": 1}, "yes"),
        ([], {}, "no"),
    ],
)
def test_the_verdict_follows_the_work(
    nodes: list[tuple[int, int, int | None]], more: dict[str, Any], verdict: str
) -> None:
    assert report_of(*nodes, **more).verdict == verdict


def test_shares_are_of_the_work_and_of_the_bytes() -> None:
    report = report_of((60, 10, 0), (20, 20, 1), (20, 70, None), crossing_bytes=40)
    assert (report.nodes, report.taken, report.partitions) == (3, 2, 2)
    assert (report.taken_macs, report.taken_bytes, report.main_share) == (0.8, 0.3, 0.6)
    assert (report.crossing_share, report.integer_macs, report.is_refused) == (0.4, 0.0, False)
    assert report_of((1, 10, 0), crossing_bytes=40).crossing_share == 1.0
    fatal = replace(report.node_list[2], fatal=True)
    refused = replace(report, node_list=(*report.node_list[:2], fatal))
    assert (refused.is_refused, refused.verdict) == (True, "no")
    integer = replace(report.node_list[1], integers=True)
    assert replace(report, node_list=(*report.node_list[:1], integer)).integer_macs == 0.25


@pytest.mark.parametrize(
    ("places", "count"), [((0, 0, 0, 0), 0), ((0, None, 0, 1), 3), ((None, 0, 0, 0), 1), ((0, 0, 0, None), 1)]
)
def test_a_value_crosses_once_where_one_of_its_readers_is_elsewhere(places: tuple[int | None, ...], count: int) -> None:
    graph = graph_of("g (float[1,4] x) => (float[1,4] y) { a = Neg(x) b = Abs(a) c = Add(a, b) y = Exp(c) }")
    nodes = report_of(*((1, 1, place) for place in places)).node_list
    assert count_crossings(graph, nodes) == (count, 16 * count)


def test_what_crosses_behind_a_body_is_told_by_the_nodes_of_the_main_graph() -> None:
    text = """g (bool c, float[1,4] x) => (float[1,4] y) { a = Neg(x)
      b = If(c) <then_branch = t () => (float[1,4] p) { n = Abs(x) p = If(c) <
          then_branch = u () => (float[1,4] q) { m = Neg(n) q = Exp(m) },
          else_branch = v () => (float[1,4] r) { r = Neg(n) }> },
        else_branch = e () => (float[1,4] s) { s = Exp(a) }>
      y = Exp(b) }"""
    graph = graph_of(text)
    inside = (7, 8, 9, 10, 11, 12)
    for behind, count in ((0, 0), (1, 1)):
        nodes = report_of(*((1, 1, place) for place in (0, 0, *inside, behind))).node_list
        assert count_crossings(graph, nodes) == (count, 16 * count)


def test_the_report_of_a_model_counts_crossings_and_says_if_the_target_wants_it_whole(tmp_path: Path) -> None:
    text = "g (float[1,4] x) => (float[1,4] y) { a = Relu(x) b = Mish(a) y = Relu(b) }"
    onnx.save(parse_net(text, opset=18), tmp_path / "m.onnx")
    report = check_file(tmp_path / "m.onnx", "qnn")
    assert (report.taken, report.crossings, report.crossing_bytes) == (2, 2, 32)
    wants = {name: check_file(tmp_path / "m.onnx", name).wants_whole for name in TARGETS}
    assert wants == {name: name == "qnn" for name in TARGETS}


@pytest.mark.parametrize(("alone", "fatal"), [(False, False), (True, True)])
def test_what_the_only_provider_refuses_stops_the_session(*, alone: bool, fatal: bool) -> None:
    book = load_rules(load_target("nnapi"))
    book = replace(book, provider=replace(book.provider, alone=alone))
    for body, opset in (("LSTM(x)", 17), ("Relu(x)", 6), ("Elu(x)", 17), ("Split(x)", 11)):
        graph = graph_of(f"g (float[1,4] x) => (float[1,4] y) {{ y = {body} }}", opset)
        (node,) = check_graph(graph, book, load_target("nnapi").settings, opset=opset)
        assert (node.taken, node.fatal) == (False, fatal), body


@pytest.mark.parametrize(("minor", "whole"), [("16", False), ("17", True), ("18", True)])
def test_an_activation_joins_its_unit_from_a_version_of_onnx_runtime_on(minor: str, *, whole: bool) -> None:
    target = load_target("xnnpack")
    book = load_rules(target)
    assert book.units.clip_from_ort_minor == 17
    body = """g (uint8[4] x) => (uint8[4] y) <float s = {0.5}, uint8 z = {0}> {
      a = DequantizeLinear(x, s, z) b = Sigmoid(a) c = Relu(b) y = QuantizeLinear(c, s, z) }"""
    graph = graph_of(body)
    units = replace(book.units, add={"Sigmoid": "unary"})
    nodes = check_graph(graph, replace(book, units=units), {**target.settings, "ort": f"1.{minor}.0"}, opset=17)
    assert [node.unit is not None for node in nodes] == ([True, False, True, True] if whole else [False] * 4)
    assert not any(node.integers for node in nodes if node.op == "Relu")
