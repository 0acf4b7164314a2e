"""The report of a check: facts, and the verdict computed from them.

The prepared model is checked. The report also lists the nodes of the user's own model and what became of them.
"""

import operator
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from edgekit.check.macs import assume_sizes, count_bytes, count_macs
from edgekit.check.trace import Fate, trace_nodes
from edgekit.graph.graph import infer_graph, read_graph
from edgekit.model.external import skim_model
from edgekit.model.model import Model
from edgekit.prepare.clean import drop_initializer_inputs, merge_domains
from edgekit.prepare.interface import name_nodes
from edgekit.prepare.shapes import fix_dims
from edgekit.serialize import NotebookPage

Verdict = Literal["yes", "maybe", "no"]

# Chosen by hand. ONNX Runtime's checker wants 75 % and 50 % of the nodes (usability_checker.py). These are shares of
# the work, and "yes" also needs nearly all of it in one partition, because each border costs a copy.
YES_SHARE = 0.9
MAYBE_SHARE = 0.5
CROSSING_SHARE = 0.5


class JudgedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node, whether the provider takes it, and if not every reason why.

    `macs` are the multiply-accumulates of one inference, `bytes` those of the computed values that it reads and writes.
    """

    name: str
    op: str
    domain: str
    taken: bool
    reasons: tuple[str, ...]
    macs: int
    bytes: int


class CheckedNode(JudgedNode, frozen=True, kw_only=True):
    """A node of the graph that the provider sees.

    `unit` names the operator of the QDQ group that a Q, a DQ or a redundant activation belongs to. `partition` counts
    from 0 and is None for nodes not taken. `fatal` means that the provider claims the node and then refuses the whole
    session because of it; `risks` say why it may do so. `reads` names the nodes that make its inputs. `integers` means
    that the node is taken and computes in 8 or 16 bits; `remarks` say how it computes where integers were expected.
    """

    partition: int | None
    unit: str | None = None
    fatal: bool = False
    risks: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    integers: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def is_quantizer(self) -> bool:
        """True for nodes that only quantize or dequantize."""
        return self.op in {"QuantizeLinear", "DequantizeLinear"}


class ModelNode(JudgedNode, frozen=True, kw_only=True):
    """A node of the user's model, and what became of it before the provider saw the graph.

    `taken` is True if the provider takes all nodes that it became, so also if nothing of it is left to run. `became`
    names the nodes of `node_list` that do its work; `fate` is one of "kept", "rewritten", "fused", "folded" and
    "removed", and `note` says it in words. `macs` and `bytes` are 0 if nothing is left to run.
    """

    fate: Fate
    became: tuple[str, ...]
    note: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change to the model, and how many more nodes and MACs the provider would then take.

    An automatic change is made by `edgekit prepare --fix`, or by the command that the message names; its gain is
    computed by the same rules on the changed graph. `nodes` are those that the advice concerns.
    """

    id: str
    subject: str
    message: str
    fix: Literal["automatic", "manual"]
    gain_nodes: int
    gain_macs: int = 0
    nodes: tuple[str, ...] = ()


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """A node that check and provider place differently: True means that it is taken."""

    name: str
    op: str
    predicted: bool
    observed: bool


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """Where the nodes of a model run, and how that is known: tables, pages and packages all show this value.

    `evidence` is "predicted" for rules, else that of the device whose provider was observed. `partitions` counts those
    of the provider, `taken_macs` is their share of the work, 0 to 1. `disagreements` are the nodes that the provider
    placed differently from the rules; they show which rules need correction.
    """

    evidence: str
    device: str = ""
    nodes: int
    taken: int
    partitions: int
    taken_macs: float
    disagreements: tuple[Disagreement, ...] = ()


class CheckReport(NotebookPage, msgspec.Struct, frozen=True, kw_only=True):
    """The predicted placement of a model on a target.

    `evidence` is the strength of the placement's evidence: "predicted" for rules. `node_list` holds each node of the
    checked graph once, in graph order, the nodes of a subgraph after the node that has it; Constant nodes are left out
    because ONNX Runtime turns them into initializers. `crossings` counts the values that cross between the provider and
    the CPU, `crossing_bytes` their bytes. `model_nodes` holds each node of the user's own model, if that is known.
    `wants_whole` says that the session is made without the CPU, `style` whether the provider takes waves of nodes or
    each by itself. For inputs with open dimensions, `counted_at` holds the sizes assumed for them in MACs and bytes;
    `unsized_nodes` counts the multiplying nodes whose work is unknown even then.
    """

    target: str
    model: str
    sha256: str
    evidence: str
    settings: dict[str, str]
    node_list: tuple[CheckedNode, ...]
    advice: tuple[Advice, ...]
    crossings: int = 0
    crossing_bytes: int = 0
    model_nodes: tuple[ModelNode, ...] = ()
    wants_whole: bool = False
    style: Literal["wave", "node"] = "wave"
    counted_at: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    unsized_nodes: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def nodes(self) -> int:
        """How many nodes were checked."""
        return len(self.node_list)

    @property
    def taken(self) -> int:
        """How many nodes the provider takes."""
        return sum(node.taken for node in self.node_list)

    @property
    def partitions(self) -> int:
        """How many partitions the provider would get."""
        return len({node.partition for node in self.node_list if node.partition is not None})

    @property
    def placed(self) -> Placed:
        """The predicted placement."""
        return Placed(
            evidence="predicted",
            nodes=self.nodes,
            taken=self.taken,
            partitions=self.partitions,
            taken_macs=self.taken_macs,
        )

    @property
    def taken_macs(self) -> float:
        """The share of multiply-accumulates taken, 0 to 1; the share of bytes where nothing multiplies."""
        total = sum(node.macs for node in self.node_list)
        return sum(node.macs for node in self.node_list if node.taken) / total if total else self.taken_bytes

    @property
    def integer_macs(self) -> float:
        """The share of multiply-accumulates that is taken and computed in integers, 0 to 1; 0 if nothing multiplies."""
        total = sum(node.macs for node in self.node_list)
        return sum(node.macs for node in self.node_list if node.integers) / total if total else 0.0

    @property
    def taken_bytes(self) -> float:
        """The share of all bytes read and written by taken nodes, 0 to 1; of nodes if no size is known."""
        total = sum(node.bytes for node in self.node_list)
        if total == 0:
            # No shape is known: only nodes can be counted.
            return self.taken / self.nodes if self.nodes else 0.0
        return sum(node.bytes for node in self.node_list if node.taken) / total

    @property
    def main_share(self) -> float:
        """The share of multiply-accumulates in the largest partition, 0 to 1; of bytes if nothing multiplies."""
        # For a model without multiplications, such as one that only moves data, bytes take the place of MACs.
        weigh = operator.attrgetter("macs" if any(node.macs for node in self.node_list) else "bytes")
        total = sum(weigh(node) for node in self.node_list)
        sums: dict[int | None, int] = {}
        for node in self.node_list:
            sums[node.partition] = sums.get(node.partition, 0) + weigh(node)
        best = max((share for place, share in sums.items() if place is not None), default=0)
        return best / total if total else self.taken_macs

    @property
    def crossing_share(self) -> float:
        """The bytes that cross between provider and CPU over the bytes read and written by all nodes, 0 to 1."""
        total = sum(node.bytes for node in self.node_list)
        return min(1.0, self.crossing_bytes / total) if total else 0.0

    @property
    def is_refused(self) -> bool:
        """True if no session can be made, or none with right results."""
        return any(node.fatal for node in self.node_list)

    @property
    def risks(self) -> tuple[str, ...]:
        """Why session creation may fail although the provider claims the nodes."""
        return tuple(dict.fromkeys(risk for node in self.node_list for risk in node.risks))

    @property
    def verdict(self) -> Verdict:
        """Whether to use the target: yes from 90 % of the work in one partition, no below half or if it refuses.

        It is maybe at best with a risk; if the work of a node is unknown and one is left over; if the values that cross
        between places are more than half of all bytes read and written; and, on a target that wants the graph whole, if
        a node is left over or the graph is split.
        """
        if self.is_refused or self.taken_macs < MAYBE_SHARE:
            return "no"
        enough = self.main_share >= YES_SHARE and self.taken_bytes >= MAYBE_SHARE
        is_unsure = bool(self.unsized_nodes) and self.taken < self.nodes
        whole = not self.wants_whole or (self.taken == self.nodes and self.partitions == 1)
        together = whole and self.crossing_share <= CROSSING_SHARE
        return "yes" if enough and together and not (self.risks or is_unsure) else "maybe"


def count_of(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 partition" or "2 partitions"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def trace_model(source: Model, prepared: Model, dims: Mapping[str, int]) -> tuple[ModelNode, ...]:
    """Returns each node of a model, subgraphs included, with what became of it when it was prepared with `dims`.

    No target has judged the nodes yet: each counts as taken. Their work is that in the model as it is, at the sizes of
    `assume_sizes` where a dimension is unknown.

    Raises:
        ModelError: a model file is gone or unreadable.
    """
    proto = skim_model(source.path)
    # The same first steps as in `prepare`, so that unnamed nodes get the same names in both graphs.
    merge_domains(proto)
    drop_initializer_inputs(proto.graph)
    name_nodes(proto.graph)
    fix_dims(proto.graph, dims, may_stay_open=True)
    return tuple(
        ModelNode(
            name=node.name,
            op=node.op_type,
            domain=node.domain or "ai.onnx",
            taken=True,
            reasons=(),
            macs=count_macs(graph, node),
            bytes=count_bytes(graph, node),
            fate=trace.fate,
            became=trace.became,
            note=trace.note,
        )
        for graph, node, trace in trace_nodes(assume_sizes(infer_graph(proto)), read_graph(prepared))
    )


def add_model_nodes(report: CheckReport, traced: Iterable[ModelNode]) -> CheckReport:
    """Returns a report that also lists the nodes of the user's model."""
    checked = {node.name: node for node in report.node_list}
    nodes: list[ModelNode] = []
    for node in traced:
        now = [checked[name] for name in node.became if name in checked]
        kept = now[0] if node.fate == "kept" and now else node
        nodes.append(
            msgspec.structs.replace(
                node,
                taken=all(other.taken for other in now),
                reasons=tuple(dict.fromkeys(reason for other in now for reason in other.reasons)),
                macs=kept.macs if now else 0,
                bytes=kept.bytes if now else 0,
            )
        )
    return msgspec.structs.replace(report, model_nodes=tuple(nodes))
