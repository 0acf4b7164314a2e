"""Inputs in sizes that were not asked for: what is open gets the size 1, and what follows from it its own."""

from collections.abc import Mapping, Sequence

import msgspec
import onnx
from onnx import TensorProto, helper

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


def _make_graph(inputs: Sequence[TensorSpec]) -> onnx.GraphProto:
    tensors = [spec for spec in inputs if spec.is_tensor and spec.shape is not None]
    # The element type plays no part: only the dimensions are read.
    values = [helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, spec.shape) for spec in tensors]
    return helper.make_graph([], "inputs", values, [])
