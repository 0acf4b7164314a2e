"""One measurement of a setting: a session of its own, warmed up and run, its outputs held against the reference."""

from collections.abc import Callable

import msgspec
import numpy as np

from edgekit.bench.blocks import Block, run_block
from edgekit.data.samples import Samples
from edgekit.devices.device import Device, Job
from edgekit.errors import DeviceError, EdgekitError
from edgekit.model.tensors import Tensors
from edgekit.target import Thresholds
from edgekit.tune.report import Entrant, Measured
from edgekit.tune.space import Goal
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import judge_output

GATE = Thresholds(min_cosine=0.999, min_top1_agreement=0.0, min_sqnr_db=30.0)
"""What outputs of a bare model must keep beside those of the defaults; a bundle has limits of its own.

Other kernels add in another order (100 dB and more), and integer kernels differ from the float spelling of the same
graph by half a step here and there (35 to 50 dB): 30 dB lets both pass. Chosen by hand.
"""

# Long beside starting a session, short enough that a round of eight settings sees one state of the machine.
_RUN_MS = 400.0
_FEWEST, _MOST = 5, 60
_FOR_P99, _LONGEST_P99_MS = 100, 2000.0
# Where runs do not count, a run or two are enough: it is warmed up by so much.
_NO_WARMUP_MS = 1e3


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """Where settings race: the device, what makes a job of an entrant, and what their outputs are held against.

    `guess_ms` is about what a run with the defaults takes; `seconds` is the most that a measurement may take.
    """

    device: Device
    goal: Goal
    job_for: Callable[[Entrant], Job]
    reference: Tensors
    gate: Thresholds
    guess_ms: float
    seconds: float = 20.0


def measure(course: Course, entrant: Entrant) -> Measured:
    """Returns what one session of a setting gave; what fails is a fault, and no error.

    Raises:
        DeviceError: the device is gone: no other setting would find it there.
    """
    try:
        block = _run(course, course.job_for(entrant))
    except EdgekitError as error:
        missing = course.device.find_missing()
        if missing is not None:
            hint = missing.command or "what was measured is kept where --state names a file"
            raise DeviceError(f"'{course.device.name}' is gone: {missing.reason}", hint=hint) from error
        return Measured(fault=f"failed: {error.message}")
    got = block.outputs
    if entrant.batch > 1:
        # The first rows are those of the one sample: others have no reference.
        got = {name: value[: len(course.reference[name])] if value.ndim else value for name, value in got.items()}
    sqnr_db, fault = hold_outputs(_one(course.reference), _one(got), course.gate)
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
    if found.fault is None and course.goal == "memory" and not found.peak_rss_bytes:
        return msgspec.structs.replace(found, fault="the device does not tell what memory it needs")
    return found


def hold_outputs(reference: Samples, got: Samples, gate: Thresholds) -> tuple[float | None, str | None]:
    """Returns the least SQNR in dB of outputs beside the reference, and why they do not keep the gate, None if so."""
    reports = compare_outputs(reference, got)
    ratios = [report.sqnr_db for report in reports if report.sqnr_db is not None]
    failures = [reason for report in reports for reason in judge_output(report, gate)]
    return min(ratios, default=None), f"its outputs differ: {failures[0]}" if failures else None


def _one(tensors: Tensors) -> Samples:
    return Samples(source="one sample", count=1, read=lambda: iter((tensors,)))


def _run(course: Course, job: Job) -> Block:
    if course.goal in {"memory", "load"}:
        return run_block(course.device, job, 2, course.seconds, _NO_WARMUP_MS)
    fitting = int(_RUN_MS / course.guess_ms)
    runs = max(_FEWEST, min(_MOST, fitting))
    if course.goal == "p99":
        runs = max(runs, min(_FOR_P99, int(_LONGEST_P99_MS / course.guess_ms)))
    return run_block(course.device, job, runs, course.seconds, course.guess_ms)
