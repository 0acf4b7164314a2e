"""Samples in the sizes that are asked for: several become a batch."""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit.data.samples import Samples
from edgekit.errors import UsageError
from edgekit.model.tensors import TensorSpec
from edgekit.prepare.shapes.derived_dims import formula_names


def cut_rows(inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns inputs with a first axis of 1 where theirs is dynamic.

    Raises:
        UsageError: no input has a dynamic first axis, so that there is no batch.
    """
    free = find_free(inputs)
    if not free:
        raise UsageError(
            "--batch means nothing here: no input has a dynamic first axis",
            hint="edgekit inspect MODEL says how its exporter opens it; or leave --batch out",
        )
    return tuple(
        msgspec.structs.replace(spec, shape=(1, *(spec.shape or ())[1:])) if spec.name in free else spec
        for spec in inputs
    )


def stack_samples(samples: Samples, inputs: Sequence[TensorSpec], batch: int | None) -> Samples:
    """Returns the first sample, or so many stacked along dynamic first axes; few samples are taken over and over.

    Inputs without such an axis keep the value of the first.
    """
    kept = list(itertools.islice(samples, batch or 1))
    rows = list(itertools.islice(itertools.cycle(kept), batch or 1))
    free: frozenset[str] = find_free(inputs) if batch else frozenset()
    stacked = {
        name: np.concatenate([row[name] for row in rows]) if name in free else value for name, value in kept[0].items()
    }
    return Samples(source=samples.source, count=1, read=lambda: iter((stacked,)))


def find_free(inputs: Sequence[TensorSpec]) -> frozenset[str]:
    """Returns the inputs whose first axis is dynamic: those that bring a row for each sample of a batch."""
    return frozenset(spec.name for spec in inputs if spec.shape and _is_free(spec.shape[0]))


def _is_free(dim: int | str | None) -> bool:
    # A formula follows from other dimensions: it is no batch of its own.
    return dim is None or (isinstance(dim, str) and formula_names(dim) <= {dim})
