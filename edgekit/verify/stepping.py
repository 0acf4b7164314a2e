"""A device run over whole sequences, each step with the state that it made itself at the step before.

What comes back is fed back here: no device has to know of state, and none can say that it kept it. All steps run in one
session, as in an app, and all sequences go side by side.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec

from edgekit.bundle.golden import Golden, write_rows
from edgekit.data.samples import Samples, load_samples, select_samples
from edgekit.devices.device import Device, Job
from edgekit.devices.process.session import open_session
from edgekit.errors import CrashError, EdgekitError
from edgekit.model.outputs import Reading
from edgekit.model.state import State, run_steps
from edgekit.model.tensors import Tensors
from edgekit.verify.drift import StateReport, measure_drift, outputs_to_judge
from edgekit.verify.metrics.compare import compare_outputs


def run_sequences(
    device: Device,
    job: Job,
    state: State,
    golden: Golden,
    reference: Samples,
    given: Samples,
    work: Path,
    *,
    readings: Mapping[str, Reading],
) -> StateReport:
    """Runs the samples of a job as sequences and returns how far they drift.

    `reference` is what the float model gives for them, and `given` what the device made of them with its state; both
    hold whole sequences. `readings` say what outputs are for.
    """
    sequences = reference.count // state.steps
    found = StateReport(sequences=sequences, steps=state.steps)
    try:
        fed_back = _step(device, job, state, golden, sequences, work)
    except EdgekitError as error:
        return msgspec.structs.replace(found, failure=error.message, crashed=isinstance(error, CrashError))
    reports = compare_outputs(reference, fed_back, readings)
    names = [spec.name for spec in golden.outputs]
    return msgspec.structs.replace(
        found,
        outputs=outputs_to_judge(reports, state.feeds),
        drift=measure_drift(names, reference, fed_back, given, state.steps),
    )


def _step(device: Device, job: Job, state: State, golden: Golden, sequences: int, work: Path) -> Samples:
    """Returns the outputs in the order of the samples, step after step of the first sequence, then of the next."""
    specs, count = {spec.name: spec for spec in golden.inputs}, sequences * state.steps
    whole = msgspec.structs.replace(job, samples=select_samples(job.samples, range(count)))
    session = work / "session"
    session.mkdir(parents=True)
    with open_session(device, whole, session) as run:
        steps = run_steps(_side_by_side(job.samples, state.steps, sequences), state.feeds, specs, run)
        for step, (_, outputs) in enumerate(steps):
            write_rows(work / f"step-{step}.npz", outputs, ragged=True)

    def read() -> Iterator[Tensors]:
        files = [load_samples(str(work / f"step-{step}.npz"), golden.outputs) for step in range(state.steps)]
        for rows in zip(*files, strict=True):
            yield from rows

    return Samples(source=device.name, count=count, read=read)


def _side_by_side(samples: Samples, steps: int, sequences: int) -> Iterator[list[Tensors]]:
    """Yields for each step the samples of all sequences; one step is in memory at a time."""
    for step in range(steps):
        yield list(islice(samples, step, sequences * steps, steps))
