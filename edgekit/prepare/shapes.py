"""The sizes of dynamic dimensions: given by the user, derived from others, or inferred.

A dimension's name may be a formula of other names, such as `2*batch` or `floor(height/2)`.
"""

import ast
import itertools
import math
import operator
import shlex
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction

import msgspec
import onnx

from edgekit._files import AnyPath
from edgekit.data.images import Preprocess
from edgekit.data.samples import read_shapes
from edgekit.errors import EdgekitError, UsageError, suggest_name
from edgekit.graph.inference import infer_model
from edgekit.model.model import read_inputs
from edgekit.model.tensors import PARSER_LOCK, TensorSpec, name_dim


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    # Formulas come from untrusted files: without bounds, s0**999999999 and powers of powers would be computed.
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT or abs(base) > _MAX_BASE:
        raise ValueError(f"{base} to the power of {exponent}")
    return base**exponent.numerator


_MAX_EXPONENT, _MAX_BASE = 8, 2**31
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip
# The functions of sympy and torch.utils._sympy, in lower case: exporters print their formulas.
# trunctoint rounds towards zero, which is down: sizes are not negative.
_FUNCTIONS: dict[str, Callable[..., Fraction | int]] = {
    **dict.fromkeys(("ceil", "ceiling", "ceiltoint"), math.ceil),
    **dict.fromkeys(("floor", "floortoint", "trunctoint"), math.floor),
    **dict.fromkeys(("cleandiv", "inttruediv"), operator.truediv),
    **dict.fromkeys(("mod", "pythonmod"), operator.mod),
    **dict.fromkeys(("pow", "powbynatural"), _power),
    "ceildiv": lambda left, right: math.ceil(left / right), "floordiv": operator.floordiv, "max": max, "min": min,
}  # fmt: skip
_MAX_LENGTH = 200


def derive_dim(formula: str, sizes: Mapping[str, int]) -> int | None:
    """Returns the value of a formula; None if it is no formula, lacks the size of a name, or is no integer."""
    if (tree := _parse(formula)) is None:
        return None
    try:
        value = _evaluate(tree, {name: Fraction(size) for name, size in sizes.items()})
    except (ValueError, KeyError, ZeroDivisionError, TypeError):
        return None
    return value.numerator if value.denominator == 1 else None


def solve_dim(formula: str, value: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """Solves formula = `value` for the one name that has no size; returns this name and its size.

    None if there is not exactly one such name, the formula is not linear in it, or the size is no integer.
    """
    tree = _parse(formula)
    unknown = sorted(_names(tree) - sizes.keys()) if tree is not None else []
    if tree is None or len(unknown) != 1:
        return None
    known = {name: Fraction(size) for name, size in sizes.items()}
    try:
        at_0, at_1, at_2 = (_evaluate(tree, {**known, unknown[0]: Fraction(number)}) for number in (0, 1, 2))
        slope = at_1 - at_0
        if at_2 - at_1 != slope:
            return None
        solved = (value - at_0) / slope
        fits = solved.denominator == 1 and _evaluate(tree, {**known, unknown[0]: solved}) == value
    except (ValueError, KeyError, ZeroDivisionError, TypeError):
        return None
    return (unknown[0], solved.numerator) if fits else None


def formula_names(formula: str) -> set[str]:
    """Returns the names in a formula; none if the text is a single name or no formula."""
    tree = _parse(formula)
    return set() if tree is None else _names(tree)


def _parse(formula: str) -> ast.expr | None:
    if len(formula) > _MAX_LENGTH:
        return None
    try:
        with PARSER_LOCK:
            tree = ast.parse(formula.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return tree if isinstance(tree, ast.BinOp | ast.Call) else None


def _names(tree: ast.expr) -> set[str]:
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions}


def _evaluate(tree: ast.expr, sizes: Mapping[str, Fraction]) -> Fraction:
    match tree:
        case ast.Name(id=name):
            return sizes[name]
        case ast.Constant(value=int() as number):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_evaluate(inner, sizes)
        case ast.BinOp(left=left, op=sign, right=right):
            return Fraction(_OPERATORS[type(sign)](_evaluate(left, sizes), _evaluate(right, sizes)))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]):
            return Fraction(_FUNCTIONS[name.lower()](*(_evaluate(argument, sizes) for argument in arguments)))
        case _:
            raise ValueError(ast.dump(tree))


_MAX_DIM = 2**31
_UNSET_DIM = 1


def fix_dims(graph: onnx.GraphProto, dims: Mapping[str, int], *, may_stay_open: bool = False) -> None:
    """Sets the size of each dynamic dimension, in place; for `dims` see `size_inputs`.

    An input without a rank gets one from `INPUT:0`, `INPUT:1` and so on. Inferred shapes are removed, to be inferred
    again.

    Raises:
        UsageError: a key that is no dimension, an invalid size, a size that contradicts the model or another key, or a
            dynamic dimension without a size.
    """
    for value in graph.input:
        if not value.type.HasField("tensor_type") or value.type.tensor_type.HasField("shape"):
            continue
        rank = next(axis for axis in range(len(dims) + 1) if f"{value.name}:{axis}" not in dims)
        if not rank and not may_stay_open:
            words = f"input '{value.name}' has no rank, so its whole shape is needed"
            hint = f"add --dim {value.name}:0=INT --dim {value.name}:1=INT and so on, one for each axis"
            raise UsageError(words, hint=hint)
        for _ in range(rank):
            value.type.tensor_type.shape.dim.add()
    shared, sizes = _resolve_dims(read_inputs(graph), dims, may_stay_open=may_stay_open)
    for value in (*graph.input, *graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param in shared:
                dim.ClearField("dim_param")
            if (name := name_dim(dim.dim_param) or f"{value.name}:{axis}") in sizes:
                dim.dim_value = sizes[name]
    del graph.value_info[:]


def size_inputs(
    inputs: Sequence[TensorSpec], dims: Mapping[str, int], *, may_stay_open: bool = False
) -> tuple[TensorSpec, ...]:
    """Returns inputs with a size for each dimension: from `dims`, derived from those, or 1.

    A key of `dims` is the name of a dimension or `INPUT:AXIS`. If such keys give one name several sizes, the name is
    ignored: an exporter used it for different axes. A dimension named by a formula, such as `2*batch`, is derived from
    the names in it; the only unknown name in a formula is derived from its value. With `may_stay_open`, dimensions
    without a size stay dynamic.

    Raises:
        UsageError: a name or a size in `dims` is wrong.
    """
    unset = set[str]() if may_stay_open else find_unset(inputs, dims)
    dims = {**dict.fromkeys(unset, _UNSET_DIM), **dims}
    shared, sizes = _resolve_dims(inputs, dims, may_stay_open=may_stay_open)

    def fill(spec: TensorSpec) -> tuple[int | str | None, ...] | None:
        axes = _drop_names(spec, shared).name_axes()
        return spec.shape and tuple(sizes.get(axes.get(axis, ""), dim) for axis, dim in enumerate(spec.shape))

    return tuple(msgspec.structs.replace(spec, shape=fill(spec)) for spec in inputs)


def find_unset(inputs: Sequence[TensorSpec], dims: Mapping[str, int]) -> set[str]:
    """Returns the dynamic dimensions without a size in `dims`; of a formula, the names in it."""
    left = [text for text, key in _list_axes(inputs) if not {text, key} & dims.keys()]
    return {name for text in left for name in formula_names(text) or {text}} - dims.keys()


def _list_axes(inputs: Sequence[TensorSpec]) -> list[tuple[str, str]]:
    """Returns the name of each dynamic dimension, and that of its axis, `INPUT:AXIS`."""
    return [(text, f"{spec.name}:{axis}") for spec in inputs for axis, text in spec.name_axes().items()]


class OpenDimsError(UsageError):
    """Dimensions of inputs have no size; `names` are what `--dim` calls them, and `sizes` the sizes to propose."""

    def __init__(self, message: str, *, names: Sequence[str], sizes: Mapping[str, int] | None = None) -> None:
        known = sizes or {}
        pairs = (f"{name}={known.get(name, 'INT')}" for name in names)
        options = " ".join(f"--dim {shlex.quote(pair)}" for pair in pairs)
        super().__init__(message, hint=f"add {options}{', as in the samples' if known else ''}")
        self.names = names


def find_sizes(inputs: Sequence[TensorSpec], rows: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, int]:
    """Returns the size of each dynamic dimension that is equal in all rows, by what `--dim` calls it.

    A row holds the shape of each input in a sample. A dimension named by a formula is solved for the name in it. If
    axes of one name have different sizes, each the same in all rows, they are called `INPUT:AXIS`.
    """
    seen: dict[str, set[int]] = {}
    own: dict[str, dict[str, set[int]]] = {}
    for spec, shapes in itertools.product(inputs, rows):
        shape = shapes.get(spec.name, ())
        for axis, text in spec.name_axes().items():
            if axis < len(shape):
                name, number = solve_dim(text, shape[axis], {}) or (text, shape[axis])
                seen.setdefault(name, set()).add(number)
                own.setdefault(name, {}).setdefault(f"{spec.name}:{axis}", set()).add(shape[axis])
    for name in [name for name, numbers in seen.items() if len(numbers) > 1]:
        if all(len(numbers) == 1 for numbers in own[name].values()):
            seen |= own[name]
    return {name: numbers.pop() for name, numbers in seen.items() if len(numbers) == 1}


@contextmanager
def proposing_sizes(inputs: Sequence[TensorSpec], source: AnyPath, preprocess: Preprocess | None) -> Generator[None]:
    """Adds the sizes that the samples have to an `OpenDimsError` of the block.

    Raises:
        OpenDimsError: inputs have dimensions without a size.
    """
    try:
        yield
    except OpenDimsError as error:
        sizes: dict[str, int] = {}
        # Errors in the samples are reported when they are used.
        with suppress(EdgekitError):
            sizes = find_sizes(inputs, read_shapes(source, inputs, preprocess))
        axes = _list_axes(inputs)
        names = [
            each
            for name in error.names
            for each in ([key for text, key in axes if text == name and name not in sizes and key in sizes] or [name])
        ]
        raise OpenDimsError(error.message, names=names, sizes=sizes) from error


def _drop_names(spec: TensorSpec, names: Collection[str]) -> TensorSpec:
    shape = spec.shape and tuple(None if dim in names else dim for dim in spec.shape)
    return msgspec.structs.replace(spec, shape=shape)


def _resolve_dims(
    inputs: Sequence[TensorSpec], dims: Mapping[str, int], *, may_stay_open: bool
) -> tuple[set[str], dict[str, int]]:
    """Returns the names to which keys `INPUT:AXIS` give several sizes, which are ignored, and the sizes by name."""
    given: dict[str, set[int]] = {}
    for text, key in _list_axes(inputs):
        if key in dims and text != key:
            given.setdefault(text, set()).add(dims[key])
    shared = {name for name, sizes in given.items() if len(sizes) > 1}
    for key, size in dims.items():
        if not 0 <= size <= _MAX_DIM:
            raise UsageError(f"'{key}={size}' is no size of a dimension", hint="a whole number from 0 to 2147483648")
    specs = [_drop_names(spec, shared) for spec in inputs]
    axes = [(spec.name, axis, text) for spec in specs for axis, text in spec.name_axes().items()]
    sizes = _resolve_keys(specs, dims)
    # Formulas are derived from their names, and a name from a formula.
    for formula, size in tuple(sizes.items()):
        if (solved := solve_dim(formula, size, sizes)) is not None:
            sizes.setdefault(*solved)
    for name in sorted({text for *_, text in axes}):
        derived = derive_dim(name, sizes)
        if derived is not None and sizes.setdefault(name, derived) != derived:
            words = f"'{name}' is given as {sizes[name]} and comes to {derived}"
            raise UsageError(words, hint="leave one of the numbers out")
    for name, size in sizes.items():
        if not 0 <= size <= _MAX_DIM:
            raise UsageError(f"dimension '{name}' comes to {size}", hint="give other numbers to the names in it")
    missing: dict[str, str] = {}
    for owner, axis, text in () if may_stay_open else axes:
        # A formula is derived from its names: the user is asked for these, or for the formula if it still has no value.
        for name in sorted(formula_names(text) - sizes.keys()) or [text]:
            if text not in sizes:
                missing.setdefault(name, f"'{name}' (axis {axis} of input '{owner}')")
    if missing:
        noun = "a dynamic dimension" if len(missing) == 1 else "dynamic dimensions"
        places = ", ".join(missing.values())
        raise OpenDimsError(f"the model has {noun} without a number: {places}", names=tuple(missing))
    return shared, sizes


def name_dims(inputs: Sequence[TensorSpec]) -> set[str]:
    """Returns the names of dynamic dimensions as `--dim` calls them, and those in the formulas of such dimensions."""
    names = {name for spec in inputs for name in spec.name_axes().values()}
    return names | {part for name in names for part in formula_names(name)}


def _resolve_keys(inputs: Sequence[TensorSpec], dims: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes of `dims` by the names of dimensions: a key `INPUT:AXIS` is replaced by the axis's name."""
    known = {f"{spec.name}:{axis}": dim for spec in inputs for axis, dim in enumerate(spec.shape or ())}
    names, sizes = name_dims(inputs), dict[str, int]()
    for key, size in dims.items():
        dim = known.get(key)
        if key not in names and key not in known:
            raise UsageError(f"the model has no dynamic dimension '{key}'", hint=suggest_name(key, names))
        if isinstance(dim, int) and dim != size:
            raise UsageError(f"'{key}={size}' contradicts the model", hint=f"it is fixed at {dim} there")
        name = dim if isinstance(dim, str) else key
        if sizes.setdefault(name, size) != size:
            words = f"'{name}' is given both {sizes[name]} and {size}"
            raise UsageError(words, hint="give it one number, or each axis its own")
    return sizes


def infer_outputs(proto: onnx.ModelProto) -> None:
    """Sets the shapes of the graph's outputs to the inferred ones, in place; dimensions that cannot be inferred stay.

    A declared shape may be wrong, and ONNX Runtime only warns: an exporter may call the sides of an enlarged image
    `height` and `width`, as the input's.
    """
    # An output may have no type at all, and inference gives it one: outputs are found by name, not by position.
    outputs = [value for value in proto.graph.output if value.type.HasField("tensor_type")]
    declared = [onnx.TypeProto.Tensor.FromString(value.type.tensor_type.SerializeToString()) for value in outputs]
    for value in outputs:
        value.type.tensor_type.ClearField("shape")
    inferred = {value.name: value.type.tensor_type for value in infer_model(proto).graph.output}
    for value, stated in zip(outputs, declared, strict=True):
        output, found = value.type.tensor_type, inferred[value.name]
        output.CopyFrom(stated)
        if found.HasField("shape"):
            output.shape.CopyFrom(found.shape)
            for dim, known in zip(output.shape.dim, stated.shape.dim, strict=False):
                if not dim.HasField("dim_value") or dim.dim_value < 0:
                    dim.CopyFrom(known)
