"""Nodes form units, and units partitions: those that a provider gives back are given back."""

import pytest
from check_models import check_text, graph_of, why_not
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from edgekit.check.placement import place_units
from edgekit.check.propagation import propagate_quantization
from edgekit.check.rules.rulebook import Placing
from edgekit.check.rules.units import SELECTORS, Unit, group_units
from edgekit.graph.graph import Graph, infer_graph

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
