"""Finding the first layer that a device computes wrongly, where the device gives nothing but outputs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.samples import Samples
from edgekit.devices.device import Device, Job
from edgekit.graph.graph import view_model
from edgekit.model.model import Model, load_model, read_proto
from edgekit.model.tensors import Array, Tensors, TensorSpec
from edgekit.verify.devices.cuts import Cut, plan_cuts, save_prefix
from edgekit.verify.facts import Located
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport


def locate_on_device(device: Device, job: Job, work: Path, *, min_sqnr_db: float = 15.0) -> Located:
    """Bisects an ONNX model on a device and returns the first layer whose result is wrong there.

    The job's model is cut in two again and again; each prefix runs on the device and, with every optimisation off,
    here. A prefix is wrong if an output of it cannot be compared, or has an SQNR below `min_sqnr_db`. It takes at
    most 2 + log2(cuts) runs. An error that later layers remove, as saturation can, is not found.

    Raises:
        ModelError: the job's model is no ONNX model.
        DeviceError: the device is not there.
    """
    model = load_model(job.model)
    cuts = plan_cuts(view_model(read_proto(model, weights=False)))
    runs = 1
    if not cuts or _prefix_is_right(device, job, model, cuts[-1], work / "whole", min_sqnr_db):
        return Located(layer=None, runs=runs, cuts=len(cuts))
    right, wrong = -1, len(cuts) - 1
    while wrong - right > 1:
        middle = (right + wrong) // 2
        runs += 1
        if _prefix_is_right(device, job, model, cuts[middle], work / str(middle), min_sqnr_db):
            right = middle
        else:
            wrong = middle
    return Located(layer=cuts[wrong].layer, runs=runs, cuts=len(cuts))


def _prefix_is_right(device: Device, job: Job, model: Model, cut: Cut, work: Path, min_sqnr_db: float) -> bool:
    work.mkdir(parents=True)
    prefix = save_prefix(model, cut, work / "prefix.onnx")
    reference = run_here(prefix, job.samples)
    outputs = tuple(_describe(name, value) for name, value in next(iter(reference), dict[str, Array]()).items())
    folder = work / "run"
    folder.mkdir()
    kept = {node.name for node in read_proto(prefix, weights=False).graph.node}
    check = msgspec.structs.replace(
        job.check, node_list=tuple(node for node in job.check.node_list if node.name in kept)
    )
    part = msgspec.structs.replace(job, model=prefix.path, outputs=outputs, check=check)
    run = device.run_job(part, folder)
    return run.failure is None and is_right(compare_outputs(reference, run.outputs), min_sqnr_db)


def is_right(reports: Sequence[OutputReport], min_sqnr_db: float) -> bool:
    """Returns True if outputs came back whole, finite, and not below a signal-to-noise ratio."""
    return bool(reports) and all(
        report.mismatch is None
        and not report.non_finite
        and (report.sqnr_db is None or report.sqnr_db >= min_sqnr_db)
        and (report.exact_match is None or report.exact_match == 1.0)
        for report in reports
    )


def run_here(model: Model, samples: Samples) -> Samples:
    """Returns what a model makes of samples on this machine, with every optimisation off."""
    session = CpuSession(model.path, SessionSettings(level=Level.DISABLED))

    def read() -> Iterator[Tensors]:
        for sample in samples:
            yield session.run(sample)

    return Samples(source=str(model.path), count=samples.count, read=read)


def _describe(name: str, value: Array) -> TensorSpec:
    return TensorSpec(name=name, dtype="string" if value.dtype.kind in "UO" else value.dtype.name, shape=value.shape)
