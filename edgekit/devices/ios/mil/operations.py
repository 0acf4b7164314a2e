"""Operations of an ML Program: elementwise operations, reductions, and those that only move elements.

Formulas follow coremltools' mil/ops/defs, which document MIL. Parameters are passed by name, with the defaults
documented there.
"""

import math
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from edgekit.model.tensors import Array


class Arguments(msgspec.Struct, frozen=True):
    """The parameters of one operation; half-precision tensors were converted to float32 for computing."""

    values: Mapping[str, tuple[Array | str, ...]]

    def tensor(self, name: str) -> Array:
        """Returns a tensor.

        Raises:
            ValueError: there is no tensor of that name.
        """
        found = self.values.get(name, ())
        if len(found) != 1 or isinstance(found[0], str):
            raise ValueError(f"its parameter {name} is missing")
        return found[0]

    def tensors(self, name: str) -> tuple[Array, ...]:
        """Returns a list of tensors."""
        return tuple(value for value in self.values.get(name, ()) if not isinstance(value, str))

    def find(self, name: str) -> Array | None:
        """Returns a tensor that may be absent."""
        return self.tensor(name) if name in self.values else None

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a scalar.

        Raises:
            ValueError: it is missing, and MIL has no default for it.
        """
        if default is not None and name not in self.values:
            return default
        return float(self.tensor(name).reshape(-1)[0])

    def whole(self, name: str, default: int) -> int:
        """Returns an integer scalar."""
        return int(self.number(name, default))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns a boolean scalar."""
        return bool(self.number(name, default))

    def wholes(self, name: str) -> tuple[int, ...] | None:
        """Returns a list of integers, None if it is absent."""
        found = self.find(name)
        return None if found is None else tuple(int(value) for value in found.reshape(-1))

    def text(self, name: str, default: str) -> str:
        """Returns a string."""
        (found,) = self.values.get(name, (default,))
        return found if isinstance(found, str) else default


Compute = Callable[[Arguments], Array]

_erf = np.vectorize(math.erf, otypes=[np.float64])
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def _apply(formula: Callable[..., Array], *names: str) -> Compute:
    """Returns the operation that applies a formula to the named tensors."""
    return lambda given: formula(*map(given.tensor, names))


def erf(x: Array) -> Array:
    """Returns the error function of each element."""
    return np.asarray(_erf(x.astype(np.float64)), x.dtype)


def sigmoid(x: Array) -> Array:
    """Returns the logistic function of each element, without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _divide(x: Array, y: Array) -> Array:
    # Integer division rounds towards zero.
    return np.trunc(x / y) if np.issubdtype(x.dtype, np.integer) else x / y


def _gelu(given: Arguments) -> Array:
    x = given.tensor("x")
    if (mode := given.text("mode", "EXACT")) == "TANH_APPROXIMATION":
        return np.asarray(0.5 * x * (1 + np.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * x**3))))
    if mode == "SIGMOID_APPROXIMATION":
        return np.asarray(x * sigmoid(1.702 * x))
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def _prelu(given: Arguments) -> Array:
    x = given.tensor("x")
    alpha = given.tensor("alpha")
    return np.where(x >= 0, x, x * (_per_channel(alpha, x) if alpha.ndim == 1 and x.ndim > 2 else alpha))


def _with_alpha(formula: Callable[[Array, np.float32], Array]) -> Compute:
    return lambda given: formula(given.tensor("x"), np.float32(given.number("alpha")))


_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "ceil": np.ceil, "cos": np.cos, "erf": erf, "exp": np.exp, "identity": np.array, "logical_not": np.logical_not,
    "relu": lambda x: np.maximum(x, 0), "relu6": lambda x: np.clip(x, 0, 6), "round": np.rint, "sigmoid": sigmoid,
    "sin": np.sin, "softplus": lambda x: np.logaddexp(x, 0), "sqrt": np.sqrt, "tanh": np.tanh,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "equal": np.equal, "floor_div": np.floor_divide, "logical_and": np.logical_and,
    "maximum": np.maximum, "mod": np.mod, "mul": np.multiply, "pow": np.power, "real_div": _divide, "sub": np.subtract,
}  # fmt: skip
ELEMENTWISE: Mapping[str, Compute] = {
    **{name: _apply(formula, "x") for name, formula in _UNARY.items()},
    **{name: _apply(formula, "x", "y") for name, formula in _BINARY.items()},
    "clip": lambda given: np.clip(
        given.tensor("x"), given.number("alpha", -np.inf), given.number("beta", np.inf)
    ).astype(given.tensor("x").dtype),
    "elu": _with_alpha(lambda x, alpha: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0)))),
    "gelu": _gelu,
    "inverse": lambda given: 1 / (given.tensor("x") + np.float32(given.number("epsilon", 1e-4))),
    "leaky_relu": _with_alpha(lambda x, alpha: np.where(x >= 0, x, x * alpha)),
    "prelu": _prelu,
    "select": lambda given: np.where(given.tensor("cond").astype(np.bool_), given.tensor("a"), given.tensor("b")),
    "sigmoid_hard": lambda given: np.clip(
        np.float32(given.number("alpha")) * given.tensor("x") + np.float32(given.number("beta")), 0, 1
    ),
}
"""Operations by their names in MIL."""


_NAMES = {"bool": np.bool_, "fp16": np.float16, "fp32": np.float32, "int8": np.int8, "int16": np.int16,
          "int32": np.int32, "int64": np.int64, "uint8": np.uint8, "uint16": np.uint16}  # fmt: skip


def _reshape(given: Arguments) -> Array:
    x, shape = given.tensor("x"), list(given.wholes("shape") or ())
    # A size of 0 copies the input's size on the same axis; for an output of another rank, MIL versions differ in its
    # meaning.
    if 0 in shape and len(shape) != x.ndim:
        raise ValueError(f"its shape {shape} leaves sizes to an input of rank {x.ndim}")
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])


def _concatenate(given: Arguments) -> Array:
    if given.flag("interleave"):
        raise ValueError("it interleaves its parts")
    return np.concatenate(given.tensors("values"), given.whole("axis", 0))


def _split(given: Arguments) -> tuple[Array, ...]:
    x, axis = given.tensor("x"), given.whole("axis", 0)
    if (sizes := given.wholes("split_sizes")) is None:
        return tuple(np.split(x, given.whole("num_splits", 1), axis))
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


def _slice_by_index(given: Arguments) -> Array:
    x = given.tensor("x")
    rank = x.ndim
    begin, end = given.wholes("begin") or (), given.wholes("end") or ()
    stride = given.wholes("stride") or (1,) * rank
    masks = {name: given.wholes(f"{name}_mask") or (0,) * rank for name in ("begin", "end", "squeeze")}
    cuts: list[int | slice] = []
    for axis in range(rank):
        if masks["squeeze"][axis]:
            cuts.append(begin[axis])
            continue
        first = None if masks["begin"][axis] else begin[axis]
        last = None if masks["end"][axis] else end[axis]
        cuts.append(slice(first, last, stride[axis]))
    return x[tuple(cuts)]


def _slice_by_size(given: Arguments) -> Array:
    x, begin, size = given.tensor("x"), given.wholes("begin") or (), given.wholes("size") or ()
    return x[tuple(slice(at, None if count == -1 else at + count) for at, count in zip(begin, size, strict=True))]


def _pad(given: Arguments) -> Array:
    x, flat = given.tensor("x"), given.wholes("pad") or ()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if (mode := given.text("mode", "constant")) == "constant":
        return np.pad(x, pairs, constant_values=given.number("constant_val", 0.0))
    return np.pad(x, pairs, mode="reflect" if mode == "reflect" else "edge")


def _gather(given: Arguments) -> Array:
    x, axis = given.tensor("x"), given.whole("axis", 0)
    if given.whole("batch_dims", 0):
        raise ValueError("it gathers in batches")
    indices = given.tensor("indices").astype(np.int64)
    return np.take(x, np.where(indices < 0, indices + x.shape[axis], indices), axis)


def _gather_points(given: Arguments) -> Array:
    """Computes `gather_nd`: the last axis of `indices` holds coordinates in the first axes of `x`."""
    if given.whole("batch_dims", 0):
        raise ValueError("it gathers in batches")
    places = np.moveaxis(given.tensor("indices").astype(np.int64), -1, 0)
    return np.asarray(given.tensor("x")[tuple(places)])


def _cast(given: Arguments) -> Array:
    if (name := given.text("dtype", "fp32")) not in _NAMES:
        raise ValueError(f"it casts to {name!r}")
    # numpy rounds towards zero here, as C does.
    return given.tensor("x").astype(_NAMES[name])


def _depth_to_space(given: Arguments) -> Array:
    x, block = given.tensor("x"), given.whole("block_size", 1)
    batch, channels, height, width = x.shape
    split = x.reshape(batch, block, block, channels // block**2, height, width)
    return split.transpose(0, 3, 4, 1, 5, 2).reshape(batch, channels // block**2, height * block, width * block)


LAYOUT: Mapping[str, Callable[[Arguments], Array | tuple[Array, ...]]] = {
    "cast": _cast,
    "concat": _concatenate,
    "depth_to_space": _depth_to_space,
    "expand_dims": lambda given: np.expand_dims(given.tensor("x"), given.wholes("axes") or ()),
    "gather": _gather,
    "gather_nd": _gather_points,
    "pad": _pad,
    "reshape": _reshape,
    "shape": lambda given: np.array(given.tensor("x").shape, np.int32),
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "split": _split,
    "squeeze": lambda given: np.squeeze(given.tensor("x"), given.wholes("axes")),
    "tile": lambda given: np.tile(given.tensor("x"), given.wholes("reps") or ()),
    "transpose": lambda given: np.transpose(given.tensor("x"), given.wholes("perm")),
}
"""Operations by their names in MIL."""


def _reduce(formula: Callable[..., Array]) -> Compute:
    return lambda given: np.asarray(
        formula(given.tensor("x"), axis=given.wholes("axes"), keepdims=given.flag("keep_dims"))
    )


def _multiply(given: Arguments) -> Array:
    x, y = given.tensor("x"), given.tensor("y")
    x = np.swapaxes(x, -1, -2) if given.flag("transpose_x") else x
    return np.asarray(x @ (np.swapaxes(y, -1, -2) if given.flag("transpose_y") else y))


def _linear(given: Arguments) -> Array:
    out, bias = given.tensor("x") @ given.tensor("weight").T, given.find("bias")
    return np.asarray(out if bias is None else out + bias)


def _softmax(given: Arguments) -> Array:
    x, axis = given.tensor("x"), given.whole("axis", -1)
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return np.asarray(powers / np.sum(powers, axis=axis, keepdims=True))


def _per_channel(value: Array, x: Array) -> Array:
    return value.reshape(-1, *[1] * (x.ndim - 2))


def _scale_and_shift(normal: Array, given: Arguments, fit: Callable[[Array, Array], Array]) -> Array:
    gamma, beta = given.find("gamma"), given.find("beta")
    out = normal if gamma is None else normal * fit(gamma, normal)
    return out if beta is None else out + fit(beta, normal)


def _normalize_batch(given: Arguments) -> Array:
    x = given.tensor("x")
    mean, variance = _per_channel(given.tensor("mean"), x), _per_channel(given.tensor("variance"), x)
    normal = (x - mean) / np.sqrt(variance + np.float32(given.number("epsilon", 1e-5)))
    return _scale_and_shift(normal, given, _per_channel)


def _center(given: Arguments, axes: tuple[int, ...]) -> Array:
    shifted = given.tensor("x") - np.mean(given.tensor("x"), axis=axes, keepdims=True)
    epsilon = np.float32(given.number("epsilon", 1e-5))
    return np.asarray(shifted / np.sqrt(np.mean(shifted**2, axis=axes, keepdims=True) + epsilon))


def _normalize_instance(given: Arguments) -> Array:
    return _scale_and_shift(_center(given, tuple(range(2, given.tensor("x").ndim))), given, _per_channel)


def _normalize_layer(given: Arguments) -> Array:
    x = given.tensor("x")
    axes = given.wholes("axes") or tuple(range(x.ndim))
    places = {axis % x.ndim for axis in axes}
    shape = [size if axis in places else 1 for axis, size in enumerate(x.shape)]
    return _scale_and_shift(_center(given, axes), given, lambda value, _: value.reshape(shape))


REDUCTIONS: Mapping[str, Compute] = {
    "batch_norm": _normalize_batch, "instance_norm": _normalize_instance, "layer_norm": _normalize_layer,
    "linear": _linear, "matmul": _multiply, "reduce_max": _reduce(np.max), "reduce_mean": _reduce(np.mean),
    "reduce_min": _reduce(np.min), "reduce_prod": _reduce(np.prod), "reduce_sum": _reduce(np.sum), "softmax": _softmax,
    "reduce_argmax": lambda given: np.argmax(
        given.tensor("x"), axis=given.whole("axis", -1), keepdims=given.flag("keep_dims")
    ),
}  # fmt: skip
"""Operations by their names in MIL."""
