"""The subject of a benchmark: a bundle, as an app would load it, or a bare model."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.folder import open_bundle, read_target, snapshot_bundle
from edgekit.bundle.golden import read_inputs
from edgekit.check.check import check_model
from edgekit.convert.ort_format.report import read_interface
from edgekit.data.samples import Samples, draw_samples, list_samples, load_samples
from edgekit.devices.bundled import find_tuned, make_job, plan_run, set_job
from edgekit.devices.device import UNCHECKED, Device, Job
from edgekit.devices.find import address_of, default_target, load_target_here
from edgekit.devices.process.run import REPLAY_SAVED
from edgekit.errors import DataError, UsageError
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import TensorSpec
from edgekit.prepare.clean import make_runnable
from edgekit.prepare.shapes import find_unset, formula_names, name_dims, size_inputs
from edgekit.target import Form, Target


def stack_samples(samples: Samples, inputs: Sequence[TensorSpec], batch: int | None) -> Samples:
    """Returns the first sample, or `batch` samples stacked along dynamic first axes; too few samples are repeated.

    Inputs without such an axis keep the value of the first sample.

    Raises:
        DataError: the sample has no row, so that there is nothing to time.
    """
    kept = list(itertools.islice(samples, batch or 1))
    free = find_free(inputs) & kept[0].keys()
    if free and not any(len(kept[0][name]) for name in free):
        words = f"the batch has no row: {', '.join(sorted(free))} of '{samples.source}' begin with a dimension of 0"
        raise DataError(words, hint="give sizes of at least 1")
    rows = list(itertools.islice(itertools.cycle(kept), batch or 1))
    stacked = {name: np.concatenate([row[name] for row in rows]) for name in free} if batch else {}
    return list_samples([{**kept[0], **stacked}], samples.source)


def find_free(inputs: Sequence[TensorSpec]) -> frozenset[str]:
    """Returns the names of inputs whose first axis is dynamic: they have one row for each sample of a batch."""

    def is_free(dim: int | str | None) -> bool:
        # A dimension given by a formula follows from other dimensions: it is no independent batch size.
        return dim is None or (isinstance(dim, str) and formula_names(dim) <= {dim})

    return frozenset(spec.name for spec in inputs if spec.shape and is_free(spec.shape[0]))


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """How a subject is opened, and with which sample; `target` gives the session options of a bare model.

    The inputs of a bare model in `freeze` become constants. The sample comes from `data`; without it, from the golden
    samples of a bundle, or from random numbers. `dims` gives sizes to dynamic dimensions, which `data` must fit.
    `batch` is the number of samples to stack; None leaves the sample as it is. `form` is the form of a bundle to open,
    None for the one planned for the device; with `tuned`, the bundle is opened with the settings tuned for this kind of
    machine.
    """

    target: str | None = None
    data: str | None = None
    dims: Mapping[str, int] = {}
    freeze: Mapping[str, float] = {}
    batch: int | None = None
    form: Form | None = None
    tuned: bool = True


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """Something to time.

    `target_for` returns the target for a device's name; `job_for` returns the job for a device, with one sample, which
    is a batch of `batch`. `rows` are the inputs with a row for each sample of the batch. `notes` say what was assumed.
    """

    name: str
    target_for: Callable[[str], Target]
    job_for: Callable[[Device], Job]
    default_device: str
    batch: int = 1
    rows: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def open_subject(path: Path, work: Path, opening: Opening) -> Subject:
    """Opens a bundle or a model, with a sample for it.

    Without the name of a target, a model is opened with the device's default target. A bundle has its own target; its
    files are copied into `work`, and their digests checked.

    Raises:
        UsageError: a bundle was given together with a target or dims, a dimension does not exist or is the batch that
            was given too, or a batch where no first axis is dynamic.
        BundleError: the bundle is incomplete or altered.
        ModelError: the model cannot be read.
        DataError: the data does not fit the model.
    """
    if not path.is_dir():
        return _open_model(path, work, opening)
    if opening.target is not None:
        raise UsageError("--target means nothing for a bundle", hint="its manifest says how it is opened")
    if opening.dims:
        raise UsageError("--dim means nothing for a bundle", hint="its golden samples have their sizes")
    if opening.freeze:
        raise UsageError("--freeze means nothing for a bundle", hint="build it with --freeze")
    bundle = open_bundle(path)
    # Digests are checked while a copy is made, so that exactly what the manifest covers is timed, even if the folder
    # changes later.
    copy = snapshot_bundle(bundle, bundle.manifest.forms, work / path.resolve().name)
    chosen = read_target(copy)
    inputs = bundle.golden.inputs
    samples = read_inputs(copy.golden) if opening.data is None else load_samples(opening.data, inputs)
    sample = stack_samples(samples, inputs, opening.batch)

    def job_for(device: Device) -> Job:
        plan, tuned = plan_run(copy, device, 1), find_tuned(copy.manifest, device) if opening.tuned else None
        form = opening.form or (tuned.form if tuned else "") or plan.form
        job = make_job(copy, msgspec.structs.replace(plan, form=form), sample)
        return job if tuned is None else set_job(job, tuned)

    return Subject(
        name=path.resolve().name,
        target_for=lambda _: chosen,
        job_for=job_for,
        default_device=next((planned.device for planned in chosen.verification), "host"),
        batch=opening.batch or 1,
        rows=tuple(sorted(find_free(inputs))),
    )


def open_pair(path: Path, against: Path, work: Path, opening: Opening) -> tuple[Subject, Subject]:
    """Opens two subjects to compare. Each takes those of the opening's dims that it has; see `open_subject`.

    A bundle beside a model takes no target and no constants. The first refuses a dimension that neither has.
    """
    first, second = (_list_keys(each) if opening.dims else set[str]() for each in (path, against))

    def open_one(own: Path, other: Path, name: str, kept: Collection[str]) -> Subject:
        fitting = msgspec.structs.replace(opening, dims={key: opening.dims[key] for key in opening.dims if key in kept})
        if own.is_dir() and not other.is_dir():
            fitting = msgspec.structs.replace(fitting, target=None, freeze={})
        return open_subject(own, work / name, fitting)

    unknown = opening.dims.keys() - first - second
    return open_one(path, against, "a", first | unknown), open_one(against, path, "b", second)


def _list_keys(path: Path) -> set[str]:
    """Returns what `--dim` may call the dimensions of a model's inputs; none of a bundle, whose sizes are fixed."""
    if path.is_dir():
        return set()
    inputs = read_interface(path)[0] if path.suffix == ".ort" else load_model(path).inputs
    return name_dims(inputs) | {f"{spec.name}:{axis}" for spec in inputs for axis in range(len(spec.shape or ()))}


def _open_model(path: Path, work: Path, opening: Opening) -> Subject:
    model: Model | None = None
    if path.suffix != ".ort":
        model = make_runnable(load_model(path), work, opening.freeze)
        path, inputs, outputs = model.path, model.inputs, model.outputs
    elif opening.freeze:
        raise UsageError(f"--freeze cannot change '{path}': it is in ORT format", hint="give the ONNX model")
    else:
        inputs, outputs = read_interface(path)
    target = None if opening.target is None else load_target_here(opening.target)
    free, wanted = find_free(inputs), inputs
    if opening.batch is not None:
        if not free:
            words = "--batch means nothing here: no input has a dynamic first axis"
            raise UsageError(words, hint="edgekit inspect MODEL says how its exporter opens it; or leave --batch out")
        # Rows of a batch are stacked: each sample has one.
        cut = {spec.name: msgspec.structs.replace(spec, shape=(1, *(spec.shape or ())[1:])) for spec in inputs}
        wanted = tuple(cut[spec.name] if spec.name in free else spec for spec in inputs)
    sample = stack_samples(_read_samples(path, inputs, wanted, opening), inputs, opening.batch)
    if not all(spec.is_tensor for spec in outputs):
        # Devices return maps and sequences, such as ZipMap's, as the tensors that one run gives.
        outputs_of_run = CpuSession(path, SessionSettings(level=Level.DISABLED)).run(next(iter(sample)))
        known = {spec.name: spec for spec in outputs}
        kinds = {name: "string" if it.dtype == object else str(it.dtype) for name, it in outputs_of_run.items()}
        outputs = tuple(
            known.get(name) or TensorSpec(name=name, dtype=kinds[name], shape=(None,) * value.ndim)
            for name, value in outputs_of_run.items()
        )

    def target_for(name: str) -> Target:
        return target or default_target(name)

    def job_for(device: Device) -> Job:
        chosen = target_for(address_of(device))
        # Only emulated arithmetic needs to know which nodes the provider takes.
        check = UNCHECKED if model is None or chosen.provider == CPU_PROVIDER else check_model(model, chosen)
        return Job(model=path, target=chosen, precision=chosen.precision, outputs=outputs, check=check, samples=sample)

    notes: list[str] = []
    if (unset := find_unset(wanted, opening.dims)) and opening.data is None:
        names = ", ".join(f"'{name}'" for name in sorted(unset))
        notes.append(f"without a --dim, {names} ran with the size 1")
    # ONNX Runtime applies saved optimisations without checks, so they are not replayed from an unverified file.
    if model is None and target is not None and REPLAY_SAVED in target.session.config:
        notes.append("optimisations saved in the file were not replayed: only the digests of a bundle vouch for them")
    return Subject(
        name=path.name,
        target_for=target_for,
        job_for=job_for,
        default_device="host",
        batch=opening.batch or 1,
        rows=tuple(sorted(free)),
        notes=tuple(notes),
    )


def _read_samples(path: Path, inputs: Sequence[TensorSpec], wanted: Sequence[TensorSpec], opening: Opening) -> Samples:
    """Returns samples for the inputs as they are `wanted`: with one row, if a batch is stacked."""
    if opening.batch is not None:
        free = find_free(inputs)
        first = {str(spec.shape[0] or f"{spec.name}:0") for spec in inputs if spec.shape and spec.name in free}
        for name in sorted(first & opening.dims.keys()):
            raise UsageError(f"--batch says the size of '{name}'", hint=f"leave --dim {name}={opening.dims[name]} out")
    if opening.data is not None:
        return load_samples(opening.data, size_inputs(wanted, opening.dims, may_stay_open=True), idle=opening.freeze)
    if (samples := draw_samples(size_inputs(wanted, opening.dims), opening.batch or 1)) is None:
        raise DataError(f"no sample can be drawn for '{path.name}'", hint="give one: --data FILE.npz")
    return samples
