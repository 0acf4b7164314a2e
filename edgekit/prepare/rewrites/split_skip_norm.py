"""ONNX Runtime's norms of a sum as an Add and the norm: providers have these, and not the two in one."""

from collections.abc import Sequence

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

FIX_ID = "split-skip-norm"
_LAYER_NORM_SINCE = 17
_SUM = 3


def split_skip_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each SkipLayerNormalization and SkipSimplifiedLayerNormalization as Add and the norm, in place.

    Returns the names of the nodes. The last bits may differ (1e-5 relative).
    """
    ops = ("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
    return replace_nodes(graph, opset, ops if opset >= _LAYER_NORM_SINCE else ops[:1], _expand)


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS or any(node.output[1:_SUM]):
        return None
    writer = Writer(graph=graph, node=node)
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    # Scale, then the shift that only the full norm has, then a bias of what is added.
    scale, *rest = node.input[2:]
    shift, bias = ("", *rest, "")[:2] if simple else (*rest, "", "")[:2]
    source = node.input[0]
    if bias:
        source = writer.add("Add", [source, bias], "biased")
    total = writer.add("Add", [source, node.input[1]], "sum")
    if len(node.output) > _SUM and node.output[_SUM]:
        # Others read the sum by this name.
        writer.nodes[-1].output[0] = total = node.output[_SUM]
    op = "SimplifiedLayerNormalization" if simple else "LayerNormalization"
    writer.add(op, [total, scale, *filter(None, [shift])], axis=-1, epsilon=node.attributes.get("epsilon", 1e-5))
    return writer.nodes
