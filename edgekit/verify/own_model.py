"""What the files of a bundle compute on this machine: the reference for a device, and the bundle's self-test."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.expected import EXPECTED
from edgekit.bundle.folder import GOLDEN, Bundle, read_target
from edgekit.bundle.golden import KnownOutputs, read_inputs, read_outputs
from edgekit.check.check import check_model
from edgekit.convert.ort_form import OrtOptions, Style, load_settings
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples, map_samples, select_samples
from edgekit.devices.device import DeviceRun
from edgekit.errors import EdgekitError, ModelError, RuntimeRefusal, TargetError, UsageError
from edgekit.evidence import Evidence
from edgekit.machine import release_memory
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.constants import DISABLED
from edgekit.target import Form, load_target, read_version

TESTED_FORMS: tuple[Form, ...] = ("onnx", "full", "runtime")
"""Forms of a model that this machine can run."""
# Kernels of another CPU differ by 2 % of the largest number; a file may be off again as far as the model was.
_SHARE, _ERROR_FACTOR = 0.02, 2.0


def list_broken_forms(bundle: Bundle) -> Iterator[str]:
    """Yields, in words, each model file whose outputs for the self-test's samples lie beyond the self-test's tolerance.

    Devices run one form, apps may open another. The tolerance is the manifest's (`edgekit.bundle.expected`)
    without what it grants to the arithmetic of other devices: twice what the model was off at the build, so that a file
    of float32 beside one of fp16 lies within it. A form that this machine cannot open, and a bundle without a
    self-test, are not judged.
    """
    chosen = [choice.row for choice in bundle.manifest.golden.chosen]
    forms: list[Form] = [form for form in TESTED_FORMS if form in bundle.manifest.forms]
    if not chosen or not forms:
        return
    try:
        expected = list(read_rows(bundle.folder / GOLDEN / EXPECTED))
        inputs = list(select_samples(read_inputs(bundle.golden), chosen))
        limits = _limit_here(bundle, expected, list(select_samples(read_outputs(bundle.golden), chosen)))
    except EdgekitError as error:
        yield f"the self-test cannot be read: {error.message}; build again"
        return
    for form in forms:
        fault = _try_form(bundle, form, inputs, expected, limits)
        if fault:
            name = bundle.find_model(form).name
            yield f"'{name}' does not pass the bundle's self-test on this machine: {fault}; build again"
    # Devices run meanwhile, and need the memory that sessions had.
    release_memory()


def find_other_model(bundle: Bundle) -> tuple[str, ...]:
    """Returns in words that the bundle's ONNX file is made for another target than its manifest says, if it is.

    On the CPU a model for another provider gives good outputs too. The target's rules say of the file itself how much
    of its work the provider takes: clearly less than the manifest promises is another model, by the limit of work that
    may be lost on a device. The rules are those of edgekit's own targets, a bundle carries none.
    """
    manifest = bundle.manifest
    if "onnx" not in manifest.forms or manifest.provider == CPU_PROVIDER or not manifest.placement.taken_macs:
        return ()
    path = bundle.find_model("onnx")
    try:
        taken = check_model(load_model(path), load_target(manifest.target, manifest.settings)).taken_macs
    except (TargetError, UsageError):
        return ()
    except ModelError as error:
        return (f"'{path.name}' cannot be read: {error.message}",)
    promised = manifest.placement.taken_macs
    if taken >= promised - manifest.thresholds.max_lost_share:
        return ()
    reason = f"{manifest.provider} takes {taken:.0%} of its work by the rules of '{manifest.target}'"
    return (f"'{path.name}' is another model than promised: {reason}, not {promised:.0%}; build again",)


def find_self_test_fault(bundle: Bundle, rows: Sequence[int], got: Samples) -> Iterator[str]:
    """Yields why the loader of an app that runs on this device fails the bundle's self-test: the loader's own rule.

    `rows` are the golden samples that ran, in order; of the self-test's samples those count that are among them. Every
    number may lie as far from what the bundle expects as the manifest says (`edgekit_loader.run_self_test`).
    """
    places = {choice.row: place for place, choice in enumerate(bundle.manifest.golden.chosen)}
    try:
        expected = list(read_rows(bundle.folder / GOLDEN / EXPECTED)) if places else []
        pairs = [(expected[places[row]], found) for row, found in zip(rows, got, strict=False) if row in places]
    except (EdgekitError, IndexError):
        return
    fault = _find_fault(bundle.manifest.golden.tolerance, [pair[0] for pair in pairs], [pair[1] for pair in pairs])
    if fault:
        yield f"an app's self-test fails there: {fault}"


def describe_untested(bundle: Bundle) -> str:
    """Returns what cannot be found out about a bundle that has no self-test, "" where it has one."""
    if bundle.manifest.golden.chosen:
        return ""
    return "the bundle has no self-test: whether its files were altered, or the reference replayed, was not looked for"


def choose_settings(bundle: Bundle, form: Form, path: Path) -> SessionSettings:
    """Returns what a file of ORT format needs, and no optimisation for ONNX, as the self-test was made."""
    styles: dict[Form, Style] = {"full": "full", "runtime": "runtime"}
    if form not in styles or path.suffix != ".ort":
        return SessionSettings(level=Level.DISABLED)
    settings = load_settings(OrtOptions(style=styles[form], cpu=read_target(bundle).conversion.cpu))
    asked = bundle.manifest.session_config
    config = settings.config | ({DISABLED: asked[DISABLED]} if DISABLED in asked else {})
    return msgspec.structs.replace(settings, config=config)


def _try_form(
    bundle: Bundle,
    form: Form,
    inputs: Sequence[Tensors],
    expected: Sequence[Tensors],
    limits: Mapping[str, float],
) -> str:
    """Returns what is wrong with what a form gives, "" where that is nothing or this machine cannot open it."""
    path = bundle.find_model(form)
    try:
        session = CpuSession(path, choose_settings(bundle, form, path))
        rows = [session.run(sample) for sample in inputs]
    except RuntimeRefusal:
        return ""
    return _find_order(bundle, session.output_names) or _find_fault(limits, expected, rows)


def _limit_here(bundle: Bundle, expected: Sequence[Tensors], reference: Sequence[Tensors]) -> dict[str, float]:
    """Returns how far each output may lie from what this kind of machine gave at the build."""
    limits: dict[str, float] = {}
    for name, tolerance in bundle.manifest.golden.tolerance.items():
        pairs = [(own[name], wanted[name]) for own, wanted in zip(expected, reference, strict=True) if name in own]
        off = max((float(np.abs(own - wanted).max(initial=0.0)) for own, wanted in pairs), default=0.0)
        size = max((float(np.abs(own).max(initial=0.0)) for own, _ in pairs), default=0.0)
        limits[name] = min(tolerance, max(_ERROR_FACTOR * off, _SHARE * size)) if off or size else tolerance
    return limits


def _find_order(bundle: Bundle, names: Sequence[str]) -> str:
    wanted = [tensor.name for tensor in bundle.manifest.outputs]
    if sorted(names) != sorted(wanted) or list(names) == wanted:
        return ""
    return f"its outputs are in the order {', '.join(names)}, in the manifest {', '.join(wanted)}"


def _find_fault(limits: Mapping[str, float], expected: Sequence[Tensors], rows: Sequence[Tensors]) -> str:
    """Returns which output is farther from what was expected than its tolerance, "" if none is."""
    if len(expected) != len(rows):
        return f"it expects {len(expected)} samples, the manifest names {len(rows)}"
    for name, tolerance in limits.items():
        for wanted, found in zip(expected, rows, strict=True):
            if name in wanted and not _is_near(wanted[name], found.get(name), tolerance):
                return f"output '{name}' is farther than {tolerance:g} from what the bundle expects"
    return ""


def _is_near(wanted: Array, found: Array | None, tolerance: float) -> bool:
    if found is None or found.shape != wanted.shape:
        return False
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    # A comparison with NaN is False, so that one on a single side is a fault; infinities of one sign are equal.
    alike = (wanted == found) | (np.isnan(wanted) & np.isnan(found))
    return bool(((error <= tolerance) | alike).all())


_LOOKED_AT = 8
# A float32 has half precision by chance once in 2^13 (the bits that half precision lacks); constants such as 0 and 1
# always do, so that a few values tell nothing.
_LEAST_VALUES = 16


def run_own_model(
    bundle: Bundle, form: Form, samples: Samples, known: KnownOutputs
) -> tuple[Samples | None, tuple[str, ...]]:
    """Returns the outputs of the bundle's own model on this machine's CPU, computed when they are read; and notes.

    The ONNX file runs without optimisation, as when the self-test was made. Of a bundle in half precision it is the
    file that the device ran, because files in ORT format are made of the float32 model there. `known` keeps outputs
    between devices. Where no file of the bundle runs here, the outputs are None, and a note says why.
    """
    first = (form,) if bundle.manifest.precision == "fp16" and form in TESTED_FORMS else ()
    reason = "the bundle holds no file that runs on a CPU"
    for each in dict.fromkeys((*first, *TESTED_FORMS)):
        if not bundle.manifest.forms.get(each):
            continue
        path = bundle.find_model(each)
        try:
            session = CpuSession(path, choose_settings(bundle, each, path))
        except EdgekitError as error:
            reason = error.message.replace(f"{path.parent}/", "")
            continue
        return map_samples(samples, partial(known.run, session), source=f"the bundle's '{path.name}' here"), ()
    return None, (f"the device was not compared with the bundle's own model on this machine: {reason}",)


def find_half_values(reference: Samples, got: Samples) -> tuple[str, ...]:
    """Returns a note for each float output whose values all have half precision, where the reference's have not.

    The reference is what the bundle's own model gives, where it runs here.

    Values on an integer grid, such as a quantized softmax gives, may have half precision by themselves.
    """
    rows: dict[str, list[tuple[Array, Array]]] = {}
    try:
        for _, wanted, found in zip(range(_LOOKED_AT), reference, got, strict=False):
            for name in wanted.keys() & found.keys():
                rows.setdefault(name, []).append((wanted[name], found[name]))
    except EdgekitError:
        return ()
    return tuple(
        f"output '{name}' holds only values of half precision, which the float model's are not: the device computes, or"
        " hands over, in fp16"
        for name, pairs in sorted(rows.items())
        if sum(first.size for first, _ in pairs) >= _LEAST_VALUES
        and all(_is_half(second) for _, second in pairs)
        and not all(_is_half(first) for first, _ in pairs)
        and not _is_on_grid(np.concatenate([second.reshape(-1) for _, second in pairs]))
    )


def find_sameness(reference: Samples) -> tuple[str, ...]:
    """Returns a note where the float model gives the same outputs for all samples: together they test one case only."""
    if reference.count < 2:
        return ()
    first = next(iter(reference))
    if any(not np.array_equal(first[name], row[name]) for row in reference for name in first):
        return ()
    return (f"the float model gives the same outputs for all {reference.count} samples: together they test one case",)


def describe_older(run: DeviceRun, minimum_ort: str) -> str | None:
    """Returns in words that a device ran an older ONNX Runtime than a bundle asks for: the loaders of apps refuse that.

    None where it names one that is new enough: whether that is true cannot be told from here. None too for what only
    stands for a device: no app runs there (`describe_outdated`).
    """
    version = _find_older(run, minimum_ort)
    if version is None or run.evidence is not Evidence.DEVICE:
        return None
    return f"it ran ONNX Runtime {version}, the bundle asks for {minimum_ort} or newer: loaders refuse older ones"


def describe_outdated(run: DeviceRun, minimum_ort: str) -> str | None:
    """Returns in words that an emulator or simulator is older than a bundle asks for, None where it is not.

    What it leaves to the CPU or refuses, the ONNX Runtime of an app may take: that it does proves nothing.
    """
    version = _find_older(run, minimum_ort)
    if version is None or run.evidence is Evidence.DEVICE:
        return None
    return (
        f"it runs ONNX Runtime {version}, the bundle asks for {minimum_ort} or newer: it is too old to show which nodes"
        " the provider takes in an app"
    )


def _find_older(run: DeviceRun, minimum_ort: str) -> str | None:
    version = run.versions.get("onnxruntime", "")
    return version if version and read_version(version) < read_version(minimum_ort) else None


def _is_on_grid(values: Array) -> bool:
    """Returns True if values are less than 256 steps of one size apart; no two of them need lie one step apart."""
    levels = np.unique(values.astype(np.float64))
    if levels.size < 3:
        return True
    steps = (levels - levels[0]) / np.diff(levels).min()
    # Of the 256 values of a quantized softmax few come back from a few samples, and none beside another.
    grids = (steps * count for count in range(1, math.ceil(256 / steps[-1])))
    return any(bool(np.all(np.abs(grid - np.rint(grid)) < 1e-3)) for grid in grids)


def _is_half(value: Array) -> bool:
    if value.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        return bool(np.array_equal(value.astype(np.float16).astype(np.float32), value))
