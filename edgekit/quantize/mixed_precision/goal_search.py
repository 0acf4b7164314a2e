"""The search for a plan: from cheap plans to expensive ones, until the estimated drop meets the goal."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgekit._files import copy_file
from edgekit.check.check import check_model
from edgekit.check.macs import count_macs
from edgekit.model.model import Model
from edgekit.progress import Progress, say_nothing
from edgekit.quantize.accuracy.loss import GOOD_DB, MEASURES, PLAIN_DROP
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.apply import QuantizedModel, quantize_model
from edgekit.quantize.calibration.calibrate import Calibration, open_float_graph
from edgekit.quantize.mixed_precision.auto import plan_minmax, plan_quantization
from edgekit.quantize.mixed_precision.candidates import Memo, store_narrow
from edgekit.quantize.mixed_precision.ladder import (
    WideRange,
    explain_wide_range,
    find_wide_range,
    lift_tensors,
    name_worst,
)
from edgekit.quantize.mixed_precision.own_state import cut_ranges, find_state
from edgekit.quantize.mixed_precision.relief import (
    COLLAPSED_DB,
    LEAST_GAIN_DB,
    change_method,
    open_draft,
    relieve_step,
    rise_db,
    weigh_relief,
)
from edgekit.quantize.mixed_precision.score import EVEN_DB
from edgekit.quantize.mixed_precision.trials import State, Trial
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.ranges import AUTO_METHODS
from edgekit.target import INTEGERS, Precision, Target

# How many of the most harmful tensors may leave 8 bits, about 2.5 times as many at each step. Ranking more tensors
# takes more runs, so the first few are ranked by themselves.
_FEW, _MORE_THAN_FEW = (1, 3, 8), (20, 40, 80)
# The plain mode keeps at least this share of the work in integers: a choice.
_PLAIN_INTEGER = 0.75
# A plan with more tensors out of 8 bits must save at least this much of the drop. Chosen after a small detector with
# SiLU, which without this bound kept nine nodes in float for 0.1 points (measured once, the program is gone).
_WORTH = 0.002
# A drop too small to be worth another plan, a tenth of a point; and one that is worth advice, two points.
_NEGLIGIBLE, _MUCH = 0.001, 0.02
# How many tensors leave 8 bits for the advice, and the advice if no plan helps.
_MANY, _ELSE = 20, "more samples may help, else leave the model in float"
# Shares of work that differ by less count as equal.
_SAME_SHARE = 0.005
_HALF = 0.5
# The assumed error of a forecast: a factor for a drop, dB for a ratio. Choices, so wide that only steps which would
# miss the goal are skipped.
_NEAR, _NEAR_DB = 2.0, 2.0
# The least share of the noise that a forecast leaves; not 0, because later forecasts are divided by it.
_NONE_LEFT = 1e-9
_MORE = "plans with more tensors out of 8 bits"
_Cut = Callable[[Model], Prediction | None]
"""Returns what a quantized model loses over a part of the samples if that is enough to see; else None."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be quantized, and `measure`, which returns what a quantized model of it loses.

    `compare` returns by how much farther the first of two quantized models moves the decisions, over the same samples,
    and 0 where none are known. `race` returns what the second of two loses, if a part of the samples shows that it is
    clearly worse than the first. `screen` returns what a quantized model loses over the smallest of these parts if,
    by the function given to it, that is too much. Both return None if only all samples can tell.
    `work` is a folder for intermediate files. The `memo` may be shared with other targets, and says how long the search
    may take. `tried` holds the models that were written there, by the step of the search. With `may_widen` the user did
    not ask for this precision: if none of its plans meets a goal, 16 bits for all activations may be used. `feeds` has
    the inputs that hold state of the step before, each with the output that it comes from.
    """

    model: Model
    calibration: Calibration
    target: Target
    precision: Precision
    measure: Callable[[Model], Prediction]
    compare: Callable[[Model, Model], float]
    race: Callable[[Model, Model], Prediction | None] = lambda _first, _second: None
    screen: Callable[[Model, Callable[[Prediction], bool]], Prediction | None] = lambda _model, _misses: None
    work: Path
    memo: Memo = msgspec.field(default_factory=Memo)
    progress: Progress = say_nothing
    may_widen: bool = False
    feeds: Mapping[str, str] = {}
    tried: dict[str, tuple[QuantPlan, QuantizedModel]] = {}

    @property
    def wider(self) -> Precision | None:
        """The precision with 16 bits for all activations, None if the target has none."""
        at = self.target.quantization.at
        few = at(self.precision).weight_bits
        for wide in self.target.precisions if self.relievable else ():
            if wide in INTEGERS and at(wide).activation == "uint16" and at(wide).weight_bits == few:
                return wide
        return None

    @property
    def relievable(self) -> bool:
        """True if activations have 8 bits, so that sensitive ones may get more."""
        return self.target.quantization.at(self.precision).activation != "uint16"


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search: every trial in order, and the chosen one; `note` qualifies `met`.

    If much is lost, `advice` says what would lose less, with the measured figure. `wide_range` names tensors of 16 bits
    that make much of the noise, and that the target's float holds no better.
    """

    trials: tuple[Trial, ...]
    chosen: Trial
    met: bool
    note: str = ""
    advice: str = ""
    wide_range: tuple[str, ...] = ()


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A drop of at most `max_drop` (a share): the user asked for it (`is_asked`), or it is that of the plain mode."""

    max_drop: float = PLAIN_DROP
    is_asked: bool = False

    def may_meet(self, prediction: Prediction, share: float) -> bool:
        """Returns True if a plan may meet the goal once this share of the noise of its activations is gone."""
        is_unknown = prediction.drop_estimate is None
        return _least_drop(prediction, share) <= (_NEAR_DB - GOOD_DB if is_unknown else _NEAR * self.max_drop)


def find_plan(
    search: Search, *, max_drop: float | None, narrow: bool, state: State | None = None
) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan to write: that of `search_plan`, with a drop of at most `max_drop` (a share) if one is given.

    It is compared with plain minmax with the same float nodes, and with other range methods where much is lost, by the
    decisions of the outputs over all samples; the better plan is returned. With `narrow`, large constants that stay
    float get 8 or 16 bits before the final measurement, which is that of the written file. Where more than 2 points are
    lost, `advice` says what would help.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    goal = PLAIN_DROP if max_drop is None else max_drop
    plan, searched = search_plan(search, Goal(max_drop=goal, is_asked=max_drop is not None), state)
    if searched is not None:
        searched = _lift_wide(search, searched, goal, is_asked=max_drop is not None)
        searched = _hold_against_rivals(search, searched, goal)
        searched = _cut_state(search, searched, goal)
        searched = _try_wider(search, searched, goal, adopts=max_drop is not None and search.may_widen)
        plan = searched.chosen.plan
    if not narrow:
        return plan, searched
    reached = None if searched is None else searched.chosen.prediction.sqnr_db
    store = partial(store_narrow, search.model, plan, search.calibration, reached)
    narrowed = search.memo.budget.attempt("large constants in 8 or 16 bits", store)
    if narrowed is None or not narrowed.narrow.bits or searched is None:
        return narrowed or plan, searched
    wide = searched.chosen
    chosen = _measure(search, f"{wide.step}, narrow", narrowed, _Work(wide.taken_macs, wide.integer_macs))
    misses = searched.met and not chosen.prediction.meets(goal) and wide.prediction.meets(goal)
    if misses or _drop(chosen) > _drop(wide) + (_NEGLIGIBLE if wide.prediction.drop_estimate is not None else EVEN_DB):
        return plan, searched
    return narrowed, msgspec.structs.replace(searched, chosen=chosen)


def _hold_against_rivals(search: Search, searched: Searched, max_drop: float) -> Searched:
    """Returns the search result after its plan was compared with others, each of which is chosen if it loses less.

    The others are plain minmax, and where more than two points are lost, the plan with other range methods: the method
    was chosen by 16 samples, before tensors left 8 bits.

    Of two plans the better is the one that meets the goal. If both do, or neither, it is the one that moves the
    decisions of all samples less: by the mean Hellinger distance of a decision (`Measure.soften`), to which every
    sample contributes. The few decisions that changed would tell less, and the ratio to the signal counts errors of
    logits that decide nothing.
    """
    first, found = searched.chosen, searched.chosen.prediction
    # No decision changed, so none can be saved.
    if found.drop_estimate is not None and found.drop_estimate <= _NEGLIGIBLE and found.top1_agreement in {None, 1.0}:
        return searched
    plain = partial(plan_minmax, search.model, search.calibration, search.target, first.plan)
    rivals: dict[str, Callable[[], QuantPlan | None]] = {"minmax": plain}
    if _loses_much(found) and search.relievable:
        for method in AUTO_METHODS:
            rivals[f"{first.step}, {method}"] = partial(
                change_method, search.model, search.calibration, first.plan, method
            )
    for step, make in rivals.items():
        searched, trial = _add_trial(search, searched, step, make, partial(_race, search, searched.chosen))
        if trial is not None and _loses_less(search, searched.chosen, trial, max_drop):
            is_met = searched.met or trial.prediction.meets(max_drop)
            searched = msgspec.structs.replace(searched, chosen=trial, met=is_met)
    return searched


def _lift_wide(search: Search, searched: Searched, max_drop: float, *, is_asked: bool) -> Searched:
    """Returns the search result with trials in which tensors that 16 bits do not hold are in float (`find_wide_range`).

    They are made where the chosen plan misses the goal. One is chosen if that saves more than it costs, and the target
    still takes as much of the work, of which enough stays in integers.
    """
    before, memo = searched.chosen, search.memo
    is_wide = bool(before.plan.wide) or not search.relievable
    if before.prediction.meets(max_drop) or not (is_wide and before.plan.judged and memo.budget.allows(_MORE)):
        return searched
    first = searched.trials[0].plan
    find = partial(find_wide_range, search.model, search.calibration, search.target, first, before.plan, memo)
    wide_range = memo.budget.attempt(_MORE, find) or WideRange()
    share = _HALF if is_asked or first.judged[0].sqnr_db < COLLAPSED_DB else _PLAIN_INTEGER
    least = share * searched.trials[0].integer_macs
    lifted: tuple[str, ...] = ()
    # Without the noise of these tensors, more 16 bits for others may pay: they hardly showed beside it.
    wider = [each for each in searched.trials if len(each.plan.wide) > len(before.plan.wide)]
    for base, names in [*((before, names) for names in wide_range.steps), *((base, None) for base in wider)]:
        if searched.chosen.prediction.meets(max_drop) or not (names or lifted):
            break
        make = partial(lift_tensors, search.model, search.calibration, base.plan, names or lifted)
        step = f"{base.step}, {len(names or lifted)} in float"
        searched, trial = _add_trial(search, searched, step, make, lambda _model: None)
        if trial is None:
            continue
        is_taken = trial.taken_macs >= before.taken_macs - _SAME_SHARE and trial.integer_macs >= least
        meets = trial.prediction.meets(max_drop)
        if is_taken and (meets or _drop(searched.chosen) > _add_worth([searched.chosen, trial])):
            searched = msgspec.structs.replace(searched, chosen=trial, met=searched.met or meets)
            lifted = names or lifted
    return msgspec.structs.replace(searched, wide_range=wide_range.lost)


def _cut_state(search: Search, searched: Searched, max_drop: float) -> Searched:
    """Returns the search result with shorter ranges of state, as long as less is lost over whole sequences.

    Example: the cell state of an LSTM counts up to 300, but reaches its outputs through a Tanh, which is flat beyond 9.
    With the range that samples show, a step of 16 bits is 0.009, and its errors add up from step to step.
    """
    first, plan = searched.chosen, searched.chosen.plan
    if not search.feeds or _drop(first) <= _NEGLIGIBLE:
        return searched
    draft, spans = open_draft(search.model, search.calibration, plan), {**plan.ranges, **plan.wide}
    names = [name for name in find_state(draft.graph, search.feeds) if name in spans]
    if not names or draft.effort.is_bounded:
        return searched
    limit, is_better = max(max(-spans[name].low, spans[name].high) for name in names), True
    while is_better and limit > 0:
        limit /= 2
        make = partial(cut_ranges, plan, names, limit)
        searched, trial = _add_trial(search, searched, f"{first.step}, state within {limit:.3g}", make)
        is_better = trial is not None and _loses_less(search, searched.chosen, trial, max_drop)
        if trial is not None and is_better:
            is_met = searched.met or trial.prediction.meets(max_drop)
            searched = msgspec.structs.replace(searched, chosen=trial, met=is_met)
    return searched


def _loses_less(search: Search, chosen: Trial, other: Trial, max_drop: float) -> bool:
    # It was clearly worse after some of the samples.
    if not other.is_whole:
        return False
    is_met, meets = (each.prediction.meets(max_drop) for each in (chosen, other))
    if is_met != meets:
        return meets
    # Where no decisions are known, the ratio to the signal is all there is.
    farther = search.compare(*(_quantize(search, each.step, each.plan).model for each in (chosen, other)))
    return (farther or _drop(chosen) - _drop(other)) > 0


def _add_trial(
    search: Search, searched: Searched, step: str, make: Callable[[], QuantPlan | None], cut: _Cut | None = None
) -> tuple[Searched, Trial | None]:
    """Returns the search result with one more trial, and that trial: None if time is over or its plan was tried."""

    def attempt() -> Trial | None:
        plan = make()
        if plan is None or any(plan == each.plan for each in searched.trials):
            return None
        return _measure(search, step, plan, cut=cut)

    trial = search.memo.budget.attempt(step, attempt) if search.memo.budget.allows(step) else None
    if trial is None:
        return searched, None
    return msgspec.structs.replace(searched, trials=(*searched.trials, trial)), trial


def _try_wider(search: Search, searched: Searched, max_drop: float, *, adopts: bool) -> Searched:
    """Returns the search result with one more trial: 16 bits for all activations, or many tensors out of 8 bits.

    It is tried if much is lost. With `adopts` it is chosen if it meets a goal that no other plan met.
    """
    chosen, wider = searched.chosen, search.wider
    misses = adopts and not searched.met and wider is not None
    if not (misses or _loses_much(chosen.prediction)) or not search.memo.budget.allows(_MORE):
        return searched
    step: str = wider or f"relieve {_MANY}"
    make: Callable[[], QuantPlan | None] = partial(_plan_step, search, searched.trials, _MANY)
    if wider is not None:
        make = partial(plan_quantization, search.model, search.calibration, search.target, wider, memo=search.memo)
    known = trial = next((each for each in searched.trials if each.step == step), None)
    if known is None:
        searched, trial = _add_trial(search, searched, step, make)
    # Of plans that the search tried anyway, only one that loses less is worth a word.
    if trial is None or (wider is None and trial is known and not (trial.is_whole and _drop(trial) < _drop(chosen))):
        return _advise(search, searched, f"no plan that was tried loses less: {_ELSE}")
    if misses and trial.prediction.meets(max_drop):
        return msgspec.structs.replace(searched, chosen=trial, met=True, note=f"with {wider}, no other plan does")
    what = f"--precision {wider}" if wider else f"{_MANY} tensors out of 8 bits, as --max-drop tries it"
    return _advise(search, searched, f"{what}: {_weigh(search, chosen, trial)}")


def _advise(search: Search, searched: Searched, advice: str) -> Searched:
    """Returns the search result with advice, which names the tensor that loses most."""
    first, worst = searched.trials[0].plan, ""
    if searched.wide_range:
        worst = explain_wide_range(searched.wide_range[0], search.target)
    elif first.judged:
        draft = open_draft(search.model, search.calibration, first)
        name = partial(name_worst, draft, searched.chosen.plan, search.memo)
        worst = search.memo.budget.attempt("the tensor that loses most", name) or ""
    return msgspec.structs.replace(searched, advice="; ".join(part for part in (advice, worst) if part))


def _loses_much(prediction: Prediction) -> bool:
    drop = prediction.drop_estimate
    return prediction.sqnr_db < COLLAPSED_DB if drop is None else drop > _MUCH and not _is_near(prediction)


def _weigh(search: Search, chosen: Trial, other: Trial) -> str:
    """Returns in words what `other` loses, and its bytes and work compared with the chosen trial."""
    lost = other.prediction.drop_estimate
    figure = f"{other.prediction.sqnr_db:.1f} dB" if lost is None else f"{100 * lost:.2f} points are lost"
    if _drop(other) >= _drop(chosen):
        return f"{figure}, which is no better: {_ELSE}"
    now, then = (_quantize(search, trial.step, trial.plan).size_after for trial in (chosen, other))
    return f"{figure}, {then / now:.2f} times the bytes, {other.integer_macs:.0%} of the work in integers"


def search_plan(search: Search, goal: Goal, state: State | None = None) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan that meets the goal with the fewest tensors out of 8 bits, and all trials.

    1. The first plan keeps all activations in 8 bits. In the plain mode it is returned without trials (None) if there
       are too few samples to judge by, or no time is left.
    2. Its drop is measured (`Search.measure`), as that of every later plan. If it meets the goal, the search ends.
    3. Else tensors are ranked by the noise that they cause, and plans with 1, 3, 8, then 20, 40 and 80 of them out of
       8 bits are considered: in 16 bits if the target supports that, else in float. Each plan costs a measurement, so
       one that cannot meet the goal, by the noise that it would remove, is skipped (`_try_plans`).
    4. The search ends at the first plan that meets the goal, if the target still runs as much of the work as with the
       first plan. Else the largest number of tensors that pays is tried, and then smaller ones, to see whether they
       do as well.
    5. `choose_trial` (the user gave a goal) or `choose_cheapest` (plain mode) selects one of the trials.

    Each trial is written to the file of the `state`, from which an interrupted search continues.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    known = [trial.plan for trial in state.trials if trial.step == "all"] if state is not None else []
    search.progress(f"{search.target.name}: choose ranges and roundings")
    first = known[0] if known else plan_quantization(
        search.model, search.calibration, search.target, search.precision, relieve=False, memo=search.memo
    )  # fmt: skip
    if not goal.is_asked and not (first.judged and search.memo.budget.allows(_MORE)):
        return first, None
    trials = _complete_contenders(search, goal, _try_plans(search, goal, first, state))
    if not trials:
        return first, None
    searched = _choose([trial for trial in trials if trial.is_whole], goal)
    return searched.chosen.plan, msgspec.structs.replace(searched, trials=tuple(trials))


def _choose(trials: Sequence[Trial], goal: Goal) -> Searched:
    return choose_trial(trials, goal.max_drop) if goal.is_asked else choose_cheapest(trials, goal)


def _complete_contenders(search: Search, goal: Goal, trials: Sequence[Trial]) -> list[Trial]:
    """Returns the trials; all but those that are clearly worse than the chosen one are measured over all samples."""
    contenders = list(trials)
    while contenders and not (chosen := _choose(contenders, goal).chosen).is_whole:
        contenders[contenders.index(chosen)] = _complete(search, chosen)
    return [each if each.is_whole else _complete(search, each, rival=chosen) for each in contenders]


def _complete(search: Search, trial: Trial, *, rival: Trial | None = None) -> Trial:
    """Returns a trial measured over all samples, or until it is clearly worse than a `rival`."""
    cut = None if rival is None else partial(_race, search, rival)
    prediction, is_whole = _predict(search, _quantize(search, trial.step, trial.plan).model, cut)
    return msgspec.structs.replace(trial, prediction=prediction, is_whole=is_whole)


def _is_near(prediction: Prediction) -> bool:
    """Returns True if outputs are plain values near the float model's: they make no decision that could change."""
    return prediction.measure == MEASURES["values"].name and prediction.sqnr_db >= GOOD_DB


def write_chosen(search: Search, plan: QuantPlan, searched: Searched | None, out: Path) -> QuantizedModel:
    """Writes the model of a plan to `out`: a copy of the file from the search if there is one, else a new one.

    Raises:
        EdgekitError: as for `quantize_model`.
    """
    known, quantized = search.tried.get(searched.chosen.step, (None, None)) if searched is not None else (None, None)
    # A model refers to its external data by file name, so it cannot be copied under another name.
    if quantized is None or known != plan or quantized.model.external_files:
        return quantize_model(search.model, plan, search.calibration, out)
    copy_file(quantized.model.path, out)
    model = msgspec.structs.replace(quantized.model, path=out, name=out.name.removesuffix(".onnx"))
    return msgspec.structs.replace(quantized, model=model)


def choose_cheapest(trials: Sequence[Trial], goal: Goal) -> Searched:
    """Returns the trial of the plain mode: the fewest tensors out of 8 bits after which more hardly save anything.

    That is the first trial that meets the goal, or whose drop is so near the least drop of all trials that the
    difference is not worth more tensors out of 8 bits (`_add_worth`).
    """
    enough = _add_worth(trials)
    chosen = next(trial for trial in trials if trial.prediction.meets(goal.max_drop) or _drop(trial) <= enough)
    return Searched(trials=tuple(trials), chosen=chosen, met=True)


def choose_trial(trials: Sequence[Trial], max_drop: float) -> Searched:
    """Returns, of the trials that meet the goal, the one with most work on the target; else the best trial.

    If that one keeps less than half of the work in integers, another is used instead, if it keeps half: one that misses
    the goal by less than the sampling error and by no more than the goal itself, or, if none meets the goal, one whose
    drop is larger by no more than the goal.
    """
    meeting = [trial for trial in trials if trial.prediction.meets(max_drop)]
    if not meeting:
        return Searched(trials=tuple(trials), chosen=_choose_nearest(trials, max_drop), met=False)
    chosen = _choose_most_taken(meeting)
    near = [
        trial
        for trial in trials
        if trial.integer_macs >= _HALF
        and (trial.prediction.drop_estimate is not None and trial.prediction.drop_estimate <= 2 * max_drop)
        and (trial.prediction.drop_interval is not None and trial.prediction.drop_interval[0] <= max_drop)
    ]
    if chosen.integer_macs >= _HALF or not near:
        return Searched(trials=tuple(trials), chosen=chosen, met=True)
    note = f"within the sampling error; '{chosen.step}' leaves {chosen.integer_macs:.0%} of the work in integers"
    return Searched(trials=tuple(trials), chosen=_choose_most_taken(near), met=True, note=note)


def _choose_nearest(trials: Sequence[Trial], max_drop: float) -> Trial:
    def rank(trial: Trial) -> tuple[float, float]:
        return _drop(trial), -trial.prediction.sqnr_db

    best = min(trials, key=rank)
    near = [
        trial
        for trial in trials
        if trial.integer_macs >= _HALF
        and trial.prediction.drop_estimate is not None
        and _drop(trial) <= _drop(best) + max_drop
    ]
    return best if best.integer_macs >= _HALF else min(near, key=rank, default=best)


def _choose_most_taken(trials: Sequence[Trial]) -> Trial:
    return max(trials, key=lambda trial: round(trial.taken_macs / _SAME_SHARE))


def _try_plans(search: Search, goal: Goal, first: QuantPlan, state: State | None) -> list[Trial]:
    """Returns the trials, by rising number of tensors out of 8 bits.

    Each is measured over a part of the samples, and over all if it may meet the goal. Some more follow once one is to
    be chosen (`_complete_contenders`).

    1. The plan with no tensor out of 8 bits is measured. It is the only one if the target has no wider precision, or,
       in the plain mode, if outputs are plain values that hardly differ.
    2. Few tensors (1, 3, 8) are ranked first, then many (20, 40, 80), because a longer ranking takes more runs. The
       ranking forecasts the share of the noise that each number of tensors removes, which bounds the drop from below.
    3. Rising numbers are tried, except those whose bound is more than twice the goal. The first that is good enough
       ends the search.
    4. If none is good enough, the largest number is tried that removes enough noise to pay for its cost.
    5. Then fewer tensors may do: among the numbers between the chosen trial and the next smaller trial, the middle
       one of those whose bound allows a good enough drop is tried, until none is left.
    """
    attempts = _Attempts(search, goal, first, state)
    plain = attempts.run(0)
    if plain is None or not search.relievable or (not goal.is_asked and _is_near(plain.prediction)):
        return attempts.in_order
    last, left = plain, {0: 1.0}
    for counts in (_FEW, _MORE_THAN_FEW):
        if attempts.is_enough(last) or not search.memo.budget.allows(_MORE):
            return attempts.in_order
        weigh = partial(weigh_relief, search.model, search.calibration, first, counts, search.memo)
        shares = search.memo.budget.attempt(_MORE, weigh)
        if shares is None:
            return attempts.in_order
        left |= {count: max(1 - share, _NONE_LEFT) for count, share in shares.items()}
        for count in counts:
            # The last trial is without part of the noise already.
            if goal.may_meet(last.prediction, 1 - left[count] / left[max(attempts.trials)]):
                trial = attempts.run(count)
                if trial is None:
                    break
                if attempts.is_enough(trial):
                    return attempts.in_order
                last = trial
    for count in sorted(left, reverse=True):
        pays = goal.is_asked or rise_db(1 - left[count]) >= LEAST_GAIN_DB
        if count in attempts.trials or (pays and attempts.run(count, may_meet=False)):
            break
    while True:
        chosen = attempts.choose()
        below = max((count for count in attempts.trials if count < chosen), default=chosen)
        enough = max(goal.max_drop, _add_worth(attempts.in_order))
        fewer = [count for count in left if below < count < chosen]
        fewer = [count for count in fewer if _least_drop(plain.prediction, 1 - left[count]) <= enough]
        if not fewer or attempts.run(fewer[len(fewer) // 2]) is None:
            return attempts.in_order


class _Attempts:
    """The trials of a search, by the number of tensors out of 8 bits; `first` is the plan with none."""

    def __init__(self, search: Search, goal: Goal, first: QuantPlan, state: State | None) -> None:
        self._search, self._goal, self._first, self._state = search, goal, first, state
        self._known = {trial.step: trial for trial in state.trials} if state is not None else {}
        self._most = 1 + (len(_FEW + _MORE_THAN_FEW) if search.relievable else 0)
        self._seconds: list[float] = []
        self.trials: dict[int, Trial] = {}

    @property
    def in_order(self) -> list[Trial]:
        """The trials by rising number of tensors."""
        return [self.trials[count] for count in sorted(self.trials)]

    def run(self, count: int, *, may_meet: bool = True) -> Trial | None:
        """Returns a trial; None if time is over, there are too few tensors, or too little would stay in integers."""
        step, began = f"relieve {count}" if count else "all", time.monotonic()
        done, left = len(self._seconds), ", known" if step in self._known else ""
        if done and not left:
            left = f", at most {sum(self._seconds) / done * (self._most - done):.0f} s left"
        self._search.progress(f"{self._search.target.name}: try {done + 1} of {self._most} ({step}){left}")
        # With a goal the first plan must be measured, whatever the budget; the plain mode may write an unmeasured plan.
        is_needed, plan = not count and self._goal.is_asked, partial(self._try, step, count, may_meet=may_meet)
        trial = self._known.get(step)
        if trial is None:
            trial = plan() if is_needed else self._search.memo.budget.attempt(f"the plan '{step}'", plan)
        self._seconds.append(time.monotonic() - began)
        if trial is None:
            return None
        self.trials[count] = trial
        # A step that the budget cut short is not stored: a later search would take it for complete.
        if self._state is not None and not self._search.memo.budget.left_out:
            self._state.write(self.in_order)
        return trial

    def is_enough(self, trial: Trial) -> bool:
        """Returns True if a trial meets the goal and the target runs as much of the work as with the first."""
        return (
            trial.prediction.meets(self._goal.max_drop) and trial.taken_macs >= self.trials[0].taken_macs - _SAME_SHARE
        )

    def choose(self) -> int:
        """Returns the number of tensors of the trial that would be chosen."""
        contenders = _complete_contenders(self._search, self._goal, self.in_order)
        self.trials = dict(zip(sorted(self.trials), contenders, strict=True))
        chosen = _choose([trial for trial in contenders if trial.is_whole], self._goal).chosen
        return next(count for count, trial in self.trials.items() if trial is chosen)

    def _try(self, step: str, count: int, *, may_meet: bool) -> Trial | None:
        """Returns a trial that keeps enough of the first plan's work in integers: in the plain mode most of it.

        Float nodes do not run on an accelerator. For a collapsed model half of the work is enough, or any share if the
        plan meets the goal.
        """
        cut = partial(_screen, self._search, self._goal)
        if not count:
            return _measure(self._search, step, self._first, cut=cut)
        fewer = [trial for number, trial in sorted(self.trials.items()) if number < count]
        plan = _plan_step(self._search, fewer, count)
        if plan is None:
            return None
        has_collapsed = bool(self._first.judged) and self._first.judged[0].sqnr_db < COLLAPSED_DB
        share = 0.0 if self._goal.is_asked else _HALF if has_collapsed else _PLAIN_INTEGER
        least, must_keep = share * self.trials[0].integer_macs, not (has_collapsed and may_meet)
        # A model is not written to find out that too little of it is left in integers, where its plan shows that.
        if must_keep and share and bound_integer(self._search, plan) < least:
            return None
        work = _share_work(self._search, step, plan)
        is_kept = work.integer >= least
        if not is_kept and must_keep:
            return None
        trial = _measure(self._search, step, plan, work, cut=cut)
        return trial if is_kept or trial.prediction.meets(self._goal.max_drop) else None


def _add_worth(trials: Sequence[Trial]) -> float:
    """Returns the loss up to which a plan with fewer tensors out of 8 bits is preferred to that with the least loss.

    That is 0.2 points more, or what a decibel of noise is worth (12 %): decisions change in proportion to its
    amplitude.
    """
    best = min(trials, key=_drop)
    drop = best.prediction.drop_estimate
    return _drop(best) + LEAST_GAIN_DB if drop is None else max(drop + _WORTH, drop * 10 ** (LEAST_GAIN_DB / 20))


def _least_drop(prediction: Prediction, share: float) -> float:
    """Returns a lower bound of the drop (as `_drop`) once a share of the noise of the activations is gone.

    A drop falls no faster than the power of the noise.
    """
    if prediction.drop_estimate is None:
        return -(prediction.sqnr_db + rise_db(share))
    return prediction.drop_estimate * (1 - share)


def _plan_step(search: Search, trials: Sequence[Trial], count: int) -> QuantPlan | None:
    first, before = trials[0].plan, trials[-1].plan
    return relieve_step(
        search.model, search.calibration, search.target, first, count, before=before, memo=search.memo
    )  # fmt: skip


class _Work(NamedTuple):
    """The shares of a model's work that the target takes, and that is computed in integers."""

    taken: float
    integer: float


def bound_integer(search: Search, plan: QuantPlan) -> float:
    """Returns an upper bound of the share of the work in integers.

    A float node whose readers are all float has no Q behind it: it computes in float for certain.
    """
    graph, floats = open_float_graph(search.model, search.calibration), {node.name for node in plan.float_nodes}
    macs = {node.name: count_macs(graph, node) for node in graph.nodes}
    apart = [
        macs[node.name]
        for node in graph.nodes
        if node.name in floats and all(reader.name in floats for name in node.output for reader in graph.readers(name))
    ]
    return round(1 - sum(apart) / max(sum(macs.values()), 1), 4)


def _share_work(search: Search, step: str, plan: QuantPlan) -> _Work:
    quantized = _quantize(search, step, plan)
    check = check_model(quantized.model, search.target, advises=False)
    floats, total = {node.name for node in quantized.float_nodes}, sum(node.macs for node in check.node_list)
    apart = sum(node.macs for node in check.node_list if node.name in floats)
    return _Work(check.taken_macs, round(1 - apart / max(total, 1), 4))


def _measure(
    search: Search, step: str, plan: QuantPlan, work: _Work | None = None, *, cut: _Cut | None = None
) -> Trial:
    model, work = _quantize(search, step, plan).model, work or _share_work(search, step, plan)
    prediction, is_whole = _predict(search, model, cut)
    return Trial(
        step=step, plan=plan, prediction=prediction, taken_macs=work.taken, integer_macs=work.integer, is_whole=is_whole
    )


def _predict(search: Search, model: Model, cut: _Cut | None) -> tuple[Prediction, bool]:
    """Returns what a quantized model loses, and whether all samples say so: not if `cut` returns what a part says."""
    lost = None if cut is None else cut(model)
    return lost or search.measure(model), lost is None


def _screen(search: Search, goal: Goal, model: Model) -> Prediction | None:
    return search.screen(model, lambda seen: not goal.may_meet(seen, 0.0))


def _race(search: Search, rival: Trial, model: Model) -> Prediction | None:
    return search.race(_quantize(search, rival.step, rival.plan).model, model)


def _quantize(search: Search, step: str, plan: QuantPlan) -> QuantizedModel:
    known, quantized = search.tried.get(step, (None, None))
    if quantized is None or known != plan:
        quantized = quantize_model(search.model, plan, search.calibration, search.work / f"{step}.onnx")
        search.tried[step] = plan, quantized
    return quantized


def _drop(trial: Trial) -> float:
    drop = trial.prediction.drop_estimate
    return -trial.prediction.sqnr_db if drop is None else drop
