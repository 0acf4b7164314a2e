"""Advice: what to change so that a target takes more, with the gain that the same rules predict."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec

from edgekit.check.graph import Graph, Node
from edgekit.check.report import Advice, CheckedNode
from edgekit.check.what_if import (
    as_reshapes,
    with_activations,
    with_fixed_dims,
    with_inputs,
    with_op,
    without_op,
    without_quantization,
)

Recheck = Callable[[Graph], Sequence[CheckedNode]]

_ADD_SINCE = 7
_NAMED = 3


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A checked graph and a way to check it again after a change.

    `splits` says that a node which is not taken cuts the graph in pieces.
    """

    graph: Graph
    nodes: Sequence[CheckedNode]
    recheck: Recheck
    splits: bool

    @property
    def taken(self) -> set[str]:
        """The names of the nodes taken."""
        return {node.name for node in self.nodes if node.taken}

    def gain(self, changed: Graph) -> int:
        """Returns how many nodes fewer the CPU would keep after a change."""
        return sum(not node.taken for node in self.nodes) - sum(not node.taken for node in self.recheck(changed))

    def refused(self, op: str | None = None, because: str = "") -> list[CheckedNode]:
        """Returns the nodes not taken, of an operator if given, that have a reason with this text."""
        return [
            node
            for node in self.nodes
            if not node.taken and op in {None, node.op} and any(because in reason for reason in node.reasons)
        ]

    def of_op(self, op: str) -> list[Node]:
        """Returns the nodes of an operator in the main graph."""
        return [node for node in self.graph.nodes if node.op == op]


def give_advice(
    graph: Graph, nodes: Sequence[CheckedNode], recheck: Recheck, *, splits: bool = True
) -> tuple[Advice, ...]:
    """Returns what to change, the biggest gain first; nothing where the provider takes every node.

    `splits` says that a node which is not taken cuts the graph in pieces, so that a missing operator matters even if
    it computes little.
    """
    case = Case(graph=graph, nodes=nodes, recheck=recheck, splits=splits)
    if all(node.taken for node in nodes):
        return ()
    found = [advice for adviser in ADVISERS for advice in adviser(case)]
    return tuple(sorted(found, key=lambda advice: (-advice.gain_nodes, advice.id, advice.subject)))


def _advise_sum(case: Case) -> Iterator[Advice]:
    refused = {node.name for node in case.refused("Sum")}
    pairs = [node for node in case.of_op("Sum") if len(node.inputs) == 2 and node.name in refused]
    if pairs:
        yield Advice(
            id="sum-to-add",
            subject=_names([node.name for node in pairs]),
            message=f"write {_count(len(pairs), 'Sum')} of two inputs as Add, which is the same",
            fix="automatic",
            gain_nodes=case.gain(with_op(case.graph, {node.index for node in pairs}, "Add", _ADD_SINCE)),
        )


def _advise_dims(case: Case) -> Iterator[Advice]:
    dynamic = case.refused(because="dynamic")
    if dynamic:
        yield Advice(
            id="fix-dims",
            subject=_names([node.name for node in dynamic]),
            message=f"{_count(len(dynamic), 'node')} depend on dynamic dimensions: fix them with --dim NAME=INT",
            fix="automatic",
            gain_nodes=case.gain(with_fixed_dims(case.graph)),
        )


def _advise_float(case: Case) -> Iterator[Advice]:
    quantizers = case.refused("QuantizeLinear", "no builder") + case.refused("DequantizeLinear", "no builder")
    if quantizers and all(node.unit == node.name for node in case.nodes if node.is_quantizer):
        yield Advice(
            id="use-float",
            subject=_names([node.name for node in quantizers]),
            message="the provider takes no quantized model: give it the float model, as fp16 where the target wants it",
            fix="manual",
            gain_nodes=case.gain(without_quantization(case.graph)),
        )


def _advise_sign(case: Case) -> Iterator[Advice]:
    quantizers = [node for node in case.of_op("QuantizeLinear") if node.name not in case.taken]
    for old, new in (("int8", "uint8"), ("uint8", "int8")):
        refused = [node.name for node in quantizers if case.graph.value(node.outputs[0]).dtype == old]
        gain = case.gain(with_activations(case.graph, old, new, weights=new == "int8")) if refused else 0
        if gain > 0:
            yield Advice(
                id=f"{new}-activations",
                subject=_names(refused),
                message=f"quantize with {new} activations instead of {old}: edgekit quantize does it for this target",
                fix="automatic",
                gain_nodes=gain,
            )


def _advise_resize(case: Case) -> Iterator[Advice]:
    empty: dict[int, tuple[str, ...]] = {}
    for node in case.of_op("Resize"):
        cleaned = tuple(
            "" if at in {1, 2} and name and case.graph.value(name).shape == (0,) else name
            for at, name in enumerate(node.inputs)
        )
        if cleaned != node.inputs:
            empty[node.index] = cleaned
    if empty:
        yield Advice(
            id="resize-empty-inputs",
            subject=_names([case.graph.nodes[index].name for index in empty]),
            message=f"{_count(len(empty), 'Resize')} have empty tensors for roi or scales, which can crash a provider: "
            "leave them out",
            fix="automatic",
            gain_nodes=max(0, case.gain(with_inputs(case.graph, empty))),
        )


def _advise_clip(case: Case) -> Iterator[Advice]:
    computed = case.refused("Clip", "bounds are computed")
    if computed:
        yield Advice(
            id="clip-bounds",
            subject=_names([node.name for node in computed]),
            message=f"give {_count(len(computed), 'Clip')} constant bounds",
            fix="manual",
            gain_nodes=len(computed),
        )


def _advise_flatten(case: Case) -> Iterator[Advice]:
    refused = {node.name for node in case.refused("Flatten")}
    flattens = [node for node in case.of_op("Flatten") if node.name in refused]
    gain = case.gain(as_reshapes(case.graph, {node.index for node in flattens})) if flattens else 0
    if gain > 0:
        yield Advice(
            id="flatten-to-reshape",
            subject=_names([node.name for node in flattens]),
            message=f"write {_count(len(flattens), 'Flatten')} as Reshape, which is the same",
            fix="automatic",
            gain_nodes=gain,
        )


def _advise_copies(case: Case) -> Iterator[Advice]:
    for op in ("Dropout", "Identity"):
        refused = case.refused(op)
        if refused:
            yield Advice(
                id=f"drop-{op.lower()}",
                subject=_names([node.name for node in refused]),
                message=f"remove {_count(len(refused), op)}, which only hand on their input",
                fix="automatic",
                gain_nodes=case.gain(without_op(case.graph, op)),
            )


def _advise_opset(case: Case) -> Iterator[Advice]:
    for because, message in (("older than", "raise"), ("the model's opset", "change")):
        refused = case.refused(because=because)
        if refused:
            yield Advice(
                id="opset",
                subject=_names([node.name for node in refused]),
                message=f"{message} the opset, {_count(len(refused), 'node')} depend on it: edgekit prepare --opset 17",
                fix="automatic",
                gain_nodes=len(refused),
            )


def _advise_missing(case: Case) -> Iterator[Advice]:
    missing = [node for node in case.refused(because="has no builder") if not node.is_quantizer]
    counts = Counter(node.op for node in missing if case.splits or node.macs)
    rewritten: set[str] = {"Dropout", "Identity"}
    if all(len(node.inputs) == 2 for node in case.of_op("Sum")):
        rewritten.add("Sum")
    for op, count in sorted(counts.items()):
        if op in rewritten:
            continue
        message = f"the provider has no {op}: write {_count(count, 'node')} with operators that it takes, or leave them"
        yield Advice(id="no-builder", subject=op, message=message, fix="manual", gain_nodes=count)


def _advise_fatal(case: Case) -> Iterator[Advice]:
    for node in case.nodes:
        if node.fatal:
            yield Advice(
                id="session-fails",
                subject=node.name,
                message=f"the session cannot be made because of it: {node.reasons[0] if node.reasons else node.op}",
                fix="manual",
                gain_nodes=1,
            )


ADVISERS: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    _advise_sum,
    _advise_dims,
    _advise_float,
    _advise_sign,
    _advise_resize,
    _advise_clip,
    _advise_flatten,
    _advise_copies,
    _advise_opset,
    _advise_missing,
    _advise_fatal,
)
"""Everything that advice is given about."""


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s" if what == "node" else f"{number} {what} nodes"


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
