"""Weights of 4 bits by coordinate descent: one input after another gets its best integer, the others as they are."""

import numpy as np

from edgekit.model.tensors import Array
from edgekit.quantize.rounding.gptq import FOUR_LIMIT, Rounded, damp_moment, lowest, round_nearest

# After four passes over all inputs next to nothing changes any more: 0.1 dB from the second to the fourth.
_PASSES = 4
_BLOCK = 64


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
    for start in range(0, weights.shape[2], _BLOCK):
        stop = min(start + _BLOCK, weights.shape[2])
        before, near = errors[..., start:stop].copy(), slopes[..., start:stop].copy()
        for index in range(start, stop):
            curvature, error = hessian[:, index, index, None], errors[..., index].copy()
            # Where the slope of the parabola is 0.
            wanted = weights[..., index] + near[..., index - start] / curvature - error
            counts[..., index] = np.clip(np.rint(wanted / scale[..., index]), lowest(FOUR_LIMIT), FOUR_LIMIT)
            errors[..., index] = weights[..., index] - counts[..., index] * scale[..., index]
            near += (errors[..., index] - error)[..., None] * hessian[:, index, None, start:stop]
        slopes += (errors[..., start:stop] - before) @ hessian[:, start:stop]
