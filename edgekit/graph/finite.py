"""Whether what a graph computes stays finite: masks are made of the lowest number there is, or of minus infinity."""

import numpy as np

from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array

# Two numbers of this size may add up to infinity in float32 (3.4e38); scores and biases are far below it.
_HUGE = 1e30
# What hands on its first input, with other axes, places or a sign.
_HANDING = frozenset({
    "Abs", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Neg", "Reshape", "Slice",
    "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
# Sums of products of finite numbers, and what is bounded whatever it reads.
_FINITE = frozenset({
    "Conv", "Einsum", "Gemm", "LayerNormalization", "MatMul", "Sigmoid", "SimplifiedLayerNormalization", "Softmax",
    "Tanh",
})  # fmt: skip


def add_up_huge(graph: Graph, name: str) -> int | None:
    """Returns how many huge numbers may be added up in one element of a value; None where it may be infinite or NaN.

    One is finite beside anything of common size, two are not: -3.4e38 - 3.4e38 is minus infinity. What is fed as float
    may be anything. Each node behind the value is visited once.
    """
    known: dict[str, int | None] = {}
    waiting = [name]
    while waiting:
        at = waiting[-1]
        open_ = [each for each in _list_sources(graph, at) if each not in known]
        if open_:
            waiting += open_
        else:
            waiting.pop()
            known[at] = _count(graph, at, known)
    return known[name]


def _list_sources(graph: Graph, name: str) -> tuple[str, ...]:
    """Returns the values whose counts make that of a value."""
    node = graph.producers.get(name)
    if name in graph.constants or node is None or node.domain or _reads_integers(graph, node):
        return ()
    if node.op_type in _HANDING or node.op_type == "Cast":
        return node.input[:1]
    if node.op_type == "Where":
        return node.input[1:]
    return node.input if node.op_type in {"Add", "Concat", "Mul", "Sub"} else ()


def _count(graph: Graph, name: str, known: dict[str, int | None]) -> int | None:
    """Returns the count of a value from those of its sources."""
    node = graph.producers.get(name)
    if name in graph.constants or node is None or node.domain:
        return _count_constant(graph.inline(name))
    if _reads_integers(graph, node) or node.op_type in _FINITE:
        return 0
    counts = [known[each] for each in _list_sources(graph, name)]
    numbers = [count for count in counts if count is not None]
    if not counts or len(numbers) < len(counts):
        return None
    if node.op_type == "Mul":
        # A huge number times 10 is infinite.
        return None if any(numbers) else 0
    return sum(numbers) if node.op_type in {"Add", "Sub"} else max(numbers)


def _count_constant(array: Array | None) -> int | None:
    if array is None or array.dtype.kind != "f" or not np.isfinite(array).all():
        return None
    return int(bool(np.any(np.abs(array) > _HUGE)))


def _reads_integers(graph: Graph, node: Node) -> bool:
    dtype = graph.value(node.input[0]).dtype or ""
    return node.op_type == "Cast" and dtype.startswith(("bool", "int", "uint"))
