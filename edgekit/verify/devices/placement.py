"""What a provider left to the CPU although it was predicted to take it."""

from collections import Counter
from collections.abc import Sequence

from edgekit._ort import CPU_PROVIDER
from edgekit.check.check import check_model
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.devices.device import DeviceRun, Job, PlacedNode
from edgekit.devices.emulators.xnnpack_wasm import WEB_VERSION, XnnpackWasm
from edgekit.devices.observe import name_as_model
from edgekit.errors import EdgekitError
from edgekit.model.model import load_model
from edgekit.target import load_target
from edgekit.verify.facts import OBSERVING, PlacementGap

_MOST_NAMES = 20
_FAMILIES = {
    "Conv": "Conv", "FusedConv": "Conv", "QLinearConv": "Conv", "ConvInteger": "Conv", "NhwcFusedConv": "Conv",
    "ConvTranspose": "ConvTranspose", "QLinearConvTranspose": "ConvTranspose",
    "Gemm": "MatMul", "QGemm": "MatMul", "FusedGemm": "MatMul", "MatMul": "MatMul", "FusedMatMul": "MatMul",
    "QLinearMatMul": "MatMul", "MatMulInteger": "MatMul", "MatMulIntegerToFloat": "MatMul",
    "DynamicQuantizeMatMul": "MatMul",
}  # fmt: skip
"""Operators that do a model's work, by what ONNX Runtime's optimisers turn into one another on the CPU."""


def find_gap(run: DeviceRun, job: Job) -> PlacementGap | None:
    """Returns what was left to the CPU of the nodes that the provider was predicted to take.

    A session's node is one of the model by its name. Those that do the work are counted by operator too, so that a node
    which an optimiser renamed is not overlooked. Nodes that only round do not count. None where another provider ran,
    no placement was observed, or no model predicts it.
    """
    if run.evidence not in OBSERVING or run.placement_source == "predicted" or not run.placement:
        return None
    check = _predict(run, job)
    if check is None:
        return None
    names = {node.name for node in check.node_list}
    places = name_as_model({node.name: node.provider for node in run.placement}, names)
    taken = [node for node in check.node_list if node.taken and not node.is_quantizer]
    lost = [node for node in taken if places.get(node.name) == CPU_PROVIDER]
    lost += _find_renamed(check, taken, run.placement, places.keys() & names)
    total = sum(node.macs for node in check.node_list)
    return PlacementGap(
        predicted=len(taken),
        lost=len(lost),
        lost_macs=sum(node.macs for node in lost) / total if total else len(lost) / max(1, len(taken)),
        nodes=tuple(node.name for node in lost[:_MOST_NAMES]),
    )


def _predict(run: DeviceRun, job: Job) -> CheckReport | None:
    """Returns the prediction for the ONNX Runtime of the device: the XNNPACK emulator has one of its own."""
    if run.device != XnnpackWasm().name:
        return job.check
    try:
        settings = {**job.target.settings, "ort": WEB_VERSION}
        return check_model(load_model(job.model), load_target(job.target.name, settings))
    except EdgekitError:
        return None


def _find_renamed(
    check: CheckReport, taken: Sequence[CheckedNode], placement: Sequence[PlacedNode], known: set[str]
) -> list[CheckedNode]:
    """Returns, for nodes of the CPU under names that the model lacks, as many that were predicted taken."""
    unknown = [node for node in placement if node.provider == CPU_PROVIDER and node.name not in known]
    strange = Counter(_FAMILIES[node.op] for node in unknown if node.op in _FAMILIES)
    expected = Counter(
        _FAMILIES[node.op]
        for node in check.node_list
        if not node.taken and node.op in _FAMILIES and node.name not in known
    )
    found: list[CheckedNode] = []
    for family, count in sorted((strange - expected).items()):
        found += [node for node in taken if _FAMILIES.get(node.op) == family and node.name not in known][:count]
    return found
