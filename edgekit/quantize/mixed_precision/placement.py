"""Keeps nodes float that the target takes only so, or that would stop its session in integers."""

from collections.abc import Collection, Mapping
from typing import TypeVar

import msgspec

from edgekit.check.check import check_model
from edgekit.check.report import CheckReport, find_stopping
from edgekit.errors import ModelError
from edgekit.graph.graph import Graph
from edgekit.quantize.graph.float_graph import range_source
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.mixed_precision import plan_search
from edgekit.quantize.plan import FloatNode, QuantPlan

_Own = TypeVar("_Own")

PLACEMENT = "nodes that the target takes in float only"
"""The name of this step in a time budget."""
FLOAT_ONLY = "the target takes it, or a neighbour, in float only"
STOPPING = "in integers the target would make no session"
"""Why a node stays float (`FloatNode.reason`)."""

# Keeping one node in float may leave another one out, or stop the session at it. Each attempt writes and checks the
# model once: 1.5 s for YOLOv8n, which needs five.
_MAX_ATTEMPTS = 12
# So many attempts in a row may gain nothing: a region that grows further mostly ends at layers with weights. A choice.
_PATIENCE = 3


def keep_taken(search: plan_search.Search, plan: QuantPlan, searched: plan_search.Searched | None) -> QuantPlan:
    """Returns a plan with more nodes in float, if the target then makes a session, or runs more, or in fewer parts.

    Example: NNAPI has GlobalAveragePool in float only. Between DQ and Q nodes it is left to the CPU, and so the graph
    is split; between float neighbours it is taken. Layers with weights leave integers only if they stop the session.
    The plan is the given one if nothing helps. When the time is over, only nodes that stop the session are kept float.

    Raises:
        EdgekitError: as for `quantize_model`.
    """

    def check_kept(kept: Mapping[str, str]) -> CheckReport | None:
        """Returns None for a plan that cannot be written, as one with a float layer between quantized neighbours."""
        changed = _keep_float(search.graph, plan, kept)
        try:
            written = plan_search.write_chosen(search, changed, searched, search.work / "placed.onnx")
        except ModelError:
            return None
        return plan_search.check_trial(search, written.model)

    kept, best, useless, last_gain = dict[str, str](), dict[str, str](), set[str](), -1
    if (check := check_kept({})) is None:
        return plan
    reached, in_float = _rank(check), set[str]()
    layers, floats = {layer.node for layer in read_layers(search.graph)}, {node.name for node in plan.float_nodes}
    for attempt in range(_MAX_ATTEMPTS):
        left = {node.name for node in check.node_list if not node.taken}
        if check.is_refused:
            wanted, spared, reason = find_stopping(check)[0], floats, STOPPING
        elif left and attempt - last_gain <= _PATIENCE and search.memo.budget.allows(PLACEMENT):
            if not in_float:
                whole = check_model(search.model, search.target, advises=False)
                in_float = {node.name for node in whole.node_list if node.taken}
            wanted, spared, reason = left & in_float, floats | layers, FLOAT_ONLY
        else:
            break
        added = widen_region(search.graph, wanted, left, spared | kept.keys())
        if not added:
            break
        kept |= dict.fromkeys(added, reason)
        if (check := check_kept(kept)) is None:
            break
        if _rank(check) < reached:
            best, reached, last_gain = dict(kept), _rank(check), attempt
            useless = {node.name for node in check.node_list if not node.taken}
    # What the target leaves out in float too may as well stay in integers.
    useful = {name: reason for name, reason in best.items() if name not in useless}
    if useful != best and (check := check_kept(useful)) is not None and _rank(check) <= reached:
        best = useful
    return _keep_float(search.graph, plan, best)


def _keep_float(graph: Graph, plan: QuantPlan, kept: Mapping[str, str]) -> QuantPlan:
    """Returns a plan with more nodes in float: those in `kept`, each with its reason.

    What a node only moves, such as a Gather, keeps the scale of its source: quantized again, it loses nothing more.
    """
    nodes = [node for node in graph.nodes if node.name in kept]
    sources = {name: range_source(graph, name) for node in nodes for name in node.output}

    def move(known: dict[str, _Own]) -> dict[str, _Own]:
        return known | {name: known[source] for name, source in sources.items() if source in known}

    floats = (FloatNode(name=node.name, op=node.op_type, reason=kept[node.name]) for node in nodes)
    return msgspec.structs.replace(
        plan, float_nodes=(*plan.float_nodes, *floats), ranges=move(plan.ranges), grids=move(plan.grids),
        wide=move(plan.wide),
    )  # fmt: skip


def _rank(check: CheckReport) -> tuple[bool, int, int]:
    """Returns how badly a target takes a model: refused, the work that it leaves, and the number of partitions."""
    return check.is_refused, -round(check.taken_macs / plan_search.SAME_SHARE), check.partitions


def widen_region(graph: Graph, names: Collection[str], left: Collection[str], known: Collection[str]) -> set[str]:
    """Returns further nodes to keep in float, so that none of those named is in a quantized node unit.

    A node unit (DQ, operator, Q) needs all its inputs quantized, so one neighbour in float breaks it up. Neighbours
    that the provider leaves to the CPU anyway (`left`) come first. Nodes in `known` are never returned; the set may be
    empty.
    """
    region = [node for node in graph.nodes if node.name in names]
    # ONNX Runtime moves Q and DQ nodes past operators that only move elements, so the pair may be several nodes away:
    # the region grows until there is a node to add.
    while True:
        inside = {node.name for node in region}
        makers = {graph.producers[name].name for node in region for name in node.input if name in graph.producers}
        readers = {node.name for each in region for name in each.output for node in graph.readers(name)}
        for wider in (inside | makers & set(left), inside | makers, inside | makers | readers):
            if added := wider - set(known):
                return added
        if wider == inside:
            return set()
        region = [node for node in graph.nodes if node.name in wider]
