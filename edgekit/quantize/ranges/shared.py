"""One range for all that an operator joins, where a provider takes it only so."""

from collections.abc import Collection, Mapping

import msgspec

from edgekit.graph.graph import Graph
from edgekit.quantize.graph.float_graph import range_source
from edgekit.quantize.ranges.methods import TensorRange

_PASSING = frozenset({"AveragePool", "Resize"})


def share_ranges(
    graph: Graph, spans: Mapping[str, TensorRange], ops: Collection[str], floats: Collection[str] = ()
) -> dict[str, TensorRange]:
    """Returns the ranges with one range for the inputs and output of each node of these operators but `floats`.

    It spans those of all of them, and of what only moves values before and after them; a tensor that two such nodes
    read joins theirs.
    """
    groups = _join(graph, ops, floats)
    members: dict[str, list[TensorRange]] = {}
    for name, span in spans.items():
        leader = groups.get(_find_source(graph, name))
        if leader is not None:
            members.setdefault(leader, []).append(span)
    found: dict[str, TensorRange] = {}
    for name, span in spans.items():
        joined = members.get(groups.get(_find_source(graph, name), ""), [span])
        low, high = min(each.low for each in joined), max(each.high for each in joined)
        found[name] = msgspec.structs.replace(span, low=low, high=high)
    return found


def shared_tensors(graph: Graph, ops: Collection[str], floats: Collection[str] = ()) -> frozenset[str]:
    """Returns the tensors whose range is that of a group, by the name of what gives them their range."""
    return frozenset(_join(graph, ops, floats))


def _find_source(graph: Graph, name: str) -> str:
    """Returns the tensor that gives a tensor its scale: ORT's quantizer passes it on in pooling and resizing too."""
    while True:
        name = range_source(graph, name)
        if name not in graph.producers or graph.producers[name].op_type not in _PASSING:
            return name
        name = graph.producers[name].input[0]


def _join(graph: Graph, ops: Collection[str], floats: Collection[str]) -> dict[str, str]:
    """Returns the leader of the group of each tensor that such a node reads or makes."""
    leaders: dict[str, str] = {}

    def find(name: str) -> str:
        while leaders.setdefault(name, name) != name:
            name = leaders[name]
        return name

    for node in graph.nodes:
        if node.op_type not in ops or node.name in floats:
            continue
        names = [name for name in (*node.output[:1], *node.input) if graph.is_float(name)]
        roots = [find(_find_source(graph, name)) for name in names if name not in graph.constants]
        for root in roots:
            leaders[root] = roots[0]
    return {name: find(name) for name in list(leaders)}
