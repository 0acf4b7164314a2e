"""Nodes form units, and units partitions: those that a provider gives back are given back."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
import onnxruntime
import pytest
from check_models import check_text, conv_net, graph_of, save_text, why_not
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper
from tiny_models import parse_model, parse_net

from edgekit.check.check import check_model
from edgekit.check.placement import place_units
from edgekit.check.propagation import propagate_quantization
from edgekit.check.report import ModelNode, add_model_nodes, trace_model, trace_nodes
from edgekit.check.rules.rulebook import Placing
from edgekit.check.rules.units import SELECTORS, Unit, group_units
from edgekit.cli.main import run_command
from edgekit.devices.find import find_device
from edgekit.devices.observe import match_nodes, observe_placement
from edgekit.graph.graph import Graph, infer_graph
from edgekit.model.model import load_model
from edgekit.prepare.clean import prepare_model
from edgekit.target import load_target

WAVE = Placing(style="wave")


def _chain(edges: list[int]) -> Graph:
    """Node n reads what node edges[n] made, or the input where that is negative."""
    nodes = [
        helper.make_node("Neg", [f"v{source}" if source >= 0 else "x"], [f"v{at}"], f"n{at}")
        for at, source in enumerate(edges)
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [2])], [])
    return infer_graph(helper.make_model(graph))


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    size = draw(st.integers(1, 12))
    edges = [draw(st.integers(-1, at - 1)) for at in range(size)]
    return edges, draw(st.lists(st.booleans(), min_size=size, max_size=size))


@given(_cases())
def test_each_supported_unit_has_its_place(case: tuple[list[int], list[bool]]) -> None:
    """In one partition, none before one that it reads from; an unsupported node between two splits them."""
    edges, supported = case
    graph = _chain(edges)
    places = place_units(graph, group_units(graph, None), supported, WAVE).partitions
    assert [place is not None for place in places] == supported
    for at, source in enumerate(edges):
        here, before = places[at], places[source] if source >= 0 else None
        assert here is None or before is None or before <= here
        above = edges[source] if source >= 0 and not supported[source] else -1
        if above >= 0 and supported[at] and supported[above]:
            assert places[at] != places[above]


LONE = "g (float[4] x) => (float[2,2] y) <int64[2] s = {2,2}> { a = Erf(x) y = Reshape(a, s) }"
MOVING = (
    "g (float[4] x) => (float[2,2] y) <int64[2] s = {2,2}> { a = Neg(x) b = Reshape(a, s) c = Transpose(b) y = Neg(c) }"
)
CONSTANT = "g (float[2] x) => (float[2] y) <float[2] c = {1,2}> { y = Erf(x) z = Sqrt(c) }"


@pytest.mark.parametrize(
    ("target", "body", "reason"),
    [
        ("nnapi", LONE, "a lone Reshape back"),
        ("coreml", MOVING, "only nodes that compute nothing"),
        ("nnapi", CONSTANT, "nothing that its partition reads is computed"),
    ],
)
def test_a_group_that_computes_nothing_is_given_back(target: str, body: str, reason: str) -> None:
    assert reason in why_not(check_text(body, target))


def test_nothing_after_a_stop_operator_is_taken() -> None:
    body = """g (float[1,4,4] b, float[1,1,4] s) => (int64[N,3] y, float[1,4,4] z)
        { y = NonMaxSuppression(b, s) f = Cast<to=1>(y) h = Relu(f) z = Relu(b) }"""
    nodes = check_text(body, "nnapi")
    assert nodes[-1].taken
    assert not any(node.taken for node in nodes[:-1])


def test_xnnpack_takes_an_activation_only_with_its_convolution() -> None:
    weight = "<float[2,2,1,1] w = {1,1,1,1}>"
    good = f"g (float[1,2,4,4] x) => (float[1,2,4,4] y) {weight} {{ c = Conv(x, w) y = Relu(c) }}"
    bad = f"g (float[1,2,4,4] x) => (float[1,2,4,4] y) {weight} {{ c = Conv(x, w) y = Relu(c) z = Neg(c) }}"
    assert [node.taken for node in check_text(good, "xnnpack")] == [True, True]
    assert [node.taken for node in check_text(bad, "xnnpack")] == [True, False, False]
    assert "right after a Conv" in why_not(check_text(bad, "xnnpack"))


def test_a_body_is_refused_with_what_is_in_it_where_bodies_are_taken_whole() -> None:
    body = """g (bool c, float[2] x) => (float[2] y)
        { y = If (c) <then_branch = t () => (float[2] a) { a = Relu(x) },
        else_branch = e () => (float[2] b) { b = Mish(x) }> }"""
    nodes = check_text(body, "qnn", opset=18)
    assert [node.taken for node in nodes] == [False, False, False]
    assert "in its body is not taken" in why_not(nodes[:1])
    assert "in its body" not in why_not(check_text(body, "nnapi", opset=18)[:1])


@pytest.mark.parametrize("outside", ["Neg(x)", "Mul(x, w)"])
def test_qnn_takes_an_if_whose_bodies_read_no_constant_that_only_they_read(outside: str) -> None:
    body = f"""g (bool c, float[2] x) => (float[2] y) <float[2] w = {{1,2}}> {{ n = {outside}
        y = If (c) <then_branch = t () => (float[2] a) {{ a = Mul(n, w) }},
        else_branch = e () => (float[2] b) {{ b = Neg(n) }}> }}"""
    nodes = check_text(body, "qnn")
    assert [node.taken for node in nodes] == [True, *[outside != "Neg(x)"] * 3]
    assert ("only its bodies read the constant 'w'" in why_not(nodes[1:2])) == (outside == "Neg(x)")


def test_bodies_of_control_flow_follow_the_provider() -> None:
    body = """g (bool c, float[2] x) => (float[2] y)
        { y = If (c) <then_branch = t () => (float[2] a) { a = Relu(x) },
        else_branch = e () => (float[2] b) { b = Sigmoid(x) }> }"""
    nnapi, qnn = check_text(body, "nnapi"), check_text(body, "qnn")
    assert [node.op for node in nnapi] == ["If", "Relu", "Sigmoid"]
    assert not any(node.taken for node in nnapi)
    assert all(f"in the body of '{nnapi[0].name}'" in why_not([inner]) for inner in nnapi[1:])
    assert [(node.taken, node.partition, node.reasons, node.domain) for node in qnn] == [(True, 0, (), "ai.onnx")] * 3
    assert [(node.taken, node.partition) for node in nnapi[1:]] == [(False, None)] * 2


def test_a_quantized_concat_reads_its_own_partition_behind_its_first_input() -> None:
    """What another unit of the partition made is known there; what comes from outside is not: no session is made."""
    made = "{ d = DequantizeLinear(p, s, z) r = Add(d, d) q = QuantizeLinear(r, s, z) a = DequantizeLinear(p, s, z)"
    joined = "b = DequantizeLinear(q, s, z) c = Concat<axis=1>(a, b) y = QuantizeLinear(c, s, z) }"
    head = "g (uint8[1,1,4,4] p) => (uint8[1,2,4,4] y) <float s = {0.5}, uint8 z = {128}>"
    (concat,) = (node for node in check_text(f"{head} {made} {joined}", "nnapi") if node.op == "Concat")
    assert (concat.taken, concat.fatal) == (True, False)
    outside = made.replace("Add(d, d)", "HardSigmoid(d)")
    (concat,) = (node for node in check_text(f"{head} {outside} {joined}", "nnapi") if node.op == "Concat")
    assert (concat.taken, concat.fatal) == (False, True)


SHAPES = """g (float[N,4] x, int64[1] fed) => (float[M] y) <int64 i = {{0}}, int64[1] axes = {{0}}>
    {{ [s] s = Shape(x) [g] g = Gather(s, i) [u] u = Unsqueeze(g, axes) [c] c = Concat<axis=0>(u, {other})
    [r] y = Reshape(x, c) }}"""


def test_what_reads_shapes_alone_stays_where_they_lie() -> None:
    """The CPU computes the shape; a Reshape reads it there and runs on the device."""
    nodes = {node.name: node for node in check_text(SHAPES.format(other="fed"), "cuda")}
    assert {name for name, node in nodes.items() if node.taken} == {"s", "r"}
    assert "it computes a shape" in nodes["g"].reasons[0]


def test_what_reads_a_tensor_of_the_device_too_runs_there() -> None:
    text = SHAPES.format(other="d").replace("[u] u", "[d] d = Cast<to=7>(w) [u] u").replace("fed)", "fed, float[1] f)")
    text = text.replace("(w)", "(v)").replace("[d] d", "[v] v = Exp(f) [d] d")
    nodes = {node.name: node for node in check_text(text, "cuda")}
    assert (nodes["u"].taken, nodes["d"].taken, nodes["c"].taken) == (False, True, True)


QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
SCALES = "float s = {0.5}, float t = {0.25}, uint8 z = {0}, uint8 m = {128}, int8 i = {0}"


def _units(text: str) -> dict[str, Unit]:
    return {unit.node.op_type: unit for unit in group_units(propagate_quantization(graph_of(f"g {text}")), SELECTORS)}


def _wrap(inputs: str, body: str) -> str:
    return f"({inputs}) => (uint8[4] y) <{SCALES}> {{ {body} }}"


def test_a_quantized_add_is_one_unit() -> None:
    body = "a = DequantizeLinear(x, s, z) b = DequantizeLinear(w, t, z) c = Add(a, b) y = QuantizeLinear(c, s, z)"
    units = _units(_wrap("uint8[4] x, uint8[4] w", body))
    assert set(units) == {"Add"}
    assert (units["Add"].is_qdq, units["Add"].form, len(units["Add"].members)) == (True, "qdq-uint8", 4)
    assert [operand.name for operand in units["Add"].inputs] == ["x", "w"]


@pytest.mark.parametrize(
    "body",
    [
        "a = DequantizeLinear(x, s, z) b = DequantizeLinear(v, s, i) c = Add(a, b) y = QuantizeLinear(c, s, z)",
        "a = DequantizeLinear(x, s, z) c = Transpose(a) y = QuantizeLinear(c, t, z)",
        "a = DequantizeLinear(x, s, z) c = Relu(a) d = Neg(c) y = QuantizeLinear(c, s, z)",
        "a = DequantizeLinear(x, s, z) c = Selu(a) y = QuantizeLinear(c, s, z)",
        "a = DequantizeLinear(x, s, z) b = DequantizeLinear(w, s, z) c = MatMul(a, b) d = Neg(c)",
    ],
    ids=["mixed types", "other scale", "a float reader too", "no selector", "no Q"],
)
def test_groups_that_no_selector_accepts_are_no_unit(body: str) -> None:
    assert not any(unit.is_qdq and unit.node.op_type != "Neg" for unit in _units(
        _wrap("uint8[4] x, uint8[4] w, int8[4] v", body)).values())  # fmt: skip


@pytest.mark.parametrize(("zero", "absorbed"), [("z", True), ("m", False)])
def test_an_activation_that_the_q_makes_redundant_is_absorbed(zero: str, *, absorbed: bool) -> None:
    body = f"a = DequantizeLinear(x, s, z) b = Sigmoid(a) c = Relu(b) y = QuantizeLinear(c, s, {zero})"
    assert _units(_wrap("uint8[4] x", body))["Sigmoid"].is_qdq is absorbed


@pytest.mark.parametrize("op", ["Tanh", "Selu"])
def test_each_reader_of_a_dq_has_one_of_its_own(op: str) -> None:
    text = f"""(uint8[4] x) => (uint8[4] y, uint8[4] v) <{SCALES}> {{ a = DequantizeLinear(x, s, z) b = Sigmoid(a)
        y = QuantizeLinear(b, s, z) c = {op}(a) v = QuantizeLinear(c, s, z) }}"""
    units = _units(text)
    assert len(units["Sigmoid"].members) == 3
    # Selu is never a unit, so that its DQ and Q are alone.
    assert set(units) == ({"Sigmoid", "Tanh"} if op == "Tanh" else {"Sigmoid", "Selu", *QUANTIZERS})


def test_without_selectors_each_node_is_its_own_unit() -> None:
    body = "a = DequantizeLinear(x, s, z) b = Sigmoid(a) y = QuantizeLinear(b, s, z)"
    assert len(group_units(graph_of(f"g {_wrap('uint8[4] x', body)}"), None)) == 3


# Each node of the user's model is told of, also where preparation folded, fused, rewrote or removed it.


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
    assert (told["conv1"].macs, told["conv1"].bytes) == (8 * 8 * 8 * 27, (3 * 16 * 16 + 8 * 8 * 8) * 4)
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
    # Where another node bears the name, what was in the bodies shares its fate.
    source, prepared = (graph_of(f"g {text}") for text in (body, "(float[2] x) => (float[2] y) { [if] y = Neg(x) }"))
    assert len({trace.fate for _, _, trace in trace_nodes(source, prepared)}) == 1


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


# The graph that a provider is shown is the one that ONNX Runtime makes, node for node.

CONSTANTS = "float s = {0.05}, float t = {0.1}, uint8 z = {128}, uint8 i = {0}, int64[4] shape = {1,4,8,8}"
STEPS = {
    "quantize": "{o}q = QuantizeLinear({a}, s, z) {o} = DequantizeLinear({o}q, s, z)",
    "quantize otherwise": "{o}q = QuantizeLinear({a}, t, i) {o} = DequantizeLinear({o}q, t, i)",
    "transpose": "{o} = Transpose<perm = [0,1,2,3]>({a})",
    "reshape": "{o} = Reshape({a}, shape)",
    "pool": "{o} = MaxPool<kernel_shape = [1,1]>({a})",
    "relu": "{o} = Relu({a})",
    "add": "{o} = Add({a}, {b})",
}
# All of level 1 that could change such a graph, but for the two that are told here.
OTHERS = [
    "ConstantSharing", "CommonSubexpressionElimination", "DoubleQDQPairsRemover", "TransposeOptimizer",
    "Level1_RuleBasedTransformer", "ReshapeFusion",
]  # fmt: skip


@st.composite
def _graphs(draw: st.DrawFn) -> str:
    values, body = ["x"], list[str]()
    for at in range(draw(st.integers(2, 9))):
        a, b = draw(st.sampled_from(values[-3:])), draw(st.sampled_from(values))
        body.append(STEPS[draw(st.sampled_from(sorted(STEPS)))].format(a=a, b=b, o=f"v{at}"))
        values.append(f"v{at}")
    outputs = {value for value in values[1:] if f"({value}" not in " ".join(body)} | {draw(st.sampled_from(values[1:]))}
    told = ", ".join(f"float[1,4,8,8] {name}" for name in sorted(outputs))
    return f"g (float[1,4,8,8] x) => ({told}) <{CONSTANTS}> {{ {' '.join(body)} }}"


def _spell(nodes: Iterable[tuple[str, Sequence[str], Sequence[str]]], outputs: Iterable[str]) -> list[str]:
    """Returns each output as the expression that computes it, and the operators: names of values do not count."""
    made: dict[str, str] = {}
    ops: list[str] = []
    for op, inputs, results in nodes:
        ops.append(op)
        made[results[0]] = str(hash((op, *(made.get(name, name) for name in inputs))))
    return [*sorted(made.get(name, name) for name in outputs), *sorted(ops)]


@given(_graphs(), st.sampled_from([13, 17, 19, 21, 24]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_added_is_what_onnx_runtime_adds(tmp_path: Path, body: str, opset: int) -> None:
    proto = parse_net(body, opset=opset)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "shown.onnx")
    options.log_severity_level = 4
    providers = ["CPUExecutionProvider"]
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers, disabled_optimizers=OTHERS)
    theirs = onnx.load(str(tmp_path / "shown.onnx")).graph
    ours = propagate_quantization(infer_graph(proto))
    outputs = [value.name for value in proto.graph.output]
    assert _spell(((node.op_type, node.input, node.output) for node in ours.nodes), outputs) == _spell(
        ((node.op_type, node.input, node.output) for node in theirs.node), outputs
    )
    assert {node.name for node in infer_graph(proto).nodes} <= {node.name for node in ours.nodes}


QDQ = "[q] q = QuantizeLinear({0}, s, z) [d] d = DequantizeLinear(q, s, z)"
FIRST = "[p] p = QuantizeLinear(x, s, z) [o] o = DequantizeLinear(p, s, z)"
POOL = "[m] m = MaxPool<kernel_shape = [2,2]>"
SECOND = "[e] e = QuantizeLinear(m, {0}, z) [f] f = DequantizeLinear(e, {0}, z)"
SMALLEST = {
    "MaxPool before a Q": ("1,4,7,7", f"[r] r = Relu(x) {POOL}(r) {QDQ.format('m')} [y] y = Sigmoid(d)"),
    "MaxPool behind a DQ": ("1,4,7,7", f"{QDQ.format('x')} {POOL}(d) [y] y = Sigmoid(m)"),
    "Squeeze behind a DQ": ("4,8,8", f"{QDQ.format('x')} [m] m = Squeeze(d, a) [y] y = Sigmoid(m)"),
    "Unsqueeze before a Q": (
        "1,1,4,8,8", f"[r] r = Relu(x) [m] m = Unsqueeze(r, a) {QDQ.format('m')} [y] y = Sigmoid(d)"
    ),
    "ReduceMean before a Reshape and a Q": (
        "1,4", f"{FIRST} [m] m = ReduceMean<axes = [2,3]>(o) [h] h = Reshape(m, b) {QDQ.format('h')} [y] y = Sigmoid(d)"
    ),
    "a Q beside another reader": (
        "1,4,7,7", f"{QDQ.format('x')} {POOL}(d) {SECOND.format('t')} [g] g = Tanh(m) [y] y = Add(f, g)"
    ),
    "a DQ of two readers": (
        "1,4,7,7", f"{QDQ.format('x')} {POOL}(d) {SECOND.format('s')} {POOL.replace('m', 'n', 2)}(d) [y] y = Add(f, n)"
    ),
}  # fmt: skip


def _smallest(shape: str, body: str) -> str:
    constants = "float s = {0.05}, float t = {0.1}, uint8 z = {128}, int64[1] a = {0}, int64[2] b = {1, 4}"
    return f"g (float[1,4,8,8] x) => (float[{shape}] y) <{constants}> {{ {body} }}"


def _conv(kind: str, product: float) -> str:
    return f"""g (float[1,1,8,8] x) => (float[1,1,8,8] y) <float s = {{0.1}}, {kind} z = {{0}}, float u = {{0.01}},
        {kind}[1,1,1,1] w = {{9}}, int32[1] c = {{445}}, float b = {{{product}}}, int32 n = {{0}}>
        {{ [q] q = QuantizeLinear(x, s, z) [d] d = DequantizeLinear(q, s, z) [v] v = DequantizeLinear(w, u, z)
        [e] e = DequantizeLinear(c, b, n) [conv] f = Conv(d, v, e) [g] g = QuantizeLinear(f, s, z)
        [y] y = DequantizeLinear(g, s, z) }}"""


AVERAGE = (
    "g (float[1,3,8,8] x) => (float[1,3,8,8] y) <float s = {0.05}, uint8 z = {128}> { "
    + QDQ.format("x")
    + " [p] p = AveragePool<count_include_pad = 1, kernel_shape = [2,2], pads = [0,0,1,1], strides = [1,1]>(d)"
    " [e] e = QuantizeLinear(p, s, z) [y] y = DequantizeLinear(e, s, z) }"
)
HALF_SUM = (
    "g (float16[1,4,8,8] x) => (float16[1,1,8,8] y) <int64[1] a = {1}> { [r] r = Relu(x) [m] y = ReduceSum(r, a) }"
)
HALF_NORM = """g (float16[1,2,4,4] x) => (float16[1,2,4,4] y) <float16[2] s = {1, 2}> { [r] r = Relu(x)
    [n] n = BatchNormalization(r, s, s, s, s) [y] y = Sigmoid(n) }"""
CASES = {
    **{f"nnapi: {name}": ("nnapi", _smallest(*case)) for name, case in SMALLEST.items()},
    "nnapi: a bias of its own scale": ("nnapi", _conv("uint8", 0.0005)),
    "nnapi: a bias that fits": ("nnapi", _conv("uint8", 0.001)),
    "xnnpack: a bias of its own scale": ("xnnpack", _conv("int8", 0.0005)),
    "xnnpack: a bias that fits": ("xnnpack", _conv("int8", 0.001)),
    "xnnpack: a quantized AveragePool": ("xnnpack", AVERAGE),
    "coreml: a ReduceSum in fp16": ("coreml", HALF_SUM),
    "coreml: a BatchNormalization in fp16": ("coreml", HALF_NORM),
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "body"), CASES.values(), ids=CASES)
def test_the_smallest_graphs_are_placed_as_the_provider_places_them(tmp_path: Path, target: str, body: str) -> None:
    known = load_target(target)
    device = find_device("ios-sim" if target == "coreml" else "android:x86_64", known)
    missing = device.find_missing()
    if missing is not None:
        pytest.skip(f"{device.name} is not installed: {missing.reason}: {missing.command}")
    path = save_text(body, tmp_path / "m.onnx")
    seen = observe_placement(load_model(path), known, device, samples=0)
    matched = match_nodes(check_model(load_model(path), device.as_seen(known)), seen.providers)
    assert len(matched) >= 2
    assert [(node.name, node.taken) for node, _ in matched] == [(node.name, taken) for node, taken in matched]


def test_a_bias_may_have_any_scale_before_onnx_runtime_1_27() -> None:
    body = _conv("int8", 0.0005)
    assert "constant" in why_not(check_text(body, "xnnpack"))
    assert any(node.op == "Conv" and node.taken for node in check_text(body, "xnnpack", {"ort": "1.26.0"}))
