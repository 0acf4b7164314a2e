"""Matches nodes of a session with nodes of the model: by name, by what optimisers made of them, or by their absence."""

import re
from collections import Counter
from collections.abc import Collection, Mapping

from edgekit._ort import CPU_PROVIDER
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.devices.android.android import XNNPACK
from edgekit.devices.device import DeviceRun, Job
from edgekit.target import Target

# The suffix that ONNX Runtime's layout transformation adds to the names of nodes that it recreates.
_TOKEN = re.compile(r"_token_\d+$")

# Activations that XNNPACK fuses into the preceding operator and never takes alone; optimisers of the CPU fuse them too.
_FUSED = frozenset({"Clip", "Relu"})

XNNPACK_OPS = _FUSED | {"AveragePool", "Conv", "ConvTranspose", "Gemm", "MatMul", "MaxPool", "Resize", "Softmax"}
"""Operators for which XNNPACK has kernels (onnxruntime/core/providers/xnnpack/xnnpack_execution_provider.cc)."""

FAMILIES: Mapping[str, str] = {
    "Conv": "Conv", "FusedConv": "Conv", "QLinearConv": "Conv", "ConvInteger": "Conv", "NhwcFusedConv": "Conv",
    "ConvTranspose": "ConvTranspose", "QLinearConvTranspose": "ConvTranspose",
    "Gemm": "MatMul", "QGemm": "MatMul", "FusedGemm": "MatMul", "MatMul": "MatMul", "FusedMatMul": "MatMul",
    "QLinearMatMul": "MatMul", "MatMulInteger": "MatMul", "MatMulIntegerToFloat": "MatMul",
    "DynamicQuantizeMatMul": "MatMul",
}  # fmt: skip
"""Heavy operators by family; on the CPU, ONNX Runtime's optimisers replace an operator by others of its family."""


def name_as_model(providers: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Returns providers by the names of nodes in the model, without the suffix of the layout transformation."""
    added = {_TOKEN.sub("", name): provider for name, provider in providers.items() if name not in names}
    # An exact name takes precedence over one that matches only without the suffix.
    return added | dict(providers)


def match_nodes(report: CheckReport, providers: Mapping[str, str]) -> tuple[tuple[CheckedNode, bool], ...]:
    """Returns the checked nodes that are still in a session, each with whether a provider other than the CPU took it.

    Nodes of a quantized unit count as placed where the unit's operator is, because the layout transformation recreates
    Q and DQ nodes and may give their names to others.
    """
    places = ((node, providers.get(node.unit or node.name)) for node in report.node_list)
    return tuple((node, place != CPU_PROVIDER) for node, place in places if place is not None)


def goes_unnamed(node: CheckedNode, target: Target) -> bool:
    """Returns True for a float node that XNNPACK takes by itself: the session does not list such nodes.

    A session does list nodes on the CPU, QDQ groups, and operators with a fused activation (observed with ONNX Runtime
    1.29 for Android).
    """
    return target.provider == XNNPACK and node.taken and not node.integers and not node.is_quantizer


def count_nodes(run: DeviceRun, job: Job) -> dict[str, int]:
    """Returns how many nodes each provider took: those that the session lists, and those that go unnamed.

    An unnamed node counts if it was predicted taken, and if neither its name nor a CPU node that it may have become is
    listed.
    """
    counts = Counter(node.provider for node in run.placement)
    # An empty placement means that nothing was observed.
    if counts and run.placement_source == "session":
        lost = {node.name for node in find_lost(run, job.check)}
        listed = _read_places(run, job.check)
        unnamed = [node for node in job.check.node_list if goes_unnamed(node, job.target) and node.op not in _FUSED]
        counts[job.target.provider] += sum(node.name not in listed and node.name not in lost for node in unnamed)
    return {provider: count for provider, count in sorted(counts.items()) if count}


def find_lost(run: DeviceRun, check: CheckReport) -> list[CheckedNode]:
    """Returns the nodes that were predicted taken but ran on the CPU, also those that an optimiser renamed."""
    places = _read_places(run, check)
    taken = [node for node in check.node_list if node.taken and not node.is_quantizer]
    lost = [node for node in taken if places.get(node.name) == CPU_PROVIDER]
    known = places.keys() & {node.name for node in check.node_list}
    unknown = [node for node in run.placement if node.provider == CPU_PROVIDER and node.name not in known]
    strange = Counter(FAMILIES[node.op] for node in unknown if node.op in FAMILIES)
    expected = Counter(
        FAMILIES[node.op]
        for node in check.node_list
        if not node.taken and node.op in FAMILIES and node.name not in known
    )
    for family, count in sorted((strange - expected).items()):
        lost += [node for node in taken if FAMILIES.get(node.op) == family and node.name not in known][:count]
    return lost


def _read_places(run: DeviceRun, check: CheckReport) -> dict[str, str]:
    names = {node.name for node in check.node_list}
    return name_as_model({node.name: node.provider for node in run.placement}, names)
