"""A result of any size in 16 numbers, from which distances of results can be told."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgekit.tensors import Array

BUCKETS = 16
_LARGEST = 1e15

Floats = npt.NDArray[np.float64]


def fill_buckets(value: Array) -> Floats:
    """Returns the sketch of a result: each value gets a sign and is added up in one of 16 buckets.

    The energy of the difference of two results of one size is that of the difference of their sketches, on average
    (Charikar et al. 2002). What is not finite counts as zero.
    """
    flat = np.asarray(value, dtype=np.float64).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        energy = float(np.dot(flat, flat))
    if not energy <= _LARGEST:
        flat = np.where(np.isfinite(flat), flat, 0.0).clip(-_LARGEST, _LARGEST)
    signed = np.zeros(flat.size + -flat.size % BUCKETS)
    np.multiply(flat, _draw_signs(flat.size), out=signed[: flat.size])
    return np.asarray(signed.reshape(-1, BUCKETS).sum(axis=0), dtype=np.float64)


@lru_cache(maxsize=64)
def _draw_signs(size: int) -> npt.NDArray[np.int8]:
    return np.random.default_rng(size).integers(0, 2, size, dtype=np.int8) * np.int8(2) - np.int8(1)
