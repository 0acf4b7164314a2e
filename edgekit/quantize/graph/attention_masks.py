"""What attention hides: huge negative numbers before a Softmax, which must not stretch the range of the scores."""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.model.tensors import Array

MASK_VALUE = -1e4
"""What stands for anything below it: a Softmax makes zero of both, and half precision holds it."""
SCORE_REACH, BIAS_REACH = 12.0, 32.0
"""How far below the highest score of a row scores still count, and how far below the highest bias biases do.

exp(-12) is 6e-6: beside 8 bits, whose step is 1/256, even a thousand of them are nothing. A bias may be added to scores
that differ by more than a reach, so it gets the more.
"""

_MOVED = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Identity", "Expand", "Cast"})
_JOINED = frozenset({"Add", "Where", "Mul", "Sub"})
_MOST_STEPS = 12


class AttentionScores(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose rows along the last axis a Softmax reads, and how far below its highest a row counts."""

    tensor: str
    reach: float


def clamp_masks(graph: onnx.GraphProto) -> None:
    """Raises constants below MASK_VALUE that become masks before a Softmax, minus infinity among them, to MASK_VALUE.

    Masks are added to scores, chosen instead of them, or are a product of 0 or 1 and such a constant.
    """
    producers = {name: node for node in graph.node for name in node.output}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in list(_nodes_before_softmax(graph, producers)):
        for index, name in enumerate(node.input):
            tensor = initializers.get(name)
            if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT:
                continue
            value = numpy_helper.to_array(tensor)
            if not _hides(value):
                continue
            bounded = f"{name}.edgekit.bounded"
            if bounded not in initializers:
                initializers[bounded] = numpy_helper.from_array(np.maximum(value, np.float32(MASK_VALUE)), bounded)
                graph.initializer.append(initializers[bounded])
            node.input[index] = bounded


def find_attention_scores(graph: onnx.GraphProto, ranks: Mapping[str, int]) -> tuple[AttentionScores, ...]:
    """Returns what may be masked scores: what a Softmax over the last axis reads, and what is added to become that.

    `ranks` says how many axes a tensor has.
    """
    producers = {name: node for node in graph.node for name in node.output}
    found: dict[str, float] = {}
    front = [
        (node.input[0], SCORE_REACH)
        for node in graph.node
        if node.op_type == "Softmax" and _axis(node) in {-1, ranks.get(node.input[0], 0) - 1}
    ]
    for _ in range(_MOST_STEPS):
        found.update((name, max(reach, found.get(name, 0.0))) for name, reach in front)
        makers = [(producers[name], reach) for name, reach in front if name in producers]
        front = [(node.input[0], reach) for node, reach in makers if node.op_type in _MOVED]
        front += [(name, BIAS_REACH) for node, _ in makers if node.op_type == "Add" for name in node.input]
    return tuple(AttentionScores(tensor=name, reach=reach) for name, reach in found.items())


def is_masked(low: float, high: float, counting: float) -> bool:
    """Returns True if the lowest value lies so far below the lowest that counts that it is there to hide."""
    return low < counting - (max(high, 0.0) - min(counting, 0.0))


def _axis(node: onnx.NodeProto) -> int:
    return next((item.i for item in node.attribute if item.name == "axis"), -1)


def _hides(value: Array) -> bool:
    return bool((value < MASK_VALUE).any()) and not np.isnan(value).any() and bool(value.max() < -MASK_VALUE)


def _nodes_before_softmax(graph: onnx.GraphProto, producers: dict[str, onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    reached: set[int] = set()
    front = [node.input[0] for node in graph.node if node.op_type == "Softmax"]
    for _ in range(_MOST_STEPS):
        nodes = {id(producers[name]): producers[name] for name in front if name in producers}
        nodes = {key: node for key, node in nodes.items() if key not in reached}
        reached.update(nodes)
        front = list[str]()
        for node in nodes.values():
            if node.op_type in _JOINED:
                yield node
            if node.op_type in _JOINED | _MOVED:
                front += node.input
