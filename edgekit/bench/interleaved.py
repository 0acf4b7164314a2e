"""Two subjects on one device in interleaved rounds, so that what changes slowly hits both alike."""

from statistics import median

import msgspec

from edgekit.bench.blocks import FIRST_RUNS, Effort, count_fitting, guess_time, run_block
from edgekit.bench.latency import compare_rounds
from edgekit.bench.report import Comparison
from edgekit.bench.subject import Subject
from edgekit.devices.device import Device
from edgekit.errors import EdgekitError
from edgekit.progress import Progress

# Seven degrees of freedom: Student's quantile is then 2.36, against 12.7 for two rounds and 1.96 for endless ones.
ROUNDS = 8


def compare_on(a: Subject, b: Subject, device: Device, effort: Effort, progress: Progress) -> Comparison:
    """Returns how B compares with A on a device; a device that fails is a finding.

    The one that is first in a round is second in the next, so that neither always finds the device rested.
    """
    result = Comparison(device=device.name, evidence=device.evidence, a=a.name, b=b.name)
    try:
        rounds = _run_rounds((a, b), device, effort, progress)
        ratio = compare_rounds(rounds)
    except EdgekitError as error:
        return msgspec.structs.replace(result, failure=error.message)
    except ValueError as error:
        return msgspec.structs.replace(result, failure=f"the device gave times that cannot be: {error}")
    a_ms, b_ms = (median(times) for times in zip(*rounds, strict=True))
    return msgspec.structs.replace(result, ratio=ratio, a_median_ms=a_ms, b_median_ms=b_ms)


def _run_rounds(
    subjects: tuple[Subject, Subject], device: Device, effort: Effort, progress: Progress
) -> list[tuple[float, float]]:
    jobs = [effort.apply(subject.job_for(device)) for subject in subjects]
    guesses = [guess_time(device, job, effort) for job in jobs]
    seconds = effort.seconds / (2 * ROUNDS)
    rounds: list[tuple[float, float]] = []
    for number in range(ROUNDS):
        progress(f"round {number + 1} of {ROUNDS} on {device.name}")
        medians: dict[int, float] = {}
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            runs = effort.runs or min(FIRST_RUNS, count_fitting(seconds, guesses[side]))
            medians[side] = median(run_block(device, jobs[side], runs, seconds, guesses[side]).latency_ms)
        rounds.append((medians[0], medians[1]))
    return rounds
