"""Sensitivity: the noise at the outputs when a single activation is quantized."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise, takewhile

import msgspec
import numpy as np
import onnx

from edgekit.machine import map_in_order, release_memory
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.progress import NO_LIMIT, Budget
from edgekit.quantize.accuracy.loss import join_ratios, ratio_db
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.effort import count_side_by_side
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.mixed_precision.candidates import Draft
from edgekit.quantize.mixed_precision.score import SWITCHES, has_held_out, switch_activations
from edgekit.quantize.objective import measure_loss
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.qdq import build_qdq, plan_graph

# How many held-out samples rank activations without a `Bound`, and how many of the worst all samples of a bound judge.
# Choices, to save time.
_SAMPLES, _JUDGED_BY_ALL = 6, 8
# The number of spans that activations are divided into at first, and the largest number of judged spans for each of the
# worst activations that are sought: bisection takes about log2(100) = 7 to find one of a hundred.
_FIRST_SPANS, _SPANS_EACH = 16, 7
# The least share of a span's noise for its second half, if the first half seems to make all of it.
_LEAST_LEFT = 0.01
_TINY = float(np.finfo(np.float64).tiny)
_RANKING = "the ranking of some activations"
Noises = dict[tuple[int, int, int], Array]
"""Powers of the compared tensors and of their noise, by the span of quantized activations and the held-out sample."""


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """An activation, its operator, and the outputs' signal-to-noise ratio when it alone is quantized."""

    name: str
    op: str
    sqnr_db: float


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a search for the worst activations.

    Attributes:
        worst: how many activations are sought.
        most: the largest number of spans that are judged.
        samples: by how many held-out samples.
        guesses: a guess of the noise of each activation, by name, which decides what is judged first.
    """

    worst: int
    most: int
    samples: int
    guesses: Mapping[str, float]


def rank_plan(model: Model, plan: QuantPlan, calibration: Calibration) -> tuple[TensorError, ...]:
    """Returns the activations that a plan quantizes, each with the error that it alone causes, worst first.

    The result is empty if there were too few samples to hold some out.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = Draft(graph=plan_graph(model, plan, calibration), calibration=calibration, plan=plan)
    if not has_held_out(draft.statistics) or not draft.compared:
        return ()
    return rank_activations(draft, build_qdq(draft.graph, plan, draft.statistics, model.path.name))


def search_spans(
    guesses: Sequence[float],
    judge: Callable[[Sequence[range]], Sequence[float]],
    worst: int,
    most: int,
    *,
    judges_both: bool = False,
) -> list[float]:
    """Returns the ratio in dB of each of several items in a row, by bisection: `judge` measures spans of items.

    The noise of items about adds up, so the span with the most noise is halved first, until the `worst` items are
    isolated, or 7 x `worst` or `most` spans were judged. With `judges_both` both halves are judged, else only the
    first, and the second gets the rest of the noise. Items that are not isolated share their span's noise equally.
    `guesses` of the noise of each item decide where spans begin and are halved, so that bad items are isolated soon.
    """
    count, most = len(guesses), min(_SPANS_EACH * worst, most)
    mass = np.cumsum([0.0, *guesses])

    def cut(target: float) -> int:
        return int(np.searchsorted(mass, target, side="right")) - 1

    # Few items are judged one by one: the noise of two may also cancel.
    targets = [mass[-1] * index / _FIRST_SPANS for index in range(_FIRST_SPANS + 1)]
    ends = [*range(count + 1)] if count <= most else [cut(target) for target in targets]
    first = [range(*pair) for pair in pairwise(dict.fromkeys(ends))]
    spans = [(ratio, span.start, span.stop, True) for span, ratio in zip(first, judge(first), strict=False)]
    heapify(spans)
    judged, alone = len(spans), list[tuple[float, int, int, bool]]()
    while spans and len(alone) < worst and judged < most:
        ratio, start, stop, is_judged = heappop(spans)
        if stop - start == 1 and is_judged:
            alone.append((ratio, start, stop, True))
            continue
        # A single item that got the rest of the noise is judged now.
        middle = max(min(max(cut((mass[start] + mass[stop]) / 2), start + 1), stop - 1), start + 1)
        halves = [range(start, middle), *([range(middle, stop)] if middle < stop else [])]
        seen = halves if judges_both else halves[:1]
        found, judged = [*judge(seen)], judged + len(seen)
        if found and len(found) < len(halves):
            left = 10 ** (-ratio / 10) - 10 ** (-found[0] / 10)
            found.append(-10 * math.log10(max(left, 10 ** (-ratio / 10) * _LEAST_LEFT)))
        for half, its in zip(halves, found, strict=False):
            heappush(spans, (its, half.start, half.stop, half in seen))
    ratios = [np.inf] * count
    for ratio, start, stop, _ in (*alone, *spans):
        ratios[start:stop] = [ratio + 10 * float(np.log10(stop - start))] * (stop - start)
    return ratios


def rank_activations(
    draft: Draft,
    qdq: onnx.ModelProto,
    budget: Budget = NO_LIMIT,
    *,
    bound: Bound | None = None,
    known: Noises | None = None,
) -> tuple[TensorError, ...]:
    """Returns the quantized activations, each with the error that it alone causes at the outputs, worst first.

    With a `bound` only sources of values count (`switch_activations`). Few are judged by two samples each, more by one;
    of many the worst are searched by bisection (`search_spans`). Then activations are halved, and samples doubled, so
    that the worst are judged by all (sequential halving, Z. Karnin, T. Koren and O. Somekh 2013). Chance misplaces an
    activation only among others of about the same noise, and the less noise they make, the less it matters. Activations
    for which the budget leaves no time come last. `known` holds what earlier rankings of the same graph measured, and
    is filled.

    Raises:
        UsageError: the statistics are gone.
    """
    graph = draft.graph
    proto, names = switch_activations(qdq, graph, sources=bound is not None)
    # Rounded weights, and what rounding them left in the heap, would lie beside the session.
    del qdq
    release_memory()
    switches = {name: f"{name}.edgekit.switched" for name in names}
    switched = Switched(draft, proto, switches, _SAMPLES if bound is None else bound.samples, budget, known)
    ratios, alone = [np.inf] * len(names), [*range(len(names))]
    few = 1 if bound is None else min(2, max(1, _SPANS_EACH * bound.worst // max(1, len(names))))
    wanted = (_SAMPLES,) if bound is None else (few, 2 * few, bound.samples)
    steps = [*dict.fromkeys(min(each, switched.count) for each in wanted)]
    if bound is not None and len(names) > min((_SPANS_EACH + 1) * bound.worst, bound.most):
        guesses = [bound.guesses.get(name, 0.0) for name in names]
        # Guesses may be wrong: half of each weight is the guess, the other half is the same for all.
        total = max(sum(guesses), _TINY)
        guesses = [each / total + 1 / len(guesses) for each in guesses]
        ratios = search_spans(
            guesses, lambda spans: [*switched.judge(spans, 1)], bound.worst, bound.most, judges_both=bound.samples > 1
        )
        steps, alone = steps[1:], sorted(alone, key=ratios.__getitem__)[: bound.worst]
    for samples in steps:
        spans = [range(index, index + 1) for index in alone]
        for index, ratio in zip(alone, switched.judge(spans, samples), strict=False):
            ratios[index] = ratio
        half = len(alone) // 2 if bound is None else min(len(alone) // 2, bound.worst)
        alone = sorted(alone, key=ratios.__getitem__)[: max(half, _JUDGED_BY_ALL)]
    ops = {name: graph.producers[name].op_type if name in graph.producers else "input" for name in names}
    errors = (TensorError(name=name, op=ops[name], sqnr_db=ratio) for name, ratio in zip(names, ratios, strict=True))
    return tuple(sorted(errors, key=lambda error: error.sqnr_db))


def measure_float16(draft: Draft, qdq: onnx.ModelProto, names: Sequence[str]) -> dict[str, float]:
    """Returns the outputs' signal-to-noise ratio in dB when each of some activations alone is rounded to float16.

    Raises:
        UsageError: the statistics are gone.
    """
    proto, found = switch_activations(qdq, draft.graph, only=names, as_float16=True)
    switched = Switched(draft, proto, {name: f"{name}.edgekit.switched" for name in found}, _SAMPLES)
    spans = [range(index, index + 1) for index in range(len(found))]
    return dict(zip(found, switched.judge(spans, switched.count), strict=True))


class Switched:
    """The session that measures all activations, or all weights: its graph has a switch for each.

    `switched` maps each activation, or the output of each layer, to the tensor that its switch makes. The first `most`
    held-out samples are read.
    """

    def __init__(
        self,
        draft: Draft,
        proto: onnx.ModelProto,
        switched: Mapping[str, str],
        most: int,
        budget: Budget = NO_LIMIT,
        known: Noises | None = None,
    ) -> None:
        graph, self._held = draft.graph, [*islice(read_held_out(draft.statistics), most)]
        self.count, self._switches = len(self._held), len(switched)
        self._shown = {each: switched.get(each.tensor, each.tensor) for each in draft.compared}
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(self._shown.values()))
        self._session = open_graph(proto, graph.folder, keep_float_weights=True)
        self._noises = {} if known is None else known
        self._at_once = count_side_by_side(graph)
        self._losses: dict[int, list[Callable[[Array], Array]]] = {}
        self._budget = budget

    def judge(self, spans: Sequence[range], count: int) -> Iterator[float]:
        """Yields the ratio in dB over the first `count` samples for each quantized span, while time is left."""
        began, samples = time.monotonic(), range(count)
        for sample in samples:
            if sample not in self._losses:
                expected = self._held[sample][1]
                self._losses[sample] = [measure_loss(each, expected[each.tensor]) for each in self._shown]

        def rate(span: range) -> float:
            powers = np.sum([self._measure(span, sample) for sample in samples], axis=0)
            return round(join_ratios([ratio_db(*power) for power in powers]), 2)

        todo = takewhile(lambda _: self._budget.allows(_RANKING), spans)
        for done, (_, ratio) in enumerate(map_in_order(rate, todo, self._at_once)):
            self._budget.tell("rank activations by what they cost", done, len(spans), began)
            yield ratio

    def _measure(self, span: range, sample: int) -> Array:
        key = span.start, span.stop, sample
        if key not in self._noises:
            switches = np.zeros(self._switches, bool)
            switches[span.start : span.stop] = True
            found = self._session.run({**self._held[sample][0], SWITCHES: switches})
            lost = zip(self._losses[sample], self._shown.values(), strict=True)
            self._noises[key] = np.stack([measure(found[name]) for measure, name in lost])
        return self._noises[key]
