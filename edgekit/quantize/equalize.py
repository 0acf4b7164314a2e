"""Cross-layer equalization: channels are scaled in the layer that makes them, and back in those that read them.

The source of the method is Nagel et al. 2019 (arXiv 1906.04721). Factors are powers of two, so that scaling rounds no
weight.
"""

import contextlib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import digest_bytes, write_file
from edgekit.errors import UsageError
from edgekit.graph.graph import Graph, view_file, view_model
from edgekit.model.external import move_weight
from edgekit.model.model import drop_unread, rename_tensors
from edgekit.model.tensors import Array
from edgekit.quantize import channel_pairs
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.moments import StoredMoments
from edgekit.quantize.channel_pairs import SUFFIX, EqualizationPair, ScaledConstant, find_equalization_pairs
from edgekit.quantize.graph.layers import Layer, expand_channel_factors
from edgekit.quantize.ranges import TensorRange, snap_range

TINY = float(np.finfo(np.float32).tiny)
# Operators whose weight has one scale if it has none per channel.
_ONE_SCALE_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_Constant = tuple[str, int]
"""The name of a node, and the index of its input."""


class ScaledConstants:
    """The constants of a graph with their factors so far, by node and input; all factors are powers of two.

    Products with powers of two are exact, so the factors of several passes may be multiplied with each other first.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph.nodes}
        self._scaled: set[_Constant] = set()
        self._along: dict[_Constant, dict[int, Array]] = {}
        self._read: dict[str, tuple[Layer, Array]] = {}

    def scale(self, pair: EqualizationPair, factors: Array) -> None:
        """Multiplies a pair's channels in the constants that make them, and divides in the weights that read them."""
        for constant in pair.constants:
            place = constant.node, constant.index
            self._scaled.add(place)
            known = self._along.setdefault(place, {})
            known[constant.axis] = known.get(constant.axis, 1.0) * factors
        for layer in pair.consumers:
            self._scaled.add((layer.node, 1))
            known_factors = self._read[layer.node][1] if layer.node in self._read else 1.0
            self._read[layer.node] = layer, known_factors * factors

    def find_sharing(self, pair: EqualizationPair, per_channel: Collection[str]) -> ScaledConstant | None:
        """Returns the weight that makes a pair's channels if it is quantized with one scale for all of them."""
        for each in pair.constants:
            node = self._nodes[each.node]
            if each.index == 1 and node.op_type in _ONE_SCALE_OPS and node.input[1] not in per_channel:
                return each
        return None

    def producer_sizes(self, pair: EqualizationPair, per_channel: Collection[str]) -> Array:
        """Returns the largest weight that makes each channel, relative to the largest weight with the same scale."""
        if (constant := self.find_sharing(pair, per_channel)) is None:
            return np.zeros(pair.channels)
        value = np.abs(self.value(constant.node, constant.index))
        others = tuple(axis for axis in range(value.ndim) if axis != value.ndim + constant.axis)
        return np.asarray(value.max(axis=others) / max(float(value.max()), TINY))

    def consumer_sizes(self, pair: EqualizationPair, per_channel: Collection[str]) -> Array | None:
        """Returns the largest weight that reads each channel, relative to the largest weight with the same scale.

        None if each channel's weights have a scale of their own, as in a depthwise convolution.
        """
        sizes = np.zeros(pair.channels)
        for layer in pair.consumers:
            matrix = np.abs(layer.to_matrix(self.value(layer.node, 1)))
            alone = layer.weight in per_channel
            if alone and layer.groups == pair.channels:
                continue
            matrix = matrix / np.maximum(matrix.max(axis=2, keepdims=True) if alone else matrix.max(), TINY)
            sizes = np.maximum(sizes, matrix.max(axis=1).reshape(pair.channels, -1).max(axis=1))
        return sizes if sizes.any() else None

    def value(self, node: str, index: int) -> Array:
        """Returns a scaled constant."""
        value = self._graph.weight(self._nodes[node].input[index]).astype(np.float32)
        for axis, factors in self._along.get((node, index), {}).items():
            value *= factors.astype(np.float32).reshape([-1 if at == axis else 1 for at in range(-value.ndim, 0)])
        if index != 1 or node not in self._read:
            return value
        layer, read = self._read[node]
        matrix = layer.to_matrix(value) / expand_channel_factors(layer, read).astype(np.float32)
        return layer.from_matrix(matrix, value.shape)

    def write(self, renamed: Mapping[str, str], work: Path | None) -> onnx.ModelProto:
        """Returns the graph with the scaled constants under new names, and with renamed tensors.

        Large constants are written to a file in the folder `work`, if given, which also holds the graph's own weights.

        Raises:
            OSError: the folder cannot be written.
        """
        proto = deepcopy(self._graph.model)
        with (
            contextlib.nullcontext()
            if work is None
            else tempfile.NamedTemporaryFile(dir=work, prefix="scaled-", suffix=".data", delete=False)
        ) as out:
            for node in proto.graph.node:
                for index in (index for index in range(len(node.input)) if (node.name, index) in self._scaled):
                    name = f"{node.input[index]}{SUFFIX}.{node.name}"
                    tensor = numpy_helper.from_array(self.value(node.name, index), name)
                    if out is not None:
                        move_weight(tensor, self._graph.folder, out)
                    proto.graph.initializer.append(tensor)
                    node.input[index] = tensor.name
        rename_tensors(proto.graph, renamed)
        drop_unread(proto.graph)
        return proto


class ChannelRange(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest and highest value [channels] of each channel of a tensor, as estimated for samples yet unseen."""

    low: Array
    high: Array

    def magnitude(self) -> Array:
        """Returns the largest magnitude of each channel."""
        return np.asarray(np.maximum(np.abs(self.low), np.abs(self.high)))


MeasuredPairs = Sequence[tuple[EqualizationPair, Mapping[str, ChannelRange]]]
"""Pairs, each with the channel ranges of its tensors."""


def measure_pairs(graph: Graph, statistics: Path, seen: Mapping[str, TensorRange]) -> MeasuredPairs:
    """Returns the pairs that calibration measured, with the channel ranges of each of their tensors.

    The ranges of the pair's own tensor follow from the extremes of its samples; those of tensors before it are computed
    from these. `seen` holds the extremes of whole tensors.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    stored, found = StoredMoments(statistics), list[tuple[EqualizationPair, Mapping[str, ChannelRange]]]()
    for pair in find_equalization_pairs(graph):
        ends = stored.extremes(pair.consumers[0].node)
        if ends is not None and ends[1].shape[1] == pair.channels:
            found.append((pair, _trace_back(pair, ends, seen)))
    return found


def _trace_back(
    pair: EqualizationPair, ends: tuple[Array, Array], seen: Mapping[str, TensorRange]
) -> dict[str, ChannelRange]:
    """Returns the channel ranges of a pair's tensors, computed from the extremes [2, channels] of its own tensor.

    Once channels are equalized, all of them reach the limits of the tensor's range, so of 256 channels each new sample
    would exceed some. The estimate 2 x1 - x2 from the two most extreme samples removes the bias of the extreme x1 (the
    jackknife of D. S. Robson and J. H. Whitlock, "Estimation of a truncation point", Biometrika 51, 1964).
    """
    low, high = (2 * first - second for first, second in (each.astype(np.float64) for each in ends))
    ranges = {pair.tensor: ChannelRange(low=low, high=high)}
    for step in pair.steps:
        low, high = low - step.shift, high - step.shift
        if step.negative_only:
            # A negative slope turns negative values positive, and a slope of zero hides them: then a channel may be as
            # low as the whole tensor.
            floor = min(seen[step.tensor].low, 0.0) if step.tensor in seen else 0.0
            turned = np.maximum(high / np.minimum(step.slope, -TINY), floor)
            low = np.where(step.slope > 0, low / np.where(step.slope > 0, step.slope, 1.0), turned)
        ranges[step.tensor] = ChannelRange(low=low, high=high)
    return ranges


# A layer between two pairs is rescaled by both, so one pass partly undoes the other. The paper repeats until nothing
# changes. With one scale for all weights of a layer, more than four passes gain 0.1 dB on MobileNetV2, and with only
# two, 0.7 dB are missing. With scales per channel, factors grow with every pass: four lose 0.5 dB on vww, over eight
# draws of its samples. Chosen by hand.
_PASSES, _PASSES_PER_CHANNEL = 4, 2
# Channels, and weights, count as at least this share of the largest: otherwise a dead channel would get an unbounded
# factor. Chosen by hand; 2^-13 is below any step of 8 bits.
_LEAST_SHARE = 1e-4


def choose_factors(graph: Graph, found: MeasuredPairs, per_channel: Collection[str]) -> dict[str, tuple[float, ...]]:
    """Returns channel factors that balance channel ranges with the weights that read them, for each tensor to scale.

    The weights named in `per_channel` have a scale for each channel. Where the weights that make a tensor share one
    scale, the size of a channel's weights counts as its range does: otherwise a channel that is always zero would be
    scaled up until its weights are the largest of all.
    """
    pairs, constants = [pair for pair, _ in found], ScaledConstants(graph)
    # The lower bound is applied once, not in each pass: otherwise a channel that is always zero would be scaled up in
    # every pass.
    magnitudes = {pair.tensor: _magnitude(pair, ranges) for pair, ranges in found}
    least = {name: np.maximum(each, _LEAST_SHARE * each.max()) for name, each in magnitudes.items()}
    total = {name: np.ones(len(each)) for name, each in magnitudes.items()}
    shared = any(constants.find_sharing(pair, per_channel) for pair in pairs)
    for _ in range(_PASSES if shared else _PASSES_PER_CHANNEL):
        for pair in pairs:
            magnitude = least[pair.tensor] * total[pair.tensor]
            made_by = constants.producer_sizes(pair, per_channel)
            factors = balance_channels(magnitude, made_by, constants.consumer_sizes(pair, per_channel), pair.ceiling)
            constants.scale(pair, factors)
            total[pair.tensor] *= factors
    return {name: tuple(factors.tolist()) for name, factors in total.items() if (factors != 1).any()}


def equalize_graph(graph: Graph, factors: Mapping[str, tuple[float, ...]], work: Path | None = None) -> Graph:
    """Returns a graph with scaled channels and new tensor names; without factors, the same graph.

    If the graph's weights lie in the folder `work`, the scaled weights are written there, layer by layer, and read
    again when the same factors are asked for.

    Raises:
        UsageError: a factor belongs to no tensor that can be scaled, or is not a power of two.
    """
    if not factors:
        return graph
    kept = None
    if work is not None and graph.folder == work:
        kept = work / f"scaled-{digest_bytes(msgspec.json.encode(dict(factors), order='sorted'))[:24]}.onnx"
        if kept.is_file():
            return view_file(kept)
    pairs = {pair.tensor: pair for pair in find_equalization_pairs(graph)}
    constants, renamed, scaled = ScaledConstants(graph), dict[str, str](), dict[str, Array]()
    for name, its in factors.items():
        values, pair = np.asarray(its), pairs.get(name)
        mantissas, exponents = np.frexp(values)
        are_powers = (mantissas == 0.5).all() and (np.abs(exponents) < 40).all()
        if pair is None or len(values) != pair.channels or not are_powers:
            raise UsageError(f"the plan cannot scale the channels of '{name}'", hint="plan the quantization again")
        constants.scale(pair, values)
        renamed |= {tensor: tensor + SUFFIX for tensor in pair.tensors}
        scaled |= dict.fromkeys(pair.tensors, values)
    proto = constants.write(renamed, None if kept is None else work)
    channel_pairs.write_scaling(proto, scaled)
    if kept is None:
        return view_model(proto, graph.folder)
    # Protobuf keeps the memory of cleared fields; only a new message frees it.
    write_file(kept, proto.SerializeToString())
    return view_file(kept)


def equalize_calibration(
    graph: Graph, calibration: Calibration, factors: Mapping[str, tuple[float, ...]]
) -> Calibration:
    """Returns the calibration of `graph` adapted to the same graph with scaled channels.

    Scaled tensors get their minmax range with every method.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    if not factors:
        return calibration
    changed: dict[str, TensorRange] = {}
    measured = measure_pairs(graph, Path(calibration.statistics), calibration.ranges["minmax"])
    for pair, found in ((pair, found) for pair, found in measured if pair.tensor in factors):
        scale = np.asarray(factors[pair.tensor])
        for name, its in found.items():
            changed[name] = snap_range(TensorRange(low=(its.low * scale).min(), high=(its.high * scale).max()))
        changed |= dict.fromkeys(pair.reshaped, changed[pair.tensor])
    renamed = {name for pair in find_equalization_pairs(graph) if pair.tensor in factors for name in pair.tensors}
    names = {name: name + SUFFIX if name in renamed else name for name in calibration.ranges["minmax"]}
    ranges = {
        method: {names[name]: changed.get(name, seen) for name, seen in own.items()}
        for method, own in calibration.ranges.items()
    }
    # What the largest values of a tensor tell of its tail is taken to hold for its scaled channels.
    shares = {names[name]: share for name, share in calibration.unseen_shares.items()}
    return msgspec.structs.replace(calibration, ranges=ranges, unseen_shares=shares)


def _magnitude(pair: EqualizationPair, ranges: Mapping[str, ChannelRange]) -> Array:
    """Returns the size of each channel: in the pair's tensor, or before a slope if it is larger there.

    "Larger" is relative to the largest channel of each tensor.
    """
    own = ranges[pair.tensor].magnitude()
    share = own / max(float(own.max()), TINY)
    for step in (step for step in pair.steps if step.negative_only and (step.slope != 1).any()):
        before = ranges[step.tensor].magnitude()
        share = np.maximum(share, before / max(float(before.max()), TINY))
    return np.asarray(share * own.max())


def balance_channels(magnitude: Array, made_by: Array, read_by: Array | None, ceiling: float | None) -> Array:
    """Returns factors, powers of two, that balance the sizes of channels with those of the weights that read them.

    `magnitude` is the largest value of each channel; `made_by` and `read_by` are the largest weights that make and read
    it (`read_by` is None if each channel's weights have a scale of their own). The largest channel keeps its size; so
    do channels that reach the ceiling.
    """
    if not magnitude.max() > 0:
        return np.ones(len(magnitude))
    magnitude = np.maximum(magnitude, _LEAST_SHARE * magnitude.max())
    size = np.maximum(magnitude / magnitude.max(), made_by)
    # sqrt(r2 / r1) gives both the same size sqrt(r1 r2), which maximizes the product of their shares of the whole range
    # (Nagel et al., section 4.1; SmoothQuant, section 4, with alpha = 1/2).
    factors = 1 / size if read_by is None else np.sqrt(np.maximum(read_by, _LEAST_SHARE) / size)
    if ceiling is None:
        return _round_to_power(factors * magnitude.max() / (magnitude * factors).max())
    # A Clip cuts all channels at the same value, so it does not commute with factors. The paper replaces Relu6 by Relu;
    # here channels that reach the bound are not scaled, and the others stay below it.
    full = magnitude >= ceiling
    anchor = np.exp(np.log(factors[full]).mean()) if full.any() else (magnitude * factors).max() / magnitude.max()
    limit = 2 ** np.floor(np.log2(ceiling / magnitude))
    return np.where(full, 1.0, np.minimum(_round_to_power(factors / anchor), limit))


def _round_to_power(values: Array) -> Array:
    return np.asarray(2 ** np.rint(np.log2(values)))
