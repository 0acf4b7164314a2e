"""Attention masks: large negative numbers before a Softmax, which must not stretch the range of the scores."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.model.tensors import Array

MASK_VALUE = -1e4
"""What masks are raised to: a Softmax makes 0 of it beside any score, and float16 holds it (to -65504)."""

# exp(-12) is 6e-6: beside 8 bits, whose step is 1/256, even a thousand such scores are nothing. A bias may be added to
# scores that differ by more than that, so it gets more. Chosen by hand;
# tests/quantize/test_quantize_attention_masks.py shows the effect.
SCORE_MARGIN, BIAS_MARGIN = 12.0, 32.0
"""How far below the highest score of a row scores still count, and how far below the highest bias biases do."""

# What may lie between a mask and a Softmax: shapes and types of it, and how it meets the scores.
_SHAPE_OPS = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Identity", "Expand", "Cast"})
_MASKING_OPS = frozenset({"Add", "Where", "Mul", "Sub"})
# Exporters put up to about ten nodes (Unsqueeze, Cast, Sub, Mul, Where ...) between a mask and its Softmax.
_MOST_STEPS = 12


class AttentionScores(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose rows a Softmax over the last axis reads; what lies `margin` below a row's highest still counts."""

    tensor: str
    margin: float


def clamp_masks(graph: onnx.GraphProto, folder: Path = Path()) -> None:
    """Raises constants below MASK_VALUE that become masks before a Softmax, minus infinity among them, to MASK_VALUE.

    Masks are added to scores, chosen instead of them, or are a product of 0 or 1 and such a constant. External data lie
    in `folder`.
    """
    view, made = view_part(graph, folder=folder), set[str]()
    for node in _masking_nodes(view):
        for index, name in enumerate(node.input):
            value = view.constant(name) if view.is_float_constant(name) else None
            if value is None or not _is_mask(value):
                continue
            clamped = f"{name}.edgekit.bounded"
            if clamped not in made:
                made.add(clamped)
                clamped_value = np.maximum(value, np.float32(MASK_VALUE))
                graph.initializer.append(numpy_helper.from_array(clamped_value, clamped))
            node.proto.input[index] = clamped


def find_attention_scores(graph: Graph) -> tuple[AttentionScores, ...]:
    """Returns what may be masked scores: what a Softmax over the last axis reads, and what is added to become that."""
    found: dict[str, float] = {}
    front = [
        (node.input[0], SCORE_MARGIN)
        for node in graph.nodes
        if node.op_type == "Softmax" and node.integer("axis", -1) in {-1, len(graph.dims(node.input[0])) - 1}
    ]
    for _ in range(_MOST_STEPS):
        found.update((name, max(margin, found.get(name, 0.0))) for name, margin in front)
        makers = [(graph.producers[name], margin) for name, margin in front if name in graph.producers]
        front = [(node.input[0], margin) for node, margin in makers if node.op_type in _SHAPE_OPS]
        front += [(name, BIAS_MARGIN) for node, _ in makers if node.op_type == "Add" for name in node.input]
    return tuple(AttentionScores(tensor=name, margin=margin) for name, margin in found.items())


def is_masked(low: float, high: float, lowest_counting: float) -> bool:
    """Returns True if the lowest value lies farther below the lowest that counts than that lies below the highest."""
    return low < lowest_counting - (max(high, 0.0) - min(lowest_counting, 0.0))


def _is_mask(value: Array) -> bool:
    return bool((value < MASK_VALUE).any()) and not np.isnan(value).any() and bool(value.max() < -MASK_VALUE)


def _masking_nodes(graph: Graph) -> Iterator[Node]:
    """Yields the nodes through which a mask may reach a Softmax, the nearest first."""
    reached: set[Node] = set()
    front = [node.input[0] for node in graph.nodes if node.op_type == "Softmax"]
    for _ in range(_MOST_STEPS):
        nodes = dict.fromkeys(graph.producers[name] for name in front if name in graph.producers)
        new = [node for node in nodes if node not in reached]
        reached.update(new)
        yield from (node for node in new if node.op_type in _MASKING_OPS)
        front = [name for node in new if node.op_type in _MASKING_OPS | _SHAPE_OPS for name in node.input]
