"""Finds the tensors by which two models are compared, and recognizes raw scores."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from edgekit.graph.constants import MOVES
from edgekit.graph.graph import Graph
from edgekit.graph.match import find_infinite_tensors
from edgekit.model.tensors import Array
from edgekit.quantize.graph.float_regions import find_list_sources

# Raw scores differ from predicted numbers, such as depths and distances, only by their values: the lowest lies below
# the first bound (where 8 bits would be too few), none lies above the second, and at most this share is positive (a few
# of BlazeFace's 896 anchors). Chosen by hand on the detectors of tools/bench/quantize_zoo.py.
_LOWEST_BELOW, _HIGHEST_UP_TO = -20.0, 20.0
_MOST_POSITIVE = 0.05


def list_raw_scores(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Returns the tensors with one number per row, if another tensor has several numbers for the same rows."""
    tables = {shape[:-1] for shape in shapes.values() if len(shape) > 1 and shape[-1] > 1}
    return frozenset(
        name
        for name, shape in shapes.items()
        if len(shape) > 1 and shape[-1] == 1 < max(shape) and shape[:-1] in tables
    )


def are_raw_scores(values: Array) -> bool:
    """Returns True if nearly all values are negative, some far below zero and none far above."""
    if not values.size or values.min() >= _LOWEST_BELOW or values.max() > _HIGHEST_UP_TO:
        return False
    return bool(np.count_nonzero(values > 0) < _MOST_POSITIVE * values.size)


# Operators that may lie between a compared tensor and an output.
_SHAPE_OPS = MOVES | {"Identity", "Cast"}
CHOOSING_OPS = frozenset({"ArgMax", "ArgMin"})
"""The operators that find the entry of a class, or the nearest one of a code book."""
SQUASHING_OPS = frozenset({"Softmax", "LogSoftmax", "Sigmoid"})
"""The operators that make probabilities."""
_SELECTION_OPS = CHOOSING_OPS | {"TopK"}
# The mean error of fewer values is mostly chance: with n values it is off by about 1 / sqrt(2 n), 12 % for 32.
# Detectors concatenate a few parts (boxes, scores, landmarks), sequences more. Both chosen by hand.
_FEW_VALUES = 32
_MOST_PARTS = 8


class ComparedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor to compare: an output, or the tensor before one, such as the logits that a Softmax reads.

    Attributes:
        tensor: its name.
        reader: the node that reads it, such as the Softmax; "" for an output.
        centred: whether only differences between the values count, as before a Softmax. Errors are not measured after
            it, where those of logits vanish or explode with the confidence.
        part: (axis, start, stop) of one part of a tensor that is concatenated from several, such as boxes and scores:
            the largest part would hide the errors of the others.
        family: the distribution whose logits it holds, "" for plain numbers (`edgekit.quantize.objective`).
        axis: the axis of the classes.
    """

    tensor: str
    reader: str
    centred: bool
    part: tuple[int, int, int] | None = None
    family: Literal["", "classes", "scores"] = ""
    axis: int = 0


def find_compared_tensors(graph: Graph) -> tuple[ComparedTensor, ...]:
    """Returns the float tensors that are compared for the outputs of a graph."""
    found: list[ComparedTensor] = []
    infinite = find_infinite_tensors(graph)
    for output in (value.name for value in graph.proto.output):
        traced = _trace_back(graph, output)
        # For a ranked list, the tensors that its numbers come from are compared instead: if two of its rows change
        # places, all their numbers differ, though nothing is wrong.
        made_of = find_list_sources(graph, output) if traced.tensor == output else ()
        for compared in [_trace_back(graph, name) for name in made_of] or [traced]:
            if not graph.is_float(compared.tensor) or compared.tensor in infinite:
                continue
            parts = None if compared.centred else _find_parts(graph, compared.tensor)
            spans = [(parts[0], *span) for span in pairwise(parts[1])] if parts is not None else [None]
            found += [msgspec.structs.replace(compared, part=span) for span in spans]
            # The errors of few values are mostly chance: the input of the layer that makes them is compared too.
            name = compared.tensor
            while math.prod(graph.static_shape(name) or (_FEW_VALUES,)) < _FEW_VALUES and name in graph.producers:
                node = graph.producers[name]
                name = node.input[0]
                if node.op_type in {"Conv", "Gemm", "MatMul"} and graph.is_float(name) and name in graph.producers:
                    found.append(ComparedTensor(tensor=name, reader=node.name, centred=False))
                    break
    return tuple(dict.fromkeys(found))


def _trace_back(graph: Graph, output: str) -> ComparedTensor:
    """Returns the tensor of an output before a Softmax or Sigmoid, or before its best entries were selected."""
    found, name = ComparedTensor(tensor=output, reader="", centred=False), output
    while name in graph.producers and graph.producers[name].op_type in _SHAPE_OPS | _SELECTION_OPS | SQUASHING_OPS:
        node = graph.producers[name]
        name = node.input[0]
        if node.op_type in SQUASHING_OPS:
            return ComparedTensor(tensor=name, reader=node.name, centred=node.op_type != "Sigmoid")
        if node.op_type in _SELECTION_OPS:
            found = ComparedTensor(tensor=name, reader=node.name, centred=False)
    return found


def _find_parts(graph: Graph, name: str) -> tuple[int, tuple[int, ...]] | None:
    """Returns the axis along which a tensor is concatenated, and the ends of its parts; None if it is not.

    If a tensor is concatenated from several levels of a network, its parts are those within a level, if all levels have
    the same.
    """
    node, shape = graph.producers.get(name), graph.static_shape(name)
    if node is None or shape is None:
        return None
    if node.op_type == "Concat":
        axis = node.integer("axis", 0) % len(shape)
        parts = {_find_parts(graph, each) for each in node.input}
        only = next(iter(parts)) if len(parts) == 1 else None
        if only is not None and only[0] != axis:
            return only
        shapes = [graph.static_shape(each) for each in node.input]
        if len(shapes) > _MOST_PARTS or any(each is None for each in shapes):
            return None
        sizes = [each[axis] for each in shapes if each is not None]
        return axis, tuple(int(end) for end in np.cumsum([0, *sizes]))
    inner = _find_parts(graph, node.input[0]) if node.op_type in _SHAPE_OPS | {"Sigmoid"} else None
    if inner is None:
        return None
    axis, ends = inner
    if node.op_type == "Transpose":
        order = node.entries("perm") or tuple(range(len(shape)))[::-1]
        return order.index(axis), ends
    return inner if graph.dims(node.input[0])[: axis + 1] == shape[: axis + 1] else None
