"""Check: which nodes a target takes, which it does not and why, predicted from rules before anything runs."""

import functools
from collections.abc import Mapping, Sequence

import msgspec

from edgekit._ort import VERSION, tells_refusal
from edgekit.check.advice import Case, give_advice
from edgekit.check.macs import assume_sizes, choose_sizes, count_bytes, count_unsized, count_work, value_bytes
from edgekit.check.placement import place_units
from edgekit.check.propagation import propagate_quantization
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.check.rules.rulebook import Op, Rule, RuleBook, derive_settings, load_rules
from edgekit.check.rules.rules import Forms, Subject
from edgekit.check.rules.units import SELECTORS, Unit, group_units, narrow_operands
from edgekit.evidence import Evidence
from edgekit.graph.constants import NCHWC_DOMAIN, ORT_DOMAIN
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.graph.inference import infer_model
from edgekit.model.external import skim_model
from edgekit.model.model import Model, formats_of
from edgekit.prepare.constants import widen_constants
from edgekit.prepare.interface import name_nodes
from edgekit.target import Target, load_target


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rule refuses a unit. If it is fatal, no session can be made; if it `crashes`, the process ends."""

    reason: str
    fatal: bool = False
    crashes: bool = False


def check_model(model: Model, target: Target, *, advises: bool = True) -> CheckReport:
    """Returns the predicted placement of a prepared model on a target, with advice on how the target would take more.

    Advice applies and checks each possible change, which takes most of the time; `advises` False leaves it out.

    Raises:
        TargetError: the target's `rules.toml` is missing or malformed.
        ModelError: the model file is gone or unreadable.
        RuntimeRefusal: the model contradicts itself, and ONNX Runtime refuses it.
    """
    return check_models(model, [target], advises=advises)[0]


@tells_refusal
def check_models(model: Model, targets: Sequence[Target], *, advises: bool = True) -> tuple[CheckReport, ...]:
    """Returns what `check_model` does for each target; the graph, and each change of it, is made once for all.

    Raises:
        EdgekitError: as `check_model`.
    """
    books = [load_rules(target) for target in targets]
    # Unnamed nodes are named before the graph is read, so that report, advice and rewrites use the same names.
    proto = skim_model(model.path)
    name_nodes(proto.graph)
    widen_constants(proto.graph)
    proto = infer_model(proto)
    graph = view_model(proto)
    sizes = choose_sizes(graph)
    graph = assume_sizes(graph, sizes)

    cases = [_open_case(graph, model, target, book) for target, book in zip(targets, books, strict=True)]
    advice = give_advice(cases) if advises else ((),) * len(cases)
    unsized = count_unsized(graph) or (0 if sizes else msgspec.UNSET)
    reports: list[CheckReport] = []
    for target, book, case, given in zip(targets, books, cases, advice, strict=True):
        crossings, crossing_bytes = count_crossings(graph, case.nodes)
        report = CheckReport(
            target=target.name,
            model=model.path.name,
            sha256=model.sha256,
            evidence=Evidence.PREDICTED.value,
            settings=dict(target.settings),
            node_list=tuple(case.nodes),
            advice=given,
            crossings=crossings,
            crossing_bytes=crossing_bytes,
            wants_whole=case.wants_whole,
            style=book.placing.style,
            counted_at=sizes or msgspec.UNSET,
            unsized_nodes=unsized,
        )
        reports.append(report)
    return tuple(reports)


def _open_case(graph: Graph, model: Model, target: Target, book: RuleBook) -> Case:
    settings = {**target.session.provider_options, **target.settings}

    def recheck(changed: Graph, version: int) -> tuple[CheckedNode, ...]:
        return check_graph(changed, book, settings, opset=version)

    return Case(
        graph=graph, nodes=recheck(graph, model.opsets.get("ai.onnx", 1)), recheck=recheck,
        splits=book.placing.style == "wave",
        wants_whole=target.session.config.get("session.disable_cpu_ep_fallback") == "1",
    )  # fmt: skip


def check_graph(
    graph: Graph, book: RuleBook, settings: Mapping[str, str], *, opset: int, runtime: str = VERSION
) -> tuple[CheckedNode, ...]:
    """Returns the placement of each node of a graph; the nodes of its subgraphs follow it.

    The rules may describe an older ONNX Runtime than `runtime`. Then an opset that only the newer one reads is not a
    reason to refuse.
    """
    known = derive_settings(book, dict(settings))
    provider = book.provider
    blocked = None
    newest = max(provider.opset_max, formats_of(runtime).opset if provider.alone else 0)
    # This refuses the whole model: if ONNX Runtime's layout transformation does not know the opset, it skips NNAPI and
    # XNNPACK with a warning.
    if not provider.opset_min <= opset <= newest:
        blocked = f"the model's opset {opset} is outside {provider.opset_min} to {newest}"
    return tuple(_check_nodes(assume_sizes(graph), _Judge(book=book, settings=known), blocked))


_BLOCKED = "ONNX Runtime wrote it as it optimized the model for the CPU of one PC. Give the model as it was before"


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the rules say of an operator under the settings: its entries, and the rules that may hold for its nodes."""

    ops: tuple[Op, ...]
    rules: tuple[Rule, ...]
    soft: tuple[Rule, ...]
    risks: tuple[Rule, ...]
    late_risks: tuple[Rule, ...]


class _Judge(msgspec.Struct, frozen=True, kw_only=True):
    book: RuleBook
    settings: dict[str, str]
    operators: dict[tuple[str, str], _Known] = {}

    @property
    def bodies(self) -> str:
        """What the provider does with subgraphs of control flow under these settings: a value of `Provider.bodies`."""
        placed = self.book.provider.bodies_placed_when.items()
        entered = any(self.settings.get(name) in values for name, values in placed)
        return "placed" if entered else self.book.provider.bodies

    def find_refusals(self, graph: Graph, unit: Unit) -> tuple[Refusal, ...]:
        """Returns every reason why the rules refuse a unit, none if they do not."""
        book, node = self.book, unit.node
        if self._is_unknown(node):
            return ()
        if node.domain == NCHWC_DOMAIN:
            return (Refusal(reason=_BLOCKED, fatal=True),)
        known, alone = self._find_known(node), book.provider.alone
        ops = known.ops
        if not ops:
            what = "kernel" if alone else "builder"
            name = f"{node.domain}:{node.op_type}" if node.domain else node.op_type
            return (Refusal(reason=f"{book.provider.name} has no {what} for {name}", fatal=alone),)
        # All reasons are collected: a user who fixed only the first of two would gain nothing and not know why.
        found: list[Refusal] = []
        low = max(op.since[0] for op in ops)
        high = min(book.provider.since_max, *(op.since[1] for op in ops))
        if not low <= node.since <= high:
            bound = f"older than {low}, the first" if node.since < low else f"newer than {high}, the last"
            found.append(Refusal(reason=f"{node.op_type} of opset {node.since} is {bound} that is taken", fatal=alone))
        subject = Subject(graph=graph, unit=unit, settings=self.settings)
        found += (
            Refusal(reason=reason, fatal=rule.fatal or alone, crashes=rule.crashes)
            for rule in known.rules
            if (reason := rule.refuse(subject))
        )
        return tuple({refusal.reason: refusal for refusal in found}.values())

    def find_remarks(self, graph: Graph, unit: Unit) -> tuple[str, ...]:
        """Returns the reasons of soft rules for a taken unit: how it computes instead of in integers."""
        subject = Subject(graph=graph, unit=unit, settings=self.settings)
        found = (rule.refuse(subject) for rule in self._find_known(unit.node).soft)
        return tuple(dict.fromkeys(remark for remark in found if remark))

    def _find_known(self, node: Node) -> _Known:
        domain, provider = node.domain or "ai.onnx", self.book.provider
        if (found := self.operators.get((node.op_type, domain))) is not None:
            return found
        named = (op for op in self.book.op if node.op_type in op.types)
        ops = tuple(op for op in named if domain in (op.domains or provider.domains or (domain,)))
        rules: list[Rule] = [*provider.rules]
        for op in ops:
            rules += [Forms(allowed=op.forms)] if op.forms else []
            rules += [rule for group in op.use for rule in self.book.groups[group]]
            rules += op.rules
        kinds = {"rules": rules, "risks": provider.risks, "late_risks": provider.late_risks}
        may = {
            kind: tuple(rule for rule in given if rule.when.may_hold(node.op_type, self.settings))
            for kind, given in kinds.items()
        }
        hard, soft = (tuple(rule for rule in may["rules"] if rule.soft is kind) for kind in (False, True))
        known = _Known(ops=ops, rules=hard, soft=soft, risks=may["risks"], late_risks=may["late_risks"])
        return self.operators.setdefault((node.op_type, domain), known)

    def _is_unknown(self, node: Node) -> bool:
        """Returns True for an ONNX operator version that is newer than the list of the provider's kernels."""
        provider = self.book.provider
        return provider.alone and node.domain in {"", "ai.onnx"} and node.since > provider.opset_max

    def find_risks(self, graph: Graph, unit: Unit, *, taken: bool) -> tuple[str, ...]:
        """Returns why session creation may fail because of a unit.

        The provider takes it (`taken`), or may claim it once the layout changed (`late_risks`).
        """
        subject, known = Subject(graph=graph, unit=unit, settings=self.settings), self._find_known(unit.node)
        found = [rule.refuse(subject) for rule in (known.risks if taken else known.late_risks)]
        if taken and self._is_unknown(node := unit.node):
            name, ort = self.book.provider.name, self.book.provider.ort
            found.append(
                f"{node.op_type} of opset {node.since} is newer than the kernels of {name} that are known, those of"
                f" ONNX Runtime {ort}: prepare --opset {self.book.provider.opset_max} lowers it where it can be"
            )
        return tuple(risk for risk in found if risk)


def _check_nodes(graph: Graph, judge: _Judge, blocked: str | None) -> list[CheckedNode]:
    book = judge.book
    table = {**SELECTORS, **book.units.add}
    selectors = {op: name for op, name in table.items() if op not in book.units.without}
    minor = int(judge.settings["ort_minor"])
    # The rules judge the graph that ONNX Runtime shows to a provider; the report lists the nodes of the file.
    shown = propagate_quantization(graph)
    clips, biases = minor >= book.units.clip_from_ort_minor, minor >= book.units.bias_from_ort_minor
    units = group_units(shown, selectors if book.units.qdq else None, absorb_clips=clips, fits_bias=biases)
    if book.provider.narrowed:
        units = tuple(narrow_operands(unit, shown, book.provider.narrowed) for unit in units)
    refusals = [
        (Refusal(reason=blocked, fatal=book.provider.alone),)
        if blocked
        else (*judge.find_refusals(shown, unit), *_body_refusals(unit, judge))
        for unit in units
    ]
    placement = place_units(shown, units, [not found for found in refusals], book.placing)
    owners = {shown.nodes[member].name: at for at, unit in enumerate(units) for member in unit.members}
    listed: list[CheckedNode] = []
    for node in graph.nodes:
        at = owners[node.name]
        unit, partition = units[at], placement.partitions[at]
        taken, alone = partition is not None, unit.node.name == node.name
        # Custom operators come with a library, and the list of ONNX's is that of one version.
        is_left = not (taken or book.provider.alone) and node.domain.startswith(ORT_DOMAIN)
        is_lost = is_left and node.domain != NCHWC_DOMAIN and (node.domain, node.op_type) not in _list_kernels()
        reasons = ["the CPU provider, to which it is left, has no kernel for it on each processor"] if is_lost else []
        reasons += [refusal.reason for refusal in refusals[at]]
        reasons += [placement.reasons[at]] if at in placement.reasons else []
        about = "" if alone else f"the {unit.node.op_type} of its unit is not taken: "
        remarks = judge.find_remarks(shown, unit) if taken and alone else ()
        is_quantized = any(operand.is_quantized for operand in unit.inputs)
        # The first refusal that is not fatal leaves the unit to the CPU, unless a crash comes before it: then, or if
        # all are fatal, no session can be made.
        is_fatal = next((each.crashes for each in refusals[at] if each.crashes or not each.fatal), bool(refusals[at]))
        checked = CheckedNode(
            name=node.name,
            op=node.op_type,
            domain=node.domain or "ai.onnx",
            taken=taken,
            reasons=() if taken else tuple(dict.fromkeys(about + why for why in reasons)),
            macs=count_work(graph, node),
            bytes=count_bytes(graph, node),
            partition=partition,
            unit=None if alone else unit.node.name,
            risks=judge.find_risks(shown, unit, taken=taken) if alone else (),
            remarks=remarks,
            fatal=at in placement.broken or is_fatal or is_lost,
            reads=tuple(dict.fromkeys(graph.producers[name].name for name in node.input if name in graph.producers)),
        )
        integers = taken and alone and not remarks and is_quantized and not checked.is_quantizer
        parent = msgspec.structs.replace(checked, integers=integers)
        listed.append(parent)
        for body in node.bodies:
            if (rule := judge.bodies) == "placed":
                listed += _check_nodes(body, judge, blocked)
                continue
            what = "which is not taken" if rule == "whole" else "which the provider does not enter"
            why = f"it is in the body of '{parent.name}', {what}"
            taken = parent.taken and rule == "whole"
            partition, because = (parent.partition, ()) if taken else (None, (why,))
            listed += [
                msgspec.structs.replace(inner, taken=taken, partition=partition, reasons=because)
                for inner in _check_nodes(body, judge, why)
            ]
    return listed


@functools.cache
def _list_kernels() -> frozenset[tuple[str, str]]:
    """Returns the domains and names of the operators that ONNX Runtime's own CPU provider has on each processor."""
    book = load_rules(load_target("cpu"))
    return frozenset((domain, name) for op in book.op for domain in op.domains for name in op.types)


def _body_refusals(unit: Unit, judge: _Judge) -> tuple[Refusal, ...]:
    if judge.bodies != "whole":
        return ()
    for body in unit.node.bodies:
        for inner in group_units(body, None):
            for refusal in judge.find_refusals(body, inner):
                return (Refusal(reason=f"'{inner.node.name}' in its body is not taken: {refusal.reason}"),)
    return ()


def count_crossings(graph: Graph, nodes: Sequence[CheckedNode]) -> tuple[int, int]:
    """Returns how many computed values of the main graph cross between partitions or to the CPU, and their bytes."""
    partitions: dict[int, int | None] = {}
    place = count = size_bytes = 0
    for node in graph.nodes:
        partitions[node.index] = nodes[place].partition
        place += 1 + sum(len(inner.nodes) for body in node.bodies for inner in body.iterate())
    for name, node in graph.producers.items():
        # A value is copied once, however many nodes read it on the other side.
        if any(partitions[reader.index] != partitions[node.index] for reader in graph.consumers.get(name, ())):
            count += 1
            size_bytes += value_bytes(graph.value(name))
    return count, size_bytes
