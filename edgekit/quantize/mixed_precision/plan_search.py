"""The search for a plan: from cheap plans to expensive ones, until the estimated drop meets the goal."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgekit._files import replace_file
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.data.intervals import wilson_interval
from edgekit.model.external import skim_model
from edgekit.model.model import Model
from edgekit.progress import Progress, say_nothing
from edgekit.quantize.accuracy.loss import DEFAULT_MAX_DROP, GOOD_DB, MEASURES
from edgekit.quantize.accuracy.predict import MOST_CHANGED, Prediction
from edgekit.quantize.apply import NothingQuantizedError, QuantizedModel, quantize_model
from edgekit.quantize.effort import find_effort
from edgekit.quantize.mixed_precision import relief
from edgekit.quantize.mixed_precision.auto import plan_quantization
from edgekit.quantize.mixed_precision.candidates import Subject
from edgekit.quantize.mixed_precision.weights import widen_weights
from edgekit.quantize.plan import QuantPlan
from edgekit.target import INTEGERS, Precision

# How many of the most harmful tensors get more than 8 bits, about 2.5 times as many at each step. Ranking more tensors
# takes more runs, so the first few are ranked by themselves.
_FEW, _MORE_THAN_FEW = (1, 3, 8), (20, 40, 80)
# One step more, for targets with 16 bits, which keep all work in integers, and models whose runs are short.
_MOST = 160
# The default mode keeps at least this share of the first plan's work in integers: a choice.
DEFAULT_INTEGER_SHARE = 0.75
# A plan with more tensors out of 8 bits must save at least this much of the drop. Chosen after a small detector with
# SiLU, which without this bound kept nine nodes in float for 0.1 points (measured once, the program is gone).
_WORTH = 0.002
# A drop that is worth advice, two points: a choice.
_MUCH = 0.02
# The share of decisions that may change where tensors get 16 bits, which leave all work in integers: a choice.
FEW_CHANGED = 0.05
# Shares of work that differ by less count as equal.
SAME_SHARE = 0.005
LEAST_INTEGER_SHARE = 0.5
"""The share of the work that is kept in integers for a collapsed model, or with a goal if possible: a choice."""
# The assumed error of the predicted effect of a step: a factor for a drop, dB for a ratio. Choices, so wide that only
# steps which would miss the goal are skipped.
_NEAR, _NEAR_DB = 2.0, 2.0
# The least share of the noise that is predicted to be left; not 0, because later shares are divided by it.
_NONE_LEFT = 1e-9
MORE_RELIEF = "plans with more tensors out of 8 bits"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A tried plan, with the name of its step and its predicted loss.

    `taken_macs` is the share of the MACs that the target's provider takes, `integer_macs` the share that is computed in
    integers.
    """

    step: str
    plan: QuantPlan
    prediction: Prediction
    taken_macs: float
    integer_macs: float = 1.0


class Search(Subject, frozen=True, kw_only=True):
    """What is to be quantized, and how quantized models are measured.

    Attributes:
        measure: returns what a quantized model loses over all samples.
        compare: returns how much more accuracy the first of two quantized models loses than the second, over the same
            samples (`FloatReference.compare`); 0 if no output can be judged.
        look: measures a model by as few samples as show that its `rival`, another one, is better
            (`FloatReference.look`). None: every model is measured by `measure`.
        is_noise: the samples are random numbers, whose outputs hardly vary: their spread tells nothing of real data.
        work: a folder for intermediate files.
        progress: gets messages.
        may_widen: the user did not ask for this precision: if none of its plans meets a goal, 16 bits for all
            activations may be used.
        known: the trials of an interrupted search, by the name of the step, which are not made again.
        keep: stores the trials so far, so that an interrupted search continues from them.
        tried: the plans and the models written for them, by the name of the step; filled by the search.
        checks: what the target takes of these models, by their digests; filled by the search.
    """

    measure: Callable[[Model], Prediction]
    compare: Callable[[Model, Model], float]
    look: Callable[..., Prediction] | None = None
    is_noise: bool = False
    work: Path
    progress: Progress = say_nothing
    may_widen: bool = False
    known: dict[str, Trial] = msgspec.field(default_factory=dict)
    keep: Callable[[Sequence[Trial]], None] | None = None
    tried: dict[str, tuple[QuantPlan, QuantizedModel]] = msgspec.field(default_factory=dict)
    checks: dict[str, CheckReport] = msgspec.field(default_factory=dict)

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
    """The result of a search: every trial in order, the chosen one, and whether it met the goal; `note` qualifies that.

    If much is lost, `advice` says what would lose less, with the measured figure. `wide_range` names the 16-bit tensors
    that cause much of the noise and that the target's float16 represents no better.
    """

    trials: tuple[Trial, ...]
    chosen: Trial
    met: bool
    note: str = ""
    advice: str = ""
    wide_range: tuple[str, ...] = ()


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A drop of at most `max_drop` (a share): the user's (`is_given`), or that of the default mode.

    In the default mode at most the share `most_changed` of the decisions may change.
    """

    max_drop: float = DEFAULT_MAX_DROP
    is_given: bool = False
    most_changed: float = MOST_CHANGED

    def is_met(self, prediction: Prediction) -> bool:
        """Returns True if a plan meets the goal; in the default mode it also keeps most decisions."""
        if self.is_given or prediction.drop_estimate is None:
            return prediction.meets(self.max_drop)
        return prediction.loss(self.most_changed) <= self.max_drop

    def may_meet(self, prediction: Prediction, share: float) -> bool:
        """Returns True if a plan may meet the goal once this share of the noise of its activations is removed."""
        is_unknown = prediction.drop_estimate is None
        return self.least_loss(prediction, share) <= (_NEAR_DB - GOOD_DB if is_unknown else _NEAR * self.max_drop)

    def least_loss(self, prediction: Prediction, share: float) -> float:
        """Returns a lower bound of the loss (`Prediction.loss`) once a share of the activations' noise is removed.

        A drop falls no faster than the power of the noise, and neither does the share of decisions that change. Of a
        few samples two may change by chance, so that share is the least that the samples allow.
        """
        if prediction.drop_estimate is None:
            return -(prediction.sqnr_db + relief.rise_db(share))
        count = prediction.samples
        changed = 0.0 if self.is_given else wilson_interval(round(prediction.changed() * count), count)[0]
        return max(prediction.drop_estimate * (1 - share), changed * (1 - share) - self.most_changed)


def search_plan(search: Search, goal: Goal) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan that meets the goal with the fewest tensors out of 8 bits, and all trials.

    1. The first plan keeps all activations in 8 bits. In the default mode it is returned without trials (None) if there
       are too few samples to judge by, or no time is left.
    2. Its drop is measured (`Search.measure`), as that of every later plan. If it meets the goal, the search ends.
    3. Else tensors are ranked by the noise that they cause, and plans with 1, 3, 8, then 20, 40 and 80 of them out of
       8 bits are considered: in 16 bits if the target supports that, else in float. Each plan costs a measurement, so
       one that cannot meet the goal, by the noise that it would remove, is skipped (`_try_plans`).
    4. The search ends at the first plan that meets the goal, if the target still runs as much of the work as with the
       first plan. Else the largest number of tensors that is worth its cost is tried, and then smaller ones, to see
       whether they do as well. If the largest is best and tensors get 16 bits, more of them are tried (`_try_most`).
    5. `choose_trial` selects one of the trials.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    search.progress(f"{search.target.name}: choose ranges and roundings")
    first = search.known["all"].plan if "all" in search.known else plan_quantization(
        search.model, search.calibration, search.target, search.precision, memo=search.memo
    )  # fmt: skip
    if not goal.is_given and not (first.judged and search.memo.budget.allows(MORE_RELIEF)):
        return first, None
    trials = _try_plans(search, goal, first)
    if not trials:
        return first, None
    searched = choose_trial(trials, goal)
    return searched.chosen.plan, searched


def loses_much(prediction: Prediction, *, is_noise: bool = False) -> bool:
    """Returns True for a drop of more than two points (but not of values that `is_near`), or below 20 dB."""
    if prediction.drop_estimate is None:
        return prediction.sqnr_db < relief.COLLAPSED_DB
    return prediction.drop_estimate > _MUCH and not is_near(prediction, is_noise=is_noise)


def may_lose_much(prediction: Prediction, *, is_noise: bool = False) -> bool:
    """Returns True if the samples do not tell that little is lost: a layout detector with 3 dB, -3 to 7 points."""
    is_open = prediction.drop_interval is not None and prediction.drop_interval[1] > _MUCH
    return loses_much(prediction, is_noise=is_noise) or (is_open and prediction.sqnr_db < relief.COLLAPSED_DB)


def rescues(prediction: Prediction, ruined: Prediction) -> bool:
    """Returns True if a plan loses little where another loses much: then any share of its work may be in integers."""
    return loses_much(ruined) and not loses_much(prediction)


def changes_many(prediction: Prediction) -> bool:
    """Returns True if more than a tenth of the decisions change.

    The estimated drop may be small all the same: if the float model is uncertain, a changed decision is as likely to be
    right as the old one.
    """
    return prediction.changed() > MOST_CHANGED


def is_near(prediction: Prediction, *, is_noise: bool) -> bool:
    """Returns True if outputs are values that decide nothing, with at least GOOD_DB.

    Values that hardly vary are not near if they surely lose much of their spread, or by the estimate a tenth of it:
    that of a network whose ten answers stay within 0.1 of their means fell by 32 to 63 % at 53 dB, and by 0.0 with its
    output in 16 bits. The spread over samples of noise (`Search.is_noise`) does not count.
    """
    is_sure = prediction.drop_interval is not None and prediction.drop_interval[0] > _MUCH
    is_lost = not is_noise and (is_sure or (prediction.drop_estimate or 0.0) > MOST_CHANGED)
    return prediction.measure == MEASURES["values"].name and prediction.sqnr_db >= GOOD_DB and not is_lost


def choose_trial(trials: Sequence[Trial], goal: Goal) -> Searched:
    """Returns the trial to write.

    In the default mode that is the trial with the fewest tensors out of 8 bits that meets the goal, or whose loss is so
    close to the least of all that the difference is not worth more tensors (`find_tolerated_loss`).

    If the user gave the goal, it is the one with most work on the target among those that meet the goal, else the one
    that loses least. If that keeps less than half of the work in integers, the best of the following is chosen instead,
    if there is any: trials that keep half of it, lose at most `max_drop`, or 0.2 points, more than needed (than the
    goal, or than the least loss if none meets it), and, if any trial meets the goal, may meet it within the interval of
    their drop.
    """
    meeting, every = [trial for trial in trials if goal.is_met(trial.prediction)], tuple(trials)
    if not goal.is_given:
        enough, allowed = find_tolerated_loss(trials, goal.most_changed), goal.most_changed
        chosen = next(each for each in trials if each in meeting or each.prediction.loss(allowed) <= enough)
        return Searched(trials=every, chosen=chosen, met=True)

    def rank(trial: Trial) -> tuple[float, float]:
        return trial.prediction.loss(), -trial.prediction.sqnr_db

    best = min(trials, key=rank)
    chosen = max(meeting, key=lambda trial: round(trial.taken_macs / SAME_SHARE)) if meeting else best
    most = max(goal.max_drop, _WORTH) + (goal.max_drop if meeting else best.prediction.loss())
    near = [
        trial
        for trial in trials
        if trial.integer_macs >= LEAST_INTEGER_SHARE and trial.prediction.drop_interval is not None
        if trial.prediction.loss() <= most and (not meeting or trial.prediction.drop_interval[0] <= goal.max_drop)
    ]
    if chosen.integer_macs >= LEAST_INTEGER_SHARE or not near:
        return Searched(trials=every, chosen=chosen, met=bool(meeting))
    note = f"within the sampling error; '{chosen.step}' leaves {chosen.integer_macs:.0%} of the work in integers"
    return Searched(trials=every, chosen=min(near, key=rank), met=bool(meeting), note=note if meeting else "")


def _try_plans(search: Search, goal: Goal, first: QuantPlan) -> list[Trial]:
    """Returns the trials, by rising number of tensors out of 8 bits.

    1. The plan with no tensor out of 8 bits is measured. It is the only one if activations have 16 bits anyway, or, in
       the default mode, if outputs are values that hardly differ (`is_near`).
    2. Few tensors (1, 3, 8) are ranked first, then many (20, 40, 80), because a longer ranking takes more runs. The
       ranking bounds the share of the noise that each number of tensors removes, and so the drop from below.
    3. Rising numbers are tried, except those whose bound is more than twice the goal. The first that is good enough
       ends the search.
    4. If none is good enough, the largest number is tried that may gain a decibel (any, if the user gave the goal).
    5. Then fewer tensors may do: among the numbers between the chosen trial and the next smaller trial, the middle
       one of those whose bound allows a good enough drop is tried, until none is left.
    6. If the largest number is chosen and misses the goal, twice as many may get 16 bits (`_try_most`).
    """
    attempts = _Attempts(search, goal, first)
    unrelieved = attempts.run(0)
    if unrelieved is None or not search.relievable:
        return attempts.in_order
    if not goal.is_given and is_near(unrelieved.prediction, is_noise=search.is_noise):
        return attempts.in_order
    last, left = unrelieved, {0: 1.0}
    for counts in (_FEW, _MORE_THAN_FEW):
        if attempts.is_enough(last) or not search.memo.budget.allows(MORE_RELIEF):
            return attempts.in_order
        shares = search.memo.budget.attempt(MORE_RELIEF, relief.bound_relief_by_count, search, first, counts)
        if shares is None:
            return attempts.in_order
        left |= {count: max(1 - share, _NONE_LEFT) for count, share in shares.items()}
        for count in counts:
            # The last trial has lost part of the noise already.
            if goal.may_meet(last.prediction, 1 - left[count] / left[max(attempts.trials)]):
                trial = attempts.run(count)
                if trial is None:
                    break
                if attempts.is_enough(trial):
                    return attempts.in_order
                last = trial
    for count in sorted(left, reverse=True):
        pays = goal.is_given or relief.rise_db(1 - left[count]) >= relief.LEAST_GAIN_DB
        if count in attempts.trials or (pays and attempts.run(count, may_meet=False)):
            break
    while True:
        chosen = attempts.choose()
        below = max((count for count in attempts.trials if count < chosen), default=chosen)
        enough = max(goal.max_drop, find_tolerated_loss(attempts.in_order, goal.most_changed))
        fewer = [count for count in left if below < count < chosen]
        fewer = [count for count in fewer if goal.least_loss(unrelieved.prediction, 1 - left[count]) <= enough]
        if not fewer or attempts.run(fewer[len(fewer) // 2]) is None:
            break
    _try_most(search, goal, attempts)
    return attempts.in_order


def _try_most(search: Search, goal: Goal, attempts: "_Attempts") -> None:
    """Tries twice as many tensors in 16 bits, if the largest number was chosen and that may gain a decibel.

    The worst weights get 16 bits with them, where that may gain a decibel too.

    A transformer has hundreds of tensors with about the same noise, half of which 80 of them cause.
    """
    before, first, memo = _MORE_THAN_FEW[-1], attempts.trials[0].plan, search.memo
    if before not in attempts.trials or not search.widens:
        return
    if not find_effort(search.graph, search.calibration.samples).is_short:
        return
    misses = attempts.choose() == before and not goal.is_met(attempts.trials[before].prediction)
    if not misses or not memo.budget.allows(MORE_RELIEF):
        return
    shares = memo.budget.attempt(MORE_RELIEF, relief.bound_relief_by_count, search, first, (before, _MOST))
    if shares is None:
        return
    left = max(1 - shares[before], _NONE_LEFT)
    if relief.rise_db((shares[_MOST] - shares[before]) / left) >= relief.LEAST_GAIN_DB:
        attempts.run(_MOST)


class _Attempts:
    """The trials of a search, by the number of tensors out of 8 bits; `first` is the plan with none."""

    def __init__(self, search: Search, goal: Goal, first: QuantPlan) -> None:
        self._search, self._goal, self._first = search, goal, first
        most = (_MOST,) if search.widens else ()
        self._most = 1 + (len((*_FEW, *_MORE_THAN_FEW, *most)) if search.relievable else 0)
        self._seconds: list[float] = []
        self.trials: dict[int, Trial] = {}

    @property
    def in_order(self) -> list[Trial]:
        """The trials by rising number of tensors."""
        return [self.trials[count] for count in sorted(self.trials)]

    def run(self, count: int, *, may_meet: bool = True) -> Trial | None:
        """Returns a trial; None if time is over, there are too few tensors, or too little would stay in integers.

        With `may_meet` the plan of a collapsed model is measured even if too little of the work stays in integers: it
        is a trial if it meets the goal or loses little.
        """
        step, began = f"relieve {count}" if count else "all", time.monotonic()
        done, trial = len(self._seconds), self._search.known.get(step)
        # Fewer tensors are tried after the most, which may add some.
        most = max(self._most, done + 1)
        left = f", at most {sum(self._seconds) / done * (most - done):.0f} s left" if done else ""
        left = left if trial is None else ", known"
        self._search.progress(f"{self._search.target.name}: try {done + 1} of {most} ({step}){left}")
        # With a goal the first plan must be measured, whatever the budget; the default mode may skip that.
        is_needed, plan = not count and self._goal.is_given, partial(self._try, step, count, may_meet=may_meet)
        if trial is None:
            trial = plan() if is_needed else attempt_trial(self._search, f"the plan '{step}'", plan)
        self._seconds.append(time.monotonic() - began)
        if trial is None:
            return None
        self.trials[count] = trial
        # A step that the budget cut short is not stored: a later search would take it for complete.
        if self._search.keep is not None and not self._search.memo.budget.left_out:
            self._search.keep(self.in_order)
        return trial

    def is_enough(self, trial: Trial) -> bool:
        """Returns True if a trial meets the goal and the target runs as much of the work as with the first."""
        return self._goal.is_met(trial.prediction) and trial.taken_macs >= self.trials[0].taken_macs - SAME_SHARE

    def choose(self) -> int:
        """Returns the number of tensors of the trial that would be chosen."""
        chosen = choose_trial(self.in_order, self._goal).chosen
        return next(count for count, trial in self.trials.items() if trial is chosen)

    def _try(self, step: str, count: int, *, may_meet: bool) -> Trial | None:
        """Returns a trial that keeps enough of the first plan's work in integers: 3/4 of it in the default mode.

        Float nodes do not run on an accelerator. For a collapsed model half of the work is enough, or any share if the
        plan meets the goal, or loses little where the first plan loses much.
        """
        if not count:
            return measure_plan(self._search, step, self._first)
        fewer = [trial for number, trial in sorted(self.trials.items()) if number < count]
        plan = plan_step(self._search, fewer, count)
        if plan is None:
            return None
        has_collapsed = bool(self._first.judged) and self._first.judged[0].sqnr_db < relief.COLLAPSED_DB
        share = 0.0 if self._goal.is_given else LEAST_INTEGER_SHARE if has_collapsed else DEFAULT_INTEGER_SHARE
        work = measure_work(self._search, step, plan)
        is_kept = work.integer >= share * self.trials[0].integer_macs
        if not is_kept and not (has_collapsed and may_meet):
            return None
        trial = measure_plan(self._search, step, plan, work)
        is_enough = is_kept or rescues(trial.prediction, self.trials[0].prediction)
        return trial if is_enough or trial.prediction.meets(self._goal.max_drop) else None


def find_tolerated_loss(trials: Sequence[Trial], most_changed: float) -> float:
    """Returns the loss up to which a plan with fewer tensors out of 8 bits is preferred to that with the least loss.

    Changed decisions count as lost beyond the share `most_changed`. That is the least drop plus 0.2 points, or plus a
    decibel's part of it if that is more (`find_least_saving`). If the drop is unknown, it is one decibel less than the
    best.
    """
    best = min((trial.prediction for trial in trials), key=lambda each: each.loss(most_changed))
    least = best.loss(most_changed)
    if best.drop_estimate is None:
        return least + relief.LEAST_GAIN_DB
    return least + relief.find_least_saving(least, _WORTH)


def plan_step(search: Search, trials: Sequence[Trial], count: int) -> QuantPlan | None:
    """Returns the plan of the first trial with `count` tensors out of 8 bits, None if it has too few."""
    first = trials[0].plan
    # A rival with other factors of channels, or none, has ranges of other tensors.
    before = next(trial.plan for trial in reversed(trials) if trial.plan.factors == first.factors)
    plan = relief.relieve_step(search, first, count, before=before)
    # From here on the noise of activations hides that of weights no longer.
    return plan if plan is None or count != _MOST else widen_step(search, plan) or plan


def widen_step(search: Search, plan: QuantPlan) -> QuantPlan | None:
    """Returns a plan whose worst weights have 16 bits, for as much work as may stay in float in default mode."""
    return widen_weights(search, plan, 1 - DEFAULT_INTEGER_SHARE)


class Work(NamedTuple):
    """The shares of a model's work that the target takes, and that is computed in integers."""

    taken: float
    integer: float


def measure_work(search: Search, step: str, plan: QuantPlan) -> Work:
    """Returns the shares of the work of a plan; its model is written to compute them."""
    quantized = quantize_step(search, step, plan)
    check = check_trial(search, quantized.model)
    floats, total = {node.name for node in quantized.float_nodes}, sum(node.macs for node in check.node_list)
    apart = sum(node.macs for node in check.node_list if node.name in floats)
    return Work(check.taken_macs, round(1 - apart / max(total, 1), 4))


def has_no_gain(search: Search, searched: Searched) -> bool:
    """Returns True if integers save no work: all of it left them, or nothing multiplies at all and much is lost."""
    chosen, first = searched.chosen, searched.trials[0]
    check = check_trial(search, quantize_step(search, chosen.step, chosen.plan).model)
    if not any(node.macs for node in check.node_list):
        return loses_much(chosen.prediction, is_noise=search.is_noise)
    return not chosen.integer_macs and first.integer_macs > 0


def check_trial(search: Search, model: Model) -> CheckReport:
    """Returns what the target takes of a model, which is checked once."""
    if model.sha256 not in search.checks:
        search.checks[model.sha256] = check_model(model, search.target, advises=False)
    return search.checks[model.sha256]


def measure_plan(
    search: Search, step: str, plan: QuantPlan, work: Work | None = None, *, rival: Trial | None = None
) -> Trial:
    """Returns the trial of a plan, measured over all samples, or over as many as show that the `rival` is better."""
    model, work = quantize_step(search, step, plan).model, work or measure_work(search, step, plan)
    if search.look is not None and rival is not None:
        lost = search.look(model, rival=quantize_step(search, rival.step, rival.plan).model)
    else:
        lost = search.measure(model)
    return Trial(step=step, plan=plan, prediction=lost, taken_macs=work.taken, integer_macs=work.integer)


def attempt_trial(search: Search, step: str, make: Callable[[], Trial | None]) -> Trial | None:
    """Returns a trial; None if its plan leaves nothing in integers, or if it fails (`Budget.attempt`)."""

    def attempt() -> Trial | None:
        with suppress(NothingQuantizedError):
            return make()
        return None

    return search.memo.budget.attempt(step, attempt)


def quantize_step(search: Search, step: str, plan: QuantPlan) -> QuantizedModel:
    """Returns the model of a step of the search, which is written once."""
    known, quantized = search.tried.get(step, (None, None))
    if quantized is None or known != plan:
        quantized = quantize_model(search.model, plan, search.calibration, search.work / f"{step}.onnx", is_trial=True)
        search.tried[step] = plan, quantized
    return quantized


def write_chosen(search: Search, plan: QuantPlan, searched: Searched | None, out: Path) -> QuantizedModel:
    """Writes the model of a plan to `out`: a copy of the file from the search if there is one, else a new one.

    Raises:
        EdgekitError: as for `quantize_model`.
    """
    known, quantized = search.tried.get(searched.chosen.step, (None, None)) if searched is not None else (None, None)
    # A model refers to its external data by file name, so it cannot be copied under another name.
    if quantized is None or known != plan or quantized.model.external_files:
        return quantize_model(search.model, plan, search.calibration, out)
    # A trial has an LSTM as one node, of which QNN needs the parts.
    if any(node.op_type == "LSTM" for node in skim_model(quantized.model.path).graph.node):
        return quantize_model(search.model, plan, search.calibration, out)
    replace_file(quantized.model.path, out)
    model = msgspec.structs.replace(quantized.model, path=out, name=out.name.removesuffix(".onnx"))
    return msgspec.structs.replace(quantized, model=model)
