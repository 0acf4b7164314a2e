"""Sum of several values as Add, which more providers have: `Sum(a, b, c)` is `Add(Add(a, b), c)`."""

import onnx
from onnx import helper

from edgekit.graph.rewrite import set_nodes

FIX_ID = "sum-to-add"
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
