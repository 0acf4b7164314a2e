"""Chains of operators, each read by the next alone."""

from collections.abc import Callable

from edgekit.graph.graph import Graph, Node


def is_in_chain(graph: Graph, node: Node, ops: tuple[str, ...]) -> bool:
    """Returns True if the node is in a chain of these operators, each read by the next alone; Q and DQ do not count."""
    for place, op in enumerate(ops):
        if op != node.op_type:
            continue
        before = [found.op_type for found in _walk(graph, node, _previous, place)]
        after = [found.op_type for found in _walk(graph, node, _next, len(ops) - place - 1)]
        if (*reversed(before), node.op_type, *after) == ops:
            return True
    return False


def _walk(graph: Graph, node: Node, step: Callable[[Graph, Node], Node | None], count: int) -> list[Node]:
    found: list[Node] = []
    at = step(graph, node)
    while at is not None and len(found) < count:
        if at.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
            found.append(at)
        at = step(graph, at)
    return found


def _previous(graph: Graph, node: Node) -> Node | None:
    return graph.producers.get(node.input[0])


def _next(graph: Graph, node: Node) -> Node | None:
    readers = graph.consumers.get(node.output[0], ())
    return readers[0] if len(readers) == 1 else None
