"""A device run over whole sequences, each step with the state that it made itself at the step before.

What comes back is fed back here, and each step is a run of the device: no device has to know of state, and none can say
that it kept it. All sequences go side by side, so that there are as many runs as steps.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from edgekit.bundle.golden.golden import Golden
from edgekit.bundle.golden.rows import write_rows
from edgekit.data.samples import Samples, load_samples
from edgekit.devices.device import Device, Job
from edgekit.errors import DeviceError, EdgekitError
from edgekit.model.state import State, run_steps
from edgekit.model.tensors import Tensors
from edgekit.verify.drift import StateReport, measure_drift, outputs_to_judge
from edgekit.verify.metrics.compare import compare_outputs


def run_sequences(
    device: Device, job: Job, state: State, golden: Golden, reference: Samples, given: Samples, work: Path
) -> StateReport:
    """Runs the samples of a job as sequences and returns how far they drift.

    `reference` is what the float model gives for them, and `given` what the device made of them with its state; both
    hold whole sequences.
    """
    sequences = reference.count // state.steps
    found = StateReport(sequences=sequences, steps=state.steps)
    try:
        fed_back = _step(device, job, state, golden, sequences, work)
    except EdgekitError as error:
        return msgspec.structs.replace(found, failure=error.message)
    reports = compare_outputs(reference, fed_back)
    names = [spec.name for spec in golden.outputs]
    return msgspec.structs.replace(
        found,
        outputs=outputs_to_judge(reports, state.feeds),
        drift=measure_drift(names, reference, fed_back, given, state.steps),
    )


def _step(device: Device, job: Job, state: State, golden: Golden, sequences: int, work: Path) -> Samples:
    """Returns the outputs in the order of the samples, step after step of the first sequence, then of the next."""
    specs, runs = {spec.name: spec for spec in golden.inputs}, iter(range(state.steps))

    def run(samples: Sequence[Tensors]) -> Sequence[Tensors]:
        return _run_one(device, job, samples, work / f"step-{next(runs)}")

    steps = run_steps(_side_by_side(job.samples, state.steps, sequences), state.feeds, specs, run)
    for step, (_, outputs) in enumerate(steps):
        write_rows(work / f"step-{step}.npz", outputs, ragged=True)

    def read() -> Iterator[Tensors]:
        files = [load_samples(str(work / f"step-{step}.npz"), golden.outputs) for step in range(state.steps)]
        for rows in zip(*files, strict=True):
            yield from rows

    return Samples(source=device.name, count=sequences * state.steps, read=read)


def _side_by_side(samples: Samples, steps: int, sequences: int) -> Iterator[list[Tensors]]:
    """Yields for each step the samples of all sequences; one step is in memory at a time."""
    for step in range(steps):
        yield list(islice(samples, step, sequences * steps, steps))


def _run_one(device: Device, job: Job, samples: Sequence[Tensors], work: Path) -> list[Tensors]:
    """Runs one step on the device.

    Raises:
        DeviceError: not every sequence came back.
    """
    work.mkdir(parents=True)
    step = Samples(source=job.samples.source, count=len(samples), read=lambda: iter(samples))
    # No step may stop early: what follows needs the state of every sequence.
    run = device.run_job(msgspec.structs.replace(job, samples=step, budget_s=job.timeout_s), work)
    if run.failure is not None or run.outputs.count != len(samples):
        raise DeviceError(run.failure or f"{run.outputs.count} of {len(samples)} samples came back", hint="see its log")
    return list(run.outputs)
