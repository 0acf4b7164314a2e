"""Outputs judged by the size of their samples: each bucket of a bundle, and groups of sizes of an open dimension.

This module also compares two devices of one kind, such as two emulated CPUs.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import Golden, read_outputs
from edgekit.bundle.manifest import UNPADDED, Manifest, list_open
from edgekit.data.padding import crop_samples, cut_samples, free_axes
from edgekit.data.samples import Samples, list_samples, load_samples, select_samples
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.devices.observe import count_nodes
from edgekit.devices.recorded import Recorded
from edgekit.errors import DataError
from edgekit.model.tensors import Tensors
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.run_report import BucketReport, SizesReport

_MOST_BYTES = 32 << 20


class KeptOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """The outputs of a device in memory, by the index of the golden sample.

    Only devices of one `kind` are compared: variants of the same device that ran the same file.
    """

    device: str
    kind: str
    rows: dict[int, Tensors]


def keep_outputs(device: str, kind: str, indices: Sequence[int], outputs: Samples) -> KeptOutputs | None:
    """Returns the outputs of a device for the golden samples with these indices, or None if they are large."""
    rows: dict[int, Tensors] = {}
    size_bytes = 0
    for index, row in zip(indices, outputs, strict=False):
        size_bytes += sum(value.nbytes for value in row.values())
        if size_bytes > _MOST_BYTES:
            return None
        rows[index] = row
    return KeptOutputs(device=device, kind=kind, rows=rows)


def describe_differences(kept: Sequence[KeptOutputs]) -> Iterator[str]:
    """Yields, for each device whose numbers differ from those of the first of its kind, by how much they differ."""
    first: dict[str, KeptOutputs] = {}
    for other in kept:
        one = first.setdefault(other.kind, other)
        shared = sorted(one.rows.keys() & other.rows.keys())
        if one is other or not shared:
            continue
        mine, theirs = (list_samples([side.rows[index] for index in shared], side.device) for side in (one, other))
        for output in compare_outputs(mine, theirs):
            if output.exact_match is not None and output.exact_match < 1:
                distance = f"in {1 - output.exact_match:.2%} of its elements"
            elif output.max_abs:
                ratio = "" if output.sqnr_db is None else f", {output.sqnr_db:.1f} dB"
                distance = f"by at most {output.max_abs:.3g}{ratio}"
            else:
                continue
            names = f"{other.device} and {one.device}"
            yield f"{names} give different numbers: '{output.name}' differs {distance}; each is judged by itself"


class UnpaddedGolden(msgspec.Struct, frozen=True, kw_only=True):
    """Golden samples padded to the largest bucket, with the length that each had before.

    `outputs` are what the float model gives for the samples without padding.
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
    unpadded: UnpaddedGolden | None,
) -> SizesReport | None:
    """Runs the samples `rows`, each in the smallest bucket that it fits; None for a bundle without buckets.

    The samples are the golden ones, or those of `unpadded`. `job` and its `run` are those of the largest bucket with
    all samples: their outputs are cut to the samples' lengths, and nothing runs again. A bucket that is the smallest
    for no sample runs the shorter ones.

    Raises:
        DataError: the bundle's float results cannot be read.
    """
    if not (buckets := bundle.manifest.buckets) or run.failure is not None:
        return None
    if unpadded is None:
        golden, open_outputs = bundle.golden, free_axes(buckets.padding.outputs, bundle.golden.outputs)
        whole, filled = load_samples(str(golden.folder.parent / UNPADDED), open_outputs), read_outputs(golden)
        if whole.count != golden.samples:
            said = f"'{UNPADDED}' holds {whole.count} samples, not {golden.samples}"
            raise DataError(said, hint="build the bundle again")
    else:
        whole, filled = unpadded.outputs, read_outputs(unpadded.golden)
        buckets = msgspec.structs.replace(buckets, lengths=unpadded.lengths)
    readings, folder, lengths = bundle.manifest.readings or {}, bundle.folder, buckets.lengths

    def compare(got: Samples, mine: Sequence[int], size: int) -> tuple[OutputReport, ...]:
        """Compares the outputs of some samples at one size, cut to the samples' lengths."""
        cut = cut_samples(buckets.padding, got, [lengths[row] for row in mine], size)
        return compare_outputs(select_samples(whole, mine), cut, readings)

    sizes: list[BucketReport] = []
    for bucket in buckets.sizes[:-1]:
        mine = [row for row in rows if buckets.choose(lengths[row]) == bucket]
        mine = mine or [row for row in rows if lengths[row] <= bucket.size]
        report = BucketReport(size=bucket.size, file=bucket.file, lengths=tuple(lengths[row] for row in mine))
        if mine and not isinstance(device, Recorded):
            given = select_samples(job.samples, [rows.index(row) for row in mine])
            sized = msgspec.structs.replace(
                job,
                model=folder / bucket.file,
                outputs=free_axes(buckets.padding.outputs, job.outputs),
                samples=crop_samples(buckets.padding, given, bucket.size),
            )
            done = device.try_job(sized, work / str(bucket.size))
            came, failure = done.outputs.count, done.failure
            if failure is None and came != len(mine):
                failure = f"{came} of {len(mine)} samples came back"
            report = msgspec.structs.replace(
                report,
                outputs=() if failure else compare(done.outputs, mine, bucket.size),
                provider_nodes=count_nodes(done, sized),
                failure=failure,
                crashed=done.crashed,
            )
        sizes.append(report)
    largest = buckets.sizes[-1]
    report = BucketReport(size=largest.size, file=largest.file, lengths=tuple(lengths[row] for row in rows))
    sizes.append(msgspec.structs.replace(report, outputs=compare(run.outputs, rows, largest.size)))
    in_largest = compare(select_samples(filled, rows), rows, largest.size)
    return SizesReport(dim=buckets.padding.dim, filled=in_largest, sizes=tuple(sizes))


_MOST_GROUPS = 3
# A choice: in a smaller group one sample that quantization happens to hurt would decide.
_LEAST_SAMPLES = 4


def compare_sizes(manifest: Manifest, inputs: Samples, reference: Samples, got: Samples) -> SizesReport | None:
    """Returns how far samples of small, middle and large sizes of an open dimension are from the float model.

    It is the dimension in which the samples have the most sizes. None if there is none, or if there are too few samples
    to compare groups of them.
    """
    if not (places := {name: (tensor, axis) for name, tensor, axis in list_open(manifest.inputs)}):
        return None
    shapes = [{name: value.shape for name, value in sample.items()} for sample in inputs]
    sizes_of = {name: [shape[tensor][axis] for shape in shapes] for name, (tensor, axis) in places.items()}
    dim, sizes = max(sizes_of.items(), key=lambda each: len(set(each[1])))
    groups = list(_group(sizes))
    if len(groups) < 2:
        return None
    reports = tuple(
        BucketReport(
            size=max(sizes[row] for row in rows),
            file=manifest.model_file,
            lengths=tuple(sizes[row] for row in rows),
            outputs=compare_outputs(
                select_samples(reference, rows), select_samples(got, rows), manifest.readings or {}
            ),
        )
        for rows in groups
    )
    return SizesReport(dim=dim, filled=(), sizes=reports)


def _group(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields positions of samples in groups of similar size; samples of equal size are always in the same group."""
    wanted = max(_LEAST_SAMPLES, -(-len(sizes) // _MOST_GROUPS))
    group: list[int] = []
    left = len(sizes)
    for size in sorted(set(sizes)):
        group += [row for row, its in enumerate(sizes) if its == size]
        rest = left - len(group)
        if len(group) >= wanted and (rest >= _LEAST_SAMPLES or rest == 0):
            yield sorted(group)
            left, group = rest, []
    if group:
        yield sorted(group)
