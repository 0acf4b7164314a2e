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
    mode = given.text("mode", "EXACT")
    if mode == "TANH_APPROXIMATION":
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


def _with_epsilon(formula: Callable[[Array], Array], default: float) -> Compute:
    return lambda given: formula(given.tensor("x") + np.float32(given.number("epsilon", default)))


_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "abs": np.abs, "ceil": np.ceil, "cos": np.cos, "erf": erf, "exp": np.exp, "floor": np.floor, "identity": np.array,
    "logical_not": np.logical_not, "relu": lambda x: np.maximum(x, 0), "relu6": lambda x: np.clip(x, 0, 6),
    "round": np.rint, "sigmoid": sigmoid, "sign": np.sign, "silu": lambda x: x * sigmoid(x), "sin": np.sin,
    "softplus": lambda x: np.logaddexp(x, 0), "softsign": lambda x: x / (1 + np.abs(x)), "sqrt": np.sqrt,
    "square": np.square, "tan": np.tan, "tanh": np.tanh,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "equal": np.equal, "floor_div": np.floor_divide, "greater": np.greater,
    "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "maximum": np.maximum, "minimum": np.minimum, "mod": np.mod, "mul": np.multiply,
    "not_equal": np.not_equal, "pow": np.power, "real_div": _divide, "sub": np.subtract,
}  # fmt: skip
ELEMENTWISE: Mapping[str, Compute] = {
    **{name: _apply(formula, "x") for name, formula in _UNARY.items()},
    **{name: _apply(formula, "x", "y") for name, formula in _BINARY.items()},
    "clip": lambda given: np.clip(
        given.tensor("x"), given.number("alpha", -np.inf), given.number("beta", np.inf)
    ).astype(given.tensor("x").dtype),
    "elu": _with_alpha(lambda x, alpha: np.where(x >= 0, x, alpha * np.expm1(np.minimum(x, 0)))),
    "gelu": _gelu,
    "inverse": _with_epsilon(np.reciprocal, 1e-4),
    "leaky_relu": _with_alpha(lambda x, alpha: np.where(x >= 0, x, x * alpha)),
    "log": _with_epsilon(np.log, 1e-45),
    "prelu": _prelu,
    "rsqrt": _with_epsilon(lambda x: 1 / np.sqrt(x), 1e-12),
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
    parts, axis = given.tensors("values"), given.whole("axis", 0)
    if not given.flag("interleave"):
        return np.concatenate(parts, axis)
    stacked = np.stack(parts, axis=axis % parts[0].ndim + 1)
    shape = list(parts[0].shape)
    shape[axis] *= len(parts)
    return stacked.reshape(shape)


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
    mode = given.text("mode", "constant")
    if mode == "constant":
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
    name = given.text("dtype", "fp32")
    if name not in _NAMES:
        raise ValueError(f"it casts to {name!r}")
    # numpy rounds towards zero here, as C does.
    return given.tensor("x").astype(_NAMES[name])


def _to_space(name: str, order: tuple[int, ...], place: int) -> Compute:
    """Returns an operation that rearranges channels into spatial blocks.

    `place` says where the block's axes are among the channels: first for `depth_to_space` (ONNX: DCR), last for
    `pixel_shuffle` (CRD). `name` is the parameter with the block size, `order` the transposition.
    """

    def compute(given: Arguments) -> Array:
        x, block = given.tensor("x"), given.whole(name, 1)
        batch, channels, height, width = x.shape
        parts = [channels // block**2]
        parts[place:place] = [block, block]
        split = x.reshape(batch, *parts, height, width)
        return split.transpose(order).reshape(batch, channels // block**2, height * block, width * block)

    return compute


def _space_to_depth(given: Arguments) -> Array:
    x, block = given.tensor("x"), given.whole("block_size", 1)
    batch, channels, height, width = x.shape
    split = x.reshape(batch, channels, height // block, block, width // block, block)
    return split.transpose(0, 3, 5, 1, 2, 4).reshape(batch, channels * block**2, height // block, width // block)


def _fill(given: Arguments) -> Array:
    value = given.tensor("value").reshape(-1)
    return np.full(given.wholes("shape") or (), value[0], value.dtype)


LAYOUT: Mapping[str, Callable[[Arguments], Array | tuple[Array, ...]]] = {
    "cast": _cast,
    "concat": _concatenate,
    "depth_to_space": _to_space("block_size", (0, 3, 4, 1, 5, 2), place=0),
    "expand_dims": lambda given: np.expand_dims(given.tensor("x"), given.wholes("axes") or ()),
    "fill": _fill,
    "gather": _gather,
    "gather_along_axis": lambda given: np.take_along_axis(
        given.tensor("x"), given.tensor("indices").astype(np.int64), given.whole("axis", 0)
    ),
    "gather_nd": _gather_points,
    "pad": _pad,
    "pixel_shuffle": _to_space("upscale_factor", (0, 1, 4, 2, 5, 3), place=1),
    "reshape": _reshape,
    "reverse": lambda given: np.flip(given.tensor("x"), given.wholes("axes")),
    "shape": lambda given: np.array(given.tensor("x").shape, np.int32),
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "space_to_depth": _space_to_depth,
    "split": _split,
    "squeeze": lambda given: np.squeeze(given.tensor("x"), given.wholes("axes")),
    "stack": lambda given: np.stack(given.tensors("values"), given.whole("axis", 0)),
    "tile": lambda given: np.tile(given.tensor("x"), given.wholes("reps") or ()),
    "transpose": lambda given: np.transpose(given.tensor("x"), given.wholes("perm")),
}
"""Operations by their names in MIL."""


def _reduce(
    formula: Callable[..., Array],
    *,
    before: Callable[[Array], Array] = np.asarray,
    after: Callable[[Array], Array] = np.asarray,
) -> Callable[[Arguments], Array]:
    """Returns a reduction by `formula`; `before` is applied to each element, `after` to the result."""

    def compute(given: Arguments) -> Array:
        x, axes = before(given.tensor("x")), given.wholes("axes")
        return np.asarray(after(formula(x, axis=axes, keepdims=given.flag("keep_dims"))))

    return compute


def _log_sum_exp(x: Array, *, axis: tuple[int, ...] | None, keepdims: bool) -> Array:
    most = np.max(x, axis=axis, keepdims=True)
    summed = np.log(np.sum(np.exp(x - most), axis=axis, keepdims=True)) + most
    return np.asarray(summed if keepdims else np.squeeze(summed, axis))


def _find_extreme(formula: Callable[..., Array]) -> Callable[[Arguments], Array]:
    def compute(given: Arguments) -> Array:
        return formula(given.tensor("x"), axis=given.whole("axis", -1), keepdims=given.flag("keep_dims"))

    return compute


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


def _normalize_l2(given: Arguments) -> Array:
    x = given.tensor("x")
    axes = tuple(range(max(x.ndim - 3, 0), x.ndim))
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=axes, keepdims=True) + given.number("epsilon", 1e-6)))


def _cumulate(given: Arguments) -> Array:
    x, axis = given.tensor("x"), given.whole("axis", 0)
    x = np.flip(x, axis) if given.flag("reverse") else x
    out = np.cumsum(x, axis)
    out = out - x if given.flag("exclusive") else out
    return np.flip(out, axis) if given.flag("reverse") else out


REDUCTIONS: Mapping[str, Callable[[Arguments], Array]] = {
    "batch_norm": _normalize_batch, "cumsum": _cumulate, "instance_norm": _normalize_instance, "l2_norm": _normalize_l2,
    "layer_norm": _normalize_layer, "linear": _linear, "matmul": _multiply, "reduce_argmax": _find_extreme(np.argmax),
    "reduce_argmin": _find_extreme(np.argmin), "reduce_l1_norm": _reduce(np.sum, before=np.abs),
    "reduce_l2_norm": _reduce(np.sum, before=np.square, after=np.sqrt), "reduce_log_sum": _reduce(np.sum, after=np.log),
    "reduce_log_sum_exp": _reduce(_log_sum_exp), "reduce_max": _reduce(np.max), "reduce_mean": _reduce(np.mean),
    "reduce_min": _reduce(np.min), "reduce_prod": _reduce(np.prod), "reduce_sum": _reduce(np.sum),
    "reduce_sum_square": _reduce(np.sum, before=np.square), "softmax": _softmax,
}  # fmt: skip
"""Operations by their names in MIL."""
