"""Chooses how to quantize: candidates are judged on held-out samples, and the best becomes the plan."""

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import msgspec

from edgekit.model.model import Model
from edgekit.quantize import equalize
from edgekit.quantize.accuracy.loss import GOOD_DB
from edgekit.quantize.calibration.calibrate import Calibration, add_image_headroom, open_float_graph
from edgekit.quantize.channel_pairs import SUFFIX
from edgekit.quantize.gptq import Rounding
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.mixed_precision import candidates, relief
from edgekit.quantize.mixed_precision.score import has_held_out
from edgekit.quantize.mixed_precision.weights import keep_eight
from edgekit.quantize.objective import FAITHFUL_DB, find_enlarged
from edgekit.quantize.plan import Candidate, QuantPlan, draft_plan, is_relievable
from edgekit.target import Precision, Target


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A draft, and how its candidates were judged."""

    draft: candidates.Draft
    found: candidates.Judgement

    @property
    def best_db(self) -> float:
        """The signal-to-noise ratio of the best candidate."""
        return self.found.candidates[0].sqnr_db


def plan_quantization(
    model: Model,
    calibration: Calibration,
    target: Target,
    precision: Precision,
    *,
    method: str = "auto",
    memo: candidates.Memo | None = None,
) -> QuantPlan:
    """Returns the plan of quantizing a prepared float model for a target.

    With the method "auto" several range methods and roundings are built and judged on the held-out samples of the
    calibration. The one closest to the float model is planned, so on these samples it is never worse than minmax with
    weights rounded to nearest. Below 40 dB, channels of unequal size are equalized if that helps. No tensor gets more
    than the bits of the precision because it loses much: `search_plan` compares such plans.

    Without held-out samples (fewer than 8 in all) the plan is minmax with corrected biases. A named range method is
    used without a search. A `memo` from another target saves what both have in common. When its time budget ends, the
    best candidate so far is planned.

    Raises:
        UsageError: the precision is no integer precision, there is no such method, or the statistics are gone.
        DataError: the calibration is of another model.
        ModelError: no node of the model can be quantized.
    """
    graph = open_float_graph(model, calibration)
    plan = draft_plan(model, graph, calibration, target, precision)
    if method != "auto":
        return candidates.choose_ranges(graph, plan, calibration, method, "nearest")
    rounding: Rounding = "bias" if calibration.statistics else "nearest"
    plain = candidates.choose_ranges(graph, plan, calibration, "minmax", rounding)
    memo = candidates.Memo() if memo is None else memo
    if not (calibration.statistics and find_compared_tensors(graph) and has_held_out(Path(calibration.statistics))):
        return plain
    if not memo.budget.allows("range methods and roundings"):
        return plain
    subject = candidates.Subject(model=model, calibration=calibration, target=target, precision=precision, memo=memo)
    # Judging takes a session of each candidate; if ONNX Runtime cannot make one, the plan is one that needs no judging.
    return memo.budget.attempt("range methods and roundings", _plan_best, subject) or plain


def plan_minmax(subject: candidates.Subject, plan: QuantPlan) -> QuantPlan:
    """Returns minmax rounded to nearest, with the same tensors and nodes out of 8 bits as in another plan of the model.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    graph, calibration = subject.graph, subject.calibration
    draft = draft_plan(subject.model, graph, calibration, subject.target, plan.precision)
    names, known = {node.name for node in graph.nodes}, {node.name for node in draft.float_nodes}
    added = tuple(node for node in plan.float_nodes if node.name in names - known)
    # Tensors with equalized channels have names of their own in the other plan.
    own = dict.fromkeys(name.removesuffix(SUFFIX) if plan.factors else name for name in plan.wide)
    wide = [name for name in own if name in calibration.ranges["minmax"] or graph.is_float_constant(name)]
    relieved = relief.relieve_tensors(graph, draft, wide, calibration, widens=True)
    return msgspec.structs.replace(
        draft,
        float_nodes=(*draft.float_nodes, *added),
        wide=relieved.wide | draft.wide,
        bits=plan.bits,
        judged=plan.judged,
    )


def _plan_best(subject: candidates.Subject) -> QuantPlan:
    """Returns the best plan of two drafts: unchanged and equalized.

    Roundings that learn from samples are slow: if runs are long, only the best draft gets them, else each that could be
    the best with float weights, which no rounding improves on.
    """
    unequalized = _judge(subject, {})
    equalized = subject.memo.budget.attempt("equalized channels", _equalize, subject, unequalized)
    is_better = equalized is not None and equalized.best_db > unequalized.best_db + candidates.NOTABLE_DB
    lead = _learn(subject, equalized if equalized is not None and is_better else unequalized)
    drafts = [each for each in (unequalized, equalized) if each is not None]
    judged = dict.fromkeys(chain.from_iterable(each.found.candidates for each in (*drafts, lead)))
    plan, tried = _finish(subject, lead)
    return msgspec.structs.replace(
        plan, judged=candidates.sort_candidates([*candidates.sort_candidates([*judged]), *tried])
    )


def _learn(subject: candidates.Subject, judged: Judged) -> Judged:
    """Returns a judged draft with roundings that learn from samples among its candidates, where they may gain."""
    return Judged(draft=judged.draft, found=candidates.learn_roundings(judged.draft, judged.found, subject.memo))


def _judge(
    subject: candidates.Subject,
    factors: Mapping[str, tuple[float, ...]],
    method: str | None = None,
    reached_db: float = -math.inf,
) -> Judged:
    """Returns the judged draft with channels scaled by `factors`; `method` is passed to `judge_draft`.

    `reached_db` is the ratio of the best draft before.
    """
    graph = equalize.equalize_graph(subject.graph, factors, Path(subject.calibration.statistics))
    calibration = add_image_headroom(graph, equalize.equalize_calibration(subject.graph, subject.calibration, factors))
    plan = draft_plan(subject.model, graph, calibration, subject.target, subject.precision)
    plan, enlarged = msgspec.structs.replace(plan, factors=dict(factors)), find_enlarged(graph, calibration)
    # Interpolated class logits leave 8 bits; no layer with weights changes.
    if enlarged and is_relievable(plan):
        plan = relief.relieve_tensors(graph, plan, enlarged, calibration, widens=subject.widens)
    draft = candidates.Draft(graph=graph, calibration=calibration, plan=plan)
    judged = Judged(draft=draft, found=candidates.judge_draft(draft, subject.memo, method=method))
    return _learn(subject, judged) if draft.effort.is_short and judged.found.unrounded_db > reached_db else judged


def _equalize(subject: candidates.Subject, unequalized: Judged) -> Judged | None:
    """Returns the draft with equalized channels; None if there are none to equalize, or the ratio is high enough."""
    judged = unequalized.found.candidates
    # The best ratio of those whose rounding does not learn from samples.
    quick_db = max(each.sqnr_db for each in judged if each.rounding in candidates.QUICK)
    # Activations of 16 bits can represent unequal channels, but the weights that read these are unequal at any width.
    if quick_db >= FAITHFUL_DB or not subject.memo.budget.allows("equalized channels"):
        return None
    statistics, seen = Path(subject.calibration.statistics), subject.calibration.ranges["minmax"]
    pairs = equalize.measure_pairs(subject.graph, statistics, seen)
    factors = equalize.choose_factors(subject.graph, pairs, unequalized.draft.plan.axes.keys())
    if not factors:
        return None
    method = None if unequalized.draft.effort.is_short else judged[0].method
    return _judge(subject, factors, method, unequalized.best_db)


def _finish(subject: candidates.Subject, judged: Judged) -> tuple[QuantPlan, tuple[Candidate, ...]]:
    """Returns the best plan of a draft, and the candidates that were tried for it."""
    lead, budget = judged.found.candidates[0], subject.memo.budget
    draft = judged.draft.choose(lead.method, lead.rounding)
    plan, kept = budget.attempt("weights kept at 8 bits", keep_eight, draft, lead, budget) or (draft.plan, ())
    ratio = max(each.sqnr_db for each in (lead, *kept))
    # In a collapsed plan the gain of a shorter range does not show; `relieve_step` fits inputs later.
    if ratio >= GOOD_DB or (ratio < relief.COLLAPSED_DB and is_relievable(plan)):
        return plan, kept
    is_judged = plan == judged.draft.choose(judged.found.method, lead.rounding).plan
    draft, reached_db = msgspec.structs.replace(draft, plan=plan), judged.found.unrounded_db
    fitted = budget.attempt("ranges of inputs", relief.fit_inputs, draft, reached_db if is_judged else None)
    if fitted is None or fitted == plan:
        return plan, kept
    return fitted, (*kept, candidates.judge_plan(msgspec.structs.replace(draft, plan=fitted)))
