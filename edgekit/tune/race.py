"""Races: settings in interleaved rounds, the slower half dropped after each, until one is proved the fastest.

One measurement is a session of its own, warmed up and run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import geometric_mean

import msgspec
import numpy as np

from edgekit._files import read_search, write_file
from edgekit._ort import VERSION
from edgekit.bench.blocks import ROUNDS, Block, run_block
from edgekit.bench.latency import Ratio, compare_rounds
from edgekit.bundle.folder import Bundle
from edgekit.data.samples import Samples, list_samples
from edgekit.devices.device import Device, Job
from edgekit.errors import DeviceError, EdgekitError
from edgekit.model.tensors import Tensors
from edgekit.target import Thresholds
from edgekit.tune.report import Decision, Entrant, Measured
from edgekit.tune.space import Goal
from edgekit.verify.metrics.compare import compare_bundled, compare_outputs
from edgekit.verify.metrics.outputs import judge_output

GATE = Thresholds(min_cosine=0.999, min_top1_agreement=0.0, min_sqnr_db=30.0)
"""What outputs of a bare model must keep beside those of the defaults: settings change how it is computed, not what.
A bundle's outputs are judged as `verify` judges them, beside the float model's.

Other kernels add in another order (100 dB and more), and integer kernels differ from the float spelling of the same
graph by half a step here and there (35 to 50 dB): 30 dB lets both pass. Chosen by hand.
"""

# Long beside starting a session, short enough that a round of eight settings sees one state of the machine.
_RUN_MS = 400.0
_FEWEST, _MOST = 5, 60
_FOR_P99, _LONGEST_P99_MS = 100, 2000.0
# Where runs do not count, a run or two are enough: it is warmed up by so much.
_NO_WARMUP_MS = 1e3


class RaceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a race needs: the device, the function that makes a job of an entrant, and the reference for the outputs.

    `bundle` says what its outputs are for, where the reference is the float model's; None of a bare model.
    `guess_ms` is about what a run with the defaults takes; `seconds` is the most that a measurement may take.
    """

    device: Device
    goal: Goal
    job_for: Callable[[Entrant], Job]
    reference: Tensors
    gate: Thresholds
    guess_ms: float
    bundle: Bundle | None = None
    seconds: float = 20.0


def measure(setup: RaceSetup, entrant: Entrant) -> Measured:
    """Returns what one session of a setting gave; what fails is a fault, and no error.

    Raises:
        DeviceError: the device is gone: no other setting would find it there.
    """
    try:
        block = _run(setup, setup.job_for(entrant))
    except EdgekitError as error:
        missing = setup.device.find_missing()
        if missing is not None:
            hint = missing.command or "what was measured is kept where --state names a file"
            raise DeviceError(f"'{setup.device.name}' is gone: {missing.reason}", hint=hint) from error
        return Measured(fault=f"failed: {error.message}")
    got = block.outputs
    if entrant.batch > 1:
        # The first rows are those of the one sample: others have no reference.
        got = {name: value[: len(setup.reference[name])] if value.ndim else value for name, value in got.items()}
    sqnr_db, fault = judge_outputs(
        list_samples([setup.reference], "the reference"),
        list_samples([got], setup.device.name),
        setup.gate,
        setup.bundle,
    )
    found = Measured(
        median_ms=float(np.median(block.latency_ms)),
        p99_ms=float(np.percentile(block.latency_ms, 99.0)),
        pace_ms=block.pace_ms / entrant.batch,
        load_ms=block.run.load_ms,
        first_ms=block.first_ms,
        peak_rss_bytes=block.run.peak_rss_bytes,
        runs=len(block.latency_ms),
        sqnr_db=sqnr_db,
        fault=fault,
    )
    if found.fault is None and setup.goal == "memory" and not found.peak_rss_bytes:
        return msgspec.structs.replace(found, fault="the device does not tell what memory it needs")
    return found


def judge_outputs(
    reference: Samples, got: Samples, gate: Thresholds, bundle: Bundle | None = None
) -> tuple[float | None, str | None]:
    """Returns the least SQNR in dB of outputs beside the reference, and why they do not keep the gate, None if so."""
    reports = compare_outputs(reference, got) if bundle is None else compare_bundled(bundle, reference, got)
    ratios = [report.sqnr_db for report in reports if report.sqnr_db is not None]
    failures = [reason for report in reports for reason in judge_output(report, gate)]
    return min(ratios, default=None), f"its outputs differ: {failures[0]}" if failures else None


def _run(setup: RaceSetup, job: Job) -> Block:
    if setup.goal in {"memory", "load"}:
        return run_block(setup.device, job, 2, setup.seconds, _NO_WARMUP_MS)
    fitting = int(_RUN_MS / setup.guess_ms)
    runs = max(_FEWEST, min(_MOST, fitting))
    if setup.goal == "p99":
        runs = max(runs, min(_FOR_P99, int(_LONGEST_P99_MS / setup.guess_ms)))
    return run_block(setup.device, job, runs, setup.seconds, setup.guess_ms)


# A round has some hundred bytes an entrant, and a search a few hundred rounds.
_MOST_BYTES = 1 << 26


class Round(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that were measured one after another, each once, and the seconds that it took."""

    entrants: tuple[Entrant, ...]
    measured: tuple[Measured, ...]
    seconds: float


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: dict[str, str]
    rounds: tuple[Round, ...]


class Journal:
    """Takes rounds within a time, and keeps them; those that a file holds are not run again.

    The search asks for the same rounds in the same order as long as the measurements are the same, so that what was
    kept is simply read again. One that was cut in the middle of a round takes that round anew: its ratios hold only
    between neighbours.
    """

    def __init__(
        self,
        measure: Callable[[Entrant], Measured],
        budget_s: float,
        path: Path | None = None,
        key: Mapping[str, str] | None = None,
    ) -> None:
        self._measure, self._path = measure, path
        self.budget_s = budget_s
        self._key = {**(key or {}), "version": f"edgekit {version('edgekit-onnx')}, onnxruntime {VERSION}"}
        stored = None if path is None else read_search(path, self._key, _Stored, _MOST_BYTES)
        self._kept = () if stored is None else stored.rounds
        self.rounds: list[Round] = []

    @property
    def seconds(self) -> float:
        """What all rounds took together."""
        return sum(one.seconds for one in self.rounds)

    @property
    def measurements(self) -> int:
        """How many sessions were measured."""
        return sum(len(one.measured) for one in self.rounds)

    def take(
        self, entrants: Sequence[Entrant], *, reserve: int = 0, until_s: float = math.inf
    ) -> Sequence[Measured] | None:
        """Measures each entrant once, in an order that is turned round each time; None where the time is over.

        Time for `reserve` more measurements is left for what comes after, and none is taken that would end behind
        `until_s` seconds.
        """
        number = len(self.rounds)
        if number < len(self._kept) and self._kept[number].entrants == tuple(entrants):
            self.rounds.append(self._kept[number])
            return self._kept[number].measured
        if not self._ends_before(self.budget_s, len(entrants) + reserve) or not self._ends_before(
            until_s, len(entrants)
        ):
            return None
        began = time.monotonic()
        places = list(range(len(entrants)))
        # What changes slowly hits all alike: nobody is always the first, which finds the machine rested.
        turned = places[number % len(places) :] + places[: number % len(places)]
        found = {place: self._measure(entrants[place]) for place in (turned if number % 2 == 0 else turned[::-1])}
        measured = tuple(found[place] for place in places)
        self.rounds.append(Round(entrants=tuple(entrants), measured=measured, seconds=time.monotonic() - began))
        if self._path is not None:
            write_file(self._path, msgspec.json.encode(_Stored(key=self._key, rounds=tuple(self.rounds))))
        return measured

    def _ends_before(self, limit_s: float, count: int) -> bool:
        # The slowest round is what may come again: the average would be exceeded by half of them.
        each = max((one.seconds / len(one.measured) for one in self.rounds), default=0.0)
        return self.seconds + each * count <= limit_s


TakeRound = Callable[[Sequence[Entrant]], Sequence[Measured] | None]
"""Measures each of some entrants once, one after another; None where there is no time left for it."""

LEAST_GAIN = 0.01
"""A setting that gains less than this is not worth being different from the defaults."""

TIME_OVER = "the time was over before it was decided"

_HEAT = 2
# Half of the last rounds: where the challenger is not ahead by then, the others are saved. Stopping because there is
# nothing to gain makes no false claim more likely.
_FUTILE = ROUNDS // 2


def cost_of(measured: Measured, goal: Goal) -> float:
    """Returns what a goal wants to be small."""
    costs: Mapping[Goal, float] = {
        "latency": measured.median_ms,
        "p99": measured.p99_ms,
        "throughput": measured.pace_ms,
        "memory": float(measured.peak_rss_bytes),
        # The first run belongs to it: kernels leave work for it.
        "load": measured.load_ms + measured.first_ms,
    }
    return costs[goal]


def race(group: str, holder: Entrant, challengers: Sequence[Entrant], take: TakeRound, goal: Goal) -> Decision:
    """Returns whether one of the challengers takes the place of the holder."""
    out: dict[str, str] = {}
    ratios: dict[str, list[float]] = {entrant.name: [] for entrant in challengers}
    living, failure = list(challengers), ""
    while living and not failure:
        failure = _run_heat(holder, living, ratios, out, take, goal)
        screened = {
            one.name: geometric_mean(ratios[one.name]) for one in living if one.name not in out and ratios[one.name]
        }
        ahead = [one for one in living if screened.get(one.name, 1.0) < 1 - LEAST_GAIN]
        ahead.sort(key=lambda one: screened[one.name])
        living = ahead[: max(1, len(living) // 2)]
        if len(living) == 1:
            break
    known = {name: geometric_mean(found) for name, found in ratios.items() if found and name not in out}
    empty = Decision(group=group, holder=holder.name, screened=known)
    if failure or not living:
        best = min(known, key=lambda name: known[name], default=None)
        so_far = "" if failure != TIME_OVER or best is None else f": so far '{best}' at {known[best]:.3f} was the best"
        return msgspec.structs.replace(empty, reason=failure + so_far or _explain_none(out, known))
    return _decide(empty, holder, living[0], take, goal)


def _run_heat(
    holder: Entrant,
    living: Sequence[Entrant],
    ratios: Mapping[str, list[float]],
    out: dict[str, str],
    take: TakeRound,
    goal: Goal,
) -> str:
    """Adds the ratios of a few rounds, and who is out; returns why the race ends, "" where it goes on."""
    for _ in range(_HEAT):
        racing = [entrant for entrant in living if entrant.name not in out]
        found = take([holder, *racing])
        if found is None:
            return TIME_OVER
        if found[0].fault is not None:
            return found[0].fault
        for entrant, measured in zip(racing, found[1:], strict=True):
            if measured.fault is not None:
                out[entrant.name] = measured.fault
            else:
                ratios[entrant.name].append(cost_of(measured, goal) / cost_of(found[0], goal))
    return ""


def compare_fresh(
    holder: Entrant, challenger: Entrant, take: TakeRound, goal: Goal, futile: int = ROUNDS
) -> Ratio | str:
    """Returns how a challenger compares with the holder in rounds of their own, or why that is not known.

    After `futile` rounds it ends where the challenger is not ahead.
    """
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        found = take([holder, challenger])
        if found is None:
            return TIME_OVER
        fault = next((measured.fault for measured in found if measured.fault is not None), None)
        if fault is not None:
            return fault
        rounds.append((cost_of(found[0], goal), cost_of(found[1], goal)))
        if number + 1 == futile < ROUNDS and (ratio := compare_rounds(rounds)).value > 1 - LEAST_GAIN:
            return ratio
    return compare_rounds(rounds)


def _decide(empty: Decision, holder: Entrant, challenger: Entrant, take: TakeRound, goal: Goal) -> Decision:
    found = compare_fresh(holder, challenger, take, goal, _FUTILE)
    named = msgspec.structs.replace(empty, challenger=challenger.name)
    if isinstance(found, str):
        return msgspec.structs.replace(named, reason=found)
    low, high = found.interval
    told = f"{found.value:.3f} times the cost, 95 % between {low:.3f} and {high:.3f}, {found.rounds} fresh rounds"
    if found.rounds < ROUNDS:
        reason = f"not ahead any more in fresh rounds: {told}"
    elif high >= 1:
        reason = f"no difference can be told: {told}"
    elif found.value > 1 - LEAST_GAIN:
        reason = f"gains less than {LEAST_GAIN:.0%}: {told}"
    else:
        return msgspec.structs.replace(named, ratio=found, taken=True, reason=told)
    return msgspec.structs.replace(named, ratio=found, reason=reason)


def _explain_none(out: Mapping[str, str], screened: Mapping[str, float]) -> str:
    best = min(screened, key=lambda name: screened[name], default=None)
    none = f"no gain: none was ahead by {LEAST_GAIN:.0%}"
    told = [] if best is None else [f"{none}: the best was '{best}' at {screened[best]:.3f}"]
    return "; ".join([*told, *(f"'{name}' is out: {why}" for name, why in out.items())])
