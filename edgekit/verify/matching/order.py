"""Which nodes of a graph compute anything."""

from edgekit.graph.graph import Graph, Node

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"


def list_computing(graph: Graph) -> list[Node]:
    """Returns, in order, the nodes whose result depends on the inputs; the others are constants."""
    dynamic = set(graph.fed)
    computing: list[Node] = []
    for node in graph.nodes:
        if not dynamic.isdisjoint(node.reads):
            computing.append(node)
            dynamic.update(name for name in node.output if name)
    return computing
