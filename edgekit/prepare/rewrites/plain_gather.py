"""Gathers as QNN knows them: of numbers, and by indices of few axes.

Masks of attention are bools that are gathered: by PyTorch's dynamo exporter with a GatherND whose indices have five
axes, by TorchScript with a Gather.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "plain-gather"
_GATHERS = frozenset({"Gather", "GatherElements", "GatherND"})
_MOST = 4


def write_plain_gathers(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Gathers 32-bit integers in place of bools, and by a list of rows where a GatherND has five axes, in place.

    Returns the names of the gathers. No number changes.
    """
    return replace_nodes(graph, opset, _GATHERS, _expand)


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    rows = _read_rows(graph, node)
    is_bool = graph.value(node.input[0]).dtype == "bool"
    if rows is None and not is_bool:
        return None
    writer = Writer(graph=graph, node=node)
    value, indices = node.input[0], node.input[1]
    if is_bool:
        value = writer.add("Cast", [value], "numbers", to=onnx.TensorProto.INT32)
    if rows is not None:
        indices = writer.constant("rows", rows, "int64")
    # The last node has no part to name it: it makes the output.
    value = writer.add(node.op_type, [value, indices], "picked", **node.attributes)
    if rows is not None:
        shape = writer.constant("shape", graph.value(node.output[0]).static_shape, "int64")
        value = writer.add("Reshape", [value, shape], "shaped" if is_bool else "")
    if is_bool:
        writer.add("Cast", [value], to=onnx.TensorProto.BOOL)
    return writer.nodes


def _read_rows(graph: Graph, node: Node) -> np.ndarray | None:
    """Returns the constant indices of a GatherND of many axes as rows, None for any other node."""
    indices = graph.array(node.input[1]) if node.op_type == "GatherND" else None
    if indices is None or indices.ndim <= _MOST or node.integer("batch_dims", 0):
        return None
    return None if graph.value(node.output[0]).static_shape is None else indices.reshape(-1, indices.shape[-1])
