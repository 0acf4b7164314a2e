"""Compares settings in interleaved rounds (successive halving), and tests the best one in fresh rounds.

A race is this comparison of the current setting with challengers: the slower half of the challengers is dropped
repeatedly, and the last one must prove its gain. Each measurement is a separate session, warmed up and run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import geometric_mean

import msgspec
import numpy as np

from edgekit._files import read_state, write_state
from edgekit._ort import VERSION
from edgekit.bench.bench import ROUNDS, Block, run_block
from edgekit.bench.latency import Ratio, compare_rounds, measure_round
from edgekit.bundle.folder import Bundle
from edgekit.bundle.manifest import SessionSetting
from edgekit.data.samples import Samples, list_samples
from edgekit.devices.device import Device, Job
from edgekit.errors import DeviceError, EdgekitError
from edgekit.model.tensors import Tensors
from edgekit.target import Thresholds
from edgekit.tune.space import Goal
from edgekit.verify.metrics.compare import compare_bundled, compare_outputs
from edgekit.verify.metrics.outputs import weigh_output

GATE = Thresholds(min_cosine=0.999, min_top1_agreement=0.0, min_sqnr_db=30.0)
"""The limits for the outputs of a bare model, compared with those of the default settings.

A setting must not change the results. (A bundle's outputs are compared with those of the float model, as in `verify`.)
Kernels that add in another order give 100 dB and more, and integer kernels differ from the same graph computed in
float by half a quantization step here and there (35 to 50 dB): 30 dB accepts both. Chosen by hand.
"""

# Long compared with the start of a session, but so short that the machine's state hardly changes during a round of
# eight settings.
_RUN_MS = 400.0
_MIN_RUNS, _MAX_RUNS = 5, 60
_RUNS_FOR_P99, _MAX_P99_MS = 100, 2000.0
# For goals that do not depend on run times, two runs are enough: this guess of a run's time leads to almost no warm-up.
_NO_WARMUP_MS = 1e3


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in the race: its differences from the defaults, its file and its batch size."""

    name: str
    setting: SessionSetting = SessionSetting()
    file: str = ""
    batch: int = 1


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a setting, after a warm-up.

    `sqnr_db` is the SQNR of the outputs against the reference, None if they are not numeric. `fault` says why the
    setting is excluded: it failed, or its outputs differ.
    """

    median_ms: float = 0.0
    p99_ms: float = 0.0
    load_ms: float = 0.0
    first_ms: float = 0.0
    peak_rss_bytes: int = 0
    sqnr_db: float | None = None
    fault: str | None = None


class Measurement(Figures, frozen=True, kw_only=True):
    """One measurement of a setting, in a session of its own.

    `pace_ms` is the typical time from the end of one sample to the end of the next.
    """

    pace_ms: float = 0.0
    runs: int = 0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a race: whether the last challenger replaces the current setting (`taken`), and why.

    `holder` is the current setting. `ratio` is the challenger's cost divided by the holder's, from fresh rounds that
    were not used to select the challenger; None if there were none. `screened` are the ratios of the selection rounds:
    they prove nothing, because the best was picked by them.
    """

    group: str
    holder: str
    challenger: str = ""
    ratio: Ratio | None = None
    taken: bool = False
    reason: str = ""
    screened: dict[str, float] = {}


class RaceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a race needs: the device, the function that makes an entrant's job, and the reference outputs.

    `bundle` is the bundle whose float model gave the reference; None if the reference is the outputs of the default
    settings. `guess_ms` is an estimate of the time of a run with the defaults; `seconds` is the time limit of a
    measurement.
    """

    device: Device
    goal: Goal
    job_for: Callable[[Entrant], Job]
    reference: Tensors
    gate: Thresholds
    guess_ms: float
    bundle: Bundle | None = None
    seconds: float = 20.0


def measure(setup: RaceSetup, entrant: Entrant) -> Measurement:
    """Returns the measurement of one session with a setting; a failure becomes its `fault`, not an error.

    Raises:
        DeviceError: the device is gone, so that no other setting could run either.
    """
    try:
        block = _run(setup, setup.job_for(entrant))
    except EdgekitError as error:
        if (missing := setup.device.find_missing()) is not None:
            hint = missing.command or "what was measured is kept where --state names a file"
            raise DeviceError(f"'{setup.device.name}' is gone: {missing.reason}", hint=hint) from error
        return Measurement(fault=f"failed: {error.message}")
    outputs = block.outputs
    if entrant.batch > 1:
        # Only the first rows are those of the reference's sample.
        outputs = {name: it[: len(setup.reference[name])] if it.ndim else it for name, it in outputs.items()}
    wanted, got = list_samples([setup.reference], "the reference"), list_samples([outputs], setup.device.name)
    sqnr_db, fault = judge_outputs(wanted, got, setup.gate, setup.bundle)
    if fault is None and setup.goal == "memory" and not block.run.peak_rss_bytes:
        fault = "the device does not tell what memory it needs"
    return Measurement(
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


def judge_outputs(
    reference: Samples, got: Samples, gate: Thresholds, bundle: Bundle | None = None
) -> tuple[float | None, str | None]:
    """Returns the lowest SQNR of the outputs in dB (None if none is numeric), and why they fail (None if they pass)."""
    reports = compare_outputs(reference, got) if bundle is None else compare_bundled(bundle, reference, got)
    ratios = [report.sqnr_db for report in reports if report.sqnr_db is not None]
    failures = [reason for report in reports for reason in weigh_output(report, gate).failures]
    return min(ratios, default=None), f"its outputs differ: {failures[0]}" if failures else None


def _run(setup: RaceSetup, job: Job) -> Block:
    if setup.goal in {"memory", "load"}:
        return run_block(setup.device, job, 2, setup.seconds, _NO_WARMUP_MS)
    runs = max(_MIN_RUNS, min(_MAX_RUNS, int(_RUN_MS / setup.guess_ms)))
    if setup.goal == "p99":
        runs = max(runs, min(_RUNS_FOR_P99, int(_MAX_P99_MS / setup.guess_ms)))
    return run_block(setup.device, job, runs, setup.seconds, setup.guess_ms)


class Round(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that were measured one after another, once each, and the seconds that this took."""

    entrants: tuple[Entrant, ...]
    measured: tuple[Measurement, ...]
    seconds: float


class Journal:
    """Runs rounds within a time budget and records them in a file; rounds that the file has are not run again.

    As the search is deterministic, it asks for the same rounds in the same order as long as the measurements are the
    same, so that recorded rounds can simply be replayed. A round that was interrupted is run again from its start,
    because its ratios are valid only between measurements close in time.
    """

    def __init__(
        self,
        measure: Callable[[Entrant], Measurement],
        budget_s: float,
        path: Path | None = None,
        key: Mapping[str, str] | None = None,
    ) -> None:
        self._measure, self._path = measure, path
        self.budget_s = budget_s
        self._key = {**(key or {}), "version": f"edgekit {version('edgekit-onnx')}, onnxruntime {VERSION}"}
        self._recorded = () if path is None else read_state(path, self._key, tuple[Round, ...]) or ()
        self.rounds: list[Round] = []

    @property
    def seconds(self) -> float:
        """The total time of all rounds."""
        return sum(one.seconds for one in self.rounds)

    @property
    def measurements(self) -> int:
        """The number of measured sessions."""
        return sum(len(one.measured) for one in self.rounds)

    def take(
        self, entrants: Sequence[Entrant], *, reserve: int = 0, until_s: float = math.inf
    ) -> Sequence[Measurement] | None:
        """Measures each entrant once, in an order that changes from round to round; returns None if no time is left.

        A round starts only if time for `reserve` further measurements would be left after it, and if it would end
        before `until_s` seconds.
        """
        number = len(self.rounds)
        if number < len(self._recorded) and self._recorded[number].entrants == tuple(entrants):
            self.rounds.append(self._recorded[number])
            return self._recorded[number].measured
        # Estimated by the slowest round, because about half of the rounds take longer than the average.
        each_s = max((one.seconds / len(one.measured) for one in self.rounds), default=0.0)
        if self.seconds + each_s * len(entrants) > min(until_s, self.budget_s - each_s * reserve):
            return None
        start = time.monotonic()
        measured = measure_round(number, entrants, self._measure)
        self.rounds.append(Round(entrants=tuple(entrants), measured=measured, seconds=time.monotonic() - start))
        if self._path is not None:
            write_state(self._path, self._key, self.rounds)
        return measured


TakeRound = Callable[[Sequence[Entrant]], Sequence[Measurement] | None]
"""Measures some entrants once each, one after another (`Journal.take`); returns None if no time is left."""

LEAST_GAIN = 0.01
"""A setting that saves less than this share of the cost is not adopted."""

TIME_OVER = "the time was over before it was decided"

_ROUNDS_PER_HEAT = 2
# After half of the final rounds, the comparison stops if the challenger is not ahead, to save time. Stopping for
# futility does not make false claims more likely.
_FUTILITY_CHECK = ROUNDS // 2


def cost_of(measured: Measurement, goal: Goal) -> float:
    """Returns the quantity that a goal minimizes."""
    costs: Mapping[Goal, float] = {
        "latency": measured.median_ms,
        "p99": measured.p99_ms,
        "throughput": measured.pace_ms,
        "memory": float(measured.peak_rss_bytes),
        # Includes the first run, because kernels defer work to it.
        "load": measured.load_ms + measured.first_ms,
    }
    return costs[goal]


def race(group: str, holder: Entrant, challengers: Sequence[Entrant], take: TakeRound, goal: Goal) -> Decision:
    """Races challengers against the holder (the current setting), and decides whether one replaces it.

    Each heat is two rounds, after which the slower half of the challengers is dropped. The last challenger replaces the
    holder if the interval of its ratio in fresh rounds is below 1, and it saves LEAST_GAIN.
    """
    excluded: dict[str, str] = {}
    ratios: dict[str, list[float]] = {entrant.name: [] for entrant in challengers}
    remaining, failure = list(challengers), ""
    while remaining and not failure:
        for _ in range(_ROUNDS_PER_HEAT):
            racing = [entrant for entrant in remaining if entrant.name not in excluded]
            measured_all = take([holder, *racing])
            failure = TIME_OVER if measured_all is None else measured_all[0].fault or ""
            if measured_all is None or failure:
                break
            for entrant, measured in zip(racing, measured_all[1:], strict=True):
                if measured.fault is not None:
                    excluded[entrant.name] = measured.fault
                else:
                    ratios[entrant.name].append(cost_of(measured, goal) / cost_of(measured_all[0], goal))
        measured_names = (one.name for one in remaining if one.name not in excluded and ratios[one.name])
        screened = {name: geometric_mean(ratios[name]) for name in measured_names}
        ahead = [one for one in remaining if screened.get(one.name, 1.0) < 1 - LEAST_GAIN]
        ahead.sort(key=lambda one: screened[one.name])
        remaining = ahead[: max(1, len(remaining) // 2)]
        if len(remaining) == 1:
            break
    gains = {name: geometric_mean(each) for name, each in ratios.items() if each and name not in excluded}
    empty = Decision(group=group, holder=holder.name, screened=gains)
    if failure or not remaining:
        best = min(gains, key=lambda name: gains[name], default=None)
        figure = "" if best is None else f"'{best}' at {gains[best]:.3f}"
        if failure:
            so_far = f": so far {figure} was the best" if failure == TIME_OVER and figure else ""
            return msgspec.structs.replace(empty, reason=failure + so_far)
        reasons = [f"no gain: none was ahead by {LEAST_GAIN:.0%}: the best was {figure}"] if figure else []
        reasons += [f"'{name}' is out: {why}" for name, why in excluded.items()]
        return msgspec.structs.replace(empty, reason="; ".join(reasons))
    challenger = remaining[0]
    ratio = compare_fresh(holder, challenger, take, goal, _FUTILITY_CHECK)
    named = msgspec.structs.replace(empty, challenger=challenger.name)
    if isinstance(ratio, str):
        return msgspec.structs.replace(named, reason=ratio)
    low, high = ratio.interval
    words = f"{ratio.value:.3f} times the cost, 95 % between {low:.3f} and {high:.3f}, {ratio.rounds} fresh rounds"
    if ratio.rounds < ROUNDS:
        reason = f"not ahead any more in fresh rounds: {words}"
    elif high >= 1:
        reason = f"no difference can be told: {words}"
    elif ratio.value > 1 - LEAST_GAIN:
        reason = f"gains less than {LEAST_GAIN:.0%}: {words}"
    else:
        return msgspec.structs.replace(named, ratio=ratio, taken=True, reason=words)
    return msgspec.structs.replace(named, ratio=ratio, reason=reason)


def compare_fresh(
    holder: Entrant, challenger: Entrant, take: TakeRound, goal: Goal, futile: int = ROUNDS
) -> Ratio | str:
    """Compares a challenger with the holder in new rounds; returns the ratio, or a message why there is none.

    After `futile` rounds it stops if the challenger does not save LEAST_GAIN.
    """
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        if (found := take([holder, challenger])) is None:
            return TIME_OVER
        if (fault := next((measured.fault for measured in found if measured.fault is not None), None)) is not None:
            return fault
        rounds.append((cost_of(found[0], goal), cost_of(found[1], goal)))
        if number + 1 == futile < ROUNDS and (ratio := compare_rounds(rounds)).value > 1 - LEAST_GAIN:
            return ratio
    return compare_rounds(rounds)
