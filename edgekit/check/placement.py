"""How supported units become partitions, as ONNX Runtime forms them (core/providers/partitioning_utils.cc)."""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from edgekit.check.report import CheckedNode, CheckReport, Disagreement, Placed
from edgekit.check.rules.rulebook import Placing
from edgekit.check.rules.units import Unit
from edgekit.graph.graph import Graph
from edgekit.graph.match import walk

_SMALL_CONSTANT = 100
_NEVER_ON_HOST = frozenset({"float16", "bfloat16"})


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The partition of each unit, None for a unit that is not taken.

    `reasons` say, by unit, why it is not taken although the rules support it: for example, it would be alone in its
    partition. `broken` says, for units that the provider claims, why it then cannot build their partition.
    """

    partitions: tuple[int | None, ...]
    reasons: dict[int, str]
    broken: dict[int, str] = {}


def place_units(graph: Graph, units: Sequence[Unit], supported: Sequence[bool], placing: Placing) -> Placement:
    """Returns the partition that takes each unit; `supported` says for each whether its rules allow it."""
    owners = {member: at for at, unit in enumerate(units) for member in unit.members}
    followers: list[tuple[int, ...]] = []
    for at, unit in enumerate(units):
        # A dict keeps the order of the followers, which decides the order of the queue, and so the partition of a unit.
        edges = {
            owners[consumer.index]: None
            for member in unit.members
            for name in graph.nodes[member].output
            for consumer in graph.consumers.get(name, ())
        }
        edges.pop(at, None)
        followers.append(tuple(edges))
    reasons = _stopped(units, followers, placing) | _unfused(graph, units, supported, placing)
    reasons |= _on_host(graph, units, [fits and at not in reasons for at, fits in enumerate(supported)], placing)
    able = [fits and at not in reasons for at, fits in enumerate(supported)]
    # XNNPACK takes nodes one by one and forms no partitions (xnnpack_execution_provider.cc, GetCapability), so all its
    # nodes count as one partition.
    if placing.style == "node":
        return Placement(partitions=tuple(0 if fits else None for fits in able), reasons=reasons)
    partitions: list[int | None] = [None] * len(units)
    number = 0
    for group in _groups(followers, able):
        if dropped := _drop_reason(graph, [units[at] for at in group], placing):
            reasons.update(dict.fromkeys(group, dropped))
            continue
        for at in group:
            partitions[at] = number
        number += 1
    broken = dict(_find_broken(graph, units, partitions, placing))
    return Placement(
        partitions=tuple(None if at in broken else number for at, number in enumerate(partitions)),
        reasons={at: why for at, why in reasons.items() if supported[at]} | broken,
        broken=broken,
    )


def _find_broken(
    graph: Graph, units: Sequence[Unit], partitions: Sequence[int | None], placing: Placing
) -> Iterator[tuple[int, str]]:
    """Yields the units that the provider claims and then cannot build."""
    if placing.inside_only:
        # At the border of a partition, tensors of a type that stays inside.
        places = {member: partitions[at] for at, unit in enumerate(units) for member in unit.members}
        for at, unit in enumerate(units):
            nodes = [graph.nodes[member] for member in unit.members] if partitions[at] is not None else []
            for name in (name for node in nodes for name in (*node.input, *node.output) if name in graph.producers):
                ends = (graph.producers[name], *graph.consumers.get(name, ()))
                dtype = graph.value(name).dtype
                if dtype in placing.inside_only and any(places[end.index] != partitions[at] for end in ends):
                    yield at, f"'{name}' is {dtype} and crosses the border of a partition: no session is made then"
    # NNAPI's model_builder.cc, GetAllQuantizedOpInputs.
    made = {
        name: partitions[at]
        for at, unit in enumerate(units)
        for member in unit.members
        for name in graph.nodes[member].output
        if graph.nodes[member].op_type != "DequantizeLinear"
    }
    for at, unit in enumerate(units):
        number = partitions[at]
        if number is None or not unit.is_qdq or unit.node.op_type not in placing.first_input_only:
            continue
        first = unit.inputs[0].name if unit.inputs else ""
        outside = [
            operand.name
            for operand in unit.inputs[1:]
            if operand.is_quantized and operand.name != first and made.get(operand.name) != number
        ]
        if outside:
            what = f"a quantized {unit.node.op_type} of one partition reads '{outside[0]}' from outside of it"
            yield at, f"{what}, behind its first input: the provider claims it and then makes no session"


def _groups(followers: Sequence[tuple[int, ...]], able: Sequence[bool]) -> list[list[int]]:
    """Kahn's algorithm in waves: a wave takes what it can and stops at unsupported units that it feeds."""
    # ONNX Runtime counts node units here, not values: a unit is ready when all units that feed it are done.
    waiting = [0] * len(followers)
    for targets in followers:
        for target in targets:
            waiting[target] += 1
    ready = deque(at for at, count in enumerate(waiting) if count == 0)
    later: deque[int] = deque()
    groups: list[list[int]] = []
    group: list[int] = []
    border: set[int] = set()
    while ready or later:
        if not ready:
            groups.append(group)
            group, border = [], set()
            ready, later = later, ready
            continue
        at = ready.popleft()
        # The unit waits for the next wave. Otherwise units after it could join a group that also feeds it, which would
        # be a cycle.
        if not able[at] and at in border:
            later.append(at)
            continue
        if able[at]:
            group.append(at)
        for target in followers[at]:
            if able[at]:
                border.add(target)
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    return [found for found in (*groups, group) if found]


def place_observed(report: CheckReport, places: Mapping[str, bool], *, device: str, evidence: str) -> Placed:
    """Returns the report's placement corrected by what a device's provider was observed to take.

    `places` says for nodes by name whether the provider took them; all others are assumed to be placed as the report
    predicts.
    """
    taken = {node.name for node in report.node_list if places.get(node.name, node.taken)}
    nodes = tuple(msgspec.structs.replace(node, taken=node.name in taken) for node in report.node_list)
    # Groups that a provider gives back are not observed, so its partitions cannot be counted from its nodes alone. Both
    # placements are counted in the same way, and the difference is added to the predicted number.
    more = _count_pieces(nodes) - _count_pieces(report.node_list) if report.style == "wave" else 0
    return Placed(
        evidence=evidence,
        device=device,
        nodes=report.nodes,
        taken=len(taken),
        partitions=max(min(1, len(taken)), report.partitions + more),
        taken_macs=msgspec.structs.replace(report, node_list=nodes).taken_macs,
        disagreements=tuple(
            Disagreement(name=node.name, op=node.op, predicted=node.taken, observed=not node.taken)
            for node in report.node_list
            if (node.name in taken) != node.taken
        ),
    )


def _count_pieces(nodes: Sequence[CheckedNode]) -> int:
    named = {node.name: node for node in nodes}
    owners = {node.name: node.unit or node.name for node in nodes}
    units = {owner: at for at, owner in enumerate(dict.fromkeys(owners.values()))}
    followers: list[dict[int, None]] = [{} for _ in units]
    for node in nodes:
        for name in node.reads:
            made = named.get(name)
            # Each unit has its own copy of a DQ (`make_unique`), which depends on what that DQ reads.
            is_copied = (
                made is not None and made.op == "DequantizeLinear" and made.unit not in {None, owners[node.name]}
            )
            for source in made.reads if made is not None and is_copied else (name,):
                if source in owners and owners[source] != owners[node.name]:
                    followers[units[owners[source]]][units[owners[node.name]]] = None
    able = [owner in named and named[owner].taken for owner in units]
    return len(_groups([tuple(each) for each in followers], able))


def _drop_reason(graph: Graph, group: Sequence[Unit], placing: Placing) -> str | None:
    names = [unit.node.op_type for unit in group]
    # NNAPI gives back a group of a single Reshape, Flatten or Identity (helper.cc, IsValidSupportedNodeGroup).
    if len(group) == 1 and len(group[0].members) == 1 and names[0] in placing.drop_alone:
        return f"it would be alone in its partition, and the provider gives a lone {names[0]} back"
    if placing.drop_if_only and all(name in placing.drop_if_only for name in names):
        return "its partition would hold only nodes that compute nothing, and the provider gives such a partition back"
    # NNAPI drops partitions that read only constants (nnapi_execution_provider.cc).
    members = [graph.nodes[member] for unit in group for member in unit.members]
    made = {name for node in members for name in node.output}
    read = {name for node in members for name in node.input if name}
    if placing.drop_constant and all(name in graph.constants for name in read - made):
        return "nothing that its partition reads is computed"
    return None


# NNAPI's list of operators to stop at contains NonMaxSuppression, and excludes all nodes after it
# (nnapi_execution_provider.cc).
def _stopped(units: Sequence[Unit], followers: Sequence[tuple[int, ...]], placing: Placing) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for start, unit in enumerate(units):
        if unit.node.op_type not in placing.stop_ops or start in reasons:
            continue
        reasons[start] = f"the provider stops at {unit.node.op_type}"
        for at in walk(followers[start], followers.__getitem__):
            reasons.setdefault(at, f"it comes after {unit.node.op_type} '{unit.node.name}', where the provider stops")
    return reasons


# XNNPACK fuses a Relu or Clip into the operator before it, if that operator is taken and feeds nothing else
# (detail/node_support_checker.cc, ClipReluChecker; PR 28814).
def _unfused(graph: Graph, units: Sequence[Unit], supported: Sequence[bool], placing: Placing) -> dict[int, str]:
    if not placing.fused:
        return {}
    single = {unit.node.index: at for at, unit in enumerate(units) if not unit.is_qdq}
    able = {unit.node.index for at, unit in enumerate(units) if supported[at]}
    reasons: dict[int, str] = {}
    for at, unit in enumerate(units):
        if unit.node.op_type not in placing.fused:
            continue
        made_by = graph.producers.get(unit.node.input[0])
        fuser = made_by if made_by is not None and made_by.index in single and made_by.index in able else None
        alone = len(graph.consumers.get(unit.node.input[0], ())) == 1 and unit.node.input[0] not in graph.outputs
        if fuser is None or fuser.op_type not in placing.fusers or unit.is_qdq or not alone:
            fusers = ", ".join(placing.fusers)
            reasons[at] = f"{unit.node.op_type} is taken only right after a {fusers} that is taken and feeds it alone"
    return reasons


# Shapes are computed on the CPU, where they are stored, and not copied to the device
# (core/framework/fallback_cpu_capability.cc, GetCpuPreferredNodes; include/onnxruntime/ep/get_capability_utils.h).
def _on_host(graph: Graph, units: Sequence[Unit], able: Sequence[bool], placing: Placing) -> dict[int, str]:
    """Returns the nodes that a provider with its own kernels leaves to the CPU, because all their inputs are there."""
    at_of = {unit.node.index: at for at, unit in enumerate(units)}
    makers = [unit.node for at, unit in enumerate(units) if able[at] and unit.node.op_type in placing.host_results]
    on_host = {name for node in makers for name in node.output}
    waiting = [reader.index for name in on_host for reader in graph.consumers.get(name, ())]
    heapq.heapify(waiting)
    reasons: dict[int, str] = {}
    seen: set[int] = set()
    while waiting:
        index = heapq.heappop(waiting)
        if index in seen:
            continue
        seen.add(index)
        node, at = graph.nodes[index], at_of[index]
        if able[at]:
            # Inputs that the kernel itself reads from CPU memory do not count as values that lie there.
            own = placing.host_inputs.get(node.op_type, ())
            if not all(
                graph.value(name).dtype not in _NEVER_ON_HOST
                and (
                    (name in graph.constants and graph.value(name).elements <= _SMALL_CONSTANT)
                    or name in graph.inputs
                    or (name in on_host and position not in own)
                )
                for position, name in enumerate(node.input)
                if name
            ):
                continue
            reasons[at] = "it computes a shape, which the provider leaves to the CPU, where shapes lie"
        on_host.update(node.output)
        for name in node.output:
            for reader in graph.consumers.get(name, ()):
                heapq.heappush(waiting, reader.index)
    return reasons
