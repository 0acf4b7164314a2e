"""Samples in the sizes that are asked for: dynamic dimensions get a number, and several samples become a batch."""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper

from edgekit.data.samples import Samples
from edgekit.errors import UsageError
from edgekit.model.tensors import TensorSpec
from edgekit.prepare.shapes.derived_dims import formula_names
from edgekit.prepare.shapes.dims import find_dynamic_dims, fix_dims

_UNSET_DIM = 1


def size_inputs(inputs: Sequence[TensorSpec], dims: Mapping[str, int]) -> tuple[TensorSpec, ...]:
    """Returns inputs with a number for each dimension: that of `dims`, what follows from it, or 1.

    Raises:
        UsageError: a name or a size in `dims` is wrong.
    """
    graph = _make_graph(inputs)
    fix_dims(graph, {**dict.fromkeys(find_unset(inputs, dims), _UNSET_DIM), **dims})
    shapes = {value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim) for value in graph.input}
    return tuple(msgspec.structs.replace(spec, shape=shapes.get(spec.name, spec.shape)) for spec in inputs)


def find_unset(inputs: Sequence[TensorSpec], dims: Mapping[str, int]) -> set[str]:
    """Returns the dynamic dimensions that need a number and have none in `dims`; of a formula, the names in it."""
    dynamic = find_dynamic_dims(_make_graph(inputs))
    left = [dim.name for dim in dynamic if not {dim.name, f"{dim.input}:{dim.axis}"} & dims.keys()]
    return {name for dim in left for name in formula_names(dim) or {dim}} - dims.keys()


def cut_rows(inputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns inputs with a first axis of 1 where theirs is dynamic.

    Raises:
        UsageError: no input has a dynamic first axis, so that there is no batch.
    """
    free = _find_free(inputs)
    if not free:
        raise UsageError(
            "--batch means nothing here: no input has a dynamic first axis",
            hint="export the model with a free batch, or leave --batch out",
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
    free: frozenset[str] = _find_free(inputs) if batch else frozenset()
    stacked = {
        name: np.concatenate([row[name] for row in rows]) if name in free else value for name, value in kept[0].items()
    }
    return Samples(source=samples.source, count=1, read=lambda: iter((stacked,)))


def _find_free(inputs: Sequence[TensorSpec]) -> frozenset[str]:
    return frozenset(spec.name for spec in inputs if spec.shape and _is_free(spec.shape[0]))


def _is_free(dim: int | str | None) -> bool:
    # A formula follows from other dimensions: it is no batch of its own.
    return dim is None or (isinstance(dim, str) and formula_names(dim) <= {dim})


def _make_graph(inputs: Sequence[TensorSpec]) -> onnx.GraphProto:
    tensors = [spec for spec in inputs if spec.is_tensor and spec.shape is not None]
    # The element type plays no part: only the dimensions are read.
    values = [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, spec.shape) for spec in tensors]
    return helper.make_graph([], "inputs", values, [])
