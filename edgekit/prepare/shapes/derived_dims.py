"""Dimensions whose name is a formula of others, such as `2*batch`, `past + length` or `floor(height/2)`."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

from edgekit.model.tensors import HEADERS


def _floor(value: Fraction) -> Fraction:
    return Fraction(math.floor(value))


def _ceil(value: Fraction) -> Fraction:
    return Fraction(math.ceil(value))


def _ceil_div(left: Fraction, right: Fraction) -> Fraction:
    return _ceil(left / right)


def _floor_div(left: Fraction, right: Fraction) -> Fraction:
    return _floor(left / right)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    # A formula is a stranger's: without bounds, s0**999999999 would be computed, and powers of powers.
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT or abs(base) > _MAX_BASE:
        raise ValueError(f"{base} to the power of {exponent}")
    return base**exponent.numerator


_MAX_EXPONENT, _MAX_BASE = 8, 2**31
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: _floor_div,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
# What sympy and torch.utils._sympy write, in upper or lower case: exporters print their formulas.
_FUNCTIONS: dict[str, Callable[..., Fraction]] = {
    "ceil": _ceil,
    "ceildiv": _ceil_div,
    "ceiling": _ceil,
    "ceiltoint": _ceil,
    "cleandiv": operator.truediv,
    "floor": _floor,
    "floordiv": _floor_div,
    "floortoint": _floor,
    "inttruediv": operator.truediv,
    "max": max,
    "min": min,
    "mod": operator.mod,
    "pow": _power,
    "powbynatural": _power,
    "pythonmod": operator.mod,
    # Towards zero, which is down: sizes are not negative.
    "trunctoint": _floor,
}
_MAX_LENGTH = 200


def derive_dim(formula: str, sizes: Mapping[str, int]) -> int | None:
    """Returns what a formula comes to, or None if it is none, has names without a number, or is no whole number."""
    tree = _parse(formula)
    if tree is None:
        return None
    try:
        value = _evaluate(tree, {name: Fraction(size) for name, size in sizes.items()})
    except (ValueError, KeyError, ZeroDivisionError, TypeError):
        return None
    return value.numerator if value.denominator == 1 else None


def solve_dim(formula: str, value: int, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """Returns the one name of a formula that has no number, with the number that makes the formula come to `value`.

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
            return _OPERATORS[type(sign)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]):
            return _FUNCTIONS[name.lower()](*(_evaluate(argument, sizes) for argument in arguments))
        case _:
            raise ValueError(ast.dump(tree))
