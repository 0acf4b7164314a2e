"""What is timed: a bundle, as an app would load it, or a bare model."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from edgekit._files import digest_file
from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.folder import open_bundle, read_target
from edgekit.bundle.golden.golden import read_inputs
from edgekit.bundle.snapshot import snapshot_bundle
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.convert.ort_format.interface import read_interface
from edgekit.data.random_samples import draw_samples
from edgekit.data.samples import Samples, load_samples, select_samples
from edgekit.devices.bundled import make_job, plan_run
from edgekit.devices.device import Device, Job
from edgekit.devices.labelled import kind_of
from edgekit.devices.plain import plain_target
from edgekit.devices.process.child import REPLAY_SAVED
from edgekit.errors import DataError, UsageError
from edgekit.model.model import load_model
from edgekit.model.tensors import TensorSpec
from edgekit.target import Target, load_target


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Something to time.

    `target_for` gives the target that a device, by its kind, runs it as; `job_for` the job with one sample. `notes` say
    what was assumed.
    """

    name: str
    target_for: Callable[[str], Target]
    job_for: Callable[[Device], Job]
    default_device: str
    notes: tuple[str, ...] = ()


def open_subject(path: Path, work: Path, *, target: str | None = None, data: str | None = None) -> Subject:
    """Returns what `path` names, with a sample for it: of the bundle's golden ones, of `data`, or drawn at random.

    `target` names the target whose session options a model is opened with; without it, that of the device, or the CPU
    provider with none. A bundle has its own. Its files are copied into `work`, and their digests checked.

    Raises:
        UsageError: a bundle was given together with a target.
        BundleError: the bundle is incomplete or altered.
        ModelError: the model cannot be read.
        DataError: the data does not fit the model.
    """
    if path.is_dir():
        if target is not None:
            raise UsageError("--target means nothing for a bundle", hint="its manifest says how it is opened")
        return _open_bundle(path, work, data)
    return _open_model(path, None if target is None else load_target(target), data)


def _open_bundle(path: Path, work: Path, data: str | None) -> Subject:
    bundle = open_bundle(path)
    # A copy, digested while it is made: what is timed is then what the manifest covers, whatever happens to the folder.
    private = snapshot_bundle(bundle, bundle.manifest.forms, work / path.resolve().name)
    chosen = read_target(private)
    given = None if data is None else load_samples(data, bundle.golden.inputs)

    def job_for(device: Device) -> Job:
        return make_job(private, plan_run(private, device, 1), _first(given or read_inputs(private.golden)))

    return Subject(
        name=path.resolve().name, target_for=lambda _: chosen, job_for=job_for, default_device=_planned_device(chosen)
    )


def _planned_device(target: Target) -> str:
    return next((planned.device for planned in target.verification), "host")


def _open_model(path: Path, target: Target | None, data: str | None) -> Subject:
    inputs, outputs = _read_interface(path)
    samples = draw_samples(inputs) if data is None else load_samples(data, inputs)
    if samples is None:
        raise DataError(f"no sample can be drawn for '{path.name}'", hint="give one: --data FILE.npz")
    is_open = data is None and not all(spec.is_static for spec in inputs)

    def target_for(kind: str) -> Target:
        return target or plain_target(kind)

    def job_for(device: Device) -> Job:
        chosen = target_for(kind_of(device))
        return Job(
            model=path,
            target=chosen,
            precision=chosen.precision,
            outputs=outputs,
            check=_check(path, chosen),
            samples=_first(samples),
        )

    notes = ["dimensions without a size were run with the size 1"] if is_open else []
    # ONNX Runtime replays saved optimisations as the file states them.
    if path.suffix == ".ort" and target is not None and REPLAY_SAVED in target.session.config:
        notes.append("optimisations saved in the file were not replayed: only the digests of a bundle vouch for them")
    return Subject(name=path.name, target_for=target_for, job_for=job_for, default_device="host", notes=tuple(notes))


def _read_interface(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    if path.suffix == ".ort":
        return read_interface(path)
    model = load_model(path)
    return model.inputs, model.outputs


def _check(path: Path, target: Target) -> CheckReport:
    """Returns what emulated arithmetic needs to know; nothing for what runs without it."""
    if path.suffix != ".ort" and target.provider != CPU_PROVIDER:
        return check_model(load_model(path), target)
    return CheckReport(
        target=target.name,
        model=path.stem,
        sha256=digest_file(path),
        evidence="predicted",
        settings={},
        node_list=(),
        advice=(),
    )


def _first(samples: Samples) -> Samples:
    return select_samples(samples, (0,))
