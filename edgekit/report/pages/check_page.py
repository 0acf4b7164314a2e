"""A check as one HTML page: the graph as a strip that shows which unit takes which part, and as blocks of nodes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Literal

import msgspec

from edgekit.check.report import CheckedNode, CheckReport
from edgekit.progress import StageTime
from edgekit.report import checked
from edgekit.report.pages.pages import make_page
from edgekit.report.tables import format_bytes

_MOST_STRETCHES = 200

Place = Literal["taken", "left", "fatal"]


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive nodes that go to one place: the position and width of the stretch, in percent of the whole graph.

    `odd` alternates, so that adjacent partitions can be told apart.
    """

    place: Place
    odd: bool
    left: float
    width: float
    title: str


def draw_stages(stages: Sequence[StageTime]) -> tuple[Stretch, ...]:
    """Returns the stages of a build in order; the width of each is its share of the seconds."""
    ends = list(accumulate((stage.seconds for stage in stages), initial=0.0))
    total = ends[-1] or 1.0
    return tuple(
        Stretch(
            place="taken",
            odd=bool(index % 2),
            left=100 * start / total,
            width=100 * stage.seconds / total,
            title=f"{stage.stage}{f' for {stage.target}' if stage.target else ''}: {stage.seconds:.1f} s",
        )
        for index, (start, stage) in enumerate(zip(ends, stages, strict=False))
    )


def draw_strip(report: CheckReport) -> tuple[Stretch, ...]:
    """Returns the stretches of a graph in its order; if there are more than 200, adjacent short ones are merged."""
    nodes = report.node_list
    stretches = [list(group) for _, group in groupby(nodes, key=lambda node: (node.partition, node.fatal))]
    if len(stretches) > _MOST_STRETCHES:
        size = -(-len(nodes) // _MOST_STRETCHES)
        stretches = [list(nodes[start : start + size]) for start in range(0, len(nodes), size)]
    drawn: list[Stretch] = []
    start = 0
    for part in stretches:
        first = next((node for node in part if not node.taken), part[0])
        partition = first.partition
        where = "the session fails" if first.fatal else "CPU" if partition is None else f"partition {partition}"
        stretch = Stretch(
            place=_place(first),
            odd=bool((partition or 0) % 2),
            left=100 * start / len(nodes),
            width=100 * len(part) / len(nodes),
            title=f"{where}: {len(part)} nodes, from {part[0].op} {part[0].name}",
        )
        drawn.append(stretch)
        start += len(part)
    return tuple(drawn)


CHIP_WIDTH = 150
_PITCH_X, _PITCH_Y, _CHIP_HEIGHT, _MARGIN = 164, 40, 26, 8
# About a screen of nodes; longer blocks are closed until the user opens them.
_OPEN_NODES = 60
# A browser lays out every node, visible or not.
_MAX_NODES = 5000
_MAX_SHOWN = 22


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    """A node in a block: its upper left corner in pixels, and its label as lines."""

    x: int
    y: int
    place: Place
    label: str
    lines: tuple[str, ...]


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive nodes that go to one place; `edges` is an SVG path between the boxes of the nodes."""

    place: Place
    summary: str
    is_open: bool
    width: int
    height: int
    chips: tuple[Chip, ...]
    edges: str


def draw_blocks(report: CheckReport) -> Iterator[Block]:
    """Yields the blocks of a report in the order of the graph; at most 5000 nodes are drawn."""
    total = sum(node.macs for node in report.node_list)
    shown = report.node_list[:_MAX_NODES]
    every_open = len(shown) <= _OPEN_NODES
    # A partition may continue after other partitions in the order of the graph: then it has several blocks.
    for _, members in groupby(shown, key=lambda node: (node.partition, node.fatal)):
        nodes = tuple(members)
        yield _draw_block(nodes, total, is_open=every_open or (not nodes[0].taken and len(nodes) <= _OPEN_NODES))


def _draw_block(nodes: Sequence[CheckedNode], total: int, *, is_open: bool) -> Block:
    # Column and row of each node: the row below all nodes that it reads, and the first free column there. Nodes in
    # other blocks have no row here, so they do not push a node down.
    spots: list[tuple[int, int]] = []
    places: dict[str, int] = {}
    used: Counter[int] = Counter()
    edges: list[str] = []
    for at, node in enumerate(nodes):
        before = [spots[places[name]] for name in node.reads if name in places]
        row = max((y + 1 for _, y in before), default=0)
        spots.append((used[row], row))
        places[node.name] = at
        used[row] += 1
        for source in before:
            (x1, y1), (x2, y2) = _centre(source, bottom=True), _centre(spots[at], bottom=False)
            middle = (y1 + y2) // 2
            edges.append(f"M{x1} {y1}C{x1} {middle} {x2} {middle} {x2} {y2}")
    first = nodes[0]
    where = "left to the CPU" if first.partition is None else f"partition {first.partition}"
    where = "the session fails here" if first.fatal else where
    work = f", {sum(node.macs for node in nodes) / total:.1%} of MACs" if total else ""
    counts = Counter(node.op for node in nodes)
    ranked = [f"{counts[op]} {op}" for op in sorted(counts, key=lambda op: (-counts[op], op))]
    ops = ", ".join(ranked if len(ranked) <= 4 else [*ranked[:4], "…"])
    return Block(
        place=_place(first),
        summary=f"{where}: {len(nodes)} node{'s' if len(nodes) > 1 else ''}{work} ({ops})",
        is_open=is_open,
        width=max(used.values()) * _PITCH_X + 2 * _MARGIN,
        height=len(used) * _PITCH_Y + 2 * _MARGIN,
        chips=tuple(
            Chip(
                x=spots[at][0] * _PITCH_X + _MARGIN,
                y=spots[at][1] * _PITCH_Y + _MARGIN,
                place=_place(node),
                label=node.op if len(node.op) <= _MAX_SHOWN else f"{node.op[: _MAX_SHOWN - 1]}…",
                lines=tuple(_describe(node)),
            )
            for at, node in enumerate(nodes)
        ),
        edges=" ".join(edges),
    )


def _centre(spot: tuple[int, int], *, bottom: bool) -> tuple[int, int]:
    x = spot[0] * _PITCH_X + _MARGIN + CHIP_WIDTH // 2
    return x, spot[1] * _PITCH_Y + _MARGIN + (_CHIP_HEIGHT if bottom else 0)


def _place(node: CheckedNode) -> Place:
    return "fatal" if node.fatal else "taken" if node.taken else "left"


def _describe(node: CheckedNode) -> Iterator[str]:
    yield f"{node.op} {node.name}"
    yield f"{node.macs:,} MACs, {node.bytes:,} bytes"
    yield "taken" if node.taken else "makes the session fail" if node.fatal else "left to the CPU"
    yield from node.reasons
    yield from (f"risk: {risk}" for risk in node.risks)


_FILTERS: Mapping[str, Callable[..., object]] = {
    "bytes": format_bytes,
    "work": checked.describe_work,
    "disagreement": checked.describe_disagreement,
    "observed": checked.list_observed,
    "advice": checked.describe_advice,
    "remarks": checked.list_remarks,
    "fates": checked.describe_fates,
    "blocks": draw_blocks,
    "strip": draw_strip,
}


def render_check(summary: checked.CheckSummary) -> str:
    """Returns the checks of a model, by target, as an HTML page."""
    return make_page(
        "check",
        _FILTERS,
        summary=summary,
        reports=summary.targets,
        observed=summary.observed,
        recommendation=checked.describe_recommendation(summary.recommended, summary.targets),
        opinions=[] if summary.ort is None else list(checked.list_ort_opinions(summary.ort, summary.targets)),
    )
