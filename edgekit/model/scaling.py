"""Factors by which cross-layer equalization scaled the channels of tensors, stored in the model's metadata.

They are needed to compare the layers of the quantized model with those of the float model.
"""

import msgspec
import numpy as np
import onnx

from edgekit.model.tensors import Array

SUFFIX = "_equalized"
"""The suffix of a scaled tensor's name."""
NOTE = "edgekit.equalized"
"""The metadata key of the factors: JSON, by the name that the tensor had before."""
# Characters 40 to 120, printable ASCII, for the powers -40 to 40: metadata in ONNX is text.
_ZERO, _MOST = 80, 40


def write_powers(factors: Array) -> str:
    """Returns factors that are powers of two as text, with one printable character for each channel."""
    return "".join(chr(_ZERO + int(power)) for power in np.log2(factors).round().clip(-_MOST, _MOST))


def read_scaling(proto: onnx.ModelProto) -> dict[str, Array]:
    """Returns the factors of the channels of each scaled tensor, by its name in the model; empty if there are none.

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
    # Powers of two scale a float without rounding, so that the equalized model computes the same as before.
    return {name + SUFFIX: np.ldexp(1.0, exponents) for name, exponents in numbers.items()}


def scale_channels(value: Array, factors: Array) -> Array:
    """Returns a float tensor with each channel times its factor; channels are axis 1 of images, else the last axis.

    A tensor whose axis has another number of channels is returned as it is.
    """
    axis = 1 if value.ndim > 2 and value.shape[1] == len(factors) else value.ndim - 1
    if value.ndim == 0 or value.dtype.kind != "f" or value.shape[axis] != len(factors):
        return value
    shape = [-1 if place == axis else 1 for place in range(value.ndim)]
    return np.asarray(value * factors.astype(value.dtype).reshape(shape), dtype=value.dtype)
