"""Clip from zero to nothing, which is a Relu: every provider has one."""

from collections.abc import Sequence

import numpy as np
import onnx

from edgekit.prepare.rewrites.scene import FLOATS, Scene, Writer, replace_nodes

FIX_ID = "clip-to-relu"


def write_relus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each such Clip a Relu, in place, and returns the names of the nodes; both give the same for any number."""
    return replace_nodes(graph, opset, {"Clip"}, _expand) if opset >= 11 else ()


def _expand(scene: Scene, node: onnx.NodeProto) -> Sequence[onnx.NodeProto] | None:
    dtype = scene.dtype(node.input[1]) if len(node.input) > 1 else 0
    if dtype not in FLOATS:
        return None
    low = scene.number(node.input[1])
    high = scene.number(node.input[2]) if len(node.input) > 2 and node.input[2] else float("inf")
    limit = float(np.finfo(FLOATS[dtype]).max)
    if low != 0 or high is None or high < limit:
        return None
    writer = Writer(scene=scene, node=node)
    writer.add("Relu", node.input[:1])
    return writer.nodes
