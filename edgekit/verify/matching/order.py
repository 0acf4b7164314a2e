"""Which nodes of a graph compute anything, and in which order."""

from edgekit.graph.graph import Graph, Node
from edgekit.model.model import order_nodes

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


def sort_nodes(graph: Graph) -> list[Node]:
    """Returns the nodes, each behind those that it reads from: quantizers and converters append some out of order."""
    firsts = (next(filter(None, node.output), "") for node in order_nodes(graph.proto))
    return [graph.producers[name] for name in firsts if name in graph.producers]


def list_computing(graph: Graph) -> list[Node]:
    """Returns, in order, the nodes whose result depends on the inputs; the others are constants."""
    dynamic = set(graph.fed)
    computing: list[Node] = []
    for node in sort_nodes(graph):
        if not dynamic.isdisjoint(node.reads):
            computing.append(node)
            dynamic.update(name for name in node.output if name)
    return computing
