"""Optional inputs that are given an empty name at the end of a list, where leaving them out means the same.

NNAPI's Conv takes a third name for a bias without looking whether it is empty (the facts of 2026-11-20).
"""

import onnx

FIX_ID = "trailing-inputs"


def drop_trailing_inputs(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:  # noqa: ARG001 - the signature of a fix
    """Leaves out the empty names at the end of each node's inputs, in place, and returns the names of the nodes."""
    changed: list[str] = []
    for node in graph.node:
        if node.input and not node.input[-1]:
            while node.input and not node.input[-1]:
                del node.input[-1]
            changed.append(node.name)
    return tuple(changed)
