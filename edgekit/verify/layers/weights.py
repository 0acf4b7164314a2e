"""Comparing the weights of a model with those of the float model that it was made from."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edgekit.graph.constants import list_constants, read_array
from edgekit.graph.graph import Node, view_model
from edgekit.model.model import Model, read_proto
from edgekit.model.tensors import Array
from edgekit.verify.layers.overflows import HALF_MAX
from edgekit.verify.matching.match import MatchedTensor
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE
from edgekit.verify.matching.regions import Region

FAR_STEPS = 12.0
"""Farther than any clean INT8 model of the benchmarks had a single weight (4.7); bit 4 is 16 steps."""
_ISOLATED = 3
# A refitted tensor has many weights some steps off; a broken one has a few, so much farther than all the others.
_ALONE = 3.0
# A fault that was put in touches a few rows; a quantizer that changes weights on purpose changes most of them.
_MOST_ROWS = 0.9
# Among fewer weights there is no telling which are the odd ones.
_LEAST_WEIGHTS = 32
# Units in the last place of a float weight: a cast rounds by half a unit, folding a factor in by half a unit more.
_FAR_PLACES = 2.0
# A weight of so many steps is known to a sixth, so that the power of two of its scaling can be told.
_TOLD_STEPS = 3.0
# So many turns at most, by rows and columns; it ends as soon as both have settled.
_TURNS = 6
_LEAST_TOLD = 8
# Rounding to the nearest centres on 0 steps, rounding down on half a step: a shift lies beyond both.
_LEAST_SHIFT = 0.75
# Rounding moves a weight by half a step at most, and a tenth is granted for float32.
_SCATTER = 0.6
# JSON knows no infinity.
_MOST_STEPS = 1e9


class WeightFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the weights of a layer.

    `steps` is the distance in steps of the worst one from the float weight, None where it has none to compare. `noise`
    is what rounding them adds to a result, as a root of the mean square for inputs of one: scale * sqrt(terms / 12), as
    of independent errors that are uniform within a step (Widrow and Kollar 2008), for the channel with the largest
    scale.
    """

    steps: float | None = None
    noise: float = 0.0


class Initializers:
    """The initializers of a model, read one by one, from external files where they lie there."""

    def __init__(self, model: Model) -> None:
        self.model, self.proto = model, read_proto(model, weights=False)
        self.graph = view_model(self.proto, model.path.parent)
        self.tensors = list_constants(self.graph.proto)
        self.rounded = {node.output[0]: node for node in self.graph.nodes if node.op_type == DEQUANTIZE}

    def find_node(self, name: str) -> Node | None:
        """Returns the node that computes a tensor, looking back through Q, DQ and casts."""
        node = self.graph.producers.get(name)
        while node is not None and node.op_type in {QUANTIZE, DEQUANTIZE, "Cast"}:
            node = self.graph.producers.get(node.input[0])
        return node

    def find_source(self, name: str) -> str:
        """Returns the name that a value had before Q, DQ and casts."""
        node = self.graph.producers.get(name)
        while node is not None and node.op_type in {QUANTIZE, DEQUANTIZE, "Cast"}:
            name = node.input[0]
            node = self.graph.producers.get(name)
        return name

    def measure_noise(self, result: str) -> float:
        """Returns what rounding its weights adds to the result of a node, for inputs of one."""
        node = self.graph.producers[result]
        by_row = node.op_type == "Conv" or bool(node.integer("transB", 0))
        noise = 0.0
        for rounded in (self.rounded[name] for name in node.input if name in self.rounded):
            if rounded.input[0] in self.tensors and rounded.input[1] in self.tensors:
                dims = self.tensors[rounded.input[0]].dims
                terms = math.prod(dims) / max(1, dims[0 if by_row else -1]) if len(dims) > 1 else 0.0
                noise = max(noise, float(self.read(rounded.input[1]).max(initial=0.0)) * math.sqrt(terms / 12.0))
        return noise

    def read_weight(self, name: str) -> Array | None:
        """Returns a weight, as its DQ node gives it where there is one; None where it is computed otherwise."""
        if name in self.tensors:
            return self.read(name)
        node = self.rounded.get(name)
        if node is None or any(source not in self.tensors for source in node.input):
            return None
        axis = node.integer("axis", 1)
        values, *given = (self.read(source) for source in node.input)
        if not _is_spread(given[0], axis, values):
            return None
        scale, zero = ([_spread(part, axis, values.ndim) for part in given] + [np.zeros(())])[:2]
        return np.asarray((values.astype(np.float64) - zero) * scale, dtype=np.float64)

    def read(self, name: str) -> Array:
        """Returns an initializer, from its external file where it lies there."""
        return read_array(self.tensors[name], self.graph.folder)


def measure_weights(
    floats: Initializers, stored: Initializers, matched: Sequence[MatchedTensor], regions: Mapping[str, Region]
) -> dict[str, WeightFacts]:
    """Returns, for each layer of a model, how its weights lie to those of the float model, by tensor.

    Rounding to the nearest gives half a step at most, refitted weights lie a few steps off. Weights that are clipped on
    purpose do not count; nor do channels of which most weights differ, and tensors of which more than a few are far
    off, because a quantizer equalizes and prunes: what is wrong with those shows in the layer's output. A step of a
    float weight is a twelfth of `FAR_STEPS` for each unit in its last place beyond two, so that a weight that is not
    its float weight rounded lies far; so do weights that are all off by one number of steps. One tensor is in memory at
    a time.
    """
    facts: dict[str, WeightFacts] = {}
    for item in matched:
        pair = pair_nodes(floats, stored, item)
        pairs = () if pair is None else zip(pair[1].input, pair[0].input, strict=False)
        found = [_compare(stored, mine, floats, theirs) for mine, theirs in pairs]
        facts[item.tensor] = WeightFacts(
            steps=max((steps for steps in found if steps is not None), default=None),
            noise=math.hypot(*(stored.measure_noise(name) for name in regions[item.tensor].results)),
        )
    return facts


def pair_nodes(floats: "Initializers", stored: "Initializers", item: MatchedTensor) -> tuple[Node, Node] | None:
    """Returns the nodes of both models that compute a tensor, looking back to one operator; None where there is none.

    A Conv whose Relu or Clip was folded gives the tensor that this gave.
    """
    first, second = floats.find_node(item.tensor), stored.find_node(item.raw_b)
    while first is not None and second is not None and first.op_type != second.op_type:
        is_folded = len(first.input) == 1 or first.op_type == "Clip"
        first = floats.find_node(first.input[0]) if is_folded else None
    return None if first is None or second is None else (first, second)


def _compare(stored: Initializers, mine: str, floats: Initializers, theirs: str) -> float | None:
    """Returns the distance of the worst weight of one input of a node, None where both sides have no such weights."""
    wanted = floats.read_weight(theirs)
    if wanted is None:
        return None
    if mine in stored.rounded and stored.rounded[mine].input[0] in stored.tensors:
        return _measure_steps(stored, stored.rounded[mine], wanted)
    if mine in stored.tensors:
        return _measure_places(stored.read(mine), wanted)
    return None


def _measure_places(values: Array, wanted: Array) -> float | None:
    """Returns how far the worst of a few float weights lies where all others are equal but for rounding."""
    if values.shape != wanted.shape or values.dtype.kind != "f" or wanted.dtype.kind != "f":
        return None
    if values.size < _LEAST_WEIGHTS:
        return 0.0
    exact = np.clip(wanted.astype(np.float64), -HALF_MAX, HALF_MAX) if values.dtype == np.float16 else wanted
    off = np.abs(values.astype(np.float64) - exact.astype(np.float64))
    with np.errstate(over="ignore", invalid="ignore"):
        places = off / np.maximum(np.spacing(np.abs(exact.astype(values.dtype))).astype(np.float64), 1e-38)
    places = np.where(np.isfinite(places), places, np.inf)
    far = places > _FAR_PLACES
    return float(min(places.max(), _MOST_STEPS)) * FAR_STEPS / _FAR_PLACES if 0 < far.sum() <= _ISOLATED else 0.0


def _measure_steps(quantized: Initializers, node: Node, wanted: Array) -> float:
    values = quantized.read(node.input[0])
    if values.shape != wanted.shape or not values.size or wanted.dtype.kind != "f" or values.dtype.kind not in "iu":
        return 0.0
    axis = node.integer("axis", 1)
    if not _is_spread(quantized.read(node.input[1]), axis, values):
        return 0.0
    scale = _spread(quantized.read(node.input[1]), axis, values.ndim)
    has_zero = node.has_input(2) and node.input[2] in quantized.tensors
    zero = _spread(quantized.read(node.input[2]), axis, values.ndim) if has_zero else 0.0
    limits = np.iinfo(values.dtype)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        wanted = _follow_scaling((values.astype(np.float64) - zero) * scale, wanted.astype(np.float64), scale)
        meant = np.nan_to_num(np.clip(wanted / scale + zero, limits.min, limits.max))
    signed = np.atleast_1d(values.astype(np.float64) - meant)
    if _is_shifted(signed) and values.dtype.itemsize == 1:
        return 2.0 * FAR_STEPS
    channels = np.moveaxis(np.abs(signed), axis if scale.size > 1 else 0, 0)
    kept = channels[_agree(channels)]
    if kept.ndim > 1 and kept.size >= _LEAST_TOLD * kept.shape[1]:
        columns = np.moveaxis(kept, 1, 0)
        kept = columns[_agree(columns)]
    if not kept.size:
        return 0.0
    largest = np.sort(kept, axis=None)[-_ISOLATED - 1 :]
    most_agree = bool(np.mean(_agree(channels)) >= _MOST_ROWS)
    is_alone = most_agree and kept.size > _ISOLATED and largest[-1] > _ALONE * largest[0]
    return float(largest[-1]) if is_alone else min(float(largest[-1]), FAR_STEPS)


def _agree(steps: Array) -> Array:
    """Returns, along the first axis, where most weights are rounded: where they are not, nobody knows what was meant.

    A channel that nothing comes through may be scaled to nothing.
    """
    rows = steps.reshape(len(steps), -1)
    few = 2 * np.count_nonzero(rows <= 1.0, axis=1)
    agree = np.asarray(few > rows.shape[1])
    # Counting tells a median's side without sorting, but for that of two halves, which is the mean of their ends.
    halves = few == rows.shape[1]
    if halves.any():
        agree[halves] = np.median(rows[halves], axis=1) <= 1.0
    return agree


def _is_shifted(signed: Array) -> bool:
    """Returns True if nearly all weights lie off by one number of steps: a zero point is wrong, rounding scatters."""
    shift = float(np.median(signed))
    together = float(np.mean(np.abs(signed - shift) <= _SCATTER))
    return signed.size >= _LEAST_TOLD and abs(shift) >= _LEAST_SHIFT and together >= _MOST_ROWS


def _follow_scaling(found: Array, wanted: Array, step: Array) -> Array:
    """Returns float weights with the rows and columns scaled by powers of two as those that were stored are.

    The logarithms of the ratios are a row's power plus a column's: medians are taken out in turn (median polish, Tukey
    1977). A weight of a few steps says nothing of its power.
    """
    if wanted.ndim < 2:
        return wanted
    told = (np.abs(found) > _TOLD_STEPS * step) & (wanted != 0.0)
    ratios = np.log2(np.abs(found / np.where(told, wanted, 1.0)), out=np.full(found.shape, np.nan), where=told)
    powers, settled = np.zeros([1] * wanted.ndim), 0
    for turn in range(_TURNS):
        others = tuple(place for place in range(wanted.ndim) if place != turn % 2)
        found_now = np.rint(np.nan_to_num(_find_medians(ratios - powers, others)))
        settled = 0 if found_now.any() else settled + 1
        powers = powers + found_now
        if settled > 1:
            break
    return np.asarray(wanted * np.exp2(powers), dtype=np.float64)


def _find_medians(values: Array, axes: tuple[int, ...]) -> Array:
    """Returns the medians along some axes of what is a number, NaN where nothing is, as a dimension of 1 each."""
    kept = [place for place in range(values.ndim) if place not in axes]
    shape = [values.shape[place] for place in kept]
    # Not np.nanmedian, which calls Python for each row: sorted, what is no number lies at the end.
    rows = np.sort(values.transpose(*kept, *axes).reshape(math.prod(shape), -1), axis=1)
    counts = np.count_nonzero(~np.isnan(rows), axis=1)
    low, high = (
        np.take_along_axis(rows, np.maximum(middle, 0)[:, np.newaxis], axis=1)[:, 0]
        for middle in ((counts - 1) // 2, counts // 2)
    )
    with np.errstate(invalid="ignore"):
        medians = np.where(counts > 0, (low + high) / 2.0, np.nan)
    return np.asarray(np.expand_dims(medians.reshape(shape), axes))


def _is_spread(scale: Array, axis: int, values: Array) -> bool:
    """Returns True for a scale of the whole tensor or of each channel, False for one of blocks."""
    return scale.size == 1 or (
        scale.ndim == 1 and -values.ndim <= axis < values.ndim and scale.size == values.shape[axis]
    )


def _spread(value: Array, axis: int, rank: int) -> Array:
    """Returns a scale or zero point of a tensor or of each channel in a shape that broadcasts over `rank` axes."""
    if value.size == 1:
        return value.astype(np.float64).reshape(())
    return value.astype(np.float64).reshape([-1 if place == axis % rank else 1 for place in range(rank)])
