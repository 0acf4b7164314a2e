"""Devices that lie: outputs of other samples, of another precision, or of the reference itself."""

from collections.abc import Sequence

import numpy as np

from edgekit.bundle.folder import GOLDEN, Bundle
from edgekit.bundle.golden.expected import EXPECTED
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples
from edgekit.errors import EdgekitError
from edgekit.model.tensors import Array

_LOOKED_AT = 8
_LEAST_VALUES = 16


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


def _is_on_grid(values: Array) -> bool:
    """Returns True if values are at most 256 steps of one size apart; the least distance may be up to 4 steps."""
    levels = np.unique(values.astype(np.float64))
    if levels.size < 3:
        return True
    steps = (levels - levels[0]) / np.diff(levels).min()
    grids = (steps * count for count in range(1, 5))
    return any(grid[-1] < 256 and bool(np.all(np.abs(grid - np.rint(grid)) < 1e-3)) for grid in grids)


def find_replay(bundle: Bundle, indices: Sequence[int], reference: Samples, got: Samples) -> str | None:
    """Returns a finding where a device gives the float model's outputs to the bit and the bundle's own model does not.

    What the bundle's model gives is known for the samples of its self-test; a float32 model may give the same bits.
    """
    rows = {choice.row: place for place, choice in enumerate(bundle.manifest.golden.chosen)}
    if bundle.manifest.precision == "fp32":
        return None
    try:
        expected = list(read_rows(bundle.folder / GOLDEN / EXPECTED))
        differs = False
        for index, wanted, found in zip(indices, reference, got, strict=False):
            if index not in rows:
                continue
            own = expected[rows[index]]
            floats = {name: value for name, value in wanted.items() if value.dtype.kind == "f" and name in own}
            if not floats or any(not _is_same(value, found.get(name)) for name, value in floats.items()):
                return None
            differs = differs or any(not _is_same(value, own[name]) for name, value in floats.items())
    except (EdgekitError, IndexError):
        return None
    if not differs:
        return None
    return (
        "the outputs are the float model's to the bit, and the bundle's own model does not give these:"
        " the reference was replayed, or another model ran"
    )


def _is_half(value: Array) -> bool:
    if value.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        return bool(np.array_equal(value.astype(np.float16).astype(np.float32), value))


def _is_same(first: Array, second: Array | None) -> bool:
    return second is not None and first.dtype == second.dtype and first.tobytes() == second.tobytes()
