"""Rounds weights to an integer grid: to nearest, or by GPTQ, which minimizes the error of the layer's output.

Weights of 4 bits, unlike those of 8, also need a search for the scale: to clip the largest may reduce the error.
"""

import contextlib
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import onnx

from edgekit.model.tensors import Array

Rounding = Literal["nearest", "bias", "gptq", "refit", "qronos"]
"""How weights are rounded.

nearest: each weight by itself. bias: the same, then the mean of the output error is subtracted from the bias (bias
correction, M. Nagel et al., arXiv:1906.04721, section 4.2). gptq: minimizes the error of the layer's output, then
corrects the bias. refit: first refitted by least squares to inputs that carry the noise of their own quantization, then
gptq. qronos: layer by layer, each for the inputs that reach it through the layers rounded before, otherwise as gptq
(`rounding.round_in_order`).
"""

LIMIT = 127
"""The largest magnitude of a symmetric 8-bit weight."""
REDUCED_LIMIT = 64
"""The largest magnitude with `reduce_range`: two products with 255 add up to 32640, which fits into 16 bits."""
FOUR_LIMIT = 7
"""The largest 4-bit weight. The smallest is -8: one step more matters among 15, and Qualcomm's HTP supports it."""
# `_ROWS` inputs are rounded one at a time. Errors are carried between halves of larger spans by one matrix product
# instead of many outer products (GPTQ, "Lazy Batch-Updates", applied recursively); the result is the same. `_BLOCK` is
# the size of a triangle that LAPACK inverts directly. Both chosen by hand.
_ROWS, _BLOCK = 8, 64
_WIDE = frozenset({onnx.TensorProto.INT16, onnx.TensorProto.UINT16})
# GPTQ, "Cholesky Reformulation": 1 % of the mean of the diagonal.
_DAMPING = 0.01
# More damping, tried if the matrix is not positive definite in float32; the whole mean is enough for any correlation
# matrix.
_MORE_DAMPING = (0.0, 0.1, 1.0)
# The second moment of inputs that were always 0: Cholesky needs values above 0.
_LEAST = 1e-30
# How far, in steps, a weight may lie from the grid that it was put on before it was stored in float32; and how many
# steps may lie between two neighbouring values if all weights are small. Chosen by hand.
_OFF_GRID, _MOST_STEPS_BETWEEN = 1e-2, 4
# So many weights are checked first: for most layers they already show that there is no grid.
_LOOKED_AT = 4096


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """Integers int8 [groups, outputs, inputs] and their scale float32 [groups, outputs, 1]."""

    integers: Array
    scale: Array

    @property
    def values(self) -> Array:
        """The dequantized weights, float32 [groups, outputs, inputs]."""
        return self.integers.astype(np.float32) * self.scale


def lowest(limit: int) -> int:
    """Returns the smallest integer of a grid whose largest is `limit`."""
    return -limit - 1 if limit == FOUR_LIMIT else -limit


def spare_for_bias(kind: int) -> float:
    """Returns how far an int32 bias stays below its limit, as a factor, beside data of this type.

    QNN's HTP adds products of 16-bit data within the same 32 bits: from 2**29 on its results are wrong, up to 2**28
    they are right (targets/qnn/NOTES.md).
    """
    return 8.0 if kind in _WIDE else 1.0


def least_multiplier(kind: int, made: int) -> float:
    """Returns the smallest value of scale of weight * scale of input / scale of output that is computed rightly.

    Where input and output have 16 bits, QNN's HTP computes wrong results below 2**-24 (targets/qnn/NOTES.md). Weights
    are rounded more coarsely there to stay above it, which moves the output by less than 2**-9 of its steps.
    """
    return 1.001 * 2.0**-24 if {kind, made} <= _WIDE else 0.0


def weight_scale(matrix: Array, *, per_channel: bool, floor: Array | float = 0.0, limit: int = LIMIT) -> Array:
    """Returns the scale float32 [groups, outputs, 1] that maps the largest magnitude to `limit`, at least `floor`.

    Weights that lie on a grid already, as after quantization-aware training, keep that grid (`find_step`).
    """
    largest = np.abs(matrix).max(axis=2, keepdims=True)
    if not per_channel:
        largest = np.broadcast_to(largest.max(), largest.shape)
    step = find_step(matrix, limit)
    if step is not None:
        # The scale is the smallest whole fraction of the step (step / 1, step / 2, ...) that the integers allow: the
        # scale of the bias follows from it.
        kept: Array = (step / np.maximum(limit // np.maximum(np.rint(largest / step), 1), 1)).astype(np.float32)
        if (kept >= floor).all():
            return kept
    return np.maximum(scale_zeros(largest / limit), floor).astype(np.float32)


def scale_zeros(scales: Array) -> Array:
    """Returns the scales of a layer's channels, where a channel of zeros gets the smallest scale of the others.

    Only its bias matters, in steps of this scale times the input's: a large scale rounds it coarsely, and QNN's HTP
    drops the last 8 bits of a bias beside 16-bit data (targets/qnn/NOTES.md). ONNX Runtime takes 1 (compute_scale_zp
    in quant_utils.py).
    """
    tiny = np.finfo(np.float32).tiny
    others = scales[scales > tiny]
    return np.where(scales > tiny, scales, others.min() if others.size else tiny)


def find_step(matrix: Array, limit: int = LIMIT) -> float | None:
    """Returns the step of a uniform grid, with integers up to `limit`, on which all weights lie; None if there is none.

    A grid may also use -128, one step below -127, which is the lowest integer here: clipping the few weights at -128
    errs less than another grid for all.
    """
    if np.unique(np.abs(matrix.flat[:_LOOKED_AT])).size > limit + 2:
        return None
    values = np.unique(np.abs(matrix)).astype(np.float64)
    gaps = np.diff(values, prepend=0.0)
    gaps = gaps[gaps > _OFF_GRID * values[-1] / (limit + 1)]
    for part in range(1, _MOST_STEPS_BETWEEN + 1) if gaps.size else ():
        counts = np.rint(values * part / gaps.min())
        step = float(values @ counts / (counts @ counts))
        if counts[-1] <= limit + 1 and np.abs(values - counts * step).max() <= _OFF_GRID * step:
            return step
    return None


def round_nearest(matrix: Array, scale: Array, limit: int = LIMIT) -> Rounded:
    """Rounds each weight to the nearest grid point."""
    integers = np.clip(np.rint(matrix / scale), lowest(limit), limit).astype(np.int8)
    return Rounded(integers=integers, scale=scale)


def split_pieces(matrix: Array, groups: int, size: int) -> Array:
    """Returns a matrix [groups, outputs, inputs] in pieces of `size` inputs, [groups x pieces, outputs, size]."""
    parts = matrix.reshape(groups, matrix.shape[1], -1, size)
    return parts.transpose(0, 2, 1, 3).reshape(-1, matrix.shape[1], size)


def join_pieces(split: Array, groups: int) -> Array:
    """Returns pieces [groups x pieces, outputs, size] joined again: [groups, outputs, inputs].

    Undoes `split_pieces`.
    """
    parts = split.reshape(groups, -1, *split.shape[1:])
    return parts.transpose(0, 2, 1, 3).reshape(groups, split.shape[1], -1)


def shrink_moment(moment: Array, samples: int) -> Array:
    """Returns a second moment shrunk towards its diagonal by rho = K / (K + n/4), for estimates from few samples."""
    # Shrinkage after O. Ledoit and M. Wolf (J. Multivariate Analysis 88, 2004), with K inputs and n patches; rho is the
    # first that was tried, not tuned, and n/4 because patches of one image resemble each other. Without it, a
    # classifier whose last layer has more inputs than there are samples had 38 dB on these samples and 0 dB on held-out
    # ones.
    size = moment.shape[-1]
    rho = size / (size + samples / 4)
    return _add_to_diagonal((1 - rho) * moment, rho * np.diagonal(moment, axis1=1, axis2=2))


def damp_moment(moment: Array) -> Array:
    """Returns a second moment with 1 % of the mean of its diagonal added to the diagonal: it can be inverted."""
    damping = _DAMPING * np.diagonal(moment, axis1=1, axis2=2).mean(axis=1) + _LEAST
    return _add_to_diagonal(moment, damping[:, None])


def _add_to_diagonal(moment: Array, energy: Array | float) -> Array:
    """Returns matrices [groups, inputs, inputs] with `energy`, [groups, inputs] or a scalar, added to each diagonal."""
    added = moment.copy()
    # This writes through a view of the diagonal: to add a scaled unit matrix would take as long as a product of all.
    np.einsum("gii->gi", added)[...] += energy
    return added


def add_spread(moment: Array, spread: Array, samples: int) -> Array:
    """Returns a second moment with the energy of one extra patch on its diagonal; `spread` is [groups, inputs]."""
    # An input may be nonzero at a position from which no patch was taken.
    return _add_to_diagonal(moment, spread**2 / (samples + 1))


def refit_weights(matrix: Array, moment: Array, noise: float) -> Array:
    """Returns W C (C + noise I)^-1: the weights with the least error if every input carries noise of this variance > 0.

    With `noise` = step^2 / 12 this is the Wiener solution for an input quantized with that step: it attenuates inputs
    whose signal is below the step.
    """
    # Least squares in closed form: E|W x - W' (x + e)|^2 is least where W' (C + E[ee']) = W C. Rounding errors are
    # taken as uniform within a step and independent of x (B. Widrow's model of quantization), hence step^2 / 12.
    # Inputs in 16 bits have less noise than is needed for the condition of the matrix.
    energy = float(np.trace(moment, axis1=1, axis2=2).max())
    noisy = _add_to_diagonal(moment, max(noise, 1e-9 * energy / moment.shape[-1]))
    return np.swapaxes(np.linalg.solve(noisy, moment @ np.swapaxes(matrix, 1, 2)), 1, 2)


def round_gptq(matrix: Array, moment: Array, scale: Array, noise: float = 0.0, limit: int = LIMIT) -> Rounded:
    """Rounds weights one input at a time, and compensates each error by the inputs not yet rounded.

    GPTQ (E. Frantar et al., arXiv:2210.17323), which solves OBQ (E. Frantar and D. Alistarh, arXiv:2208.11580) for all
    outputs in one order: by falling energy of the inputs. `scale` is [groups, outputs, 1], or has one for each weight
    if blocks of inputs have scales of their own.
    """
    diagonal = np.diagonal(moment, axis1=1, axis2=2)
    damping = np.maximum(noise, _DAMPING * diagonal.mean(axis=1)) + _LEAST
    # Later inputs compensate the errors of earlier ones, so the inputs that matter most come first, while most others
    # can compensate ("act-order" of the authors' code, github.com/IST-DASLab/gptq).
    order = np.argsort(-diagonal, axis=1, kind="stable")
    groups = np.arange(len(moment))[:, None, None]
    damped = _add_to_diagonal(moment[groups, order[:, :, None], order[:, None, :]], damping[:, None])
    # Only ratios within a row of the factor matter; the division avoids overflow and underflow of float32.
    upper = _inverse_factor((damped / damping[:, None, None]).astype(np.float32))
    rows = np.take_along_axis(matrix, order[:, None, :], axis=2).transpose(2, 0, 1).astype(np.float32)
    scale_of_each = scale if scale.shape[2] == 1 else np.take_along_axis(scale, order[:, None, :], axis=2)
    rounded = _round_rows(rows, upper, scale_of_each.transpose(0, 2, 1), limit)
    integers = np.empty(matrix.shape, np.int8)
    np.put_along_axis(integers, order[:, None, :], rounded.transpose(1, 2, 0), axis=2)
    return Rounded(integers=integers, scale=scale)


def _inverse_factor(hessian: Array) -> Array:
    """Returns the upper triangular U with U'U = inverse of `hessian`, from a Cholesky factor in reversed order.

    Raises:
        LinAlgError: no damping makes it positive definite, so it holds NaN or infinity.
    """
    # The paper inverts first and factorizes then. With J the reversal of order, J H J = L L' gives U = J inv(L) J at
    # once.
    energy = np.diagonal(hessian, axis1=1, axis2=2).mean(axis=1, keepdims=True)
    for damping in _MORE_DAMPING:
        with contextlib.suppress(np.linalg.LinAlgError):
            lower = np.linalg.cholesky(_add_to_diagonal(hessian, damping * energy)[:, ::-1, ::-1])
            # LAPACK does not report every NaN.
            if np.isfinite(lower).all():
                break
    else:
        raise np.linalg.LinAlgError("the second moment of a layer's input holds no numbers")
    return np.ascontiguousarray(_invert_lower(lower)[:, ::-1, ::-1])


def _invert_lower(lower: Array) -> Array:
    """Returns inverses of lower triangular matrices, recursively: ten times as fast as LAPACK's general inverse."""
    half = lower.shape[-1] // 2
    if half < _BLOCK // 2:
        return np.linalg.inv(lower)
    inverse = np.zeros_like(lower)
    first, last = _invert_lower(lower[:, :half, :half]), _invert_lower(lower[:, half:, half:])
    inverse[:, :half, :half], inverse[:, half:, half:] = first, last
    inverse[:, half:, :half] = -(last @ (lower[:, half:, :half] @ first))
    return inverse


def _round_rows(rows: Array, upper: Array, scale: Array, limit: int) -> Array:
    """Rounds rows [inputs, groups, outputs] in order; `scale` is [groups, 1 or inputs, outputs]. Changes `rows`."""
    # In the layout [groups, inputs, outputs] a batched matrix product is one call.
    rows = np.ascontiguousarray(rows.transpose(1, 0, 2))
    rounded, errors, low = np.empty(rows.shape, np.int8), np.empty(rows.shape, np.float32), lowest(limit)
    scale = np.broadcast_to(scale, rows.shape)

    def round_span(start: int, stop: int) -> None:
        if stop - start > _ROWS:
            middle = (start + stop) // 2
            round_span(start, middle)
            rows[:, middle:stop] -= np.swapaxes(upper[:, start:middle, middle:stop], 1, 2) @ errors[:, start:middle]
            round_span(middle, stop)
            return
        for index in range(start, stop):
            grid = np.rint(rows[:, index] / scale[:, index])
            # For these short rows np.clip takes longer than both steps.
            np.minimum(np.maximum(grid, low, out=grid), limit, out=grid)
            rounded[:, index] = grid
            # OBQ's update: the remaining inputs change so that they compensate as much of this rounding error as they
            # can.
            error = (rows[:, index] - grid * scale[:, index]) / upper[:, index, index, None]
            errors[:, index] = error
            rows[:, index + 1 : stop] -= upper[:, index, index + 1 : stop, None] * error[:, None]

    round_span(0, rows.shape[1])
    return rounded.transpose(1, 0, 2)


# Tried shares of the scale that does not clip the largest weight: with 15 steps a finer grid for most weights may be
# worth clipping a few. Chosen by hand; a share below a third was never the best.
_SHARES = np.linspace(1.0, 0.34, 34)


def search_scale(matrix: Array, *, energy: Array, floor: Array | float = 0.0) -> Array:
    """Returns the scale float32 [groups, outputs, 1] with the least error of rounding to nearest in 4 bits.

    Args:
        matrix: weights [groups, outputs, inputs].
        energy: the mean square of each input [groups, inputs], which weights the squared error of its weights.
        floor: the least scale.
    """
    whole = weight_scale(matrix, per_channel=True, floor=floor, limit=FOUR_LIMIT)
    tried = [np.maximum(whole * np.float32(share), floor).astype(np.float32) for share in _SHARES]
    return pick_scale(matrix, tried, energy[:, None])


def pick_scale(weights: Array, scales: Sequence[Array], energy: Array) -> Array:
    """Returns for each row of weights [..., inputs] the scale, float32 [..., 1], with the least error in 4 bits.

    `energy` is the mean square of each input. A scale of 0 rounds all weights to 0.
    """
    best, least = scales[0], np.full(scales[0].shape, np.inf)
    for scale in scales:
        rounded = round_nearest(weights, np.where(scale, scale, np.float32(np.inf)), FOUR_LIMIT).integers * scale
        cost = ((weights - rounded) ** 2 * energy).sum(axis=-1, keepdims=True)
        best, least = np.where(cost < least, scale, best), np.minimum(cost, least)
    return best


def pack_int4(integers: Array, name: str) -> onnx.TensorProto:
    """Returns integers from -8 to 7 as an INT4 tensor: two per byte, the first in the lower half (onnx.proto)."""
    flat = np.concatenate([integers.reshape(-1), np.zeros(integers.size % 2, np.int8)]).astype(np.uint8) & 15
    packed = flat[::2] | flat[1::2] << 4
    return onnx.TensorProto(name=name, data_type=onnx.TensorProto.INT4, dims=integers.shape, raw_data=packed.tobytes())
