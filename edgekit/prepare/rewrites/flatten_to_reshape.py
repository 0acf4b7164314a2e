"""Flatten as Reshape, which is the same and which Core ML's MLProgram format takes."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

FIX_ID = "flatten-to-reshape"
# The Reshape that equals a Flatten at an axis: 0 keeps a dimension, -1 takes the rest.
_SHAPES = {0: (1, -1), 1: (0, -1)}


def write_flattens(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Flatten at axis 0 or 1 a Reshape, in place, and returns the names of the nodes."""
    changed: list[str] = []
    for node in graph.node:
        if node.op_type != "Flatten" or node.domain or opset < 5:
            continue
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        if axis not in _SHAPES:
            continue
        shape = f"{node.name}/shape"
        graph.initializer.append(numpy_helper.from_array(np.array(_SHAPES[axis], np.int64), shape))
        node.CopyFrom(helper.make_node("Reshape", [node.input[0], shape], list(node.output), node.name))
        changed.append(node.name)
    return tuple(changed)
