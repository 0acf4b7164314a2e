"""GELU written as one node: exporters before opset 20 take it apart."""

import math
from collections.abc import Sequence

import onnx

from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import beside, factors, is_near, made_by, square_of, walk_product
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "join-gelu"
_SINCE = 20
_CUBIC = 0.044715


def join_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each x / 2 * (1 + Erf(x / sqrt 2)), and the form with Tanh, as one node, in place.

    That is ONNX's Gelu from opset 20 on, and before it ONNX Runtime's Gelu and FastGelu. Returns the names of the
    nodes that end such a pattern. The last bits may differ (1e-6 relative; with Tanh 1e-5).
    """
    if not any(node.op_type in {"Erf", "Tanh"} for node in graph.node):
        return ()
    return replace_nodes(graph, opset, {"Mul", "Div"}, lambda view, node: _join(view, node, opset))


def _join(graph: Graph, node: Node, opset: int) -> Sequence[onnx.NodeProto] | None:
    output = node.output[0]
    for gate in walk_product(graph, output):
        bent = made_by(graph, beside(graph, made_by(graph, gate, "Add"), 1.0) or "", "Erf", "Tanh")
        if bent is None:
            continue
        data = _find_erf(graph, bent) if bent.op_type == "Erf" else _find_tanh(graph, bent)
        if data is None or not _is_half(graph, output, data, gate):
            return None
        writer, form = Writer(graph=graph, node=node), "none" if bent.op_type == "Erf" else "tanh"
        if opset >= _SINCE:
            writer.add("Gelu", [data], approximate=form)
        else:
            writer.add("Gelu" if form == "none" else "FastGelu", [data], domain=ORT_DOMAIN)
        return writer.nodes
    return None


def _is_half(graph: Graph, output: str, data: str, gate: str) -> bool:
    """Returns True if a product is half of x times the gate; the type is float32 where the half is."""
    number, values = factors(graph, output, data)
    return is_near(number, 0.5) and sorted(values) == sorted((data, gate)) and graph.value(data).dtype != "float16"


def _find_erf(graph: Graph, erf: Node) -> str | None:
    """Returns x of Erf(x / sqrt 2)."""
    node = made_by(graph, erf.input[0], "Div", "Mul")
    if node is None:
        return None
    if node.op_type == "Mul":
        return beside(graph, node, math.sqrt(0.5))
    return node.input[0] if is_near(graph.number(node.input[1]), math.sqrt(2)) else None


def _find_tanh(graph: Graph, tanh: Node) -> str | None:
    """Returns x of Tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)), the cubic in any of its spellings."""
    node = made_by(graph, tanh.input[0], "Mul")
    inside = beside(graph, node, math.sqrt(2 / math.pi))
    added = made_by(graph, inside, "Add") if inside is not None else None
    if added is not None:
        return next((x for x, cubic in (added.input, added.input[::-1]) if _is_power(graph, cubic, x, 3)), None)
    # The form of GPT-J and of transformers' FastGELUActivation: x stands outside, a square inside.
    for each in walk_product(graph, tanh.input[0]):
        square = beside(graph, made_by(graph, each, "Add"), 1.0)
        if square is None:
            continue
        number, values = factors(graph, tanh.input[0])
        rest = [value for value in values if value != each]
        if len(rest) == 1 and is_near(number, math.sqrt(2 / math.pi)) and _is_power(graph, square, rest[0], 2):
            return rest[0]
    return None


def _is_power(graph: Graph, name: str, data: str, power: int) -> bool:
    """Returns True if a value is 0.044715 times a power of x."""
    number, values = factors(graph, name, data)
    if not is_near(number, _CUBIC):
        return False
    count = 0
    for value in values:
        pow_ = made_by(graph, value, "Pow")
        if value == data:
            count += 1
        elif square_of(graph, value) == data:
            count += 2
        elif pow_ is not None and pow_.input[0] == data and graph.number(pow_.input[1]) == power:
            count += power
        else:
            return False
    return count == power
