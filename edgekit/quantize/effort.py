"""How many runs of a model planning may take, given the work of one run: the same on every machine."""

import msgspec

from edgekit.check.macs import count_macs
from edgekit.graph.graph import Graph
from edgekit.machine import MOST_AT_ONCE, count_cores

# The work that planning may always take, in multiply-accumulates, and the runs that it may take for each sample if that
# is more: calibration costs as much again. All constants here are choices made with tools/bench/quantize_ratio.py.
_FREE, _EACH_SAMPLE = 1e12, 2
_FEWEST, _MOST_FOR_SAMPLES = 48, 256
# With fewer runs, a plan that is not needed is not tried.
_MANY = 256
# The cost of writing one number to memory, in multiply-accumulates: about 0.3 ns.
_ELEMENT = 32
# The number of judgements that the runs are divided into; the share of the runs that ranks activations (most of these
# start in the middle of the graph); and the divisor of the runs that gives the number of samples over which drops are
# estimated.
_JUDGED, RANKED_SHARE, _PREDICTED = 24, 0.75, 6
# Drops are estimated over at least a third of all samples.
_PREDICTED_SHARE = 3
# The activations of all samples that run in parallel take no more than this: a choice, to bound memory.
_SIDE_BY_SIDE_BYTES = 32 << 20


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one run of a model, and about how many runs planning may take.

    The drop of a plan is estimated over `predicting_samples` samples. `at_once` samples run in parallel; None means one
    per core, at most four.
    """

    work: int
    runs: int
    predicting_samples: int
    at_once: int | None = None

    @property
    def is_short(self) -> bool:
        """True for a model whose runs are so short that plans may be tried which are not needed."""
        return self.runs > _MANY

    @property
    def judging_samples(self) -> int:
        """The largest number of held-out samples that judge a plan."""
        return max(2, self.runs // _JUDGED)

    def describe(self, held_out: int) -> tuple[str, ...]:
        """Returns a note if fewer samples judge than are held out."""
        if self.judging_samples >= held_out:
            return ()
        judging = f"{self.judging_samples} of {held_out} held-out samples judge the plans"
        return (f"{judging}: a run takes {self.work / 1e9:.1f} G",)


def find_effort(graph: Graph, samples: int) -> Effort:
    """Returns the effort for a float graph that is calibrated with `samples` samples.

    Unknown dimensions count as one.
    """
    work = sum(count_macs(graph, node) for node in graph.nodes)
    work += _ELEMENT * sum(graph.value(name).elements for node in graph.nodes for name in node.output if name)
    at_once = count_side_by_side(graph)
    runs = max(int(_FREE // max(work, 1)), min(_EACH_SAMPLE * samples, _MOST_FOR_SAMPLES), _FEWEST)
    predicting = samples if runs > _MANY else max(runs // _PREDICTED, samples // _PREDICTED_SHARE)
    return Effort(work=work, runs=runs, predicting_samples=predicting, at_once=at_once)


def count_side_by_side(graph: Graph, output_bytes: int = 0, cores: int | None = None) -> int | None:
    """Returns how many samples run in parallel: fewer if a run has large activations, None if the cores decide.

    `output_bytes` are those of added outputs, which stay in memory until a sample is evaluated. `cores` are those of
    this machine by default.

    Assumed: nodes run in the order of the file, and a tensor is freed after its last reader. With two parallel runs,
    calibrating a detector took 120 MB more, and ViT-S 74 MB.
    """
    last = {name: index for index, node in enumerate(graph.nodes) for name in node.input}
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))
    live, most = dict[str, int](), 1
    for index, node in enumerate(graph.nodes):
        live |= {name: 4 * graph.value(name).elements for name in node.output if name}
        most = max(most, sum(live.values()) + output_bytes)
        live = {name: size for name, size in live.items() if last.get(name, 0) > index}
    fits = max(1, _SIDE_BY_SIDE_BYTES // most)
    return fits if fits < min(cores or count_cores(), MOST_AT_ONCE) else None
