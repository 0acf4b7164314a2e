"""A result of any size in 16 numbers, from which distances of results can be told."""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgekit.model.tensors import Array

BUCKETS = 16
"""An estimate of a squared distance deviates by sqrt(2 / 16), a third, where factors of four are asked for."""
# Squares of larger sums would lose what float64 has of digits.
_LARGEST = 1e15

Floats = npt.NDArray[np.float64]


def sketch_samples(values: Array) -> Floats:
    """Returns the sketch of each of several results of one size, laid along a first axis.

    Each value gets a sign and is added up in one of 16 buckets (count sketch, Charikar, Chen and Farach-Colton 2002):
    the energy of the difference of two results is that of the difference of their sketches, on average. What is not
    finite counts as zero.
    """
    count, size = len(values), math.prod(values.shape[1:])
    rows = np.asarray(values, dtype=np.float64).reshape(count, size)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = float(np.einsum("ij,ij->", rows, rows))
    if not largest <= _LARGEST:
        rows = np.where(np.isfinite(rows), rows, 0.0).clip(-_LARGEST, _LARGEST)
    signed = np.zeros((count, size + -size % BUCKETS))
    np.multiply(rows, _draw_signs(size), out=signed[:, :size])
    return np.stack([row.reshape(-1, BUCKETS).sum(axis=0) for row in signed])


@lru_cache(maxsize=64)
def _draw_signs(size: int) -> npt.NDArray[np.int8]:
    # Seeded by the size, so that both sides of a comparison get the same signs.
    return np.random.default_rng(size).integers(0, 2, size, dtype=np.int8) * np.int8(2) - np.int8(1)
