"""Automatic quantization: from the cheapest plan to dearer ones, until the expected drop is small enough."""

import time
from collections.abc import Callable, Collection, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, open_regular, replacing_file, require_place, write_file
from edgekit._ort import VERSION
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.errors import UsageError
from edgekit.model.model import Model, load_model
from edgekit.progress import Progress
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.apply import quantize_model
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.image_headroom import makes_images
from edgekit.quantize.graph.graph import read_graph
from edgekit.quantize.mixed_precision.choose import GOOD_DB, plan_quantization, relieve_step
from edgekit.quantize.plan import QuantPlan
from edgekit.target import Precision, Target

RELIEFS = (1, 3, 8, 20, 40, 80)
"""How many of the most harmful tensors are taken out of 8 bits, step by step."""
PLAIN_DROP = 0.005
"""A drop that the plain mode does not mind: half a point, or of 36 dB 0.18 dB."""
_PLAIN_RELIEFS = (1, 3, 8)
_PLAIN_INTEGER = 0.75
_WORTH = 0.002
"""A plan that takes more tensors out of 8 bits than another must be expected to drop less by so much."""
_SAME_SHARE = 0.005
_HALF = 0.5
MAX_STATE_BYTES = 1 << 28


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a search is for: a drop of at most `max_drop` (a share), as `measure` finds it for a quantized model.

    `reliefs` are the counts of tensors that may leave 8 bits. No plan is used that leaves less than the share
    `least_integer` of the first one's work in integers.
    """

    max_drop: float
    measure: Callable[[Model], Prediction]
    reliefs: tuple[int, ...] = RELIEFS
    least_integer: float = 0.0


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan that was tried: how it was made, what it costs, and the share of work that the target takes of it.

    `integer_macs` is the share of the work that is done in integers, 1.0 if everything is.
    """

    step: str
    plan: QuantPlan
    prediction: Prediction
    taken_macs: float
    integer_macs: float = 1.0


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found: every trial in order, and the one that was chosen; `note` says what `met` leaves out."""

    trials: tuple[Trial, ...]
    chosen: Trial
    met: bool
    note: str = ""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a search that was interrupted had tried, the file where it is kept, and what it was a search for."""

    path: Path
    key: dict[str, str]
    trials: tuple[Trial, ...]


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file of a state holds; `sha256` is that of the trials."""

    key: dict[str, str]
    trials: tuple[Trial, ...]
    sha256: str


class _Search(msgspec.Struct, frozen=True, kw_only=True):
    model: Model
    calibration: Calibration
    target: Target
    precision: Precision
    goal: Goal
    work: Path
    state: State | None
    first: QuantPlan | None = None


def search_quantization(
    model: Model,
    calibration: Calibration,
    target: Target,
    precision: Precision,
    goal: Goal,
    *,
    work: Path,
    state: State | None = None,
    progress: Progress,
) -> Searched:
    """Returns the plan that meets a goal with the least loss of placement, and everything that was tried.

    First the plan that is best with all in 8 bits; then more and more of the tensors that hurt most leave 8 bits, for
    16 where the target takes them, else for float. The search ends with the first plan that meets the goal and leaves
    the target no less work than the first plan did. If none does, `choose_trial` decides.

    Each trial is written to the file of the `state`, from which an interrupted search goes on.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    search = _Search(
        model=model, calibration=calibration, target=target, precision=precision, goal=goal, work=work, state=state
    )  # fmt: skip
    return choose_trial(_run_trials(search, progress), goal.max_drop)


def plan_sparingly(
    model: Model,
    calibration: Calibration,
    target: Target,
    precision: Precision,
    measure: Callable[[Model], Prediction],
    *,
    work: Path,
    progress: Progress,
) -> tuple[QuantPlan, Searched | None]:
    """Returns the plan of the plain mode: the best with all in 8 bits, unless that loses more than PLAIN_DROP.

    Then the 1, 3 and 8 tensors that hurt most leave 8 bits, as long as three quarters of the work stay in integers, and
    the fewest of them are used that reach PLAIN_DROP, or come within _WORTH of the least drop. What was tried is
    None where the drop need not be measured: outputs that are no images come within 30 dB of the float model's, or few
    samples leave nothing to judge by.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    progress(f"{target.name}: choose ranges and roundings")
    first = plan_quantization(model, calibration, target, precision)
    is_sure = not first.judged or (first.judged[0].sqnr_db >= GOOD_DB and not makes_images(read_graph(model)))
    if is_sure or precision != "int8":
        return first, None
    goal = Goal(max_drop=PLAIN_DROP, measure=measure, reliefs=_PLAIN_RELIEFS, least_integer=_PLAIN_INTEGER)
    search = _Search(
        model=model, calibration=calibration, target=target, precision=precision, goal=goal, work=work, state=None,
        first=first,
    )  # fmt: skip
    trials = _run_trials(search, progress)
    least = min(trials, key=_drop)
    if least.prediction.drop_estimate is None:
        chosen = next((trial for trial in trials if trial.prediction.meets(PLAIN_DROP)), trials[0])
    else:
        enough = max(PLAIN_DROP, _drop(least) + _WORTH)
        chosen = next(trial for trial in trials if _drop(trial) <= enough)
    return chosen.plan, Searched(trials=tuple(trials), chosen=chosen, met=True)


def _run_trials(search: _Search, progress: Progress) -> list[Trial]:
    calibration, state, goal = search.calibration, search.state, search.goal
    known = {trial.step: _with_statistics(trial, calibration.statistics) for trial in (state.trials if state else ())}
    trials: list[Trial] = []
    steps, spent = _steps(search, trials), list[float]()
    for index, (step, make) in enumerate(steps):
        left = f", at most {sum(spent) / len(spent) * (len(steps) - index):.0f} s left" if spent else ""
        left = ", known from the state" if step in known else left
        progress(f"{search.target.name}: try {index + 1} of {len(steps)} ({step}){left}")
        began = time.monotonic()
        trial = known.get(step) or _try(search, step, make)
        if step not in known:
            spent.append(time.monotonic() - began)
        if trial is None or (trials and trial.integer_macs < goal.least_integer * trials[0].integer_macs):
            break
        trials.append(trial)
        _write_state(search, trials)
        if _is_enough(trial, trials[0], goal):
            break
    return trials


def choose_trial(trials: Sequence[Trial], max_drop: float) -> Searched:
    """Returns the trial to use: of those that meet the goal the one with most work on the target, else the best.

    Where that one leaves less than half of the work in integers, one that misses the goal by less than the sampling
    error, and by no more than the goal itself, is used instead; and where none meets the goal, one whose drop is larger
    by no more than the goal.
    """
    meeting = [trial for trial in trials if trial.prediction.meets(max_drop)]
    if not meeting:
        return Searched(trials=tuple(trials), chosen=_nearest(trials, max_drop), met=False)
    chosen = _most_taken(meeting)
    near = [trial for trial in trials if trial.integer_macs >= _HALF and _nearly_meets(trial, max_drop)]
    if chosen.integer_macs >= _HALF or not near:
        return Searched(trials=tuple(trials), chosen=chosen, met=True)
    note = f"within the sampling error; '{chosen.step}' leaves {chosen.integer_macs:.0%} of the work in integers"
    return Searched(trials=tuple(trials), chosen=_most_taken(near), met=True, note=note)


def _nearest(trials: Sequence[Trial], max_drop: float) -> Trial:
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


def _most_taken(trials: Sequence[Trial]) -> Trial:
    return max(trials, key=lambda trial: round(trial.taken_macs / _SAME_SHARE))


def _nearly_meets(trial: Trial, max_drop: float) -> bool:
    drop, ends = trial.prediction.drop_estimate, trial.prediction.drop_interval
    return drop is not None and ends is not None and drop <= 2 * max_drop and ends[0] <= max_drop


def _steps(search: _Search, trials: Sequence[Trial]) -> list[tuple[str, Callable[[], QuantPlan | None]]]:
    def plain() -> QuantPlan:
        return search.first or plan_quantization(search.model, search.calibration, search.target, search.precision)

    def relieved(count: int) -> Callable[[], QuantPlan | None]:
        return lambda: relieve_step(search.model, search.calibration, search.target, trials[0].plan, count)

    reliefs = search.goal.reliefs if search.precision == "int8" else ()
    return [("all", plain), *((f"relieve {count}", relieved(count)) for count in reliefs)]


def _try(search: _Search, step: str, make: Callable[[], QuantPlan | None]) -> Trial | None:
    plan = make()
    if plan is None:
        return None
    with replacing_file(search.work / "trial.onnx") as temporary:
        quantized = quantize_model(search.model, plan, temporary)
        prediction = search.goal.measure(quantized.model)
        check = check_model(load_model(temporary), search.target)
    kept = {node.name for node in quantized.float_nodes}
    return Trial(
        step=step,
        plan=plan,
        prediction=prediction,
        taken_macs=check.taken_macs,
        integer_macs=round(_integer_share(check, kept), 4),
    )


def _integer_share(check: CheckReport, kept: Collection[str]) -> float:
    total = sum(node.macs for node in check.node_list)
    return 1 - sum(node.macs for node in check.node_list if node.name in kept) / total if total else 1.0


def _is_enough(trial: Trial, first: Trial, goal: Goal) -> bool:
    return trial.prediction.meets(goal.max_drop) and trial.taken_macs >= first.taken_macs - _SAME_SHARE


def _drop(trial: Trial) -> float:
    drop = trial.prediction.drop_estimate
    return -trial.prediction.sqnr_db if drop is None else drop


def open_state(
    path: Path, model: Model, samples_sha256: str, target: Target, precision: Precision, labels: str
) -> State:
    """Returns what the file of a state holds for this search, nothing where there is none yet.

    `labels` says by what the drop is measured.

    Raises:
        UsageError: the file holds no state, was changed, or is of another search.
        OutputError: it cannot be written.
    """
    key = {
        "model": model.sha256,
        "samples": samples_sha256,
        "target": target.name,
        "precision": precision,
        "settings": ",".join(f"{name}={value}" for name, value in sorted(target.settings.items())),
        "labels": labels,
        "version": f"edgekit {version('edgekit')}, onnxruntime {VERSION}",
    }
    require_place(path)
    if not path.exists():
        return State(path=path, key=key, trials=())
    stored, hint = _read_stored(path), f"remove '{path}' or name another file"
    other = [name for name in key if stored.key.get(name) != key[name]]
    if other:
        raise UsageError(f"'{path}' is of a search for another {' and '.join(other)}", hint=hint)
    if stored.sha256 != _digest(stored.trials):
        raise UsageError(f"'{path}' was changed after it was written", hint=hint)
    return State(path=path, key=key, trials=stored.trials)


def _read_stored(path: Path) -> _Stored:
    hint = f"remove '{path}' or name another file"
    try:
        with open_regular(path) as stream:
            return msgspec.json.decode(stream.read(MAX_STATE_BYTES), type=_Stored)
    except OSError as error:
        raise UsageError(f"cannot read the state '{path}': {error.strerror}", hint=hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"'{path}' is no state of a search: {error}", hint=hint) from error


def _digest(trials: Sequence[Trial]) -> str:
    return digest_bytes(msgspec.json.encode(trials, order="sorted"))


def _with_statistics(trial: Trial, statistics: str) -> Trial:
    return msgspec.structs.replace(trial, plan=msgspec.structs.replace(trial.plan, statistics=statistics))


def _write_state(search: _Search, trials: Sequence[Trial]) -> None:
    if search.state is not None:
        kept = tuple(_with_statistics(trial, "") for trial in trials)
        stored = _Stored(key=search.state.key, trials=kept, sha256=_digest(kept))
        write_file(search.state.path, msgspec.json.encode(stored, order="sorted"))
