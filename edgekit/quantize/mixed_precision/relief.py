"""Relief: the tensors that 8 bits hurt most leave them, a few more at each step, as long as that helps."""

from collections.abc import Sequence

import msgspec

from edgekit._files import digest_bytes
from edgekit.graph.graph import Graph
from edgekit.model.model import Model
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.decided_logits import find_enlarged, keep_winners
from edgekit.quantize.calibration.image_headroom import add_image_headroom
from edgekit.quantize.equalization.silu import clip_silu_tails
from edgekit.quantize.graph.activations import find_before_activation
from edgekit.quantize.graph.float_graph import folded_activations, range_source
from edgekit.quantize.mixed_precision.candidates import (
    Draft,
    Memo,
    choose_again,
    choose_ranges,
    judge_plan,
)
from edgekit.quantize.mixed_precision.sensitivity import rank_activations
from edgekit.quantize.plan import Candidate, FloatNode, QuantPlan, is_relievable, quantizes_any
from edgekit.quantize.qdq.build import build_qdq, plan_calibration, plan_graph
from edgekit.quantize.ranges.methods import AUTO_METHODS
from edgekit.target import Target

COLLAPSED_DB = 20.0
"""Below this ratio, where the error is a tenth of the signal, a model has collapsed: a choice."""
BROKEN_DB = 10.0
"""Below this ratio, where the error is a third of the signal, a model is of no use, wherever it runs: a choice."""
GOOD_DB = 30.0
"""From this ratio on, where the error is 3 % of the signal, nothing more is relieved: a choice."""
# More tensors out of 8 bits hardly change which range method is best for the others.
_FEW_RELIEVED = 8
# So many tensors are ranked at once: few, which most models need, and then those that the steps behind take.
_RANKED = (_FEW_RELIEVED, 40, 80)
_STEPS, _MOST_VALUES = 255, "percentile-99.9"
_RELIEF = "more tensors out of 8 bits"
_TINY = 1e-30


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """How many tensors leave 8 bits at each step, what a step must gain to be kept, and which ratio is enough."""

    counts: tuple[int, ...]
    least_gain_db: float
    enough_db: float


_THOROUGH = Schedule(counts=(1, 3, 8, 20, 40), least_gain_db=1.0, enough_db=GOOD_DB)
_MENDING = Schedule(counts=(1, 3, 8, 20, 40), least_gain_db=1.0, enough_db=COLLAPSED_DB)
# For float nodes, which leave the accelerator: a few that help much, unless the model is broken without them.
_SPARING = Schedule(counts=(1, 3, 8), least_gain_db=3.0, enough_db=COLLAPSED_DB)


def choose_schedule(ratio_db: float, *, widens: bool, thorough: bool) -> Schedule:
    """Returns how to relieve a plan with a ratio in dB; a target that `widens` has 16 bits for what leaves 8."""
    if widens or thorough:
        return _THOROUGH
    return _MENDING if ratio_db < BROKEN_DB else _SPARING


def relieve_plan(
    draft: Draft, lead: Candidate, schedule: Schedule, memo: Memo, *, widens: bool
) -> tuple[QuantPlan, tuple[Candidate, ...]]:
    """Returns the plan of a draft with the worst tensors out of 8 bits, and what was tried.

    More and more are taken out until the ratio is good enough, or two steps in a row gain too little; what gained too
    little is not kept. `lead` says how the plan itself was judged.

    Raises:
        UsageError: the statistics are gone.
    """
    best, reached, idle = draft.plan, lead.sqnr_db, 0
    tried: list[Candidate] = []
    for count in schedule.counts:
        if not memo.budget.allows(_RELIEF):
            break
        order = tuple(_rank_tensors(draft, memo, count))
        names = order[:count]
        relieved = relieve_tensors(draft.graph, draft.plan, names, draft.calibration, widens=widens)
        if not quantizes_any(draft.graph, relieved):
            break
        relieved = choose_again(msgspec.structs.replace(draft, plan=relieved), memo)
        found = judge_plan(msgspec.structs.replace(draft, plan=relieved))
        tried.append(msgspec.structs.replace(found, relieved=names))
        if found.sqnr_db >= reached + schedule.least_gain_db:
            best, reached, idle = relieved, found.sqnr_db, 0
        else:
            idle += count > 1  # the worst tensor alone may gain nothing where two spoil the same sum
        if idle == 2 or reached >= schedule.enough_db or count >= len(order):
            break
    return best, tuple(tried)


def relieve_step(
    model: Model,
    calibration: Calibration,
    target: Target,
    plan: QuantPlan,
    count: int,
    *,
    before: QuantPlan,
    memo: Memo,
) -> QuantPlan | None:
    """Returns a plan with its `count` most harmful tensors out of 8 bits, None where so many cannot be taken.

    They get 16 bits where the target takes them, and are float otherwise. `before` is what the step before returned: of
    many tensors it decides the range method and the rounding.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = _open_draft(model, calibration, plan)
    graph, calibration = draft.graph, draft.calibration
    order = tuple(_rank_tensors(draft, memo, count))
    if count > 2 * len(order):
        return None
    relieved = relieve_tensors(graph, plan, order[:count], calibration, widens=target.widens(plan.precision))
    if not quantizes_any(graph, relieved):
        return None
    if count > _FEW_RELIEVED:
        return choose_ranges(relieved, calibration, before.method, before.rounding)
    if is_relievable(plan) and {*AUTO_METHODS, plan.method} <= calibration.ranges.keys():
        relieved = choose_again(msgspec.structs.replace(draft, plan=relieved), memo)
    return relieved


def weigh_relief(
    model: Model, calibration: Calibration, plan: QuantPlan, counts: Sequence[int], memo: Memo
) -> dict[int, float]:
    """Returns by how many of the most harmful tensors may leave 8 bits the share of all tensors' noise that they make.

    Raises:
        UsageError: the statistics are gone.
    """
    noise = list(_rank_tensors(_open_draft(model, calibration, plan), memo, max(counts)).values())
    return {count: sum(noise[:count]) / max(sum(noise), _TINY) for count in counts}


def _open_draft(model: Model, calibration: Calibration, plan: QuantPlan) -> Draft:
    graph = plan_graph(model, plan, calibration)
    calibration = adapt_ranges(graph, plan_calibration(model, plan, calibration))
    return Draft(graph=graph, calibration=calibration, plan=plan)


def adapt_ranges(graph: Graph, calibration: Calibration) -> Calibration:
    """Returns a calibration without what no reader notices, and with what wins and what other samples may show."""
    return clip_silu_tails(graph, add_image_headroom(graph, keep_winners(graph, calibration)))


def spare_enlarged(draft: Draft, *, widens: bool) -> Draft:
    """Returns a draft whose maps of classes are interpolated to more than 8 bits, which takes no multiplications."""
    names = find_enlarged(draft.graph, draft.calibration)
    if not names or not is_relievable(draft.plan):
        return draft
    plan = relieve_tensors(draft.graph, draft.plan, names, draft.calibration, widens=widens)
    return msgspec.structs.replace(draft, plan=plan)


def relieve_tensors(
    graph: Graph, plan: QuantPlan, names: Sequence[str], calibration: Calibration, *, widens: bool
) -> QuantPlan:
    """Returns the plan with some activations out of 8 bits: at 16 bits over all they reach, or float with their nodes.

    What lies between a layer and its activation leaves 8 bits too: else a value is rounded, and cut to the range behind
    the activation, before it reaches its 16 bits. What only moves values gets 16 bits as well, else a Squeeze would
    round them to 8 bits after all. A tensor that is not quantized at all needs a float producer and float readers, so
    that no Q or DQ touches it.
    """
    every = dict.fromkeys(each for name in names for each in (name, *find_before_activation(graph, name)))
    if widens:
        seen = calibration.ranges["minmax"]
        exact = {name: its for name, its in seen.items() if range_source(graph, name) in every}
        return msgspec.structs.replace(plan, wide={**plan.wide, **exact})
    kept = {node.name: node for node in plan.float_nodes}
    for name in every:
        maker = graph.producers.get(name)
        for node in (*([maker] if maker is not None else []), *graph.readers(name)):
            reason = f"it makes or reads '{name}', which 8 bits do not hold"
            kept.setdefault(node.name, FloatNode(name=node.name, op=node.op_type, reason=reason))
    return msgspec.structs.replace(plan, float_nodes=tuple(kept.values()))


def _rank_tensors(draft: Draft, memo: Memo, count: int) -> dict[str, float]:
    """Returns the tensors whose 8 bits hurt most, worst first, of which `count` count, and the noise of each.

    The next steps remember them.
    """
    plan, worst = msgspec.structs.replace(draft.plan, judged=()), next(each for each in _RANKED if each >= count)
    key = digest_bytes(msgspec.json.encode((plan, draft.calibration.outputs, worst), order="sorted"))
    if key in memo.ranked:
        return memo.ranked[key]
    unsigned = draft.use_unsigned()
    qdq = build_qdq(draft.graph, unsigned.plan, draft.statistics, "the candidate")
    errors = rank_activations(
        draft.graph, qdq, draft.compared, draft.statistics, memo.budget,
        worst=worst, most=draft.effort.ranking, weights=_guess_noise(draft),
    )  # fmt: skip
    # A tensor that only a Relu or Clip reads leaves 8 bits with what that makes: they are one step of a schedule.
    folded = folded_activations(draft.graph)
    noise: dict[str, float] = {}
    for error in errors:
        source = range_source(draft.graph, error.name)
        noise.setdefault(folded.get(source, source), 10 ** (-error.sqnr_db / 10))
    if not memo.budget.left_out:
        memo.ranked[key] = noise
    return noise


def _guess_noise(draft: Draft) -> dict[str, float]:
    """Returns about how large the noise of each activation is beside itself: large where few steps hold most values."""
    plan, ranges = draft.plan, draft.calibration.ranges
    guesses: dict[str, float] = {}
    for name, span in ranges.get(_MOST_VALUES, ranges["minmax"]).items():
        whole = plan.ranges[name]
        scale = plan.grids[name].scale if name in plan.grids else (whole.high - whole.low) / _STEPS
        guesses[name] = min(1.0, scale / max(span.high - span.low, _TINY))
    return guesses
