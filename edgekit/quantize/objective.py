"""The one objective of planning: how much of the information in a model's outputs is lost.

Every output is interpreted as the parameters of a distribution: class logits as those of a categorical one, scores
before a sigmoid as those of a Bernoulli one, all other numbers as the mean of a Gaussian. It is transformed so that its
Fisher information is constant, and an error of a given size costs the same everywhere: probabilities by their square
roots, other numbers not at all. The objective is the signal-to-noise ratio of the transformed outputs. It chooses range
methods, roundings and bits. The squared distance of square roots of probabilities is twice the squared Hellinger
distance. For small errors it is half the Kullback-Leibler divergence; for large ones it is bounded, where the
divergence grows with the model's confidence (S. Amari and H. Nagaoka, "Methods of Information Geometry", 2000, 2.2 and
3.2).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from edgekit.graph.constants import MOVES
from edgekit.graph.graph import Graph
from edgekit.graph.match import walk
from edgekit.model.tensors import Array
from edgekit.quantize.accuracy.loss import measure_powers
from edgekit.quantize.accuracy.output_kinds import KIND_SAMPLES, RAW, read_output_kinds
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.graph.compared_tensors import ComparedTensor, find_compared_tensors
from edgekit.quantize.graph.layers import sample_positions
from edgekit.quantize.ranges import TensorRange

# Operators between logits and the output that keep logits logits: they move or interpolate values.
_ORDERLY = MOVES | {"Identity", "Resize", "Upsample"}
# Operators that decide between classes, with their default axis (ONNX operators, opset 13).
_DECIDING = {"ArgMax": 0, "LogSoftmax": -1, "Softmax": -1}
FAITHFUL_DB = 40.0
"""From this ratio on, where the noise power is 1/10,000 of the signal's, no better rounding is searched: a choice."""
# The number of values that are compared: a choice, to save time.
_MOST_VALUES = 1 << 18


def find_objective(graph: Graph, calibration: Calibration) -> tuple[ComparedTensor, ...]:
    """Returns the tensors that are compared for the outputs of a graph, each with its kind of distribution.

    Logits and scores are treated as such only if a sample makes many decisions, as a segmentation map does. With one
    decision per sample the few held-out decisions say too little: then all logits count alike, which is the limit of a
    high temperature.
    """
    compared = find_compared_tensors(graph)
    held = read_held_out(Path(calibration.statistics)) if calibration.statistics else ()
    rows = [expected for _, expected in islice(held, KIND_SAMPLES)]
    shown = [{each.tensor: row[each.tensor] for each in compared if each.tensor in graph.outputs} for row in rows]
    readings = read_output_kinds(graph, shown, calibration.outputs) if shown and shown[0] else {}
    readers = {node.name: node for node in graph.nodes}
    stated_values = {name for name, each in calibration.outputs.items() if each.kind in {"values", "embedding"}}
    found = list[ComparedTensor]()
    for each in compared:
        reading, node = readings.get(each.tensor), readers.get(each.reader)
        family, axis, dims = "", 0, graph.dims(each.tensor)
        # [1, classes] has one position; [steps, classes], without an axis of rows, has several.
        has_positions = len(dims) > 2 or (len(dims) == 2 and isinstance(dims[0], int) and dims[0] > 1)
        if node is not None and has_positions:
            if node.op_type in _DECIDING:
                family, axis = "classes", node.integer("axis", _DECIDING[node.op_type])
            elif node.op_type == "Sigmoid" and stated_values.isdisjoint(_list_following(graph, node.output[0])):
                family = "scores"
        elif node is None and reading is not None and reading.kind in {"map", "sequence", "tokens"}:
            # A sigmoid in the graph is handled above, by the tensor before it; here the app computes it.
            family, axis = {"": "classes", RAW: "scores"}.get(reading.squash, ""), reading.axis
        shape = graph.static_shape(each.tensor)
        # [1, 1, 1, 1] and [1, classes, 1, 1] are one decision.
        is_one = shape is not None and math.prod(shape) == (shape[axis] if family == "classes" else 1)
        is_apart = each.part is None or each.part[0] != axis % len(dims)
        decides = family and is_apart and not is_one
        found.append(msgspec.structs.replace(each, family=family, axis=axis, centred=False) if decides else each)
    return tuple(found)


def measure_loss(compared: ComparedTensor, expected: Array) -> Callable[[Array], Array]:
    """Returns a function of another model's tensor: [signal, noise], float64 [2].

    They are the power of the float model's tensor, `expected`, and of the other's error, both transformed (see the
    module). If quantization changed the number of values, as it may after a NonZero, the noise is infinite.
    """

    def pick(value: Array) -> Array:
        if compared.part is not None:
            axis, start, stop = compared.part
            value = np.take(value, range(start, stop), axis)
        if compared.family and value.size:
            # Logits [decisions, classes], or scores [decisions, 1], at positions spread over the tensor. The decisions
            # lie side by side in memory: numpy is slow to reduce a last axis of two classes.
            classes = value.shape[compared.axis] if compared.family == "classes" else 1
            columns = (np.moveaxis(value, compared.axis, 0) if classes > 1 else value).reshape(classes, -1)
            most = max(1, _MOST_VALUES // classes)
            count = columns.shape[1]
            return (columns if count <= most else columns[:, sample_positions(count, most)]).T
        return value - value.mean(axis=-1, keepdims=True, dtype=np.float64) if compared.centred else value

    one = pick(expected)
    decide = measure_classes if compared.family == "classes" else measure_scores
    lose = decide(one) if compared.family and one.size else None

    def measure(found: Array) -> Array:
        if expected.size != found.size:
            return np.array([1.0, np.inf])
        two = pick(found.reshape(expected.shape))
        if lose is None:
            return measure_powers(one, two)
        signal, noise = lose(two)
        return np.array([signal, noise.sum()])

    return measure


def measure_classes(logits: Array) -> Callable[[Array], tuple[float, Array]]:
    """Returns a function of other logits [N, classes]: the power of transformed `logits` around their mean, and errors.

    The squared error [N] is that of each transformed decision.
    """
    one = _root_probabilities(logits)
    signal = float(((one - one.mean(axis=1, keepdims=True)) ** 2).sum(dtype=np.float64))
    return lambda others: (signal, ((one - _root_probabilities(others)) ** 2).sum(axis=0))


def measure_scores(scores: Array) -> Callable[[Array], tuple[float, Array]]:
    """Returns the same for scores [N, 1] before a sigmoid, taken as two classes with the logits (score, 0)."""

    def widen(value: Array) -> Array:
        return np.concatenate([value, np.zeros_like(value)], axis=1)

    lose = measure_classes(widen(scores))
    return lambda others: lose(widen(others))


def _root_probabilities(logits: Array) -> Array:
    """Returns the square roots of probabilities [classes, N], whose Fisher information as a categorical is constant."""
    columns = np.ascontiguousarray(logits.T, np.float32)
    roots = np.exp(0.5 * (columns - columns.max(axis=0)))
    return np.asarray(roots / np.sqrt((roots**2).sum(axis=0)))


def _list_following(graph: Graph, name: str, ops: frozenset[str] = _ORDERLY | {"Concat"}) -> Iterator[str]:
    return walk([name], lambda at: (node.output[0] for node in graph.readers(at) if node.op_type in ops))


def set_range(graph: Graph, ranges: Mapping[str, TensorRange], name: str, span: TensorRange) -> dict[str, TensorRange]:
    """Returns the ranges with `span` for a tensor and for tensors that only move its values."""
    moved = frozenset(_list_following(graph, name, _ORDERLY))
    return {each: span if each in moved else its for each, its in ranges.items()}


def find_enlarged(graph: Graph, calibration: Calibration) -> tuple[str, ...]:
    """Returns the tensors of interpolated class logits: from the output of a Resize to the compared tensor.

    If interpolated logits are rounded to 8 bits again, two classes often have equal logits at the border between them,
    and ArgMax then takes the first. A small segmentation network with dilated layers lost 0.41 points on qnn, and 0.21
    without that rounding (measured once, the program is gone).
    """
    found = dict[str, None]()
    for each in find_objective(graph, calibration):
        path, name = list[str](), each.tensor
        while each.family == "classes" and (maker := graph.producers.get(name)) and maker.op_type in _ORDERLY:
            path.append(name)
            if maker.op_type in {"Resize", "Upsample"} and maker.attributes.get("mode", "nearest") != "nearest":
                found |= dict.fromkeys(path)
            name = maker.input[0]
    return tuple(found)
