"""Shared ranges: one for all that an operator joins, where a provider takes it only so."""

from collections.abc import Collection, Mapping

from edgekit.graph.graph import Graph
from edgekit.quantize.graph.float_graph import range_source
from edgekit.quantize.ranges.methods import TensorRange

# ORT's quantizer passes the scale of the input on through these too (QDQDirect8BitOp in
# onnxruntime/quantization/registry.py).
_PASSING = frozenset({"AveragePool", "Resize"})


def share_ranges(
    graph: Graph, ranges: Mapping[str, TensorRange], ops: Collection[str], floats: Collection[str] = ()
) -> dict[str, TensorRange]:
    """Returns the ranges with one range for the inputs and output of each node of these operators but `floats`.

    It covers those of all of them, and of what only moves values before and after them; a tensor that two such nodes
    read joins theirs.
    """
    groups = _join(graph, ops, floats)
    leaders = {name: groups.get(_find_source(graph, name), name) for name in ranges}
    joined: dict[str, TensorRange] = {}
    for name, own in ranges.items():
        others = joined.get(leaders[name], own)
        joined[leaders[name]] = TensorRange(low=min(others.low, own.low), high=max(others.high, own.high))
    return {name: joined[leader] for name, leader in leaders.items()}


def shared_tensors(graph: Graph, ops: Collection[str], floats: Collection[str] = ()) -> frozenset[str]:
    """Returns the tensors whose range is that of a group, by the name of what gives them their range."""
    return frozenset(_join(graph, ops, floats))


def _find_source(graph: Graph, name: str) -> str:
    """Returns the tensor that gives a tensor its scale."""
    while True:
        name = range_source(graph, name)
        if name not in graph.producers or graph.producers[name].op_type not in _PASSING:
            return name
        name = graph.producers[name].input[0]


def _join(graph: Graph, ops: Collection[str], floats: Collection[str]) -> dict[str, str]:
    """Returns the leader of the group of each tensor that such a node reads or makes (union-find)."""
    leaders: dict[str, str] = {}

    def find(name: str) -> str:
        while leaders.setdefault(name, name) != name:
            name = leaders[name]
        return name

    for node in graph.nodes:
        if node.op_type in ops and node.name not in floats:
            names = [name for name in (*node.output[:1], *node.input) if graph.is_float(name)]
            roots = [find(_find_source(graph, name)) for name in names if name not in graph.constants]
            leaders.update((root, roots[0]) for root in roots)
    return {name: find(name) for name in list(leaders)}
