"""Each size of a bundle with buckets on a device, with samples filled up to it, against what they give as they are.

The float model ran each sample at its own length. What a device makes of the filled one is cut back and held against
that: so a model in which what fills a sample changes what comes out fails, whoever runs it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden.golden import Golden, read_outputs
from edgekit.bundle.manifest.buckets import Bucket, Buckets
from edgekit.bundle.manifest.manifest import UNPADDED
from edgekit.data.padding import crop_samples, cut_samples, free_axes
from edgekit.data.samples import Samples, load_samples, select_samples
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.devices.placed import count_nodes
from edgekit.devices.recorded import is_recorded
from edgekit.errors import DataError, EdgekitError
from edgekit.verify.facts import BucketReport, SizesReport
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport


class Unfilled(msgspec.Struct, frozen=True, kw_only=True):
    """Golden samples that were filled up to the largest bucket: how long each was, and what the float model made of it.

    `outputs` are its results for them as they were.
    """

    golden: Golden
    lengths: tuple[int, ...]
    outputs: Samples


def run_buckets(
    bundle: Bundle,
    device: Device,
    job: Job,
    run: DeviceRun,
    rows: Sequence[int],
    work: Path,
    unfilled: Unfilled | None = None,
) -> SizesReport | None:
    """Returns what becomes of the samples `rows` in the smallest bucket that takes each; None without buckets.

    They are the golden ones, or those of `unfilled`. `job` and its `run` are those of the largest, with every sample:
    what they gave is cut back, and not run again. A bucket that no sample falls into takes shorter ones.

    Raises:
        DataError: the bundle's float results cannot be read.
    """
    buckets = bundle.manifest.buckets
    if not buckets or run.failure is not None:
        return None
    if unfilled is None:
        whole, filled = _read_unpadded(bundle.golden, buckets), read_outputs(bundle.golden)
    else:
        whole, filled = unfilled.outputs, read_outputs(unfilled.golden)
        buckets = msgspec.structs.replace(buckets, lengths=unfilled.lengths)
    return SizesReport(
        dim=buckets.padding.dim,
        filled=_compare(buckets, whole, filled, rows, buckets.sizes[-1].size),
        sizes=tuple(_run_sizes(bundle.folder, buckets, device, job, run, rows, whole, work)),
    )


def _read_unpadded(golden: Golden, buckets: Buckets) -> Samples:
    samples = load_samples(str(golden.folder.parent / UNPADDED), free_axes(buckets.padding.outputs, golden.outputs))
    if samples.count != golden.samples:
        raise DataError(
            f"'{UNPADDED}' holds {samples.count} samples, not {golden.samples}", hint="build the bundle again"
        )
    return samples


def _run_sizes(
    folder: Path,
    buckets: Buckets,
    device: Device,
    job: Job,
    run: DeviceRun,
    rows: Sequence[int],
    whole: Samples,
    work: Path,
) -> Iterator[BucketReport]:
    for bucket in buckets.sizes[:-1]:
        mine = _choose_rows(buckets, bucket, rows)
        report = BucketReport(size=bucket.size, file=bucket.file, lengths=_reach(buckets, mine))
        if is_recorded(device) or not mine:
            yield report
            continue
        try:
            sized = _set_size(job, buckets, folder / bucket.file, bucket.size, [rows.index(row) for row in mine])
            done = _run_size(device, sized, work / str(bucket.size))
        except EdgekitError as error:
            yield msgspec.structs.replace(report, failure=error.message)
            continue
        outputs = () if done.failure else _compare(buckets, whole, done.outputs, mine, bucket.size, selected=True)
        nodes = count_nodes(done, sized)
        yield msgspec.structs.replace(
            report, outputs=outputs, provider_nodes=nodes, failure=done.failure, crashed=done.crashed
        )
    largest = buckets.sizes[-1]
    outputs = _compare(buckets, whole, run.outputs, rows, largest.size, selected=True)
    yield BucketReport(size=largest.size, file=largest.file, lengths=_reach(buckets, rows), outputs=outputs)


def _set_size(job: Job, buckets: Buckets, model: Path, size: int, places: Sequence[int]) -> Job:
    """Returns the job that runs some samples of another one, which has them filled up further, at a size."""
    samples = crop_samples(buckets.padding, select_samples(job.samples, places), size)
    outputs = free_axes(buckets.padding.outputs, job.outputs)
    return msgspec.structs.replace(job, model=model, outputs=outputs, samples=samples)


def _run_size(device: Device, job: Job, work: Path) -> DeviceRun:
    work.mkdir(parents=True)
    run, wanted = device.run_job(job, work), job.samples.count
    if run.failure is None and run.outputs.count != wanted:
        return msgspec.structs.replace(run, failure=f"{run.outputs.count} of {wanted} samples came back")
    return run


def _choose_rows(buckets: Buckets, bucket: Bucket, rows: Sequence[int]) -> list[int]:
    """Returns those of the samples that a bucket is the smallest for, or where there are none the shorter ones."""
    mine = [row for row in rows if buckets.choose(buckets.lengths[row]) == bucket]
    return mine or [row for row in rows if buckets.lengths[row] <= bucket.size]


def _reach(buckets: Buckets, rows: Sequence[int]) -> tuple[int, ...]:
    return tuple(buckets.lengths[row] for row in rows)


def _compare(
    buckets: Buckets, whole: Samples, got: Samples, rows: Sequence[int], size: int, *, selected: bool = False
) -> tuple[OutputReport, ...]:
    """Compares what came back at a size, cut to the lengths of the samples; `selected` where it is of `rows` alone."""
    made = got if selected else select_samples(got, rows)
    lengths = [buckets.lengths[row] for row in rows]
    return compare_outputs(select_samples(whole, rows), cut_samples(buckets.padding, made, lengths, size))
