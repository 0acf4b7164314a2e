"""Dimensions whose name is a formula of others, such as `2*batch` or `past + length`."""

import ast
import operator
from collections.abc import Callable, Mapping

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_MAX_LENGTH = 200


def derive_dim(formula: str, sizes: Mapping[str, int]) -> int | None:
    """Returns what a formula comes to, or None if it is none, or one with names that have no number."""
    if len(formula) > _MAX_LENGTH:
        return None
    try:
        tree = ast.parse(formula.strip(), mode="eval").body
        return _evaluate(tree, sizes) if isinstance(tree, ast.BinOp) else None
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return None


def _evaluate(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(tree, ast.Name):
        return sizes[tree.id]
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return tree.value
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return _OPERATORS[type(tree.op)](_evaluate(tree.left, sizes), _evaluate(tree.right, sizes))
    raise ValueError(ast.dump(tree))
