"""HardSwish written as one node, and taken apart: some providers take the one, some the other."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

SPLIT_ID = "split-hard-swish"
JOIN_ID = "join-hard-swish"
_JOIN_SINCE = 14


def split_hard_swishes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each HardSwish as x * Clip(x + 3, 0, 6) / 6, in place, and returns the names of the nodes.

    NNAPI has no HardSwish, but takes a Clip from 0 to 6. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"HardSwish"}, _split) if opset >= _JOIN_SINCE else ()


def join_hard_swishes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each x * Clip(x + 3, 0, 6) / 6, or x * HardSigmoid(x), as HardSwish, in place.

    Returns the names of the nodes that end such a pattern. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Mul", "Div"}, _join) if opset >= _JOIN_SINCE else ()


def _split(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS:
        return None
    dtype, writer = str(graph.value(node.input[0]).dtype), Writer(graph=graph, node=node)
    three, low, high, sixth = (
        writer.constant(part, value, dtype) for part, value in (("three", 3), ("low", 0), ("six", 6), ("sixth", 1 / 6))
    )
    moved = writer.add("Add", [node.input[0], three], "moved")
    gate = writer.add("Clip", [moved, low, high], "gate")
    scaled = writer.add("Mul", [gate, sixth], "scaled")
    writer.add("Mul", [node.input[0], scaled])
    return writer.nodes


def _join(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    data = _find_data(graph, node)
    if data is None or graph.value(data).dtype not in FLOATS:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("HardSwish", [data])
    return writer.nodes


def _find_data(graph: Graph, node: Node) -> str | None:
    """Returns x where the node ends x * gate(x) / 6 in any order."""
    whole = _unscale(graph, node)
    if whole is not None:
        product = graph.producers.get(whole)
        return _match_product(graph, product, scaled=False) if product is not None else None
    return _match_product(graph, node, scaled=True)


def _match_product(graph: Graph, node: Node, *, scaled: bool) -> str | None:
    if node.op_type != "Mul" or node.domain:
        return None
    for data, gate in permutations(node.input, 2):
        made = graph.producers.get(gate)
        if made is None:
            continue
        if scaled and _is_hard_sigmoid(made) and made.input[0] == data:
            return data
        inner = _unscale(graph, made) if scaled else gate
        if inner is not None and _gate_of(graph, inner) == data:
            return data
    return None


def _is_hard_sigmoid(node: Node) -> bool:
    alpha, beta = (float(node.attributes.get(name, default)) for name, default in (("alpha", 0.2), ("beta", 0.5)))
    return node.op_type == "HardSigmoid" and not node.domain and _is_close(alpha, 1 / 6) and beta == 0.5


def _unscale(graph: Graph, node: Node) -> str | None:
    """Returns what a node divides by six, or None if it does something else."""
    if node.domain or node.op_type not in {"Mul", "Div"}:
        return None
    if node.op_type == "Mul":
        return _beside(graph, permutations(node.input, 2), 1 / 6)
    # Of a Div only the second operand divides.
    return _beside(graph, pairwise(node.input), 6.0)


def _gate_of(graph: Graph, name: str) -> str | None:
    """Returns x where a value is Clip(x + 3, 0, 6)."""
    clip = graph.producers.get(name)
    if clip is None or clip.op_type != "Clip" or clip.domain:
        return None
    add = graph.producers.get(clip.input[0])
    bounds = [graph.number(bound) for bound in clip.input[1:]]
    if add is None or add.op_type != "Add" or add.domain or bounds != [0, 6]:
        return None
    return _beside(graph, permutations(add.input, 2), 3.0)


def _beside(graph: Graph, pairs: Iterable[tuple[str, ...]], factor: float) -> str | None:
    """Returns what stands beside a number in one of the pairs of operands."""
    for value, constant in pairs:
        number = graph.number(constant)
        if number is not None and _is_close(number, factor):
            return value
    return None


def _is_close(number: float, wanted: float) -> bool:
    """Returns True if a number of a file is the one that is meant: one sixth is rounded there."""
    return math.isclose(number, wanted, abs_tol=1e-5)
