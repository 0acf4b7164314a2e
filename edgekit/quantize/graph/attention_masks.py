"""Attention masks: large negative numbers before a Softmax, which must not stretch the range of the scores."""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.model.tensors import Array

MASK_VALUE = -1e4
"""What masks are raised to: a Softmax makes 0 of it beside any score, and float16 holds it (to -65504)."""

# exp(-12) is 6e-6: beside 8 bits, whose step is 1/256, even a thousand such scores are nothing. A bias may be added to
# scores that differ by more than that, so it gets more. Chosen by hand;
# tests/quantize/test_quantize_attention_masks.py shows the effect.
SCORE_MARGIN, BIAS_MARGIN = 12.0, 32.0
"""How far below the highest score of a row scores still count, and how far below the highest bias biases do."""

_SHAPE_OPS = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Identity", "Expand", "Cast"})
_MASKING_OPS = frozenset({"Add", "Where", "Mul", "Sub"})
# Exporters put up to about ten nodes (Unsqueeze, Cast, Sub, Mul, Where ...) between a mask and its Softmax.
_MOST_STEPS = 12


class AttentionScores(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose rows a Softmax over the last axis reads; what lies `margin` below a row's highest still counts."""

    tensor: str
    margin: float


def clamp_masks(graph: onnx.GraphProto) -> None:
    """Raises constants below MASK_VALUE that become masks before a Softmax, minus infinity among them, to MASK_VALUE.

    Masks are added to scores, chosen instead of them, or are a product of 0 or 1 and such a constant.
    """
    producers = {name: node for node in graph.node for name in node.output}
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in list(_masking_nodes(graph, producers)):
        for index, name in enumerate(node.input):
            tensor = initializers.get(name)
            if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT:
                continue
            value = numpy_helper.to_array(tensor)
            if not _is_mask(value):
                continue
            clamped = f"{name}.edgekit.bounded"
            if clamped not in initializers:
                initializers[clamped] = numpy_helper.from_array(np.maximum(value, np.float32(MASK_VALUE)), clamped)
                graph.initializer.append(initializers[clamped])
            node.input[index] = clamped


def find_attention_scores(graph: onnx.GraphProto, ranks: Mapping[str, int]) -> tuple[AttentionScores, ...]:
    """Returns what may be masked scores: what a Softmax over the last axis reads, and what is added to become that.

    `ranks` says how many axes a tensor has.
    """
    producers = {name: node for node in graph.node for name in node.output}
    found: dict[str, float] = {}
    front = [
        (node.input[0], SCORE_MARGIN)
        for node in graph.node
        if node.op_type == "Softmax" and _axis(node) in {-1, ranks.get(node.input[0], 0) - 1}
    ]
    for _ in range(_MOST_STEPS):
        found.update((name, max(margin, found.get(name, 0.0))) for name, margin in front)
        makers = [(producers[name], margin) for name, margin in front if name in producers]
        front = [(node.input[0], margin) for node, margin in makers if node.op_type in _SHAPE_OPS]
        front += [(name, BIAS_MARGIN) for node, _ in makers if node.op_type == "Add" for name in node.input]
    return tuple(AttentionScores(tensor=name, margin=margin) for name, margin in found.items())


def is_masked(low: float, high: float, lowest_counting: float) -> bool:
    """Returns True if the lowest value lies farther below the lowest that counts than that lies below the highest."""
    return low < lowest_counting - (max(high, 0.0) - min(lowest_counting, 0.0))


def _axis(node: onnx.NodeProto) -> int:
    return next((item.i for item in node.attribute if item.name == "axis"), -1)


def _is_mask(value: Array) -> bool:
    return bool((value < MASK_VALUE).any()) and not np.isnan(value).any() and bool(value.max() < -MASK_VALUE)


def _masking_nodes(graph: onnx.GraphProto, producers: dict[str, onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields the nodes through which a mask may reach a Softmax, the nearest first."""
    reached: set[int] = set()
    front = [node.input[0] for node in graph.node if node.op_type == "Softmax"]
    for _ in range(_MOST_STEPS):
        nodes = {id(producers[name]): producers[name] for name in front if name in producers}
        nodes = {key: node for key, node in nodes.items() if key not in reached}
        reached.update(nodes)
        yield from (node for node in nodes.values() if node.op_type in _MASKING_OPS)
        front = [name for node in nodes.values() if node.op_type in _MASKING_OPS | _SHAPE_OPS for name in node.input]
