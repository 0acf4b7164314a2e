"""Parts of a graph that no integer width can hold, found from the graph alone."""

from collections.abc import Callable, Iterator

import onnx

from edgekit.quantize.graph import Graph

_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU"})


def float_islands(graph: Graph) -> dict[str, str]:
    """Returns the nodes (by name) to keep float, each with the reason.

    Before a Log, a value that rounds to zero becomes minus infinity, and 16 bits are no cure (facts, section 7). So a
    spectral front end stays float from the inputs to its Log; behind a network (Softmax, then Log) only what lies
    between the last layer with weights and the Log does.
    """
    reasons: dict[str, str] = {}
    for node in graph.proto.graph.node:
        if node.op_type != "Log" or not graph.is_float(node.output[0]):
            continue
        before = _ancestors(graph, node)
        front = _count_weighted(before) <= _count_weighted(_descendants(graph, node))
        kept = [node, *(before if front else _ancestors(graph, node, stop=_WEIGHTED))]
        for member in kept:
            reasons.setdefault(
                member.name, f"it leads to the logarithm '{node.name}', which magnifies rounding near zero"
            )
    return reasons


def _ancestors(graph: Graph, node: onnx.NodeProto, stop: frozenset[str] = frozenset()) -> list[onnx.NodeProto]:
    def step(current: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        yield from (graph.producers[name] for name in current.input if name in graph.producers)

    return _walk(node, step, stop)


def _descendants(graph: Graph, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    def step(current: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        yield from (reader for name in current.output for reader in graph.consumers.get(name, ()))

    return _walk(node, step, frozenset())


def _walk(
    start: onnx.NodeProto, step: Callable[[onnx.NodeProto], Iterator[onnx.NodeProto]], stop: frozenset[str]
) -> list[onnx.NodeProto]:
    found: dict[str, onnx.NodeProto] = {}
    waiting = [start]
    while waiting:
        for node in step(waiting.pop()):
            if node.name not in found and node.op_type not in stop:
                found[node.name] = node
                waiting.append(node)
    return list(found.values())


def _count_weighted(nodes: list[onnx.NodeProto]) -> int:
    return sum(node.op_type in _WEIGHTED for node in nodes)
