"""Node units form as ONNX Runtime's selectors form them."""

import pytest
from check_models import graph_of

from edgekit.check.propagation import propagate_quantization
from edgekit.check.rules.units import SELECTORS, Unit, group_units

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
def test_what_is_no_unit(body: str) -> None:
    assert not any(unit.is_qdq and unit.node.op_type != "Neg" for unit in _units(
        _wrap("uint8[4] x, uint8[4] w, int8[4] v", body)).values())  # fmt: skip


@pytest.mark.parametrize(("zero", "absorbed"), [("z", True), ("m", False)])
def test_an_activation_that_the_q_makes_redundant_is_absorbed(zero: str, *, absorbed: bool) -> None:
    body = f"a = DequantizeLinear(x, s, z) b = Sigmoid(a) c = Relu(b) y = QuantizeLinear(c, s, {zero})"
    assert _units(_wrap("uint8[4] x", body))["Sigmoid"].is_qdq is absorbed


@pytest.mark.parametrize("op", ["Tanh", "Selu"])
def test_each_reader_of_a_dq_has_one_of_its_own(op: str) -> None:
    text = (
        f"(uint8[4] x) => (uint8[4] y, uint8[4] v) <{SCALES}> {{ a = DequantizeLinear(x, s, z) b = Sigmoid(a) "
        f"y = QuantizeLinear(b, s, z) c = {op}(a) v = QuantizeLinear(c, s, z) }}"
    )
    units = _units(text)
    assert len(units["Sigmoid"].members) == 3
    # Selu is never a unit, so that its DQ and Q are alone.
    assert set(units) == ({"Sigmoid", "Tanh"} if op == "Tanh" else {"Sigmoid", "Selu", *QUANTIZERS})


def test_no_selectors_no_units() -> None:
    body = "a = DequantizeLinear(x, s, z) b = Sigmoid(a) y = QuantizeLinear(b, s, z)"
    assert len(group_units(graph_of(f"g {_wrap('uint8[4] x', body)}"), None)) == 3
