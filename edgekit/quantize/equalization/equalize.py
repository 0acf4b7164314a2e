"""Channels of unequal size evened out: scaled down or up where they are made, and back in the weights that read them.

Cross-layer equalization (M. Nagel et al., "Data-free quantization through weight equalization and bias correction",
2019) with what calibration saw instead of the producer's weights, which makes it the migration of SmoothQuant (G. Xiao
et al., 2023) where a normalisation is the producer. All factors are powers of two: the float model computes the same
to the last bit.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import UsageError
from edgekit.model.model import drop_unread
from edgekit.model.scaling import NOTE, SUFFIX, write_powers
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.equalization.channel_ranges import ChannelRange, read_channel_ranges
from edgekit.quantize.equalization.pairs import EqualizationPair, find_equalization_pairs, source_of
from edgekit.quantize.equalization.silu import LEAST_RATIO, RESTORED, restore_sigmoid_inputs, saturation_of
from edgekit.quantize.graph.graph import Graph, index_proto
from edgekit.quantize.graph.layers import expand_channel_factors, read_layers
from edgekit.quantize.ranges.methods import TensorRange, snap_range

_SWEEPS = 2
_LEAST = 1e-4
"""A channel, or its weights, smaller than this share of the largest counts as so large."""
_TINY = float(np.finfo(np.float32).tiny)
_SHARING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MARGIN = 0.9
"""A channel below a Clip's end may grow up to this share of it."""


def choose_factors(
    graph: Graph,
    statistics: Path,
    per_channel: Collection[str],
    seen: Mapping[str, TensorRange] | None = None,
    *,
    gated: bool = False,
) -> dict[str, tuple[float, ...]]:
    """Returns for each tensor worth it the factor of each channel that balances its range with the weights behind it.

    Where the weights that make it get one scale together, not one a channel as those named by `per_channel` do, they
    count like its range: a channel that never fires would otherwise be scaled up until its weights are the largest.
    `seen` holds the extremes of tensors. With `gated` channels are scaled through x * sigmoid(x) too, where they are
    unequal enough to be worth a product before the sigmoid.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    pairs = find_equalization_pairs(graph)
    reaches = {
        pair.tensor: _reach(pair, spans) for pair, spans in read_channel_ranges(graph, pairs, statistics, seen or {})
    }
    pairs = tuple(pair for pair in pairs if pair.tensor in reaches)
    kept = {step.gate for pair in pairs for step in pair.steps if step.gate}
    if gated and kept:
        total = _even_out(graph, pairs, reaches, per_channel, frozenset())
        kept = {
            step.gate
            for pair in pairs
            for step in pair.steps
            if step.gate and np.ptp(np.log2(total[pair.tensor][slice(*step.part)])) < np.log2(LEAST_RATIO)
        }
    total = _even_out(graph, pairs, reaches, per_channel, kept)
    return {name: tuple(factors.tolist()) for name, factors in total.items() if (factors != 1).any()}


def scales_silu(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> bool:
    """Returns True if factors scale channels through x * sigmoid(x)."""
    pairs = [pair for pair in find_equalization_pairs(graph) if pair.tensor in factors]
    return any(
        step.gate and set(factors[pair.tensor][slice(*step.part)]) != {1.0} for pair in pairs for step in pair.steps
    )


def _even_out(
    graph: Graph,
    pairs: Sequence[EqualizationPair],
    reaches: Mapping[str, Array],
    per_channel: Collection[str],
    kept: Collection[str],
) -> dict[str, Array]:
    """Returns the factors of the channels of each pair, which are 1 before the gates that are `kept` as they are."""
    constants = _Constants(graph)
    total = {name: np.ones(len(reach)) for name, reach in reaches.items()}
    for _ in range(_SWEEPS):
        for pair in pairs:
            reach = reaches[pair.tensor] * total[pair.tensor]
            rows, columns = constants.row_sizes(pair, per_channel), constants.column_sizes(pair, per_channel)
            factors = balance_channels(reach, rows, columns, pair.ceiling)
            for start, stop in (*pair.fixed, *(step.part for step in pair.steps if step.gate in kept)):
                factors[start:stop] = 1.0
            constants.scale(pair, factors)
            total[pair.tensor] *= factors
    return total


def equalize_graph(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> Graph:
    """Returns a graph with scaled channels, whose tensors have new names; the same graph where there are no factors.

    Raises:
        UsageError: a factor is of no tensor that can be scaled, or no power of two.
    """
    if not factors:
        return graph
    pairs = {pair.tensor: pair for pair in find_equalization_pairs(graph)}
    constants, renamed, powers = _Constants(graph), dict[str, str](), dict[str, str]()
    gates: dict[str, Array] = {}
    for name, its in factors.items():
        values = np.asarray(its)
        if name not in pairs or len(values) != pairs[name].channels or not _are_powers(values):
            raise UsageError(f"the plan cannot scale the channels of '{name}'", hint="plan the quantization again")
        constants.scale(pairs[name], values)
        renamed |= {tensor: tensor + SUFFIX for tensor in pairs[name].tensors}
        powers |= dict.fromkeys((name, *pairs[name].copies), write_powers(values))
        powers |= {step.tensor: write_powers(values[slice(*step.part)]) for step in pairs[name].steps}
        for step in pairs[name].steps:
            part = values[slice(*step.part)]
            if step.gate and (part != 1).any():
                rank = len(graph.shapes.get(step.tensor, ())) or -pairs[name].place
                gates[step.gate] = part.reshape([-1 if axis == pairs[name].place else 1 for axis in range(-rank, 0)])
    proto = constants.write(renamed)
    restore_sigmoid_inputs(proto, gates)
    note = msgspec.json.encode(powers, order="sorted").decode()
    proto.metadata_props.add(key=NOTE, value=note)
    return index_proto(proto)


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
    changed: dict[str, TensorRange] = {}
    reaches: dict[str, float] = {}
    for pair, spans in read_channel_ranges(graph, pairs, Path(calibration.statistics), calibration.ranges["minmax"]):
        for name, span in spans.items():
            scale = np.asarray(factors[pair.tensor])[span.part]
            if (scale != 1).any():
                changed[name] = snap_range(TensorRange(low=(span.low * scale).min(), high=(span.high * scale).max()))
        changed |= dict.fromkeys(pair.copies, changed[pair.tensor])
        gates = {step.gate: step.tensor for step in pair.steps if step.gate and step.tensor in changed}
        reaches |= {gates[node.name]: saturation_of(node) for node in graph.proto.graph.node if node.name in gates}
    renamed = {name for pair in pairs for name in pair.tensors}
    ranges = {
        method: {
            **{name + SUFFIX if name in renamed else name: changed.get(name, span) for name, span in its.items()},
            **{name + RESTORED: _cut_range(its[name], reach) for name, reach in reaches.items() if name in its},
        }
        for method, its in calibration.ranges.items()
    }
    return msgspec.structs.replace(calibration, ranges=ranges)


def _cut_range(span: TensorRange, reach: float) -> TensorRange:
    return snap_range(TensorRange(low=max(span.low, -reach), high=min(span.high, reach)))


def scaled_layers(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Returns for each layer of an equalized graph whose input was scaled, by its node, the factors of its channels."""
    sources = {layer.node: source_of(graph, layer).removesuffix(SUFFIX) for layer in read_layers(graph)}
    return {node: factors[source] for node, source in sources.items() if source in factors}


def _reach(pair: EqualizationPair, spans: Mapping[str, ChannelRange]) -> Array:
    """Returns how far each channel reaches; before a slope that is a share of the tensor there, if that is larger."""
    own = spans[pair.tensor].reach()
    share = own / max(float(own.max()), _TINY)
    for step in (step for step in pair.steps if step.gate or (step.below and (step.slope != 1).any())):
        before = spans[step.tensor].reach()
        part = slice(*step.part)
        share[part] = np.maximum(share[part], before / max(float(before.max()), _TINY))
    return np.asarray(share * own.max())


def balance_channels(reach: Array, rows: Array, columns: Array | None, ceiling: float | None) -> Array:
    """Returns factors, powers of two, that make the sizes of channels and of the weights behind them alike.

    `reach` is the largest value of each channel, `rows` and `columns` the largest weight that makes and that reads it;
    None where the scale of each channel's weights is its own. The largest channel keeps its size; one that reaches the
    ceiling keeps it too.
    """
    if not reach.max() > 0:
        return np.ones(len(reach))
    reach = np.maximum(reach, _LEAST * reach.max())
    size = np.maximum(reach / reach.max(), rows)
    factors = 1 / size if columns is None else np.sqrt(np.maximum(columns, _LEAST) / size)
    if ceiling is None:
        return _power(factors * reach.max() / (reach * factors).max())
    full = reach > _MARGIN * ceiling
    anchor = np.exp(np.log(factors[full]).mean()) if full.any() else (reach * factors).max() / reach.max()
    limit = 2 ** np.floor(np.log2(_MARGIN * ceiling / reach))
    return np.where(full, 1.0, np.minimum(_power(factors / anchor), limit))


def _power(values: Array) -> Array:
    return np.asarray(2 ** np.rint(np.log2(values)))


def _are_powers(values: Array) -> bool:
    good = np.isfinite(values).all() and (values > 0).all()
    return bool(good and (np.frexp(values)[0] == 0.5).all() and (np.abs(np.log2(values)) < 40).all())


class _Constants:
    """The constants of a graph while they are scaled, by node and input."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph.proto.graph.node}
        self._values: dict[tuple[str, int], Array] = {}

    def scale(self, pair: EqualizationPair, factors: Array) -> None:
        for edit in pair.edits:
            value = self._get(edit.node, edit.index)
            shape = [-1 if axis == value.ndim + edit.axis else 1 for axis in range(value.ndim)]
            its = factors[slice(*edit.part)].astype(np.float32)
            self._values[edit.node, edit.index] = value * its.reshape(shape)
        for layer in pair.readers:
            value = self._get(layer.node, 1)
            matrix = layer.to_matrix(value) / expand_channel_factors(layer, factors).astype(np.float32)
            self._values[layer.node, 1] = layer.from_matrix(matrix, value.shape)

    def row_sizes(self, pair: EqualizationPair, per_channel: Collection[str]) -> Array:
        """Returns the largest weight that makes each channel, as a share of the largest of all that share its scale."""
        sizes = np.zeros(pair.channels)
        for edit in pair.edits:
            node = self._nodes[edit.node]
            if edit.index != 1 or node.op_type not in _SHARING or node.input[1] in per_channel:
                continue
            value = np.abs(self._get(edit.node, edit.index))
            others = tuple(axis for axis in range(value.ndim) if axis != value.ndim + edit.axis)
            sizes[slice(*edit.part)] = value.max(axis=others) / max(float(value.max()), _TINY)
        return sizes

    def column_sizes(self, pair: EqualizationPair, per_channel: Collection[str]) -> Array | None:
        """Returns the largest weight that reads each channel, as a share of the largest that shares its scale.

        None where each channel is read by weights with a scale of their own.
        """
        sizes = np.zeros(pair.channels)
        for layer in pair.readers:
            matrix = np.abs(layer.to_matrix(self._get(layer.node, 1)))
            alone = layer.weight in per_channel
            if alone and layer.groups == pair.channels:
                continue
            matrix = matrix / np.maximum(matrix.max(axis=2, keepdims=True) if alone else matrix.max(), _TINY)
            sizes = np.maximum(sizes, matrix.max(axis=1).reshape(pair.channels, -1).max(axis=1))
        return sizes if sizes.any() else None

    def write(self, renamed: Mapping[str, str]) -> onnx.ModelProto:
        """Returns the graph with the scaled constants under names of their own, and tensors renamed."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._graph.proto)
        for node in proto.graph.node:
            for _, index in [key for key in self._values if key[0] == node.name]:
                name = f"{node.input[index]}{SUFFIX}.{node.name}"
                proto.graph.initializer.append(numpy_helper.from_array(self._values[node.name, index], name))
                node.input[index] = name
            for names in (node.input, node.output):
                for index, name in enumerate(names):
                    names[index] = renamed.get(name, name)
        for value in proto.graph.value_info:
            value.name = renamed.get(value.name, value.name)
        drop_unread(proto.graph)
        return proto

    def _get(self, node: str, index: int) -> Array:
        if (node, index) not in self._values:
            tensor = self._graph.initializers[self._nodes[node].input[index]]
            self._values[node, index] = numpy_helper.to_array(tensor).astype(np.float32)
        return self._values[node, index]
