"""Products and sums in the form that most providers take: Gemm, MatMul, Neg and Sum."""

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes, set_nodes

GEMM_TO_MATMUL = "gemm-to-matmul"

_PLAIN = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}


def write_matmuls(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Gemm between a Reshape from [1, M, K] and a constant [K, N] a MatMul and an Add, in place.

    Returns the names of the nodes. Each result is the same sum of products (MatMulAddFusion undone).
    """
    return replace_nodes(graph, opset, {"Gemm"}, _gemm_to_matmul) if opset >= 7 else ()


def _gemm_to_matmul(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
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


PLAIN_GEMM = "plain-gemm"


def write_plain_gemms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Puts transA, alpha and beta of each Gemm into nodes of their own, in place, and returns the names of the nodes.

    The factor moves from the sum to A, so the last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Gemm"}, _plain_gemm) if opset >= 7 else ()


def _plain_gemm(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS:
        return None
    alpha, beta = (float(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    turned, biased = bool(node.attributes.get("transA", 0)), node.has_input(2)
    if not turned and alpha == 1 and (beta == 1 or not biased):
        return None
    dtype, writer = str(graph.value(node.input[0]).dtype), Writer(graph=graph, node=node)
    left, bias = node.input[0], list(node.input[2:3])
    if turned:
        left = writer.add("Transpose", [left], "transposed", perm=[1, 0])
    if alpha != 1:
        left = writer.add("Mul", [left, writer.constant("alpha", alpha, dtype)], "scaled")
    if biased and beta != 1:
        bias = [_scale(graph, writer, node.input[2], beta, dtype)]
    kept: dict[str, Any] = {"transB": 1} if node.attributes.get("transB", 0) else {}
    writer.add("Gemm", [left, node.input[1], *bias], **kept)
    return writer.nodes


def _scale(graph: Graph, writer: Writer, name: str, beta: float, dtype: str) -> str:
    value = graph.array(name)
    if value is not None:
        return writer.constant("bias", value * value.dtype.type(beta), dtype)
    return writer.add("Mul", [name, writer.constant("beta", beta, dtype)], "bias")


MATMUL_TO_2D = "matmul-to-2d"


def flatten_matmuls(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Gives each MatMul of more than two dimensions and a constant matrix two dimensions, in place.

    Returns the names of the nodes. Each result is the same sum of products; the order may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"MatMul"}, _matmul_to_2d) if opset >= 5 else ()


def _matmul_to_2d(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
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


NEG_TO_MUL = "neg-to-mul"


def write_products(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Neg of floats as Mul by -1, in place; returns the names of the nodes."""
    return replace_nodes(graph, opset, {"Neg"}, _neg_to_mul)


def _neg_to_mul(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    dtype = graph.value(node.input[0]).dtype
    if dtype not in FLOATS:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Mul", [node.input[0], writer.constant("minus_one", -1, dtype)])
    return writer.nodes


SUM_TO_ADD = "sum-to-add"
_ADD_SINCE = 7


def rewrite_sums(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Sum of two or more inputs as Adds, in place, and returns the names of the nodes."""
    if opset < _ADD_SINCE:
        return ()
    nodes: list[onnx.NodeProto] = []
    changed: list[str] = []
    for node in graph.node:
        if node.op_type != "Sum" or node.domain or len(node.input) < 2:
            nodes.append(node)
            continue
        nodes.extend(_chain(node))
        changed.append(node.name)
    set_nodes(graph, nodes)
    return tuple(changed)


def _chain(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Returns the Adds; the last bears the name and the output of the Sum."""
    adds: list[onnx.NodeProto] = []
    left = node.input[0]
    for index, right in enumerate(node.input[1:], start=1):
        last = index == len(node.input) - 1
        name = node.name if last else f"{node.name}/add_{index}"
        result = node.output[0] if last else f"{node.output[0]}/add_{index}"
        adds.append(helper.make_node("Add", [left, right], [result], name=name))
        left = result
    return adds
