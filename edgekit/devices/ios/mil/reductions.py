"""Operations over axes: products of matrices, sums, norms."""

from collections.abc import Callable, Mapping

import numpy as np

from edgekit.devices.ios.mil.arguments import Arguments
from edgekit.model.tensors import Array


def _reduce(
    formula: Callable[..., Array],
    *,
    before: Callable[[Array], Array] = np.asarray,
    after: Callable[[Array], Array] = np.asarray,
) -> Callable[[Arguments], Array]:
    """Returns a reduction of what `before` makes of each value, whose result `after` finishes."""

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
    out = given.tensor("x") @ given.tensor("weight").T
    bias = given.find("bias")
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


def _center(x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    shifted = x - np.mean(x, axis=axes, keepdims=True)
    return np.asarray(shifted / np.sqrt(np.mean(shifted**2, axis=axes, keepdims=True) + np.float32(epsilon)))


def _normalize_instance(given: Arguments) -> Array:
    x = given.tensor("x")
    return _scale_and_shift(_center(x, tuple(range(2, x.ndim)), given.number("epsilon", 1e-5)), given, _per_channel)


def _normalize_layer(given: Arguments) -> Array:
    x = given.tensor("x")
    axes = given.wholes("axes") or tuple(range(x.ndim))
    normal = _center(x, axes, given.number("epsilon", 1e-5))
    places = {axis % x.ndim for axis in axes}
    shape = [size if axis in places else 1 for axis, size in enumerate(x.shape)]
    return _scale_and_shift(normal, given, lambda value, _: value.reshape(shape))


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
    "batch_norm": _normalize_batch,
    "cumsum": _cumulate,
    "instance_norm": _normalize_instance,
    "l2_norm": _normalize_l2,
    "layer_norm": _normalize_layer,
    "linear": _linear,
    "matmul": _multiply,
    "reduce_argmax": _find_extreme(np.argmax),
    "reduce_argmin": _find_extreme(np.argmin),
    "reduce_l1_norm": _reduce(np.sum, before=np.abs),
    "reduce_l2_norm": _reduce(np.sum, before=np.square, after=np.sqrt),
    "reduce_log_sum": _reduce(np.sum, after=np.log),
    "reduce_log_sum_exp": _reduce(_log_sum_exp),
    "reduce_max": _reduce(np.max),
    "reduce_mean": _reduce(np.mean),
    "reduce_min": _reduce(np.min),
    "reduce_prod": _reduce(np.prod),
    "reduce_sum": _reduce(np.sum),
    "reduce_sum_square": _reduce(np.sum, before=np.square),
    "softmax": _softmax,
}
"""Operations by their names in MIL."""
