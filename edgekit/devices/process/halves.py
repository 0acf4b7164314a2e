"""A job in two halves side by side: for programs that keep one core busy, where nobody asks for times."""

from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path

import msgspec

from edgekit.data.samples import Samples, select_samples
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.process.child import describe_stop
from edgekit.machine import count_cores, map_in_order
from edgekit.model.tensors import Tensors


def can_halve(job: Job) -> bool:
    """Returns True if two programs may share the samples of a job: no time, trace or order of the session is asked."""
    is_plain = job.repeat == job.concurrency == 1 and not job.trace and job.answered is None and job.queue is None
    return is_plain and job.samples.count >= 2 * job.least_samples and count_cores() > 1


def run_in_halves(job: Job, work: Path, run: Callable[[Job, Path], DeviceRun]) -> DeviceRun:
    """Runs every other sample of a job in a call of its own, at once, and returns both as one run.

    Where a half stops early or fails, the outputs are those up to the first sample that is missing.

    Raises:
        EdgekitError: what `run` raises.
    """
    rows = [range(start, job.samples.count, 2) for start in (0, 1)]
    halves = [msgspec.structs.replace(job, samples=select_samples(job.samples, each)) for each in rows]

    def run_half(place: int) -> DeviceRun:
        folder = work / ("even", "odd")[place]
        folder.mkdir()
        return run(halves[place], folder)

    even, odd = (half for _, half in map_in_order(run_half, range(2), at_once=2))
    count = min(2 * even.outputs.count, 2 * odd.outputs.count + 1)
    stopped, told = even.stopped_early or odd.stopped_early, describe_stop(even.outputs.count, halves[0])
    return msgspec.structs.replace(
        even,
        outputs=_merge(even.outputs, odd.outputs, count),
        latency_ms=tuple(each for each in chain(*zip_longest(even.latency_ms, odd.latency_ms)) if each is not None),
        peak_rss_bytes=max(even.peak_rss_bytes, odd.peak_rss_bytes),
        failure=even.failure or odd.failure,
        crashed=even.crashed if even.failure else odd.crashed,
        stopped_early=stopped,
        notes=(*(note for note in even.notes if note not in told), *(describe_stop(count, job) if stopped else ())),
        log=even.log or odd.log,
    )


def _merge(even: Samples, odd: Samples, count: int) -> Samples:
    def read() -> Iterator[Tensors]:
        sides = iter(even), iter(odd)
        for index in range(count):
            yield next(sides[index % 2])

    return Samples(source=even.source, count=count, read=read)
