"""The check of a model for several targets: its report, its text, and its page with a box for each node."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

import msgspec
from rich.table import Table

from edgekit.check.recommend import OrtOpinions, Recommendation, explain_difference, find_opinion
from edgekit.check.report import Advice, CheckedNode, CheckReport, Disagreement, JudgedNode, ModelNode, Placed, count_of
from edgekit.devices.observe import Observed
from edgekit.forecasts.forecast import ForecastReport
from edgekit.report import tables
from edgekit.report.pages import make_page
from edgekit.report.profiles import shorten
from edgekit.report.tables import format_bytes, format_count, make_table

_MAX_NAMES, _MAX_OPS = 3, 8
_DYNAMIC = re.compile(r"dimension \d+ of (?:input|output) \d+ is dynamic")


class CheckedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a target takes of a model.

    `report` is the check of the prepared model; `as_is` that of the unchanged file, if a session of it can be made;
    `built` that of the model that `build` ships, if it differs: after automatic rewrites, with sizes for all
    dimensions. `observed` is what the real provider did with the model, if that was asked for. `minimum_ort` is the
    oldest ONNX Runtime on the device that reads the shipped model and has the provider, "" if unknown.
    """

    report: CheckReport
    minimum_ort: str = ""
    as_is: Placed | None = None
    built: CheckReport | None = None
    observed: Observed | str | None = None

    @property
    def shipped(self) -> CheckReport:
        """The check of the model that `build` ships."""
        return self.built or self.report

    @property
    def is_refused(self) -> bool:
        """True if the real provider could not create a session."""
        return isinstance(self.observed, Observed) and self.observed.refused


class CheckSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A model checked for several targets, with the target to use.

    `assumed` are the sizes of open dimensions with which the model that `build` ships was checked. `ort` is the result
    of ONNX Runtime's own checker, if that was asked for. `refusal` is why ONNX Runtime cannot load the model at all.
    `fixed_axes` lists the axes that the export fixed and how to open them, unless a target wants fixed sizes.
    `forecast` is for the phones that the recipe names.
    """

    model: str
    sha256: str
    targets: dict[str, CheckedTarget]
    recommended: Recommendation
    assumed: dict[str, int] = {}
    ort: OrtOpinions | None = None
    refusal: str | None = None
    fixed_axes: tuple[str, ...] = ()
    forecast: ForecastReport | None = None

    @property
    def is_refused(self) -> bool:
        """True if a target's verdict is "no", or ONNX Runtime or a real provider could not create a session.

        The verdict is that on the model that `build` ships, or if sizes were assumed for it, on the prepared model.
        """
        judged = ((each, each.report if self.assumed else each.shipped) for each in self.targets.values())
        return self.refusal is not None or any(each.is_refused or now.verdict == "no" for each, now in judged)


def describe_built(summary: CheckSummary, name: str) -> Iterator[str]:
    """Yields what a provider takes of the model that `build` ships, if that differs from the prepared model."""
    if (report := summary.targets[name].built) is not None:
        changes = f"the automatic changes below{_describe_sizes(summary.assumed)}"
        taken = f"{describe_taken(report.placed)} in {count_of(report.partitions, 'partition')}"
        yield f"as build makes it, by {changes}: {report.verdict}; {taken}"


def _describe_sizes(assumed: Mapping[str, int]) -> str:
    sizes = "".join(f" --dim {shlex.quote(f'{dim}={size}')}" for dim, size in assumed.items())
    return f", for example with{sizes}" if sizes else ""


def table_check(report: CheckReport) -> Table:
    """Returns a table of the nodes that are not taken: a row for each reason, the most work first.

    Nodes have their names in the user's model, if these are known.
    """
    # Nodes that the preparation added have no counterpart in the user's model.
    named = {name for node in report.model_nodes for name in node.became}
    groups: dict[str, list[tuple[JudgedNode, str]]] = {}
    listed: list[JudgedNode] = [*report.model_nodes]
    for node in [*listed, *(node for node in report.node_list if node.name not in named)]:
        if not node.taken:
            why = "\n".join(node.reasons) or (node.note if isinstance(node, ModelNode) else "")
            # Without the operator and the numbers of dimensions, so that similar nodes share a row.
            lines = dict.fromkeys(_DYNAMIC.sub("a dimension is dynamic", why).split("\n"))
            reason = "\n".join(line.removesuffix(f" for {node.op}") for line in lines)
            groups.setdefault(reason, []).append((node, why))
    rows: list[tuple[int, tuple[str, ...]]] = []
    for reason, group in groups.items():
        nodes, whys = [node for node, _ in group], {why for _, why in group}
        macs, names = sum(node.macs for node in nodes), [shorten(node.name) or "(no name)" for node in nodes]
        counts = Counter(node.op for node in nodes).most_common()
        ops = _name_few([f"{op} {count}" if len(counts) > 1 else op for op, count in counts], _MAX_OPS, "")
        why = whys.pop() if len(whys) == 1 else reason
        which = _name_few(names, _MAX_NAMES, ": --json has all")
        rows.append((macs, (ops, str(len(nodes)), format_count(macs), why, which)))
    rows.sort(key=lambda row: -row[0])
    return make_table("op", "nodes", "MACs", "why not", "which", rows=[row for _, row in rows])


def _name_few(names: Sequence[str], limit: int, hint: str) -> str:
    more = f" and {len(names) - limit} more{hint}" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def describe_fates(report: CheckReport) -> str:
    """Returns how many nodes of the user's model were removed or changed, by their fate; "" if all were kept."""
    counts = Counter(node.fate for node in report.model_nodes)
    changed = ", ".join(f"{count} {fate}" for fate, count in sorted(counts.items()) if fate != "kept")
    return f"of the model's {counts.total()} nodes: {changed} before the provider sees them" if changed else ""


def list_check_remarks(summary: CheckSummary, name: str) -> Iterator[str]:
    """Yields the remarks on the verdict for a target except the nodes not taken, the worst first, the advice last.

    Before them comes what the provider takes of the unchanged file and of the model that `build` ships, if it differs.
    """
    found = summary.targets[name]
    report, as_is, now = found.report, found.as_is, found.report.placed
    if as_is is not None and (as_is.taken, as_is.nodes, as_is.partitions) != (now.taken, now.nodes, now.partitions):
        taken = f"{describe_taken(as_is)} in {count_of(as_is.partitions, 'partition')}"
        yield f"the file as it is: {taken}; the figures above are those after edgekit prepare or build"
    yield from describe_built(summary, name)
    if report.counted_at is not msgspec.UNSET:
        sizes = ", ".join(f"{name}={size}" for name, size in report.counted_at.items())
        options = " ".join(f"--dim {name}=INT" for name in report.counted_at)
        yield f"open dimensions: work is counted at {sizes}; to check the model at your sizes, give {options}"
    if report.unsized_nodes:
        one, even_so = report.unsized_nodes == 1, "" if report.counted_at is msgspec.UNSET else " even so"
        what = "1 node that multiplies is" if one else f"{report.unsized_nodes} nodes that multiply is"
        rough = "each unknown size counts as 1, so that shares of the work are rough"
        yield f"the work of {what} not known{even_so}: {rough}"
    fatal: dict[str, list[str]] = {}
    for node in report.node_list:
        if node.fatal:
            fatal.setdefault(node.op, []).append(node.name)
    for op, names in fatal.items():
        some = f"'{names[0]}' makes" if len(names) == 1 else f"'{names[0]}' and {len(names) - 1} more make"
        yield f"fatal: {op} {some} the session fail or its results wrong"
    yield from (f"risk: {risk}" for risk in report.risks)
    yield from list_remarks(report)
    if found.observed is not None:
        yield from list_observed(found.observed)
    yield from (line for _, line in list_advice(report.advice))


def list_remarks(report: CheckReport) -> Iterator[str]:
    """Yields the remarks on how nodes are computed (such as in half precision): one line per operator and remark."""
    found = Counter((node.op, remark) for node in report.node_list for remark in node.remarks)
    yield from (f"{count} {op}: {remark}" for (op, remark), count in found.items())


def list_advice(advice: Iterable[Advice]) -> Iterator[tuple[str, str]]:
    """Yields the id of each advice and, in one line, what to change and what that gains.

    Advice whose messages differ only in their subject (the operator, for example) is merged into one line.
    """
    by_text: dict[tuple[str, str, str, str], list[Advice]] = {}
    for each in advice:
        head, _, tail = each.message.partition(f" {each.subject}:")
        by_text.setdefault((each.id, each.fix, head, tail), []).append(each)
    for (id_, fix, head, tail), group in by_text.items():
        subjects = ", ".join(dict.fromkeys(each.subject for each in group))
        message = f"{head} {subjects}:{tail}" if tail else head
        nodes, macs = sum(each.gain_nodes for each in group), sum(each.gain_macs for each in group)
        gained = f"{'+' if nodes >= 0 else ''}{count_of(nodes, 'node')}{f', {macs:+,} MACs' if macs else ''}"
        yield id_, f"{message} ({fix}, {gained})"


def list_observed(seen: Observed | str) -> Iterator[str]:
    """Yields what a real provider did with a model (counts, disagreements, notes), or why it was not tried."""
    if isinstance(seen, str):
        yield f"not observed: {seen}"
        return
    agreed = "as predicted" if not seen.disagreements else f"{len(seen.disagreements)} not as predicted"
    if seen.failure is not None:
        yield f"observed on {seen.device}: no session: {seen.failure}"
    if seen.nodes or seen.failure is None:
        yield f"observed on {seen.device} ({seen.evidence.value}): {seen.taken} of {seen.nodes} nodes taken, {agreed}"
    for found in seen.disagreements:
        yield f"disagreement: {found.op} '{found.name}' {describe_disagreement(found)}"
    yield from (f"note: {note}" for note in seen.notes)


def describe_disagreement(found: Disagreement) -> str:
    """Returns in which direction the placement of a node differs from the prediction."""
    return "was predicted taken, and is not" if found.predicted else "was predicted left, and is taken"


def describe_recommendation(summary: CheckSummary) -> str:
    """Returns which of the checked targets to use, how to build for it, and why, in one line."""
    recommendation = summary.recommended
    if recommendation.target is None:
        return f"none of these targets: {recommendation.reasons[0]}"
    best = summary.targets[recommendation.target].shipped
    crossings = f"{count_of(best.crossings, 'crossing')} ({format_bytes(best.crossing_bytes)})"
    how = f"; build {recommendation.precision} as {recommendation.style}" if recommendation.style else ""
    if best.wants_whole and best.verdict == "maybe" and best.taken < best.nodes:
        left = count_of(best.nodes - best.taken, "node")
        how += f", once it takes the other {left} too, since it runs whole models only"
        if any(node.op == "DynamicQuantizeLinear" for node in best.node_list):
            how += " (edgekit prepare --dequantize makes a float model of it, from which build makes integers for all)"
    how += _describe_sizes(summary.assumed)
    how += f"; {recommendation.loss}" if recommendation.loss else ""
    rest = ((name, summary.targets[name].shipped) for name in recommendation.rest)
    others = "; ".join(f"{name} {report.verdict}, {describe_work(report)}" for name, report in rest)
    work = f"{describe_work(best)} in {count_of(best.partitions, 'partition')} with {crossings}"
    return f"{recommendation.target}: {best.verdict}, {work}{how}" + (f" (others: {others})" if others else "")


def list_ort_opinions(opinions: OrtOpinions, targets: Mapping[str, CheckedTarget]) -> Iterator[str]:
    """Yields the result of ONNX Runtime's own checker, and why edgekit's check differs on the targets that it knows."""
    if opinions.failure is not None:
        yield f"ONNX Runtime's checker fails on this model: {opinions.failure}"
    for opinion in opinions.opinions:
        counted = f"{opinion.taken} of {opinion.nodes} nodes in {count_of(opinion.partitions, 'partition')}"
        yield f"ONNX Runtime's checker says {opinion.verdict} for {opinion.provider}: {counted}"
        for report in (found.report for found in targets.values()):
            if find_opinion(opinions, report) is opinion:
                agrees = opinion.verdict == report.verdict
                yield f"  check says {report.verdict} for {report.target}" + (", as it does" if agrees else ", because")
                yield from (f"  - {reason}" for reason in explain_difference(opinion, report))


def describe_work(report: CheckReport) -> str:
    """Returns the share of the work that is taken: of MACs, or of bytes if no node multiplies."""
    unit = "MACs" if any(node.macs for node in report.node_list) else "bytes"
    return f"{report.taken_macs:.0%} of {unit}"


def describe_taken(placed: Placed | None) -> str:
    """Returns how many nodes a provider takes, and the share of the work."""
    return "-" if placed is None else f"{placed.taken}/{placed.nodes} ({placed.taken_macs:.0%} of MACs)"


Place = Literal["taken", "left", "fatal"]


# About a screen of nodes; blocks of more are collapsed.
_OPEN_NODES = 60
# A browser lays out every node, visible or not.
_MAX_NODES = 5000


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive nodes with the same placement: how many there are, and those that are drawn.

    Blocks of adjacent partitions differ in shade (`is_odd`).
    """

    place: Place
    is_odd: bool
    summary: str
    is_open: bool
    count: int
    nodes: tuple[CheckedNode, ...]


def list_blocks(report: CheckReport) -> Iterator[Block]:
    """Yields the blocks of a report in the order of the graph; at most 5000 nodes in all are drawn."""
    total, left = sum(node.macs for node in report.node_list), _MAX_NODES
    # A partition may continue after other partitions in the order of the graph: then it has several blocks.
    for _, members in groupby(report.node_list, key=lambda node: (node.partition, node.fatal)):
        nodes = tuple(members)
        place, partition = find_place(nodes[0]), nodes[0].partition
        where = "left to the CPU" if partition is None else f"partition {partition}"
        where = "the session fails here" if place == "fatal" else where
        work = f", {sum(node.macs for node in nodes) / total:.1%} of MACs" if total else ""
        counts = Counter(node.op for node in nodes).most_common()
        ops = _name_few([f"{count} {op}" for op, count in counts], 4, "")
        yield Block(
            place=place,
            is_odd=bool((partition or 0) % 2),
            summary=f"{where}: {count_of(len(nodes), 'node')}{work} ({ops})",
            is_open=report.nodes <= _OPEN_NODES or (place != "taken" and len(nodes) <= _OPEN_NODES),
            count=len(nodes),
            nodes=nodes[:left],
        )
        left = max(0, left - len(nodes))


def find_place(node: CheckedNode) -> Place:
    """Returns where a node is computed, or that the session fails because of it."""
    return "fatal" if node.fatal else "taken" if node.taken else "left"


def list_facts(node: CheckedNode) -> Iterator[str]:
    """Yields the lines of a node's tooltip: its name, its work, what it reads, and why it is not taken."""
    yield f"{node.op} {node.name}"
    yield f"{node.macs:,} MACs, {node.bytes:,} bytes"
    yield "taken" if node.taken else "makes the session fail" if node.fatal else "left to the CPU"
    if node.reads:
        yield f"reads {', '.join(node.reads)}"
    yield from node.reasons
    yield from (f"risk: {risk}" for risk in node.risks)


def render_check(summary: CheckSummary) -> str:
    """Returns the checks of a model, by target, as an HTML page."""
    return make_page("check", tables, sys.modules[__name__], summary=summary)
