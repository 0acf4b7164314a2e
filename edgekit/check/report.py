"""What checking a model against a target found: facts and the verdict computed from them."""

from typing import Literal

import msgspec

Verdict = Literal["yes", "maybe", "no"]

YES_SHARE = 0.9
MAYBE_SHARE = 0.5


class CheckedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the model, whether the provider takes it, and if not every reason why.

    `unit` names the target node of the QDQ group that it is in, itself if it is in none. `partition` counts from 0 and
    is None for nodes not taken. `macs` are multiply-accumulates of one inference, `bytes` those of the computed values
    it reads and writes. `fatal` means that the provider claims it and then refuses the whole session because of it,
    `risks` say why it may.
    """

    name: str
    op: str
    domain: str
    taken: bool
    reasons: tuple[str, ...]
    macs: int
    bytes: int
    partition: int | None
    unit: str
    fatal: bool = False
    risks: tuple[str, ...] = ()

    @property
    def is_quantizer(self) -> bool:
        """True for nodes that only quantize or dequantize."""
        return self.op in {"QuantizeLinear", "DequantizeLinear"}


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Something to change in the model, and how many more nodes the provider would then take."""

    id: str
    subject: str
    message: str
    fix: Literal["automatic", "manual"]
    gain_nodes: int


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted placement of a model on a target.

    `evidence` is how good the placement's evidence is: "predicted" for rules. `node_list` holds each node of the
    checked graph once, in graph order, a body's nodes after the node that has it; Constant nodes are left out because
    ONNX Runtime turns them into initializers. `crossings` counts the values that cross between the provider and the
    CPU, `crossing_bytes` their bytes.
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
        """How many pieces the provider would get."""
        return len({node.partition for node in self.node_list if node.partition is not None})

    @property
    def taken_macs(self) -> float:
        """The share of multiply-accumulates taken, 0 to 1; the share of bytes where nothing multiplies."""
        total = sum(node.macs for node in self.node_list)
        return sum(node.macs for node in self.node_list if node.taken) / total if total else self.taken_bytes

    @property
    def taken_bytes(self) -> float:
        """The share of the bytes read and written that is of nodes taken, 0 to 1; of nodes where no size is known."""
        total = sum(node.bytes for node in self.node_list)
        if total == 0:
            return self.taken / self.nodes if self.nodes else 0.0
        return sum(node.bytes for node in self.node_list if node.taken) / total

    @property
    def is_refused(self) -> bool:
        """True if the provider would refuse the whole session."""
        return any(node.fatal for node in self.node_list)

    @property
    def risks(self) -> tuple[str, ...]:
        """Why the session may fail although the provider claims its nodes."""
        return tuple(dict.fromkeys(risk for node in self.node_list for risk in node.risks))

    @property
    def verdict(self) -> Verdict:
        """Whether to use the target: yes from 90 % of the work in few pieces, no below half or if it refuses.

        With a risk it is maybe at best.
        """
        if self.is_refused or self.taken_macs < MAYBE_SHARE:
            return "no"
        few = self.partitions <= max(3, self.nodes // 50)
        enough = self.taken_macs >= YES_SHARE and self.taken_bytes >= MAYBE_SHARE
        return "yes" if few and enough and not self.risks else "maybe"
