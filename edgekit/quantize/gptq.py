"""Weights on an integer grid: to the nearest point, by GPTQ, or by coordinate descent (COMQ), for the layer's output.

4 bits need what 8 do not: scales that cut off the largest weights where the output errs less for it.
"""

import contextlib

import msgspec
import numpy as np
import onnx

from edgekit.model.tensors import Array

LIMIT = 127
"""The largest magnitude of a symmetric 8-bit weight."""
REDUCED_LIMIT = 64
"""The largest one of which two, each times 255, add up within 16 bits (32640): `reduce_range` of ORT's quantizer."""
FOUR_LIMIT = 7
"""The largest 4-bit weight. The smallest is -8: with 15 steps one more counts, and Qualcomm's HTP takes it."""
# So many inputs learn of each other's errors one at a time; halves of more do in one product of matrices instead of as
# many outer products (GPTQ, "Lazy Batch-Updates", by halves). The result is the same. Chosen by hand, as is the size
# of a triangle that LAPACK inverts.
_ROWS, _BLOCK = 8, 64
# GPTQ, "Cholesky Reformulation": 1 % of the mean of the diagonal.
_DAMPING = 0.01
# What is added where float32 leaves that not positive definite; the whole mean bounds any matrix of correlations.
_MORE_DAMPING = (0.0, 0.1, 1.0)
# The second moment of an input that never fired, beside the others; and where all are 0. Cholesky needs it above 0.
_DEAD, _LEAST = 1e-6, 1e-30
# How far a weight may lie from a grid that it was put on before float32, in steps; how many steps may lie between two
# neighbours where a weight is small. Chosen by hand.
_OFF_GRID, _APART = 1e-2, 4
# So many weights show at once that most layers lie on no grid.
_LOOKED_AT = 4096
# An input that moves by less of what the widest one of its layer does stays within half a step of 8 bits.
_INACTIVE = 1 / 512


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """Integers int8 [groups, outputs, inputs] and their scale float32 [groups, outputs, 1]."""

    integers: Array
    scale: Array

    @property
    def values(self) -> Array:
        """What the integers stand for, float32 [groups, outputs, inputs]."""
        return self.integers.astype(np.float32) * self.scale


def lowest(limit: int) -> int:
    """Returns the smallest integer of weights whose largest is `limit`."""
    return -limit - 1 if limit == FOUR_LIMIT else -limit


def weight_scale(matrix: Array, *, per_channel: bool, floor: Array | float = 0.0, limit: int = LIMIT) -> Array:
    """Returns the scale float32 [groups, outputs, 1] that puts the largest magnitude on `limit`, but at least `floor`.

    A channel of zeros gets the largest scale of its layer. Weights that lie on a grid already, as those of a model that
    learned to be quantized, keep that (`find_step`).
    """
    # ONNX Runtime gives such a channel a scale of 1 (compute_scale_zp in quant_utils.py), too coarse for its bias.
    largest = np.abs(matrix).max(axis=2, keepdims=True)
    if not per_channel:
        largest = np.broadcast_to(largest.max(), largest.shape)
    step = find_step(matrix, limit)
    if step is not None:
        # As fine as the integers allow, since biases count in steps of the weights.
        kept: Array = (step / np.maximum(limit // np.maximum(np.rint(largest / step), 1), 1)).astype(np.float32)
        if (kept >= floor).all():
            return kept
    scale, tiny = largest / limit, float(np.finfo(np.float32).tiny)
    return np.maximum(np.where(scale > tiny, scale, max(float(scale.max()), tiny)), floor).astype(np.float32)


def find_step(matrix: Array, limit: int = LIMIT) -> float | None:
    """Returns the step of the grid of integers up to `limit` that all weights lie on, None where there is none.

    The least integer that a grid may have, -128 of 8 bits, lies one step outside: to cut the few weights there errs
    less than another grid for all.
    """
    if np.unique(np.abs(matrix.flat[:_LOOKED_AT])).size > limit + 2:
        return None
    values = np.unique(np.abs(matrix)).astype(np.float64)
    gaps = np.diff(values, prepend=0.0)
    gaps = gaps[gaps > _OFF_GRID * values[-1] / (limit + 1)]
    for part in range(1, _APART + 1) if gaps.size else ():
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
    """Returns pieces [groups x pieces, outputs, size] side by side again, [groups, outputs, inputs]."""
    parts = split.reshape(groups, -1, *split.shape[1:])
    return parts.transpose(0, 2, 1, 3).reshape(groups, split.shape[1], -1)


def shrink_moment(moment: Array, samples: int) -> Array:
    """Returns a second moment pulled towards its diagonal by rho = K / (K + n/4), which few samples need."""
    # Shrinkage as of O. Ledoit and M. Wolf (J. Multivariate Analysis 88, 2004) with the first rho tried, not tuned; n/4
    # because patches of one image resemble each other. Without it a classifier whose last layer has more inputs than
    # there are samples had 38 dB on these and 0 dB on held-out ones.
    size = moment.shape[-1]
    rho = size / (size + samples / 4)
    return _add_to_diagonal((1 - rho) * moment, rho * np.diagonal(moment, axis1=1, axis2=2))


def damp_moment(moment: Array) -> Array:
    """Returns a second moment with 1 % of the mean of its diagonal on the diagonal, so that it can be inverted."""
    damping = _DAMPING * np.diagonal(moment, axis1=1, axis2=2).mean(axis=1) + _LEAST
    return _add_to_diagonal(moment, damping[:, None])


def _add_to_diagonal(moment: Array, energy: Array | float) -> Array:
    """Returns matrices [groups, inputs, inputs] with something added to each diagonal, [groups, inputs] or alike."""
    added = moment.copy()
    # A view of the diagonal: a unit matrix would take as much time as a product of the whole.
    np.einsum("gii->gi", added)[...] += energy
    return added


def add_spread(moment: Array, spread: Array, samples: int) -> Array:
    """Returns a second moment with the energy of one more patch on its diagonal; `spread` is [groups, inputs]."""
    # An input may fire in a place that no patch was taken from.
    return _add_to_diagonal(moment, spread**2 / (samples + 1))


def find_inactive(moment: Array, spread: Array) -> Array:
    """Returns which inputs, bool [groups, inputs], stayed at zero in every sample, as far as 8 bits can tell.

    `spread` is [groups, inputs]. Nothing is known of what such an input does when it fires: its weights are the float
    model's to say.
    """
    most = _INACTIVE * spread.max()
    # Without a bias an input that is always the same takes the part of one, and what it does is known.
    return np.asarray((spread <= most) & (np.diagonal(moment, axis1=1, axis2=2) <= most**2))


def isolate_inactive(moment: Array, inactive: Array) -> Array:
    """Returns a second moment without what inputs that stayed at zero have to do with others, so they take no error."""
    if not inactive.any():
        return moment
    active = ~inactive
    together = active[:, :, None] & active[:, None, :]
    return np.asarray(moment * (together | np.eye(moment.shape[-1], dtype=bool)))


def refit_weights(matrix: Array, moment: Array, noise: float) -> Array:
    """Returns W C (C + noise I)^-1, the weights that err least when every input carries noise of that variance.

    With `noise` = step^2 / 12 this is the Wiener solution for an input quantized with that step: it turns down inputs
    whose signal is below the step.
    """
    # Least squares in closed form: E|W x - W' (x + e)|^2 is least where W' (C + E[ee']) = W C. Rounding errors count as
    # uniform within a step and independent of x (B. Widrow's model of quantization), hence step^2 / 12.
    size = moment.shape[-1]
    energy = float(np.trace(moment, axis1=1, axis2=2).max())
    noisy = _add_to_diagonal(moment, max(noise, 1e-9 * energy / size, _LEAST))
    return np.swapaxes(np.linalg.solve(noisy, moment @ np.swapaxes(matrix, 1, 2)), 1, 2)


def round_gptq(matrix: Array, moment: Array, scale: Array, noise: float = 0.0, limit: int = LIMIT) -> Rounded:
    """Rounds weights one input at a time, each time moving the error to the inputs not yet rounded.

    GPTQ (E. Frantar et al., arXiv:2210.17323), which solves OBQ (E. Frantar and D. Alistarh, arXiv:2208.11580) for all
    outputs in one order: that of falling energy of the inputs.
    """
    diagonal = np.diagonal(moment, axis1=1, axis2=2)
    dead = _DEAD * float(diagonal.mean()) + _LEAST
    damping = np.maximum(np.maximum(noise, dead), _DAMPING * diagonal.mean(axis=1))
    # Errors move to inputs that come later, so those that matter most come first, while there is most to move them to
    # ("act-order" of the authors' code, github.com/IST-DASLab/gptq).
    order = np.argsort(-diagonal, axis=1, kind="stable")
    groups = np.arange(len(moment))[:, None, None]
    damped = _add_to_diagonal(moment[groups, order[:, :, None], order[:, None, :]], damping[:, None])
    # Only ratios within a row of the factor count; the division keeps float32 clear of its ends.
    upper = _inverse_factor((damped / damping.max()).astype(np.float32))
    rows = np.take_along_axis(matrix, order[:, None, :], axis=2).transpose(2, 0, 1).astype(np.float32)
    rounded = _round_rows(rows, upper, scale[..., 0], limit)
    integers = np.empty(matrix.shape, np.int8)
    np.put_along_axis(integers, order[:, None, :], rounded.transpose(1, 2, 0), axis=2)
    return Rounded(integers=integers, scale=scale)


def _inverse_factor(hessian: Array) -> Array:
    """Returns the upper triangular U with U'U = inverse of `hessian`, from a Cholesky factor in reversed order.

    Raises:
        LinAlgError: no damping makes it positive definite, so it holds no numbers.
    """
    # GPTQ inverts first and factors then. With J the reversal of order, J H J = L L' gives U = J inv(L) J at once.
    energy = np.diagonal(hessian, axis1=1, axis2=2).mean(axis=1, keepdims=True)
    for damping in _MORE_DAMPING:
        with contextlib.suppress(np.linalg.LinAlgError):
            lower = np.linalg.cholesky(_add_to_diagonal(hessian, damping * energy)[:, ::-1, ::-1])
            # LAPACK does not notice every NaN.
            if np.isfinite(lower).all():
                break
    else:
        raise np.linalg.LinAlgError("the second moment of a layer's input holds no numbers")
    return np.ascontiguousarray(_invert_lower(lower)[:, ::-1, ::-1])


def _invert_lower(lower: Array) -> Array:
    """Returns the inverses of lower triangular matrices, by halves: ten times as fast as LAPACK's general inverse."""
    half = lower.shape[-1] // 2
    if half < _BLOCK // 2:
        return np.linalg.inv(lower)
    inverse = np.zeros_like(lower)
    first, last = _invert_lower(lower[:, :half, :half]), _invert_lower(lower[:, half:, half:])
    inverse[:, :half, :half], inverse[:, half:, half:] = first, last
    inverse[:, half:, :half] = -(last @ (lower[:, half:, :half] @ first))
    return inverse


def _round_rows(rows: Array, upper: Array, scale: Array, limit: int) -> Array:
    """Rounds rows [inputs, groups, outputs] in order; changes `rows`."""
    # [groups, inputs, outputs] are matrices whose products are one call.
    rows = np.ascontiguousarray(rows.transpose(1, 0, 2))
    rounded, errors, low = np.empty(rows.shape, np.int8), np.empty(rows.shape, np.float32), lowest(limit)

    def round_span(start: int, stop: int) -> None:
        if stop - start > _ROWS:
            middle = (start + stop) // 2
            round_span(start, middle)
            rows[:, middle:stop] -= np.swapaxes(upper[:, start:middle, middle:stop], 1, 2) @ errors[:, start:middle]
            round_span(middle, stop)
            return
        for index in range(start, stop):
            grid = np.clip(np.rint(rows[:, index] / scale), low, limit)
            rounded[:, index] = grid
            # OBQ's update: what rounding one input costs, the best move of the others takes back as far as it can.
            error = (rows[:, index] - grid * scale) / upper[:, index, index, None]
            errors[:, index] = error
            rows[:, index + 1 : stop] -= upper[:, index, index + 1 : stop, None] * error[:, None]

    round_span(0, rows.shape[1])
    return rounded.transpose(1, 0, 2)


# After four passes over all inputs next to nothing changes any more: 0.1 dB from the second to the fourth.
_PASSES = 4
_BLOCK_COMQ = 64


def round_comq(
    matrix: Array, moment: Array, scale: Array, *, fits_scale: bool = True, floor: Array | float = 0.0
) -> Rounded:
    """Rounds weights to 4 bits so that the layer's output errs least, by coordinate descent from the nearest integers.

    COMQ (A. Zhang et al., arXiv:2403.07134): with all else fixed, the squared error is a parabola in one weight, and
    so it is in the scale of a channel, which is found again before each pass. Inputs come in the order of their energy;
    the paper's greedy order, weight by weight, would be one for each output.

    Args:
        matrix: weights [groups, outputs, inputs].
        moment: second moments [groups, inputs, inputs].
        scale: scales to begin with, [groups, outputs, 1], or one for each weight where blocks of inputs have their own.
        fits_scale: whether they may change; those that several groups share, or blocks have, may not.
        floor: the least scale.
    """
    diagonal = np.diagonal(moment, axis1=1, axis2=2)
    order = np.argsort(-diagonal, axis=1, kind="stable")
    damped = damp_moment(moment)
    hessian = np.take_along_axis(np.take_along_axis(damped, order[:, :, None], axis=1), order[:, None, :], axis=2)
    hessian = (hessian / hessian.max()).astype(np.float32)
    weights = np.take_along_axis(matrix, order[:, None, :], axis=2).astype(np.float32)
    given = scale
    if scale.shape[2] > 1:
        scale = np.take_along_axis(scale, order[:, None, :], axis=2)
    found = round_nearest(weights, scale, FOUR_LIMIT)
    counts, scale = found.integers.astype(np.float32), found.scale
    for _ in range(_PASSES):
        if fits_scale:
            scale = np.maximum(_fit_scale(weights, counts, hessian, scale), floor).astype(np.float32)
        _descend(weights, counts, hessian, np.broadcast_to(scale, weights.shape))
    integers = np.empty(matrix.shape, np.int8)
    np.put_along_axis(integers, order[:, None, :], counts.astype(np.int8), axis=2)
    return Rounded(integers=integers, scale=scale if fits_scale else given)


def _fit_scale(weights: Array, counts: Array, hessian: Array, scale: Array) -> Array:
    """Returns the scales [groups, outputs, 1] with which the integers err least, within a factor of two."""
    pulled = counts @ hessian
    both, own = ((pulled * other).sum(axis=2, keepdims=True) for other in (weights, counts))
    best = np.divide(both, own, out=scale.copy(), where=(own > 0) & (both > 0))
    return np.asarray(np.clip(best, scale / 2, scale * 2), np.float32)


def _descend(weights: Array, counts: Array, hessian: Array, scale: Array) -> None:
    """Gives each input in turn the integers that err least; changes `counts`."""
    errors = weights - counts * scale
    slopes = errors @ hessian
    for start in range(0, weights.shape[2], _BLOCK_COMQ):
        stop = min(start + _BLOCK_COMQ, weights.shape[2])
        before, near = errors[..., start:stop].copy(), slopes[..., start:stop].copy()
        for index in range(start, stop):
            curvature, error = hessian[:, index, index, None], errors[..., index].copy()
            # Where the slope of the parabola is 0.
            wanted = weights[..., index] + near[..., index - start] / curvature - error
            counts[..., index] = np.clip(np.rint(wanted / scale[..., index]), lowest(FOUR_LIMIT), FOUR_LIMIT)
            errors[..., index] = weights[..., index] - counts[..., index] * scale[..., index]
            near += (errors[..., index] - error)[..., None] * hessian[:, index, None, start:stop]
        slopes += (errors[..., start:stop] - before) @ hessian[:, start:stop]


# Shares of the scale that keeps the largest weight whole: with 15 steps a finer grid for the many may be worth a cut of
# the few. Chosen by hand; below a third nothing was ever best.
_SHARES = np.linspace(1.0, 0.34, 34)


def search_scale(matrix: Array, *, energy: Array, floor: Array | float = 0.0) -> Array:
    """Returns the scale float32 [groups, outputs, 1] with which rounding to the nearest of 4 bits errs least.

    Args:
        matrix: weights [groups, outputs, inputs].
        energy: the mean square of each input [groups, inputs], by which the squared error of its weights counts.
        floor: the least scale.
    """
    whole = weight_scale(matrix, per_channel=True, floor=floor, limit=FOUR_LIMIT)
    best, least = whole, np.full(whole.shape, np.inf)
    for share in _SHARES:
        scale = np.maximum(whole * np.float32(share), np.float32(floor)).astype(np.float32)
        error = matrix - round_nearest(matrix, scale, FOUR_LIMIT).values
        cost = (error**2 * energy[:, None]).sum(axis=2, keepdims=True)
        best, least = np.where(cost < least, scale, best), np.minimum(cost, least)
    return best


def pack_int4(integers: Array, name: str) -> onnx.TensorProto:
    """Returns integers from -8 to 7 as a tensor of type INT4: two a byte, the first in the lower half (onnx.proto)."""
    flat = np.concatenate([integers.reshape(-1), np.zeros(integers.size % 2, np.int8)]).astype(np.uint8) & 15
    packed = flat[::2] | flat[1::2] << 4
    return onnx.TensorProto(name=name, data_type=onnx.TensorProto.INT4, dims=integers.shape, raw_data=packed.tobytes())
