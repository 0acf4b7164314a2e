"""Weights as unsigned integers, for x64 CPUs whose products of unsigned and signed bytes saturate."""

import numpy as np
import onnx
from onnx import numpy_helper


def store_weights_unsigned(proto: onnx.ModelProto) -> None:
    """Turns the constant int8 inputs of DequantizeLinear into uint8 with zero point 128, in place; values stay equal.

    For an x64 CPU without VNNI, in files in ORT format too.
    """
    # Such a CPU adds pairs of u8 x s8 products in 16 bits, which saturate (VPMADDUBSW), but those of u8 x u8 exactly
    # (VPMADDWD). ONNX Runtime turns weights itself where `session.x64quantprecision` is 1
    # (onnxruntime/core/optimizer/qdq_transformer/avx2_weight_s8_to_u8.cc), but not those of a file in ORT format.
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    done: set[str] = set()
    for node in proto.graph.node:
        weight = stored.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if weight is None or (weight.data_type != onnx.TensorProto.INT8 and weight.name not in done):
            continue
        if weight.name not in done:
            done.add(weight.name)
            weight.CopyFrom(_add_128(weight, weight.name))
        zero, name = stored[node.input[2]], f"{node.input[2]}.edgekit.unsigned"
        if zero.data_type == onnx.TensorProto.INT8:
            if name not in stored:
                stored[name] = _add_128(zero, name)
                proto.graph.initializer.append(stored[name])
            node.input[2] = name


def _add_128(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    """Returns an int8 tensor as uint8 with 128 added, which turns the highest bit of each byte."""
    return numpy_helper.from_array(np.asarray(numpy_helper.to_array(tensor).view(np.uint8) ^ np.uint8(128)), name)
