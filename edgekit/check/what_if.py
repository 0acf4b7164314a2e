"""Graphs as they would be after a change, so that the same rules can say what the change would gain."""

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.graph.graph import Graph, Node, Value, index_nodes

_INTEGERS = {"int8": onnx.TensorProto.INT8, "uint8": onnx.TensorProto.UINT8}


def with_fixed_dims(graph: Graph, size: int = 1) -> Graph:
    """Returns the graph with every unknown dimension of a known rank as it is counted, or being `size`."""
    return msgspec.structs.replace(
        graph,
        values={
            name: value
            if value.sizes is None
            else Value(dtype=value.dtype, shape=tuple(size if dim is None else dim for dim in value.sizes))
            for name, value in graph.values.items()
        },
    )


def with_activations(graph: Graph, old: str, new: str, *, weights: bool) -> Graph:
    """Returns the graph with 8-bit activations of another sign, and with weights of that sign too if asked."""
    values = {
        name: msgspec.structs.replace(value, dtype=new) if value.dtype == old else value
        for name, value in graph.values.items()
    }
    quantizers = [node for node in graph.nodes if node.op_type in {"QuantizeLinear", "DequantizeLinear"}]
    constants = dict(graph.constants)
    zeros = {node.input[2] for node in quantizers if node.has_input(2) and node.input[0] not in constants}
    for name, tensor in graph.constants.items():
        array = graph.array(name) if tensor.data_type == _INTEGERS[old] else None
        if array is not None and name in zeros:
            # q and its zero point move together, so that (q - zero) * scale stays what it is.
            shifted = array.astype(np.int16) + (128 if new == "uint8" else -128)
            constants[name] = numpy_helper.from_array(shifted.astype(new), name)
        elif weights and tensor.data_type == _INTEGERS[old]:
            # Rules look at the type of weights and not at their numbers, which stay away.
            constants[name] = onnx.TensorProto(name=name, dims=tensor.dims, data_type=_INTEGERS[new])
    return msgspec.structs.replace(graph, values=values, constants=constants)


def without_quantization(graph: Graph) -> Graph:
    """Returns the float graph: no Q and DQ nodes, what they made being what they read."""
    source: dict[str, str] = {}
    constants, values = dict(graph.constants), dict(graph.values)
    kept: list[Node] = []
    for node in graph.nodes:
        inputs = tuple(source.get(name, name) for name in node.input)
        if node.op_type not in {"QuantizeLinear", "DequantizeLinear"} or node.output[0] in graph.outputs:
            kept.append(msgspec.structs.replace(node, input=inputs, index=len(kept)))
            continue
        name = inputs[0]
        source[node.output[0]] = name
        if name in constants:
            constants[name] = onnx.TensorProto(name=name, dims=constants[name].dims, data_type=onnx.TensorProto.FLOAT)
        else:
            values[name] = msgspec.structs.replace(graph.value(name), dtype="float32")
    return index_nodes(msgspec.structs.replace(graph, constants=constants, values=values), kept)
