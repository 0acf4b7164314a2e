"""int8 weights stored as uint8, for kernels that compute int8 ones wrongly or not at all; real values do not change."""

import math
from collections.abc import Collection

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.graph.rewrite import rewrite
from edgekit.model.tensors import Array

FIX_ID = "unsigned-weights"
# NNAPI's model builder registers the weight of a Gemm as it is, and has no int8 type (targets/nnapi/NOTES.md).
_OPS = frozenset({"Gemm", "MatMul"})


@rewrite(FIX_ID, "store the int8 weights of {count} as uint8 with a zero point of 128, which is the same")
def write_unsigned_weights(graph: onnx.GraphProto, _opset: int) -> tuple[str, ...]:
    """Stores int8 weights of Gemm and MatMul as uint8, in place, and returns the names of the nodes that read them."""
    return store_unsigned(graph, _OPS)


def store_unsigned(graph: onnx.GraphProto, ops: Collection[str] | None = None) -> tuple[str, ...]:
    """Turns constant int8 inputs of DequantizeLinear into uint8 with zero points 128 higher, in place.

    With `ops`, only constants that nodes of these operators read beside unsigned or float inputs are changed. Constants
    that other nodes read too, and weights in an external file, are left alone. Returns the names of the nodes that read
    what was changed.
    """
    if not any(tensor.data_type == onnx.TensorProto.INT8 for tensor in graph.initializer):
        return ()
    view, stored = view_part(graph), {tensor.name: tensor for tensor in graph.initializer}
    changed: list[str] = []
    for tensor in list(graph.initializer):
        readers = view.readers(tensor.name)
        behind = [each for node in readers for each in view.readers(node.output[0])]
        if not _is_weight(view, tensor, readers, stored) or (
            ops is not None
            and not any(node.op_type in ops and not _reads_signed(view, node, stored) for node in behind)
        ):
            continue
        if math.prod(tensor.dims) and not tensor.raw_data and not tensor.int32_data:
            # The model was loaded without its weights: rules look at the type only.
            tensor.data_type = onnx.TensorProto.UINT8
        else:
            tensor.CopyFrom(numpy_helper.from_array(_add_128(numpy_helper.to_array(tensor)), tensor.name))
        for node in (reader.proto for reader in readers):
            given = stored[node.input[2]] if len(node.input) > 2 and node.input[2] else None
            # Activations may share the zero point, so a new one is made. An absent zero point is 0 (ONNX's
            # DequantizeLinear).
            name = f"{given.name if given is not None else node.input[1]}.edgekit.unsigned"
            if name not in stored:
                zeros = np.zeros(tuple(stored[node.input[1]].dims), np.int8)
                zero = zeros if given is None else numpy_helper.to_array(given)
                stored[name] = numpy_helper.from_array(_add_128(zero), name)
                graph.initializer.append(stored[name])
            node.input[2:] = [name]
        changed += [node.name for node in behind]
    return tuple(dict.fromkeys(changed))


def _is_weight(
    view: Graph, tensor: onnx.TensorProto, readers: Collection[Node], stored: dict[str, onnx.TensorProto]
) -> bool:
    """Returns True for an int8 constant that DQ nodes alone read, with constants for scale and zero point."""
    if tensor.data_type != onnx.TensorProto.INT8 or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return False
    if not readers or tensor.name in view.outputs | view.captured:
        return False
    for node in readers:
        rest = [stored.get(name) for name in node.input[1:] if name]
        if node.op_type != "DequantizeLinear" or node.input[0] != tensor.name or tensor.name in node.input[1:]:
            return False
        if any(each is None or each.data_location == onnx.TensorProto.EXTERNAL for each in rest):
            return False
    return True


def _reads_signed(view: Graph, node: Node, stored: dict[str, onnx.TensorProto]) -> bool:
    """Returns True for a node with s8 activations: no kernel of the CPU multiplies these by u8 weights."""
    made_by = view.producers.get(node.input[0])
    if made_by is None or made_by.op_type != "DequantizeLinear" or len(made_by.input) < 3:
        return False
    zero = stored.get(made_by.input[2])
    return zero is not None and zero.data_type == onnx.TensorProto.INT8


def _add_128(numbers: Array) -> Array:
    """Returns int8 numbers as uint8 with 128 added, which turns the highest bit of each byte."""
    return np.asarray(numbers.view(np.uint8) ^ np.uint8(128))
