"""Candidates: the range methods and roundings of one graph, each judged on held-out samples.

Large constants of nodes that stay float are stored in 8 or 16 bits where the outputs allow it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx

from edgekit._files import digest_bytes
from edgekit.errors import UsageError, suggest_name
from edgekit.graph.constants import bring_in
from edgekit.graph.graph import Graph
from edgekit.model.model import Model
from edgekit.prepare.constants import narrow_constants
from edgekit.progress import Budget
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.effort import Effort, find_effort
from edgekit.quantize.graph.compared_tensors import ComparedTensor
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.mixed_precision.score import (
    FEW_SAMPLES,
    Closeness,
    free_grids,
    has_held_out,
    is_even,
    judge_candidate,
    judge_grids,
    strip_weights,
)
from edgekit.quantize.objective import FAITHFUL_DB, find_objective
from edgekit.quantize.plan import Candidate, NarrowConstants, QuantPlan, is_relievable
from edgekit.quantize.qdq import NORM, find_plan_grids, place_plan, plan_graph, round_weights
from edgekit.quantize.ranges import AUTO_METHODS, METHODS, PERCENTS
from edgekit.quantize.rounding import Rounding

NOTABLE_DB = 0.3
"""What a change must gain: a choice, 7 % of the noise power."""
# Rounding with second moments makes up for what rounded weights cost, and a little of what activations do. On ten nets
# of the zoo and of tools/bench/architectures.py it gained 0.35 dB at most where rounded weights cost no more than that.
_WORTH_MOMENTS_DB = 0.5
# No rounding of weights mends such a model: relief rounds once more.
_BROKEN_DB = 10.0
# With so few weights it takes a tenth of a second, and is tried on all but faithful models: over eight draws of its
# samples kws comes 0.5 dB nearer on samples that it has not seen. Chosen by hand.
_QUICK_WEIGHTS = 1 << 18
# Cutting off tails makes steps finer, which 16 bits do not need.
_METHODS_16 = ("minmax",)
# What "mse" cuts differs from tensor to tensor.
_LESS_CUT = ("minmax", *sorted(PERCENTS, key=PERCENTS.__getitem__, reverse=True))
_QUICK: tuple[Rounding, ...] = ("nearest", "bias")
_SLOW: tuple[Rounding, ...] = ("gptq", "refit")
# What roundings of 4 bits gained over GPTQ on tools/bench/four_bits.py.
_FEW_BITS: tuple[Rounding, ...] = ("comq", "qronos")


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates of a draft, best first, and how near its best ranges come with float weights."""

    candidates: tuple[Candidate, ...]
    unrounded_db: float


class Memo(msgspec.Struct, frozen=True, kw_only=True):
    """What was judged and ranked before, by a digest of all that it depends on, and the time that is left.

    One memo is passed from target to target: targets whose candidates compute the same share the work. What was judged
    for another target never changes a plan.
    """

    judged: dict[str, Judgement] = {}
    chosen: dict[str, tuple[str, Rounding]] = {}
    ranked: dict[str, dict[str, float]] = {}
    budget: Budget = msgspec.field(default_factory=Budget)


class Draft(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A graph to quantize, what calibration says of it, and a plan for it."""

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
        """How much may be spent on planning it."""
        return find_effort(self.graph, self.calibration.samples)

    def choose(self, method: str, rounding: Rounding) -> "Draft":
        """Returns the draft with the ranges of a method and a rounding."""
        plan = choose_ranges(self.plan, self.calibration, method, rounding)
        return msgspec.structs.replace(self, plan=plan)

    def use_unsigned(self) -> "Draft":
        """Returns the draft with unsigned activations: x86 computes them faster, and they lose as much as signed."""
        plan = self.plan
        if plan.activation != "int8":
            return self
        grids = {
            name: msgspec.structs.replace(grid, zero_point=grid.zero_point + 128) for name, grid in plan.grids.items()
        }
        return msgspec.structs.replace(self, plan=msgspec.structs.replace(plan, activation="uint8", grids=grids))


def choose_ranges(plan: QuantPlan, calibration: Calibration, method: str, rounding: Rounding) -> QuantPlan:
    """Returns the plan with the ranges of a method and a rounding.

    Raises:
        UsageError: the calibration has no ranges of this method.
    """
    if method not in calibration.ranges:
        raise UsageError(f"the calibration has no ranges of method '{method}'", hint=suggest_name(method, METHODS))
    return msgspec.structs.replace(plan, method=method, rounding=rounding, ranges=calibration.ranges[method])


def sort_candidates(judged: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Returns candidates, best first."""
    return tuple(sorted(judged, key=lambda candidate: -candidate.sqnr_db))


def judge_draft(draft: Draft, memo: Memo, *, method: str | None = None) -> Judgement:
    """Returns the candidates of a draft: plain minmax, and the quick roundings of the best range method.

    Range methods are compared while weights are float; with a `method` none are.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = draft.use_unsigned()
    key = f"{digest_draft(draft)}.{method or ''}"
    if key not in memo.judged:
        found = _judge_quickly(draft, memo.budget, method)
        # What the budget cut short is not kept: another target may have more time.
        if memo.budget.left_out:
            return found
        memo.judged[key] = found
    return memo.judged[key]


def learn_roundings(draft: Draft, judged: Judgement, memo: Memo) -> tuple[Candidate, ...]:
    """Returns the candidates of a draft, best first, with those whose roundings learn from samples where that may gain.

    It takes its time, so it is tried only where rounded weights cost something, or where the model is small.

    Raises:
        UsageError: the statistics are gone.
    """
    draft, lead = draft.use_unsigned(), judged.candidates[0]
    is_broken = draft.effort.is_bounded and lead.sqnr_db < _BROKEN_DB and is_relievable(draft.plan)
    weights = count_weights(draft.graph)
    if is_broken or not weights or not (draft.plan.bits or needs_moments(lead.sqnr_db, judged.unrounded_db, weights)):
        return judged.candidates
    key = f"{digest_draft(draft)}.{lead.method}.learned"
    if key not in memo.judged:
        tried = [each for each in judged.candidates if each.method == lead.method]
        chosen = draft.choose(lead.method, "nearest")
        learned = tuple(_judge_learned(chosen, tried, memo.budget, place_draft(chosen)))
        if memo.budget.left_out:
            return sort_candidates([*judged.candidates, *learned])
        memo.judged[key] = msgspec.structs.replace(judged, candidates=learned)
    return sort_candidates([*judged.candidates, *memo.judged[key].candidates])


def choose_again(draft: Draft, memo: Memo) -> QuantPlan:
    """Returns a relieved plan with the range method and the rounding that are best for it.

    Where a few tensors made most of the noise, the choice before they left 8 bits was made in that noise. A few samples
    judge, and the present ranges and rounding stay where others gain little.
    """
    key = digest_draft(draft)
    if key not in memo.chosen:
        found = _find_best(draft.use_unsigned(), memo.budget)
        if memo.budget.left_out:
            return choose_ranges(draft.plan, draft.calibration, *found)
        memo.chosen[key] = found
    return choose_ranges(draft.plan, draft.calibration, *memo.chosen[key])


def _find_best(draft: Draft, budget: Budget) -> tuple[str, Rounding]:
    """Returns the best range method and rounding of a draft, by a few samples."""
    present, placed = draft.plan.method, place_draft(draft)
    methods = (present, *(each for each in AUTO_METHODS if each != present))
    ranges = _judge_ranges(draft, methods, budget, placed, most=FEW_SAMPLES)
    best = prefer_method(ranges, present)
    if draft.plan.bits:
        return best, draft.plan.rounding
    chosen = draft.choose(best, draft.plan.rounding)
    placed = placed if best == present else place_draft(chosen)
    tried = list(_judge_roundings(chosen, ("bias",), budget, placed, most=FEW_SAMPLES))
    if not tried:
        return best, draft.plan.rounding
    if needs_moments(tried[0].sqnr_db, ranges[best].ratio_db, count_weights(draft.graph)):
        tried += _judge_learned(chosen, tried, budget, placed, most=FEW_SAMPLES)
    return best, max(tried, key=lambda candidate: candidate.sqnr_db).rounding


def judge_plan(draft: Draft) -> Candidate:
    """Returns how near a draft comes with the ranges and the rounding that its plan has.

    Raises:
        RuntimeRefusal: ONNX Runtime makes no session of it.
    """
    draft = draft.use_unsigned()
    return _judge_rounding(draft, draft.plan.rounding, place_draft(draft))


def count_weights(graph: Graph) -> int:
    """Returns how many weights the layers of a graph have."""
    return sum(math.prod(graph.constants[layer.weight].dims) for layer in read_layers(graph))


def prefer_method(judged: Mapping[str, Closeness], present: str | None = None) -> str:
    """Returns the best range method, but the present one where the best gains little, or that was not tried.

    Of those that samples do not tell apart the one that cuts least is the best: what is cut are the rarest values, of
    which few samples show too little (the rule of one standard error, L. Breiman et al., "Classification and Regression
    Trees", 1984, 3.4.3).
    """
    if present is not None and present not in judged:
        return present
    best = max(judged, key=lambda method: judged[method].ratio_db)
    less = _LESS_CUT[: _LESS_CUT.index(best)] if best in _LESS_CUT else _LESS_CUT[:1]
    best = next((each for each in less if each in judged and judged[each].ties(judged[best])), best)
    return present if present and judged[best].ratio_db <= judged[present].ratio_db + NOTABLE_DB else best


def digest_draft(draft: Draft) -> str:
    """Returns a digest of all that judging a draft depends on: the plan of the nodes before the compared tensors.

    A Softmax behind compared logits is left out, so that targets which differ there alone share the judgement. It
    counts where a float node makes the logits: then the plan of the Softmax says whether Q and DQ lie between them.
    """
    graph, plan = draft.graph, draft.plan
    compared = draft.compared
    leading = _find_leading(graph, [each.tensor for each in compared])
    floats = {node.name for node in plan.float_nodes}
    for each in compared:
        maker = graph.producers.get(each.tensor)
        if each.reader and (maker is None or maker.name in floats):
            leading.add(each.reader)
    nodes = [node for node in graph.nodes if node.name in leading]
    made, ops = {name for node in nodes for name in node.output}, {node.op_type for node in nodes}
    kept = [msgspec.structs.replace(node, reason="") for node in plan.float_nodes if node.name in leading]
    facts = msgspec.structs.replace(
        plan,
        target="",
        judged=(),
        # Unsigned weights are the same numbers under another name, except for gains of normalizations.
        unsigned_ops=tuple({NORM} & ops & {*plan.unsigned_ops}),
        op_types=tuple(op for op in plan.op_types if op in ops),
        grids={name: grid for name, grid in plan.grids.items() if name in made},
        float_nodes=tuple(kept),
    )
    return digest_bytes(msgspec.json.encode((facts, draft.calibration.outputs), order="sorted"))


def _find_leading(graph: Graph, tensors: Sequence[str]) -> set[str]:
    """Returns the names of the nodes that some tensors are computed by."""
    found, waiting = set[str](), list(tensors)
    while waiting:
        maker = graph.producers.get(waiting.pop())
        if maker is not None and maker.name not in found:
            found.add(maker.name)
            waiting += maker.input
    return found


def _judge_quickly(draft: Draft, budget: Budget, method: str | None) -> Judgement:
    methods = (method,) if method else AUTO_METHODS if is_relievable(draft.plan) else _METHODS_16
    plain = draft.choose(methods[0], "nearest")
    placed = place_draft(plain)
    ranges = _judge_ranges(draft, methods, budget, placed)
    best = prefer_method(ranges)
    chosen, tried = draft.choose(best, "nearest"), list[Candidate]()
    # Plain minmax is among the candidates, so that what is chosen is never worse on these samples: that of the graph as
    # it is, with which equalized ones are compared too.
    if best != methods[0]:
        if not (draft.plan.factors or (draft.effort.is_bounded and is_even(ranges))):
            tried += _judge_roundings(plain, ("nearest",), budget, placed)
        placed = place_draft(chosen)
    tried += _judge_roundings(chosen, _QUICK if read_layers(draft.graph) else _QUICK[:1], budget, placed)
    return Judgement(candidates=sort_candidates(tried), unrounded_db=ranges[best].ratio_db)


def _judge_learned(
    draft: Draft, tried: Sequence[Candidate], budget: Budget, placed: onnx.ModelProto, *, most: int | None = None
) -> Iterator[Candidate]:
    """Yields the candidates of a draft whose roundings learn from samples; `tried` are those of quick ones.

    Of a large model a second way is not tried where the first gains nothing, but for 4 bits: it takes its time again.
    """
    quick_db = max(each.sqnr_db for each in tried)
    for rounding in _FEW_BITS if draft.plan.bits else _SLOW:
        if not budget.allows(f"rounding {rounding}"):
            continue
        found = list(_judge_roundings(draft, (rounding,), budget, placed, most=most))
        yield from found
        is_idle = bool(found) and all(each.sqnr_db <= quick_db for each in found)
        if is_idle and draft.effort.is_bounded and not draft.plan.bits:
            return


def needs_moments(reached_db: float, unrounded_db: float, weights: int) -> bool:
    """Returns True if rounding so many weights with second moments may gain something on what quick roundings reached.

    Better integers bring back no more than rounded weights cost beside float ones. Of few weights that is tried anyhow,
    as far as the model is not faithful.
    """
    is_quick = weights <= _QUICK_WEIGHTS and reached_db < FAITHFUL_DB
    return is_quick or unrounded_db - reached_db > _WORTH_MOMENTS_DB


def _judge_ranges(
    draft: Draft, methods: Sequence[str], budget: Budget, placed: onnx.ModelProto, *, most: int | None = None
) -> dict[str, Closeness]:
    """Returns how near the ranges of the first method come, and those of the others while there is time.

    `placed` holds the draft with Q and DQ nodes by the first method; the first `most` held-out samples judge.
    """
    wanted = [each for each in methods if each == methods[0] or budget.allows(f"range method {each}")]
    # Float weights stand in for the quantized ones, so scales per channel would be computed for nothing.
    plans = {method: msgspec.structs.replace(draft.choose(method, "nearest").plan, axes={}) for method in wanted}
    return judge_plans(draft, plans, placed, most=most)


def judge_plans(
    draft: Draft, plans: Mapping[str, QuantPlan], placed: onnx.ModelProto, *, most: int | None = None
) -> dict[str, Closeness]:
    """Returns how near plans come that differ in ranges alone; `placed` is the QDQ form of one of them."""
    # They differ in scales and zero points: one session takes those of each.
    stripped = strip_weights(placed, draft.graph)
    grids = {each: find_plan_grids(draft.graph, plan, "the candidate") for each, plan in plans.items()}
    names = free_grids(stripped, next(iter(grids.values())))
    fed = {each: {name: found[name] for name in names} for each, found in grids.items()}
    return judge_grids(
        stripped, draft.compared, draft.statistics, fed, most=draft.effort.limit(most), few=draft.effort.few
    )


def _judge_roundings(
    draft: Draft,
    roundings: Sequence[Rounding],
    budget: Budget,
    placed: onnx.ModelProto | None = None,
    *,
    most: int | None = None,
) -> Iterator[Candidate]:
    """Yields the candidates of a draft: of the first rounding, and of the others while there is time.

    Any but the nearest point may fail, and is left out then. `placed` holds the draft with Q and DQ nodes if they were
    placed before; the first `most` held-out samples judge.
    """
    placed = placed or place_draft(draft)
    for rounding in roundings:
        step = f"rounding {rounding}"
        if rounding != roundings[0] and not budget.allows(step):
            continue
        judge = partial(_judge_rounding, draft, rounding, placed, most=most)
        found = judge() if rounding == "nearest" else budget.attempt(step, judge)
        if found is not None:
            yield found


def _judge_rounding(draft: Draft, rounding: Rounding, placed: onnx.ModelProto, *, most: int | None = None) -> Candidate:
    plan = msgspec.structs.replace(draft.plan, rounding=rounding)
    qdq = round_weights(placed, draft.graph, plan, draft.statistics)
    ratio = judge_candidate(qdq, draft.compared, draft.statistics, most=draft.effort.limit(most))
    return Candidate(
        method=plan.method,
        rounding=rounding,
        relieved=(),
        sqnr_db=round(ratio, 3),
        equalized=bool(plan.factors),
    )


def place_draft(draft: Draft) -> onnx.ModelProto:
    """Returns the QDQ form of a draft with every weight rounded to the nearest.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    return place_plan(draft.graph, draft.plan, "the candidate")


LEAST_BYTES = 1 << 14
"""Constants with fewer bytes are not worth storing in fewer bits: a choice."""
MOST_LOST_DB = 0.1
"""How many dB of the plan's ratio narrow constants may cost, 2 % of its noise: a choice."""
# So many are tried one after another where all together are too far off.
_MOST_TRIED = 8
_Bits = Literal[8, 16]
_BITS: tuple[_Bits, ...] = (16, 8)


def store_narrow(model: Model, plan: QuantPlan, calibration: Calibration, reached_db: float | None = None) -> QuantPlan:
    """Returns the plan with the large constants of float nodes in 16 or 8 bits, as far as that does no harm.

    A session widens them when it loads the model: placement, memory and time of a run are those of float32. What they
    cost is judged in the float model, over a few held-out samples, since beside the rounding of activations it is lost
    in chance: it must be so little that MOST_LOST_DB is taken from the ratio `reached_db` of the plan (that of the best
    candidate by default). Without held-out samples nothing is changed.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    graph = plan_graph(model, plan, calibration)
    sizes = dict(sorted(find_float_constants(graph, plan), key=lambda item: -item[1]))
    compared, statistics = find_objective(graph, calibration), Path(calibration.statistics)
    if not (sizes and compared and calibration.statistics and has_held_out(statistics)):
        return plan
    reached = max([candidate.sqnr_db for candidate in plan.judged], default=FAITHFUL_DB)
    least = max(reached, reached_db or -math.inf) - 10 * math.log10(10 ** (MOST_LOST_DB / 10) - 1)

    most = find_effort(graph, calibration.samples).limit(FEW_SAMPLES)

    def judge(bits: Mapping[str, int]) -> float:
        proto = onnx.ModelProto()
        proto.CopyFrom(graph.model)
        bring_in(proto.graph, graph.folder, bits.keys())
        narrow_constants(proto.graph, bits)
        return judge_candidate(proto, compared, statistics, keep_float_weights=True, most=most)

    chosen: dict[str, _Bits] = {}
    ratio = math.inf
    every, singles = tuple(sizes), tuple((name,) for name in list(sizes)[:_MOST_TRIED])
    for bits in _BITS:
        for names in (every, *singles) if len(sizes) > 1 else (every,):
            trial = chosen.copy()
            for name in names:
                trial[name] = bits
            found = judge(trial)
            if found >= least:
                chosen, ratio = trial, found
                if names == every:
                    break
    if not chosen:
        return plan
    saved = sum(sizes[name] * (32 - bits) // 32 for name, bits in chosen.items())
    return msgspec.structs.replace(
        plan, narrow=NarrowConstants(bits=chosen, saved_bytes=saved, ratio_db=round(ratio, 2))
    )


def find_float_constants(graph: Graph, plan: QuantPlan) -> Iterator[tuple[str, int]]:
    """Yields the large float constants that only nodes kept float read, and the bytes of each."""
    floats = {node.name for node in plan.float_nodes}
    for name, tensor in graph.constants.items():
        readers, size = graph.readers(name), 4 * math.prod(tensor.dims)
        if size < LEAST_BYTES or not graph.is_float_constant(name) or name in graph.captured | graph.outputs:
            continue
        is_apart = bool(readers) and all(node.name in floats for node in readers)
        if is_apart and np.isfinite(graph.weight(name)).all():
            yield name, size
