"""Raw scores of what is shown: one number beside each of many boxes, which the app puts through a sigmoid.

Where nothing is, such a score may be anything below zero, -6000 as well as -10, and 8 bits that reach so far tell
nothing about where something is.
"""

from collections.abc import Collection, Mapping

import numpy as np

from edgekit.graph.graph import Graph
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array

FLOOR = -8.0
"""Scores below it are all the same: a sigmoid makes less than 4e-4 of them."""

_SHAPE_OPS = frozenset({"Concat", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
# What tells scores from numbers that are predicted (depths, distances), by values alone: they reach below the first,
# where 8 bits would suffer, and not above the second, and at most this share of them lies above zero (of BlazeFace's
# 896 anchors a few). Chosen by hand on the detectors of tools/bench/quantize_zoo.py.
_LOWEST_BELOW, _HIGHEST_UP_TO = -20.0, 20.0
_MOST_POSITIVE = 0.05


def list_raw_scores(shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Returns the tensors of one number a row beside another tensor with more numbers for each of these rows."""
    tables = {shape[:-1] for shape in shapes.values() if len(shape) > 1 and shape[-1] > 1}
    return frozenset(
        name
        for name, shape in shapes.items()
        if len(shape) > 1 and shape[-1] == 1 < max(shape) and shape[:-1] in tables
    )


def find_raw_scores(graph: Graph, outputs: Mapping[str, StatedOutput]) -> frozenset[str]:
    """Returns the float outputs that are stated to be raw scores, or have their shape as far as shapes are known."""
    names = list_raw_scores({name: graph.static_shape(name) or () for name in graph.outputs}) - outputs.keys()
    names |= {name for name, stated in outputs.items() if stated.kind == "scores"}
    return frozenset(name for name in names if graph.is_float(name))


def find_sources(graph: Graph, names: Collection[str]) -> frozenset[str]:
    """Returns the tensors whose values go to some outputs, unchanged, and nowhere else."""
    found: set[str] = set()
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        readers = graph.readers(name)
        if name in graph.constants or not all(found.issuperset(node.output) for node in readers):
            continue
        found.add(name)
        maker = graph.producers.get(name)
        if maker is not None and maker.op_type in _SHAPE_OPS:
            waiting += [source for source in maker.input if graph.is_float(source)]
    return frozenset(found)


def are_raw_scores(values: Array, counts: Array | None = None) -> bool:
    """Returns True for values that are far below zero, nearly all, and never far above; each counts once, or as said.

    Numbers that are predicted, such as a depth, lie elsewhere.
    """
    weights = np.ones(values.shape) if counts is None else counts
    if not values.size or values.min() >= _LOWEST_BELOW or values.max() > _HIGHEST_UP_TO:
        return False
    return bool(weights[values > 0].sum() < _MOST_POSITIVE * weights.sum())
