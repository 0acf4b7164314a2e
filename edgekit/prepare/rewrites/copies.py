"""Identity and Dropout, which only hand their input on when a model runs."""

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.graph.rewrite import set_nodes

FIX_ID = "drop-copies"


def drop_copies(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Removes each Identity, and each Dropout whose mask nothing reads, in place; returns the names of the nodes.

    One that makes an output of the graph stays, and so does one that a body reads, or that trains.
    """
    view = view_part(graph, opset)
    dropped = [node for node in view.nodes if _only_copies(view, node)]
    source = {node.output[0]: node.input[0] for node in dropped}
    kept = [node for node in graph.node if not node.output or node.output[0] not in source]
    for node in kept:
        for at, name in enumerate(node.input):
            while name in source:
                name = source[name]  # noqa: PLW2901 - follows a chain of copies
            node.input[at] = name
    if dropped:
        set_nodes(graph, kept)
    return tuple(sorted({node.proto.name for node in dropped}))


def _only_copies(graph: Graph, node: Node) -> bool:
    if node.domain or node.op_type not in {"Identity", "Dropout"} or not node.input[0] or not node.output[0]:
        return False
    hidden = graph.outputs | graph.captured
    if node.output[0] in hidden or any(name in graph.consumers or name in hidden for name in node.output[1:] if name):
        return False
    trains = graph.array(node.input[2]) if node.has_input(2) else np.False_
    return trains is not None and not trains
