"""Observes which nodes of a model a real provider takes, and compares that with the prediction of `check`.

Nodes of a session are matched with nodes of the model by name, by operators that optimisers substitute, or by their
absence.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from edgekit._files import work_folder
from edgekit._ort import CPU_PROVIDER, Level
from edgekit.check.check import check_model
from edgekit.check.report import CheckedNode, CheckReport, Disagreement
from edgekit.convert.convert import find_integer_nodes
from edgekit.data.samples import Samples, draw_samples, list_samples
from edgekit.devices.android.android import NNAPI, XNNPACK
from edgekit.devices.device import Device, DeviceRun, Job, find_present
from edgekit.devices.find import known_device
from edgekit.devices.local.host import COREML, QNN
from edgekit.devices.local.provider import OPENVINO, PROVIDERS
from edgekit.errors import DataError, DeviceError, MissingExtraError, ModelError, RuntimeRefusal
from edgekit.evidence import DeviceResult, Evidence
from edgekit.graph.graph import read_graph
from edgekit.model.model import Model
from edgekit.target import Target

_WEBGPU = PROVIDERS["webgpu"].name

# For each provider, the devices that run its own code, the best first.
_OBSERVERS = {
    QNN: ("qnn-htp-sim",), NNAPI: ("android", "android:x86_64"), XNNPACK: ("android", "android:x86_64"),
    COREML: ("coreml", "ios-sim"), OPENVINO: ("openvino",), _WEBGPU: ("webgpu",),
}  # fmt: skip

# These providers decide when the session is made: no run is needed to observe the placement.
_PLACED_AT_LOAD = frozenset({NNAPI, COREML})

# In sessions of these providers, optimisers fuse and rename nodes, so that they are opened with fewer optimisations.
_UNFUSED = frozenset({XNNPACK, _WEBGPU})


class ObservedPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """The provider of each node that is left in a session, by the node's name in the model.

    `reasons` say why the provider did not take a node, if it says so. `partitions` counts the subgraphs that it got, if
    known: `tools/placement_agreement.py` reads both from QNN's log. `failure` says why no session could be made.
    """

    providers: dict[str, str]
    reasons: dict[str, str] = {}
    partitions: int | None = None
    notes: tuple[str, ...] = ()
    failure: str | None = None


class Observed(DeviceResult, frozen=True, kw_only=True):
    """What a real provider did with a model.

    `nodes` counts the nodes of the model that could be matched with nodes of the session, `taken` those that the
    provider took; `not_taken` names the others. `failure` says why no session could be made; then only nodes that were
    placed before the failure count. `notes` say what was done differently from an app on the target.
    """

    nodes: int
    taken: int
    not_taken: tuple[str, ...]
    disagreements: tuple[Disagreement, ...]
    notes: tuple[str, ...]

    @property
    def refused(self) -> bool:
        """True if the vendor's own code could not make a session: that outweighs any prediction."""
        is_own = self.evidence.is_at_least(Evidence.SAME_BINARY) or self.device.startswith("android")
        return self.failure is not None and is_own


def observe_target(model: Model, target: Target) -> Observed | str:
    """Returns which nodes of a prepared model the target's real provider takes, and where the prediction differs.

    If no real provider can run, returns why, with the command that installs one, if there is any.

    The CPU provider may take the nodes that the provider leaves. The model is run once on random numbers.

    Raises:
        TargetError: the target has an option that the provider would ignore or misread.
    """
    if target.provider == CPU_PROVIDER:
        # The CPU provider takes every node: what is observed is which ones it computes in integers.
        report, failure, seen = check_model(model, target), None, dict[str, bool]()
        try:
            seen = find_integer_nodes(model, signed=target.conversion.cpu == "arm")
        except RuntimeRefusal as error:
            failure = error.message
        nodes = [node for node in report.node_list if node.name in seen and not node.is_quantizer]
        if not any(node.is_quantizer for node in report.node_list):
            return _judge("host", Evidence.SAME_EP, [(node, True, True) for node in nodes], failure)
        # There is no prediction for a node that is not in integers for a reason that the rules do not know.
        judged = [(node, node.integers if node.integers or node.remarks else seen[node.name]) for node in nodes]
        pairs = [(node, predicted, seen[node.name]) for node, predicted in judged]
        notes = ("for a quantized model, the nodes that compute in integers are counted",)
        return _judge("host", Evidence.SAME_EP, pairs, failure, notes)
    # A device without `for_target`: it only places nodes, and need not compute the networks of NNAPI or Core ML.
    present, skipped = find_present(map(known_device, _OBSERVERS.get(target.provider, ())))
    if not present and not skipped:
        return f"{target.provider} runs only on a device; edgekit verify emulates it"
    if not present:
        best = skipped[0]
        command = f"; to observe: {best.command}" if best.command else ""
        return f"'{best.device}' cannot run here: {best.reason}{command}"
    device = present[0]
    try:
        placement = observe_placement(model, target, device)
    except (DeviceError, MissingExtraError, ModelError) as error:
        return f"'{device.name}': {error.message}; {error.hint}"
    return compare_placement(check_model(model, device.as_seen(target)), placement, device)


def compare_placement(report: CheckReport, placement: ObservedPlacement, device: Device) -> Observed:
    """Compares a prediction, node by node, with the placement that a device observed."""
    # A node that breaks a session may have been claimed by then: either place is as predicted.
    found = match_nodes(report, placement.providers)
    pairs = [(node, taken if node.fatal else node.taken, taken) for node, taken in found]
    return _judge(device.name, device.evidence, pairs, placement.failure, placement.notes)


def _judge(
    device: str,
    evidence: Evidence,
    pairs: Sequence[tuple[CheckedNode, bool, bool]],
    failure: str | None,
    notes: tuple[str, ...] = (),
) -> Observed:
    """Returns an observation; `pairs` has for each node whether it was predicted taken, and whether it was taken."""
    return Observed(
        device=device,
        evidence=evidence,
        nodes=len(pairs),
        taken=sum(taken for _, _, taken in pairs),
        not_taken=tuple(node.name for node, _, taken in pairs if not taken),
        disagreements=tuple(
            Disagreement(name=node.name, op=node.op, predicted=predicted, observed=taken)
            for node, predicted, taken in pairs
            if predicted != taken
        ),
        failure=failure,
        notes=notes,
    )


def observe_placement(model: Model, target: Target, device: Device, *, samples: int = 1) -> ObservedPlacement:
    """Returns where the provider of a device puts the nodes of a model, after `samples` runs on random numbers.

    A model with inputs of unknown or very large size is not run, only opened. NNAPI and Core ML are not run either,
    because they place nodes when the session is made. Sessions of XNNPACK and WebGPU are made without the fusions that
    would rename nodes.

    Raises:
        DeviceError: the device is not there, or made no session in the time that it has: that is no refusal.
        ModelError: the model cannot be lowered to what the device reads.
    """
    job = describe_job(model, target, samples=0 if target.provider in _PLACED_AT_LOAD else samples)
    is_xnnpack = target.provider == XNNPACK
    if target.provider in _UNFUSED:
        job = msgspec.structs.replace(job, level=Level.BASIC if is_xnnpack else Level.DISABLED)
    with work_folder() as work:
        run = device.run_job(job, work)
    providers = {node.name: node.provider for node in run.placement}
    names = {node.name: node.op_type for node in read_graph(model).nodes}
    seen = name_as_model(providers, names)
    # The load time is set once the session is made, even if the run on random numbers fails afterwards.
    opened = run.load_ms > 0
    if run.timed_out and not opened:
        raise DeviceError(f"no session: {run.failure}", hint="try again when the machine has less to do")
    notes = run.notes
    if opened and run.failure:
        notes = (*notes, f"the run on random numbers failed: {run.failure}")
    if is_xnnpack and opened and run.placement_source == "session":
        # XNNPACK's own float nodes are not listed (see `is_unlisted`), and only its operators can be there. Any other
        # unlisted node was removed, recreated, or decomposed, as a HardSwish without a kernel is. Nodes that the model
        # lacks, such as a Transpose for the layout, are left out.
        seen = {name: seen.get(name, XNNPACK) for name, op in names.items() if name in seen or op in _XNNPACK_OPS}
    return ObservedPlacement(providers=seen, notes=notes, failure=None if opened else run.failure)


def describe_job(model: Model, target: Target, *, samples: int) -> Job:
    """Returns the job that opens a model as on a target, and runs it on that many samples of random numbers.

    There is no sample if an input has no fixed size, or a very large one.
    """
    drawn = None
    if all(spec.is_static for spec in model.inputs):
        with contextlib.suppress(DataError):
            drawn = draw_samples(model.inputs, samples)
    return open_job(model, target, list_samples([], "random numbers") if drawn is None else drawn)


def open_job(model: Model, target: Target, samples: Samples) -> Job:
    """Returns the job that opens a model as on a target, and runs it on samples."""
    return Job(
        model=model.path,
        target=target,
        precision=target.precision,
        outputs=model.outputs,
        check=check_model(model, target),
        samples=samples,
        custom_ops=model.custom_ops,
    )


# The suffix that ONNX Runtime's layout transformation adds to the names of nodes that it recreates.
_TOKEN = re.compile(r"_token_\d+$")

# Activations that XNNPACK fuses into the preceding operator and never takes alone; optimisers of the CPU fuse them too.
_FUSED = frozenset({"Clip", "Relu"})

# Operators for which XNNPACK has kernels (onnxruntime/core/providers/xnnpack/xnnpack_execution_provider.cc).
_XNNPACK_OPS = _FUSED | {"AveragePool", "Conv", "ConvTranspose", "Gemm", "MatMul", "MaxPool", "Resize", "Softmax"}

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


def is_unlisted(node: CheckedNode, target: Target) -> bool:
    """Returns True for a float node that XNNPACK takes by itself: the session does not list such nodes.

    A session does list nodes on the CPU, QDQ groups, and operators with a fused activation (observed with ONNX Runtime
    1.29 for Android). A node that XNNPACK takes by itself is assigned to it before the layout changes, and recorded
    only if it is assigned later (graph_partitioner.cc, TryAssignNodes and IsIndexedSubGraphAvailableForAssignment).
    """
    return target.provider == XNNPACK and node.taken and not node.integers and not node.is_quantizer


def shows_placement(run: DeviceRun, job: Job) -> bool:
    """Returns True if a run shows which provider took which node.

    An empty list shows it too if a session lists no node of the model that XNNPACK takes: one on the CPU it would list.
    """
    if run.placement or run.placement_source != "session" or run.failure is not None:
        return bool(run.placement)
    nodes = job.check.node_list
    return bool(nodes) and all(is_unlisted(node, job.target) and node.op not in _FUSED for node in nodes)


def count_nodes(run: DeviceRun, job: Job) -> dict[str, int]:
    """Returns how many nodes each provider took: those that the session lists, and those that it does not list.

    An unlisted node counts if it was predicted taken, and if neither its name nor a CPU node that it may have become is
    listed.
    """
    counts = Counter(node.provider for node in run.placement)
    if shows_placement(run, job) and run.placement_source == "session":
        lost = {node.name for node in find_lost(run, job.check)}
        listed = map_providers(run, job.check)
        unlisted = [node for node in job.check.node_list if is_unlisted(node, job.target) and node.op not in _FUSED]
        counts[job.target.provider] += sum(node.name not in listed and node.name not in lost for node in unlisted)
    return {provider: count for provider, count in sorted(counts.items()) if count}


def find_lost(run: DeviceRun, check: CheckReport) -> list[CheckedNode]:
    """Returns the nodes that were predicted taken but ran on the CPU, also those that an optimiser renamed."""
    places = map_providers(run, check)
    taken = [node for node in check.node_list if node.taken and not node.is_quantizer]
    lost = [node for node in taken if places.get(node.name) == CPU_PROVIDER]
    known = places.keys() & {node.name for node in check.node_list}
    unknown = [node for node in run.placement if node.provider == CPU_PROVIDER and node.name not in known]
    unexplained = Counter(FAMILIES[node.op] for node in unknown if node.op in FAMILIES)
    left = (node for node in check.node_list if not node.taken and node.name not in known)
    expected = Counter(FAMILIES[node.op] for node in left if node.op in FAMILIES)
    for family, count in sorted((unexplained - expected).items()):
        lost += [node for node in taken if FAMILIES.get(node.op) == family and node.name not in known][:count]
    return lost


def map_providers(run: DeviceRun, check: CheckReport) -> dict[str, str]:
    """Returns the provider of each node that a device reports, by its name in the model."""
    names = {node.name for node in check.node_list}
    return name_as_model({node.name: node.provider for node in run.placement}, names)
