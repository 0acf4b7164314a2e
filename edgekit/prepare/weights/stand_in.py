"""Keeping operators whole that ONNX Runtime's CPU provider has no kernel for, while it optimises the graph.

It would replace each by the body of its definition, and another provider that takes the operator would never see it.
"""

import onnx
from onnx import helper

from edgekit.model.model import iterate_graphs

# Operators that change each element by itself, and the attribute that tells their stand-ins apart.
_ALPHAS = {"HardSwish": 2.0, "Mish": 3.0, "Swish": 4.0}
# It has a kernel, keeps type and shape, and no rule of the basic level knows it.
_STAND_IN = "Celu"


def put_stand_ins(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Puts a stand-in for each such node, in place, and returns the nodes by name; names must be unique."""
    replaced: dict[str, onnx.NodeProto] = {}
    for part in iterate_graphs(graph):
        for node in part.node:
            if node.op_type in _ALPHAS and not node.domain:
                replaced[node.name] = onnx.NodeProto()
                replaced[node.name].CopyFrom(node)
                del node.attribute[:]
                node.attribute.append(helper.make_attribute("alpha", _ALPHAS[node.op_type]))
                node.op_type = _STAND_IN
    return replaced


def restore_nodes(graph: onnx.GraphProto, replaced: dict[str, onnx.NodeProto]) -> bool:
    """Puts the nodes back where their stand-ins are, in place; returns False if one was folded or merged away."""
    restored = 0
    for part in iterate_graphs(graph):
        for node in part.node:
            if node.op_type == _STAND_IN and node.name in replaced:
                node.op_type = replaced[node.name].op_type
                del node.attribute[:]
                node.attribute.extend(replaced[node.name].attribute)
                restored += 1
    return restored == len(replaced)
