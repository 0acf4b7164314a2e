"""Turns weights that are stored as integers into floats, for providers whose float layers take no DequantizeLinear."""

import onnx
from onnx import TensorProto, numpy_helper

from edgekit.graph.constants import read_dequantized
from edgekit.graph.rewrite import rewrite
from edgekit.model.model import refill
from edgekit.prepare.stripped import is_absent


@rewrite("float-weights", "store {count} of DequantizeLinear as float constants: the model computes in float")
def store_float_weights(graph: onnx.GraphProto, _opset: int) -> tuple[str, ...]:
    """Replaces each DequantizeLinear of a constant by a float constant in a model that quantizes no activation.

    In place; returns the names of the nodes. Weights without data become constants without data, which is enough for a
    check; those with external data stay.
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    shown = {value.name for value in graph.output}
    found = [
        node
        for node in graph.node
        if node.op_type == "DequantizeLinear" and stored.keys() >= {*node.input} and shown.isdisjoint(node.output)
        if all(stored[name].data_location != TensorProto.EXTERNAL for name in node.input)
        if stored[node.input[1]].data_type == TensorProto.FLOAT
    ]
    if not found or any(node.op_type == "QuantizeLinear" for node in graph.node):
        return ()
    for node in found:
        if not any(is_absent(stored[name]) for name in node.input):
            values = read_dequantized(node, lambda name: numpy_helper.to_array(stored[name]))
            graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        else:
            dims = stored[node.input[0]].dims
            graph.initializer.append(TensorProto(name=node.output[0], data_type=TensorProto.FLOAT, dims=dims))
    names = {node.output[0]: node.name for node in found}
    refill(graph.node, [node for node in graph.node if node.output[0] not in names])
    return tuple(names.values())
