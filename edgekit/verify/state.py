"""Models with state: sequences run on a device step by step, the drift of their error, and its judgement."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from edgekit.bundle.golden import Golden, write_rows
from edgekit.bundle.manifest import Manifest
from edgekit.check.report import count_of
from edgekit.data.samples import Samples, load_samples, select_samples
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.devices.process.session import open_session
from edgekit.errors import CrashError, EdgekitError
from edgekit.evidence import Judgement
from edgekit.model.state import State, find_fed_back, run_steps
from edgekit.model.tensors import Array, Tensors, is_numeric
from edgekit.quantize.accuracy.loss import DEFAULT_MAX_DROP
from edgekit.target import Thresholds
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import Decibels, OutputReport, weigh_output
from edgekit.verify.metrics.tensor_metrics import decibels

ACCEPTED_DB = -10 * math.log10(DEFAULT_MAX_DROP)
"""A signal-to-noise ratio from here on is good enough for any drift: `quantize` accepts so much noise (half a point of
the variance of values) with a model's own state."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The signal-to-noise ratio of an output in dB at each step, over all sequences.

    `fed_back` is measured with the device's own state, `given` with the float model's state at each step (teacher
    forcing). None means that nothing can be measured: the float model's output is zero, or a value is not finite.
    `late_fed_back` and `late_given` are those of the second half of the steps together.
    """

    output: str
    fed_back: tuple[Decibels | None, ...]
    given: tuple[Decibels | None, ...]
    late_fed_back: Decibels | None
    late_given: Decibels | None

    @property
    def lost_db(self) -> float | None:
        """By how many dB the device's own state makes the second half of the steps worse, or None if unknown."""
        if self.late_fed_back is None or self.late_given is None:
            return None
        return max(0.0, self.late_given - self.late_fed_back)


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a device for whole sequences, in which each step gets the device's own state.

    `outputs` hold the figures of what the app reads: outputs that are state are left out, unless all are. `drift` has
    an entry for each numeric output. `failure` says why there are no figures, None if there are; `crashed` means that
    the program of an emulator died.
    """

    sequences: int
    steps: int
    outputs: tuple[OutputReport, ...] = ()
    drift: tuple[Drift, ...] = ()
    failure: str | None = None
    crashed: bool = False

    @property
    def read(self) -> tuple[Drift, ...]:
        """The drift of the outputs that the app reads.

        Outputs that are state are left out: most of a cache is copied at each step, and a copy adds no error.
        """
        names = {output.name for output in self.outputs}
        return tuple(drift for drift in self.drift if drift.output in names)


def judge_state(report: StateReport, thresholds: Thresholds) -> Judgement:
    """Returns whether a device keeps its state well enough, with one line for each reason why not."""
    steps, most = report.steps, thresholds.max_drift_db
    if report.crashed:
        return Judgement(unproven=(f"step by step the emulator crashed, which proves nothing: {report.failure}",))
    if report.failure is not None:
        return Judgement(failures=(f"step by step the device failed: {report.failure}",))
    if not report.sequences:
        stopped = f"it stopped before one sequence of {steps} steps was whole: what its own state costs is not known"
        return Judgement(unproven=(stopped,))
    if not report.outputs:
        return Judgement(failures=("step by step nothing was compared",))
    lines = (line for output in report.outputs for line in weigh_output(output, thresholds).failures)
    failures = [f"with its own state over {steps} steps, {line}" for line in lines]
    for drift in report.read:
        late, lost = drift.late_fed_back, drift.lost_db
        if most is not None and late is not None and lost is not None and late < ACCEPTED_DB and lost > most:
            costs = f"its own state costs it {lost:.1f} dB, more than {most:g} dB"
            failures.append(f"output '{drift.output}' drifts: in the later of {steps} steps {costs}")
    return Judgement(failures=tuple(failures))


def describe_state(report: StateReport) -> Iterator[str]:
    """Yields for each output how its error grew from the first step to the last, and which outputs are state."""
    if names := [each.output for each in report.drift if each not in report.read]:
        yield f"state is judged by what it does to the other outputs: {', '.join(map(repr, names))}"
    for drift in report.read:
        first, last, lost = drift.fed_back[0], drift.fed_back[-1], drift.lost_db
        if first is not None and last is not None and lost is not None:
            ran = f"{count_of(report.sequences, 'sequence')} of {report.steps} steps with its own state"
            ends = f"output '{drift.output}' has {first:.1f} dB at the first step and {last:.1f} dB at the last"
            yield f"{ran}: {ends}; its second half has {lost:.1f} dB less than with the float model's state"


def measure_drift(
    names: Sequence[str], reference: Samples, fed_back: Samples, given: Samples, steps: int
) -> tuple[Drift, ...]:
    """Returns the drift of outputs; the three sets of samples hold whole sequences in the same order."""
    powers: dict[str, Array] = {}
    for index, (wanted, back, own) in enumerate(zip(reference, fed_back, given, strict=True)):
        for name in names:
            if is_numeric(wanted[name]):
                values = wanted[name].astype(np.float64)
                found = np.sum(values**2), _error(values, back.get(name)), _error(values, own.get(name))
                powers.setdefault(name, np.zeros((3, steps)))[:, index % steps] += found
    late = slice(steps // 2, None)
    return tuple(
        Drift(
            output=name,
            fed_back=tuple(map(_decibels, signal, back_noise)),
            given=tuple(map(_decibels, signal, own_noise)),
            late_fed_back=_decibels(signal[late].sum(), back_noise[late].sum()),
            late_given=_decibels(signal[late].sum(), own_noise[late].sum()),
        )
        for name in names
        if name in powers
        for signal, back_noise, own_noise in [powers[name]]
    )


def _error(wanted: Array, got: Array | None) -> float:
    # An output that is missing or of another shape cannot be measured: its step has no figure, as with NaN.
    if got is None or got.shape != wanted.shape:
        return float("nan")
    return float(np.sum((got.astype(np.float64) - wanted) ** 2))


def _decibels(signal: float, noise: float) -> float | None:
    return decibels(signal, noise) if np.isfinite(signal) and np.isfinite(noise) and signal > 0 else None


def run_sequences(
    manifest: Manifest, device: Device, job: Job, run: DeviceRun, golden: Golden, reference: Samples, work: Path
) -> StateReport | None:
    """Runs the samples of a job as whole sequences, with the device's own state, and returns how far they drift.

    `reference` holds the float model's outputs, and `run` the device's outputs with the float model's state. None if
    the model has no state, the samples are no sequences, or the run failed.
    """
    state = manifest.state
    if not state or state.steps == 1 or run.failure is not None:
        return None
    sequences = reference.count // state.steps
    found = StateReport(sequences=sequences, steps=state.steps)
    if not sequences:
        return found
    reference, given = (select_samples(samples, range(sequences * state.steps)) for samples in (reference, run.outputs))
    try:
        fed_back = _step(device, job, state, golden, sequences, work)
    except EdgekitError as error:
        return msgspec.structs.replace(found, failure=error.message, crashed=isinstance(error, CrashError))
    reports = compare_outputs(reference, fed_back, manifest.readings or {})
    names = [spec.name for spec in golden.outputs]
    # An app reads the outputs that are no state, or all if there are no others.
    read = tuple(report for report in reports if report.name not in find_fed_back(state).values())
    drift = measure_drift(names, reference, fed_back, given, state.steps)
    return msgspec.structs.replace(found, outputs=read or tuple(reports), drift=drift)


def _step(device: Device, job: Job, state: State, golden: Golden, sequences: int, work: Path) -> Samples:
    """Returns the outputs in the order of the samples: all steps of the first sequence, then those of the next."""
    specs, count = {spec.name: spec for spec in golden.inputs}, sequences * state.steps
    whole = msgspec.structs.replace(job, samples=select_samples(job.samples, range(count)))
    # One step of all sequences is in memory at a time.
    turns = (list(islice(job.samples, step, count, state.steps)) for step in range(state.steps))
    with open_session(device, whole, work / "session") as run:
        for step, (_, outputs) in enumerate(run_steps(turns, state.feeds, specs, run)):
            write_rows(work / f"step-{step}.npz", outputs, ragged=True)

    def read() -> Iterator[Tensors]:
        files = [load_samples(str(work / f"step-{step}.npz"), golden.outputs) for step in range(state.steps)]
        for rows in zip(*files, strict=True):
            yield from rows

    return Samples(source=device.name, count=count, read=read)
