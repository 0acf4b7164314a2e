"""Cross-layer equalization: unequal channels are scaled where they are made, and back in the weights that read them.

M. Nagel et al., "Data-free quantization through weight equalization and bias correction", arXiv:1906.04721, with what
calibration saw instead of the producer's weights, which makes it the activation scaling of SmoothQuant (G. Xiao et al.,
arXiv:2211.10438) where a normalisation is the producer. All factors are powers of two, by which IEEE 754 multiplies
exactly: the float model computes the same to the last bit.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edgekit._files import digest_bytes, write_file
from edgekit.errors import UsageError
from edgekit.graph.graph import Graph, view_file, view_model
from edgekit.model.scaling import NOTE, SUFFIX, write_powers
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.equalization.channel_ranges import ChannelRange, read_channel_ranges
from edgekit.quantize.equalization.constants import TINY, ScaledConstants, along
from edgekit.quantize.equalization.pairs import (
    EqualizationPair,
    find_channel_source,
    find_equalization_pairs,
)
from edgekit.quantize.equalization.silu import LEAST_RATIO, RESTORED, restore_sigmoid_inputs, saturation_of
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.ranges.methods import TensorRange, snap_range

# A layer between two pairs is rescaled by both, so one pass undoes a part of the other. The paper repeats until nothing
# changes. With one scale for all weights of a layer more than four passes gain 0.1 dB on MobileNetV2, where two leave
# 0.7 dB. With a scale for each channel factors grow on with every pass: four lose 0.5 dB on vww, over eight draws of
# its samples. Chosen by hand.
_PASSES, _PASSES_PER_CHANNEL = 4, 2
# A channel, or its weights, smaller than this share of the largest counts as so large: else one that is dead would get
# a factor without bound. Chosen by hand; 2^-13 is below any step of 8 bits.
_LEAST_SHARE = 1e-4
MeasuredPairs = Sequence[tuple[EqualizationPair, Mapping[str, ChannelRange]]]
"""Pairs with the ranges of the channels of their tensors."""
# A channel below a Clip's end may grow up to this share of it: samples do not show all. Chosen by hand.
_CEILING_SHARE = 0.9


def measure_pairs(graph: Graph, statistics: Path, seen: Mapping[str, TensorRange]) -> MeasuredPairs:
    """Returns the pairs of a graph whose channels calibration measured; `seen` holds the extremes of whole tensors.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    return tuple(read_channel_ranges(graph, find_equalization_pairs(graph), statistics, seen))


def choose_factors(
    graph: Graph, found: MeasuredPairs, per_channel: Collection[str], *, through_silu: bool = False
) -> dict[str, tuple[float, ...]]:
    """Returns for each tensor worth it the factor of each channel that balances its range with the weights behind it.

    Where the weights that make it get one scale together, not one a channel as those named by `per_channel` do, they
    count like its range: a channel that never fires would otherwise be scaled up until its weights are the largest.
    With `through_silu` channels are scaled through x * sigmoid(x) too, where they are unequal enough to be worth a
    product before the sigmoid.
    """
    pairs, magnitudes = [pair for pair, _ in found], {pair.tensor: _magnitude(pair, ranges) for pair, ranges in found}
    unscaled = {step.sigmoid for pair in pairs for step in pair.steps if step.sigmoid}
    if through_silu and unscaled:
        total = _equalize(graph, pairs, magnitudes, per_channel, frozenset())
        unscaled = {
            step.sigmoid
            for pair in pairs
            for step in pair.steps
            if step.sigmoid and np.ptp(np.log2(total[pair.tensor][slice(*step.part)])) < np.log2(LEAST_RATIO)
        }
    total = _equalize(graph, pairs, magnitudes, per_channel, unscaled)
    return {name: tuple(factors.tolist()) for name, factors in total.items() if (factors != 1).any()}


def scales_silu(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> bool:
    """Returns True if factors scale channels through x * sigmoid(x)."""
    pairs = [pair for pair in find_equalization_pairs(graph) if pair.tensor in factors]
    return any(
        step.sigmoid and set(factors[pair.tensor][slice(*step.part)]) != {1.0} for pair in pairs for step in pair.steps
    )


def _equalize(
    graph: Graph,
    pairs: Sequence[EqualizationPair],
    magnitudes: Mapping[str, Array],
    per_channel: Collection[str],
    unscaled: Collection[str],
) -> dict[str, Array]:
    """Returns the factors of the channels of each pair, which are 1 before the sigmoids that are to stay `unscaled`."""
    constants = ScaledConstants(graph)
    total = {name: np.ones(len(magnitude)) for name, magnitude in magnitudes.items()}
    # Once for all passes: a channel that never fires would be as small as ever after each, and grow with every one.
    least = {name: np.maximum(each, _LEAST_SHARE * each.max()) for name, each in magnitudes.items()}
    shared = any(constants.find_sharing(pair, per_channel) for pair in pairs)
    for _ in range(_PASSES if shared else _PASSES_PER_CHANNEL):
        for pair in pairs:
            magnitude = least[pair.tensor] * total[pair.tensor]
            made_by = constants.producer_sizes(pair, per_channel)
            factors = balance_channels(magnitude, made_by, constants.consumer_sizes(pair, per_channel), pair.ceiling)
            for start, stop in (*pair.fixed, *(step.part for step in pair.steps if step.sigmoid in unscaled)):
                factors[start:stop] = 1.0
            constants.scale(pair, factors)
            total[pair.tensor] *= factors
    return total


def equalize_graph(graph: Graph, factors: Mapping[str, tuple[float, ...]], work: Path | None = None) -> Graph:
    """Returns a graph with scaled channels, whose tensors have new names; the same graph where there are no factors.

    Where the graph's weights lie in the folder `work`, the scaled ones are written there, layer by layer, and read
    again where the same is asked for.

    Raises:
        UsageError: a factor is of no tensor that can be scaled, or no power of two.
    """
    if not factors:
        return graph
    kept = None
    if work is not None and graph.folder == work:
        kept = work / f"scaled-{digest_bytes(msgspec.json.encode(dict(factors), order='sorted'))[:24]}.onnx"
        if kept.is_file():
            return view_file(kept)
    pairs = {pair.tensor: pair for pair in find_equalization_pairs(graph)}
    constants, renamed, powers = ScaledConstants(graph), dict[str, str](), dict[str, str]()
    sigmoids: dict[str, Array] = {}
    for name, its in factors.items():
        values, pair = np.asarray(its), pairs.get(name)
        if pair is None or len(values) != pair.channels or not _are_powers(values):
            raise UsageError(f"the plan cannot scale the channels of '{name}'", hint="plan the quantization again")
        constants.scale(pair, values)
        renamed |= {tensor: tensor + SUFFIX for tensor in pair.tensors}
        powers |= dict.fromkeys((name, *pair.reshaped), write_powers(values))
        for step in pair.steps:
            part = values[slice(*step.part)]
            powers[step.tensor] = write_powers(part)
            if step.sigmoid and (part != 1).any():
                rank = len(graph.dims(step.tensor)) or -pair.axis
                sigmoids[step.sigmoid] = along(part, pair.axis, rank)
    proto = constants.write(renamed, None if kept is None else work)
    restore_sigmoid_inputs(proto, sigmoids)
    proto.metadata_props.add(key=NOTE, value=msgspec.json.encode(powers, order="sorted").decode())
    if kept is None:
        return view_model(proto, graph.folder)
    # Protobuf keeps the memory of fields that were cleared; only a new message is without it.
    write_file(kept, proto.SerializeToString())
    return view_file(kept)


def equalize_calibration(
    graph: Graph, calibration: Calibration, factors: Mapping[str, tuple[float, ...]]
) -> Calibration:
    """Returns what a calibration of `graph` says of the same graph with scaled channels.

    Scaled tensors get the range of their extremes with every method.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    if not factors:
        return calibration
    pairs = [pair for pair in find_equalization_pairs(graph) if pair.tensor in factors]
    nodes = {node.name: node for node in graph.nodes}
    changed: dict[str, TensorRange] = {}
    saturations: dict[str, float] = {}
    for pair, found in read_channel_ranges(graph, pairs, Path(calibration.statistics), calibration.ranges["minmax"]):
        for name, its in found.items():
            scale = np.asarray(factors[pair.tensor])[its.part]
            if (scale != 1).any():
                changed[name] = snap_range(TensorRange(low=(its.low * scale).min(), high=(its.high * scale).max()))
        changed |= dict.fromkeys(pair.reshaped, changed[pair.tensor])
        through = [step for step in pair.steps if step.sigmoid and step.tensor in changed]
        saturations |= {step.tensor: saturation_of(nodes[step.sigmoid]) for step in through}
    renamed = {name for pair in pairs for name in pair.tensors}
    ranges = {
        method: {
            **{name + SUFFIX if name in renamed else name: changed.get(name, seen) for name, seen in own.items()},
            **{name + RESTORED: _clip_range(own[name], most) for name, most in saturations.items() if name in own},
        }
        for method, own in calibration.ranges.items()
    }
    return msgspec.structs.replace(calibration, ranges=ranges)


def _clip_range(seen: TensorRange, most: float) -> TensorRange:
    return snap_range(TensorRange(low=max(seen.low, -most), high=min(seen.high, most)))


def scaled_layers(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Returns for each layer of an equalized graph whose input was scaled, by its node, the factors of its channels."""
    sources = {layer.node: find_channel_source(graph, layer).removesuffix(SUFFIX) for layer in read_layers(graph)}
    return {node: factors[source] for node, source in sources.items() if source in factors}


def _magnitude(pair: EqualizationPair, ranges: Mapping[str, ChannelRange]) -> Array:
    """Returns how far each channel reaches; before a slope that is a share of the tensor there, if that is larger."""
    own = ranges[pair.tensor].magnitude()
    share = own / max(float(own.max()), TINY)
    for step in (step for step in pair.steps if step.sigmoid or (step.negative_only and (step.slope != 1).any())):
        before = ranges[step.tensor].magnitude()
        part = slice(*step.part)
        share[part] = np.maximum(share[part], before / max(float(before.max()), TINY))
    return np.asarray(share * own.max())


def balance_channels(magnitude: Array, made_by: Array, read_by: Array | None, ceiling: float | None) -> Array:
    """Returns factors, powers of two, that make the sizes of channels and of the weights behind them alike.

    `magnitude` is the largest value of each channel, `made_by` and `read_by` the largest weight that makes and that
    reads it; None where the scale of each channel's weights is its own. The largest channel keeps its size; one that
    reaches the ceiling keeps it too.
    """
    if not magnitude.max() > 0:
        return np.ones(len(magnitude))
    magnitude = np.maximum(magnitude, _LEAST_SHARE * magnitude.max())
    size = np.maximum(magnitude / magnitude.max(), made_by)
    # sqrt(r2 / r1) is what gives both the same size sqrt(r1 r2), so that the product of their shares of the whole
    # range is largest (Nagel et al., section 4.1; SmoothQuant, section 4, with alpha = 1/2).
    factors = 1 / size if read_by is None else np.sqrt(np.maximum(read_by, _LEAST_SHARE) / size)
    if ceiling is None:
        return _round_to_power(factors * magnitude.max() / (magnitude * factors).max())
    # A Clip cuts every channel at one height and commutes with no factor. The paper puts a Relu in the place of a
    # Relu6; here channels that touch the end stay as they are, and others stay below it.
    full = magnitude > _CEILING_SHARE * ceiling
    anchor = np.exp(np.log(factors[full]).mean()) if full.any() else (magnitude * factors).max() / magnitude.max()
    limit = 2 ** np.floor(np.log2(_CEILING_SHARE * ceiling / magnitude))
    return np.where(full, 1.0, np.minimum(_round_to_power(factors / anchor), limit))


def _round_to_power(values: Array) -> Array:
    return np.asarray(2 ** np.rint(np.log2(values)))


def _are_powers(values: Array) -> bool:
    mantissas, exponents = np.frexp(values)
    return bool((mantissas == 0.5).all() and (np.abs(exponents) < 40).all())
