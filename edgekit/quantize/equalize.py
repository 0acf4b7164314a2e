"""Channels of unequal size evened out: scaled down or up where they are made, and back in the weights that read them.

Cross-layer equalization (M. Nagel et al., "Data-free quantization through weight equalization and bias correction",
2019) with what calibration saw instead of the producer's weights, which makes it the migration of SmoothQuant (G. Xiao
et al., 2023) where a normalisation is the producer. All factors are powers of two: the float model computes the same
to the last bit.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import UsageError
from edgekit.model import drop_unread
from edgekit.quantize.calibrate import Calibration
from edgekit.quantize.graph import Graph, index_proto
from edgekit.quantize.layers import layer_factors, read_layers
from edgekit.quantize.moments import open_moments
from edgekit.quantize.ranges import TensorRange, snap_range
from edgekit.quantize.seams import Seam, find_seams, source_of
from edgekit.scaling import NOTE, SUFFIX, write_powers
from edgekit.tensors import Array

_SWEEPS = 2
_LEAST = 1e-4
"""A channel, or its weights, smaller than this share of the largest counts as so large."""
_TINY = float(np.finfo(np.float32).tiny)
_SHARING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_MARGIN = 0.9
"""A channel below a Clip's end may grow up to this share of it."""


def choose_factors(graph: Graph, statistics: Path, per_channel: Collection[str]) -> dict[str, tuple[float, ...]]:
    """Returns for each tensor worth it the factor of each channel that balances its range with the weights behind it.

    Where the weights that make it get one scale together, not one a channel as those named by `per_channel` do, they
    count like its range: a channel that never fires would otherwise be scaled up until its weights are the largest.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    seams = find_seams(graph)
    constants = _Constants(graph)
    spans = _read_spans(seams, statistics)
    total = {name: np.ones(len(high)) for name, (_, high) in spans.items()}
    for _ in range(_SWEEPS):
        for seam in (seam for seam in seams if seam.tensor in spans):
            low, high = spans[seam.tensor]
            reach = np.maximum(np.abs(low), np.abs(high)) * total[seam.tensor]
            rows, columns = constants.row_sizes(seam, per_channel), constants.column_sizes(seam, per_channel)
            factors = _balance(reach, rows, columns, seam.ceiling)
            constants.scale(seam, factors)
            total[seam.tensor] *= factors
    return {name: tuple(factors.tolist()) for name, factors in total.items() if (factors != 1).any()}


def equalize_graph(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> Graph:
    """Returns a graph with scaled channels, whose tensors have new names; the same graph where there are no factors.

    Raises:
        UsageError: a factor is of no tensor that can be scaled, or no power of two.
    """
    if not factors:
        return graph
    seams = {seam.tensor: seam for seam in find_seams(graph)}
    constants, renamed, powers = _Constants(graph), dict[str, str](), dict[str, str]()
    for name, its in factors.items():
        values = np.asarray(its)
        if name not in seams or len(values) != seams[name].channels or not _are_powers(values):
            raise UsageError(f"the plan cannot scale the channels of '{name}'", hint="plan the quantization again")
        constants.scale(seams[name], values)
        renamed |= {tensor: tensor + SUFFIX for tensor in seams[name].tensors}
        powers |= dict.fromkeys(seams[name].tensors, write_powers(values))
    proto = constants.write(renamed)
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
    seams = [seam for seam in find_seams(graph) if seam.tensor in factors]
    spans = _read_spans(seams, Path(calibration.statistics))
    changed: dict[str, TensorRange] = {}
    for seam in seams:
        low, high = spans[seam.tensor]
        scale = np.asarray(factors[seam.tensor])
        changed |= dict.fromkeys((seam.tensor, *seam.copies), _span_of(low * scale, high * scale))
        for step in seam.steps:
            low = (low - step.shift) / (step.slope if step.below else 1.0)
            high = high - step.shift
            changed[step.tensor] = _span_of(low * scale, high * scale)
    ranges = {
        method: {name + SUFFIX if name in changed else name: changed.get(name, span) for name, span in spans_of.items()}
        for method, spans_of in calibration.ranges.items()
    }
    return msgspec.structs.replace(calibration, ranges=ranges)


def scaled_layers(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """Returns for each layer of an equalized graph whose input was scaled, by its node, the factors of its channels."""
    sources = {layer.node: source_of(graph, layer).removesuffix(SUFFIX) for layer in read_layers(graph)}
    return {node: factors[source] for node, source in sources.items() if source in factors}


def _read_spans(seams: tuple[Seam, ...] | list[Seam], statistics: Path) -> dict[str, tuple[Array, Array]]:
    """Returns the lowest and highest value of each channel of each seam that calibration measured."""
    spans: dict[str, tuple[Array, Array]] = {}
    with open_moments(statistics / "moments.npz") as read:
        for seam in seams:
            moment = read(seam.readers[0].node)
            if moment is not None and len(moment.high) == seam.channels:
                spans[seam.tensor] = moment.low.astype(np.float64), moment.high.astype(np.float64)
    return spans


def _balance(reach: Array, rows: Array, columns: Array | None, ceiling: float | None) -> Array:
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


def _span_of(low: Array, high: Array) -> TensorRange:
    return snap_range(TensorRange(low=float(low.min()), high=float(high.max())))


class _Constants:
    """The constants of a graph while they are scaled, by node and input."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph.proto.graph.node}
        self._values: dict[tuple[str, int], Array] = {}

    def scale(self, seam: Seam, factors: Array) -> None:
        for edit in seam.edits:
            value = self._get(edit.node, edit.index)
            shape = [-1 if axis == value.ndim + edit.axis else 1 for axis in range(value.ndim)]
            self._values[edit.node, edit.index] = value * factors.astype(np.float32).reshape(shape)
        for layer in seam.readers:
            value = self._get(layer.node, 1)
            matrix = layer.to_matrix(value) / layer_factors(layer, factors).astype(np.float32)
            self._values[layer.node, 1] = layer.from_matrix(matrix, value.shape)

    def row_sizes(self, seam: Seam, per_channel: Collection[str]) -> Array:
        """Returns the largest weight that makes each channel, as a share of the largest of all that share its scale."""
        sizes = np.zeros(seam.channels)
        for edit in seam.edits:
            node = self._nodes[edit.node]
            if edit.index != 1 or node.op_type not in _SHARING or node.input[1] in per_channel:
                continue
            value = np.abs(self._get(edit.node, edit.index))
            others = tuple(axis for axis in range(value.ndim) if axis != value.ndim + edit.axis)
            sizes = value.max(axis=others) / max(float(value.max()), _TINY)
        return sizes

    def column_sizes(self, seam: Seam, per_channel: Collection[str]) -> Array | None:
        """Returns the largest weight that reads each channel, as a share of the largest that shares its scale.

        None where each channel is read by weights with a scale of their own.
        """
        sizes = np.zeros(seam.channels)
        for layer in seam.readers:
            matrix = np.abs(layer.to_matrix(self._get(layer.node, 1)))
            alone = layer.weight in per_channel
            if alone and layer.groups == seam.channels:
                continue
            matrix = matrix / np.maximum(matrix.max(axis=2, keepdims=True) if alone else matrix.max(), _TINY)
            sizes = np.maximum(sizes, matrix.max(axis=1).reshape(seam.channels, -1).max(axis=1))
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
