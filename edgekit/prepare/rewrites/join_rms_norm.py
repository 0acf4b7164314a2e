"""RMS normalisation written as one node: exporters before opset 23 take it apart."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import made_by, mean_of, quotient_of, root_of, square_of, vector_beside
from edgekit.graph.rewrite import Writer, replace_nodes

FIX_ID = "join-rms-norm"
_SINCE = 23


def join_rms_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each x / sqrt(mean(x * x) + epsilon) * scale over the last axis as one node, in place.

    That is ONNX's RMSNormalization from opset 23 on, and before it ONNX Runtime's SimplifiedLayerNormalization. Returns
    the names of the nodes that end such a pattern. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(graph, opset, {"Mul"}, lambda view, node: _join(view, node, opset))


def _join(graph: Graph, node: Node, opset: int) -> Sequence[onnx.NodeProto] | None:
    scaled = vector_beside(graph, node)
    quotient = quotient_of(graph, scaled[0]) if scaled is not None else None
    root = root_of(graph, quotient[1]) if quotient is not None else None
    if scaled is None or quotient is None or root is None:
        return None
    if square_of(graph, mean_of(graph, root[0]) or "") != quotient[0] or not _is_float(graph, quotient[0]):
        return None
    if _is_centred(graph, quotient[0]):
        return None
    writer = Writer(graph=graph, node=node)
    op = "RMSNormalization" if opset >= _SINCE else "SimplifiedLayerNormalization"
    writer.add(op, [quotient[0], scaled[1]], axis=-1, epsilon=root[1])
    return writer.nodes


def _is_centred(graph: Graph, name: str) -> bool:
    """Returns True for x - mean(x): that is a layer normalisation, taken apart for who has neither."""
    node = made_by(graph, name, "Sub")
    return node is not None and mean_of(graph, node.input[1]) == node.input[0]


def _is_float(graph: Graph, name: str) -> bool:
    # What lies beside a constant of float32 has its type, also where nothing was inferred.
    return name not in graph.constants and graph.value(name).dtype in {None, "float32"}
