"""Runs one sample many times on a device: after a warm-up, in slices, as often as the spread of the times requires."""

import math
from statistics import median

import msgspec

from edgekit._files import work_folder
from edgekit.bench.latency import Ratio, compare_rounds, count_needed, find_impossible_time, find_steady
from edgekit.bench.subject import Subject
from edgekit.data.samples import Samples
from edgekit.devices.device import LEAST_SAMPLES, Device, DeviceRun, Job, Queue
from edgekit.devices.register import address_of, kind_of
from edgekit.errors import DeviceError, EdgekitError, UsageError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors
from edgekit.progress import Progress

PRECISION = 0.02
"""The wanted half width of the median's confidence interval, as a share of the median."""
# A noisy device would require more and more runs.
MAX_RUNS = 2000
FIRST_RUNS = 50

# The device checks its time budget after each slice of runs; a message per run would disturb the measurement.
_SLICE_MS = 200.0
# The first runs of a session fill its arena and raise the CPU's clock. This is the longest warm-up; its actual end is
# found from the times.
_MAX_WARMUP_MS = 300.0
_MAX_WARMUP_RUNS = 50
# A coarse clock may return 0 for a short run, and the guess is a divisor.
_MIN_GUESS_MS = 1e-3
_WITH_QUEUE = "--on host, arm64, or ssh:HOST where a python3 has onnxruntime"
# Devices, by address or kind, that do not run models in the runner in Python.
_WITHOUT_QUEUE = frozenset({"adb", "android", "arm64:native", "emulated", "host:native", "ios-sim"})
_MIN_REQUESTS = 50


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs to make, and with which session settings.

    With `runs` of None, runs go on until the median is known to PRECISION, or `seconds` per device are over. `threads`
    is the number of intra-op threads; 0 keeps that of the tuned bundle, or else ONNX Runtime's default. `inter_threads`
    is likewise that of inter-op threads, which run nodes concurrently if execution is `parallel` (None keeps the
    bundle's setting). `concurrency` runs are made at once in one session. With `io_binding`, inputs are bound, and
    outputs are written into the buffers of the preceding run.
    """

    runs: int | None = None
    seconds: float = 20.0
    threads: int = 0
    inter_threads: int = 0
    parallel: bool | None = None
    concurrency: int = 1
    io_binding: bool = False
    queue: Queue | None = None

    def apply(self, job: Job) -> Job:
        """Returns a job with these session settings."""
        return msgspec.structs.replace(
            job,
            threads=self.threads or job.threads,
            inter_threads=self.inter_threads or job.inter_threads,
            parallel=job.parallel if self.parallel is None else self.parallel,
            concurrency=self.concurrency,
            io_binding=self.io_binding or job.io_binding,
        )


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """The times of steady runs in one session, after the warm-up, in milliseconds; `first_ms` is that of the first run.

    `pace_ms` is the typical time from the end of one run to the end of the next: less than a run takes if several are
    made at once. `outputs` are those of the first run.
    """

    latency_ms: tuple[float, ...]
    run: DeviceRun
    warmup: int
    first_ms: float
    pace_ms: float
    outputs: Tensors = {}


def run_enough(device: Device, job: Job, effort: Effort) -> tuple[Block, ...]:
    """Returns blocks of runs: a first one, and if its spread requires more runs and time is left, a second.

    Raises:
        DeviceError: the device is not there, or failed.
    """
    guess_ms = guess_time(device, job, effort)
    fitting = count_fitting(effort.seconds, guess_ms)
    # The first block is a pilot, whose spread gives the sample size for the wanted half width, as in Stein's two-stage
    # procedure (Ann. Math. Stat. 16, 1945).
    first = run_block(device, job, effort.runs or min(FIRST_RUNS, fitting), effort.seconds, guess_ms)
    seconds_left = effort.seconds - sum(first.latency_ms) / 1e3
    wanted = min(count_needed(first.latency_ms, PRECISION), MAX_RUNS, fitting) - len(first.latency_ms)
    if effort.runs is not None or wanted <= 0 or seconds_left <= 0:
        return (first,)
    return first, run_block(device, job, wanted, seconds_left, guess_ms)


def guess_time(device: Device, job: Job, effort: Effort) -> float:
    """Returns an estimate of the milliseconds of a run.

    Raises:
        DeviceError: the device is not there, or failed.
    """
    run, _ = _run(device, job, slices=1, repeat=2 * job.concurrency, seconds=effort.seconds)
    return max(_MIN_GUESS_MS, median(run.latency_ms[job.concurrency :]))


def count_fitting(seconds: float, guess_ms: float) -> int:
    """Returns how many runs of `guess_ms` fit into `seconds`, at least LEAST_SAMPLES."""
    return max(LEAST_SAMPLES, int(seconds * 1e3 / guess_ms))


def run_queue(device: Device, job: Job, effort: Effort, queue: Queue) -> Block:
    """Returns the times from requests to their answers, for `effort.runs` requests or as many as arrive in its time.

    Raises:
        DeviceError: the device cannot serve a queue, is not there, or failed.
        UsageError: the model has no dynamic first axis, so that requests cannot be stacked.
    """
    if _WITHOUT_QUEUE & {address_of(device), kind_of(device)}:
        words = f"'{device.name}' serves no queue: only the runner in Python does; {_WITH_QUEUE}"
        raise DeviceError(words, hint="edgekit bench --help")
    if not queue.rows:
        words = "--queue means nothing here: no input has a dynamic first axis"
        raise UsageError(words, hint="export the model with a free batch")
    count = effort.runs or max(_MIN_REQUESTS, min(MAX_RUNS, int(queue.rate_per_s * effort.seconds)))
    asked = msgspec.structs.replace(job, queue=queue, concurrency=1, io_binding=False)
    run, outputs = _run(device, asked, slices=1, repeat=count, seconds=effort.seconds)
    # The queue is empty at first, so the first requests are not typical.
    warmup = count // 10
    first_ms, pace_ms = run.latency_ms[0], run.elapsed_ms[0] / count
    times = run.latency_ms[warmup:]
    return Block(latency_ms=times, run=run, warmup=warmup, first_ms=first_ms, pace_ms=pace_ms, outputs=outputs)


def run_block(device: Device, job: Job, runs: int, seconds: float, guess_ms: float) -> Block:
    """Returns the times of `runs` runs, or of fewer if `seconds` are over before, which is checked after each slice.

    Raises:
        DeviceError: the device is not there, or failed.
    """
    max_warmup = min(_MAX_WARMUP_RUNS, max(1, math.ceil(_MAX_WARMUP_MS / guess_ms)))
    repeat = max(1, min(runs + max_warmup, int(_SLICE_MS / guess_ms)))
    if job.concurrency > 1:
        # Starting threads must not be measured: slices are long in comparison, and the first one only warms up.
        repeat = job.concurrency * max(1, int(_SLICE_MS / guess_ms))
    slices = math.ceil((runs + max_warmup) / repeat) + (job.concurrency > 1)
    run, outputs = _run(device, job, slices=slices, repeat=repeat, seconds=seconds)
    # A device slower than estimated made fewer runs: at most half of them are warm-up.
    warmup = find_steady(run.latency_ms, min(max_warmup, len(run.latency_ms) // 2))
    times = run.latency_ms[warmup : warmup + runs]
    steady = run.elapsed_ms[1:]
    pace_ms = median(steady) / repeat if steady else median(times)
    return Block(latency_ms=times, run=run, warmup=warmup, first_ms=run.latency_ms[0], pace_ms=pace_ms, outputs=outputs)


def _run(device: Device, job: Job, *, slices: int, repeat: int, seconds: float) -> tuple[DeviceRun, Tensors]:
    """Returns a run of slices with the job's first sample, and the outputs of the first slice."""
    # The same sample over and over, so that only the device varies, not the data.
    sample = list(job.samples)[:1]
    samples = Samples(source=job.samples.source, count=slices, read=lambda: iter(sample * slices))
    sliced = msgspec.structs.replace(job, samples=samples, repeat=repeat, budget_s=seconds)
    with work_folder() as work:
        run = device.run_job(sliced, work)
        outputs = next(iter(run.outputs), None)
    if run.failure is not None:
        raise DeviceError(run.failure, hint=f"edgekit devices test {device.name}")
    if impossible := find_impossible_time((*run.latency_ms, *run.elapsed_ms)):
        raise DeviceError(f"'{device.name}' cannot be timed: {impossible}", hint=f"edgekit devices test {device.name}")
    return run, outputs or {}


# Comparison of two subjects on one device, in interleaved rounds, so that slow changes affect both alike.

# Student's quantile for seven degrees of freedom is 2.36, against 12.7 for two rounds and 1.96 for infinitely many.
ROUNDS = 8


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How the other subject (B) compares with the subject (A) on one device, in interleaved rounds.

    `ratio` is None if the comparison failed; `failure` says why.
    """

    device: str
    evidence: Evidence
    a: str
    b: str
    a_median_ms: float = 0.0
    b_median_ms: float = 0.0
    ratio: Ratio | None = None
    failure: str | None = None


def compare_on(a: Subject, b: Subject, device: Device, effort: Effort, progress: Progress) -> Comparison:
    """Returns how B compares with A on a device, or that the device failed.

    The order alternates from round to round, so that neither subject always runs on a rested (cooler) device.
    """
    result = Comparison(device=device.name, evidence=device.evidence, a=a.name, b=b.name)
    rounds: list[tuple[float, float]] = []
    try:
        jobs = [effort.apply(subject.job_for(device)) for subject in (a, b)]
        guesses = [guess_time(device, job, effort) for job in jobs]
        seconds = effort.seconds / (2 * ROUNDS)
        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS} on {device.name}")
            medians: dict[int, float] = {}
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                runs = effort.runs or min(FIRST_RUNS, count_fitting(seconds, guesses[side]))
                medians[side] = median(run_block(device, jobs[side], runs, seconds, guesses[side]).latency_ms)
            rounds.append((medians[0], medians[1]))
        ratio = compare_rounds(rounds)
    except EdgekitError as error:
        return msgspec.structs.replace(result, failure=error.message)
    except ValueError as error:
        return msgspec.structs.replace(result, failure=f"the device gave times that cannot be: {error}")
    a_ms, b_ms = (median(times) for times in zip(*rounds, strict=True))
    return msgspec.structs.replace(result, ratio=ratio, a_median_ms=a_ms, b_median_ms=b_ms)
