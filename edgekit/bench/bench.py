"""Times a subject on devices, and says how far the times can be trusted.

One sample is run many times: after a warm-up, in slices, as often as the spread of the times requires.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from edgekit._files import work_folder
from edgekit._ort import CPU_PROVIDER
from edgekit.bench import latency
from edgekit.bench.subject import Opening, Subject, open_pair, open_subject
from edgekit.data.samples import list_samples
from edgekit.devices.device import LEAST_SAMPLES, Device, DeviceRun, Job, Queue, SkippedDevice, find_present
from edgekit.devices.find import DeviceChoice, address_of, choose_devices, kind_of
from edgekit.devices.observe import count_nodes
from edgekit.devices.parallel import run_each
from edgekit.errors import DeviceError, EdgekitError, UsageError
from edgekit.evidence import DeviceResult, Evidence, SessionReport
from edgekit.model.model import list_model_files
from edgekit.model.tensors import Tensors
from edgekit.progress import Progress, say_nothing

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
    wanted = min(latency.count_needed(first.latency_ms, PRECISION), MAX_RUNS, fitting) - len(first.latency_ms)
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
    warmup = latency.find_steady(run.latency_ms, min(max_warmup, len(run.latency_ms) // 2))
    times = run.latency_ms[warmup : warmup + runs]
    steady = run.elapsed_ms[1:]
    pace_ms = median(steady) / repeat if steady else median(times)
    return Block(latency_ms=times, run=run, warmup=warmup, first_ms=run.latency_ms[0], pace_ms=pace_ms, outputs=outputs)


def _run(device: Device, job: Job, *, slices: int, repeat: int, seconds: float) -> tuple[DeviceRun, Tensors]:
    """Returns a run of slices with the job's first sample, and the outputs of the first slice."""
    with work_folder() as work:
        run = run_slices(device, job, work, slices=slices, repeat=repeat, seconds=seconds)
        return run, next(iter(run.outputs), {})


def run_slices(device: Device, job: Job, work: Path, *, slices: int, repeat: int, seconds: float) -> DeviceRun:
    """Runs the job's first sample `slices` times `repeat` times; the device may stop after a slice beyond `seconds`.

    It is the same sample over and over, so that only the device varies, not the data.

    Raises:
        DeviceError: the device is not there, failed, or gave a time that is none.
    """
    samples = list_samples(list(job.samples)[:1] * slices, job.samples.source)
    run = device.run_job(msgspec.structs.replace(job, samples=samples, repeat=repeat, budget_s=seconds), work)
    impossible = latency.find_impossible_time((*run.latency_ms, *run.elapsed_ms))
    if failure := run.failure or (impossible and f"'{device.name}' cannot be timed: {impossible}"):
        raise DeviceError(failure, hint=f"edgekit devices test {device.name}")
    return run


# Comparison of two subjects on one device, in interleaved rounds, so that slow changes affect both alike.

# Student's quantile for seven degrees of freedom is 2.36, against 12.7 for two rounds and 1.96 for infinitely many.
ROUNDS = 8


class Comparison(DeviceResult, frozen=True, kw_only=True):
    """How the other subject (B) compares with the subject (A) on one device, in interleaved rounds.

    `ratio` is None if the comparison failed; `failure` says why.
    """

    a: str
    b: str
    a_median_ms: float = 0.0
    b_median_ms: float = 0.0
    ratio: latency.Ratio | None = None


def compare_on(a: Subject, b: Subject, device: Device, effort: Effort, progress: Progress) -> Comparison:
    """Returns how B compares with A on a device, or that the device failed."""
    result = Comparison(device=device.name, evidence=device.evidence, a=a.name, b=b.name)
    rounds: list[tuple[float, ...]] = []
    try:
        jobs = [effort.apply(subject.job_for(device)) for subject in (a, b)]
        guesses = [guess_time(device, job, effort) for job in jobs]
        seconds = effort.seconds / (2 * ROUNDS)

        def measure(side: int) -> float:
            runs = effort.runs or min(FIRST_RUNS, count_fitting(seconds, guesses[side]))
            return median(run_block(device, jobs[side], runs, seconds, guesses[side]).latency_ms)

        for number in range(ROUNDS):
            progress(f"round {number + 1} of {ROUNDS} on {device.name}")
            rounds.append(latency.measure_round(number, (0, 1), measure))
        ratio = latency.compare_rounds(rounds)
    except EdgekitError as error:
        return msgspec.structs.replace(result, failure=error.message)
    except ValueError as error:
        return msgspec.structs.replace(result, failure=f"the device gave times that cannot be: {error}")
    a_ms, b_ms = (median(times) for times in zip(*rounds, strict=True))
    return msgspec.structs.replace(result, ratio=ratio, a_median_ms=a_ms, b_median_ms=b_ms)


class BenchRun(SessionReport, frozen=True, kw_only=True):
    """The times of one subject on one device, in milliseconds per run.

    `provider` is the target's, or the CPU provider if the target's took no node; `provider_nodes` counts the nodes by
    provider. `interval_ms` is the 95 % confidence interval of the median. A run takes `batch` samples, `concurrency`
    runs are made at once, and `throughput_per_s` counts samples. With a `queue`, such as "200/s, 5 ms", times are those
    from a request to its answer: requests arrive at 200/s, and a batch of at most `batch` requests starts when the
    oldest has waited 5 ms, or with "full" only when the batch is full. `load_ms` and `first_ms` are the cold start: the
    time to create the session, and that of its first run. The first `warmup` runs were left out. `model_bytes` is the
    size of all loaded files. `threads` and `inter_threads` of 0 mean that ONNX Runtime chose; the latter matter only if
    nodes ran in `parallel`. `warnings` say why the figures are less reliable than they look. If the device failed,
    `failure` says how, and the figures are 0.
    """

    provider_nodes: Mapping[str, int] = {}
    batch: int = 1
    concurrency: int = 1
    io_binding: bool = False
    queue: str = ""
    median_ms: float = 0.0
    mean_ms: float = 0.0
    p90_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    min_ms: float = 0.0
    max_ms: float = 0.0
    std_ms: float = 0.0
    interval_ms: tuple[float, float] = (0.0, 0.0)
    throughput_per_s: float = 0.0
    first_ms: float = 0.0
    peak_rss_bytes: int = 0
    model_bytes: int = 0
    warmup: int = 0
    iterations: int = 0
    threads: int = 0
    inter_threads: int = 0
    parallel: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def execution(self) -> str:
        """How nodes are executed, in words; "" for sequential execution."""
        return "" if not self.parallel else f"parallel, {self.inter_threads or 'ORT chooses how many'} at once"


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a subject on several devices, in the order in which they were asked for.

    `regressions` say what is slower than in the last recorded benchmark by more than was allowed.
    """

    subject: str
    runs: tuple[BenchRun, ...] = ()
    skipped: tuple[SkippedDevice, ...] = ()
    against: str | None = None
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    regressions: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """True if something ran, nothing failed, and nothing is slower than allowed."""
        failures = [*(run.failure for run in self.runs), *(found.failure for found in self.comparisons)]
        return bool(failures) and all(failure is None for failure in failures) and not self.regressions


# With fewer runs, the 99th percentile lies between the two slowest ones.
_MIN_RUNS_FOR_P99 = 100


def bench_on(
    path: Path,
    choice: DeviceChoice,
    efforts: Sequence[Effort],
    openings: Sequence[Opening] = (Opening(),),
    *,
    against: Path | None = None,
    progress: Progress = say_nothing,
) -> BenchReport:
    """Returns the times of a bundle or a model on devices, for each combination of an opening and an effort.

    With `against`, the two are compared instead, with the first opening and the first effort.

    Raises:
        EdgekitError: the bundle, the model, the data, the target or the name of a device is wrong.
    """
    with work_folder() as work:
        subjects, other = list[Subject](), None
        if against is None:
            subjects = [open_subject(path, work / f"a{index}", opening) for index, opening in enumerate(openings)]
        else:
            *subjects, other = open_pair(path, against, work, openings[0])
        devices = choose_devices(choice, subjects[0].target_for, default=(subjects[0].default_device,))
        return bench_subjects(subjects, devices, efforts, against=other, progress=progress)


def bench_subjects(
    subjects: Sequence[Subject],
    devices: Sequence[Device],
    efforts: Sequence[Effort],
    *,
    against: Subject | None = None,
    progress: Progress = say_nothing,
) -> BenchReport:
    """Returns the times of subjects on each device, or with `against` how that one compares with the first subject.

    Devices on this machine run one at a time, others concurrently. If a device fails, the report says so.
    """
    present, skipped = find_present(devices)
    report = BenchReport(subject=subjects[0].name, skipped=skipped, notes=subjects[0].notes)
    if against is None:
        trials = [(subject, effort) for subject in subjects for effort in efforts]

        def measure(device: Device) -> list[BenchRun]:
            return [_bench_device(subject, effort, progress, device) for subject, effort in trials]

        found = run_each(present, measure, timed=True)
        return msgspec.structs.replace(report, runs=tuple(run for runs in found for run in runs))
    first, effort = subjects[0], efforts[0]
    compared = run_each(present, lambda on: compare_on(first, against, on, effort, progress), timed=True)
    return msgspec.structs.replace(report, against=against.name, comparisons=compared)


def _bench_device(subject: Subject, effort: Effort, progress: Progress, device: Device) -> BenchRun:
    progress(f"time {subject.name} on {device.name}" + (f", {subject.batch} at a time" if subject.batch > 1 else ""))
    queue, queue_text = effort.queue, ""
    if queue is not None:
        queue_text = f"{queue.rate_per_s:g}/s, {'full' if queue.wait_ms is None else f'{queue.wait_ms:g} ms'}"
    run = BenchRun(
        device=device.name,
        evidence=device.evidence,
        provider=CPU_PROVIDER,
        threads=effort.threads,
        batch=subject.batch if queue is None else queue.most,
        concurrency=effort.concurrency,
        io_binding=effort.io_binding,
        queue=queue_text,
    )
    try:
        job = effort.apply(subject.job_for(device))
        run = msgspec.structs.replace(
            run,
            provider=job.target.provider,
            model_bytes=sum(file.stat().st_size for file in list_model_files(job.model).values()),
            inter_threads=job.inter_threads,
            parallel=job.parallel,
        )
        if queue is None:
            return _describe(run, run_enough(device, job, effort), job)
        queue = msgspec.structs.replace(queue, rows=subject.rows)
        return _describe(run, (run_queue(device, job, effort, queue),), job)
    except EdgekitError as error:
        return msgspec.structs.replace(run, failure=error.message)


def _describe(empty: BenchRun, blocks: Sequence[Block], job: Job) -> BenchRun:
    series, last = np.concatenate([block.latency_ms for block in blocks]), blocks[-1].run
    counts = count_nodes(last, job)
    median, p90, p95, p99 = (float(value) for value in np.percentile(series, [50.0, 90.0, 95.0, 99.0]))
    run = msgspec.structs.replace(
        empty,
        provider_nodes=counts,
        median_ms=median,
        mean_ms=float(series.mean()),
        p90_ms=p90,
        p95_ms=p95,
        p99_ms=p99,
        min_ms=float(series.min()),
        max_ms=float(series.max()),
        std_ms=float(series.std(ddof=1)) if len(series) > 1 else 0.0,
        interval_ms=latency.median_interval(series),
        throughput_per_s=1e3 * (1 if empty.queue else empty.batch) / blocks[-1].pace_ms if median > 0 else 0.0,
        load_ms=last.load_ms,
        first_ms=blocks[0].first_ms,
        peak_rss_bytes=last.peak_rss_bytes,
        warmup=blocks[-1].warmup,
        iterations=len(series),
        versions=dict(sorted(last.versions.items())),
    )
    return msgspec.structs.replace(
        run,
        # A time measured on the CPU must not be reported under the accelerator's name.
        provider=empty.provider if counts.get(empty.provider) else CPU_PROVIDER,
        warnings=tuple(_list_warnings(run, empty.provider, blocks)),
    )


def _list_warnings(run: BenchRun, provider: str, blocks: Sequence[Block]) -> Iterator[str]:
    """Yields reasons why the figures are less reliable than they look, the most serious first."""
    if run.evidence is not Evidence.DEVICE:
        yield f"this is not the device's time ({run.evidence.value}: {run.evidence.meaning})"
    if not run.provider_nodes.get(provider):
        yield f"silent fallback: {provider} took no node"
    for block in blocks:
        if (drift := latency.find_drift(block.latency_ms)) is not None:
            yield latency.describe_drift(drift)
        yield from latency.describe_change(block.run.before, block.run.after)
    low, high = run.interval_ms
    half_width = (high - low) / 2 / run.median_ms if run.median_ms > 0 else 0.0
    if half_width > PRECISION:
        yield f"the median is known to {half_width:.0%} only: give it more time (--seconds) or a quieter device"
    if run.iterations < _MIN_RUNS_FOR_P99:
        yield f"p99 of {run.iterations} runs is little more than the slowest of them"
    yield from blocks[-1].run.notes
