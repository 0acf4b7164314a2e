"""Inputs drawn at random, the same at each call, for a model that came without samples."""

import math
import zlib
from collections.abc import Iterator

import numpy as np

from edgekit.data.samples import Samples
from edgekit.errors import DataError
from edgekit.model.tensors import DTYPES, Array, Tensors, TensorSpec

MOST_AXES = 64
"""How many dimensions numpy's arrays have at most."""

_UNSET_DIM = 1
# A gibibyte of float32: more than any model takes at a time on what edgekit is for.
_MOST_VALUES = 1 << 28


def draw_samples(inputs: tuple[TensorSpec, ...], count: int = 1) -> Samples | None:
    """Returns samples for inputs that are tensors, or None if one is not; an unknown dimension gets the size 1.

    Floats are normal, integers 0 or 1 (they are indices more often than not), strings a letter.

    Raises:
        DataError: an input is so large that nothing could hold it, or has more dimensions than numpy knows.
    """
    if not all(spec.is_tensor and spec.shape is not None for spec in inputs):
        return None

    for spec in inputs:
        axes = len(spec.shape or ())
        if axes > MOST_AXES:
            raise DataError(
                f"input '{spec.name}' has {axes} dimensions, numpy has {MOST_AXES} at most",
                hint="merge dimensions that always stand together, by a Reshape in the model",
            )
        count_values = math.prod(dim for dim in spec.shape or () if isinstance(dim, int))
        if count_values > _MOST_VALUES:
            raise DataError(
                f"input '{spec.name}' has {count_values} values, too many to draw", hint="give it smaller dimensions"
            )

    def read() -> Iterator[Tensors]:
        for index in range(count):
            yield {spec.name: _draw(spec, index) for spec in inputs}

    return Samples(source="drawn at random", count=count, read=read)


def _draw(spec: TensorSpec, index: int) -> Array:
    # Seeded by the name of the input, so that a model with one more input gives the others the same numbers; crc32, as
    # `hash` differs from process to process.
    rng = np.random.default_rng([zlib.crc32(spec.name.encode()), index])
    shape = [dim if isinstance(dim, int) else _UNSET_DIM for dim in spec.shape or ()]
    if spec.dtype == "string":
        return np.full(shape, "a", object)
    dtype = np.dtype(DTYPES[spec.dtype])
    if dtype.kind == "f":
        return np.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)
