"""Sensitivity: what each activation does to the outputs when it alone is quantized."""

import time
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise, takewhile
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.progress import NO_LIMIT, Budget
from edgekit.quantize.accuracy.sqnr import join_ratios, ratio_db
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.graph.compared_tensors import ComparedTensor, find_compared_tensors
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.mixed_precision.score import has_held_out, powers_of
from edgekit.quantize.mixed_precision.variants import SWITCHES, switch_activations
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.qdq.build import build_qdq, plan_graph

# By how many held-out samples activations are ranked where all are and where only the worst are: choices, for the time.
_SAMPLES, _FEWER_SAMPLES = 6, 4
# Into how many spans activations are parted at first, and how many spans are judged at most for each that is looked
# for: tools/bench/ranking.py shows how well what is found agrees with judging each activation.
_FIRST_SPANS, _SPANS_EACH = 16, 7
_TINY = float(np.finfo(np.float64).tiny)
_RANKING = "the ranking of some activations"
_Pair = tuple[Tensors, Tensors]
"""Inputs of a held-out sample, and what the float model makes of them."""


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """An activation, the operator that makes it, and the output's signal-to-noise ratio when it alone is quantized."""

    name: str
    op: str
    sqnr_db: float


def rank_plan(model: Model, plan: QuantPlan, calibration: Calibration) -> tuple[TensorError, ...]:
    """Returns each activation that a plan quantizes with what it alone does to the outputs, the most harmful first.

    None where too few samples were there to hold some out.

    Raises:
        UsageError: the statistics are gone.
    """
    graph, statistics = plan_graph(model, plan, calibration), Path(calibration.statistics)
    compared = find_compared_tensors(graph, calibration.outputs)
    if not has_held_out(statistics) or not compared:
        return ()
    return rank_activations(graph, build_qdq(graph, plan, statistics, model.path.name), compared, statistics)


def search_spans(count: int, judge: Callable[[Sequence[range]], Sequence[float]], worst: int) -> list[float]:
    """Returns for each of `count` things in a row its ratio in dB, found by judging spans of them together.

    What several things do adds up, so that a span with much noise is halved before one with little, until the `worst`
    things are alone, or seven times as many spans were judged. What is not alone has its share of its span's noise.
    """
    most = _SPANS_EACH * worst
    # Where there are few, each is judged alone: what two do may also cancel.
    ends = np.linspace(0, count, (count if count <= most else _FIRST_SPANS) + 1).astype(int).tolist()
    first = [range(*pair) for pair in pairwise(ends)]
    spans = [(ratio, span.start, span.stop) for span, ratio in zip(first, judge(first), strict=False)]
    heapify(spans)
    judged, alone = len(spans), list[tuple[float, int, int]]()
    while spans and len(alone) < worst and judged < most:
        ratio, start, stop = heappop(spans)
        if stop - start == 1:
            alone.append((ratio, start, stop))
            continue
        middle = (start + stop) // 2
        halves = (range(start, middle), range(middle, stop))
        for half, its in zip(halves, judge(halves), strict=False):
            heappush(spans, (its, half.start, half.stop))
        judged += len(halves)
    ratios = [np.inf] * count
    for ratio, start, stop in (*alone, *spans):
        ratios[start:stop] = [ratio + 10 * float(np.log10(stop - start))] * (stop - start)
    return ratios


def rank_activations(
    graph: Graph,
    qdq: onnx.ModelProto,
    compared: Sequence[ComparedTensor],
    statistics: Path,
    budget: Budget = NO_LIMIT,
    *,
    worst: int | None = None,
) -> tuple[TensorError, ...]:
    """Returns each quantized activation with what it alone does to the outputs, the most harmful first.

    With `worst` only so many are looked for, among spans of activations that are quantized together (`search_spans`),
    and judged by themselves; the others follow with their share of what their span does. What the budget leaves no time
    for comes last.

    Raises:
        UsageError: the statistics are gone.
    """
    held = [pair for _, pair in zip(range(_SAMPLES), read_held_out(statistics), strict=False)]
    switched = _Switched(graph, qdq, compared, budget)
    names = switched.names
    ratios, chosen = [np.inf] * len(names), list(range(len(names)))
    # Few activations are judged by all samples in no more runs.
    if worst is not None and len(names) * len(held) > (_SPANS_EACH + _FEWER_SAMPLES) * worst:
        few = switched.find_noisiest(held)[: max(1, _SPANS_EACH * worst // len(names))]
        ratios = search_spans(len(names), lambda spans: [*switched.judge(spans, few)], worst)
        chosen, held = sorted(chosen, key=lambda index: ratios[index])[:worst], held[:_FEWER_SAMPLES]
    alone = [range(index, index + 1) for index in chosen]
    for index, ratio in zip(chosen, switched.judge(alone, held), strict=False):
        ratios[index] = ratio
    ops = {name: graph.producers[name].op_type if name in graph.producers else "input" for name in names}
    errors = (TensorError(name=name, op=ops[name], sqnr_db=ratio) for name, ratio in zip(names, ratios, strict=True))
    return tuple(sorted(errors, key=lambda error: error.sqnr_db))


class _Switched:
    """The one session that serves all: it holds a switch for each activation."""

    def __init__(
        self,
        graph: Graph,
        qdq: onnx.ModelProto,
        compared: Sequence[ComparedTensor],
        budget: Budget,
    ) -> None:
        proto, self.names = switch_activations(qdq, graph)
        switched = {name: f"{name}.edgekit.switched" for name in self.names}
        self._shown = {each: switched.get(each.tensor, each.tensor) for each in compared}
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(self._shown.values()))
        self._session = open_graph(proto, graph.folder, keep_float_weights=False)
        self._budget = budget

    def judge(self, spans: Sequence[range], pairs: Sequence[_Pair]) -> Iterator[float]:
        """Yields the ratio in dB of each span of activations that are quantized, while there is time."""
        began = time.monotonic()

        def rate(span: range) -> float:
            powers = np.sum([self._measure(span, pair) for pair in pairs], axis=0)
            return round(join_ratios([ratio_db(*power) for power in powers]), 2)

        todo = takewhile(lambda _: self._budget.allows(_RANKING), spans)
        for done, (_, ratio) in enumerate(map_in_order(rate, todo)):
            self._budget.tell("rank activations by what they cost", done, len(spans), began)
            yield ratio

    def find_noisiest(self, pairs: Sequence[_Pair]) -> list[_Pair]:
        """Returns the samples in falling order of what they add to the noise where all activations are quantized."""
        powers = np.stack([self._measure(range(len(self.names)), pair) for pair in pairs])
        noise = (powers[:, :, 1] / np.maximum(powers[:, :, 0].sum(axis=0), _TINY)).sum(axis=1)
        return [pairs[index] for index in np.argsort(-noise, kind="stable")]

    def _measure(self, span: range, pair: _Pair) -> Array:
        switches = np.zeros(len(self.names), bool)
        switches[span.start : span.stop] = True
        found = self._session.run({**pair[0], SWITCHES: switches})
        return np.stack([powers_of(each, pair[1][each.tensor], found[name]) for each, name in self._shown.items()])
