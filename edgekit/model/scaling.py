"""Factors by which cross-layer equalization scaled the channels of tensors, kept in the model's metadata.

Who compares the quantized model's layers with the float model's needs them.
"""

import msgspec
import numpy as np
import onnx

from edgekit.model.tensors import Array

SUFFIX = "_equalized"
"""The suffix of a scaled tensor's name."""
NOTE = "edgekit.equalized"
"""The key of a model's metadata under which the factors stand: JSON, by the name that the tensor had."""
# Characters 40 to 120, printable ASCII, for the powers -40 to 40: metadata in ONNX is text.
_ZERO, _MOST = 80, 40


def write_powers(factors: Array) -> str:
    """Returns factors that are powers of two as text, a printable character a channel."""
    return "".join(chr(_ZERO + int(power)) for power in np.log2(factors).round().clip(-_MOST, _MOST))


def read_scaling(proto: onnx.ModelProto) -> dict[str, Array]:
    """Returns the factors of the channels of each scaled tensor, by its name in the model; nothing where none are told.

    Metadata that cannot be read were not written by edgekit, and count as none.
    """
    text = next((entry.value for entry in proto.metadata_props if entry.key == NOTE), "{}")
    try:
        powers = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError):
        return {}
    numbers = {
        name: np.array([ord(power) - _ZERO for power in its]).clip(-_MOST, _MOST) for name, its in powers.items()
    }
    # Powers of two scale a float without rounding, so that the equalized model computes what the other did.
    return {name + SUFFIX: np.ldexp(1.0, exponents) for name, exponents in numbers.items()}


def scale_channels(value: Array, factors: Array) -> Array:
    """Returns a float tensor with each channel times its factor; channels are the second axis of images, else the last.

    A tensor that has no such channels is returned as it is.
    """
    axis = 1 if value.ndim > 2 and value.shape[1] == len(factors) else value.ndim - 1
    if value.ndim == 0 or value.dtype.kind != "f" or value.shape[axis] != len(factors):
        return value
    shape = [-1 if place == axis else 1 for place in range(value.ndim)]
    return np.asarray(value * factors.astype(value.dtype).reshape(shape), dtype=value.dtype)
