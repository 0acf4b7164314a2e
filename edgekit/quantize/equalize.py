"""Channels of unequal size evened out: scaled down or up where they are made, and back in the weights that read them.

Cross-layer equalization (M. Nagel et al., "Data-free quantization through weight equalization and bias correction",
2019) with what calibration saw instead of the producer's weights, which makes it the migration of SmoothQuant (G. Xiao
et al., 2023) where a normalisation is the producer. All factors are powers of two: the float model computes the same
to the last bit.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import UsageError
from edgekit.quantize.calibrate import Calibration
from edgekit.quantize.graph import Graph, index_proto
from edgekit.quantize.judge import judge_points
from edgekit.quantize.layers import Layer, layer_factors, read_layers
from edgekit.quantize.moments import open_moments
from edgekit.quantize.ranges import TensorRange, snap_range
from edgekit.tensors import Array

SUFFIX = "_equalized"
"""What a scaled tensor has behind the name that it had."""
_SWEEPS = 2
_LEAST = 1e-4
"""A channel, or its weights, smaller than this share of the largest counts as so large."""
_MARGIN = 0.9
"""A channel below a Clip's end may grow up to this share of it."""
_WEIGHTS: dict[str, tuple[tuple[int, int], ...]] = {
    "Conv": ((1, 0), (2, 0)),
    "ConvTranspose": ((1, 1), (2, 0)),
    "BatchNormalization": ((1, 0), (2, 0)),
    "InstanceNormalization": ((1, 0), (2, 0)),
    "LayerNormalization": ((1, -1), (2, -1)),
    "MatMul": ((1, -1),),
}
"""The constant inputs that decide how large the channels of an output are: (input, axis of the channels)."""


class _Edit(msgspec.Struct, frozen=True, kw_only=True):
    """A constant to multiply: an input of a node, and the axis of the channels counted from the end (negative)."""

    node: str
    index: int
    axis: int


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on the way back from a seam, and what undoes the node behind it: value = (value - shift) / slope."""

    tensor: str
    shift: Array
    slope: Array
    below: bool


class Seam(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that only layers with weights read, whose channels are made by constants: where they can be scaled.

    `ceiling` is where a Clip cuts its channels off.
    """

    tensor: str
    channels: int
    edits: tuple[_Edit, ...]
    steps: tuple[_Step, ...]
    ceiling: float | None
    readers: tuple[Layer, ...]


def find_seams(graph: Graph) -> tuple[Seam, ...]:
    """Returns the seams of a graph, in graph order; no tensor that a quantized model is judged by is among them."""
    layers: dict[str, list[Layer]] = {}
    for layer in read_layers(graph):
        layers.setdefault(layer.source, []).append(layer)
    judged = {point.tensor for point in judge_points(graph)}
    seams = (_find_seam(graph, name, tuple(readers)) for name, readers in layers.items() if name not in judged)
    return tuple(seam for seam in seams if seam is not None and judged.isdisjoint(step.tensor for step in seam.steps))


def choose_factors(graph: Graph, statistics: Path) -> dict[str, tuple[float, ...]]:
    """Returns for each tensor worth it the factor of each channel that balances its range with the weights behind it.

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
            size = np.maximum(np.abs(low), np.abs(high)) * total[seam.tensor]
            factors = _balance(size, constants.column_sizes(seam), seam.ceiling)
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
    constants, renamed = _Constants(graph), dict[str, str]()
    for name, its in factors.items():
        values = np.asarray(its)
        if name not in seams or len(values) != seams[name].channels or not _are_powers(values):
            raise UsageError(f"the plan cannot scale the channels of '{name}'", hint="plan the quantization again")
        constants.scale(seams[name], values)
        renamed |= {tensor: tensor + SUFFIX for tensor in (name, *(step.tensor for step in seams[name].steps))}
    return index_proto(constants.write(renamed))


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
        changed[seam.tensor] = _span_of(low * scale, high * scale)
        for step in seam.steps:
            low = (low - step.shift) / (step.slope if step.below else 1.0)
            high = high - step.shift
            changed[step.tensor] = _span_of(low * scale, high * scale)
    ranges = {
        method: {name + SUFFIX if name in changed else name: changed.get(name, span) for name, span in spans_of.items()}
        for method, spans_of in calibration.ranges.items()
    }
    return msgspec.structs.replace(calibration, ranges=ranges)


def _find_seam(graph: Graph, name: str, readers: tuple[Layer, ...]) -> Seam | None:
    axis = readers[0].channel_axis(graph)
    shape = graph.shapes.get(name, ())
    same = all(layer.channel_axis(graph) == axis for layer in readers)
    if axis is None or not same or len(graph.consumers[name]) != len(readers) or not _is_inner(graph, name):
        return None
    channels = shape[axis] or 0
    place = axis - len(shape)
    edits: list[_Edit] = []
    steps: list[_Step] = []
    ceiling: float | None = None
    node: onnx.NodeProto | None = graph.producers.get(name)
    while node is not None:
        made = _made_by(graph, node, place, channels)
        if made is not None:
            return Seam(
                tensor=name, channels=channels, edits=(*edits, *made), steps=tuple(steps), ceiling=ceiling,
                readers=readers,
            )  # fmt: skip
        passed = _pass(graph, node, place, channels)
        if passed is None or not _is_inner(graph, passed[0].tensor) or len(graph.consumers[passed[0].tensor]) != 1:
            return None
        steps.append(passed[0])
        edits += passed[1]
        ceiling = ceiling if passed[2] is None else passed[2]
        node = graph.producers.get(steps[-1].tensor)
    return None


def _is_inner(graph: Graph, name: str) -> bool:
    return name in graph.producers and graph.is_float(name) and name not in graph.outputs | graph.captured


def _made_by(graph: Graph, node: onnx.NodeProto, place: int, channels: int) -> list[_Edit] | None:
    """Returns the constants that scale every channel of what a node makes, None if it has none."""
    if node.op_type == "Mul":
        side = _constant_side(graph, node)
        fits = side is not None and _holds_channels(graph, node.input[side], place, channels)
        return [_Edit(node=node.name, index=side, axis=place)] if fits and side is not None else None
    edits: list[_Edit] = []
    for index, axis in _weights_of(node):
        if index >= len(node.input) or not node.input[index]:
            continue
        dims = graph.initializers[node.input[index]].dims if graph.is_float_constant(node.input[index]) else ()
        if not dims or dims[axis] != channels:
            return None
        edits.append(_Edit(node=node.name, index=index, axis=axis if axis < 0 else axis - len(dims)))
    return edits or None


def _weights_of(node: onnx.NodeProto) -> tuple[tuple[int, int], ...]:
    numbers = {item.name: item.i for item in node.attribute}
    if node.op_type == "Gemm":
        return (1, 0 if numbers.get("transB", 0) else 1), (2, -1)
    grouped = node.op_type == "ConvTranspose" and numbers.get("group", 1) != 1
    inward = node.op_type == "LayerNormalization" and numbers.get("axis", -1) != -1
    return () if grouped or inward else _WEIGHTS.get(node.op_type, ())


def _pass(
    graph: Graph, node: onnx.NodeProto, place: int, channels: int
) -> tuple[_Step, list[_Edit], float | None] | None:
    """Returns how scaled channels pass through a node: the tensor before, what is scaled with it, and its ceiling."""
    zero, one = np.zeros(channels), np.ones(channels)
    if node.op_type in {"Relu", "LeakyRelu", "PRelu", "Clip"}:
        bounds = _slope_of(graph, node, channels)
        if bounds is None:
            return None
        slope, ceiling = bounds
        return _Step(tensor=node.input[0], shift=zero, slope=slope, below=True), [], ceiling
    constant = _constant_side(graph, node) if node.op_type == "Add" else None
    if constant is None:
        return None
    value = graph.constant(node.input[constant])
    if value is None or not _holds_channels(graph, node.input[constant], place, channels) or value.size != channels:
        return None
    step = _Step(tensor=node.input[1 - constant], shift=value.reshape(-1).astype(np.float64), slope=one, below=False)
    return step, [_Edit(node=node.name, index=constant, axis=place)], None


def _slope_of(graph: Graph, node: onnx.NodeProto, channels: int) -> tuple[Array, float | None] | None:
    """Returns what an activation multiplies negative values by, and its ceiling; None if it does something else."""
    if node.op_type == "Relu":
        return np.ones(channels), None
    if node.op_type == "LeakyRelu":
        slope = next((item.f for item in node.attribute if item.name == "alpha"), 0.01)
        return (np.full(channels, slope), None) if slope > 0 else None
    if node.op_type == "PRelu":
        value = graph.constant(node.input[1])
        if value is None or value.size not in {1, channels} or (value <= 0).any():
            return None
        return np.broadcast_to(value.reshape(-1).astype(np.float64), (channels,)), None
    low, high = (
        graph.constant(node.input[index]) if len(node.input) > index and node.input[index] else None for index in (1, 2)
    )
    if low is None or float(low.reshape(-1)[0]) != 0 or (high is None and len(node.input) > 2 and node.input[2]):
        return None
    return np.ones(channels), None if high is None else float(high.reshape(-1)[0])


def _constant_side(graph: Graph, node: onnx.NodeProto) -> int | None:
    sides = [index for index, name in enumerate(node.input) if graph.is_float_constant(name)]
    return sides[0] if len(sides) == 1 and len(node.input) == 2 else None


def _holds_channels(graph: Graph, name: str, place: int, channels: int) -> bool:
    dims = graph.initializers[name].dims
    return len(dims) >= -place and dims[place] == channels


def _read_spans(seams: tuple[Seam, ...] | list[Seam], statistics: Path) -> dict[str, tuple[Array, Array]]:
    """Returns the lowest and highest value of each channel of each seam that calibration measured."""
    spans: dict[str, tuple[Array, Array]] = {}
    with open_moments(statistics / "moments.npz") as read:
        for seam in seams:
            moment = read(seam.readers[0].node)
            if moment is not None and len(moment.high) == seam.channels:
                spans[seam.tensor] = moment.low.astype(np.float64), moment.high.astype(np.float64)
    return spans


def _balance(size: Array, columns: Array, ceiling: float | None) -> Array:
    """Returns factors, powers of two, that make the sizes of channels and of the weights behind them alike.

    The largest channel keeps its size; one that reaches the ceiling keeps it too.
    """
    if not size.max() > 0 or not columns.max() > 0:
        return np.ones(len(size))
    size, columns = np.maximum(size, _LEAST * size.max()), np.maximum(columns, _LEAST * columns.max())
    factors = np.sqrt(columns / size)
    if ceiling is None:
        return _power(factors * size.max() / (size * factors).max())
    full = size > _MARGIN * ceiling
    anchor = np.exp(np.log(factors[full]).mean()) if full.any() else (size * factors).max() / size.max()
    limit = 2 ** np.floor(np.log2(_MARGIN * ceiling / size))
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

    def column_sizes(self, seam: Seam) -> Array:
        """Returns the largest weight that reads each channel."""
        sizes = np.zeros(seam.channels)
        for layer in seam.readers:
            largest = np.abs(layer.to_matrix(self._get(layer.node, 1))).max(axis=1)
            sizes = np.maximum(sizes, largest.reshape(seam.channels, -1).max(axis=1))
        return sizes

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
        _drop_unread(proto.graph)
        return proto

    def _get(self, node: str, index: int) -> Array:
        if (node, index) not in self._values:
            tensor = self._graph.initializers[self._nodes[node].input[index]]
            self._values[node, index] = numpy_helper.to_array(tensor).astype(np.float32)
        return self._values[node, index]


def _drop_unread(graph: onnx.GraphProto) -> None:
    read = set(_every_name(graph))
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _every_name(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the names that a graph and the bodies in it read."""
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _every_name(body)
