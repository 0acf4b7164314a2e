"""Verifies an existing bundle: on devices chosen by name, with its own samples or with others."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgekit._files import digest_file, work_folder
from edgekit.bundle.checks import bundled_task
from edgekit.bundle.folder import GOLDEN, Bundle, read_target
from edgekit.bundle.golden import INPUTS, make_golden, plan_sequences, read_inputs, read_outputs
from edgekit.bundle.sign import require_private_key
from edgekit.data.data_check import refusing_bad
from edgekit.data.labels import read_task_labels
from edgekit.data.padding import free_axes, pad_samples
from edgekit.data.samples import Samples, limit_samples, load_samples, select_samples, spread_sequences
from edgekit.data.split import load_sequences
from edgekit.devices.device import Device
from edgekit.devices.recorded import Recording, open_recorded
from edgekit.devices.register import DeviceChoice, choose_devices
from edgekit.errors import OutputError, UsageError
from edgekit.model.model import Model, load_model
from edgekit.model.state import State
from edgekit.model.tensors import TensorSpec
from edgekit.progress import Progress, say_nothing
from edgekit.recipe import Data
from edgekit.target import Target, TaskLimit
from edgekit.verify.attribute import keep_attribution
from edgekit.verify.report import VerifyReport, read_known, write_report
from edgekit.verify.run import verify_bundle
from edgekit.verify.sizes import UnpaddedGolden
from edgekit.verify.task_metrics import find_metric
from edgekit.verify.task_scores import check_class_labels

_INPUTS = f"{GOLDEN}/{INPUTS}"
# How many samples the float model runs at a time: more need more memory, and machines with two cores are common.
_AT_ONCE = 2


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded runs as files: runs to judge, and the path to which the run of the one chosen device is written.

    With a public `run_key`, its owner must have signed the runs to judge; the written run is signed with `sign_key`.
    """

    recorded: tuple[Path, ...] = ()
    run_key: Path | None = None
    export: Path | None = None
    sign_key: Path | None = None


_NO_FILES = RunFiles()


def verify_on(
    bundle: Bundle,
    choice: DeviceChoice,
    progress: Progress | None = None,
    *,
    task: TaskLimit | None = None,
    layers: bool = False,
    files: RunFiles = _NO_FILES,
) -> VerifyReport:
    """Verifies a bundle on the chosen devices, or its target's, and writes `verify.json` into it if one ran.

    The loss that the build attributed to steps stays in the file, because the models it was measured with are gone. If
    the bundle cannot be written, a note of the report says so.

    Raises:
        UsageError: there is no such device, it runs another provider, or a run of several devices is to be written.
        DataError: a file is no recorded run.
        BundleError: a recorded run is not signed with the key that is asked for.
    """
    known = read_known(bundle)
    devices = _add_files(bundle, choice, files)
    report = verify_bundle(bundle, devices, task=task, layers=layers, progress=progress)
    ancestry = _describe_ancestry(bundle, bundle.manifest.files[_INPUTS].sha256)
    report = keep_attribution(msgspec.structs.replace(report, ancestry=ancestry), known)
    if report.runs:
        try:
            write_report(bundle, report)
        except OutputError as error:
            note = f"the bundle has no new verify.json: {error.message}"
            return msgspec.structs.replace(report, notes=(*report.notes, note))
    return report


def verify_with(
    bundle: Bundle,
    reference: Path,
    data: Data,
    choice: DeviceChoice,
    progress: Progress | None = None,
    *,
    samples: int | None = None,
    task: TaskLimit | None = None,
    layers: bool = False,
) -> VerifyReport:
    """Verifies a bundle with other samples than its golden ones, at most `samples`; nothing is written into it.

    `reference` is the float model that the bundle was made from; its outputs are the reference. `data.source` gives the
    samples, `data.labels` the class of each.

    Raises:
        UsageError: the bundle was made of another model, or there is no such device.
        DataError: the samples or the labels do not fit.
    """
    source = _open_source(bundle, reference)
    devices = find_devices(bundle, read_target(bundle), choice)
    state = bundle.manifest.state or State()
    every = load_sequences(data.source, _list_inputs(bundle), state, data.preprocess)
    metric = task or bundled_task(bundle.manifest)
    kind = "class" if metric is None else find_metric(metric).labels
    labels = None if data.labels is None else read_task_labels(data.labels, kind, every)
    kept = spread_sequences(every.count, samples or every.count, state.steps)
    buckets = bundle.manifest.buckets
    with work_folder() as work:
        (progress or say_nothing)("run the float model")
        sequences = plan_sequences(source, state, bundle.golden.inputs, bundle.golden.outputs, work)
        given = select_samples(every, kept)
        filled = pad_samples(buckets.padding, given, buckets.sizes[-1].size) if buckets else given
        chosen = refusing_bad(sequences.unroll(filled, "evaluation"))
        known = None if labels is None else [labels[index] for index in kept]
        golden = make_golden(source, chosen, work, labels=known, at_once=_AT_ONCE, ragged=True)
        check_class_labels(golden)
        unpadded = None
        if buckets:
            # The reference of each bucket is what the float model computes at the unpadded lengths.
            whole = make_golden(source, given, work / "unpadded", at_once=_AT_ONCE, ragged=True)
            lengths = tuple(buckets.padding.measure(sample) for sample in given)
            unpadded = UnpaddedGolden(golden=golden, lengths=lengths, outputs=read_outputs(whole))
        report = verify_bundle(
            bundle,
            devices,
            golden=unpadded or golden,
            task=task,
            float_model=source.path,
            layers=layers,
            progress=progress,
        )
        ancestry = _describe_ancestry(bundle, digest_file(golden.folder / INPUTS))
        return msgspec.structs.replace(report, ancestry=ancestry)


def _list_inputs(bundle: Bundle) -> Sequence[TensorSpec]:
    """Returns the inputs that samples are read for; their length is open if the bundle has several sizes."""
    inputs, buckets = bundle.manifest.inputs, bundle.manifest.buckets
    return free_axes(buckets.padding.inputs, inputs) if buckets else inputs


def _open_source(bundle: Bundle, reference: Path) -> Model:
    source, wanted = load_model(reference), bundle.manifest.ancestry.source
    if source.sha256 != wanted:
        raise UsageError(
            f"'{reference}' is not the model that bundle '{bundle.folder}' was made of: its sha256 is {source.sha256},"
            f" that of the bundle's source is {wanted}",
            hint="give the float model that edgekit build was given",
        )
    return source


def open_inputs(bundle: Bundle, data: Data | None, samples: int | None) -> Samples:
    """Returns the inputs that a verification runs: at most `samples` samples of `data`, or all golden samples.

    Raises:
        DataError: the samples do not fit.
    """
    if data is None:
        return read_inputs(bundle.golden)
    return limit_samples(load_samples(data.source, _list_inputs(bundle), data.preprocess), samples)


def find_devices(bundle: Bundle, target: Target, choice: DeviceChoice) -> list[Device]:
    """Returns the chosen devices, or by default those that the bundle's target names.

    Raises:
        UsageError: there is no such device, it runs another provider, or the file is malformed.
    """
    planned = [planned.device for planned in bundle.manifest.verification]
    return choose_devices(choice, lambda _: target, default=planned)


def _add_files(bundle: Bundle, choice: DeviceChoice, files: RunFiles) -> list[Device]:
    """Returns the chosen devices and recorded runs; if only runs are named, the target's devices do not run."""
    recorded: list[Device] = [open_recorded(path, bundle.sha256, files.run_key) for path in files.recorded]
    is_chosen = choice.names or choice.file is not None
    devices = find_devices(bundle, read_target(bundle), choice) if is_chosen or not recorded else []
    if files.export is None:
        return [*devices, *recorded]
    if len(devices) != 1 or not is_chosen:
        raise UsageError("--export writes the run of one device", hint="name it: --on coreml")
    if files.sign_key is not None:
        require_private_key(files.sign_key)
    wrap = Recording(device=devices[0], path=files.export, bundle_sha256=bundle.sha256, key=files.sign_key)
    return [wrap, *recorded]


def _describe_ancestry(bundle: Bundle, inputs: str) -> dict[str, str]:
    """Returns the digests of all that a verification depends on, by a word that users know; `inputs` is one."""
    ancestry = bundle.manifest.ancestry
    made_from = {"calibration data": ancestry.data, "quantized model": ancestry.quantized}
    return {
        "model": ancestry.source,
        "data": inputs,
        "bundle": bundle.sha256,
        **{name: digest for name, digest in made_from.items() if digest is not None},
        "edgekit": bundle.manifest.versions.get("edgekit", "unknown"),
        "onnxruntime": bundle.manifest.versions.get("onnxruntime", "unknown"),
    }
