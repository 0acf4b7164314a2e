"""How far each channel of a pair reaches, there and on the way back to the weights that make it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from onnx import numpy_helper

from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import open_moments
from edgekit.quantize.equalization.pairs import EqualizationPair, Step
from edgekit.quantize.equalization.silu import invert_silu
from edgekit.quantize.graph.graph import Graph
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.ranges.methods import TensorRange

_MOST_GROWN = 4.0
_FAR = 6.0
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

    def reach(self) -> Array:
        """Returns the largest magnitude of each channel."""
        return np.asarray(np.maximum(np.abs(self.low), np.abs(self.high)))


def read_channel_ranges(
    graph: Graph, pairs: Iterable[EqualizationPair], statistics: Path, seen: Mapping[str, TensorRange]
) -> Iterator[tuple[EqualizationPair, dict[str, ChannelRange]]]:
    """Yields the spans of every tensor of each pair that calibration measured; `seen` holds the extremes of tensors.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    with open_moments(statistics / "moments.npz") as read:
        found = [(pair, read(pair.readers[0].node)) for pair in pairs]
    for pair, moment in found:
        if moment is None or len(moment.high) != pair.channels:
            continue
        low, high = moment.low.astype(np.float64), moment.high.astype(np.float64)
        spans = {pair.tensor: ChannelRange(start=0, low=low, high=high)}
        for step in pair.steps:
            behind = spans[step.behind]
            part = slice(step.part[0] - behind.start, step.part[1] - behind.start)
            is_hidden = bool(step.gate) or (step.slope <= 0).any()
            floor = _floor_of(graph, step, statistics, seen) if is_hidden else behind.low[part]
            growth = _growth(seen, step.tensor, step.behind) if step.pooled else (1.0, 1.0)
            if step.gate:
                gate = next(node for node in graph.consumers[step.tensor] if node.name == step.gate)
                low, high = invert_silu(gate, behind.low[part], behind.high[part], floor)
            else:
                low, high = _undo(step, behind.low[part], behind.high[part], floor, growth)
            spans[step.tensor] = ChannelRange(start=step.part[0], low=low, high=high)
        yield pair, spans


def _undo(step: Step, low: Array, high: Array, floor: Array, growth: tuple[float, float]) -> tuple[Array, Array]:
    """Returns the lowest and highest value of each channel before a node, from those behind it.

    `floor` is about the lowest value before it, which counts where a slope turns negative values up or hides them.
    """
    low, high = (low - step.shift) * growth[0], (high - step.shift) * growth[1]
    if not step.below:
        return low, high
    turned = np.maximum(high / np.minimum(step.slope, -_LEAST_SLOPE), np.minimum(floor, 0.0))
    return np.where(step.slope > 0, low / np.where(step.slope > 0, step.slope, 1.0), turned), high


def _growth(seen: Mapping[str, TensorRange], before: str, behind: str) -> tuple[float, float]:
    """Returns how much farther a tensor reaches, down and up, than what pooling made of it."""
    if before not in seen or behind not in seen:
        return 1.0, 1.0
    one, two = seen[before], seen[behind]
    pairs = ((one.low, two.low), (one.high, two.high))
    low, high = (float(np.clip(first / second, 1.0, _MOST_GROWN)) if second else 1.0 for first, second in pairs)
    return low, high


def _floor_of(graph: Graph, step: Step, statistics: Path, seen: Mapping[str, TensorRange]) -> Array:
    """Returns about the lowest value of each channel of what a layer makes: six standard deviations below the mean."""
    lowest = np.full(len(step.slope), seen[step.tensor].low if step.tensor in seen else 0.0)
    layer = next((layer for layer in read_layers(graph) if layer.node == graph.producers[step.tensor].name), None)
    if layer is None:
        return lowest
    with open_moments(statistics / "moments.npz") as read:
        moment = read(layer.node)
    if moment is None:
        return lowest
    matrix = layer.to_matrix(numpy_helper.to_array(graph.initializers[layer.weight]).astype(np.float64))
    bias = numpy_helper.to_array(graph.initializers[layer.bias]).astype(np.float64) if layer.bias else 0.0
    mean = (matrix * moment.mean[:, None]).sum(axis=2).reshape(-1)
    size = moment.blocks.shape[-1]
    cuts = matrix.reshape(layer.groups, layer.outputs, -1, size)
    blocks = moment.blocks.reshape(layer.groups, -1, size, size).astype(np.float64)
    means = (cuts * moment.mean.reshape(layer.groups, 1, -1, size)).sum(axis=3)
    power = np.einsum("gops,gpst,gopt->gop", cuts, blocks, cuts, optimize=True) - means**2
    spread = np.sqrt(np.maximum(power.sum(axis=2), 0.0)).reshape(-1)
    return np.asarray(np.maximum(mean + bias - _FAR * spread, lowest))
