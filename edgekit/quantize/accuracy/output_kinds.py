"""What an output means, as far as its values and the graph tell: classes, a map of classes, an image, or values."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from edgekit.model.tensors import Array, Tensors, ranks_classes
from edgekit.quantize.graph.graph import Graph
from edgekit.quantize.graph.raw_scores import are_raw_scores, list_raw_scores
from edgekit.quantize.ranges.nonlinearities import sigmoid

Meaning = Literal["classes", "map", "labels", "image", "values"]

_PASSED_THROUGH = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast", "Resize"})
_SQUASHING = frozenset({"Softmax", "LogSoftmax", "Sigmoid", "ArgMax"})
_MOST_CLASSES = 8192
RAW = "raw"
"""A sigmoid that the app computes."""
IMAGE_CHANNELS = frozenset({1, 3, 4})
"""Of what may be a picture."""
_LEAST_SIDE = 8
_BOX = 4
_LEAST_CONFIDENCE = 0.6
_MOST_UNEVEN = 30.0
_LEAST_LANDMARKS = 8
_SAME_SHAPE = 0.1
_MANY_CLASSES = 100


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How an output is read: what it means, along which axis its classes lie, and what squashes it ("" for nothing).

    "classes" are the scores of one decision, "map" those of many (pixels, steps, boxes), "labels" the decisions
    themselves, made by an ArgMax. Of values it is the axis of the channels, which is the shortest.
    """

    meaning: Meaning
    axis: int = 0
    squash: str = ""


def read_meanings(graph: Graph, outputs: Sequence[Tensors]) -> dict[str, Reading]:
    """Returns the meaning of each output that has one, from what a float model gave for a few samples.

    Scores that decide nothing are values, such as an embedding, whose largest entry says little. Raw scores of a map
    are told from other tensors by the confidence that they show, and by classes that are of one size.
    """
    columns = list_raw_scores({name: value.shape for name, value in outputs[0].items()})
    return {
        name: reading
        for name in outputs[0]
        for reading in _read(graph, name, [row[name] for row in outputs], is_raw_score=name in columns)
    }


def read_probabilities(value: Array, reading: Reading) -> Array:
    """Returns the probability of each class at each place, float64 [classes, places]."""
    rows = np.moveaxis(value.astype(np.float64), reading.axis, 0).reshape(value.shape[reading.axis], -1)
    if reading.squash in {"Sigmoid", RAW}:
        rows = sigmoid(rows) if reading.squash == RAW else np.clip(rows, 0, 1)
        rows = np.concatenate([1 - rows, rows]) if len(rows) == 1 else rows
        return np.asarray(rows / np.maximum(rows.sum(axis=0), 1e-12))
    if _is_distribution(rows):
        return rows
    powers = np.exp(rows - rows.max(axis=0))
    return np.asarray(powers / powers.sum(axis=0))


def read_decisions(value: Array, reading: Reading) -> Array:
    """Returns the class that is ranked first at each place, int64 [places]."""
    if reading.meaning == "labels":
        return np.asarray(value.astype(np.int64).reshape(-1))
    if reading.squash in {"Sigmoid", RAW} and value.shape[reading.axis] == 1:
        return np.asarray((value.reshape(-1) > (0 if reading.squash == RAW else 0.5)).astype(np.int64))
    return np.asarray(np.moveaxis(value, reading.axis, 0).reshape(value.shape[reading.axis], -1).argmax(axis=0))


def _read(graph: Graph, name: str, values: Sequence[Array], *, is_raw_score: bool) -> Iterator[Reading]:
    """Yields the meaning of an output, nothing where its numbers or its changing shape say none.

    A column beside a table, such as one score for each of many boxes, is no choice between its rows.
    """
    first, squash = values[0], _find_squash(graph, name)
    if any(value.shape != first.shape for value in values):
        return
    if first.dtype.kind in "iu" and squash == "ArgMax":
        yield Reading(meaning="labels")
    elif first.dtype.kind == "f" and first.size and all(np.isfinite(value).all() for value in values):
        scores = _find_places(values, squash) if is_raw_score else _find_classes(values, squash)
        yield next(scores, None) or _read_numbers(first)


def may_be_image(shape: tuple[int, ...]) -> bool:
    """Returns True for four axes with 1, 3 or 4 channels, first or last, and sides that are not tiny."""
    if len(shape) != 4:
        return False
    sides = shape[2:] if shape[1] in IMAGE_CHANNELS else shape[1:3]
    return bool({shape[1], shape[3]} & IMAGE_CHANNELS) and min(sides) >= _LEAST_SIDE


def _read_numbers(value: Array) -> Reading:
    if value.shape[:1] == (1,) and may_be_image(value.shape):
        return Reading(meaning="image")
    sizes = [(size == 1, size, axis) for axis, size in enumerate(value.shape) if axis]
    return Reading(meaning="values", axis=min(sizes, default=(True, 1, 0))[2])


def _find_places(values: Sequence[Array], squash: str) -> Iterator[Reading]:
    is_raw = not squash and are_raw_scores(np.concatenate([value.reshape(-1) for value in values]))
    meaning: Meaning = "map" if is_raw or squash == "Sigmoid" else "values"
    yield Reading(
        meaning=meaning, axis=values[0].ndim - 1, squash=RAW if is_raw else squash if meaning == "map" else ""
    )


def _find_classes(values: Sequence[Array], squash: str) -> Iterator[Reading]:
    """Yields the axis of the classes if there is one."""
    first = values[0]
    kind = "Sigmoid" if squash == "Sigmoid" else ""
    if first.size == 1:
        if kind:
            yield Reading(meaning="classes", axis=max(0, first.ndim - 1), squash=kind)
        return
    if ranks_classes(first):
        reading = Reading(meaning="classes", axis=int(np.argmax(first.shape)), squash=kind)
        is_chance = bool(squash) or all(_is_distribution(value.reshape(-1, 1)) for value in values)
        is_ranking = is_chance or not (_is_one_shape(values) or _is_rating(values))
        if is_ranking and _confidence(values, reading) > _least_confidence(first.size):
            yield reading
        return
    for axis in range(first.ndim):
        if 1 < first.shape[axis] <= _MOST_CLASSES and first.size > first.shape[axis]:
            rows = [np.moveaxis(value, axis, 0).astype(np.float64) for value in values]
            if all(_is_distribution(row) or _is_distribution(np.exp(np.minimum(row, 1))) for row in rows):
                yield Reading(meaning="map", axis=axis)
    if kind and first.ndim >= 3 and 1 in first.shape[1:]:
        yield Reading(meaning="map", axis=1 + first.shape[1:].index(1), squash=kind)
    elif not squash:
        yield from _find_raw_scores(values)


def _find_raw_scores(values: Sequence[Array]) -> Iterator[Reading]:
    first = values[0]
    if first.ndim == 4 and min(first.shape[1], first.shape[3]) not in IMAGE_CHANNELS:
        axis = 1 if first.shape[1] <= first.shape[3] else 3
    elif first.ndim == 3 and first.shape[2] > _BOX:
        axis = 2
    else:
        return
    reading = Reading(meaning="map", axis=axis)
    size = first.shape[axis]
    means = np.mean([np.abs(np.moveaxis(value, axis, 0).reshape(size, -1)).mean(axis=1) for value in values], axis=0)
    even = float(means.max()) <= _MOST_UNEVEN * float(means.min())
    if 1 < size <= _MOST_CLASSES and even and _confidence(values, reading) >= _LEAST_CONFIDENCE:
        yield reading


def _least_confidence(classes: int) -> float:
    return 1.15 / classes if classes <= 4 else 2.0 / classes


def _is_one_shape(values: Sequence[Array]) -> bool:
    """Returns True if vectors of many samples are nearly the same curve, as landmarks are: a face is a face.

    Scores differ from sample to sample by more than classes differ by themselves.
    """
    rows = np.stack([value.reshape(-1) for value in values]).astype(np.float64)
    if rows.shape[1] < _LEAST_LANDMARKS or len(rows) < 2:
        return False
    within = float((rows - rows.mean(axis=0)).var())
    return within < _SAME_SHAPE * float(rows.mean(axis=0).var())


def _is_rating(values: Sequence[Array]) -> bool:
    """Returns True if a few numbers are above zero in all samples, as ratings and sizes are; scores have both signs."""
    return values[0].size < _MANY_CLASSES and min(float(value.min()) for value in values) > 0


def _confidence(values: Sequence[Array], reading: Reading) -> float:
    return float(np.mean([read_probabilities(value, reading).max(axis=0).mean() for value in values]))


def _is_distribution(rows: Array) -> bool:
    return bool(rows.min() >= 0 and np.abs(rows.sum(axis=0) - 1).max() < 1e-2)


def _find_squash(graph: Graph, name: str) -> str:
    while name in graph.producers:
        node = graph.producers[name]
        if node.op_type in _SQUASHING:
            return node.op_type
        if node.op_type not in _PASSED_THROUGH or not node.input:
            return ""
        name = node.input[0]
    return ""
