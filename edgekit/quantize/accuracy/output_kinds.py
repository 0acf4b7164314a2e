"""The kind of each output: as the user stated it, or guessed from its values and the graph."""

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Literal

import msgspec
import numpy as np

from edgekit.data.intervals import wilson_interval
from edgekit.graph.constants import MOVES
from edgekit.graph.graph import Graph
from edgekit.graph.match import walk
from edgekit.model.tensors import Array, Reading, StatedOutput, Tensors, is_numeric, is_text, ranks_classes
from edgekit.quantize.accuracy.readouts import find_origins, find_readout
from edgekit.quantize.graph.compared_tensors import CHOOSING_OPS, SQUASHING_OPS, are_raw_scores, list_raw_scores
from edgekit.quantize.ranges import sigmoid, softmax

_SHAPE_OPS = MOVES | {"Identity", "Cast", "Resize"}
_WHOLE = frozenset({"bool", "int32", "int64"})
# The kinds whose scores rank classes, so that a change costs what the model's confidence in both differs by.
_RANKED = frozenset({"classes", "map", "sequence", "tokens"})
# Operators that decide, or make probabilities by which the app decides.
_DECIDING_OPS = CHOOSING_OPS | SQUASHING_OPS
# The mean of probabilities, such as those of moments of a sound, is one.
_MEANS = frozenset({"ReduceMean", "AveragePool", "GlobalAveragePool"})
KIND_SAMPLES = 16
"""From so many samples the kinds of outputs are guessed: a choice. Fewer may all show no object, or only positive
scores."""
RAW = "raw"
"""The `squash` of scores to which the app applies the sigmoid."""
IMAGE_CHANNELS = frozenset({1, 3, 4})
"""Grey, RGB and RGBA."""
# The shortest side of an image output: a choice.
_LEAST_SIDE = 8
WHITES = (1.0, 255.0)
"""The value of white: of floats, and of bytes."""
# The bounds of the brightest pixel of a few images, relative to white; sharpening overshoots white. Choices.
_LEAST_WHITE, _MOST_WHITE = 0.2, 1.5
# An axis with more entries holds places, not classes, unless it sums to one or is the output axis of a layer.
_MOST_CLASSES = 8192
# A sequence has at most so many steps; more are boxes or pixels: a choice.
_MOST_STEPS = 512
# A last axis of at most so many entries holds box coordinates, not classes.
_BOX = 4
# The next bounds tell raw scores from other numbers where the graph has no Softmax, Sigmoid or ArgMax. All are chosen
# by hand: each was added for a network that was misread, and together they read the outputs of the zoo and of models
# from packages correctly. The first is the least mean of the highest probability, computed as if a map's values were
# logits; feature maps have less.
_LEAST_CONFIDENCE = 0.6
# The largest ratio of the mean magnitudes of two classes of a map (boxes in pixels have a larger one), and the number
# of classes above which outliers are left out.
_MOST_UNEVEN, _THOUSANDS = 30.0, 2000
# An embedding has at least so many numbers, a choice, and is of unit length if the sum of its squares is 1 to within
# the second number.
_LEAST_EMBEDDING, _UNIT = 8, 1e-3
# Landmarks are as many numbers or more.
_LEAST_LANDMARKS = 8
# The least skewness of class scores over 16 samples, a choice: seven classifiers have 0.24 to 1.33, and the vectors of
# five speaker, sentence and sound encoders -0.14 to 0.16 (docs/concepts/accuracy.md, "Classes or a vector").
_LEAST_SKEWNESS = 0.25
# Landmarks vary from sample to sample by less than this share of how the mean of each varies.
_SAME_SHAPE = 0.1
# The coordinates of so many numbers or more move together along x, as along y and z: the least difference of the mean
# correlation of numbers of one axis and of others. 620 tables of random scores of 2 to 32 features have at most 0.32,
# the 21 points of a hand 0.53. Fewer numbers reach it by chance.
_LEAST_POINTS, _MOVES_TOGETHER = 30, 0.35
# Of the places where a peak has half of its height, at most the first share has nine tenths (of a Gaussian's 0.15, of a
# mask's all). Most of its map has less than the second share of its height.
_FLAT_TOP, _GROUND = 0.5, 0.1
# The share of heatmaps that may have no single peak, such as where a joint could be in two places: a choice.
_OTHERS = 0.1
VISIBLE = 0.3
"""A heatmap shows something if its highest value is this share of the highest of all maps and samples: a choice."""
# A sample has fewer ratings, or numbers beside a decision, than this: more of them are something else.
_MANY_CLASSES = 100


def read_output_kinds(
    graph: Graph, outputs: Sequence[Tensors], stated: Mapping[str, StatedOutput]
) -> dict[str, Reading]:
    """Returns the kind and the axes of each output that can be judged, from the float model's outputs for some samples.

    If the user stated no kind, it is guessed. Numbers that decide nothing, such as those of an embedding, are values.
    Logits of a map are recognized because their softmax is confident and all classes have scores of similar size.
    """
    raw_scores = list_raw_scores({name: value.shape for name, value in outputs[0].items()})
    found: dict[str, Reading] = {}
    has_numbers = any(map(is_numeric, outputs[0].values()))
    for name, first in outputs[0].items():
        values = [row[name] for row in outputs]
        if any(value.shape != first.shape for value in values):
            continue
        # A text beside scores only names the class that wins.
        if is_text(first) and has_numbers and name not in stated:
            continue
        is_score = not _stands_beside_decisions(graph, name, outputs[0])
        guess = _guess_reading(graph, name, values, is_raw_score=name in raw_scores, is_score=is_score)
        if guess and guess.kind == "map" and _is_sequence(name, guess.axis, guess.squash, outputs[0]):
            guess = msgspec.structs.replace(guess, kind=_find_step_kind(graph, first, guess.axis))
        if guess and guess.other == "map" and _is_sequence(name, axis := guess.other_axis, "", outputs[0]):
            kind = _find_step_kind(graph, first, axis)
            # A class for each word of the graph's vocabulary, the rows of a table that a Gather reads, is no guess.
            tables = (graph.constants.get(node.input[0]) for node in graph.nodes if node.op_type == "Gather")
            words = {table.dims[0] for table in tables if table is not None and len(table.dims) == 2}
            is_certain = graph.dims(name)[axis] in words
            guess = Reading(kind=kind, axis=axis) if is_certain else msgspec.structs.replace(guess, other=kind)
        reading = _read_stated(graph, name, first, stated[name], guess) if name in stated else guess
        if reading is not None:
            found[name] = reading
    # A label beside the scores that it is chosen by only names the class that wins.
    ranked = {each for name, reading in found.items() if reading.kind in _RANKED for each in _list_scores(graph, name)}
    for name in [name for name, reading in found.items() if reading.kind == "labels" and name not in stated]:
        choices = _find_choices(graph, name)
        if choices and all(ranked & each for each in choices):
            del found[name]
    # Logits whose Softmax or Sigmoid is an output too make the same decisions.
    for name, reading in list(found.items()):
        node = graph.producers.get(name)
        if node is None or node.op_type not in _DECIDING_OPS or node.input[0] not in found.keys() - stated.keys():
            continue
        if reading.kind in _RANKED:
            squash = RAW if node.op_type == "Sigmoid" else ""
            found[node.input[0]] = msgspec.structs.replace(reading, squash=squash)
    return found


def read_probabilities(value: Array, reading: Reading, like: Array | None = None) -> Array:
    """Returns the probability of each class at each place, float64 [classes, places].

    `like` is the float model's output: if it holds probabilities, `value` is normalized, since rounded probabilities do
    not add up to one exactly. In a map of Sigmoids each entry is a place of its own, with the two classes no and yes.
    """
    rows = np.moveaxis(value.astype(np.float64), reading.axis, 0).reshape(value.shape[reading.axis], -1)
    if reading.squash in {"Sigmoid", RAW}:
        rows = rows.reshape(1, -1) if says_yes_or_no(reading) else rows
        rows = sigmoid(rows) if reading.squash == RAW else np.clip(rows, 0, 1)
        rows = np.concatenate([1 - rows, rows]) if len(rows) == 1 else rows
        return np.asarray(rows / np.maximum(rows.sum(axis=0), 1e-12))
    if _is_distribution(rows):
        return rows
    if like is not None and like is not value and _is_distribution(np.moveaxis(like, reading.axis, 0)):
        rows = np.maximum(rows, 0)
        return np.asarray(rows / np.maximum(rows.sum(axis=0), 1e-12))
    return softmax(rows, axis=0)


def read_decisions(value: Array, reading: Reading) -> Array:
    """Returns the class with the highest score at each place, int64 [places], or each label, such as a text."""
    if reading.kind == "labels":
        return value.reshape(-1)
    rows = np.moveaxis(value, reading.axis, 0).reshape(value.shape[reading.axis], -1)
    if says_yes_or_no(reading) or (reading.squash in {"Sigmoid", RAW} and len(rows) == 1):
        return np.asarray((rows.reshape(-1) > (0 if reading.squash == RAW else 0.5)).astype(np.int64))
    return np.asarray(rows.argmax(axis=0))


def says_yes_or_no(reading: Reading) -> bool:
    """Returns True where each entry has a probability of its own, such as whether a note sounds at a moment."""
    return reading.kind == "map" and reading.squash in {"Sigmoid", RAW}


def may_be_image(shape: tuple[int, ...]) -> bool:
    """Returns True for four axes with 1, 3 or 4 channels, first or last, and sides that are not tiny."""
    if len(shape) != 4:
        return False
    sides = shape[2:] if shape[1] in IMAGE_CHANNELS else shape[1:3]
    return bool({shape[1], shape[3]} & IMAGE_CHANNELS) and min(sides) >= _LEAST_SIDE


def _read_stated(graph: Graph, name: str, value: Array, stated: StatedOutput, guess: Reading | None) -> Reading:
    """Returns how a stated output is read; an axis that is not stated is guessed."""
    if stated.kind == "labels":
        return Reading(kind="labels")
    if stated.kind == "image":
        return Reading(kind="image")
    if stated.axis is not None:
        axis = stated.axis % value.ndim
    elif guess is not None and guess.kind == stated.kind:
        axis = guess.axis
    elif stated.kind == "classes":
        axis = int(np.argmax(value.shape))
    elif stated.kind in {"values", "embedding"}:
        axis = _find_channels(value)
    else:
        axis = _map_axes(value.shape)[0] if value.ndim == 4 else value.ndim - 1
    if stated.kind == "values":
        return Reading(kind="embedding" if _are_unit([value]) else "values", axis=axis)
    if stated.kind == "scores":
        return Reading(kind="map", axis=axis, squash=RAW)
    has_sigmoid = find_squash(graph, name) == "Sigmoid"
    # A single score chooses between no classes: without a sigmoid in the graph, the app computes one.
    squash = "Sigmoid" if has_sigmoid else RAW if value.shape[axis] == 1 else ""
    return Reading(kind=stated.kind, axis=axis, squash=squash)


def _guess_reading(
    graph: Graph, name: str, values: Sequence[Array], *, is_raw_score: bool, is_score: bool
) -> Reading | None:
    """Returns the reading of an output, None if its kind cannot be guessed.

    `is_raw_score` says that it has one number for each row of another output, such as a score for each of many boxes:
    these do not choose between the rows. Without `is_score` its numbers are no scores at all.
    """
    first, squash = values[0], find_squash(graph, name)
    if is_text(first) or (first.dtype.kind in "iu" and _find_choices(graph, name)):
        return Reading(kind="labels")
    if not is_numeric(first) or not first.size or not all(np.isfinite(value).all() for value in values):
        return None
    if first.dtype.kind != "f":
        return _read_numbers(graph, name, values)
    if _are_heatmaps(values):
        return Reading(kind="heatmaps", axis=_map_axes(first.shape)[0])
    if not is_raw_score:
        guess = _guess_classes(graph, name, values, squash)
    elif not squash and are_raw_scores(np.concatenate([value.reshape(-1) for value in values])):
        guess = Reading(kind="map", axis=first.ndim - 1, squash=RAW)
    elif squash == "Sigmoid":
        guess = Reading(kind="map", axis=first.ndim - 1, squash=squash)
    else:
        guess = Reading(kind="values", axis=first.ndim - 1)
    return guess if guess and is_score else _read_numbers(graph, name, values)


def _stands_beside_decisions(graph: Graph, name: str, outputs: Tensors) -> bool:
    """Returns True for a few raw numbers if another output is a Softmax or Sigmoid of other numbers.

    A network that applies a Softmax to its scores would have applied it to these too, if they were scores: they are the
    box or the keypoints of a face, for example.
    """
    if not ranks_classes(outputs[name]) or outputs[name].size >= _MANY_CLASSES or find_squash(graph, name):
        return False
    sources = [_trace_squash(graph, each) for each, value in outputs.items() if ranks_classes(value)]
    return any(op and name not in moved for op, moved in sources)


def _is_sequence(name: str, axis: int, squash: str, outputs: Tensors) -> bool:
    """Returns True for an output with one decision at each of at most 512 steps, and no other output with such rows.

    Shapes are [steps, 1, classes] or [1, classes, steps] of PyTorch's CTC heads, [1, steps, classes] of most others,
    and [1, classes, 1, steps] if an image's height of one is left.
    """
    shape = outputs[name].shape
    steps = outputs[name].size // shape[axis]
    others = [value.shape for other, value in outputs.items() if other != name]
    is_alone = not any(steps in shape for shape in others)
    in_a_row = 1 in shape if len(shape) == 3 else len(shape) == 4 and shape.count(1) == 2
    return in_a_row and not squash and 1 < steps <= _MOST_STEPS and is_alone


def _find_step_kind(graph: Graph, value: Array, axis: int) -> Literal["sequence", "tokens"]:
    """Returns "tokens" if each step of an output belongs to a token that the network reads, else "sequence".

    Tokens are integers [steps], [batch, steps] or [steps, batch]. One open size alone is that of `lengths` [batch].
    """
    steps = value.size // value.shape[axis]
    read = (graph.value(name) for name in graph.inputs)
    texts = [each.shape for each in read if each.dtype in {"int32", "int64"} and each.shape and len(each.shape) <= 2]
    return "tokens" if any(steps in shape or (len(shape) == 2 and None in shape) for shape in texts) else "sequence"


def _read_numbers(graph: Graph, name: str, values: Sequence[Array]) -> Reading:
    """Returns the reading of numbers that are not known to decide anything, with a second guess (`Reading.other`).

    The output of a linear layer may be logits of an uncertain network, such as a language model's. A vector from a
    layer may be an embedding.
    """
    first, origins = values[0], find_origins(graph, name)
    if first.shape[:1] == (1,) and may_be_image(first.shape) and _are_pixels(values):
        return Reading(kind="image")
    if _are_unit(values):
        return Reading(kind="embedding", axis=_find_channels(first))
    reading = Reading(kind="values", axis=_find_channels(first))
    if len(origins) != first.ndim:
        return reading
    made = [axis for axis, origin in enumerate(origins) if origin == "weights" and first.shape[axis] > 1]
    if ranks_classes(first) and made and first.size >= _LEAST_EMBEDDING:
        return msgspec.structs.replace(reading, other="embedding")
    is_plain = find_readout(graph, name) in {"biased", "projected"}
    if len(made) == 1 and is_plain and first.shape[made[0]] > _BOX and not may_be_image(first.shape):
        return msgspec.structs.replace(reading, other="map", other_axis=made[0])
    return reading


def spread_maps(value: Array, axis: int) -> Array:
    """Returns heatmaps as [maps, height, width]; `axis` is that of the maps."""
    maps = np.moveaxis(value, axis, 0)
    return maps.reshape(-1, *maps.shape[-2:])


def _are_heatmaps(values: Sequence[Array]) -> bool:
    """Returns True for maps of one peak each, [1, maps, height, width] or [1, height, width, maps].

    Most show something, and about nine of ten of these have a single peak that falls off on all sides.
    """
    first = values[0]
    if first.ndim != 4 or len(first) != 1:
        return False
    rows = [spread_maps(value, _map_axes(first.shape)[0]) for value in values]
    heights = np.array([maps.max(axis=(1, 2)) for maps in rows])
    shown = np.argwhere(heights > VISIBLE * heights.max())
    if min(rows[0].shape[1:]) < _LEAST_SIDE or 2 * len(shown) < heights.size:
        return False
    # So many others are more than a tenth beyond chance. Many large maps are seldom heatmaps: few are looked at then.
    too_many = next(count for count in range(len(shown) + 1) if wilson_interval(count, len(shown))[0] > _OTHERS)
    others = (True for row, at in shown if not _is_peak(rows[row][at] / heights[row, at]))
    return sum(islice(others, too_many)) < too_many


def _is_peak(scaled: Array) -> bool:
    """Returns True for a map [height, width] of one peak of height 1."""
    half, top = np.argwhere(scaled >= 0.5), np.unravel_index(int(scaled.argmax()), scaled.shape)
    # A disc of as many places has this radius; a peak may be twice as long as it is wide.
    reach = 2 * math.sqrt(len(half) / math.pi) + 1
    is_pointed = (scaled >= 0.9).sum() <= max(1.0, _FLAT_TOP * len(half))
    is_alone = float(np.hypot(*(half - top).T).max()) <= reach and float(np.median(np.abs(scaled))) < _GROUND
    return bool(is_pointed and is_alone)


def _are_unit(values: Sequence[Array]) -> bool:
    """Returns True for vectors of length one, one a sample: those are embeddings."""
    size = values[0].size
    is_vector = size >= _LEAST_EMBEDDING and max(values[0].shape) == size
    return is_vector and all(abs(float((value.astype(np.float64) ** 2).sum()) - 1) < _UNIT for value in values)


def _are_pixels(values: Sequence[Array]) -> bool:
    """Returns True if values span black to about white, as floats in [0, 1] or [-1, 1], or as bytes; depths do not."""
    low, high = (float(end([end(value) for value in values])) for end in (np.min, np.max))
    whites = [white for white in WHITES if white * _LEAST_WHITE <= high <= white * _MOST_WHITE]
    return any(low >= -white * (_MOST_WHITE - 1) or (white == 1 and low >= -_MOST_WHITE) for white in whites)


def _find_channels(value: Array) -> int:
    """Returns the shortest axis with more than one entry, except axis 0."""
    sizes = [(size == 1, size, axis) for axis, size in enumerate(value.shape) if axis]
    return min(sizes, default=(True, 1, 0))[2]


def _guess_classes(graph: Graph, name: str, values: Sequence[Array], squash: str) -> Reading | None:
    """Returns the reading as classes or a map of classes, None if the output holds none.

    Each class has its own weights, so an axis of places holds no classes, and only a Softmax or a Sigmoid follows the
    layer that makes the scores. The output of a layer without a bias may also be an embedding, unless classes win in it
    (`_has_winners`).
    """
    first, origins = values[0], find_origins(graph, name)
    places = {axis for axis, origin in enumerate(origins) if origin == "places" and first.shape[axis] > 1}
    kept = "Sigmoid" if squash == "Sigmoid" else ""
    if first.size == 1:
        return Reading(kind="classes", axis=max(0, first.ndim - 1), squash=kept) if kept else None
    is_gain = first.shape in map(graph.static_shape, graph.inputs)
    if ranks_classes(first) and kept and is_gain:
        # A factor for each number of the input, such as a denoiser's mask.
        return Reading(kind="values", axis=_find_channels(first))
    if kept and (first.shape[1:] == (1,) or (first.ndim >= 3 and 1 in first.shape[1:] and not ranks_classes(first))):
        # One score for each row of the samples, such as whether a word begins at a letter, or for each place.
        return Reading(kind="map", axis=1 + first.shape[1:].index(1), squash=kept)
    if ranks_classes(first):
        reading = Reading(kind="classes", axis=int(np.argmax(first.shape)), squash=kept)
        is_chance = bool(squash) or all(_is_distribution(value.reshape(-1, 1)) for value in values)
        readout = "unknown" if is_chance else find_readout(graph, name)
        is_ranking = is_chance or not (readout == "shaped" or _are_quantities(values))
        # The mean of the highest probability is above chance: twice as high, or 1.15 times for up to four classes.
        is_sure = is_ranking and _confidence(values, reading) * first.size > (1.15 if first.size <= 4 else 2.0)
        if not is_sure or reading.axis in places:
            return None
        if kept and np.median([np.sum(value > 0.5) for value in values]) > 1:
            # Most samples have several classes, such as the sounds of a scene: each is an answer of its own.
            return msgspec.structs.replace(reading, kind="map")
        is_either = readout == "projected" and first.size >= _LEAST_EMBEDDING and not _has_winners(values)
        return msgspec.structs.replace(reading, other="embedding") if is_either else reading
    for axis in (axis for axis, size in enumerate(first.shape) if 1 < size < first.size):
        # The rows, or their exponentials (of a log-softmax), add up to one.
        tables = (np.moveaxis(value, axis, 0) for value in values)
        if all(_is_distribution(rows if rows.min() >= 0 else np.exp(np.minimum(rows, 1))) for rows in tables):
            return Reading(kind="map", axis=axis)
    if kept:
        # Many scores for each, such as whether each of 88 notes sounds; but images, and corners of boxes, are numbers.
        reading = Reading(kind="map", axis=first.ndim - 1, squash=kept)
        is_number = is_gain or first.shape[-1] <= _BOX or may_be_image(first.shape)
        is_sure = max(float(value.max()) for value in values) > 0.5 and _confidence(values, reading) > _LEAST_CONFIDENCE
        return reading if is_sure and not is_number else None
    if squash or (readout := find_readout(graph, name)) == "shaped":
        return None
    made = {axis for axis, origin in enumerate(origins) if origin == "weights" and readout != "unknown"}
    guess = _guess_logits(values, made)
    return guess if guess and guess.axis not in places else None


def _guess_logits(values: Sequence[Array], made: Collection[int]) -> Reading | None:
    first = values[0]
    axes: tuple[int, ...] = ()
    if first.ndim == 4 and min(first.shape[1], first.shape[3]) not in IMAGE_CHANNELS:
        axes = _map_axes(first.shape)
    elif first.ndim == 3 and first.shape[2] > _BOX:
        axes = (2, 1) if first.shape[1] > _BOX else (2,)
    # The class axis is the one along which the softmax is more confident. The second axis is considered only if the
    # first may hold classes too: else the columns of a table, such as boxes in pixels, would be taken for steps.
    even = tuple(axis for axis in axes if _is_even(values, axis, is_made=axis in made))
    readings = [Reading(kind="map", axis=axis) for axis in even if axis in axes[:1] or even == axes]
    confidences = {reading: _confidence(values, reading) for reading in readings}
    best = max(readings, key=lambda reading: confidences[reading], default=None)
    return best if best is not None and confidences[best] >= _LEAST_CONFIDENCE else None


def _map_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns which axes of a 4-D map may hold the classes, the likeliest first.

    If two of the last three sizes are equal, they are height and width, and the third is the classes. If the height is
    1, classes and steps cannot be told apart by size.
    """
    if shape[1] != shape[2] == shape[3] or shape[1] == shape[2] != shape[3]:
        return (1,) if shape[2] == shape[3] else (3,)
    axes = (1, 3) if shape[1] <= shape[3] else (3, 1)
    return axes if shape[2] == 1 else axes[:1]


def _is_even(values: Sequence[Array], axis: int, *, is_made: bool) -> bool:
    """Returns True if an axis may hold classes: it is a layer's output axis or short, and of evenly large scores."""
    size = values[0].shape[axis]
    means = np.mean([np.abs(np.moveaxis(value, axis, 0).reshape(size, -1)).mean(axis=1) for value in values], axis=0)
    is_likely = size > 1 and (is_made or size <= _MOST_CLASSES)
    # Among thousands of letters some hardly ever occur, and CTC's blank occurs in nearly every step: the smallest and
    # the largest 1 % are left out.
    low, high = np.quantile(means, (0.01, 0.99) if size > _THOUSANDS else (0, 1))
    return is_likely and float(high) <= _MOST_UNEVEN * float(low)


def _are_quantities(values: Sequence[Array]) -> bool:
    """Returns True for vectors that measure something: ratings, the landmarks of a face, the coordinates of points.

    - A few ratings, or sizes, are positive in all samples; scores have both signs.
    - Landmarks are nearly the same in all samples. Scores vary more from sample to sample than their means do from
      class to class.
    - Every second or third coordinate moves with the others of its axis: a hand or a body moves as a whole along x, y
      and z. Neighbouring classes have nothing in common.
    """
    rows = np.stack([value.reshape(-1) for value in values]).astype(np.float64)
    count, means = rows.shape[1], rows.mean(axis=0)
    if count < _MANY_CLASSES and rows.min() > 0:
        return True
    if count >= _LEAST_LANDMARKS and len(rows) > 1 and (rows - means).var() < _SAME_SHAPE * means.var():
        return True
    if not _LEAST_POINTS <= count < _THOUSANDS or len(rows) < KIND_SAMPLES:
        return False
    rows = (rows - means) / np.maximum(rows.std(axis=0), 1e-9)
    alike, others = rows.T @ rows / len(rows), ~np.eye(count, dtype=bool)
    for axes in (2, 3):
        same = (np.subtract.outer(np.arange(count), np.arange(count)) % axes == 0) & others
        if count % axes == 0 and alike[same].mean() - alike[others & ~same].mean() > _MOVES_TOGETHER:
            return True
    return False


def _has_winners(values: Sequence[Array]) -> bool:
    """Returns True if numbers stand out above the others and not below, as the scores of classes do.

    One class wins, and none loses in the same way: scores are skewed. The signs of a vector are a convention, since no
    cosine changes if all are inverted: its numbers are as far below their means as above. Each number is taken relative
    to its own mean and deviation, as a number may be large in all samples.
    """
    rows = np.stack([value.reshape(-1) for value in values]).astype(np.float64)
    rows -= rows.mean(axis=0)
    rows /= np.maximum(rows.std(axis=0), 1e-9 * max(float(np.abs(rows).max()), 1e-9))
    rows -= rows.mean(axis=1, keepdims=True)
    skewness = (rows**3).mean(axis=1) / np.maximum((rows**2).mean(axis=1), 1e-9) ** 1.5
    return float(skewness.mean()) > _LEAST_SKEWNESS


def _confidence(values: Sequence[Array], reading: Reading) -> float:
    return float(np.mean([read_probabilities(value, reading).max(axis=0).mean() for value in values]))


def _is_distribution(rows: Array) -> bool:
    # In 8 bits or float16 a sum of one is off by up to 1e-2.
    return bool(rows.min() >= 0 and np.abs(rows.sum(axis=0, dtype=np.float64) - 1).max() < 1e-2)


def find_squash(graph: Graph, name: str) -> str:
    """Returns which of _DECIDING_OPS is before an output, "" for none."""
    return _trace_squash(graph, name)[0]


def _find_choices(graph: Graph, name: str) -> list[frozenset[str]]:
    """Returns, for each ArgMax whose classes whole numbers follow from, the scores among which it chooses.

    A network may gate another by a class. The entries of a code book that an ArgMin finds nearest are classes too.
    """

    def before(at: str) -> list[str]:
        read = graph.producers[at].input if at in graph.producers else ()
        return [each for each in read if each and graph.value(each).dtype in _WHOLE]

    made = (graph.producers[each] for each in walk([name], before) if each in graph.producers)
    return [_list_scores(graph, node.input[0]) for node in made if node.op_type in CHOOSING_OPS]


def _list_scores(graph: Graph, name: str) -> frozenset[str]:
    """Returns a tensor with those that make the same decision, because it is the Softmax or Sigmoid of them."""
    return _trace_squash(graph, name)[1] | {name}


def _trace_squash(graph: Graph, name: str) -> tuple[str, frozenset[str]]:
    """Returns which of _DECIDING_OPS is before an output ("" for none), and the tensors from its input on back.

    Between these tensors, the operator and the output values are only moved, or averaged behind the operator.
    """
    squash, moved = "", set[str]()
    while name in graph.producers:
        node = graph.producers[name]
        if node.op_type in _DECIDING_OPS and not squash:
            squash, moved = node.op_type, {node.input[0]}
        elif node.op_type not in (_SHAPE_OPS if squash else _SHAPE_OPS | _MEANS) or not node.input:
            break
        name = node.input[0]
        moved.add(name)
    return squash, frozenset(moved)
