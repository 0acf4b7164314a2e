"""Sensitivity: the noise at the outputs when a single activation is quantized.

Before that activation everything is float: the tensors across a cut of the graph are computed once and fed, and only
the nodes after the cut are run.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import islice, pairwise, takewhile

import msgspec
import numpy as np
import onnx
from onnx import helper

from edgekit._files import digest_bytes
from edgekit._ort import CpuSession
from edgekit.machine import map_in_order, release_memory
from edgekit.model.model import Model, copy_without_weights, refill
from edgekit.model.soundness import iterate_reads
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.interface import drop_idle_nodes
from edgekit.progress import NO_LIMIT, Budget
from edgekit.quantize.accuracy.loss import join_ratios, ratio_db
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.effort import count_side_by_side
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.mixed_precision.candidates import Draft
from edgekit.quantize.mixed_precision.score import SWITCHES, choose_branch, has_held_out, switch_activations
from edgekit.quantize.objective import measure_loss
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.qdq import build_qdq, plan_graph

# Tensors across a cut are kept for each sample: at most so many, and so many bytes of all samples. Chosen by hand.
_MOST_TENSORS, _MOST_BYTES = 2, 8 << 20


PARTS = "edgekit.parts"
"""The graph input that says for each cut whether the tensors across it are fed."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A place between nodes of a sorted graph: before the node `start`; the tensors `fed` lie across it."""

    start: int
    fed: tuple[str, ...]


def find_cuts(
    proto: onnx.ModelProto, count: int, dims: Callable[[str], Sequence[int] | None], most_bytes: int = _MOST_BYTES
) -> Iterator[Cut]:
    """Yields up to `count` cuts of a topologically sorted graph, in about equal steps.

    `dims` returns the dimensions of a float32 tensor; None for other types and unknown sizes. The tensors across a cut,
    at least one, take at most `most_bytes`.
    """
    nodes, before = proto.graph.node, 0
    # For each node, the tensors computed before it that it, a later node, or the caller (as outputs) reads.
    last = {name: index for index, node in enumerate(nodes) for name in iterate_reads(node)}
    last |= {value.name: len(nodes) for value in proto.graph.output}
    crossing, live = list[tuple[str, ...]](), dict[str, int]()
    for index, node in enumerate(nodes):
        live = {name: end for name, end in live.items() if end >= index}
        crossing.append(tuple(live))
        live |= {name: last[name] for name in node.output if name in last}

    def is_narrow(names: tuple[str, ...]) -> bool:
        shapes = [dims(name) for name in names] if 0 < len(names) <= _MOST_TENSORS else [None]
        known = [4 * math.prod(shape) for shape in shapes if shape is not None]
        return len(known) == len(shapes) and sum(known) <= most_bytes

    for index in range(1, count + 1):
        wanted = index * len(nodes) // (count + 1)
        start = next((at for at in range(max(wanted, before + 1), len(nodes)) if is_narrow(crossing[at])), None)
        if start is None:
            return
        before = start
        yield Cut(start=start, fed=crossing[start])


def nest_parts(proto: onnx.ModelProto, cuts: Sequence[Cut], dims: Callable[[str], Sequence[int | None] | None]) -> None:
    """Puts all nodes before each cut into one branch of an If, whose other branch returns fed tensors; in place.

    The Ifs are nested, so that one session can start at any cut; a session for each would hold the weights several
    times. The tensor `x` is fed as `x.edgekit.fed`; `dims` returns the dimensions of a tensor.
    """
    every, body, start = list[str](), list[onnx.NodeProto](), 0
    for index, cut in enumerate(cuts):
        body += proto.graph.node[start : cut.start]
        start = cut.start
        every = [*dict.fromkeys((*every, *cut.fed))]
        copies = [helper.make_node("Identity", [f"{name}.edgekit.fed"], [name]) for name in every]
        switch = PARTS, index, f"{PARTS}.{index}"
        body = choose_branch(proto.graph, switch, every, (copies, every), (body, every))
    body += proto.graph.node[start:]
    refill(proto.graph.node, body)
    for name in every:
        proto.graph.input.append(
            helper.make_tensor_value_info(f"{name}.edgekit.fed", onnx.TensorProto.FLOAT, dims(name))
        )
    if cuts:
        proto.graph.input.append(helper.make_tensor_value_info(PARTS, onnx.TensorProto.BOOL, [len(cuts)]))


# How many held-out samples rank activations without a `Bound`, and how many of the worst all samples of a bound judge.
# Choices, to save time.
_SAMPLES, _JUDGED_BY_ALL = 6, 8
# The number of spans that activations are divided into at first, and the largest number of judged spans for each of the
# worst activations that are sought: bisection takes about log2(100) = 7 to find one of a hundred.
_FIRST_SPANS, _SPANS_EACH = 16, 7
# At how many cuts a run may start: a choice. The ranking of ViT-S takes 7.7 CPU s with 7, 6.6 with 15; with 31 making
# its session takes as much more.
_PARTS = 15
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
    known: dict[str, Noises] | None = None,
) -> tuple[TensorError, ...]:
    """Returns the quantized activations, each with the error that it alone causes at the outputs, worst first.

    With a `bound` only sources of values count (`switch_activations`). Few are judged by two samples each, more by one;
    of many the worst are searched by bisection (`search_spans`). Then activations are halved, and samples doubled, so
    that the worst are judged by all (sequential halving, Z. Karnin, T. Koren and O. Somekh 2013). Chance misplaces an
    activation only among others of about the same noise, and the less noise they make, the less it matters. Activations
    for which the budget leaves no time come last. `known` holds what earlier rankings measured, also for other targets,
    by a digest of their session, and is filled.

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

    `switched` maps each activation, or the output of each layer, to the first tensor that its switch changes. A run
    starts at the last cut before the first of these. The first `most` held-out samples are read. Targets often quantize
    the activations before the compared tensors in the same way: their sessions are equal, so that what one measured is
    `known` to the other, which opens its session only if something is missing.
    """

    def __init__(
        self,
        draft: Draft,
        proto: onnx.ModelProto,
        switched: Mapping[str, str],
        most: int,
        budget: Budget = NO_LIMIT,
        known: dict[str, Noises] | None = None,
    ) -> None:
        graph, held = draft.graph, [*islice(read_held_out(draft.statistics), most)]
        self.count = len(held)
        self._shown = {each: switched.get(each.tensor, each.tensor) for each in draft.compared}
        self._outputs = tuple(dict.fromkeys(self._shown.values()))
        del proto.graph.output[:]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._outputs)
        # What follows the compared tensors makes no noise in them, and may differ between targets.
        drop_idle_nodes(proto.graph)
        places = {name: index for index, node in enumerate(proto.graph.node) for name in node.output}
        self._places = [places.get(name, len(places)) for name in switched.values()]
        sources = {other: name for name, other in switched.items()}

        def find_shape(name: str) -> tuple[int, ...] | None:
            source = sources.get(name, name)
            return graph.static_shape(source) if graph.is_float(source) else None

        self._cuts = [*find_cuts(proto, _PARTS, find_shape, _MOST_BYTES // max(1, self.count))]
        nest_parts(proto, self._cuts, find_shape)
        self._fed = {name: find_shape(name) or () for each in self._cuts for name in each.fed}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._fed if name not in self._outputs)
        self._proto, self._folder, self._held = proto, graph.folder, held
        self._noises: Noises = {}
        if known is not None:
            # All that what the session computes depends on; weights follow from the model.
            calibration, light = draft.calibration, copy_without_weights(proto)
            light.graph.initializer.extend(each for each in proto.graph.initializer if each.name not in graph.constants)
            facts = calibration.model_sha256, calibration.samples_sha256, calibration.outputs, draft.plan.factors
            encoded = msgspec.json.encode(facts, order="sorted") + light.SerializeToString(deterministic=True)
            self._noises = known.setdefault(digest_bytes(encoded), {})
        self._at_once = count_side_by_side(graph)
        self._floats: dict[int, Tensors] = {}
        self._losses: dict[int, list[Callable[[Array], Array]]] = {}
        self._budget = budget

    def judge(self, spans: Sequence[range], count: int) -> Iterator[float]:
        """Yields the ratio in dB over the first `count` samples for each quantized span, while time is left."""
        began, samples = time.monotonic(), range(count)
        for sample in samples:
            if sample not in self._losses and any(
                (span.start, span.stop, sample) not in self._noises for span in spans
            ):
                self._feed(sample)
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
            found = self._run({**self._held[sample][0], **self._feed(sample)}, span, self._outputs)
            lost = zip(self._losses[sample], self._shown.values(), strict=True)
            self._noises[key] = np.stack([measure(found[name]) for measure, name in lost])
        return self._noises[key]

    @cached_property
    def _session(self) -> CpuSession:
        return open_graph(self._proto, self._folder, keep_float_weights=True)

    def _feed(self, sample: int) -> Tensors:
        """Returns the tensors across the cuts in the float model, which are computed once for each sample."""
        if sample not in self._floats:
            # The inputs of the cuts must be given, though this run, which starts at the first node, does not read them.
            zeros = np.zeros(max(map(math.prod, self._fed.values()), default=0), np.float32)
            unread = {
                f"{name}.edgekit.fed": zeros[: math.prod(shape)].reshape(shape) for name, shape in self._fed.items()
            }
            inputs = {**self._held[sample][0], **unread}
            known: Tensors = self._run(inputs, range(0), [*self._fed]) if self._fed else {}
            self._floats[sample] = {f"{name}.edgekit.fed": value for name, value in known.items()}
        return self._floats[sample]

    def _run(self, inputs: Tensors, span: range, outputs: Sequence[str]) -> Tensors:
        switches, parts = np.zeros(len(self._places), bool), np.zeros(len(self._cuts), bool)
        switches[span.start : span.stop] = True
        start = min(self._places[span.start : span.stop], default=0)
        starts = [index for index, cut in enumerate(self._cuts) if cut.start <= start]
        parts[starts[-1:]] = True
        return self._session.run({**inputs, SWITCHES: switches, **({PARTS: parts} if self._cuts else {})}, outputs)
