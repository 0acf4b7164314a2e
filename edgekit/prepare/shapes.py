"""Dynamic dimensions: fixed by the user, derived from others, inferred.

A dimension's name may be a formula of others, such as `2*batch` or `floor(height/2)`.
"""

import ast
import itertools
import math
import operator
import shlex
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction

import msgspec
import onnx
from onnx import TensorProto, helper

from edgekit._files import AnyPath
from edgekit.data.images import Preprocess
from edgekit.data.samples import read_shapes
from edgekit.errors import EdgekitError, UsageError, suggest_name
from edgekit.graph.inference import infer_model
from edgekit.model.tensors import HEADERS, TensorSpec, name_dim


def _ceil_div(left: Fraction, right: Fraction) -> int:
    return math.ceil(left / right)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    # Formulas come from untrusted files: without bounds, s0**999999999 and powers of powers would be computed.
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT or abs(base) > _MAX_BASE:
        raise ValueError(f"{base} to the power of {exponent}")
    return base**exponent.numerator


_MAX_EXPONENT, _MAX_BASE = 8, 2**31
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
# What sympy and torch.utils._sympy write, in upper or lower case: exporters print their formulas.
_FUNCTIONS: dict[str, Callable[..., Fraction | int]] = {
    "ceil": math.ceil,
    "ceildiv": _ceil_div,
    "ceiling": math.ceil,
    "ceiltoint": math.ceil,
    "cleandiv": operator.truediv,
    "floor": math.floor,
    "floordiv": operator.floordiv,
    "floortoint": math.floor,
    "inttruediv": operator.truediv,
    "max": max,
    "min": min,
    "mod": operator.mod,
    "pow": _power,
    "powbynatural": _power,
    "pythonmod": operator.mod,
    # Rounds towards zero, which is down: sizes are not negative.
    "trunctoint": math.floor,
}
_MAX_LENGTH = 200


def derive_dim(formula: str, sizes: Mapping[str, int]) -> int | None:
    """Returns the value of a formula; None if it is no formula, a name has no number, or the value is not whole."""
    tree = _parse(formula)
    if tree is None:
        return None
    try:
        value = _evaluate(tree, {name: Fraction(size) for name, size in sizes.items()})
    except (ValueError, KeyError, ZeroDivisionError, TypeError):
        return None
    return value.numerator if value.denominator == 1 else None


def solve_dim(formula: str, value: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """Solves a formula for the one name that has no number.

    Returns the name and its number where the formula is `value`.

    None if there is not exactly one such name, or the formula is not linear in it, or the number is not whole.
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
    """Returns the names in a formula, none if it is none."""
    tree = _parse(formula)
    return set() if tree is None else _names(tree)


def _parse(formula: str) -> ast.expr | None:
    if len(formula) > _MAX_LENGTH:
        return None
    try:
        with HEADERS:
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
        DynamicDim(input=value.name, axis=axis, name=_name_axis(value, axis))
        for value in _real_inputs(graph)
        for axis, dim in enumerate(value.type.tensor_type.shape.dim)
        if not _is_known(dim)
    )


def fix_dims(graph: onnx.GraphProto, dims: Mapping[str, int], *, may_stay_open: bool = False) -> None:
    """Replaces each dynamic dimension by its number, wherever its name occurs, in place.

    A key is the name of a dimension or `INPUT:AXIS`. Where such keys give one name several numbers, it names nothing:
    an exporter called different axes alike. An input without a rank gets one from `INPUT:0`, `INPUT:1` and so on. A
    dimension named by a formula, such as `2*batch`, follows from the names in it; the last unknown name in a formula
    follows from its value. Inferred shapes are dropped, so that they are inferred again. With `may_stay_open`, a
    dimension without a number stays open.

    Raises:
        UsageError: a key that names nothing, a number that is no size, a number that contradicts the model or another
            key, or a dynamic dimension that got no number.
    """
    for key, size in dims.items():
        if not 0 <= size <= _MAX_DIM:
            raise UsageError(f"'{key}={size}' is no size of a dimension", hint="a whole number from 0 to 2147483648")
    for value in _real_inputs(graph):
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or tensor.HasField("shape"):
            continue
        rank = next(axis for axis in range(len(dims) + 1) if f"{value.name}:{axis}" not in dims)
        if not rank and not may_stay_open:
            raise UsageError(
                f"input '{value.name}' has no rank, so its whole shape is needed",
                hint=f"add --dim {value.name}:0=INT --dim {value.name}:1=INT and so on, one for each axis",
            )
        for _ in range(rank):
            tensor.shape.dim.add()
    _drop_shared_names(graph, dims)
    sizes = _resolve_keys(graph, dims)
    sizes |= _derive_formulas(graph, sizes)
    missing: dict[str, DynamicDim] = {}
    for open_ in () if may_stay_open else find_dynamic_dims(graph):
        # A formula follows from its names: the user is asked for it only where these have numbers and it still has no
        # value.
        for name in sorted(formula_names(open_.name) - sizes.keys()) or [open_.name]:
            if open_.name not in sizes:
                missing.setdefault(name, open_)
    if missing:
        places = ", ".join(f"'{name}' (axis {each.axis} of input '{each.input}')" for name, each in missing.items())
        noun = "a dynamic dimension" if len(missing) == 1 else "dynamic dimensions"
        raise OpenDimsError(f"the model has {noun} without a number: {places}", names=tuple(missing))
    for value in (*graph.input, *graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if (name := _name_axis(value, axis)) in sizes:
                dim.dim_value = sizes[name]
    del graph.value_info[:]


class OpenDimsError(UsageError):
    """Dimensions of inputs have no number; `names` are what `--dim` calls them, and `sizes` the numbers to propose."""

    def __init__(self, message: str, *, names: Sequence[str], sizes: Mapping[str, int] | None = None) -> None:
        known = sizes or {}
        pairs = (f"{name}={known.get(name, 'INT')}" for name in names)
        options = " ".join(f"--dim {shlex.quote(pair)}" for pair in pairs)
        super().__init__(message, hint=f"add {options}{', as in the samples' if known else ''}")
        self.names = names


def find_sizes(inputs: Sequence[TensorSpec], rows: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, int]:
    """Returns the number of each dynamic dimension that has the same in all rows, by what `--dim` calls it.

    A row holds the shape of each input. A dimension named by a formula is solved for the name in it. If axes of one
    name have different numbers, and each has its own in all rows, they are called `INPUT:AXIS`.
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
    """Adds to the error about open dimensions of a model the numbers that its samples have.

    Raises:
        OpenDimsError: inputs have dimensions without a number.
    """
    try:
        yield
    except OpenDimsError as error:
        sizes: dict[str, int] = {}
        # If the samples are wrong too, that is said when they are used.
        with suppress(EdgekitError):
            sizes = find_sizes(inputs, read_shapes(source, inputs, preprocess))
        axes = [(text, f"{spec.name}:{axis}") for spec in inputs for axis, text in spec.name_axes().items()]
        names = [
            each
            for name in error.names
            for each in ([key for text, key in axes if text == name and name not in sizes and key in sizes] or [name])
        ]
        raise OpenDimsError(error.message, names=names, sizes=sizes) from error


def _name_axis(value: onnx.ValueInfoProto, axis: int) -> str:
    return name_dim(value.type.tensor_type.shape.dim[axis].dim_param) or f"{value.name}:{axis}"


def _real_inputs(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    initializers = {tensor.name for tensor in graph.initializer}
    return (value for value in graph.input if value.name not in initializers)


def _is_known(dim: onnx.TensorShapeProto.Dimension) -> bool:
    return dim.HasField("dim_value") and dim.dim_value >= 0


def _drop_shared_names(graph: onnx.GraphProto, dims: Mapping[str, int]) -> None:
    """Removes each name of a dimension that `INPUT:AXIS` gives several numbers, in place."""
    given: dict[str, set[int]] = {}
    for value in _real_inputs(graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if (key := f"{value.name}:{axis}") in dims:
                given.setdefault(dim.dim_param, set()).add(dims[key])
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and len(given.get(dim.dim_param, ())) > 1:
                dim.ClearField("dim_param")


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
        name = (name_dim(dim.dim_param) if dim is not None else None) or key
        if sizes.setdefault(name, size) != size:
            raise UsageError(
                f"'{name}' is given both {sizes[name]} and {size}", hint="give it one number, or each axis its own"
            )
    return sizes


def _derive_formulas(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers that follow from given ones: formulas from their names, and a name from a formula."""
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


def infer_outputs(proto: onnx.ModelProto) -> None:
    """Gives the graph's outputs the shapes that follow from the inputs', in place; others keep what was declared.

    A declared shape may be wrong: an exporter may call the sides of an enlarged image `height` and `width`, as the
    input's, and ONNX Runtime only warns.
    """
    outputs = [value.type.tensor_type for value in proto.graph.output if value.type.HasField("tensor_type")]
    declared = [onnx.TypeProto.Tensor.FromString(each.SerializeToString()) for each in outputs]
    for output in outputs:
        output.ClearField("shape")
    inferred = [
        value.type.tensor_type for value in infer_model(proto).graph.output if value.type.HasField("tensor_type")
    ]
    for output, stated, found in zip(outputs, declared, inferred, strict=True):
        output.CopyFrom(stated)
        if found.HasField("shape"):
            output.shape.CopyFrom(found.shape)
            for dim, known in zip(output.shape.dim, stated.shape.dim, strict=False):
                if not _is_known(dim):
                    dim.CopyFrom(known)


_UNSET_DIM = 1


def size_inputs(
    inputs: Sequence[TensorSpec], dims: Mapping[str, int], *, may_stay_open: bool = False
) -> tuple[TensorSpec, ...]:
    """Returns inputs with a number for each dimension: that of `dims`, what follows from it, or 1.

    With `may_stay_open`, dimensions without a number stay as they are.

    Raises:
        UsageError: a name or a size in `dims` is wrong.
    """
    graph = _make_graph(inputs)
    unset = set[str]() if may_stay_open else find_unset(inputs, dims)
    fix_dims(graph, {**dict.fromkeys(unset, _UNSET_DIM), **dims}, may_stay_open=may_stay_open)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.input}

    def fill(spec: TensorSpec) -> tuple[int | str | None, ...] | None:
        sizes = shapes.get(spec.name)
        if sizes is None or spec.shape is None:
            return spec.shape
        return tuple(
            known if isinstance(known, int) else size or known for size, known in zip(sizes, spec.shape, strict=True)
        )

    return tuple(msgspec.structs.replace(spec, shape=fill(spec)) for spec in inputs)


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
