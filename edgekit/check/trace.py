"""What became of each node of the user's model in the graph that a provider sees.

Preparation folds, fuses, rewrites and removes nodes. Most nodes and values keep their names in both graphs. What became
of the others follows from which nodes now make and read the values around them.
"""

from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Literal

import msgspec

from edgekit.graph.graph import Graph, Node

Fate = Literal["kept", "rewritten", "fused", "folded", "removed"]

# Their results are constant once shapes are static, even if their inputs are computed.
_SHAPE_OPS = frozenset({"Shape", "Size"})


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a node: the names of the prepared nodes that do its work now, and how.

    "kept": the node itself; "rewritten": other nodes compute the same; "fused": one node that does more; "folded": a
    constant; "removed": nothing. `note` says it in words; it is empty for a kept node.
    """

    fate: Fate
    became: tuple[str, ...] = ()
    note: str = ""


class _View(msgspec.Struct, frozen=True, kw_only=True):
    """Both graphs.

    `constant` holds the positions of source nodes that depend on constants only, `idle` of those that no output needs.
    """

    source: Graph
    prepared: Graph
    names: Mapping[str, Node]
    known: frozenset[str]
    constant: frozenset[int]
    idle: frozenset[int]


def trace_nodes(source: Graph, prepared: Graph) -> Iterator[tuple[Graph, Node, Trace]]:
    """Yields each node of `source` with its graph and what became of it, a body's nodes after the node that has it."""
    names = {node.name: node for node in prepared.nodes}
    constant, needed = set[int](), set[int]()
    results: set[str] = set()
    for node in source.nodes:
        inputs = [name for name in node.input if name]
        fixed = bool(inputs) and not node.bodies and all(name in source.constants or name in results for name in inputs)
        if fixed or (node.op_type in _SHAPE_OPS and node.name not in names):
            constant.add(node.index)
            results.update(node.output)
    for node in reversed(source.nodes):
        readers = {reader.index for name in node.output for reader in source.consumers.get(name, ())}
        if readers & needed or any(name in source.outputs for name in node.output):
            needed.add(node.index)
    view = _View(
        source=source,
        prepared=prepared,
        names=names,
        known=frozenset(node.name for node in source.nodes),
        constant=frozenset(constant),
        idle=frozenset(node.index for node in source.nodes) - needed,
    )
    found: dict[int, Trace] = {}
    makers = {name: node.index for name, node in source.producers.items()}
    nodes = {node.index: node for node in source.nodes}
    order = TopologicalSorter(
        {index: [makers[name] for name in node.reads if name in makers] for index, node in nodes.items()}
    )
    # From the end, because the fate of a node may depend on that of its readers. A file may hold nodes in any order.
    for index in reversed(tuple(order.static_order())):
        found[index] = _trace(view, nodes[index], found)
    for node in source.nodes:
        trace = found[node.index]
        yield source, node, trace
        same = names.get(node.name)
        # Subgraphs are paired by their order among the attributes. If their number changed, their nodes share the fate
        # of the node.
        if same is not None and len(same.bodies) == len(node.bodies):
            for body, other in zip(node.bodies, same.bodies, strict=True):
                yield from trace_nodes(body, other)
        else:
            yield from _inherit(node, trace)


def _inherit(node: Node, trace: Trace) -> Iterator[tuple[Graph, Node, Trace]]:
    for body in node.bodies:
        for inner in body.nodes:
            yield body, inner, trace
            yield from _inherit(inner, trace)


def _trace(view: _View, node: Node, later: Mapping[int, Trace]) -> Trace:
    same = view.names.get(node.name)
    if same is not None and (same.op_type, same.domain) == (node.op_type, node.domain):
        return Trace(fate="kept", became=(same.name,))
    if same is not None:
        return Trace(fate="rewritten", became=(same.name,), note=f"written as {same.op_type}")
    producers = view.prepared.producers
    makers = [producers[name] for name in node.output if name in producers]
    if makers:
        return _describe_makers(view, makers)
    if node.index in view.constant or all(name in view.prepared.constants for name in node.output if name):
        return Trace(fate="folded", note="depends on constants only, so it is computed once, before the model runs")
    if node.index in view.idle:
        return Trace(fate="removed", note="no output of the model depends on it")
    readers = [reader for name in node.output for reader in view.source.consumers.get(name, ())]
    for reader in readers:
        trace = later[reader.index]
        if trace.fate == "kept":
            return _describe_input(view, node, reader)
        if trace.became:
            named = ", ".join(view.names[name].op_type for name in trace.became)
            return Trace(fate="fused", became=trace.became, note=f"fused with '{reader.name}' into {named}")
    if readers and all(later[reader.index].fate == "folded" for reader in readers):
        return Trace(fate="folded", note="only shapes and constants depend on it, which are computed once")
    return Trace(fate="removed", note="nothing that is left reads it")


def _describe_makers(view: _View, makers: list[Node]) -> Trace:
    """Describes a node by the prepared nodes that now make its outputs, and the new nodes that lead to them."""
    # If an old node now makes this node's output, it was fused with it: fusion keeps the name of the last output.
    if all(maker.name in view.known for maker in makers):
        named = ", ".join(f"{maker.op_type} '{maker.name}'" for maker in makers)
        return Trace(fate="fused", became=_names(makers), note=f"fused into {named}")
    region: dict[str, Node] = {}
    ahead = [maker for maker in makers if maker.name not in view.known]
    # From the new producers back through new nodes, to values that the user's model had.
    while ahead:
        node = ahead.pop()
        region[node.name] = node
        for name in node.input:
            before = None if name in view.source.producers else view.prepared.producers.get(name)
            if before is not None and before.name not in view.known and before.name not in region:
                ahead.append(before)
    nodes = sorted(region.values(), key=lambda node: node.index)
    return Trace(fate="rewritten", became=_names(nodes), note=f"written as {', '.join(node.op_type for node in nodes)}")


def _describe_input(view: _View, node: Node, reader: Node) -> Trace:
    now = view.names[reader.name].input
    read = next((now[at] for at, name in enumerate(reader.input) if name in node.output and at < len(now)), "")
    if read in view.prepared.constants:
        return Trace(fate="folded", note="its result is a constant")
    maker = view.prepared.producers.get(read)
    # What the node reads, traced back through removed nodes.
    sources: set[str] = set()
    name = node.input[0]
    while name and name not in sources:
        sources.add(name)
        before = view.source.producers.get(name)
        name = "" if before is None or name in view.prepared.producers else before.input[0]
    if read in sources:
        return Trace(fate="removed", note="it only hands its input on")
    if maker is None:
        return Trace(fate="removed", note=f"'{reader.name}' reads '{read}' in its place")
    how = "the same as" if maker.op_type == node.op_type else "merged into"
    return Trace(fate="fused", became=(maker.name,), note=f"{how} {maker.op_type} '{maker.name}'")


def _names(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.name for node in nodes))
