"""Half precision: the fp16 form of a float model."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model.model import Model, read_proto, save_proto
from edgekit.prepare.tidy import name_nodes
from edgekit.quantize.weight_only._ort_float16 import convert_floats

MAX_HALF = 65504.0
"""The largest finite float16 (IEEE 754-2008, binary16)."""


class Fp16Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that computes in float16, and the weights whose values float16 cannot hold, which were clamped."""

    model: Model
    clamped: tuple[str, ...]


def convert_to_fp16(model: Model, kept: Sequence[str], out: Path) -> Fp16Model:
    """Writes the fp16 form of a prepared float32 model; inputs and outputs stay float32, and so do the `kept` nodes.

    Keep the nodes that the provider leaves to the CPU, which has few fp16 kernels.

    Raises:
        ModelError: the model cannot be converted.
        RuntimeRefusal: ONNX Runtime does not load the result.
    """
    proto = read_proto(model)
    converted = convert_floats(proto, kept, model.path.name)
    name_nodes(converted.graph)
    written = save_proto(converted, out)
    # A graph that ONNX Runtime does not take is refused here, without the time that its optimizers need.
    CpuSession(written.path, SessionSettings(level=Level.DISABLED))
    return Fp16Model(model=written, clamped=_clamped(proto, converted))


def _clamped(before: onnx.ModelProto, after: onnx.ModelProto) -> tuple[str, ...]:
    halves = {tensor.name for tensor in after.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16}
    return tuple(
        tensor.name
        for tensor in before.graph.initializer
        if tensor.name in halves and (np.abs(numpy_helper.to_array(tensor)) > MAX_HALF).any()
    )
