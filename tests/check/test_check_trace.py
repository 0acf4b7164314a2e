"""Each node of the user's model is told of, also where preparation folded, fused, rewrote or removed it."""

from pathlib import Path

import pytest
from check_models import conv_net, graph_of, save_text
from tiny_models import parse_model

from edgekit.check.check import check_model
from edgekit.check.report import ModelNode, add_model_nodes, trace_model, trace_nodes
from edgekit.cli.main import run_command
from edgekit.model.model import load_model
from edgekit.prepare.clean import prepare_model
from edgekit.target import load_target


def _tell(path: Path, target: str = "nnapi", dims: dict[str, int] | None = None) -> dict[str, ModelNode]:
    source = load_model(path)
    prepared = prepare_model(source, path.with_name("prepared.onnx"), dims or {})
    report = check_model(prepared, load_target(target))
    report = add_model_nodes(report, trace_model(source, prepared, dims or {}))
    known = {node.name for node in report.node_list}
    assert all(name in known for node in report.model_nodes for name in node.became)
    return {node.name: node for node in report.model_nodes}


def _tell_text(
    tmp_path: Path, body: str, target: str = "nnapi", dims: dict[str, int] | None = None
) -> dict[str, ModelNode]:
    return _tell(save_text(f"g {body}", tmp_path / "m.onnx"), target, dims)


def test_what_is_still_there_is_told_as_it_was_checked(tmp_path: Path) -> None:
    told = _tell(conv_net(tmp_path / "net.onnx"), "xnnpack")
    assert set(told) == {"conv1", "clip1", "conv2", "clip2", "conv3", "add", "pool", "flatten", "gemm"}
    assert {(node.fate, node.domain) for node in told.values()} == {("kept", "ai.onnx")}
    assert told["conv1"].macs == 8 * 8 * 8 * 27
    assert told["conv1"].bytes == (3 * 16 * 16 + 8 * 8 * 8) * 4
    assert (told["add"].taken, told["add"].reasons) == (False, ("XNNPACK has no builder for Add",))


def test_a_fused_node_names_what_it_became(tmp_path: Path) -> None:
    body = """(float[2,3] x) => (float[2,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[4] b = {1,2,3,4}>
        { [mm] a = MatMul(x, w) [bias] c = Add(a, b) [act] y = Relu(c) }"""
    told = _tell_text(tmp_path, body)
    assert (told["mm"].fate, told["bias"].fate, told["act"].fate) == ("fused", "rewritten", "kept")
    assert told["mm"].became == told["bias"].became
    assert "Gemm" in told["mm"].note
    assert (told["mm"].macs, told["bias"].macs) == (24, 0)
    assert told["mm"].taken


def test_the_reasons_of_what_it_became_are_its_reasons(tmp_path: Path) -> None:
    body = """(float[2,3] x) => (float[2,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}, float[4] b = {1,2,3,4}>
        { [mm] a = MatMul(x, w) [bias] c = Add(a, b) [odd] y = Shrink(c) }"""
    told = _tell_text(tmp_path, body, "qnn")
    assert not told["odd"].taken
    assert told["odd"].reasons == ("QNN has no builder for Shrink",)


def test_constants_copies_and_idle_nodes_say_why_they_are_gone(tmp_path: Path) -> None:
    body = """(float[N,6] x) => (float[2,3] y) <float[2] k = {1, 2}, int64[1] three = {3}, int64[1] zero = {0},
        float[6,1] w = {1, 2, 3, 4, 5, 6}>
        { [const] k1 = Constant<value_ints = [1]>() [alias] one = Identity(k1) [twice] t = Add(k, k)
        [shape] s = Shape(x) [first] f = Gather<axis = 0>(s, zero) [target] r = Concat<axis = 0>(f, three)
        [copy] c = Identity(x) [act] a = Relu(c) [half] h = Slice(a, zero, three, one) [form] y = Reshape(h, r)
        [idle] u = MatMul(a, w) }"""
    told = _tell_text(tmp_path, body, dims={"N": 2})
    fates = {name: node.fate for name, node in told.items()}
    assert fates == {
        "twice": "folded", "shape": "folded", "first": "folded", "target": "folded", "alias": "folded",
        "copy": "removed", "idle": "removed", "act": "kept", "half": "kept", "form": "kept",
    }  # fmt: skip
    assert "constants only" in told["first"].note
    assert told["copy"].note == "it only hands its input on"
    assert told["idle"].note == "no output of the model depends on it"
    assert all(told[name].taken and told[name].macs == told[name].bytes == 0 for name in ("shape", "copy", "idle"))


def test_of_two_equal_nodes_one_is_told_to_be_fused(tmp_path: Path) -> None:
    told = _tell_text(tmp_path, "(float[2] x) => (float[2] y) { [a] b = Neg(x) [c] d = Neg(x) [s] y = Mul(b, d) }")
    (gone,) = (node for node in told.values() if node.fate != "kept")
    (kept,) = {"a", "c"} - {gone.name}
    assert (gone.fate, gone.became, gone.note) == ("fused", (kept,), f"the same as Neg '{kept}'")


def test_nodes_without_a_name_are_found_again(tmp_path: Path) -> None:
    told = _tell_text(tmp_path, "(float[2] x) => (float[2] y) { a = Relu(x) y = Neg(a) }")
    assert {(node.name, node.fate) for node in told.values()} == {("Relu_a", "kept"), ("Neg_y", "kept")}


@pytest.mark.parametrize("fate", ["kept", "rewritten"])
def test_nodes_in_bodies_are_told_of(tmp_path: Path, fate: str) -> None:
    condition = "bool c, " if fate == "kept" else ""
    constant = "" if fate == "kept" else "<bool c = {1}>"
    body = (
        f"({condition}float[2] x) => (float[2] y) {constant} {{ [if] y = If (c) <"
        "then_branch = t () => (float[2] u) { [n] u = Neg(x) }, "
        "else_branch = e () => (float[2] v) { [m] v = Abs(x) }> }"
    )
    told = _tell_text(tmp_path, body)
    assert set(told) == {"if", "n", "m"}
    assert told["if"].fate == fate


def test_nodes_may_stand_before_those_that_they_read(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17, "local" : 1]> f (float[1,4] x) => (float[1,4] y) {
      m = ReduceMax<axes = [1]>(h) h = local.Twice(x) y = Relu(h) }
    <domain: "local", opset_import: ["" : 17]> Twice (a) => (b) { h = Add(a, a) b = Identity(h) }"""
    assert run_command(["check", str(parse_model(text, tmp_path / "m.onnx")), "--target", "xnnpack", "--json"]) in {
        0,
        1,
    }


def test_an_output_of_a_body_that_preparation_made_anew_is_removed() -> None:
    source, prepared = (
        graph_of(f"g (float[2] x) => (float[2] {name}) {{ [{name}] {name} = Neg(x) }}") for name in ("old", "new")
    )
    ((_, _, trace),) = trace_nodes(source, prepared)
    assert (trace.fate, trace.note) == ("removed", "nothing that is left reads it")
