"""A placement as a strip: the graph from its first node to its last, and who takes which stretch of it."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import msgspec

from edgekit.check.report import CheckedNode, CheckReport

_MOST_STRETCHES = 200


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that follow each other and go to one place: where they begin and how wide they are, in percent of all.

    Partitions that follow each other are told apart by `odd`.
    """

    place: Literal["taken", "left", "fatal"]
    odd: bool
    left: float
    width: float
    title: str


def draw_strip(report: CheckReport) -> tuple[Stretch, ...]:
    """Returns the stretches of a graph in its order; of more than 200 short ones neighbours are drawn as one."""
    nodes = report.node_list
    stretches = [list(group) for _, group in groupby(nodes, key=lambda node: (node.partition, node.fatal))]
    if len(stretches) > _MOST_STRETCHES:
        size = -(-len(nodes) // _MOST_STRETCHES)
        stretches = [list(nodes[start : start + size]) for start in range(0, len(nodes), size)]
    return tuple(_draw(stretches, len(nodes)))


def _draw(stretches: Sequence[Sequence[CheckedNode]], total: int) -> Iterator[Stretch]:
    start = 0
    for nodes in stretches:
        left = next((node for node in nodes if not node.taken), None)
        first = nodes[0] if left is None else left
        partition = first.partition
        where = "the session fails" if first.fatal else "CPU" if partition is None else f"partition {partition}"
        yield Stretch(
            place="fatal" if first.fatal else "left" if left is not None else "taken",
            odd=bool((partition or 0) % 2),
            left=100 * start / total,
            width=100 * len(nodes) / total,
            title=f"{where}: {len(nodes)} nodes, from {nodes[0].op} {nodes[0].name}",
        )
        start += len(nodes)
