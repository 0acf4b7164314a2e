"""MatMul of a stack of matrices with one constant matrix, as one MatMul of rank 2 between two Reshapes."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "matmul-to-2d"


def flatten_matmuls(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Gives each MatMul of more than two dimensions and a constant matrix two dimensions, in place.

    Returns the names of the nodes. Each result is the same sum of products; the order may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"MatMul"}, _expand) if opset >= 5 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if node.input[1] not in graph.constants:
        return None
    left, right = (graph.value(name) for name in node.input)
    data, matrix = left.static_shape, right.static_shape
    if data is None or matrix is None or len(data) < 3 or len(matrix) != 2 or left.dtype not in FLOATS:
        return None
    writer = Writer(graph=graph, node=node)
    flat = writer.constant("flat", [-1, data[-1]], "int64")
    whole = writer.constant("whole", [*data[:-1], matrix[1]], "int64")
    rows = writer.add("Reshape", [node.input[0], flat], "rows")
    product = writer.add("MatMul", [rows, node.input[1]], "product")
    writer.add("Reshape", [product, whole])
    return writer.nodes
