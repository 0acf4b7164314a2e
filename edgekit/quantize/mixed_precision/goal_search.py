"""The search for a plan: from the cheapest to dearer ones, until the expected drop meets the goal."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edgekit._files import copy_file
from edgekit.check.check import check_model
from edgekit.model.model import Model
from edgekit.progress import Progress, say_nothing
from edgekit.quantize.accuracy.loss import MEASURES
from edgekit.quantize.accuracy.predict import FAITHFUL_DB, LABELS, Prediction
from edgekit.quantize.apply import QuantizedModel, quantize_model
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.mixed_precision.auto import plan_minmax, plan_quantization
from edgekit.quantize.mixed_precision.candidates import MOST_LOST_DB, Memo, store_narrow
from edgekit.quantize.mixed_precision.relief import COLLAPSED_DB, LEAST_GAIN_DB, relieve_step, rise_db, weigh_relief
from edgekit.quantize.mixed_precision.trials import State, Trial
from edgekit.quantize.plan import QuantPlan, is_relievable
from edgekit.target import INTEGERS, Precision, Target

PLAIN_DROP = 0.005
"""A drop that the plain mode does not mind: half a point, or of 36 dB 0.18 dB."""
# How many of the most harmful tensors leave 8 bits, step by step: each about 2.5 times the one before.
_RELIEFS = (1, 3, 8, 20, 40, 80)
_FEW_RELIEFS = (1, 3, 8)
# The least share of the work that stays in integers in the plain mode: what is float, an accelerator leaves.
_PLAIN_INTEGER = 0.75
# What more tensors out of 8 bits must save: without it the SiLU detector of tools/bench/collapse kept nine nodes in
# float for 0.1 points.
_WORTH = 0.002
# What nobody minds, and what a user is told of: a tenth of a point, and two.
_NEGLIGIBLE, _MUCH = 0.001, 0.02
# How many tensors leave 8 bits for the advice, and what is left where no plan helps.
_MANY, _ELSE = 20, "more samples may help, else leave the model in float"
# Shares of work that differ by less are the same.
_SAME_SHARE = 0.005
_HALF = 0.5
# How far a forecast of a drop or a ratio may be off: choices, wide enough that a step which is skipped would fail.
_NEAR, _NEAR_DB = 2.0, 2.0
_MORE = "plans with more tensors out of 8 bits"


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be quantized, and `measure`, which says what a quantized model of it loses.

    `work` is a folder for intermediate files. The `memo` may be shared with other targets, and says how long the search
    may take. `tried` holds what was written there, by the step that it was tried in. With `may_widen` nobody asked for
    this very precision: where no plan of it meets a goal, one with 16 bits for all activations may.
    """

    model: Model
    calibration: Calibration
    target: Target
    precision: Precision
    measure: Callable[[Model], Prediction]
    work: Path
    memo: Memo = msgspec.field(default_factory=Memo)
    progress: Progress = say_nothing
    may_widen: bool = False
    tried: dict[str, tuple[QuantPlan, QuantizedModel]] = {}

    @property
    def wider(self) -> Precision | None:
        """The precision with 16 bits for all activations, None where the target has none."""
        at = self.target.quantization.at
        few = at(self.precision).weight_bits
        for wide in self.target.precisions if self.relievable else ():
            if wide in INTEGERS and at(wide).activation == "uint16" and at(wide).weight_bits == few:
                return wide
        return None

    @property
    def relievable(self) -> bool:
        """True if activations have 8 bits, which those that they hurt may leave."""
        return self.target.quantization.at(self.precision).activation != "uint16"


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found: every trial in order, and the one that was chosen; `note` says what `met` leaves out.

    `advice` says what would lose less where much is lost, with the figure that was measured.
    """

    trials: tuple[Trial, ...]
    chosen: Trial
    met: bool
    note: str = ""
    advice: str = ""


class _Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A drop of at most `max_drop` (a share).

    `reliefs` are the counts of tensors that may leave 8 bits. What does not meet the goal is used only where it gains
    `least_gain_db`. No plan is used that leaves less than the share `least_integer` of the first one's work in
    integers. Of a plan below `sure_db` as much less is to be expected as its noise is larger than there; what labels
    measured is what it is.
    """

    max_drop: float
    reliefs: tuple[int, ...] = _RELIEFS
    least_gain_db: float = math.inf
    least_integer: float = 0.0
    sure_db: float = -math.inf

    def is_met(self, prediction: Prediction) -> bool:
        """Returns True if what is predicted is a small enough drop."""
        if prediction.source == LABELS:
            return prediction.meets(self.max_drop)
        # An estimate that is off by a share of the noise is off by twice as much where the noise is twice as high.
        louder = 10 ** (max(0.0, self.sure_db - prediction.sqnr_db) / 20)
        return prediction.meets(self.max_drop / louder)

    @property
    def is_strict(self) -> bool:
        """True where nothing is used but what meets the goal."""
        return math.isinf(self.least_gain_db)

    def may_meet(self, prediction: Prediction, share: float) -> bool:
        """Returns True if a plan may meet the goal once such a share of the noise of its activations is gone."""
        if prediction.drop_estimate is None:
            return prediction.sqnr_db + rise_db(share) >= FAITHFUL_DB - _NEAR_DB
        # A drop falls no faster than the power of the noise.
        return prediction.drop_estimate * (1 - share) <= _NEAR * self.max_drop


def find_plan(
    search: Search, *, max_drop: float | None, narrow: bool, state: State | None = None
) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan to write: that of `search_quantization`, or without `max_drop` (a share) of `search_by_default`.

    It is held against plain minmax with the same nodes, by what the outputs decide over the samples that tell a drop,
    and the better one is taken. With `narrow` the large constants that stay float get 8 or 16 bits before the last
    judgement, which is of the file that is written. Where more than 2 points are lost, `advice` says what would help.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    goal = PLAIN_DROP if max_drop is None else max_drop
    if max_drop is None:
        plan, searched = search_by_default(search)
    else:
        searched = search_quantization(search, max_drop, state)
        plan = searched.chosen.plan
    if searched is not None:
        searched = _hold_against_minmax(search, searched, goal)
        searched = _try_wider(search, searched, goal, adopts=max_drop is not None and search.may_widen)
        plan = searched.chosen.plan
    if not narrow:
        return plan, searched
    reached = None if searched is None else searched.chosen.prediction.sqnr_db
    store = partial(store_narrow, search.model, plan, search.calibration, reached)
    narrowed = search.memo.budget.attempt("large constants in 8 or 16 bits", store)
    if narrowed is None or not narrowed.narrow.bits or searched is None:
        return narrowed or plan, searched
    chosen, wide = _try_plan(search, f"{searched.chosen.step}, narrow", narrowed), searched.chosen
    misses = searched.met and not chosen.prediction.meets(goal) and wide.prediction.meets(goal)
    if misses or _drop(chosen) > _drop(wide) + (
        _NEGLIGIBLE if wide.prediction.drop_estimate is not None else MOST_LOST_DB
    ):
        return plan, searched
    return narrowed, msgspec.structs.replace(searched, chosen=chosen)


def _hold_against_minmax(search: Search, searched: Searched, max_drop: float) -> Searched:
    """Returns what was searched with plain minmax beside it, chosen where that loses less."""
    chosen, drop = searched.chosen, searched.chosen.prediction.drop_estimate
    # Minmax cannot be better by more than what is lost.
    if drop is not None and drop <= _NEGLIGIBLE:
        return searched
    plain = plan_minmax(search.model, search.calibration, search.target, chosen.plan)
    if plain == chosen.plan or not search.memo.budget.allows("plain minmax"):
        return searched
    trial = search.memo.budget.attempt("plain minmax", partial(_try_plan, search, "minmax", plain))
    if trial is None:
        return searched
    searched = msgspec.structs.replace(searched, trials=(*searched.trials, trial))
    # Between drops that nobody tells apart, of a few changed decisions, the ratio decides.
    gain, misses = _drop(chosen) - _drop(trial), not trial.prediction.meets(max_drop)
    is_nearer = trial.prediction.sqnr_db > chosen.prediction.sqnr_db
    if gain < -_NEGLIGIBLE or (gain <= _NEGLIGIBLE and (misses or not is_nearer)):
        return searched
    return msgspec.structs.replace(searched, chosen=trial, met=searched.met or trial.prediction.meets(max_drop))


def _try_wider(search: Search, searched: Searched, max_drop: float, *, adopts: bool) -> Searched:
    """Returns what was searched with 16 bits for all activations beside it, or with many tensors out of 8 bits.

    It is tried where much is lost, and chosen where it `adopts` what meets a goal that no other plan met.
    """
    chosen, wider = searched.chosen, search.wider
    misses = adopts and not searched.met and wider is not None
    drop, ratio_db = chosen.prediction.drop_estimate, chosen.prediction.sqnr_db
    is_lost = ratio_db < COLLAPSED_DB if drop is None else drop > _MUCH and not _is_near(chosen.prediction)
    if not (misses or is_lost) or not search.memo.budget.allows(_MORE):
        return searched
    step = wider or f"relieve {_MANY}"

    def attempt() -> Trial | None:
        if wider is None:
            plan = _plan_step(search, searched.trials, _MANY)
        else:
            plan = plan_quantization(search.model, search.calibration, search.target, wider, memo=search.memo)
        return None if plan is None else _try_plan(search, step, plan)

    trial = search.memo.budget.attempt(step, attempt)
    if trial is None:
        return msgspec.structs.replace(searched, advice=f"no other plan could be tried: {_ELSE}")
    searched = msgspec.structs.replace(searched, trials=(*searched.trials, trial))
    if misses and trial.prediction.meets(max_drop):
        return msgspec.structs.replace(searched, chosen=trial, met=True, note=f"with {wider}, no other plan does")
    what = f"--precision {wider}" if wider else f"{_MANY} tensors out of 8 bits, as --max-drop tries it"
    return msgspec.structs.replace(searched, advice=f"{what}: {_weigh(search, chosen, trial)}")


def _weigh(search: Search, chosen: Trial, other: Trial) -> str:
    """Returns what another trial than the chosen one loses and costs, in words."""
    lost = other.prediction.drop_estimate
    figure = f"{other.prediction.sqnr_db:.1f} dB" if lost is None else f"{100 * lost:.2f} points are lost"
    if _drop(other) >= _drop(chosen):
        return f"{figure}, which is no better: {_ELSE}"
    now, then = (_quantize(search, trial.step, trial.plan).size_after for trial in (chosen, other))
    return f"{figure}, {then / now:.2f} times the bytes, {other.integer_macs:.0%} of the work in integers"


def search_quantization(search: Search, max_drop: float, state: State | None = None) -> Searched:
    """Returns the plan that meets a goal with the least loss of placement, and everything that was tried.

    First the plan that is best with all in 8 bits; then more and more of the tensors that hurt most leave 8 bits, for
    16 where the target takes them, else for float. The search ends with the first plan that drops at most `max_drop` (a
    share) and leaves the target no less work than the first plan did. If none does, `choose_trial` decides.
    Of a model that has collapsed by its ratio 1, 3 and 8 tensors leave 8 bits; where that is not enough, as many as
    bring its ratio back, and the search goes on from there.

    Each trial is written to the file of the `state`, from which an interrupted search goes on.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    known = {trial.step: trial for trial in state.trials} if state is not None else {}
    first = known["all"].plan if "all" in known else _plan_first(search, relieve=False)
    run = partial(_run_trials, search, state=state, known=known)
    if not (has_collapsed(first) and is_relievable(first)):
        return choose_trial(run(_Goal(max_drop=max_drop), first=first), max_drop)
    goal = _Goal(max_drop=max_drop, reliefs=_FEW_RELIEFS, sure_db=COLLAPSED_DB)
    found = _choose_little_relieved(goal, run(goal, first=first))
    if found.met or not search.memo.budget.allows(_MORE):
        return found
    mixed = run(_Goal(max_drop=max_drop), earlier=found.trials)
    return msgspec.structs.replace(choose_trial(mixed, max_drop), trials=(*found.trials, *mixed))


def search_by_default(search: Search) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan of the plain mode: the best with all in 8 bits, unless that loses more than PLAIN_DROP.

    Then the 1, 3 and 8 tensors that hurt most leave 8 bits, as long as three quarters of the work stay in integers, and
    the fewest of them are used that reach PLAIN_DROP, or come within 0.2 points of the least drop. A model that has
    collapsed by its ratio is treated so only if that is enough; else tensors leave 8 bits until its ratio is a good
    one, whatever share of the work that takes, and the search begins there. What was tried is None where few samples
    leave nothing to judge by, or no time.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    search.progress(f"{search.target.name}: choose ranges and roundings")
    first, known = _plan_first(search, relieve=False), dict[str, Trial]()
    if has_collapsed(first) and is_relievable(first):
        if search.memo.budget.allows(_MORE):
            goal = _Goal(max_drop=PLAIN_DROP, reliefs=_FEW_RELIEFS, sure_db=COLLAPSED_DB)
            found = _choose_little_relieved(goal, _try_few_reliefs(search, goal, first))
            if found.met:
                return found.chosen.plan, found
            known = {trial.step: trial for trial in found.trials}
        relieved = _plan_first(search)
        # Of tensors whose leaving 8 bits cannot bring the ratio back none left, and the plan was measured.
        known, first = known if relieved == first else {}, relieved
    if not (search.memo.budget.allows(_MORE) and first.judged):
        return first, None
    goal = _Goal(max_drop=PLAIN_DROP, reliefs=_FEW_RELIEFS, least_gain_db=LEAST_GAIN_DB, least_integer=_PLAIN_INTEGER)
    trials = search.memo.budget.attempt("measuring the plan", partial(_try_few_reliefs, search, goal, first, known))
    if trials is None:
        return first, None
    least = min(trials, key=_drop)
    if least.prediction.drop_estimate is None:
        chosen = next((trial for trial in trials if trial.prediction.meets(PLAIN_DROP)), trials[0])
    else:
        enough = max(PLAIN_DROP, _drop(least) + _WORTH)
        chosen = next(trial for trial in trials if _drop(trial) <= enough)
    return chosen.plan, Searched(trials=tuple(trials), chosen=chosen, met=True)


def _is_near(prediction: Prediction) -> bool:
    """Returns True for numbers that come near, of which nothing known is decided: what spread counts nobody says."""
    return prediction.measure == MEASURES["values"].name and prediction.sqnr_db >= FAITHFUL_DB


def write_chosen(search: Search, plan: QuantPlan, searched: Searched | None, out: Path) -> QuantizedModel:
    """Writes the model of a plan to `out`: the file that the search tried it with, else it is quantized.

    Raises:
        EdgekitError: as for `quantize_model`.
    """
    known, quantized = search.tried.get(searched.chosen.step, (None, None)) if searched is not None else (None, None)
    # A file beside a model stands in it by the name that it had when it was written.
    if quantized is None or known != plan or quantized.model.external_files:
        return quantize_model(search.model, plan, search.calibration, out)
    copy_file(quantized.model.path, out)
    model = msgspec.structs.replace(quantized.model, path=out, name=out.name.removesuffix(".onnx"))
    return msgspec.structs.replace(quantized, model=model)


def has_collapsed(plan: QuantPlan) -> bool:
    """Returns True if the best that was judged for a plan is so far from the float model that it is of little use."""
    return bool(plan.judged) and plan.judged[0].sqnr_db < COLLAPSED_DB


def _choose_little_relieved(goal: _Goal, trials: Sequence[Trial]) -> Searched:
    """Returns what was tried of a collapsed model, `met` where few or no tensors out of 8 bits lose little enough.

    A ratio says nothing of what outputs decide: classes far apart and neighbours of an embedding bear more noise than
    20 dB. Where it is worse than that, less may be lost, since the estimate errs too; but fewer tensors leave 8 bits
    where that costs 0.2 points at most. Whatever share of the work leaves integers here, a good ratio would take more.
    """
    measured = [trial for trial in trials if trial.prediction.drop_estimate is not None]
    meeting = next((trial for trial in measured if goal.is_met(trial.prediction)), None)
    if meeting is None:
        return Searched(trials=tuple(trials), chosen=_choose_nearest(trials, goal.max_drop), met=False)
    chosen = next(trial for trial in measured if _drop(trial) <= min(goal.max_drop, _drop(meeting) + _WORTH))
    return Searched(trials=tuple(trials), chosen=chosen, met=True)


def choose_trial(trials: Sequence[Trial], max_drop: float) -> Searched:
    """Returns the trial to use: of those that meet the goal the one with most work on the target, else the best.

    Where that one leaves less than half of the work in integers, one that misses the goal by less than the sampling
    error, and by no more than the goal itself, is used instead; and where none meets the goal, one whose drop is larger
    by no more than the goal.
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


def _run_trials(
    search: Search,
    goal: _Goal,
    *,
    state: State | None,
    known: Mapping[str, Trial],
    first: QuantPlan | None = None,
    earlier: Sequence[Trial] = (),
) -> list[Trial]:
    """Returns the trials up to one that meets the goal, or leaves too little in integers.

    `first` is the first plan. Where others were tried `earlier` it is the one that brings the ratio back. `known` are
    the trials that the state holds.
    """
    # Each step takes more from the accelerator than the one before: the first that is good enough is the cheapest.
    counts = (0, *(goal.reliefs if search.relievable else ()))
    attempts = _Attempts(search, goal, len(counts), first=first, known=known, is_mixed=bool(earlier))
    for count in counts:
        trial = attempts.run(count)
        if trial is None:
            break
        # What was cut short is no step that a later search may go on from.
        if state is not None and not search.memo.budget.left_out:
            state.write([*earlier, *attempts.trials])
        if attempts.is_enough(trial):
            break
    return attempts.trials


def _try_few_reliefs(
    search: Search, goal: _Goal, first: QuantPlan, known: Mapping[str, Trial] | None = None
) -> list[Trial]:
    """Returns the trials of the plain mode, in rising order of how many tensors left 8 bits.

    What activations cost about adds up: where ranking says that few tensors are not enough, the most are tried first,
    and few only where they may come as near.
    """
    counts = goal.reliefs if search.relievable else ()
    attempts = _Attempts(search, goal, 1 + len(counts), first=first, known=known)
    plain = attempts.run(0)
    if plain is None or attempts.is_enough(plain) or _is_near(plain.prediction):
        return attempts.trials
    # A ratio meets no strict goal: those are of drops that were measured.
    is_unknown = goal.is_strict and plain.prediction.drop_estimate is None
    if is_unknown or not counts or not search.memo.budget.allows(_MORE):
        return attempts.trials
    weigh = partial(weigh_relief, search.model, search.calibration, first, counts, search.memo)
    shares = search.memo.budget.attempt("plans with more tensors out of 8 bits", weigh)
    # The most tensors take the most noise away: where that helps nobody, fewer do not either.
    most = 0.0 if shares is None else shares[counts[-1]]
    if shares is None or not (goal.may_meet(plain.prediction, most) or rise_db(most) >= goal.least_gain_db):
        return attempts.trials
    hopeful = [count for count in counts if count == counts[-1] or goal.may_meet(plain.prediction, shares[count])]
    for count in hopeful:
        trial = attempts.run(count)
        if trial is None or attempts.is_enough(trial):
            break
    for count in reversed(counts[: -len(hopeful)]):
        found, most = attempts.trials[-1], max(attempts.found)
        if most:
            gained = (_drop(plain) - _drop(found)) * shares[count] / max(shares[most], shares[count])
            enough = goal.max_drop if goal.is_strict else max(goal.max_drop, _drop(found))
            if _drop(plain) - gained > enough + 2 * _WORTH:
                break
        attempts.run(count)
    return attempts.trials


class _Attempts:
    """Trials that were `found`, by how many tensors left 8 bits; `known` are of before, `first` is the first plan."""

    def __init__(
        self,
        search: Search,
        goal: _Goal,
        most: int,
        *,
        first: QuantPlan | None = None,
        known: Mapping[str, Trial] | None = None,
        is_mixed: bool = False,
    ) -> None:
        self._search, self._goal, self._most, self._first = search, goal, most, first
        self._known, self._is_mixed = known or {}, is_mixed
        self.found: dict[int, Trial] = {}
        self._spent: list[float] = []

    @property
    def trials(self) -> list[Trial]:
        """What was tried so far, fewer tensors out of 8 bits first."""
        return [self.found[count] for count in sorted(self.found)]

    def run(self, count: int) -> Trial | None:
        """Returns a trial, None where time is over, so many cannot be taken, or too little would stay in integers."""
        search = self._search
        if count and not search.memo.budget.allows(_MORE):
            return None
        start = "mixed" if self._is_mixed else ""
        step = (f"{start} + {count}" if start else f"relieve {count}") if count else start or "all"
        done, spent = len(self._spent), sum(self._spent)
        left = f", at most {spent / done * (self._most - done):.0f} s left" if done else ""
        left = ", known" if step in self._known else left
        search.progress(f"{search.target.name}: try {done + 1} of {self._most} ({step}){left}")
        began = time.monotonic()
        trial = self._known.get(step)
        if trial is None:

            def attempt() -> Trial | None:
                plan = _plan_step(search, self.trials, count) if count else self._first or _plan_first(search)
                return None if plan is None else _try_plan(search, step, plan)

            trial = search.memo.budget.attempt(f"the plan '{step}'", attempt) if count else attempt()
        self._spent.append(time.monotonic() - began)
        least = self._goal.least_integer * self.found[0].integer_macs if self.found else 0.0
        if trial is None or trial.integer_macs < least:
            return None
        self.found[count] = trial
        return trial

    def is_enough(self, trial: Trial) -> bool:
        """Returns True if a trial meets the goal and leaves the target no less work than the first did."""
        return self._goal.is_met(trial.prediction) and trial.taken_macs >= self.found[0].taken_macs - _SAME_SHARE


def _plan_first(search: Search, *, relieve: bool = True) -> QuantPlan:
    return plan_quantization(
        search.model, search.calibration, search.target, search.precision, relieve=relieve, memo=search.memo
    )


def _plan_step(search: Search, trials: Sequence[Trial], count: int) -> QuantPlan | None:
    first, before = trials[0].plan, trials[-1].plan
    return relieve_step(
        search.model, search.calibration, search.target, first, count, before=before, memo=search.memo
    )  # fmt: skip


def _try_plan(search: Search, step: str, plan: QuantPlan) -> Trial:
    quantized = _quantize(search, step, plan)
    prediction, check = search.measure(quantized.model), check_model(quantized.model, search.target, advises=False)
    kept = {node.name for node in quantized.float_nodes}
    total = sum(node.macs for node in check.node_list)
    float_macs = sum(node.macs for node in check.node_list if node.name in kept)
    return Trial(
        step=step,
        plan=plan,
        prediction=prediction,
        taken_macs=check.taken_macs,
        integer_macs=round(1 - float_macs / total, 4) if total else 1.0,
    )


def _quantize(search: Search, step: str, plan: QuantPlan) -> QuantizedModel:
    known, quantized = search.tried.get(step, (None, None))
    if quantized is None or known != plan:
        quantized = quantize_model(search.model, plan, search.calibration, search.work / f"{step}.onnx")
        search.tried[step] = plan, quantized
    return quantized


def _drop(trial: Trial) -> float:
    drop = trial.prediction.drop_estimate
    return -trial.prediction.sqnr_db if drop is None else drop
