"""Times a subject on devices, and says how far the times can be trusted."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgekit._files import work_folder
from edgekit._ort import CPU_PROVIDER
from edgekit.bench.blocks import PRECISION, Block, Comparison, Effort, compare_on, run_enough, run_queue
from edgekit.bench.latency import describe_change, describe_drift, find_drift, find_energy, median_interval
from edgekit.bench.subject import Opening, Subject, open_pair, open_subject
from edgekit.devices.device import Device, Job, SkippedDevice, find_present
from edgekit.devices.observe import count_nodes
from edgekit.devices.parallel import run_each
from edgekit.devices.process.files import list_model_files
from edgekit.devices.register import DeviceChoice, choose_devices
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.progress import Progress, say_nothing


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one subject on one device, in milliseconds per run.

    `provider` is the target's, or the CPU provider if the target's took no node; `provider_nodes` counts the nodes by
    provider. `interval_ms` is the 95 % confidence interval of the median. A run takes `batch` samples, `concurrency`
    runs are made at once, and `throughput_per_s` counts samples. With a `queue`, such as "200/s, 5 ms", times are those
    from a request to its answer: requests arrive at 200/s, and a batch of at most `batch` requests starts when the
    oldest has waited 5 ms, or with "full" only when the batch is full. `load_ms` and `first_ms` are the cold start: the
    time to create the session, and that of its first run. The first `warmup` runs were left out. `model_bytes` is the
    size of all loaded files. `threads` and `inter_threads` of 0 mean that ONNX Runtime chose; the latter matter only if
    nodes ran in `parallel`. `energy_mj` is the energy per sample in millijoules of all processor packages, including
    other programs, if the system reports it. `warnings` say why the figures are less reliable than they look. If the
    device failed, `failure` says how, and the figures are 0.
    """

    device: str
    evidence: Evidence
    provider: str
    provider_nodes: dict[str, int] = {}
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
    load_ms: float = 0.0
    first_ms: float = 0.0
    peak_rss_bytes: int = 0
    model_bytes: int = 0
    energy_mj: float | None = None
    warmup: int = 0
    iterations: int = 0
    threads: int = 0
    inter_threads: int = 0
    parallel: bool = False
    versions: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    failure: str | None = None

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
    # The energy covers all runs, including warm-up, and the making of the session.
    used = [find_energy(block.run.before, block.run.after) for block in blocks]
    runs = sum(len(block.run.latency_ms) for block in blocks)
    known = [joules for joules in used if joules is not None]
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
        interval_ms=median_interval(series),
        throughput_per_s=1e3 * (1 if empty.queue else empty.batch) / blocks[-1].pace_ms if median > 0 else 0.0,
        load_ms=last.load_ms,
        first_ms=blocks[0].first_ms,
        peak_rss_bytes=last.peak_rss_bytes,
        energy_mj=1e3 * sum(known) / (runs * empty.batch) if len(known) == len(used) and runs else None,
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
        if (drift := find_drift(block.latency_ms)) is not None:
            yield describe_drift(drift)
        yield from describe_change(block.run.before, block.run.after)
    low, high = run.interval_ms
    half_width = (high - low) / 2 / run.median_ms if run.median_ms > 0 else 0.0
    if half_width > PRECISION:
        yield f"the median is known to {half_width:.0%} only: give it more time (--seconds) or a quieter device"
    if run.iterations < _MIN_RUNS_FOR_P99:
        yield f"p99 of {run.iterations} runs is little more than the slowest of them"
    yield from blocks[-1].run.notes
