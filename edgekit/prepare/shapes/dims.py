"""Giving a number to every dimension of the inputs."""

from collections.abc import Iterator, Mapping

import msgspec
import onnx

from edgekit.errors import UsageError, suggest_name
from edgekit.prepare.shapes.derived_dims import derive_dim, formula_names, solve_dim

_MAX_DIM = 2**31


class DynamicDim(msgspec.Struct, frozen=True, kw_only=True):
    """A dimension of an input that has no number.

    `name` is what `--dim` calls it: its own name, or `INPUT:AXIS` where it has none.
    """

    input: str
    axis: int
    name: str


def find_dynamic_dims(graph: onnx.GraphProto) -> tuple[DynamicDim, ...]:
    """Returns the input dimensions without a number, in the order of inputs and axes; initializers are no inputs."""
    return tuple(
        DynamicDim(input=value.name, axis=axis, name=dim.dim_param or f"{value.name}:{axis}")
        for value in _real_inputs(graph)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if not _is_known(dim)
    )


def fix_dims(graph: onnx.GraphProto, dims: Mapping[str, int], *, may_stay_open: bool = False) -> None:
    """Gives each dynamic dimension its number, wherever its name stands, in place.

    A key is the name of a dimension or `INPUT:AXIS`. An input without a rank gets one from `INPUT:0`, `INPUT:1` and so
    on. A dimension that is called by a formula, such as `2*batch`, follows from the names in it, and the last name from
    the formula. Shapes that follow from the inputs' are dropped, so that they are inferred again. What gets no number
    stays open where it may.

    Raises:
        UsageError: a key that names nothing, a number that is no size, a number that contradicts the model or another
            key, or a dynamic dimension that got no number.
    """
    for key, size in dims.items():
        if not 0 <= size <= _MAX_DIM:
            raise UsageError(f"'{key}={size}' is no size of a dimension", hint="a whole number from 0 to 2147483648")
    for value in _real_inputs(graph):
        _give_rank(value, dims, may_stay_open=may_stay_open)
    sizes = _resolve_keys(graph, dims)
    sizes |= _derive_formulas(graph, sizes)
    if not may_stay_open:
        _refuse_missing(graph, sizes)
    for value in (*graph.input, *graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            _set_dim(dim, sizes.get(dim.dim_param or f"{value.name}:{axis}"))
    del graph.value_info[:]


def _real_inputs(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    initializers = {tensor.name for tensor in graph.initializer}
    return (value for value in graph.input if value.name not in initializers)


def _is_known(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return dim.HasField("dim_value") and dim.dim_value >= 0


def _give_rank(value: onnx.ValueInfoProto, dims: Mapping[str, int], *, may_stay_open: bool) -> None:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or tensor.HasField("shape"):
        return
    rank = next(axis for axis in range(len(dims) + 1) if f"{value.name}:{axis}" not in dims)
    if rank == 0 and may_stay_open:
        return
    if rank == 0:
        raise UsageError(
            f"input '{value.name}' has no rank, so its whole shape is needed",
            hint=f"add --dim {value.name}:0=INT --dim {value.name}:1=INT and so on, one for each axis",
        )
    for _ in range(rank):
        tensor.shape.dim.add()


def _resolve_keys(graph: onnx.GraphProto, dims: Mapping[str, int]) -> dict[str, int]:
    """Returns the number of each dynamic dimension by its name, having turned `INPUT:AXIS` into names."""
    known = {
        f"{value.name}:{axis}": dim
        for value in _real_inputs(graph)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
    }
    names = {dim.name for dim in find_dynamic_dims(graph)}
    names |= {part for name in names for part in formula_names(name)}
    sizes: dict[str, int] = {}
    for key, size in dims.items():
        dim = known.get(key)
        if key not in names and dim is None:
            raise UsageError(f"the model has no dynamic dimension '{key}'", hint=suggest_name(key, names))
        if dim is not None and _is_known(dim) and dim.dim_value != size:
            raise UsageError(f"'{key}={size}' contradicts the model", hint=f"it is fixed at {dim.dim_value} there")
        name = dim.dim_param or key if dim is not None else key
        if sizes.setdefault(name, size) != size:
            raise UsageError(f"'{name}' is given both {sizes[name]} and {size}", hint="give it one number")
    return sizes


def _derive_formulas(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers that follow from others: formulas from their names, and a name from a formula."""
    derived = dict(sizes)
    for formula in sizes:
        solved = solve_dim(formula, sizes[formula], derived)
        if solved is not None:
            derived.setdefault(*solved)
    for name in sorted({dim.name for dim in find_dynamic_dims(graph)}):
        size = derive_dim(name, derived)
        if size is not None and derived.setdefault(name, size) != size:
            raise UsageError(
                f"'{name}' is given as {derived[name]} and comes to {size}", hint="leave one of the numbers out"
            )
    for name, size in derived.items():
        if not 0 <= size <= _MAX_DIM:
            raise UsageError(f"dimension '{name}' comes to {size}", hint="give other numbers to the names in it")
    return derived


def _refuse_missing(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    missing: dict[str, DynamicDim] = {}
    for dim in find_dynamic_dims(graph):
        # A formula follows from the names in it: it is asked for only where these have numbers, and it comes to none.
        for name in sorted(formula_names(dim.name) - sizes.keys()) or [dim.name]:
            if dim.name not in sizes:
                missing.setdefault(name, dim)
    if not missing:
        return
    places = ", ".join(f"'{name}' (axis {dim.axis} of input '{dim.input}')" for name, dim in missing.items())
    options = " ".join(f"--dim {name}=INT" for name in missing)
    noun = "a dynamic dimension" if len(missing) == 1 else "dynamic dimensions"
    raise UsageError(f"the model has {noun} without a number: {places}", hint=f"add {options}")


def _set_dim(dim: onnx.TensorShapeProto.Dimension, size: int | None) -> None:
    if size is not None:
        dim.dim_value = size
