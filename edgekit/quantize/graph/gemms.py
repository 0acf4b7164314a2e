"""Gemm with a computed bias, which no integer kernel takes, as the MatMul and the Add that are quantized each."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes
from edgekit.model.model import drop_unread

_OPSET = 13  # the lowest that is quantized


def split_gemms(graph: onnx.GraphProto, folder: Path = Path()) -> tuple[str, ...]:
    """Makes a MatMul and an Add of each Gemm whose bias is computed, in place, and returns the names of the nodes.

    ONNX Runtime writes such a Gemm where the products of a recurrent cell are added (MatMulAddFusion). Its integer
    Gemm adds a constant of 32 bits alone, so between Q and DQ nodes it would stay float
    (`qdq_transformer/selectors_actions/qdq_selectors.cc`, GemmNodeGroupSelector).
    """
    split = replace_nodes(graph, _OPSET, {"Gemm"}, _expand, folder)
    if split:
        drop_unread(graph)
    return split


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if not node.has_input(2) or node.input[2] in graph.constants:
        return None
    dtype = next((kind for name in node.input if (kind := graph.value(name).dtype)), None)
    alpha, beta = (float(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    # A graph may hold no type of an inner tensor, which only factors need.
    if dtype not in FLOATS and (alpha, beta) != (1.0, 1.0):
        return None
    writer = Writer(graph=graph, node=node)
    left, right, bias = node.input
    if node.integer("transA", 0):
        left = writer.add("Transpose", [left], "left", perm=[1, 0])
    if node.integer("transB", 0):
        right = _transpose(graph, writer, right)
    if alpha != 1:
        left = writer.add("Mul", [left, writer.constant("alpha", alpha, str(dtype))], "scaled")
    if beta != 1:
        bias = writer.add("Mul", [bias, writer.constant("beta", beta, str(dtype))], "bias")
    writer.add("Add", [writer.add("MatMul", [left, right], "product"), bias])
    product, total = writer.nodes[-2:]
    # The node with the weight is the one that is known by the name.
    product.name, total.name = total.name, f"{total.name}/sum"
    return writer.nodes


def _transpose(graph: Graph, writer: Writer, name: str) -> str:
    """Returns the transposed matrix: a weight has to stay a constant."""
    value = graph.constant(name)
    if value is None:
        return writer.add("Transpose", [name], "right", perm=[1, 0])
    return writer.constant("weight", np.ascontiguousarray(value.T), value.dtype.name)
