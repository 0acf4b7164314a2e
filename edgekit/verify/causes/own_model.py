"""What the bundle's own model gives on this machine, and what is told of a device that is held against it."""

import math
from collections.abc import Iterator

import numpy as np

from edgekit._ort import CpuSession
from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import KnownOutputs
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Array, Tensors
from edgekit.target import Form, read_version
from edgekit.verify.causes.forms import TESTED_FORMS, choose_settings

_LOOKED_AT = 8
# A float32 has half precision by chance once in 2^13 (the bits that half precision lacks); constants such as 0 and 1
# always do, so that a few values tell nothing.
_LEAST_VALUES = 16


def run_own_model(
    bundle: Bundle, form: Form, samples: Samples, known: KnownOutputs
) -> tuple[Samples | None, tuple[str, ...]]:
    """Returns what the bundle's own model gives for samples on this machine's CPU, read as it is needed; and notes.

    The ONNX file runs without optimisation, as the self-test was made; of a bundle in half precision the file that the
    device ran, because those of ORT format are made of the float32 model there. What ran before is `known`. Where no
    file of the bundle runs here, there is nothing, and a note says why.
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

        def read(session: CpuSession = session) -> Iterator[Tensors]:
            yield from (known.run(session, sample) for sample in samples)

        return Samples(source=f"the bundle's '{path.name}' here", count=samples.count, read=read), ()
    return None, (f"the device was not held against the bundle's own model: {reason}",)


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
    """Returns a note where the float model gives the same for all samples: then they test one case, however many."""
    if reference.count < 2:
        return ()
    first = next(iter(reference))
    if any(not np.array_equal(first[name], row[name]) for row in reference for name in first):
        return ()
    return (f"the float model gives the same outputs for all {reference.count} samples: they test no more than one",)


def find_version(run: DeviceRun) -> str:
    """Returns which ONNX Runtime a device says that it ran, "" where it says of none."""
    return run.versions.get("onnxruntime", "")


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
        f"it runs ONNX Runtime {version} in place of {minimum_ort} or newer, which the bundle asks for: it is too old"
        " to tell what the provider takes"
    )


def _find_older(run: DeviceRun, minimum_ort: str) -> str | None:
    version = find_version(run)
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
