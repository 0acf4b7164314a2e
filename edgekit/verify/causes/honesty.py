"""Devices that lie: outputs of other samples, of another precision, or of the reference itself."""

import math
from collections.abc import Sequence

import numpy as np

from edgekit.bundle.folder import GOLDEN, Bundle
from edgekit.bundle.golden.expected import EXPECTED
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Array
from edgekit.target import read_version
from edgekit.verify.metrics.dependence import CHANCE, measure_chance
from edgekit.verify.metrics.tensor_metrics import decibels, distance_energy

_LOOKED_AT = 8
# A float32 has half precision by chance once in 2^13 (the bits that half precision lacks); constants such as 0 and 1
# always do, so that a few values tell nothing.
_LEAST_VALUES = 16
# 20 dB: what is left of the distance where a device computes the float model with kernels of its own.
_MUCH_CLOSER = 100.0
# So many values of a sample at most err on their own: they come from the same layers.
_MOST_VALUES = 16
# How far probabilities may add up to something else than one: 10,000 roundings of float32, and of fp16 a few.
_SHARES = 1e-3


def find_half_values(reference: Samples, got: Samples) -> tuple[str, ...]:
    """Returns a note for each float output whose values all have half precision, where the reference's have not.

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


def find_replay(bundle: Bundle, indices: Sequence[int], reference: Samples, got: Samples) -> str | None:
    """Returns a finding where a device gives what the float model does, and not what the bundle's own model does.

    What the bundle's model gives is known for the samples of its self-test. Kernels differ by much less than rounding
    costs, so that an honest device lies as far from the float model as the bundle's model: one that lies 20 dB nearer
    runs another model, or replays the reference. Few values may lie there by chance, which counts as in
    `edgekit.verify.metrics.dependence`. A float32 model may give the float model's bits.
    """
    places = {choice.row: place for place, choice in enumerate(bundle.manifest.golden.chosen)}
    if bundle.manifest.precision == "fp32":
        return None
    values: list[tuple[Array, Array, Array]] = []
    rows = 0
    try:
        expected = list(read_rows(bundle.folder / GOLDEN / EXPECTED))
        for index, wanted, found in zip(indices, reference, got, strict=False):
            own = expected[places[index]] if index in places else dict[str, Array]()
            names = [name for name, value in wanted.items() if name in own and value.dtype.kind == "f"]
            if any(name not in found or found[name].shape != wanted[name].shape for name in names):
                return None
            values += [(wanted[name], own[name], found[name]) for name in names]
            rows += bool(names)
    except (EdgekitError, IndexError):
        return None
    return describe_replay(values, rows)


def describe_replay(values: Sequence[tuple[Array, Array, Array]], rows: int) -> str | None:
    """Returns the finding of `find_replay` for float outputs of so many samples, None where there is none.

    Each is a triple: what the float model gives, what the bundle's own model gives, and what the device gave.
    """
    apart = sum(distance_energy(wanted, own) for wanted, own, _ in values)
    near = sum(distance_energy(wanted, found) for wanted, _, found in values)
    if not 0.0 < apart < math.inf or not near * _MUCH_CLOSER < apart:
        return None
    if all(_is_same(wanted, found) for wanted, _, found in values):
        return (
            "the outputs are the float model's to the bit, and the bundle's own model does not give these:"
            " the reference was replayed, or another model ran"
        )
    if measure_chance(near, apart, min(_count_free(values), _MOST_VALUES * rows)) >= CHANCE:
        return None
    return (
        f"the outputs lie {decibels(apart, near):.0f} dB nearer to the float model's than the bundle's own model does:"
        " the float model ran in its place, or the reference was replayed"
    )


def _count_free(values: Sequence[tuple[Array, Array, Array]]) -> float:
    """Returns how many errors of the bundle's own model carry the distance, at least one, and may go their own way.

    The participation ratio, (sum of squares)^2 / sum of their squares: where one of many samples lies far away and the
    others nowhere, as behind a softmax that saturates, the whole distance is one value's, which may be small on a
    device by chance. Of probabilities, which add up to one, one follows from the others.
    """
    errors = [np.subtract(own, wanted, dtype=np.float64) for wanted, own, _ in values]
    squares = np.concatenate([np.square(error).reshape(-1) for error in errors])
    carriers = float(squares.sum()) ** 2 / float(np.square(squares).sum())
    bound = sum(_is_shared_out(wanted) for wanted, _, _ in values)
    return max(1.0, carriers * (1.0 - bound / squares.size))


def _is_shared_out(value: Array) -> bool:
    return value.size > 1 and float(value.min()) >= 0.0 and abs(float(value.sum()) - 1.0) < _SHARES


def _is_half(value: Array) -> bool:
    if value.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        return bool(np.array_equal(value.astype(np.float16).astype(np.float32), value))


def _is_same(first: Array, second: Array | None) -> bool:
    return second is not None and first.dtype == second.dtype and first.tobytes() == second.tobytes()
