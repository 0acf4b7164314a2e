"""Strips: a graph from its first node to its last, and who takes which stretch; a build from stage to stage."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Literal

import msgspec

from edgekit.check.report import CheckedNode, CheckReport
from edgekit.progress import StageTime

_MOST_STRETCHES = 200


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """What follows each other and goes to one place: where it begins and how wide it is, in percent of all.

    Partitions that follow each other are told apart by `odd`.
    """

    place: Literal["taken", "left", "fatal"]
    odd: bool
    left: float
    width: float
    title: str


def draw_stages(stages: Sequence[StageTime]) -> tuple[Stretch, ...]:
    """Returns the stages of a build one after the other, each as wide as its share of the seconds."""
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
