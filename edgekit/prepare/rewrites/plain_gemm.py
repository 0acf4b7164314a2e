"""Gemm without a transposed A and without factors, the only form that most providers take."""

from collections.abc import Sequence
from typing import Any

import onnx

from edgekit.prepare.rewrites.scene import FLOATS, Scene, Writer, read_attribute, replace_nodes

FIX_ID = "plain-gemm"


def write_plain_gemms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Puts transA, alpha and beta of each Gemm into nodes of their own, in place, and returns the names of the nodes.

    The factor moves from the sum to A, so the last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Gemm"}, _expand) if opset >= 7 else ()


def _expand(scene: Scene, node: onnx.NodeProto) -> Sequence[onnx.NodeProto] | None:
    if scene.dtype(node.input[0]) not in FLOATS:
        return None
    alpha, beta = (float(read_attribute(node, name, 1.0)) for name in ("alpha", "beta"))
    turned, biased = bool(read_attribute(node, "transA", 0)), len(node.input) > 2 and bool(node.input[2])
    if not turned and alpha == 1 and (beta == 1 or not biased):
        return None
    dtype, writer = FLOATS[scene.dtype(node.input[0])], Writer(scene=scene, node=node)
    left, bias = node.input[0], list(node.input[2:3])
    if turned:
        left = writer.add("Transpose", [left], "transposed", perm=[1, 0])
    if alpha != 1:
        left = writer.add("Mul", [left, writer.constant("alpha", alpha, dtype)], "scaled")
    if biased and beta != 1:
        bias = [_scale(scene, writer, node.input[2], beta, dtype)]
    kept: dict[str, Any] = {"transB": 1} if read_attribute(node, "transB", 0) else {}
    writer.add("Gemm", [left, node.input[1], *bias], **kept)
    return writer.nodes


def _scale(scene: Scene, writer: Writer, name: str, beta: float, dtype: str) -> str:
    value = scene.array(name)
    if value is not None:
        return writer.constant("bias", value * value.dtype.type(beta), dtype)
    return writer.add("Mul", [name, writer.constant("beta", beta, dtype)], "bias")
