"""Candidates: the range methods and roundings of one graph, each judged on held-out samples.

Large constants of nodes that stay float are stored in 8 or 16 bits where the outputs allow it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx

from edgekit._files import digest_bytes
from edgekit.errors import UsageError, suggest_name
from edgekit.graph.graph import Graph
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.constants import round_by_channel
from edgekit.progress import Budget
from edgekit.quantize._ort_quantizer import find_plan_grids
from edgekit.quantize.calibration.calibrate import Calibration, add_image_headroom, open_float_graph
from edgekit.quantize.effort import Effort, find_effort
from edgekit.quantize.finer_weights import NORM
from edgekit.quantize.gptq import Rounding
from edgekit.quantize.graph.compared_tensors import ComparedTensor
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.mixed_precision import score
from edgekit.quantize.objective import FAITHFUL_DB, find_objective
from edgekit.quantize.plan import (
    Candidate,
    NarrowConstants,
    QuantPlan,
    add_headroom,
    find_float_constants,
    is_relievable,
)
from edgekit.quantize.qdq import place_plan, plan_calibration, plan_graph, round_weights
from edgekit.quantize.ranges import AUTO_METHODS, METHODS
from edgekit.target import Precision, Target

NOTABLE_DB = 0.3
"""The gain below which a change is not worth making: a choice, 7 % of the noise power."""
# Rounding weights with second moments of their inputs is tried if rounded weights cost at least this. Where they cost
# less, it gained at most 0.35 dB on ten networks of the zoo and of tools/bench/architectures.py (measured once).
_WORTH_MOMENTS_DB = 0.5
# With at most so many weights, rounding with moments takes a tenth of a second, and is tried on every model below
# FAITHFUL_DB: over eight draws of its samples kws gained 0.5 dB on unseen samples. Chosen by hand.
_QUICK_WEIGHTS = 1 << 18
QUICK: tuple[Rounding, ...] = ("nearest", "bias")
"""The roundings that do not learn from samples."""
_SLOW: tuple[Rounding, ...] = ("refit", "gptq")
_FEW_BITS: tuple[Rounding, ...] = ("gptq", "qronos")


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates of a draft, best first, its best range method, and the ratio in dB of that with float weights."""

    candidates: tuple[Candidate, ...]
    method: str
    unrounded_db: float

    def add(self, learned: Iterable[Candidate]) -> "Judgement":
        """Returns a judgement with more candidates."""
        return msgspec.structs.replace(self, candidates=sort_candidates([*self.candidates, *learned]))


class WeightError(msgspec.Struct, frozen=True, kw_only=True):
    """A weight, its number of values, and the outputs' noise (a share of the signal) when it alone is rounded."""

    name: str
    size: int
    noise: float


class Memo(msgspec.Struct, frozen=True, kw_only=True):
    """Cached results, by a digest of everything that they depend on, and the time budget.

    One memo is passed from target to target, so that a candidate that several targets share is judged once. A plan does
    not depend on what is cached.

    Attributes:
        judged: the judgement of each draft.
        ranked: the noise of each tensor of a plan, worst first (`rank_tensors`).
        noises: what rankings measured so far (`Noises`), by a digest of their session.
        weights: the noise of each weight of a plan (`rank_weights`).
        budget: the time that is left for searches.
    """

    judged: dict[str, Judgement] = {}
    ranked: dict[str, dict[str, float]] = {}
    noises: dict[str, dict[tuple[int, int, int], Array]] = {}
    weights: dict[str, tuple[WeightError, ...]] = {}
    budget: Budget = msgspec.field(default_factory=Budget)


class Subject(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What is to be quantized for which target, and what is known of it already (`memo`)."""

    model: Model
    calibration: Calibration
    target: Target
    precision: Precision
    memo: Memo = msgspec.field(default_factory=Memo)

    @cached_property
    def graph(self) -> Graph:
        """The float graph."""
        return open_float_graph(self.model, self.calibration)

    @property
    def widens(self) -> bool:
        """True if the target takes single tensors of 16 bits."""
        return self.target.widens(self.precision)

    def open_draft(self, plan: QuantPlan) -> "Draft":
        """Returns a plan with the graph and the calibration that it was made for: those of its factors of channels."""
        key = msgspec.json.encode(plan.factors, order="sorted")
        if key not in self._equalized:
            graph = plan_graph(self.model, plan, self.calibration)
            adapted = add_image_headroom(graph, plan_calibration(self.model, plan, self.calibration))
            self._equalized[key] = graph, adapted
        graph, calibration = self._equalized[key]
        return Draft(graph=graph, calibration=calibration, plan=plan)

    @cached_property
    def _equalized(self) -> dict[bytes, tuple[Graph, Calibration]]:
        return {}


class Draft(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A graph to quantize, its calibration, and a plan for it."""

    graph: Graph
    calibration: Calibration
    plan: QuantPlan

    @property
    def statistics(self) -> Path:
        """The folder with the moments and the held-out samples."""
        return Path(self.calibration.statistics)

    @cached_property
    def compared(self) -> tuple[ComparedTensor, ...]:
        """The tensors by which candidates are judged."""
        return find_objective(self.graph, self.calibration)

    @cached_property
    def effort(self) -> Effort:
        """How many runs planning may take."""
        return find_effort(self.graph, self.calibration.samples)

    def open_judge(
        self, graph: onnx.ModelProto, *, keep_float_weights: bool = True, most: int | None = None
    ) -> Callable[..., float]:
        """Returns a judge of a form of the graph (`score.open_judge`) over `most` samples, or as the effort allows."""
        most, at_once = most or self.effort.judging_samples, self.effort.at_once
        return score.open_judge(
            graph, self.compared, self.statistics, keep_float_weights=keep_float_weights, most=most, at_once=at_once
        )

    def choose(self, method: str, rounding: Rounding) -> "Draft":
        """Returns the draft with the ranges of `method`, and with `rounding`."""
        plan = choose_ranges(self.graph, self.plan, self.calibration, method, rounding)
        return msgspec.structs.replace(self, plan=plan)

    def use_unsigned(self) -> "Draft":
        """Returns the draft with uint8 in place of int8 activations: the loss is the same, and x86 is faster."""
        plan = self.plan
        if plan.activation != "int8":
            return self
        grids = {
            name: msgspec.structs.replace(grid, zero_point=grid.zero_point + 128) for name, grid in plan.grids.items()
        }
        return msgspec.structs.replace(self, plan=msgspec.structs.replace(plan, activation="uint8", grids=grids))


def choose_ranges(
    graph: Graph, plan: QuantPlan, calibration: Calibration, method: str, rounding: Rounding
) -> QuantPlan:
    """Returns the plan with the ranges of `method`, with headroom if all have 16 bits, and with `rounding`.

    Raises:
        UsageError: the calibration has no ranges of this method.
    """
    if method not in calibration.ranges:
        raise UsageError(f"the calibration has no ranges of method '{method}'", hint=suggest_name(method, METHODS))
    seen = calibration.ranges[method]
    ranges = seen if is_relievable(plan) else add_headroom(graph, seen)
    return msgspec.structs.replace(plan, method=method, rounding=rounding, ranges=ranges)


def sort_candidates(judged: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Returns candidates, best first."""
    return tuple(sorted(judged, key=lambda candidate: -candidate.sqnr_db))


def judge_draft(draft: Draft, memo: Memo, *, method: str | None = None) -> Judgement:
    """Returns the candidates of a draft: minmax rounded to nearest, and the best range method with corrected biases.

    Range methods are compared with float weights; if a `method` is given, it is used without comparison.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = draft.use_unsigned()
    key, budget = f"{digest_draft(draft)}.{method or ''}", memo.budget
    if key in memo.judged:
        return memo.judged[key]
    # Clipping tails makes steps finer, which 16 bits do not need.
    methods = (method,) if method else AUTO_METHODS if is_relievable(draft.plan) else ("minmax",)
    nearest = draft.choose(methods[0], "nearest")
    placed = place_draft(nearest)
    ranges = _judge_ranges(draft, methods, budget, placed)
    best = max(ranges, key=ranges.__getitem__)
    chosen = draft.choose(best, "nearest")
    # Minmax rounded to nearest is always a candidate, so the choice is never worse than that on these samples. An
    # equalized draft needs none: it is compared with that of the unchanged graph.
    tried = [] if draft.plan.factors else [*_judge_roundings(nearest, ("nearest",), budget, placed)]
    placed = placed if best == methods[0] else place_draft(chosen)
    # On ResNet-50, ViT-S and Whisper's encoder bias correction gained 0.1 to 3.9 dB (measured once).
    corrected = [*_judge_roundings(chosen, ("bias",), budget, placed)] if read_layers(draft.graph) else []
    tried += corrected or _judge_roundings(chosen, ("nearest",), budget, placed)
    found = Judgement(candidates=sort_candidates(tried), method=best, unrounded_db=ranges[best])
    # A result that the budget cut short is not stored: another target may have more time.
    if not budget.left_out:
        memo.judged[key] = found
    return found


def learn_roundings(draft: Draft, judged: Judgement, memo: Memo) -> Judgement:
    """Returns the judgement of a draft with roundings that learn from samples among its candidates.

    These are slow, so they are tried only if rounded weights cost something, or if the model is small, and no longer
    once what is left of that cost is not worth it.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = draft.use_unsigned()
    weights = sum(math.prod(draft.graph.constants[layer.weight].dims) for layer in read_layers(draft.graph))
    # Roundings are tried with the best range method, though minmax may be the best candidate so far.
    reached = [each.sqnr_db for each in judged.candidates if each.method == judged.method]
    reached = reached or [judged.candidates[0].sqnr_db]

    def may_gain() -> bool:
        return bool(draft.plan.bits) or needs_moments(max(reached), judged.unrounded_db, weights)

    if not weights or not may_gain():
        return judged
    key = f"{digest_draft(draft)}.{judged.method}.learned"
    if key in memo.judged:
        return judged.add(memo.judged[key].candidates)
    chosen, learned = draft.choose(judged.method, "nearest"), list[Candidate]()
    rounded = _judge_roundings(chosen, _FEW_BITS if chosen.plan.bits else _SLOW, memo.budget)
    while may_gain() and (found := next(rounded, None)) is not None:
        learned.append(found)
        reached.append(found.sqnr_db)
    if not memo.budget.left_out:
        memo.judged[key] = msgspec.structs.replace(judged, candidates=tuple(learned))
    return judged.add(learned)


def choose_rounding(draft: Draft) -> Rounding:
    """Returns "gptq" or the rounding of a draft: that whose weights alone, beside float activations, add less noise.

    Where most activations have 8 bits, their noise hides that of the weights, and a rounding was chosen almost by
    chance. Once many have left 8 bits, the weights may cost as much as all activations.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = draft.use_unsigned()
    placed, reached, best = place_draft(draft), -math.inf, draft.plan.rounding
    for rounding in dict.fromkeys((best, _SLOW[-1])):
        plan = msgspec.structs.replace(draft.plan, rounding=rounding)
        rounded = score.list_rounded(round_weights(placed, draft.graph, plan, draft.statistics), draft.graph)
        judge = draft.open_judge(score.switch_weights(draft.graph, rounded))
        found = judge({score.SWITCHES: np.ones(len(rounded), bool)})
        reached, best = (found, rounding) if found > reached else (reached, best)
    return best


def judge_plan(draft: Draft) -> Candidate:
    """Returns the judged candidate of a draft, with the ranges and the rounding of its plan.

    Raises:
        RuntimeRefusal: ONNX Runtime refuses the graph.
    """
    draft = draft.use_unsigned()
    return _judge_rounding(draft, draft.plan.rounding, place_draft(draft))


def digest_draft(draft: Draft) -> str:
    """Returns a digest of all that the judgement of a draft depends on, which targets with one plan share."""
    plan = draft.plan
    # Unsigned weights represent the same numbers as signed ones, except for gains of normalizations.
    facts = msgspec.structs.replace(plan, target="", judged=(), unsigned_ops=tuple({NORM} & {*plan.unsigned_ops}))
    return digest_bytes(msgspec.json.encode((facts, draft.calibration.outputs), order="sorted"))


def needs_moments(reached_db: float, unrounded_db: float, weights: int) -> bool:
    """Returns True if rounding with second moments may improve on the quick roundings.

    It can recover no more than rounded weights cost compared with float ones. For a model with few weights it is tried
    anyway, unless the model is faithful already.
    """
    is_quick = weights <= _QUICK_WEIGHTS and reached_db < FAITHFUL_DB
    return is_quick or unrounded_db - reached_db > _WORTH_MOMENTS_DB


def _judge_ranges(draft: Draft, methods: Sequence[str], budget: Budget, placed: onnx.ModelProto) -> dict[str, float]:
    """Returns the ratio in dB with the ranges of the first method, and with those of the others while time is left.

    For a method that is worse than one before, it is an upper bound. `placed` is the QDQ form of the draft with the
    first method.
    """
    wanted = [each for each in methods if each == methods[0] or budget.allows(f"range method {each}")]
    # Weights stay float here, so scales per channel would be computed for nothing.
    plans = {method: msgspec.structs.replace(draft.choose(method, "nearest").plan, axes={}) for method in wanted}
    stripped, fed = plans_to_inputs(draft, plans, placed)
    judge, ratios = draft.open_judge(stripped), dict[str, float]()
    # The first is minmax, which is seldom best: behind a better method it takes fewer samples.
    for method in (*wanted[1:], wanted[0]):
        ratios[method] = judge(fed[method], max(ratios.values(), default=-math.inf))
    return ratios


def plans_to_inputs(
    draft: Draft, plans: Mapping[str, QuantPlan], placed: onnx.ModelProto
) -> tuple[onnx.ModelProto, dict[str, Tensors]]:
    """Returns a graph that takes the scales and zero points of activations as inputs, and the values of each plan.

    So one session can judge all plans, which may differ only in ranges. `placed` is the QDQ form of one of them. Values
    that are taken from a constant, such as a row of an embedding, keep the scale of the constant.
    """
    stripped = score.strip_weights(placed, draft.graph)
    grids = {each: find_plan_grids(draft.graph, plan) for each, plan in plans.items()}
    known, stored = next(iter(grids.values())), {tensor.name for tensor in stripped.graph.initializer}
    sites = [node for node in stripped.graph.node if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]
    read = (name for node in sites if node.input[0] not in stored for name in node.input[1:])
    names = dict.fromkeys(name for name in read if name in stored and name in known)
    score.constants_to_inputs(stripped.graph, names)
    return stripped, {each: {name: found[name] for name in names} for each, found in grids.items()}


def _judge_roundings(
    draft: Draft,
    roundings: Sequence[Rounding],
    budget: Budget,
    placed: onnx.ModelProto | None = None,
) -> Iterator[Candidate]:
    """Yields the candidates of a draft: with the first rounding, and with the others while time is left.

    A rounding other than "nearest" that fails is left out. `placed` is the QDQ form of the draft, if it exists already.
    """
    placed = placed or place_draft(draft)
    for rounding in roundings:
        step = f"rounding {rounding}"
        if rounding != roundings[0] and not budget.allows(step):
            continue
        judge = partial(_judge_rounding, draft, rounding, placed)
        found = judge() if rounding == "nearest" else budget.attempt(step, judge)
        if found is not None:
            yield found


def _judge_rounding(draft: Draft, rounding: Rounding, placed: onnx.ModelProto) -> Candidate:
    plan = msgspec.structs.replace(draft.plan, rounding=rounding)
    qdq = round_weights(placed, draft.graph, plan, draft.statistics)
    ratio = round(draft.open_judge(qdq, keep_float_weights=False)(), 3)
    return Candidate(method=plan.method, rounding=rounding, sqnr_db=ratio, equalized=bool(plan.factors))


def place_draft(draft: Draft) -> onnx.ModelProto:
    """Returns the QDQ form of a draft with every weight rounded to nearest.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    return place_plan(draft.graph, draft.plan, "the candidate")


_Bits = Literal[8, 16]
_BITS: tuple[_Bits, ...] = (16, 8)


def store_narrow(model: Model, plan: QuantPlan, calibration: Calibration, reached_db: float | None = None) -> QuantPlan:
    """Returns the plan with large constants of float nodes stored in 16 or 8 bits, if that costs little.

    A session converts them to float32 when it loads the model: placement, memory and run time are those of float32.
    Their cost is judged in the float model, over a few held-out samples: in the quantized one, the noise of activations
    would hide it. It may lower the ratio `reached_db` of the plan (by default that of the best candidate) by at most
    EQUAL_DB. Without held-out samples nothing is changed.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    graph = plan_graph(model, plan, calibration)
    sizes = dict(sorted(find_float_constants(graph, plan), key=lambda item: -item[1]))
    compared, statistics = find_objective(graph, calibration), Path(calibration.statistics)
    if not (sizes and compared and calibration.statistics and score.has_held_out(statistics)):
        return plan
    reached = max([candidate.sqnr_db for candidate in plan.judged], default=FAITHFUL_DB)
    least = max(reached, reached_db or -math.inf) - 10 * math.log10(10 ** (score.EQUAL_DB / 10) - 1)
    effort = find_effort(graph, calibration.samples)
    proto, whole = deepcopy(graph.model), {name: graph.weight(name) for name in sizes}
    score.constants_to_inputs(proto.graph, whole)
    few = min(4, max(2, effort.judging_samples // 4))
    judge = score.open_judge(proto, compared, statistics, whole=whole, most=few, at_once=1)
    chosen: dict[str, _Bits] = {}
    ratio = math.inf
    for bits in _BITS:
        rounded = ((name, *round_by_channel(whole[name], bits)) for name in sizes)
        found = judge({name: integers.astype(np.float32) * scales for name, integers, scales in rounded}, least)
        if found < least:
            break
        chosen, ratio = dict.fromkeys(sizes, bits), found
    if not chosen:
        return plan
    saved = sum(sizes[name] * (32 - bits) // 32 for name, bits in chosen.items())
    return msgspec.structs.replace(
        plan, narrow=NarrowConstants(bits=chosen, saved_bytes=saved, ratio_db=round(ratio, 2))
    )
