"""Elementwise functions that alone read a tensor, such as SiLU: errors of its range count after them."""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from edgekit.graph.graph import Graph, Node
from edgekit.model.outputs import StatedOutput
from edgekit.model.tensors import Array
from edgekit.quantize.graph.raw_scores import FLOOR, are_raw_scores, find_raw_scores, find_sources
from edgekit.quantize.ranges.histogram import Histogram

Nonlinearity = Callable[[Array], Array]
"""What the graph computes from a tensor at once, elementwise."""

# One sixth is a rounded number in files.
_CLOSE = 1e-5


def sigmoid(values: Array) -> Array:
    """Returns the sigmoid of values, which does not overflow."""
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -80, 80))))


def softmax(values: Array, axis: int | None = -1) -> Array:
    """Returns the softmax of values along an axis, or of all where that is None, which does not overflow."""
    powers = np.exp(values - values.max(axis=axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True))


def _raw_score(values: Array) -> Array:
    """What an app makes of a raw score; it counts only where the values look like scores."""
    return sigmoid(values)


def _stated_score(values: Array) -> Array:
    """What an app makes of what is stated to be a raw score, whatever its values look like."""
    return sigmoid(values)


def _hard_swish(values: Array) -> Array:
    return values * np.clip(values / 6 + 0.5, 0, 1)


def _silu(values: Array) -> Array:
    return values * sigmoid(values)


_BY_OP: dict[str, Nonlinearity] = {"Sigmoid": sigmoid, "Tanh": np.tanh, "HardSwish": _hard_swish}
# Where a function does not change any more, or by less than a step of 8 bits: 3e-4, 7e-4, 0 and 3e-3.
_SATURATION: dict[Nonlinearity, tuple[float, float]] = {
    sigmoid: (-8.0, 8.0),
    _raw_score: (FLOOR, math.inf),
    _stated_score: (FLOOR, math.inf),
    np.tanh: (-4.0, 4.0),
    _hard_swish: (-3.0, math.inf),
    _silu: (-8.0, math.inf),
}


def saturation_of(reader: Nonlinearity | None) -> tuple[float, float]:
    """Returns between which values a function changes."""
    return _SATURATION.get(reader, (-math.inf, math.inf)) if reader else (-math.inf, math.inf)


def find_nonlinearities(graph: Graph, outputs: Mapping[str, StatedOutput]) -> dict[str, Nonlinearity]:
    """Returns the tensors that only an elementwise function reads, such as x * sigmoid(x), with that function."""
    raw_scores = find_raw_scores(graph, outputs)
    readers: dict[str, Nonlinearity] = dict.fromkeys(find_sources(graph, raw_scores), _raw_score)
    readers |= dict.fromkeys(find_sources(graph, raw_scores & outputs.keys()), _stated_score)
    hidden = graph.outputs | graph.captured | graph.constants.keys()
    for name in (name for name in graph.consumers if name not in hidden):
        nodes = graph.readers(name)
        ops = sorted(node.op_type for node in nodes)
        if len(ops) == 1 and ops[0] in _BY_OP:
            readers[name] = _BY_OP[ops[0]]
        elif len(ops) == 2 and "Mul" in ops:
            readers.update((name, reader) for reader in _find_silu(graph, name, nodes))
    return readers


def match_nonlinearity(reader: Nonlinearity | None, histogram: Histogram) -> Nonlinearity | None:
    """Returns what is done with values like these: raw scores are told by what they are, besides where they go."""
    return None if reader is _raw_score and not are_raw_scores(histogram.centers, histogram.counts) else reader


def _find_silu(graph: Graph, name: str, nodes: tuple[Node, ...]) -> Iterator[Nonlinearity]:
    """Yields SiLU or HardSwish where two nodes begin it: one is the product, the other leads to it by itself."""
    for product, first in (nodes, nodes[::-1]):
        steps: list[Node] = []
        node = first
        while node is not product:
            steps.append(node)
            readers = graph.readers(node.output[0])
            node = readers[0] if len(readers) == 1 else product
        if steps and set(product.input) == {name, steps[-1].output[0]}:
            if [step.op_type for step in steps] == ["Sigmoid"]:
                yield _silu
            elif _is_hard_sigmoid(graph, steps):
                yield _hard_swish


def _is_hard_sigmoid(graph: Graph, steps: list[Node]) -> bool:
    """Returns True for Clip(x + 3, 0, 6), scaled or not, and for HardSigmoid with a slope of one sixth."""
    ops = [step.op_type for step in steps]
    if ops == ["HardSigmoid"]:
        alpha = float(steps[0].attributes.get("alpha", 0.2))
        return math.isclose(alpha, 1 / 6, abs_tol=_CLOSE)
    if ops[:2] != ["Add", "Clip"] or not set(ops[2:]) <= {"Mul", "Div"}:
        return False
    constants = [graph.constant(name) for step in steps[:2] for name in step.input]
    return [value.item() for value in constants if value is not None and value.size == 1] == [3.0, 0.0, 6.0]
