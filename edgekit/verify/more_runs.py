"""Further runs of a device: whole sequences with its own state, the model of each size, and the other model files."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import Golden, read_inputs, read_outputs, write_rows
from edgekit.bundle.manifest import UNPADDED, Manifest, list_open
from edgekit.data.padding import crop_samples, cut_samples, free_axes
from edgekit.data.samples import Samples, load_samples, select_samples, spread_indices
from edgekit.devices.bundled import make_job
from edgekit.devices.device import LEAST_SAMPLES, Device, DeviceRun, Job
from edgekit.devices.find import kind_of
from edgekit.devices.observe import count_nodes
from edgekit.devices.process.session import open_session
from edgekit.devices.recorded import Recorded
from edgekit.errors import CrashError, DataError, EdgekitError
from edgekit.model.state import find_fed_back, run_steps
from edgekit.model.tensors import Array, Tensors, is_numeric
from edgekit.serialize import fill
from edgekit.target import Verification
from edgekit.verify import placement
from edgekit.verify.metrics.compare import compare_bundled, compare_outputs
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.metrics.tensor_metrics import decibels
from edgekit.verify.run_report import BucketReport, Drift, FileReport, SizesReport, StateReport


class UnpaddedGolden(Golden, frozen=True, kw_only=True):
    """Golden samples padded to the largest bucket, with the length that each had before.

    `whole` is what the float model gives for the samples without padding.
    """

    lengths: tuple[int, ...]
    whole: Samples


def run_buckets(
    bundle: Bundle,
    device: Device,
    job: Job,
    run: DeviceRun,
    rows: Sequence[int],
    work: Path,
    given: UnpaddedGolden | None,
) -> SizesReport | None:
    """Runs the samples `rows`, each in the smallest bucket (model of one size) that it fits; None without buckets.

    The samples are the golden ones, or those `given`. `job` and `run` are those of the largest bucket, which ran all
    samples already: its outputs are cut to the samples' lengths, and it does not run again. A bucket that is the
    smallest one for no sample runs the shorter samples.

    Raises:
        DataError: the bundle's float results cannot be read.
    """
    if not (buckets := bundle.manifest.buckets) or run.failure is not None:
        return None
    golden = given or bundle.golden
    if given is not None:
        whole, buckets = given.whole, msgspec.structs.replace(buckets, lengths=given.lengths)
    else:
        outputs = free_axes(buckets.padding.outputs, golden.outputs)
        whole = load_samples(str(golden.folder.parent / UNPADDED), outputs)
        if whole.count != golden.samples:
            said = f"'{UNPADDED}' holds {whole.count} samples, not {golden.samples}"
            raise DataError(said, hint="build the bundle again")
    readings, folder, lengths = bundle.manifest.readings or {}, bundle.folder, buckets.lengths

    def compare(got: Samples, mine: Sequence[int], size: int) -> tuple[OutputReport, ...]:
        """Compares the outputs of some samples at one size, cut to the samples' lengths."""
        cut = cut_samples(buckets.padding, got, [lengths[row] for row in mine], size)
        return compare_outputs(select_samples(whole, mine), cut, readings)

    sizes, largest = list[BucketReport](), buckets.sizes[-1]
    for bucket in buckets.sizes:
        mine = [row for row in rows if bucket == largest or buckets.choose(lengths[row]) == bucket]
        mine = mine or [row for row in rows if lengths[row] <= bucket.size]
        report = fill(BucketReport, bucket, lengths=tuple(lengths[row] for row in mine))
        if bucket == largest:
            report = msgspec.structs.replace(report, outputs=compare(run.outputs, mine, bucket.size))
        elif mine and not isinstance(device, Recorded):
            inputs = select_samples(job.samples, [rows.index(row) for row in mine])
            sized = msgspec.structs.replace(
                job,
                model=folder / bucket.file,
                outputs=free_axes(buckets.padding.outputs, job.outputs),
                samples=crop_samples(buckets.padding, inputs, bucket.size),
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
    in_largest = compare(select_samples(read_outputs(golden), rows), rows, largest.size)
    return SizesReport(dim=buckets.padding.dim, filled=in_largest, sizes=tuple(sizes))


_MOST_GROUPS = 3
# Chosen by hand: in a smaller group, a single sample that quantization happens to hurt would decide.
_LEAST_SAMPLES = 4


def compare_sizes(manifest: Manifest, inputs: Samples, reference: Samples, got: Samples) -> SizesReport | None:
    """Returns how far samples of small, middle and large sizes of an open dimension are from the float model.

    If several dimensions are open, it is the one with the most different sizes. Returns None if no dimension is open,
    or if the samples are too few for two groups.
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


def measure_drift(
    names: Sequence[str], reference: Samples, fed_back: Samples, given: Samples, steps: int
) -> tuple[Drift, ...]:
    """Returns the error of each output at each step; the three sets of samples hold the same sequences."""
    powers: dict[str, Array] = {}
    for index, (wanted, back, own) in enumerate(zip(reference, fed_back, given, strict=True)):
        for name in names:
            if is_numeric(wanted[name]):
                values = wanted[name].astype(np.float64)
                found = np.sum(values**2), _error(values, back.get(name)), _error(values, own.get(name))
                powers.setdefault(name, np.zeros((3, steps)))[:, index % steps] += found
    late = slice(steps // 2, None)
    return tuple(
        Drift(
            output=name,
            fed_back=tuple(map(_decibels, signal, back_noise)),
            given=tuple(map(_decibels, signal, own_noise)),
            late_fed_back=_decibels(signal[late].sum(), back_noise[late].sum()),
            late_given=_decibels(signal[late].sum(), own_noise[late].sum()),
        )
        for name in names
        if name in powers
        for signal, back_noise, own_noise in [powers[name]]
    )


def _error(wanted: Array, got: Array | None) -> float:
    # An output that is missing or of another shape cannot be measured: its step has no figure, as with NaN.
    if got is None or got.shape != wanted.shape:
        return float("nan")
    return float(np.sum((got.astype(np.float64) - wanted) ** 2))


def _decibels(signal: float, noise: float) -> float | None:
    return decibels(signal, noise) if np.isfinite(signal) and np.isfinite(noise) and signal > 0 else None


def run_sequences(
    manifest: Manifest, device: Device, job: Job, run: DeviceRun, golden: Golden, reference: Samples, work: Path
) -> StateReport | None:
    """Runs the samples of a job as whole sequences, with the device's own state, and returns how far they drift.

    `reference` holds the float model's outputs, and `run` the device's outputs with the float model's state. None if
    the model has no state, the samples are no sequences, or the run failed.
    """
    state = manifest.state
    if not state or state.steps == 1 or run.failure is not None:
        return None
    sequences = reference.count // state.steps
    found = StateReport(sequences=sequences, steps=state.steps)
    if not sequences:
        return found
    count, inputs = sequences * state.steps, {spec.name: spec for spec in golden.inputs}
    reference, given = (select_samples(samples, range(count)) for samples in (reference, run.outputs))
    try:
        whole = msgspec.structs.replace(job, samples=select_samples(job.samples, range(count)))
        # One step of all sequences is in memory at a time.
        turns = (list(islice(job.samples, step, count, state.steps)) for step in range(state.steps))
        with open_session(device, whole, work / "session") as turn:
            for step, (_, outputs) in enumerate(run_steps(turns, state.feeds, inputs, turn)):
                write_rows(work / f"step-{step}.npz", outputs, ragged=True)
        files = [load_samples(str(work / f"step-{step}.npz"), golden.outputs) for step in range(state.steps)]
    except EdgekitError as error:
        return msgspec.structs.replace(found, failure=error.message, crashed=isinstance(error, CrashError))

    def read_rows() -> Iterator[Tensors]:
        """Yields all steps of the first sequence, then those of the next."""
        for rows in zip(*files, strict=True):
            yield from rows

    fed_back = Samples(source=device.name, count=count, read=read_rows)
    reports = compare_outputs(reference, fed_back, manifest.readings or {})
    names = [spec.name for spec in golden.outputs]
    # An app reads the outputs that are no state, or all if there are no others.
    read = tuple(report for report in reports if report.name not in find_fed_back(state).values())
    drift = measure_drift(names, reference, fed_back, given, state.steps)
    return msgspec.structs.replace(found, outputs=read or tuple(reports), drift=drift)


LINKED_RUNTIMES = frozenset({"android", "ios-sim"})
"""Kinds of devices that run the same runtime that an app links."""


def try_model_files(
    bundle: Bundle, device: Device, plan: Verification, golden: Golden, work: Path
) -> Iterator[FileReport]:
    """Yields the figures of each other model file of a bundle, run on a device with as few samples as needed."""
    if kind_of(device) not in LINKED_RUNTIMES or isinstance(device, Recorded):
        return
    rows = spread_indices(golden.samples, min(LEAST_SAMPLES, plan.samples))
    samples = select_samples(read_inputs(golden), rows)
    reference = select_samples(read_outputs(golden), rows)
    for form in (form for form in bundle.manifest.forms if form not in {plan.form, "context"}):
        job = make_job(bundle, msgspec.structs.replace(plan, form=form), samples)
        run = device.try_job(job, work / form)
        yield fill(
            FileReport,
            run,
            file=job.model.name,
            form=form,
            provider_nodes=count_nodes(run, job),
            placed=placement.find_placed(run, job),
            outputs=() if run.failure else compare_bundled(bundle, reference, run.outputs),
        )
