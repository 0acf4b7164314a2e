"""The nodes of a graph in the order of computation, and which of them compute anything."""

import onnx

from edgekit.model import iterate_reads

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


def order_nodes(graph: onnx.GraphProto) -> tuple[onnx.NodeProto, ...]:
    """Returns the nodes so that each comes after those it reads from; a quantizer appends its nodes out of order."""
    producers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    done: set[int] = set()
    ordered: list[onnx.NodeProto] = []
    for start in range(len(graph.node)):
        stack = [start]
        while stack:
            index = stack[-1]
            waiting = [
                producers[name]
                for name in graph.node[index].input
                if name in producers and producers[name] not in done and producers[name] != index
            ]
            if waiting and index not in done:
                stack.extend(waiting)
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                ordered.append(graph.node[index])
    return tuple(ordered)


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
