"""The files that may race: those that a bundle holds, the ORT form of a bare model, and others that the user names."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.bench.subject import Opening, Subject, open_subject
from edgekit.bundle.folder import open_bundle
from edgekit.convert.convert import convert_styles
from edgekit.convert.ort_form import OrtOptions
from edgekit.devices.bundled import set_job
from edgekit.devices.device import Device, Job
from edgekit.devices.local.runner import host_abi
from edgekit.errors import EdgekitError, UsageError
from edgekit.model.model import load_model, read_proto
from edgekit.tune.report import Entrant

# Written and read again in a few seconds; larger ones take their time, and hardly load faster.
_CHEAP_BYTES = 200_000_000
ORT_FORM = "ORT format"

Opened = Mapping[str, Subject]
"""Each file by its name, "" for the one that is opened by default."""


def open_files(
    path: Path, work: Path, opening: Opening, candidates: Sequence[Path], device_for: Callable[[Subject], Device]
) -> tuple[Opened, Device, tuple[str, ...]]:
    """Returns all files that race, the device to race on, and notes on what does not.

    Raises:
        EdgekitError: the subject, a candidate, the data or the device is wrong.
    """
    first = open_subject(path, work / "default", opening)
    device = device_for(first)
    found: dict[str, Subject] = {"": first}
    notes: list[str] = []
    if path.is_dir():
        manifest = open_bundle(path).manifest
        for form in manifest.forms:
            # The job says which form is the default: a plan may want another one than an app.
            if manifest.forms[form][0] != first.job_for(device).model.name:
                found[form] = open_subject(path, work / form, msgspec.structs.replace(opening, form=form))
    elif _can_convert(path, first, device):
        try:
            found[ORT_FORM] = open_subject(_write_ort(path, work / "ort"), work / "ort", opening)
        except EdgekitError as error:
            notes.append(f"no {ORT_FORM} in the race: {error.message}")
    for candidate in candidates:
        if candidate.name in found:
            raise UsageError(f"'{candidate.name}' is given twice", hint="name each candidate once")
        found[candidate.name] = open_subject(candidate, work / f"candidate{len(found)}", opening)
    return found, device, tuple(notes)


def make_jobs(opened: Opened, batches: Mapping[int, Subject], device: Device) -> Callable[[Entrant], Job]:
    """Returns what makes the job of an entrant: its file with the sample of the default, set as it says."""
    jobs = {name: subject.job_for(device) for name, subject in opened.items()}
    stacked = {batch: subject.job_for(device).samples for batch, subject in batches.items()}
    samples = jobs[""].samples

    def job_for(entrant: Entrant) -> Job:
        job = msgspec.structs.replace(jobs[entrant.file], samples=stacked.get(entrant.batch, samples))
        return set_job(job, entrant.setting)

    return job_for


def open_batches(path: Path, work: Path, opening: Opening, sizes: Sequence[int]) -> dict[int, Subject]:
    """Returns the subject with so many samples at a time, for each size; none where the batch is not free."""
    try:
        return {
            size: open_subject(path, work / f"batch{size}", msgspec.structs.replace(opening, batch=size))
            for size in sizes
        }
    except EdgekitError:
        return {}


def has_branches(job: Job) -> bool:
    """Returns True if two nodes of a model could run side by side; of a file of ORT format that is not known: True."""
    if job.model.suffix != ".onnx":
        return True
    graph = read_proto(load_model(job.model), weights=False).graph
    depths = {value.name: 0 for value in graph.input}
    constants = {tensor.name for tensor in graph.initializer}
    seen: set[int] = set()
    for node in graph.node:
        reads = [depths[name] for name in node.input if name in depths and name not in constants]
        # What reads constants alone is folded before anything runs.
        if not reads:
            continue
        depth = max(reads) + 1
        if depth in seen:
            return True
        seen.add(depth)
        depths |= dict.fromkeys(node.output, depth)
    return False


def _can_convert(path: Path, subject: Subject, device: Device) -> bool:
    is_plain = subject.job_for(device).target.provider == CPU_PROVIDER and device.name.startswith("host")
    return path.suffix == ".onnx" and is_plain and path.stat().st_size < _CHEAP_BYTES


def _write_ort(path: Path, folder: Path) -> Path:
    # For this machine alone, so with the layouts that its CPU wants.
    options = OrtOptions(style="full", cpu="arm" if host_abi() == "linux-arm64" else "x64")
    made = convert_styles(load_model(path), folder, options, ("full",), checked=False)
    return folder / made.files["full"][0]
