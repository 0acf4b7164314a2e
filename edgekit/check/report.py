"""The report of a check: facts, and the verdict computed from them.

The prepared model is checked. The report also lists the nodes of the user's own model and what became of them.
"""

import operator
from collections.abc import Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Final, Literal

import msgspec

from edgekit.check.macs import assume_sizes, count_bytes, count_work
from edgekit.graph.graph import Graph, Node, infer_graph, read_graph
from edgekit.graph.match import walk
from edgekit.model.external import skim_model
from edgekit.model.model import Model
from edgekit.prepare.clean import drop_initializer_inputs, merge_domains
from edgekit.prepare.interface import name_nodes
from edgekit.prepare.shapes import fix_dims
from edgekit.serialize import NotebookPage, fill

Verdict = Literal["yes", "maybe", "no"]
VERDICTS: Final[tuple[Verdict, ...]] = ("no", "maybe", "yes")
"""From the worst to the best."""
Fate = Literal["kept", "rewritten", "fused", "folded", "removed"]

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


class PlacedNodes(msgspec.Struct, frozen=True, kw_only=True):
    """A placement: how many nodes there are, how many of them a provider takes, and in how many partitions."""

    nodes: int
    taken: int
    partitions: int


class Placed(PlacedNodes, frozen=True, kw_only=True):
    """Where the nodes of a model run, and how that is known: tables, pages and packages all show this value.

    `evidence` is "predicted" for rules, else that of the device whose provider was observed. `partitions` counts those
    of the provider, `taken_macs` is their share of the work, 0 to 1. `disagreements` are the nodes that the provider
    placed differently from the rules; they show which rules need correction.
    """

    evidence: str
    device: str = ""
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
        return fill(Placed, self, evidence="predicted")

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


def find_stopping(report: CheckReport) -> tuple[set[str], str]:
    """Returns the names of the nodes because of which no session can be made, and the first with its reason in words.

    The report must be of a model that is refused. The Q and DQ nodes of a unit are fatal together with its operator,
    which is named.
    """
    fatal = [node for node in report.node_list if node.fatal]
    nodes = [node for node in fatal if not node.is_quantizer] or fatal
    first = next((node for node in nodes if node.reasons), nodes[0])
    why = first.reasons[0] if first.reasons else "it is part of what the provider refuses"
    return {node.name for node in nodes}, f"because of {count_of(len(nodes), 'node')}: {first.op} '{first.name}': {why}"


def count_staying(number: int) -> str:
    """Returns "1 node stays", or "2 nodes stay"."""
    return f"{count_of(number, 'node')} {'stays' if number == 1 else 'stay'}"


# What became of each node of the user's model in the graph that a provider sees. Preparation folds, fuses, rewrites and
# removes nodes. Most nodes and values keep their names in both graphs. What became of the others follows from which
# nodes now make and read the values around them.

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


class _Tracer:
    """Both graphs, and the nodes of `source` that depend on constants only, or that an output needs, by position."""

    def __init__(self, source: Graph, prepared: Graph) -> None:
        self.source, self.prepared = source, prepared
        self.names = {node.name: node for node in prepared.nodes}
        self.known = {node.name for node in source.nodes}
        self.constant, self.needed, results = set[int](), set[int](), set[str]()
        for node in source.nodes:
            inputs = [name for name in node.input if name]
            fixed = all(name in source.constants or name in results for name in inputs)
            if (fixed and inputs and not node.bodies) or (node.op_type in _SHAPE_OPS and node.name not in self.names):
                self.constant.add(node.index)
                results.update(node.output)
        for node in reversed(source.nodes):
            readers = {reader.index for name in node.output for reader in source.consumers.get(name, ())}
            if readers & self.needed or any(name in source.outputs for name in node.output):
                self.needed.add(node.index)

    def trace(self, node: Node, later: Mapping[int, Trace]) -> Trace:
        """Returns what became of a node; `later` says it of its readers."""
        same = self.names.get(node.name)
        if same is not None and (same.op_type, same.domain) == (node.op_type, node.domain):
            return Trace(fate="kept", became=(same.name,))
        if same is not None:
            return Trace(fate="rewritten", became=(same.name,), note=f"written as {same.op_type}")
        producers = self.prepared.producers
        makers = [producers[name] for name in node.output if name in producers]
        if makers:
            return self._describe_makers(makers)
        if node.index in self.constant or all(name in self.prepared.constants for name in node.output if name):
            return Trace(fate="folded", note="depends on constants only, so it is computed once, before the model runs")
        if node.index not in self.needed:
            return Trace(fate="removed", note="no output of the model depends on it")
        readers = [reader for name in node.output for reader in self.source.consumers.get(name, ())]
        for reader in readers:
            trace = later[reader.index]
            if trace.fate == "kept":
                return self._describe_input(node, reader)
            if trace.became:
                named = ", ".join(self.names[name].op_type for name in trace.became)
                return Trace(fate="fused", became=trace.became, note=f"fused with '{reader.name}' into {named}")
        if readers and all(later[reader.index].fate == "folded" for reader in readers):
            return Trace(fate="folded", note="only shapes and constants depend on it, which are computed once")
        return Trace(fate="removed", note="nothing that is left reads it")

    def _describe_makers(self, makers: list[Node]) -> Trace:
        """Describes a node by the prepared nodes that now make its outputs, and the new nodes that lead to them."""
        # If an old node now makes this node's output, it was fused with it: fusion keeps the name of the last output.
        if all(maker.name in self.known for maker in makers):
            named = ", ".join(f"{maker.op_type} '{maker.name}'" for maker in makers)
            return Trace(fate="fused", became=_names(makers), note=f"fused into {named}")

        def before(node: Node) -> Iterator[Node]:
            read = (name for name in node.input if name not in self.source.producers)
            found = (self.prepared.producers[name] for name in read if name in self.prepared.producers)
            return (maker for maker in found if maker.name not in self.known)

        # From the new producers back through new nodes, to values that the user's model had.
        new = [maker for maker in makers if maker.name not in self.known]
        nodes = sorted(walk(new, before), key=lambda node: node.index)
        return Trace(
            fate="rewritten", became=_names(nodes), note=f"written as {', '.join(node.op_type for node in nodes)}"
        )

    def _describe_input(self, node: Node, reader: Node) -> Trace:
        now = self.names[reader.name].input
        read = next((now[at] for at, name in enumerate(reader.input) if name in node.output and at < len(now)), "")
        if read in self.prepared.constants:
            return Trace(fate="folded", note="its result is a constant")
        maker = self.prepared.producers.get(read)
        # What the node reads, traced back through removed nodes.
        sources: set[str] = set()
        name = node.input[0]
        while name and name not in sources:
            sources.add(name)
            before = self.source.producers.get(name)
            name = "" if before is None or name in self.prepared.producers else before.input[0]
        if read in sources:
            return Trace(fate="removed", note="it only hands its input on")
        if maker is None:
            return Trace(fate="removed", note=f"'{reader.name}' reads '{read}' in its place")
        how = "the same as" if maker.op_type == node.op_type else "merged into"
        return Trace(fate="fused", became=(maker.name,), note=f"{how} {maker.op_type} '{maker.name}'")


def trace_nodes(source: Graph, prepared: Graph) -> Iterator[tuple[Graph, Node, Trace]]:
    """Yields each node of `source` with its graph and what became of it; nodes of its subgraphs follow a node."""
    tracer, found = _Tracer(source, prepared), dict[int, Trace]()
    makers = {name: node.index for name, node in source.producers.items()}
    nodes = {node.index: node for node in source.nodes}
    needs = {index: [makers[name] for name in node.reads if name in makers] for index, node in nodes.items()}
    # From the end, because the fate of a node may depend on that of its readers. A file may hold nodes in any order.
    for index in reversed(tuple(TopologicalSorter(needs).static_order())):
        found[index] = tracer.trace(nodes[index], found)
    for node in source.nodes:
        trace = found[node.index]
        yield source, node, trace
        same = tracer.names.get(node.name)
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


def _names(nodes: list[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.name for node in nodes))


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
        fill(
            ModelNode,
            trace,
            name=node.name,
            op=node.op_type,
            domain=node.domain or "ai.onnx",
            taken=True,
            reasons=(),
            macs=count_work(graph, node),
            bytes=count_bytes(graph, node),
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
