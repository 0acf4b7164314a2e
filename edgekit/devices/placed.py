"""Finds the nodes of a session in its model: by name, by what an optimiser made of them, or by their absence."""

import re
from collections import Counter
from collections.abc import Collection, Mapping

from edgekit._ort import CPU_PROVIDER
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.devices.android.android import XNNPACK
from edgekit.devices.device import DeviceRun, Job
from edgekit.graph.graph import read_graph
from edgekit.model.model import Model
from edgekit.target import Target

# What ONNX Runtime's layout change adds to the name of a node that it makes anew.
_TOKEN = re.compile(r"_token_\d+$")

# What XNNPACK fuses into the operator before, and never takes alone; so do optimisers of the CPU.
_FUSED = frozenset({"Clip", "Relu"})

# What XNNPACK has kernels for (onnxruntime/core/providers/xnnpack/xnnpack_execution_provider.cc).
_XNNPACK_OPS = _FUSED | {"AveragePool", "Conv", "ConvTranspose", "Gemm", "MatMul", "MaxPool", "Resize", "Softmax"}

FAMILIES: Mapping[str, str] = {
    "Conv": "Conv", "FusedConv": "Conv", "QLinearConv": "Conv", "ConvInteger": "Conv", "NhwcFusedConv": "Conv",
    "ConvTranspose": "ConvTranspose", "QLinearConvTranspose": "ConvTranspose",
    "Gemm": "MatMul", "QGemm": "MatMul", "FusedGemm": "MatMul", "MatMul": "MatMul", "FusedMatMul": "MatMul",
    "QLinearMatMul": "MatMul", "MatMulInteger": "MatMul", "MatMulIntegerToFloat": "MatMul",
    "DynamicQuantizeMatMul": "MatMul",
}  # fmt: skip
"""Operators that do a model's work, by what ONNX Runtime's optimisers turn into one another on the CPU."""


def name_as_model(providers: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Returns providers by the names that nodes have in the model, without what a change of the layout adds."""
    added = {_TOKEN.sub("", name): provider for name, provider in providers.items() if name not in names}
    # Exact names win over those that only match without the suffix.
    return added | dict(providers)


def match_nodes(report: CheckReport, providers: Mapping[str, str]) -> tuple[tuple[CheckedNode, bool], ...]:
    """Returns the checked nodes that a session still had, each with whether a provider other than the CPU took it.

    What belongs to the unit of an operator is where that operator is: a change of the layout makes its Q and DQ anew,
    and may give their names to others.
    """
    places = ((node, providers.get(node.unit or node.name)) for node in report.node_list)
    return tuple((node, place != CPU_PROVIDER) for node, place in places if place is not None)


def goes_unnamed(node: CheckedNode, target: Target) -> bool:
    """Returns True for a float node that XNNPACK takes alone, which a session does not name.

    What runs on the CPU has a name there, and so have QDQ groups and what an activation is fused into (ONNX Runtime
    1.29 for Android, run).
    """
    return target.provider == XNNPACK and node.taken and not node.integers and not node.is_quantizer


def add_unnamed(model: Model, providers: Mapping[str, str]) -> dict[str, str]:
    """Returns the place of every node of a model on XNNPACK, from a session without fusions: see `goes_unnamed`.

    Of what is on neither side only XNNPACK's own operators can be there; all else was cancelled, made anew, or written
    as other operators, as a HardSwish is that has no kernel. What the session has and the model has not, such as a
    Transpose that the layout needs, is left out.
    """
    return {
        node.name: providers.get(node.name, XNNPACK)
        for node in read_graph(model).nodes
        if node.name in providers or node.op_type in _XNNPACK_OPS
    }


def count_nodes(run: DeviceRun, job: Job) -> dict[str, int]:
    """Returns how many nodes each provider took, by its name: those that the session lists, and those it cannot name.

    A node that goes unnamed counts where it was predicted taken and neither its name nor a node of the CPU that it may
    have become is listed.
    """
    counts = Counter(node.provider for node in run.placement)
    # An empty list is no list: then nothing was observed.
    if counts and run.placement_source == "session":
        lost = {node.name for node in find_lost(run, job.check)}
        listed = _read_places(run, job.check)
        unnamed = [node for node in job.check.node_list if goes_unnamed(node, job.target) and node.op not in _FUSED]
        counts[job.target.provider] += sum(node.name not in listed and node.name not in lost for node in unnamed)
    return {provider: count for provider, count in sorted(counts.items()) if count}


def find_lost(run: DeviceRun, check: CheckReport) -> list[CheckedNode]:
    """Returns the nodes that were predicted taken and are listed as the CPU's, those that an optimiser renamed too."""
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
