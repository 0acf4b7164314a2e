"""Samples kept back from fitting, with the float model's answers: the judge of every candidate.

Samples for rounding, which runs the model again, are kept too: none of those that judge.
"""

from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.errors import UsageError
from edgekit.model.tensors import HEADERS, Array, Tensors

# Samples that rounding learned from praise what is fitted to them, so some are kept from it, but of few all are needed.
# The numbers are chosen by hand; tools/bench/quantize_zoo.py shows what is found with them.
MOST_SAMPLES = 16
MOST_BYTES = 64 << 20  # of inputs and outputs together: they are in the cache, and in memory
FEWEST_SAMPLES = 8
"""With fewer samples in all none is held out."""
LEAST_KEPT, LEAST_BYTES = 4, 1 << 30
"""So many are kept even where they are larger, as with the KV cache of a language model, up to so many bytes; and one
in any case. Without a judge a plan would be plain minmax, and nobody would be told."""


class HeldOut:
    """Collects every few samples of a stream, at most 16 and at most a third, with some float tensors."""

    def __init__(self, count: int, tensors: Collection[str]) -> None:
        self._tensors = tensors
        wanted = min(MOST_SAMPLES, count // 3) if count >= FEWEST_SAMPLES else 0
        self._indices = frozenset(spread_indices(count, wanted)) if wanted else frozenset[int]()
        self._size_bytes = self._kept = 0
        self.arrays: dict[str, Array] = {}

    def describe_loss(self) -> tuple[str, ...]:
        """Returns how many samples judge, where there are fewer than were wanted, and why."""
        wanted, kept = len(self._indices), len(self.positions())
        if not kept:
            why = f"{FEWEST_SAMPLES} are needed" if not wanted else "inputs are no plain numbers"
            return (f"no sample is held out to judge the plans: {why}; the method 'auto' is minmax then",)
        if kept == wanted:
            return ()
        each = self._size_bytes / kept / 1e6
        return (f"{kept} of {wanted} held-out samples judge the plans: each has {each:.0f} MB",)

    def offer(self, index: int, sample: Tensors, values: Tensors) -> bool:
        """Takes a sample with the float model's tensors if it is one to hold out, and says so."""
        outputs = {name: value for name, value in values.items() if name in self._tensors}
        size_bytes = sum(value.nbytes for value in (*sample.values(), *outputs.values()))
        plain = all(value.dtype.kind in "fiub" for value in sample.values())
        if index not in self._indices or not plain or not self._has_room(size_bytes):
            return False
        self._size_bytes, self._kept = self._size_bytes + size_bytes, self._kept + 1
        self.arrays.update({f"{index}:in:{name}": value for name, value in sample.items()})
        # What ONNX Runtime returns keeps the memory of its whole session.
        self.arrays.update({f"{index}:out:{name}": value.copy() for name, value in outputs.items()})
        return True

    def _has_room(self, size_bytes: int) -> bool:
        most = MOST_BYTES if self._kept >= LEAST_KEPT else LEAST_BYTES
        return self._kept == 0 or self._size_bytes + size_bytes <= most

    def positions(self) -> set[int]:
        """Returns the positions, among those offered, of the samples that were taken."""
        return {int(name.split(":", 1)[0]) for name in self.arrays}

    def restore(self, arrays: Tensors) -> bool:
        """Goes on from arrays that were collected before; returns False if they are none."""
        for name, array in arrays.items():
            index, side, *_ = (*name.split(":", 2), "")
            if side not in {"in", "out"} or not index.isdecimal() or int(index) not in self._indices:
                return False
            self.arrays[name] = array.copy()  # no view of a checkpoint, which would be held in memory whole
        self._size_bytes, self._kept = sum(array.nbytes for array in arrays.values()), len(self.positions())
        return self._kept <= 1 or self._size_bytes <= (MOST_BYTES if self._kept > LEAST_KEPT else LEAST_BYTES)


def save_held_out(folder: Path, held_out: HeldOut) -> None:
    """Writes the held-out samples into a folder."""
    with (folder / "held_out.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **held_out.arrays)


def read_held_out(folder: Path) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Yields inputs and float outputs of each held-out sample.

    Raises:
        UsageError: the folder has none.
    """
    try:
        archive = np.load(folder / "held_out.npz", allow_pickle=False)
    except FileNotFoundError as error:
        raise UsageError(f"the statistics of the calibration, '{folder}', are gone", hint="calibrate again") from error
    with archive:
        for _, names in groupby(archive.files, key=lambda name: name.split(":", 1)[0]):
            parts: dict[str, dict[str, Array]] = {"in": {}, "out": {}}
            for name in names:
                _, side, tensor = name.split(":", 2)
                with HEADERS:
                    parts[side][tensor] = archive[name]
            yield parts["in"], parts["out"]


MOST_FITTED_SAMPLES = 16
"""So many tell what reaches a layer: a choice, for the time. Each layer runs the model on all of them, twice."""
MOST_FITTED_BYTES = 32 << 20


def save_fitted(folder: Path, samples: Samples, indices: Collection[int]) -> None:
    """Writes the first of some samples into a folder, as many as are allowed."""
    arrays: dict[str, Array] = {}
    left = MOST_FITTED_BYTES
    chosen = sorted(indices)[:MOST_FITTED_SAMPLES]
    for index, sample in zip(chosen, select_samples(samples, chosen), strict=False):
        left -= sum(value.nbytes for value in sample.values())
        if left < 0 or any(value.dtype.kind not in "fiub" for value in sample.values()):
            break
        arrays |= {f"{index}:{name}": value for name, value in sample.items()}
    with (folder / "fitted.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_fitted(folder: Path) -> Iterator[Tensors]:
    """Yields the samples that were kept.

    Raises:
        UsageError: the folder has none.
    """
    try:
        archive = np.load(folder / "fitted.npz", allow_pickle=False)
    except FileNotFoundError as error:
        raise UsageError(f"the statistics of the calibration, '{folder}', are gone", hint="calibrate again") from error
    with archive:
        for _, names in groupby(archive.files, key=lambda name: name.split(":", 1)[0]):
            with HEADERS:
                sample = {name.split(":", 1)[1]: archive[name] for name in names}
            yield sample
