"""EmbedLayerNormalization as tables, a sum and the norm: ONNX Runtime's optimizers fuse the beginning of BERT."""

from collections.abc import Sequence

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes
from edgekit.prepare.rewrites.heads import input_of, real

FIX_ID = "split-embed-norm"
_LAYER_NORM_SINCE = 17
_IDS, _SEGMENTS, _WORDS, _PLACES, _KINDS, _GAIN, _SHIFT, _MASK, _POSITIONS = range(9)


def split_embed_norms(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each EmbedLayerNormalization as Gather, Add and LayerNormalization, in place.

    Returns the names of the nodes. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(
        graph, opset, {"EmbedLayerNormalization"} if opset >= _LAYER_NORM_SINCE else set[str](), _expand
    )


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    shape, table = graph.value(node.input[_IDS]).static_shape, graph.value(input_of(node, _PLACES))
    is_whole = all(node.has_input(at) for at in (_WORDS, _PLACES, _GAIN, _SHIFT))
    if shape is None or len(shape) != 2 or not is_whole or table.dtype not in FLOATS:
        return None
    if node.has_input(_SEGMENTS) != node.has_input(_KINDS) or shape[1] > (table.static_shape or (0,))[0]:
        return None
    writer = Writer(graph=graph, node=node)
    add = writer.add
    places = input_of(node, _POSITIONS) or writer.constant("places", np.arange(shape[1])[None], "int64")
    words = add("Gather", [node.input[_WORDS], node.input[_IDS]], "words", axis=0)
    total = add("Add", [words, add("Gather", [node.input[_PLACES], places], "positions", axis=0)], "placed")
    if node.has_input(_KINDS):
        total = add("Add", [total, add("Gather", [node.input[_KINDS], node.input[_SEGMENTS]], "kinds", axis=0)], "sum")
    outputs = (*node.output, "", "")
    if outputs[2]:
        writer.nodes[-1].output[0] = total = outputs[2]
    if outputs[1]:
        _count(writer, input_of(node, _MASK), outputs[1], shape[0])
    add(
        "LayerNormalization",
        [total, node.input[_GAIN], node.input[_SHIFT]],
        axis=-1,
        epsilon=real(node, "epsilon", 1e-12),
    )
    return writer.nodes


def _count(writer: Writer, mask: str, output: str, batch: int) -> None:
    """Adds what says how many rows of each text count: without a mask, as ONNX Runtime has it, none."""
    if mask:
        axes = writer.constant("axis", [1], "int64")
        writer.add("ReduceSum", [mask, axes], "counted", keepdims=0)
    else:
        writer.add("Identity", [writer.constant("none", [0] * batch, "int32")], "counted")
    writer.nodes[-1].output[0] = output
