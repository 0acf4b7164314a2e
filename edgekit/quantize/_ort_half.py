"""The adapter to onnxruntime's float16 converter, the only module that imports it."""

import logging
from collections.abc import Sequence
from typing import cast

import onnx
from onnxruntime.transformers import float16

from edgekit.errors import ModelError

_LOGGER = logging.getLogger(float16.__name__)


def convert_floats(proto: onnx.ModelProto, kept: Sequence[str], subject: str) -> onnx.ModelProto:
    """Returns a copy of a model that computes in float16, with float32 inputs and outputs and `kept` nodes in float32.

    Raises:
        ModelError: the converter cannot handle the model.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    _LOGGER.disabled = True
    try:
        return cast(
            "onnx.ModelProto",
            float16.convert_float_to_float16(copy, keep_io_types=True, node_block_list=list(kept)),
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"'{subject}' cannot be converted to fp16: {error}", hint="build it with --precision fp32"
        ) from error
    finally:
        _LOGGER.disabled = False
