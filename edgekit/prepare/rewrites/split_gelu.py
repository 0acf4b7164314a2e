"""Gelu as its formula: Core ML does not take the operator of ONNX Runtime's own domain, NNAPI none at all."""

import math
from collections.abc import Callable, Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "split-gelu"
TANH_ID = "split-tanh-gelu"
_ERF_SINCE = 9


def split_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each exact Gelu, of ONNX or ONNX Runtime, as x / 2 * (1 + Erf(x / sqrt 2)), in place.

    Returns the names of the nodes. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Gelu"}, _expander("none", _bend_erf)) if opset >= _ERF_SINCE else ()


def split_tanh_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Gelu with Tanh, FastGelu too, as x / 2 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), in place.

    Returns the names of the nodes. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(graph, opset, {"Gelu", "FastGelu"}, _expander("tanh", _bend_tanh))


def _expander(
    form: str, bend: Callable[[Writer, str, str], str]
) -> Callable[[Graph, Node], Sequence[onnx.NodeProto] | None]:
    def expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
        found = "tanh" if node.op_type == "FastGelu" else node.attributes.get("approximate", "none")
        dtype = str(graph.value(node.input[0]).dtype)
        if found != form or dtype not in FLOATS:
            return None
        writer = Writer(graph=graph, node=node)
        # FastGelu may add a bias first.
        data = writer.add("Add", node.input[:2], "sum") if node.has_input(1) else node.input[0]
        one, half = (writer.constant(part, value, dtype) for part, value in (("one", 1), ("half", 0.5)))
        gate = writer.add("Add", [bend(writer, data, dtype), one], "gate")
        writer.add("Mul", [writer.add("Mul", [data, half], "halved"), gate])
        return writer.nodes

    return expand


def _bend_erf(writer: Writer, data: str, dtype: str) -> str:
    root = writer.constant("root", math.sqrt(0.5), dtype)
    return writer.add("Erf", [writer.add("Mul", [data, root], "narrow")], "bent")


def _bend_tanh(writer: Writer, data: str, dtype: str) -> str:
    cubic, root = writer.constant("cubic", 0.044715, dtype), writer.constant("root", math.sqrt(2 / math.pi), dtype)
    # x * (1 + 0.044715 * x * x) spares a Pow, which some providers lack.
    square = writer.add("Mul", [writer.add("Mul", [data, data], "square"), cubic], "bow")
    moved = writer.add("Add", [data, writer.add("Mul", [data, square], "third")], "moved")
    return writer.add("Tanh", [writer.add("Mul", [moved, root], "narrow")], "bent")
