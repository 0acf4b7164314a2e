"""Gemm without a transposed A and without factors, the only form that most providers take."""

from collections.abc import Sequence
from typing import Any

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "plain-gemm"


def write_plain_gemms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Puts transA, alpha and beta of each Gemm into nodes of their own, in place, and returns the names of the nodes.

    The factor moves from the sum to A, so the last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Gemm"}, _expand) if opset >= 7 else ()


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
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
