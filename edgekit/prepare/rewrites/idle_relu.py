"""Relu before a Q node whose zero point is the smallest integer: the Q node alone cuts off what is below zero.

ONNX Runtime drops it on the CPU only, and late (`relu_quant_fusion.cc`); a provider sees a Relu that is no part of a
quantized group.
"""

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.graph.rewrite import set_nodes

FIX_ID = "idle-relu"


def drop_idle_relus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Removes each Relu that only such Q nodes read, in place, and returns the names of the nodes."""
    view = view_part(graph, opset)
    dropped: dict[str, str] = {}
    for node in view.nodes:
        quantizers = view.readers(node.output[0]) if node.op_type == "Relu" and not node.domain else ()
        hidden = node.output[0] in view.outputs
        if not quantizers or hidden or not all(_cuts_at_zero(view, quantizer) for quantizer in quantizers):
            continue
        for quantizer in quantizers:
            quantizer.proto.input[0] = node.input[0]
        dropped[node.output[0]] = node.proto.name
    set_nodes(graph, [node for node in graph.node if not node.output or node.output[0] not in dropped])
    return tuple(dropped.values())


def _cuts_at_zero(graph: Graph, node: Node) -> bool:
    if node.op_type != "QuantizeLinear":
        return False
    if not node.has_input(2):
        # Without a zero point the type is uint8 and the zero point 0, unless opset 21's attribute says otherwise.
        return "output_dtype" not in node.attributes
    zero = graph.array(node.input[2])
    return zero is not None and zero.dtype.kind in "iu" and bool(np.all(zero == np.iinfo(zero.dtype).min))
