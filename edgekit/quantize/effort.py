"""How much planning may be spent on a model: runs of it, by what one run takes; the same on every machine."""

import msgspec

from edgekit.check.macs import count_macs
from edgekit.graph.graph import Graph

# A model whose run takes more is planned with a bound: with less, what runs take is little beside loading and placing.
# All choices, by tools/bench/quantize_ratio.py.
_LARGE = 4e9
# Work for planning that is always there, and runs for each sample where that is more: calibrating costs as much again.
_FREE, _EACH_SAMPLE = 1e12, 2
_FEWEST, _MOST = 48, 256
# What making a number in memory takes, in multiply-accumulates: about 0.3 ns.
_ELEMENT = 32
# Into how many judgements the runs are parted, which share of them ranks activations (most of these begin in the middle
# of the graph), and over which part of as many samples drops are told.
_JUDGED, _RANKED, _PREDICTED = 24, 0.75, 6
# The part of all samples over which drops are told at least.
_TOLD = 3
# Samples run side by side where the activations of a run take no more: a choice, for the memory.
_SIDE_BY_SIDE_BYTES = 16 << 20


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much work a run of a model is, and about how many runs planning may take: None where nothing bounds them.

    What a plan costs is told over as many samples as `predicting` says.
    """

    work: int
    runs: int | None = None
    predicting: int | None = None

    @property
    def is_bounded(self) -> bool:
        """True for a large model: drafts are compared by quick roundings, and only the best learns from samples."""
        return self.runs is not None

    @property
    def judges(self) -> int | None:
        """By how many held-out samples a plan is judged at most."""
        return None if self.runs is None else max(2, self.runs // _JUDGED)

    @property
    def ranking(self) -> int | None:
        """How many runs rank activations by what each does to the outputs."""
        return None if self.runs is None else int(self.runs * _RANKED)

    @property
    def few(self) -> int | None:
        """After how many of these what is behind is judged no further, and what is as good as the best neither."""
        return None if self.runs is None else 2

    def limit(self, samples: int | None) -> int | None:
        """Returns how many of so many samples judge at most; None stands for all that were held out."""
        return min((each for each in (samples, self.judges) if each is not None), default=None)

    def describe(self, held_out: int) -> tuple[str, ...]:
        """Returns a note where fewer samples judge than are held out."""
        if self.judges is None or self.judges >= held_out:
            return ()
        return (f"{self.judges} of {held_out} held-out samples judge the plans: a run takes {self.work / 1e9:.1f} G",)


def find_effort(graph: Graph, samples: int) -> Effort:
    """Returns the effort for a float graph that is calibrated with so many samples.

    Sizes that are not known count as one.
    """
    work = sum(count_macs(graph, node) for node in graph.nodes)
    work += _ELEMENT * sum(graph.value(name).elements for node in graph.nodes for name in node.output if name)
    if work <= _LARGE:
        return Effort(work=work)
    runs = min(max(int(_FREE // work), _EACH_SAMPLE * samples, _FEWEST), _MOST)
    return Effort(work=work, runs=runs, predicting=max(runs // _PREDICTED, samples // _TOLD))


def count_side_by_side(graph: Graph) -> int | None:
    """Returns how many samples run at a time: None where the cores decide, one where a run holds many activations.

    Nodes run in the order of the file, and a tensor goes after its last reader. With two runs of a detector side by
    side a calibration held 120 MB more.
    """
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.input}
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))
    live = dict[str, int]()
    for index, node in enumerate(graph.nodes):
        live |= {name: 4 * graph.value(name).elements for name in node.output if name}
        if sum(live.values()) > _SIDE_BY_SIDE_BYTES:
            return 1
        live = {name: size for name, size in live.items() if last.get(name, 0) > index}
    return None
