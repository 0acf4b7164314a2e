"""Relu before a Q node whose zero point is the smallest integer: the Q node alone cuts off what is below zero.

ONNX Runtime drops it on the CPU only, and late (`relu_quant_fusion.cc`); a provider sees a Relu that is no part of a
quantized group.
"""

import numpy as np
import onnx
from onnx import numpy_helper

FIX_ID = "idle-relu"


def drop_idle_relus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:  # noqa: ARG001 - the signature of a fix
    """Removes each Relu that only such Q nodes read, in place, and returns the names of the nodes."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    dropped: list[str] = []
    kept: list[onnx.NodeProto] = []
    for node in graph.node:
        quantizers = readers.get(node.output[0], []) if node.op_type == "Relu" and not node.domain else []
        if not quantizers or node.output[0] in outputs or not all(_cuts_at_zero(q, constants) for q in quantizers):
            kept.append(node)
            continue
        for quantizer in quantizers:
            quantizer.input[0] = node.input[0]
        dropped.append(node.name)
    del graph.node[:]
    graph.node.extend(kept)
    return tuple(dropped)


def _cuts_at_zero(node: onnx.NodeProto, constants: dict[str, onnx.TensorProto]) -> bool:
    if node.op_type != "QuantizeLinear":
        return False
    if len(node.input) < 3 or not node.input[2]:
        return not any(attribute.name == "output_dtype" for attribute in node.attribute)
    tensor = constants.get(node.input[2])
    if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return False
    zero = numpy_helper.to_array(tensor)
    if zero.dtype.kind not in "iu":
        return False
    return bool(np.all(zero == np.iinfo(zero.dtype).min))
