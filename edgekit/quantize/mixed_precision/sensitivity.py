"""Sensitivity: what each activation does to the outputs when it alone is quantized.

The last parts of a graph are run by themselves where what they read of the parts before is known.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import pairwise, takewhile
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import helper

from edgekit.graph.graph import Graph
from edgekit.graph.rewrite import copy_fields
from edgekit.machine import map_in_order
from edgekit.model.model import Model, find_reads, iterate_reads
from edgekit.model.tensors import Array, Tensors
from edgekit.progress import NO_LIMIT, Budget
from edgekit.quantize.accuracy.loss import join_ratios, ratio_db
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.graph.compared_tensors import ComparedTensor
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.mixed_precision.score import SWITCHES, has_held_out, switch_activations
from edgekit.quantize.objective import find_objective, measure_loss
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.qdq import build_qdq, plan_graph

# What is known is held for each sample: no more tensors are read across a cut, and no more bytes. By hand.
_MOST_TENSORS, _MOST_BYTES = 2, 8 << 20


class Suffix(msgspec.Struct, frozen=True, kw_only=True):
    """A graph without its first `start` nodes; `fed` are its additional inputs, which those compute."""

    start: int
    fed: tuple[str, ...]
    proto: onnx.ModelProto


def cut_suffixes(proto: onnx.ModelProto, count: int, measure: Callable[[str], int | None]) -> Iterator[Suffix]:
    """Yields up to `count` suffixes of a graph whose nodes are in order, the longest first, in about equal steps.

    `measure` returns the bytes of a float32 tensor, None of others and of sizes that are not known.
    """
    nodes = proto.graph.node
    crossing = list(_list_crossing(proto.graph))
    before = 0

    def is_narrow(names: tuple[str, ...]) -> bool:
        sizes = [measure(name) for name in names] if len(names) <= _MOST_TENSORS else [None]
        return all(size is not None for size in sizes) and sum(size or 0 for size in sizes) <= _MOST_BYTES

    for index in range(1, count + 1):
        wanted = index * len(nodes) // (count + 1)
        start = next((at for at in range(max(wanted, before + 1), len(nodes)) if is_narrow(crossing[at])), None)
        if start is None:
            return
        before = start
        yield Suffix(start=start, fed=crossing[start], proto=_cut(proto, start, crossing[start]))


def _list_crossing(graph: onnx.GraphProto) -> Iterator[tuple[str, ...]]:
    """Yields for each node what is computed before it and read by it, behind it, or as an output."""
    last = {name: index for index, node in enumerate(graph.node) for name in iterate_reads(node)}
    last |= {value.name: len(graph.node) for value in graph.output}
    open_: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        open_ = {name: end for name, end in open_.items() if end >= index}
        yield tuple(open_)
        open_ |= {name: last[name] for name in node.output if name in last}


def _cut(proto: onnx.ModelProto, start: int, fed: tuple[str, ...]) -> onnx.ModelProto:
    cut = onnx.ModelProto()
    copy_fields(proto, cut, {"graph"})
    copy_fields(proto.graph, cut.graph, {"node", "initializer", "value_info"})
    cut.graph.node.extend(proto.graph.node[start:])
    read = find_reads(cut.graph)
    cut.graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name in read)
    for name in fed:
        cut.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return cut


# By how many held-out samples activations are ranked where all are and where only the worst are: choices, for the time.
_SAMPLES, _FEWER_SAMPLES = 6, 4
# Into how many spans activations are parted at first, and how many spans are judged at most for each that is looked
# for: a search by halves takes about log2(100) = 7 to find one of a hundred.
_FIRST_SPANS, _SPANS_EACH = 16, 7
# How many of a graph's last parts have a session of their own where runs are bounded: a choice.
_PARTS = 3
# What is left of a noise at least where a part seems to have made it all.
_LEAST_LEFT = 0.01
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
    compared = find_objective(graph, calibration)
    if not has_held_out(statistics) or not compared:
        return ()
    return rank_activations(graph, build_qdq(graph, plan, statistics, model.path.name), compared, statistics)


def search_spans(
    count: int,
    judge: Callable[[Sequence[range]], Sequence[float]],
    worst: int,
    *,
    most: int | None = None,
    guesses: Sequence[float] | None = None,
) -> list[float]:
    """Returns for each of `count` things in a row its ratio in dB, found by judging spans of them together.

    What several things do adds up, so that a span with much noise is halved before one with little, until the `worst`
    things are alone, or seven times as many spans were judged, or `most`. What is not alone has its share of its span's
    noise. With `guesses` of the noise of each thing these decide where spans begin and where they are halved, so that
    what is bad is soon alone, and one half is judged: the other has the rest of the noise.
    """
    most = _SPANS_EACH * worst if most is None else min(_SPANS_EACH * worst, most)
    mass = np.cumsum([0.0, *(guesses or [1.0] * count)])

    def cut(target: float) -> int:
        return int(np.searchsorted(mass, target, side="right")) - 1

    # Where there are few, each is judged alone: what two do may also cancel.
    targets = [mass[-1] * index / _FIRST_SPANS for index in range(_FIRST_SPANS + 1)]
    ends = [*range(count + 1)] if count <= most else [cut(target) for target in targets]
    first = [range(*pair) for pair in pairwise(dict.fromkeys(ends))]
    spans = [(ratio, span.start, span.stop, True) for span, ratio in zip(first, judge(first), strict=False)]
    heapify(spans)
    judged, alone = len(spans), list[tuple[float, int, int, bool]]()
    while spans and len(alone) < worst and judged < most:
        ratio, start, stop, is_judged = heappop(spans)
        middle = min(max(cut((mass[start] + mass[stop]) / 2), start + 1), stop - 1)
        if stop - start == 1 and is_judged:
            alone.append((ratio, start, stop, True))
            continue
        parts = [range(start, middle), range(middle, stop)] if stop - start > 1 else [range(start, stop)]
        seen = parts[:1] if guesses else parts
        found = [*judge(seen)]
        judged += len(seen)
        if len(found) < len(parts) and found:
            left = 10 ** (-ratio / 10) - 10 ** (-found[0] / 10)
            found.append(-10 * math.log10(max(left, 10 ** (-ratio / 10) * _LEAST_LEFT)))
        for part, its in zip(parts, found, strict=False):
            heappush(spans, (its, part.start, part.stop, part in seen))
    ratios = [np.inf] * count
    for ratio, start, stop, _ in (*alone, *spans):
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
    most: int | None = None,
    weights: Mapping[str, float] | None = None,
) -> tuple[TensorError, ...]:
    """Returns each quantized activation with what it alone does to the outputs, the most harmful first.

    With `worst` only so many are looked for, among spans of activations that are quantized together (`search_spans`),
    and judged by themselves; the others follow with their share of what their span does. That takes `most` runs where
    they are bounded; `weights` are then guesses of what each activation does. What the budget leaves no time for comes
    last.

    Raises:
        UsageError: the statistics are gone.
    """
    held: list[_Pair] = [pair for _, pair in zip(range(_SAMPLES), read_held_out(statistics), strict=False)]
    switched = _Switched(graph, qdq, compared, budget, parts=0 if most is None else _PARTS)
    names = switched.names
    ratios, chosen = [np.inf] * len(names), list(range(len(names)))
    if worst is not None and most is not None:
        guesses, few = [(weights or {}).get(name, 0.0) for name in names], held[:1]
        # They may be wrong: each counts by half, and half is the same for all.
        total = max(sum(guesses), _TINY)
        guesses = [each / total + 1 / len(guesses) for each in guesses]
        ratios = search_spans(
            len(names), lambda spans: [*switched.judge(spans, few)], worst, most=most, guesses=guesses
        )
        chosen = []
    # Few activations are judged by all samples in no more runs.
    elif worst is not None and len(names) * len(held) > (_SPANS_EACH + _FEWER_SAMPLES) * worst:
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
    """The sessions that serve all: they hold a switch for each activation.

    With `parts` those of the graph's last parts run where everything before them is float anyhow.
    """

    def __init__(
        self,
        graph: Graph,
        qdq: onnx.ModelProto,
        compared: Sequence[ComparedTensor],
        budget: Budget,
        *,
        parts: int = 0,
    ) -> None:
        proto, self.names = switch_activations(qdq, graph)
        switched = {name: f"{name}.edgekit.switched" for name in self.names}
        self._shown = {each: switched.get(each.tensor, each.tensor) for each in compared}
        self._outputs = tuple(dict.fromkeys(self._shown.values()))
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._outputs)
        places = {name: index for index, node in enumerate(proto.graph.node) for name in node.output}
        self._places = [places[switched[name]] for name in self.names]
        suffixes = [*cut_suffixes(proto, parts, partial(_measure_bytes, graph))]
        self._fed = dict.fromkeys(name for each in suffixes for name in each.fed)
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._fed)
        self._session = open_graph(proto, graph.folder, keep_float_weights=False)
        self._parts = [(each, open_graph(each.proto, graph.folder, keep_float_weights=False)) for each in suffixes]
        self._known: dict[int, Tensors] = {}
        self._budget = budget

    def judge(self, spans: Sequence[range], pairs: Sequence[_Pair]) -> Iterator[float]:
        """Yields the ratio in dB of each span of activations that are quantized, while there is time."""
        began = time.monotonic()
        for pair in pairs if self._fed else ():
            if id(pair) not in self._known:
                off = {**pair[0], SWITCHES: np.zeros(len(self.names), bool)}
                self._known[id(pair)] = self._session.run(off, [*self._fed])

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
        start = min(self._places[span.start : span.stop])
        part, session = next((each for each in reversed(self._parts) if each[0].start <= start), (None, self._session))
        fed = {name: self._known[id(pair)][name] for name in part.fed} if part is not None else {}
        found = session.run({**pair[0], **fed, SWITCHES: switches}, self._outputs)
        return np.stack([measure_loss(each, pair[1][each.tensor], found[name]) for each, name in self._shown.items()])


def _measure_bytes(graph: Graph, name: str) -> int | None:
    source = name.removesuffix(".edgekit.switched")
    is_sized = graph.is_float(source) and None not in (graph.dims(source) or (None,))
    return 4 * graph.value(source).elements if is_sized else None
