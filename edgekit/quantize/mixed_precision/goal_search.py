"""Chooses the plan to write: the result of a search is compared with other plans, and advice says what would help."""

import math
from collections.abc import Callable
from functools import partial

import msgspec

from edgekit.quantize.accuracy.loss import DEFAULT_MAX_DROP, GOOD_DB
from edgekit.quantize.accuracy.predict import MOST_CHANGED, Prediction, name_unit
from edgekit.quantize.mixed_precision import plan_search, relief
from edgekit.quantize.mixed_precision.auto import plan_minmax, plan_quantization
from edgekit.quantize.mixed_precision.candidates import store_narrow
from edgekit.quantize.mixed_precision.placement import PLACEMENT, keep_taken
from edgekit.quantize.mixed_precision.score import EQUAL_DB
from edgekit.quantize.mixed_precision.weights import keep_more
from edgekit.quantize.plan import QuantPlan, cut_tails, widen_ranges

# A drop too small to be worth another plan, a tenth of a point.
_NEGLIGIBLE = 0.001
_HEADROOM = "ranges with headroom"
# How many tensors leave 8 bits for the advice, and the advice if no plan helps.
_MANY, _ELSE = 20, "more samples may help, else leave the model in float"


def find_plan(
    search: plan_search.Search, *, max_drop: float | None, narrow: bool
) -> tuple[QuantPlan, plan_search.Searched | None]:
    """Returns the plan to write: that of `search_plan`, with a drop of at most `max_drop` (a share) if one is given.

    It is compared with minmax rounded to nearest with the same float nodes, by how far they move the outputs of all
    samples; the better plan is returned. With `narrow`, large constants that stay float get 8 or 16 bits before the
    final measurement, which is that of the written file. If more than 2 points are lost, `advice` says what would help.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    goal = DEFAULT_MAX_DROP if max_drop is None else max_drop
    most_changed = plan_search.FEW_CHANGED if search.widens else MOST_CHANGED
    wanted = plan_search.Goal(max_drop=goal, is_given=max_drop is not None, most_changed=most_changed)
    plan, searched = plan_search.search_plan(search, wanted)
    unseen = None
    if searched is not None:
        choice = _Choice(search, searched, wanted)
        _widen_weights(choice)
        _try_float(choice)
        found, drop = choice.chosen.prediction, choice.chosen.prediction.drop_estimate
        # Where no decision changed and hardly anything is lost, nothing can be saved.
        if drop is None or drop > _NEGLIGIBLE or found.top1_agreement not in {None, 1.0}:
            choice.add_better("minmax", partial(plan_minmax, search, choice.chosen.plan))
        _try_wider(choice, adopts=max_drop is not None and search.may_widen)
        _keep_taken(choice)
        unseen = _add_headroom(choice)
        plan, searched = choice.chosen.plan, choice.found
    else:
        plan = search.memo.budget.attempt(PLACEMENT, keep_taken, search, plan, searched) or plan
    if narrow:
        plan, searched = _narrow_constants(search, plan, searched, goal)
    if searched is not None and unseen is not None and unseen.drop_interval is not None:
        chosen = searched.chosen
        low, high = chosen.prediction.drop_interval or unseen.drop_interval
        told = msgspec.structs.replace(chosen.prediction, drop_interval=(low, max(high, unseen.drop_interval[1])))
        searched = msgspec.structs.replace(searched, chosen=msgspec.structs.replace(chosen, prediction=told))
    return plan, searched


def _narrow_constants(
    search: plan_search.Search, plan: QuantPlan, searched: plan_search.Searched | None, goal: float
) -> tuple[QuantPlan, plan_search.Searched | None]:
    """Returns a plan whose large float constants have 8 or 16 bits, if hardly more is lost; and its search."""
    reached = None if searched is None else searched.chosen.prediction.sqnr_db
    narrowed = search.memo.budget.attempt(
        "large constants in 8 or 16 bits", store_narrow, search.model, plan, search.calibration, reached
    )
    if narrowed is None or not narrowed.narrow.bits or searched is None:
        return narrowed or plan, searched
    wide = searched.chosen
    chosen = plan_search.measure_plan(
        search, f"{wide.step}, narrow", narrowed, plan_search.Work(wide.taken_macs, wide.integer_macs)
    )
    one, two = wide.prediction, chosen.prediction
    misses = searched.met and not two.meets(goal) and one.meets(goal)
    if misses or two.loss() > one.loss() + (EQUAL_DB if one.drop_estimate is None else _NEGLIGIBLE):
        return plan, searched
    return narrowed, msgspec.structs.replace(searched, chosen=chosen)


def _add_headroom(choice: "_Choice") -> Prediction | None:
    """Widens all ranges if new samples would reach beyond them; returns what these are expected to lose.

    The samples of the calibration never reach beyond minmax ranges, so they lose less than new ones. `cut_tails` tells
    how much less, by how far all samples move (`FloatReference.compare`): the few decisions that change would tell by
    chance. Ranges are widened by half a bit at a time, as long as that saves more than the coarser steps cost.

    Only values get headroom. One clipped sample may have a larger error than all others together; where outputs decide,
    it loses at most its own decision, which is less than coarser steps cost the others.
    """
    if choice.chosen.prediction.top1_agreement is not None:
        return None
    search, chosen, attempt = choice.search, choice.chosen, choice.search.memo.budget.attempt
    graph, drop = search.open_draft(chosen.plan).graph, chosen.prediction.drop_estimate
    enough = EQUAL_DB if drop is None else relief.find_least_saving(drop, _NEGLIGIBLE)

    def measure_unseen(step: str, plan: QuantPlan) -> tuple[Prediction, float]:
        """Returns what new samples lose, and how much more that is than what the known ones lose now."""
        cut = cut_tails(plan, search.open_draft(plan).calibration)
        if cut == chosen.plan:
            return chosen.prediction, 0.0
        written = plan_search.quantize_step(search, chosen.step, chosen.plan).model
        # Where no value is cut, this is the model of the trial.
        model = plan_search.quantize_step(search, step if cut == plan else f"{chosen.step}, left out", cut).model
        unseen = search.measure(model)
        return unseen, search.compare(model, written) or unseen.loss() - chosen.prediction.loss()

    first = attempt(_HEADROOM, measure_unseen, chosen.step, chosen.plan) if choice.allows(_HEADROOM) else None
    if first is None:
        return None
    # Each plan loses less on new samples than the one before.
    tried = [(chosen.step, chosen.plan, *first)]
    while tried[-1][-1] > enough and choice.allows(_HEADROOM):
        factor = math.sqrt(2) ** len(tried)
        step = f"{chosen.step}, ranges {factor:.2g} times as wide"
        plan = msgspec.structs.replace(chosen.plan, ranges=widen_ranges(graph, chosen.plan.ranges, factor))
        found = attempt(_HEADROOM, measure_unseen, step, plan)
        # Two that are infinite are no less than each other, nor is their difference.
        if found is None or not found[1] < tried[-1][-1] - enough:
            break
        tried.append((step, plan, *found))
    for step, plan, unseen, _ in reversed(tried[1:]):
        trial = choice.add(step, partial(msgspec.structs.replace, plan))
        # A goal of the user that is met stays met. New samples miss that of the default mode by more without headroom.
        keeps = choice.goal.is_given and chosen.prediction.meets(choice.goal.max_drop)
        if trial is None or (keeps and not trial.prediction.meets(choice.goal.max_drop)):
            continue
        choice.adopt(trial)
        if search.wider is not None:
            _try_wider(choice, adopts=False)
        elif plan_search.loses_much(trial.prediction, is_noise=search.is_noise):
            _advise(choice, f"new samples reach beyond these: {_ELSE}")
        return unseen
    return first[0]


class _Choice:
    """The result of a search, to which more trials are added; one that is better becomes the chosen one."""

    def __init__(self, search: plan_search.Search, found: plan_search.Searched, goal: plan_search.Goal) -> None:
        self.search, self.found, self.goal = search, found, goal

    @property
    def chosen(self) -> plan_search.Trial:
        """The trial to write."""
        return self.found.chosen

    def allows(self, step: str) -> bool:
        """Returns True while time is left."""
        return self.search.memo.budget.allows(step)

    def change(self, **fields: object) -> None:
        """Changes fields of the result."""
        self.found = msgspec.structs.replace(self.found, **fields)

    def adopt(self, trial: plan_search.Trial) -> None:
        """Chooses a trial."""
        self.change(chosen=trial, met=self.found.met or trial.prediction.meets(self.goal.max_drop))

    def add(
        self, step: str, make: Callable[[], QuantPlan | None], rival: plan_search.Trial | None = None
    ) -> plan_search.Trial | None:
        """Adds the trial of a plan and returns it: None if time is over or the plan was tried before."""

        def attempt() -> plan_search.Trial | None:
            plan = make()
            if plan is None or any(plan == each.plan for each in self.found.trials):
                return None
            return plan_search.measure_plan(self.search, step, plan, rival=rival)

        trial = plan_search.attempt_trial(self.search, step, attempt) if self.allows(step) else None
        if trial is not None:
            self.change(trials=(*self.found.trials, trial))
        return trial

    def add_better(self, step: str, make: Callable[[], QuantPlan | None]) -> None:
        """Adds the trial of a plan, which is chosen if it loses less than the chosen one.

        The target must take as much of the work. Of two plans the better is the one that meets the goal. If both do, or
        neither, it is the one that moves the decisions of all samples less: by the mean Hellinger distance of a
        decision (`Measure.distances`), to which every sample contributes. The few decisions that changed would tell
        less, and the ratio to the signal counts errors of logits that decide nothing.
        """
        search, chosen = self.search, self.chosen
        trial = self.add(step, make, chosen)
        # A part of the samples is enough to see that a trial is worse.
        if trial is None or trial.prediction.samples < chosen.prediction.samples:
            return
        if trial.taken_macs < chosen.taken_macs - plan_search.SAME_SHARE:
            return
        is_met, is_better = (each.prediction.meets(self.goal.max_drop) for each in (chosen, trial))
        if is_met == is_better:
            old, new = (plan_search.quantize_step(search, each.step, each.plan).model for each in (chosen, trial))
            # Where no decisions are known, the ratio to the signal is all there is.
            is_better = (search.compare(old, new) or chosen.prediction.loss() - trial.prediction.loss()) > 0
        if is_better:
            self.adopt(trial)


def _try_float(choice: _Choice) -> None:
    """Tries more nodes in float, if the chosen plan misses the goal.

    These are the nodes around tensors that 16 bits cannot represent (`find_wide_range`). A trial is chosen if it meets
    the goal or saves more than a tolerated loss. The target must still take as much of the work, and enough of it stay
    in integers, unless the trial loses little where the plan before loses much.
    """
    search, goal, before, first = choice.search, choice.goal, choice.chosen, choice.found.trials[0]
    if before.prediction.meets(goal.max_drop) or not (before.plan.judged and choice.allows(plan_search.MORE_RELIEF)):
        return
    has_collapsed = bool(first.plan.judged) and first.plan.judged[0].sqnr_db < relief.COLLAPSED_DB
    least = (
        plan_search.LEAST_INTEGER_SHARE if goal.is_given or has_collapsed else plan_search.DEFAULT_INTEGER_SHARE
    ) * first.integer_macs

    def adopt(base: plan_search.Trial, names: tuple[str, ...]) -> bool:
        """Tries a plan with some tensors in float; returns True if it is chosen."""
        if choice.chosen.prediction.meets(goal.max_drop):
            return False
        plan = partial(relief.keep_tensors_float, search, base.plan, names)
        trial = choice.add(f"{base.step}, {len(names)} tensors in float", plan)
        if trial is None:
            return False
        costs = trial.taken_macs < before.taken_macs - plan_search.SAME_SHARE or trial.integer_macs < least
        if costs and not plan_search.rescues(trial.prediction, before.prediction):
            return False
        enough = plan_search.find_tolerated_loss([choice.chosen, trial], goal.most_changed)
        saves = choice.chosen.prediction.loss(goal.most_changed) > enough or trial.prediction.meets(goal.max_drop)
        if saves:
            choice.adopt(trial)
        return saves

    start = before
    if not before.plan.wide and search.relievable:
        # Plans with 16 bits may have been rejected for what is lost because of such a tensor, as a table's input.
        wider = [trial for trial in choice.found.trials if trial.plan.wide]
        if not wider:
            return
        start = max(wider, key=lambda trial: trial.prediction.sqnr_db)
    wide_range = _find_wide_range(choice, start.plan)
    kept = [names for names in wide_range.steps if adopt(start, names)]
    # Without the noise of these tensors, plans with more tensors in 16 bits may gain what it hid before.
    for base in [each for each in choice.found.trials if kept and len(each.plan.wide) > len(start.plan.wide)]:
        adopt(base, kept[-1])
    choice.change(wide_range=wide_range.beyond_float)


def _find_wide_range(choice: _Choice, plan: QuantPlan) -> relief.WideRange:
    """Returns what 16 bits do not hold in a plan: nothing if the time is over."""
    search, first = choice.search, choice.found.trials[0].plan
    found = search.memo.budget.attempt(plan_search.MORE_RELIEF, relief.find_wide_range, search, first, plan)
    return found or relief.WideRange()


def _widen_weights(choice: _Choice) -> None:
    """Tries more bits for the worst weights if the goal is missed: 8 in place of 4, or 16 in place of 8."""
    search, chosen, goal = choice.search, choice.chosen, choice.goal.max_drop
    if chosen.prediction.meets(goal) or not choice.allows(plan_search.MORE_RELIEF):
        return
    if 4 in chosen.plan.bits.values():
        drop = chosen.prediction.drop_estimate
        # The number of changed decisions is proportional to the amplitude of the noise.
        rise = GOOD_DB - chosen.prediction.sqnr_db if drop is None else 20 * math.log10(drop / max(goal, _NEGLIGIBLE))
        choice.add_better(f"{chosen.step}, more weights in 8 bits", partial(keep_more, search, chosen.plan, rise))
    elif search.widens or not search.relievable:
        choice.add_better(f"{chosen.step}, weights in 16 bits", partial(plan_search.widen_step, search, chosen.plan))


def _keep_taken(choice: _Choice) -> None:
    """Keeps nodes in float that the target takes only so (`keep_taken`).

    That must lose no more, and keep most of the work in integers, unless no session could be made of the chosen plan.
    """
    search, chosen, attempt = choice.search, choice.chosen, choice.search.memo.budget.attempt
    plan = attempt(PLACEMENT, keep_taken, search, chosen.plan, choice.found)
    if plan is None or plan == chosen.plan:
        return
    step = f"{chosen.step}, as the target takes it"
    trial = attempt(PLACEMENT, plan_search.measure_plan, search, step, plan)
    if trial is None:
        return
    choice.change(trials=(*choice.found.trials, trial))
    enough = plan_search.find_tolerated_loss([chosen, trial], choice.goal.most_changed)
    is_as_good = trial.prediction.loss(choice.goal.most_changed) <= enough
    least = plan_search.DEFAULT_INTEGER_SHARE * chosen.integer_macs
    written = plan_search.quantize_step(search, chosen.step, chosen.plan).model
    if (is_as_good and trial.integer_macs >= least) or plan_search.check_trial(search, written).is_refused:
        choice.adopt(trial)


def _try_wider(choice: _Choice, *, adopts: bool) -> None:
    """Tries 16 bits for all activations, or many tensors out of 8 bits, for advice if much is lost or changes.

    With `adopts` the trial is chosen if it meets a goal that no other plan met.
    """
    search, chosen, wider = choice.search, choice.chosen, choice.search.wider
    misses = adopts and not choice.found.met and wider is not None
    # One more plan is cheap; without 16 bits tensors must be ranked first, which costs as much as all plans did.
    loses = plan_search.loses_much if wider is None else plan_search.may_lose_much
    is_worth = (
        misses or loses(chosen.prediction, is_noise=search.is_noise) or plan_search.changes_many(chosen.prediction)
    )
    if not is_worth or not choice.allows(plan_search.MORE_RELIEF):
        return
    step: str = wider or f"relieve {_MANY}"
    make: Callable[[], QuantPlan | None] = partial(plan_search.plan_step, search, choice.found.trials, _MANY)
    if wider is not None:
        make = partial(plan_quantization, search.model, search.calibration, search.target, wider, memo=search.memo)
    known = next((each for each in choice.found.trials if each.step == step), None)
    trial = known or choice.add(step, make)
    # A plan with tensors out of 8 bits that the search had tried is only mentioned if it loses less.
    if trial is None or (wider is None and known and trial.prediction.loss() >= chosen.prediction.loss()):
        _advise(choice, f"no plan that was tried loses less: {_ELSE}")
        return
    if misses and trial.prediction.meets(choice.goal.max_drop):
        choice.change(chosen=trial, met=True, note=f"with {wider}, no other plan does")
        return
    if wider and plan_search.loses_much(trial.prediction, is_noise=search.is_noise) and not choice.found.wide_range:
        choice.change(wide_range=_find_wide_range(choice, trial.plan).beyond_float)
    what = f"--precision {wider}" if wider else f"{_MANY} tensors out of 8 bits, as --max-drop tries it"
    _advise(choice, f"{what}: {_weigh(search, chosen, trial)}")


def _advise(choice: _Choice, advice: str) -> None:
    """Adds advice to the result, which names a tensor that neither 16 bits nor the target's floats represent."""
    if names := choice.found.wide_range:
        graph = choice.search.open_draft(choice.chosen.plan).graph
        advice += f"; {relief.explain_wide_range(graph, names[0], choice.search.target)}"
    choice.change(advice=advice)


def _weigh(search: plan_search.Search, chosen: plan_search.Trial, other: plan_search.Trial) -> str:
    """Returns in words what `other` loses, with its bytes relative to the chosen trial's and its work in integers."""
    lost = other.prediction.drop_estimate
    figure = (
        f"{other.prediction.sqnr_db:.1f} dB"
        if lost is None
        else f"{100 * lost:z.2f} {name_unit(other.prediction)} are lost"
    )
    one, two = chosen.prediction, other.prediction
    is_better = two.loss() < one.loss()
    if plan_search.changes_many(one) and two.top1_agreement is not None:
        figure += f" and {two.top1_agreement:.1%} of the decisions are the same"
    if not is_better:
        return f"{figure}, which is no better: {_ELSE}"
    now, then = (plan_search.quantize_step(search, trial.step, trial.plan).size_after for trial in (chosen, other))
    return f"{figure}, {then / now:.2f} times the bytes, {other.integer_macs:.0%} of the work in integers"
