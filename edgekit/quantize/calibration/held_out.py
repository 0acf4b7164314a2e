"""The samples of a calibration that are stored: held-out samples, with the float model's outputs, and fitting samples.

Candidates are judged by held-out samples, to which nothing is fitted. Rounding runs the model on other samples, the
fitting samples.
"""

from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.model.external import ArrayFile
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.calibration.store import StoredArrays, save_arrays

# Weights that were rounded with some samples fit these better than others, so some samples are held out; but if there
# are few samples, rounding needs all. The numbers are chosen by hand with tools/bench/quantize_zoo.py.
MOST_SAMPLES = 16
MOST_BYTES = 64 << 20  # of inputs and outputs together, which lie in the cache
FEWEST_SAMPLES = 8
"""With fewer samples than this, none is held out."""
LEAST_KEPT, LEAST_BYTES = 4, 1 << 30
"""The first 4 held-out samples may take up to 1 GB, more than MOST_BYTES.

Samples may be large, as with the KV cache of a language model. One is kept in any case: without any, no plan could be
judged, and "auto" would be minmax.
"""
MOST_FITTED_SAMPLES, MOST_FITTED_BYTES = 16, 32 << 20
"""So many fitting samples are stored: a choice, to save time. For each layer the model runs on all of them, twice."""
HELD_OUT = "held_out.bin"
"""The file of held-out samples in the folder of a calibration's statistics."""
_PLAIN = "fiubU"


class HeldOut:
    """Keeps samples spread over a stream in a file, at most 16 and at most a third, with some float tensors."""

    def __init__(self, count: int, tensors: Collection[str], file: ArrayFile) -> None:
        self._tensors, self._file = tensors, file
        wanted = min(MOST_SAMPLES, count // 3) if count >= FEWEST_SAMPLES else 0
        self._indices = frozenset(spread_indices(count, wanted)) if wanted else frozenset[int]()
        self._size_bytes = self._kept = 0
        self.arrays: dict[str, Array] = {}

    def describe_loss(self) -> tuple[str, ...]:
        """Returns a note with the number of held-out samples and the reason, if they are fewer than wanted."""
        wanted, kept = len(self._indices), len(self.positions())
        if not kept:
            why = f"{FEWEST_SAMPLES} are needed" if not wanted else "inputs are no plain numbers"
            return (f"no sample is held out to judge the plans: {why}; 'auto' and 'best' begin with minmax then",)
        if kept == wanted:
            return ()
        each = self._size_bytes / kept / 1e6
        return (f"{kept} of {wanted} held-out samples judge the plans: each has {each:.0f} MB",)

    def offer(self, index: int, sample: Tensors, values: Tensors) -> bool:
        """Keeps a sample with the float model's tensors if it is to be held out, and returns whether it is."""
        sample, most = _write_texts(sample), MOST_BYTES if self._kept >= LEAST_KEPT else LEAST_BYTES
        outputs = {name: value for name, value in values.items() if name in self._tensors}
        size_bytes = sum(value.nbytes for value in (*sample.values(), *outputs.values()))
        has_room = self._kept == 0 or self._size_bytes + size_bytes <= most
        if index not in self._indices or not _is_plain(sample) or not has_room:
            return False
        self._size_bytes, self._kept = self._size_bytes + size_bytes, self._kept + 1
        self.arrays |= {f"{index}:in:{name}": self._store(value) for name, value in sample.items()}
        self.arrays |= {f"{index}:out:{name}": self._store(value) for name, value in outputs.items()}
        return True

    def _store(self, value: Array) -> Array:
        stored = self._file.zeros(value.shape, value.dtype)
        stored.values[...] = value
        stored.release()
        return stored.values

    def positions(self) -> set[int]:
        """Returns the positions of the kept samples among those offered."""
        return {int(name.split(":", 1)[0]) for name in self.arrays}

    def restore(self, arrays: Tensors) -> bool:
        """Continues from arrays that were collected before; returns False if they are not such arrays."""
        for name, array in arrays.items():
            index, side, *_ = (*name.split(":", 2), "")
            if side not in {"in", "out"} or not index.isdecimal() or int(index) not in self._indices:
                return False
            self.arrays[name] = self._store(array)  # a view would keep the whole checkpoint in memory
        self._size_bytes, self._kept = sum(array.nbytes for array in arrays.values()), len(self.positions())
        return self._kept <= 1 or self._size_bytes <= (MOST_BYTES if self._kept > LEAST_KEPT else LEAST_BYTES)


def read_held_out(folder: Path) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Yields the inputs and the float outputs of each held-out sample.

    Raises:
        UsageError: the folder has none.
    """
    for arrays in _read(folder, HELD_OUT):
        inputs, outputs = (
            {name.removeprefix(side): array for name, array in arrays.items() if name.startswith(side)}
            for side in ("in:", "out:")
        )
        yield inputs, outputs


def save_fitted(folder: Path, samples: Samples, indices: Collection[int]) -> None:
    """Writes fitting samples into a folder: the first of those at `indices`, up to the allowed number and size."""
    arrays: dict[str, Array] = {}
    left = MOST_FITTED_BYTES
    chosen = sorted(indices)[:MOST_FITTED_SAMPLES]
    for index, sample in zip(chosen, map(_write_texts, select_samples(samples, chosen)), strict=False):
        left -= sum(value.nbytes for value in sample.values())
        if left < 0 or not _is_plain(sample):
            break
        arrays |= {f"{index}:{name}": value for name, value in sample.items()}
    save_arrays(folder / "fitted.bin", arrays.items())


def read_fitted(folder: Path) -> Iterator[Tensors]:
    """Yields the fitting samples.

    Raises:
        UsageError: the folder has none.
    """
    yield from _read(folder, "fitted.bin")


def _write_texts(sample: Tensors) -> dict[str, Array]:
    """Returns a sample whose texts are plain characters, not objects."""
    return {name: value.astype(np.str_) if value.dtype == object else value for name, value in sample.items()}


def _is_plain(sample: Tensors) -> bool:
    return all(value.dtype.kind in _PLAIN for value in sample.values())


def _read(folder: Path, name: str) -> Iterator[dict[str, Array]]:
    """Yields the arrays of each sample, named `INDEX:NAME` in the file, by their NAME."""
    stored = StoredArrays(folder / name)
    for _, sample in groupby(stored, key=lambda each: each.split(":", 1)[0]):
        yield {each.split(":", 1)[1]: stored[each] for each in sample}
