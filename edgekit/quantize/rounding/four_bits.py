"""What 4 bits need and 8 do not: scales that cut off the largest weights where the others gain more by it."""

import numpy as np
import onnx

from edgekit.model.tensors import Array
from edgekit.quantize.rounding.gptq import FOUR_LIMIT, round_nearest, weight_scale

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
