"""Gemm of rows that were a stack of one, as ONNX Runtime makes it of MatMul and Add: the two again, in 3 dimensions."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "gemm-to-matmul"

_PLAIN = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}


def write_matmuls(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Gemm between a Reshape from [1, M, K] and a constant [K, N] a MatMul and an Add, in place.

    Returns the names of the nodes. Each result is the same sum of products (MatMulAddFusion undone).
    """
    return replace_nodes(graph, opset, {"Gemm"}, _expand) if opset >= 7 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    source = graph.producers.get(node.input[0])
    if source is None or source.op_type != "Reshape" or node.input[1] not in graph.constants:
        return None
    stack, rows = graph.value(source.input[0]).static_shape, graph.value(node.input[0]).static_shape
    given = {name: node.attributes.get(name, default) for name, default in _PLAIN.items()}
    if stack is None or rows is None or stack != (1, *rows) or given != _PLAIN:
        return None
    columns = graph.constants[node.input[1]].dims[1]
    bias = graph.constants.get(node.input[2]) if node.has_input(2) else None
    if node.has_input(2) and (bias is None or list(bias.dims) != [columns]):
        return None
    writer = Writer(graph=graph, node=node)
    shape = writer.constant("shape", [rows[0], columns], "int64")
    made = writer.add("MatMul", [source.input[0], node.input[1]], "product")
    if bias is not None:
        made = writer.add("Add", [made, node.input[2]], "sum")
    writer.add("Reshape", [made, shape])
    return writer.nodes
