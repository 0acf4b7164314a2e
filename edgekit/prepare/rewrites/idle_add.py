"""Add of zeros, as PyTorch's exporter writes for a mask that hides nothing."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "idle-add"


def drop_idle_adds(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Add of zeros that give the other operand no other shape as Identity, in place.

    Returns the names of the nodes. A zero below zero loses its sign, and nothing else changes.
    """
    return replace_nodes(graph, opset, {"Add"}, _drop)


def _drop(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    for value, added in (node.input, node.input[::-1]):
        shape, zeros = graph.value(value).shape, graph.inline(added)
        # With a bias, be it zero, MatMul becomes a Gemm, which more providers take.
        if zeros is None or zeros.ndim == 1 or value in graph.constants or shape is None or zeros.any():
            continue
        own = shape[::-1]
        if zeros.ndim > len(own) or any(size not in {1, own[at]} for at, size in enumerate(zeros.shape[::-1])):
            continue
        writer = Writer(graph=graph, node=node)
        writer.add("Identity", [value])
        return writer.nodes
    return None
