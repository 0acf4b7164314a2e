"""What a provider took on a device: which nodes it left to the CPU."""

from collections import Counter

from edgekit._ort import CPU_PROVIDER
from edgekit.check.placement import place_observed
from edgekit.check.report import CheckedNode, Placed, count_of
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.observe import FAMILIES, find_lost, is_unlisted, map_providers, match_nodes, shows_placement
from edgekit.model.external import skim_model
from edgekit.verify.run_report import OBSERVING, PlacementGap

_MOST_NAMES = 20
# A session reports nodes of their subgraphs that are not in the model's list of nodes.
_REPEATING = frozenset({"If", "Loop", "Scan", "SequenceMap"})
# ONNX Runtime merges equal nodes and folds constants before it places nodes, so a little work may disappear.
_MOST_UNSEEN = 0.05


def find_gap(run: DeviceRun, job: Job) -> PlacementGap | None:
    """Returns which nodes were left to the CPU although the provider was predicted to take them.

    A session's node is matched to the model's by name. Nodes that do the work are also counted by operator, so that a
    node which an optimiser renamed is not overlooked. Nodes that only quantize or dequantize do not count. None if
    another provider ran, no placement was observed, or no model predicts it.
    """
    places, check = _read_places(run, job), job.check
    if places is None:
        return None
    taken = [node for node in check.node_list if node.taken and not node.is_quantizer]
    lost = find_lost(run, check)
    total = sum(node.macs for node in check.node_list)
    hidden, known = 0, places.keys() & {node.name for node in check.node_list}
    # This counts the nodes predicted for the CPU that the device reports neither under their own name nor under one
    # that an optimiser gave them. `describe_unmatched` compares the nodes that do the work, and subgraphs, whose nodes
    # do not have the model's names.
    if not _holds_compiled(run, job) and all(node.op not in _REPEATING for node in check.node_list):
        left = (node for node in check.node_list if not node.taken and not node.is_quantizer)
        unseen = sum(node.op not in FAMILIES and node.name not in known for node in left)
        made = sum(node.provider == CPU_PROVIDER and node.name not in known for node in run.placement)
        hidden = max(0, unseen - made)
    return PlacementGap(
        predicted=len(taken),
        lost=len(lost),
        lost_macs=sum(node.macs for node in lost) / total if total else len(lost) / max(1, len(taken)),
        nodes=tuple(node.name for node in lost[:_MOST_NAMES]),
        hidden=hidden,
    )


def find_placed(run: DeviceRun, job: Job) -> Placed | None:
    """Returns where the provider put the nodes of the model, or None if that was not observed.

    A node that the session does not report, because it was fused or renamed, is taken to be where it was predicted.
    """
    places = None if run.failure is not None or _holds_compiled(run, job) else _read_places(run, job)
    if places is None or job.target.provider == CPU_PROVIDER:
        return None
    known = {node.name: taken for node, taken in match_nodes(job.check, places)}
    known |= dict.fromkeys((node.name for node in find_lost(run, job.check)), False)
    return place_observed(job.check, known, device=run.device, evidence=run.evidence.value)


def _read_places(run: DeviceRun, job: Job) -> dict[str, str] | None:
    """Returns the provider of each node that a device reports, by its name in the model; None if none was observed."""
    if run.evidence not in OBSERVING or run.placement_source == "predicted" or not shows_placement(run, job):
        return None
    return map_providers(run, job.check)


def describe_hidden(gap: PlacementGap | None) -> str | None:
    """Returns, in words, how many nodes predicted for the CPU a device does not report, or None if it reports all."""
    if gap is None or not gap.hidden:
        return None
    hidden = f"the placement that the device reports lacks {count_of(gap.hidden, 'node')} predicted for the CPU"
    return f"{hidden}: ONNX Runtime merged them into others, or the device left them out; max_cpu_nodes counts them"


def describe_unmatched(run: DeviceRun, job: Job) -> str | None:
    """Returns, in words, why a device's report cannot be the placement of this model, or None if it can be.

    Only the operators that do the work are compared, by their number, because optimisers rename and fuse nodes. A
    device that reports more of them than the model has does not run this model; one that reports fewer hides where they
    ran. None if the compiled node of a provider does not say what it contains, in a profile or in a context file.
    """
    nodes, seen = job.check.node_list, _read_places(run, job)
    if seen is None or run.failure is not None or any(node.op in _REPEATING for node in nodes):
        return None
    if _holds_compiled(run, job):
        return None
    sides = (nodes, run.placement)
    expected, reported = (Counter(FAMILIES[it.op] for it in side if it.op in FAMILIES) for side in sides)
    for family, count in sorted((reported - expected).items()):
        more = f"{count} {family} more than the {expected[family]} there are"
        return f"its placement is not this model's: it reports {more}"
    unseen = [it for it in nodes if it.op in FAMILIES and it.name not in seen and not is_unlisted(it, job.target)]
    hidden: list[CheckedNode] = []
    for family, count in sorted((expected - reported).items()):
        hidden += sorted((node for node in unseen if FAMILIES[node.op] == family), key=lambda node: node.macs)[:count]
    work = sum(node.macs for node in nodes)
    if sum(node.macs for node in hidden) <= _MOST_UNSEEN * work:
        return None
    names = ", ".join(f"'{node.name}'" for node in hidden[:5]) + (", ..." if len(hidden) > 5 else "")
    return f"its placement is not whole: {len(hidden)} nodes that do the model's work ran nowhere, as {names}"


def _holds_compiled(run: DeviceRun, job: Job) -> bool:
    """Returns True if a provider's node stands for others: a context-file node, or a compiled node in a profile."""
    if any(node.op == "EPContext" for node in run.placement):
        nodes = skim_model(job.model).graph.node if job.model.suffix == ".onnx" else ()
        return any(node.op_type == "EPContext" for node in nodes)
    known = {node.op for node in job.check.node_list} | FAMILIES.keys()
    return run.placement_source == "profile" and any(
        node.provider != CPU_PROVIDER and node.op not in known for node in run.placement
    )
