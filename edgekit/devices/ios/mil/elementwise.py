"""Operations that work element by element. Formulas are those of coremltools' mil/ops/defs, which MIL documents."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from edgekit.devices.ios.mil.arguments import Arguments
from edgekit.model.tensors import Array

Compute = Callable[[Arguments], Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def unary(formula: Callable[[Array], Array]) -> Compute:
    """Returns the operation that applies a formula to `x`."""
    return lambda given: formula(given.tensor("x"))


def binary(formula: Callable[[Array, Array], Array]) -> Compute:
    """Returns the operation that applies a formula to `x` and `y`."""
    return lambda given: formula(given.tensor("x"), given.tensor("y"))


def erf(x: Array) -> Array:
    """Returns the error function of each element."""
    return np.asarray(_erf(x.astype(np.float64)), x.dtype)


def sigmoid(x: Array) -> Array:
    """Returns the logistic function of each element, without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _divide(x: Array, y: Array) -> Array:
    # Whole numbers are divided towards zero.
    return np.trunc(x / y) if np.issubdtype(x.dtype, np.integer) else x / y


def _gelu(given: Arguments) -> Array:
    x = given.tensor("x")
    mode = given.text("mode", "EXACT")
    if mode == "TANH_APPROXIMATION":
        return np.asarray(0.5 * x * (1 + np.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x**3))))
    if mode == "SIGMOID_APPROXIMATION":
        return np.asarray(x * sigmoid(1.702 * x))
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def _along_channels(alpha: Array, x: Array) -> Array:
    return alpha.reshape(-1, *[1] * (x.ndim - 2)) if alpha.ndim == 1 and x.ndim > 2 else alpha


def _prelu(given: Arguments) -> Array:
    x = given.tensor("x")
    return np.where(x >= 0, x, x * _along_channels(given.tensor("alpha"), x))


def _leaky_relu(given: Arguments) -> Array:
    x = given.tensor("x")
    return np.where(x >= 0, x, x * np.float32(given.number("alpha")))


def _elu(given: Arguments) -> Array:
    x = given.tensor("x")
    return np.where(x >= 0, x, np.float32(given.number("alpha")) * np.expm1(np.minimum(x, 0)))


def _sigmoid_hard(given: Arguments) -> Array:
    x = given.tensor("x")
    line = np.float32(given.number("alpha")) * x + np.float32(given.number("beta"))
    return np.asarray(np.clip(line, 0, 1))


def _clip(given: Arguments) -> Array:
    x = given.tensor("x")
    return np.clip(x, given.number("alpha", -np.inf), given.number("beta", np.inf)).astype(x.dtype)


def _with_epsilon(formula: Callable[[Array], Array], default: float) -> Compute:
    return lambda given: formula(given.tensor("x") + np.float32(given.number("epsilon", default)))


def _select(given: Arguments) -> Array:
    return np.where(given.tensor("cond").astype(np.bool_), given.tensor("a"), given.tensor("b"))


ELEMENTWISE: Mapping[str, Compute] = {
    "abs": unary(np.abs),
    "add": binary(np.add),
    "ceil": unary(np.ceil),
    "clip": _clip,
    "cos": unary(np.cos),
    "elu": _elu,
    "equal": binary(np.equal),
    "erf": unary(erf),
    "exp": unary(np.exp),
    "floor": unary(np.floor),
    "floor_div": binary(np.floor_divide),
    "gelu": _gelu,
    "greater": binary(np.greater),
    "greater_equal": binary(np.greater_equal),
    "identity": unary(np.array),
    "inverse": _with_epsilon(np.reciprocal, 1e-4),
    "leaky_relu": _leaky_relu,
    "less": binary(np.less),
    "less_equal": binary(np.less_equal),
    "log": _with_epsilon(np.log, 1e-45),
    "logical_and": binary(np.logical_and),
    "logical_not": unary(np.logical_not),
    "logical_or": binary(np.logical_or),
    "maximum": binary(np.maximum),
    "minimum": binary(np.minimum),
    "mod": binary(np.mod),
    "mul": binary(np.multiply),
    "not_equal": binary(np.not_equal),
    "pow": binary(np.power),
    "prelu": _prelu,
    "real_div": binary(_divide),
    "relu": unary(lambda x: np.maximum(x, 0)),
    "relu6": unary(lambda x: np.clip(x, 0, 6)),
    "round": unary(np.rint),
    "rsqrt": _with_epsilon(lambda x: 1 / np.sqrt(x), 1e-12),
    "select": _select,
    "sigmoid": unary(sigmoid),
    "sigmoid_hard": _sigmoid_hard,
    "sign": unary(np.sign),
    "silu": unary(lambda x: x * sigmoid(x)),
    "sin": unary(np.sin),
    "softplus": unary(lambda x: np.logaddexp(x, 0)),
    "softsign": unary(lambda x: x / (1 + np.abs(x))),
    "sqrt": unary(np.sqrt),
    "square": unary(np.square),
    "sub": binary(np.subtract),
    "tan": unary(np.tan),
    "tanh": unary(np.tanh),
}
"""Operations by their names in MIL."""
