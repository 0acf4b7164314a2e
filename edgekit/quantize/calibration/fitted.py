"""Samples kept for rounding that runs the model again: none of those that judge."""

from collections.abc import Collection, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from edgekit.data.samples import Samples, select_samples
from edgekit.errors import UsageError
from edgekit.model.tensors import HEADERS, Array, Tensors

MOST_SAMPLES = 16
"""So many tell what reaches a layer: a choice, for the time. Each layer runs the model on all of them, twice."""
MOST_BYTES = 32 << 20


def save_fitted(folder: Path, samples: Samples, indices: Collection[int]) -> None:
    """Writes the first of some samples into a folder, as many as are allowed."""
    arrays: dict[str, Array] = {}
    left = MOST_BYTES
    chosen = sorted(indices)[:MOST_SAMPLES]
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
