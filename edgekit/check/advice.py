"""Advice: what to change so that a target takes more nodes. The same rules that check a model predict the gain."""

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache, partial
from typing import Literal

import msgspec
import onnx

from edgekit.check.macs import assume_sizes
from edgekit.check.report import YES_SHARE, Advice, CheckedNode, count_of
from edgekit.errors import ModelError, UsageError
from edgekit.graph.constants import MAIN_DOMAINS, ML_DOMAIN, ORT_DOMAIN, is_own
from edgekit.graph.graph import Graph, Value, infer_graph
from edgekit.graph.match import find_infinite_tensors
from edgekit.graph.rewrite import Rewrite
from edgekit.model.model import iterate_graphs, read_inputs
from edgekit.prepare.fix import ADVICE, REWRITES
from edgekit.prepare.interface import drop_idle_nodes, keep_inputs, keep_outputs
from edgekit.prepare.opset import DEFAULT_OPSET, convert_opset, read_opset
from edgekit.prepare.rewrites.idle import leave_out_empty_inputs

Recheck = Callable[[Graph, int], Sequence[CheckedNode]]

_NAMED = 3
# A cut at more values than this is not advised: an app would have to compute the rest of the model from all of them. A
# choice.
_MOST_ENDS = 8


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A checked graph, and a way to check it again after a change.

    `splits` is True if a refused node cuts the graph into pieces: then a missing operator matters even if it computes
    little. `wants_whole` is True if a session needs every node taken.
    """

    graph: Graph
    nodes: Sequence[CheckedNode]
    recheck: Recheck
    splits: bool = True
    wants_whole: bool = False

    def refused(self, op: str | None = None, because: str = "") -> tuple[str, ...]:
        """Returns the refused nodes that have a reason with this text; with `op`, only nodes of that operator."""
        return tuple(
            node.name
            for node in self.nodes
            if not node.taken and op in {None, node.op} and any(because in reason for reason in node.reasons)
        )


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that a piece of advice concerns, and the graph after the change.

    `changed` is None if only a person can make the change. `word` takes the place of {word} in the adviser's message.
    `subject` is shown in place of the nodes' names if it is not "", such as the operator that the nodes have in common.
    """

    nodes: tuple[str, ...]
    changed: Graph | None = None
    opset: int | None = None
    word: str = ""
    subject: str = ""


class Adviser(msgspec.Struct, frozen=True):
    """A kind of advice. `message` may contain {count} and {word}.

    Without `always` the advice is given only if the target would take more nodes, or fewer would stop its session.
    """

    id: str
    fix: Literal["automatic", "manual"]
    message: str
    find: Callable[[Case], Iterator[Finding]]
    always: bool = False


def give_advice(cases: Sequence[Case]) -> tuple[tuple[Advice, ...], ...]:
    """Returns for each case of one graph what to change, the largest gain first.

    That is nothing if the provider takes every node.
    """
    counsels = [_Counsel(case=case) for case in cases]
    waiting = [each for each in counsels if not all(node.taken for node in each.case.nodes)]
    for adviser in ADVISERS:
        # What an adviser makes of the graph is kept until the next one makes something (`_rewritten`).
        for counsel in waiting:
            counsel.ask(adviser)
    return tuple(each.finish() for each in counsels)


class _Counsel(msgspec.Struct, frozen=True, kw_only=True):
    """The advice found so far for a case.

    `replaced` are the nodes that rewrites replace. `mended` are those, and what nothing reads then: advice about their
    operators would be useless.
    """

    case: Case
    found: list[Advice] = []
    mended: set[str] = set()
    replaced: set[str] = set()

    def ask(self, adviser: Adviser) -> None:
        """Adds what an adviser finds, if it gains."""
        case = self.case
        for finding in adviser.find(case):
            # Of several rewrites of the same nodes, the first that gains is the one that a build applies.
            if adviser.id in REWRITES and self.replaced.issuperset(finding.nodes):
                continue
            if (advice := _judge(case, adviser, finding)) is None:
                continue
            self.found.append(advice)
            if advice.id in REWRITES and finding.changed is not None:
                left = {node.name: node.op_type for node in finding.changed.nodes}
                self.mended.update(finding.nodes, (node.name for node in case.graph.nodes if node.name not in left))
                self.replaced.update(n.name for n in case.graph.nodes if left.get(n.name) != n.op_type)
            elif advice.id == "freeze-input":
                self.mended.update(finding.nodes)

    def finish(self) -> tuple[Advice, ...]:
        """Returns the advice, the largest gain first."""
        found = [each for each in self.found if each.id != "no-builder" or not self.mended.issuperset(each.nodes)]
        return tuple(sorted(found, key=lambda each: (-each.gain_nodes, -each.gain_macs, each.id, each.subject)))


def _judge(case: Case, adviser: Adviser, finding: Finding) -> Advice | None:
    gain_nodes, fatal_fewer, names = len(finding.nodes), 0, set(finding.nodes)
    gain_macs = sum(node.macs for node in case.nodes if node.name in names and not node.taken)
    if finding.changed is not None:
        # The whole changed graph is checked, because partitions and the units of neighbours change too.
        after = case.recheck(finding.changed, finding.opset or read_opset(case.graph.model))
        gain_nodes = sum(not node.taken for node in case.nodes) - sum(not node.taken for node in after)
        gain_macs = _taken_macs(after) - _taken_macs(case.nodes)
        # A session that starts is worth nodes on the CPU, such as Reshapes.
        fatal_fewer = sum(node.fatal for node in case.nodes) - sum(node.fatal for node in after)
    # A rewrite may help other targets but not this one. Where a node becomes several, more nodes may stay on the CPU,
    # and less of the work.
    gains = gain_nodes > 0 or gain_macs > 0 or fatal_fewer or adviser.always
    loses = gain_macs < 0 and not fatal_fewer
    if fatal_fewer < 0 or loses or not gains:
        return None
    count = len(finding.nodes)
    named = ", ".join(finding.nodes[:_NAMED]) + (f" and {count - _NAMED} more" if count > _NAMED else "")
    return Advice(
        id=adviser.id,
        subject=finding.subject or named,
        message=adviser.message.format(count=count_of(count, "node"), word=finding.word),
        fix=adviser.fix,
        gain_nodes=gain_nodes if finding.changed is None else max(0, gain_nodes),
        gain_macs=gain_macs,
        nodes=finding.nodes,
    )


def _taken_macs(nodes: Sequence[CheckedNode]) -> int:
    return sum(node.macs for node in nodes if node.taken)


def _find_rewrite(rewrite: Rewrite, case: Case) -> Iterator[Finding]:
    if (found := _rewritten(case.graph, rewrite)) is not None:
        yield found


# A change of the graph is the same for all targets, which are asked one after the other.
@lru_cache(maxsize=1)
def _rewritten(graph: Graph, rewrite: Rewrite) -> Finding | None:
    """Applies a rewrite to a copy of the graph, so that the real change is checked; None if it changes nothing."""
    opset = read_opset(graph.model)
    if not any(rewrite.finds(part, opset) for part in graph.iterate()):
        return None
    # A copy, because rewrites change the graph in place. It is small: the model was loaded without its weights.
    copy = deepcopy(graph.model)
    nodes = tuple(name for part in iterate_graphs(copy.graph) for name in rewrite(part, opset))
    if not nodes:
        return None
    drop_idle_nodes(copy.graph)
    return Finding(nodes=nodes, changed=assume_sizes(infer_graph(copy)))


def _find_dims(case: Case) -> Iterator[Finding]:
    dynamic = case.refused(because="dynamic")
    # Sizes that values decide, such as a number of findings, cannot be given.
    if dynamic and any(spec.name_axes() for spec in read_inputs(case.graph.proto)):
        # Every unknown dimension gets the size that is used for counting work, else 1.
        sized = {
            name: Value(dtype=value.dtype, shape=shape, counted=shape)
            for name, value in case.graph.values.items()
            if value.sizes is not None
            for shape in [tuple(1 if dim is None else dim for dim in value.sizes)]
        }
        values = {**case.graph.values, **sized}
        yield Finding(nodes=dynamic, changed=msgspec.structs.replace(case.graph, values=values))


def _find_opset(case: Case) -> Iterator[Finding]:
    refused = case.refused(because="older than") + case.refused(because="the model's opset")
    if not refused or read_opset(case.graph.model) == DEFAULT_OPSET:
        return
    if (changed := _raised(case.graph)) is not None:
        yield Finding(nodes=tuple(dict.fromkeys(refused)), changed=changed, opset=DEFAULT_OPSET)


@lru_cache(maxsize=1)
def _raised(graph: Graph) -> Graph | None:
    """Returns the graph at the newest opset; None if an operator cannot be converted: then no advice is given."""
    with suppress(ModelError):
        return assume_sizes(infer_graph(convert_opset(deepcopy(graph.model), DEFAULT_OPSET)))
    return None


_ELSEWHERE = "the CPU computes it. Export it as operators that the provider takes, or see who has it: edgekit check"
_INSTEAD: Mapping[str, str] = dict.fromkeys(
    ("GRU", "LSTM", "RNN"),
    "the CPU computes it in float. Leave it there where it ends the model; else export its steps one by one"
    " (MatMul, Sigmoid, Tanh for a fixed number of them), or see who has it: edgekit check",
) | dict.fromkeys(
    ("ConvInteger", "DynamicQuantizeLSTM", "DynamicQuantizeLinear", "MatMulInteger", "QAttention"),
    "dynamic quantization wrote it, which is for the CPU. The float form of the model may be taken, as edgekit prepare"
    " --dequantize makes it",
)


def _find_missing(case: Case) -> Iterator[Finding]:
    missing = set(case.refused(because="has no builder"))
    # For the nodes that quantize, the float form of the model is the advice (`edgekit.jobs.check`).
    nodes = [node for node in case.nodes if node.name in missing and not (node.is_quantizer or node.fatal)]
    found = dict[tuple[str, str], list[str]]()
    for node in nodes:
        if case.splits or node.macs:
            found.setdefault((node.op, node.domain), []).append(node.name)
    for (op, domain), names in sorted(found.items()):
        yield Finding(nodes=(*names,), word=f"{op}: {_instead(op, domain, read_opset(case.graph.model))}", subject=op)


def _instead(op: str, domain: str, opset: int) -> str:
    """Returns who computes an operator that the provider lacks, and what to do."""
    if domain in MAIN_DOMAINS and not (onnx.defs.has(op, opset) or is_own(onnx.NodeProto(op_type=op), opset)):
        return f"nor has ONNX of opset {opset}, so that no session starts. Export it as operators of that opset"
    if domain not in {*MAIN_DOMAINS, ML_DOMAIN} and not domain.startswith(ORT_DOMAIN):
        return "a library of custom operators computes it on the CPU. Ship that too, or export it as operators of ONNX"
    return _INSTEAD.get(op, _ELSEWHERE)


def _find_choices(case: Case) -> Iterator[Finding]:
    """Yields each input that alone, as one number, decides which branch of an If runs, such as a sample rate."""
    graph, refused = case.graph, set(case.refused())
    # The one input that a tensor follows from: "" if it follows from constants alone, None if from several inputs.
    origins: dict[str, str | None] = dict.fromkeys(graph.constants, "")
    for node in graph.nodes:
        fed = {origins.get(name, name) for name in node.reads} - {""}
        origin = next(iter(fed), "") if len(fed) < 2 else None
        origins.update((made, origin) for made in node.output)
    found, decided = dict[str, dict[str, None]](), dict[str, str]()
    for node in graph.nodes:
        if node.op_type == "If" and node.name in refused:
            name = origins.get(node.input[0], node.input[0])
            if name and graph.value(name).elements == 1:
                found.setdefault(name, {})[node.name] = None
                decided[node.input[0]] = name
    for node in reversed(graph.nodes):
        for name in [decided[made] for made in node.output if made in decided][:1]:
            decided.update(dict.fromkeys(node.reads, name))
            found[name].update({node.name: None} if node.name in refused else {})
    for name, steps in found.items():
        yield Finding(nodes=tuple(steps), word=shlex.quote(name), subject=name)


def _find_cut(case: Case, *, ends: bool) -> Iterator[Finding]:
    """Yields where a graph may end, or begin, if the rest has nearly all of the work and may be taken whole."""
    if not case.wants_whole:
        return
    graph, keep = case.graph, keep_outputs if ends else keep_inputs
    refused = {node.name for node in case.nodes if not node.taken}
    cut, names = _divide(graph, refused, ends=ends)
    # Infinite scores, such as those of a mask, have no range: no calibration takes them as an output.
    infinite = find_infinite_tensors(graph) if ends else frozenset[str]()
    while unfit := infinite.intersection(names):
        refused.update(graph.producers[name].name for name in unfit)
        cut, names = _divide(graph, refused, ends=ends)
    macs = {node.name: node.macs for node in case.nodes}
    is_short = (
        sum(macs[node.name] for node in graph.nodes if node.name not in cut) >= YES_SHARE * sum(macs.values()) > 0
    )
    if cut and is_short and 0 < len(names) <= _MOST_ENDS and not any("," in name for name in names):
        copy = deepcopy(graph.model)
        # Values whose type is unknown cannot be outputs, nor those without a shape inputs.
        with suppress(UsageError):
            keep(copy, names)
            drop_idle_nodes(copy.graph)
            yield Finding(nodes=(*cut,), changed=infer_graph(copy), word=shlex.quote(",".join(names)))


def _divide(graph: Graph, refused: Collection[str], *, ends: bool) -> tuple[Mapping[str, None], Sequence[str]]:
    """Returns the refused nodes with all behind them, or before them, and the values between these and the others."""
    cut, reached = dict[str, None](), set[str]()
    for node in graph.nodes if ends else reversed(graph.nodes):
        near, far = (node.reads, node.output) if ends else (node.output, node.reads)
        if node.name in refused or not reached.isdisjoint(near):
            cut[node.name] = None
            reached.update(filter(None, far))
    kept = [node for node in graph.nodes if node.name not in cut]
    gone = [node for node in graph.nodes if node.name in cut]
    before, behind = (kept, gone) if ends else (gone, kept)
    read = {name for node in behind for name in node.reads} | (graph.outputs if ends else set())
    made = [*(() if ends else graph.fed), *(name for node in before for name in node.output)]
    return cut, [name for name in made if name in read]


def _find_double(case: Case) -> Iterator[Finding]:
    names = [name for name in (*case.graph.inputs, *case.graph.outputs) if case.graph.value(name).dtype == "float64"]
    if case.wants_whole and names:
        yield Finding(nodes=case.refused(because="float64"), word="', '".join(names))


def _find_fatal(case: Case) -> Iterator[Finding]:
    for node in case.nodes:
        if node.fatal:
            yield Finding(nodes=(node.name,), word=node.reasons[0] if node.reasons else node.op)


ADVISERS: tuple[Adviser, ...] = (
    *(
        # Without empty inputs no node is gained, but an empty scales tensor makes XNNPACK abort the process (issues
        # 23826, 23886, 32298).
        Adviser(id_, "automatic", message, partial(_find_rewrite, REWRITES[id_]), id_ == leave_out_empty_inputs.id)
        for id_, message in ADVICE.items()
    ),
    Adviser("fix-dims", "automatic",
            "fix the dynamic dimensions with --dim NAME=INT: {count} depend on them", _find_dims),
    Adviser("opset", "automatic",
            f"change the opset, {{count}} depend on it: edgekit prepare --opset {DEFAULT_OPSET}", _find_opset),
    Adviser("freeze-input", "manual",
            "one input alone decides which branch of an If runs; make it a constant: --freeze {word}=NUMBER",
            _find_choices),
    Adviser("no-builder", "manual", "the provider has no {word}", _find_missing),
    Adviser("cut-end", "manual",
            "end the model before {count}, which the app then computes: edgekit prepare --outputs {word}",
            partial(_find_cut, ends=True)),
    Adviser("cut-start", "manual",
            "begin the model behind {count}, which the app then computes: edgekit prepare --inputs {word}",
            partial(_find_cut, ends=False)),
    Adviser("float-interface", "manual",
            "export '{word}' as float32: the provider takes no float64, nor a Cast from or to it", _find_double),
    Adviser("session-fails", "manual", "the session fails or is wrong because of it: {word}", _find_fatal, always=True),
)  # fmt: skip
"""All kinds of advice."""
