"""How far each channel of an equalization pair reaches, there and on the way back to the constants that make it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from edgekit.graph.graph import Graph
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import StoredMoments, open_moments
from edgekit.quantize.equalization.pairs import EqualizationPair, Step
from edgekit.quantize.equalization.silu import invert_silu
from edgekit.quantize.graph.layers import read_layer
from edgekit.quantize.ranges.methods import TensorRange

# Pooling seldom shrinks extremes more than that; beyond, the two tensors are not alike. Chosen by hand.
_MOST_GROWN = 4.0
# A sum of many inputs is about normal, and of 64 samples some 10^6 values lie within 5 standard deviations of the mean.
_MOST_DEVIATIONS = 6.0
_LEAST_SLOPE = float(np.finfo(np.float32).tiny)


class ChannelRange(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest and highest value of each channel of a tensor, which are those of a pair from `start` on."""

    start: int
    low: Array
    high: Array

    @property
    def part(self) -> slice:
        """Which channels of the pair they are."""
        return slice(self.start, self.start + len(self.low))

    def magnitude(self) -> Array:
        """Returns the largest magnitude of each channel."""
        return np.asarray(np.maximum(np.abs(self.low), np.abs(self.high)))


def read_channel_ranges(
    graph: Graph, pairs: Iterable[EqualizationPair], statistics: Path, seen: Mapping[str, TensorRange]
) -> Iterator[tuple[EqualizationPair, dict[str, ChannelRange]]]:
    """Yields the ranges of the channels of every tensor of each pair that calibration measured.

    Those of the pair's own tensor are exact, those of tensors before it are worked out back from these; `seen` holds
    the extremes of whole tensors.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    with open_moments(statistics / "moments.npz") as stored:
        for pair in pairs:
            ends = stored.extremes(pair.consumers[0].node)
            if ends is not None and len(ends[1]) == pair.channels:
                yield pair, _trace_back(graph, pair, ends, stored, seen)


def _trace_back(
    graph: Graph,
    pair: EqualizationPair,
    ends: tuple[Array, Array],
    stored: StoredMoments,
    seen: Mapping[str, TensorRange],
) -> dict[str, ChannelRange]:
    """Returns the ranges of the channels of a pair's tensors, from those that its own reaches."""
    low, high = (each.astype(np.float64) for each in ends)
    ranges = {pair.tensor: ChannelRange(start=0, low=low, high=high)}
    for step in pair.steps:
        after = ranges[step.output]
        part = slice(step.part[0] - after.start, step.part[1] - after.start)
        is_hidden = bool(step.sigmoid) or (step.slope <= 0).any()
        floor = _estimate_floor(graph, step, stored, seen) if is_hidden else after.low[part]
        if step.sigmoid:
            node = next(node for node in graph.readers(step.tensor) if node.name == step.sigmoid)
            low, high = invert_silu(node, after.low[part], after.high[part], floor)
        else:
            low, high = _undo(step, after.low[part], after.high[part], floor, _growth(seen, step))
        ranges[step.tensor] = ChannelRange(start=step.part[0], low=low, high=high)
    return ranges


def _undo(step: Step, low: Array, high: Array, floor: Array, growth: tuple[float, float]) -> tuple[Array, Array]:
    """Returns the lowest and highest value of each channel before a node, from those behind it.

    `floor` is about the lowest value before it, which counts where a slope turns negative values up or hides them.
    """
    low, high = (low - step.shift) * growth[0], (high - step.shift) * growth[1]
    if not step.negative_only:
        return low, high
    turned = np.maximum(high / np.minimum(step.slope, -_LEAST_SLOPE), np.minimum(floor, 0.0))
    return np.where(step.slope > 0, low / np.where(step.slope > 0, step.slope, 1.0), turned), high


def _growth(seen: Mapping[str, TensorRange], step: Step) -> tuple[float, float]:
    """Returns how much farther a tensor reaches, down and up, than what pooling made of it; 1 without pooling."""
    if not step.pooled or step.tensor not in seen or step.output not in seen:
        return 1.0, 1.0
    one, two = seen[step.tensor], seen[step.output]
    ends = ((one.low, two.low), (one.high, two.high))
    low, high = (float(np.clip(first / second, 1.0, _MOST_GROWN)) if second else 1.0 for first, second in ends)
    return low, high


def _estimate_floor(graph: Graph, step: Step, stored: StoredMoments, seen: Mapping[str, TensorRange]) -> Array:
    """Returns about the lowest value of each channel of what a layer makes: six standard deviations below the mean."""
    lowest = np.full(len(step.slope), seen[step.tensor].low if step.tensor in seen else 0.0)
    layer = read_layer(graph, graph.producers[step.tensor])
    if layer is None:
        return lowest
    moments = stored(layer.node)
    if moments is None:
        return lowest
    matrix = layer.to_matrix(graph.weight(layer.weight).astype(np.float64))
    bias = graph.weight(layer.bias).astype(np.float64) if layer.bias else 0.0
    mean = (matrix * moments.mean[:, None]).sum(axis=2).reshape(-1)
    # For y = W x the variance of y is W C W' with C the covariance of x, a sum over the blocks of x that are kept.
    size = moments.size
    weights = matrix.reshape(layer.groups, layer.outputs, -1, size).transpose(0, 2, 1, 3)
    blocks = moments.covariance.reshape(layer.groups, -1, size, size).astype(np.float64)
    power = ((weights @ blocks) * weights).sum(axis=3)
    deviation = np.sqrt(np.maximum(power.sum(axis=1), 0.0)).reshape(-1)
    return np.asarray(np.maximum(mean + bias - _MOST_DEVIATIONS * deviation, lowest))
