"""Pattern matching on a graph: which operator computes a value, and from which operands and constants.

`count_huge_terms` tells whether values stay finite: attention masks contain the lowest float32, or minus infinity.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import chain, permutations
from typing import ParamSpec, TypeVar

import numpy as np

from edgekit.graph.constants import ORT_DOMAIN, read_array
from edgekit.graph.graph import Graph, Node

_T = TypeVar("_T")
_H = TypeVar("_H", bound=Hashable)
_P = ParamSpec("_P")


class MisfitError(Exception):
    """Raised where a part of a graph is not what a pattern wants."""


def need(condition: object) -> None:
    """Ends a match unless this is true.

    Raises:
        MisfitError: it is not.
    """
    if not condition:
        raise MisfitError


def known(value: _T | None) -> _T:
    """Returns a value that is known.

    Raises:
        MisfitError: it is None.
    """
    if value is None:
        raise MisfitError
    return value


def single(values: Sequence[_T]) -> _T:
    """Returns the one value of a list.

    Raises:
        MisfitError: there are none, or several.
    """
    need(len(values) == 1)
    return values[0]


def attempt(find: Callable[_P, _T], *given: _P.args, **options: _P.kwargs) -> _T | None:
    """Returns what a function finds, None if it raises MisfitError."""
    with contextlib.suppress(MisfitError):
        return find(*given, **options)
    return None


def walk(starts: Iterable[_H], step: Callable[[_H], Iterable[_H]]) -> Iterator[_H]:
    """Yields what is reached from `starts`, these included, each once; `step` returns what is next to one of them."""
    seen, waiting = set[_H](), list(starts)
    while waiting:
        if (at := waiting.pop()) not in seen:
            seen.add(at)
            yield at
            waiting += step(at)


# Two numbers of this size may add up to infinity in float32 (3.4e38); scores and biases are far below it. In float16 a
# quarter of the largest number is the limit.
_HUGE = 1e30
# Operators that return elements of their first input, perhaps with another sign.
_MOVING = frozenset({
    "Abs", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Neg", "Reshape", "Slice",
    "Squeeze", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
_JOINING = frozenset({"Concat", "DequantizeLinear", "Pad", "QuantizeLinear", "Split"})
# Sums of products of finite numbers, and operators with a bounded result.
_FINITE = frozenset({
    "Conv", "Einsum", "Gemm", "LayerNormalization", "MatMul", "Sigmoid", "SimplifiedLayerNormalization", "Softmax",
    "Tanh",
})  # fmt: skip


def list_moved(graph: Graph) -> set[str]:
    """Returns the outputs of the graph that hold only elements of its inputs and constants.

    Q nodes may have rounded them, and the sign may be another (Abs, Neg). A compiler may cancel a QuantizeLinear and
    the DequantizeLinear behind what only moves elements: QNN's HTP gives such an output in float, to the bit.
    """
    moved = {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        keeps = node.domain in {"", ORT_DOMAIN} and node.op_type in _MOVING | _JOINING
        moved.update(node.output if keeps and moved.issuperset(filter(None, node.input)) else ())
    return moved & graph.outputs


# Operators that combine a constant with values, such as minus infinity that no maximum picks, and operators that pass
# it on.
_CONSTANT_BESIDE = frozenset({"Concat", "ConstantOfShape", "Expand", "Pad", "Where"})
_PASSING = _CONSTANT_BESIDE | frozenset({
    "Add", "Cast", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "MaxPool", "ReduceMax", "Reshape",
    "ScatterElements", "ScatterND", "Slice", "Split", "Squeeze", "Sub", "Tile", "TopK", "Transpose", "Unsqueeze",
})  # fmt: skip


def find_infinite_tensors(graph: Graph) -> frozenset[str]:
    """Returns the float tensors that may hold infinity for every sample, because it comes from a constant.

    An example is the output of a Where that hides positions from an ArgMax. They have no range, so they stay float.
    """
    found: set[str] = set()
    for node in graph.nodes:
        is_infinite = node.op_type in _PASSING and not found.isdisjoint(node.input)
        if not is_infinite and node.op_type in _CONSTANT_BESIDE:
            tensors = [graph.constants[name] for name in node.input if graph.is_float_constant(name)]
            tensors += [attribute.t for attribute in node.proto.attribute if attribute.name == "value"]
            values = [read_array(tensor, graph.folder) for tensor in tensors]
            is_infinite = any(
                value.dtype.kind == "f" and np.isinf(value).any() and not np.isnan(value).any() for value in values
            )
        if is_infinite:
            found.update(name for name in node.output if graph.is_float(name))
    return frozenset(found)


def list_lent_constants(graph: Graph, node: Node) -> tuple[str, ...]:
    """Returns the constants of the graph that only bodies read, those of this node among them."""
    read = [(name, graph.consumers.get(name, ())) for name in dict.fromkeys(node.captured) if name in graph.constants]
    return tuple(name for name, readers in read if all(name not in reader.input for reader in readers))


def count_huge_terms(graph: Graph, name: str) -> int | None:
    """Returns how many huge numbers add up in an element of a value, at most; None where it may be infinite or NaN.

    One is harmless: -3.4e38 plus a score of usual size is finite. Two are not: -3.4e38 - 3.4e38 is minus infinity. A
    float input of the graph may have any value.
    """
    known: dict[str, int | None] = {}
    waiting = [name]
    while waiting:
        at = waiting[-1]
        open_ = [each for each in _list_sources(graph, at) if each not in known]
        if open_:
            waiting += open_
        else:
            waiting.pop()
            known[at] = _count(graph, at, known)
    return known[name]


def _list_sources(graph: Graph, name: str) -> tuple[str, ...]:
    """Returns the inputs that the count of a value depends on."""
    node = graph.producers.get(name)
    if name in graph.constants or node is None or node.domain or _reads_integers(graph, node):
        return ()
    if node.op_type in _MOVING or node.op_type == "Cast":
        return node.input[:1]
    if node.op_type == "Where":
        return node.input[1:]
    return node.input if node.op_type in {"Add", "Concat", "Mul", "Sub"} else ()


def _count(graph: Graph, name: str, known: dict[str, int | None]) -> int | None:
    """Returns the count of a value from the counts of its sources."""
    node = graph.producers.get(name)
    if name in graph.constants or node is None or node.domain:
        array = graph.inline(name)
        if array is None or array.dtype.kind != "f" or not np.isfinite(array).all():
            return None
        return int(bool(np.any(np.abs(array) > min(_HUGE, float(np.finfo(array.dtype).max) / 4))))
    if _reads_integers(graph, node) or node.op_type in _FINITE:
        return 0
    counts = [known[each] for each in _list_sources(graph, name)]
    numbers = [count for count in counts if count is not None]
    if not counts or len(numbers) < len(counts):
        return None
    if node.op_type == "Mul":
        # A huge number times 10 is infinite.
        return None if any(numbers) else 0
    return sum(numbers) if node.op_type in {"Add", "Sub"} else max(numbers)


def _reads_integers(graph: Graph, node: Node) -> bool:
    dtype = graph.value(node.input[0]).dtype or ""
    return node.op_type == "Cast" and dtype.startswith(("bool", "int", "uint"))


# The most nested products and fractions that the functions below look into.
_DEEPEST = 4


def is_near(number: float | None, wanted: float) -> bool:
    """Returns True if two numbers differ by at most 1e-4 of the larger one: exporters round roots and fractions.

    So does a number that is rounded to float16.
    """
    return number is not None and (math.isclose(number, wanted, rel_tol=1e-4) or number == float(np.float16(wanted)))


def made_by(graph: Graph, name: str, *ops: str) -> Node | None:
    """Returns the node that computes a value if it is one of these operators of ONNX's own domain, else None."""
    node = graph.producers.get(name)
    return node if node is not None and not node.domain and node.op_type in ops else None


def other_operand(graph: Graph, node: Node | None, wanted: float) -> str | None:
    """Returns the other operand of a node with two operands, of which one is the constant `wanted`, else None."""
    if node is None or len(node.input) != 2:
        return None
    one, other = node.input
    return next((name for name, number in ((one, other), (other, one)) if is_near(graph.number(number), wanted)), None)


def scaled_by(graph: Graph, node: Node | None, factor: float) -> str | None:
    """Returns x where a node is x * factor, in either order, or x / (1 / factor)."""
    if node is None or node.domain or node.op_type not in {"Mul", "Div"}:
        return None
    if node.op_type == "Mul":
        return other_operand(graph, node, factor)
    return node.input[0] if is_near(graph.number(node.input[1]), 1 / factor) else None


def factors(graph: Graph, name: str, stop: str = "", depth: int = _DEEPEST) -> tuple[float, tuple[str, ...]]:
    """Splits a value into a number and other factors, through Mul and Div by a number: (2, (x, y)) for (x * 2) * y.

    The value `stop` is a factor even if it is a product itself. The Transpose of a product with a number is one with
    the Transpose, where the graph has that.
    """
    if (number := graph.number(name)) is not None:
        return number, ()
    if depth and name != stop and (turned := made_by(graph, name, "Transpose")) is not None:
        number, values = factors(graph, turned.input[0], depth=depth - 1)
        same = [
            each.output[0] for each in graph.readers(values[0]) if len(values) == 1 and number != 1
            if each.op_type == "Transpose" and each.attributes == turned.attributes
        ]  # fmt: skip
        return (number, (same[0],)) if same else (1.0, (name,))
    node = made_by(graph, name, "Mul", "Div") if name != stop and depth else None
    if node is None:
        return 1.0, (name,)
    first, second = (factors(graph, each, stop, depth - 1) for each in node.input)
    if node.op_type == "Mul":
        return first[0] * second[0], first[1] + second[1]
    # A Div by anything but a number is a factor itself.
    return (first[0] / second[0], first[1]) if not second[1] and second[0] else (1.0, (name,))


def walk_product(graph: Graph, name: str, depth: int = _DEEPEST) -> Iterator[str]:
    """Yields the operands of a Mul or Div that computes a value, and, depth first, of those that compute these."""
    node = made_by(graph, name, "Mul", "Div") if depth else None
    for each in node.input if node is not None else ():
        yield each
        yield from walk_product(graph, each, depth - 1)


def square_of(graph: Graph, name: str) -> str | None:
    """Returns x where a value is x * x or Pow(x, 2)."""
    if (node := made_by(graph, name, "Mul", "Pow")) is None:
        return None
    if node.op_type == "Mul":
        return node.input[0] if node.input[0] == node.input[1] else None
    return node.input[0] if graph.number(node.input[1]) == 2 else None


def mean_of(graph: Graph, name: str) -> tuple[str, int]:
    """Returns x and an axis where a value is the mean of x along this axis, in any shape.

    JAX writes a mean as a sum times the reciprocal of the number of values.

    Raises:
        MisfitError: it is another value.
    """
    total, share = made_by(graph, unshape(graph, name), "ReduceMean"), None
    if total is None:
        share, values = factors(graph, unshape(graph, name))
        total = known(made_by(graph, unshape(graph, single(values)), "ReduceSum"))
    shape, axis = known(graph.value(total.input[0]).shape), known(reduced_axis(graph, total))
    need(-len(shape) <= axis < len(shape) and (share is None or is_near(share * (shape[axis] or 0), 1)))
    return total.input[0], axis % len(shape)


def unshape(graph: Graph, name: str) -> str:
    """Returns the value before any Identity, Reshape, Squeeze and Unsqueeze: the same elements in the same order."""
    while (node := made_by(graph, name, "Identity", "Reshape", "Squeeze", "Unsqueeze")) is not None:
        name = node.input[0]
    return name


def keeps_axis(graph: Graph, name: str, data: str, axis: int) -> bool:
    """Returns True if a value has the shape of `data` with size 1 at one axis, as a reduction with keepdims gives."""
    shape = graph.value(data).shape
    return shape is not None and graph.value(name).shape == (*shape[:axis], 1, *shape[axis + 1 :])


def reduced_axes(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """Returns the axes that an operator names, perhaps negative; None if they are computed or absent."""
    given = graph.array(node.input[1]) if node.has_input(1) else None
    return node.entries("axes") if given is None else tuple(int(axis) for axis in given.reshape(-1))


def reduced_axis(graph: Graph, node: Node) -> int | None:
    """Returns the one axis of a Reduce operator, perhaps negative; None for several axes or computed ones."""
    axes = reduced_axes(graph, node)
    return axes[0] if axes is not None and len(axes) == 1 else None


def split_number(graph: Graph, node: Node) -> tuple[str, float]:
    """Returns the operand of a node with two operands whose other one is a constant number, and this number.

    Raises:
        MisfitError: neither is one.
    """
    pairs = ((one, graph.number(other)) for one, other in permutations(node.input))
    return known(next(((one, number) for one, number in pairs if number is not None), None))


def fraction_of(
    graph: Graph, name: str, stop: Collection[str] = (), depth: int = _DEEPEST
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the factors of a value's numerator and denominator, through Mul, Div and Reciprocal.

    For example ((a, b), (c,)) for a * b / c. A value of `stop` is a factor even if it is a product itself.
    """
    node = made_by(graph, name, "Mul", "Div", "Reciprocal") if name not in stop and depth else None
    if node is None:
        return (() if graph.number(name) == 1 else (name,)), ()
    parts = [fraction_of(graph, each, stop, depth - 1) for each in node.input]
    if node.op_type != "Mul":
        parts[-1] = parts[-1][::-1]
    above, below = zip(*parts, strict=True)
    return tuple(chain.from_iterable(above)), tuple(chain.from_iterable(below))
