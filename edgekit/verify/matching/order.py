"""Which nodes of a graph compute anything."""

import onnx

from edgekit.model.model import iterate_reads, order_nodes

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


def list_computing(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Returns, in order, the nodes whose result depends on the inputs; the others are constants."""
    constants = {tensor.name for tensor in graph.initializer}
    dynamic = {value.name for value in graph.input if value.name not in constants}
    computing: list[onnx.NodeProto] = []
    for node in order_nodes(graph):
        if not dynamic.isdisjoint(iterate_reads(node)):
            computing.append(node)
            dynamic.update(name for name in node.output if name)
    return computing
