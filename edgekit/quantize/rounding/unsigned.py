"""Weights as unsigned integers, for x64 CPUs whose products of unsigned and signed bytes saturate."""

import numpy as np
import onnx
from onnx import numpy_helper

_MIDDLE = 128


def store_weights_unsigned(proto: onnx.ModelProto) -> None:
    """Turns the constant int8 inputs of DequantizeLinear into uint8 with zero point 128, in place; values stay equal.

    Without VNNI an x64 adds pairs of u8 x s8 products in 16 bits, which saturate (VPMADDUBSW), but those of u8 x u8
    exactly (VPMADDWD). ONNX Runtime does the same at session creation where `session.x64quantprecision` is 1
    (core/optimizer/qdq_transformer/avx2_weight_s8_to_u8.cc), but not to a file in ORT format.
    """
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    done: set[str] = set()
    for node in proto.graph.node:
        weight = stored.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if weight is None or (weight.data_type != onnx.TensorProto.INT8 and weight.name not in done):
            continue
        if weight.name not in done:
            done.add(weight.name)
            shifted = numpy_helper.to_array(weight).view(np.uint8) ^ np.uint8(_MIDDLE)
            weight.CopyFrom(numpy_helper.from_array(shifted, weight.name))
        zero = numpy_helper.to_array(stored[node.input[2]])
        if zero.dtype == np.int8:
            name = f"{node.input[2]}.edgekit.unsigned"
            if name not in stored:
                moved = numpy_helper.from_array(np.asarray(zero.view(np.uint8) ^ np.uint8(_MIDDLE)), name)
                stored[name] = moved
                proto.graph.initializer.append(moved)
            node.input[2] = name
