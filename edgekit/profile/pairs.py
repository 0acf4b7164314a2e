"""Kernels of two sessions that compute the same values, through the matching of `compare`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from edgekit.graph.graph import Graph
from edgekit.profile.report import LayerPair, NodeTime
from edgekit.verify.matching.match import match_tensors
from edgekit.verify.matching.order import sort_nodes


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of a session and the graph that it was made of."""

    nodes: tuple[NodeTime, ...]
    graph: Graph


def pair_layers(a: Side, b: Side) -> tuple[LayerPair, ...]:
    """Returns the values that both sessions compute, in the order of computation, with the kernels that lead to each.

    A kernel counts for the first matched value behind it. Fusion ends at different values on the two sides, so that
    values are taken together until both sides have a kernel for them.
    """
    matched = match_tensors(a.graph, b.graph)
    keys = [item.tensor for item in matched]
    of_a = _spend(a, {name: item.tensor for item in matched for name in (item.tensor, item.in_a)})
    of_b = _spend(b, {name: item.tensor for item in matched for name in (item.raw_b, item.in_b, *item.copies_in_b)})
    return tuple(_join(keys, of_a, of_b))


def _join(
    keys: Sequence[str], of_a: Mapping[str, list[NodeTime]], of_b: Mapping[str, list[NodeTime]]
) -> Iterator[LayerPair]:
    groups: list[tuple[str, list[NodeTime], list[NodeTime]]] = [("", [], [])]
    # What lies behind the last value is not matched, and comes last.
    for key in (*keys, ""):
        _, first, second = groups[-1]
        if _computes(first) and _computes(second) and key:
            groups.append((key, [], []))
        _, first, second = groups[-1]
        groups[-1] = (key or groups[-1][0], first, second)
        first += of_a.get(key, [])
        second += of_b.get(key, [])
    if len(groups) > 1 and not all(map(_computes, groups[-1][1:])):
        # One side computes nothing for the last values: they belong to the ones before.
        key, first, second = groups.pop()
        groups[-1] = (key, groups[-1][1] + first, groups[-1][2] + second)
    yield from (_make_pair(*group) for group in groups)


def _computes(nodes: Iterable[NodeTime]) -> bool:
    # What only moves or rounds data belongs to what is computed next.
    return any(not node.kind for node in nodes)


def _make_pair(tensor: str, first: Sequence[NodeTime], second: Sequence[NodeTime]) -> LayerPair:
    return LayerPair(
        tensor=tensor,
        a_ms=sum(node.self_ms for node in first),
        b_ms=sum(node.self_ms for node in second),
        a_ops=tuple(dict.fromkeys(node.op for node in first)),
        b_ops=tuple(dict.fromkeys(node.op for node in second)),
    )


def _spend(side: Side, ends: Mapping[str, str]) -> dict[str, list[NodeTime]]:
    """Returns the kernels of each matched value; "" has those behind which no matched value lies."""
    owners = _own(side.graph, ends)
    spent: dict[str, list[NodeTime]] = {}
    waiting: list[NodeTime] = []
    key = ""
    for node in side.nodes:
        waiting.append(node)
        # What ONNX Runtime put in mostly serves the kernel that follows: a Reorder, a Transpose, a Q node.
        if node.source in owners:
            key = owners[node.source]
            spent.setdefault(key, []).extend(waiting)
            waiting = []
    spent.setdefault(key, []).extend(waiting)
    return spent


def _own(graph: Graph, ends: Mapping[str, str]) -> dict[str, str]:
    """Returns for each node the matched value that it computes, or the first one behind it."""
    owners: dict[str, str] = {}
    for node in reversed(sort_nodes(graph)):
        here = next((ends[name] for name in node.output if name in ends), None)
        readers = (reader.name for name in node.output for reader in graph.consumers.get(name, ()))
        owners[node.name] = here or next((owners[name] for name in readers if owners.get(name)), "")
    return owners
