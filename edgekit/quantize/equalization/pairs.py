"""Tensors whose channels can be scaled where they are made, and back in the weights that read them."""

import msgspec
import numpy as np
import onnx

from edgekit.model.tensors import Array
from edgekit.quantize.equalization.silu import find_silu
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.graph.float_regions import find_float_regions
from edgekit.quantize.graph.graph import Graph
from edgekit.quantize.graph.layers import Layer, read_layers

_WEIGHTS: dict[str, tuple[tuple[int, int], ...]] = {
    "Conv": ((1, 0), (2, 0)),
    "ConvTranspose": ((1, 1), (2, 0)),
    "BatchNormalization": ((1, 0), (2, 0)),
    "InstanceNormalization": ((1, 0), (2, 0)),
    "LayerNormalization": ((1, -1), (2, -1)),
    "MatMul": ((1, -1),),
}
"""The constant inputs that decide how large the channels of an output are: (input, axis of the channels)."""

_POOLING = frozenset({"Resize", "Upsample", "MaxPool", "AveragePool"})
"""What mixes or picks neighbours of a channel, and is the same for a channel twice as large."""


class ScaledConstant(msgspec.Struct, frozen=True, kw_only=True):
    """A constant to multiply: an input of a node, and the axis of the channels counted from the end (negative).

    `part` says which channels of the pair they are.
    """

    node: str
    index: int
    axis: int
    part: tuple[int, int]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on the way back from a pair, and what undoes the node behind it: value = (value - shift) / slope.

    With `below` the slope is that of negative values; where it is not positive it undoes nothing. With `pooled` the
    node picks or mixes neighbours, so extremes are only about the same. With a `gate`, the name of a Sigmoid, the node
    multiplies the tensor by that of itself. `behind` is the tensor it makes, `part` which channels of the pair the
    tensor has.
    """

    tensor: str
    behind: str
    part: tuple[int, int]
    shift: Array
    slope: Array
    below: bool = False
    pooled: bool = False
    gate: str = ""


class EqualizationPair(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that only layers with weights read, whose channels are made by constants: where they can be scaled.

    `place` is their axis, counted from the end. `ceiling` is where a Clip cuts its channels off. `copies` are other
    shapes of it, which layers read instead. Of what a Concat joins some channels may have to stay as they are, `fixed`.
    """

    tensor: str
    place: int
    channels: int
    fixed: tuple[tuple[int, int], ...]
    edits: tuple[ScaledConstant, ...]
    steps: tuple[Step, ...]
    ceiling: float | None
    readers: tuple[Layer, ...]
    copies: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor whose channels are scaled."""
        return (self.tensor, *(step.tensor for step in self.steps), *self.copies)


class _Trail(msgspec.Struct, frozen=True, kw_only=True):
    """How some channels of a pair came to be."""

    edits: tuple[ScaledConstant, ...]
    steps: tuple[Step, ...] = ()
    fixed: tuple[tuple[int, int], ...] = ()
    ceiling: float | None = None


def find_equalization_pairs(graph: Graph) -> tuple[EqualizationPair, ...]:
    """Returns the pairs of a graph, in graph order: none that is judged by, none before a layer that stays float."""
    islands = find_float_regions(graph)
    layers: dict[str, list[Layer]] = {}
    for layer in (layer for layer in read_layers(graph) if layer.node not in islands):
        layers.setdefault(source_of(graph, layer), []).append(layer)
    judged = {point.tensor for point in find_compared_tensors(graph)}
    pairs = (_find_seam(graph, name, tuple(readers)) for name, readers in layers.items())
    return tuple(pair for pair in pairs if pair is not None and judged.isdisjoint(pair.tensors))


def _find_seam(graph: Graph, name: str, readers: tuple[Layer, ...]) -> EqualizationPair | None:
    places = {_place(graph, layer) for layer in readers}
    copies = _copies(graph, name, {layer.node for layer in readers})
    if len(places) != 1 or copies is None:
        return None
    ((place, channels),) = places
    if place is None or channels is None:
        return None
    trail = _trace(graph, name, place, (0, channels))
    if trail is None:
        return None
    return EqualizationPair(
        tensor=name, place=place, channels=channels, edits=trail.edits, steps=trail.steps, ceiling=trail.ceiling,
        readers=readers, copies=copies, fixed=trail.fixed,
    )  # fmt: skip


def _trace(graph: Graph, name: str, place: int, part: tuple[int, int]) -> _Trail | None:
    """Returns what makes a tensor, back to the constants that decide how large its channels are."""
    edits: tuple[ScaledConstant, ...] = ()
    steps: tuple[Step, ...] = ()
    ceiling: float | None = None
    node = graph.producers.get(name)
    while node is not None:
        made = _made_by(graph, node, place, part)
        if made is not None:
            return _Trail(edits=(*edits, *made), steps=steps, ceiling=ceiling)
        if node.op_type == "Concat":
            inner = _trace_parts(graph, node, place, part) if ceiling is None else None
            return inner and msgspec.structs.replace(inner, edits=edits + inner.edits, steps=steps + inner.steps)
        passed = _pass(graph, node, place, part)
        if passed is None or not (passed[0].gate or _is_only_read(graph, passed[0].tensor)):
            return None
        steps, edits = (*steps, passed[0]), (*edits, *passed[1])
        ceiling = ceiling if passed[2] is None else passed[2]
        node = graph.producers.get(passed[0].tensor)
    return None


def _trace_parts(graph: Graph, node: onnx.NodeProto, place: int, part: tuple[int, int]) -> _Trail | None:
    """Returns what makes the parts that a Concat joins; those that cannot be scaled are fixed, None if all are."""
    shapes = [graph.static_shape(name) for name in node.input]
    axis = next(item.i for item in node.attribute if item.name == "axis")
    if any(shape is None or axis not in {place, len(shape) + place} for shape in shapes):
        return None
    ends = part[0] + np.cumsum([0, *(shape[place] for shape in shapes if shape is not None)])
    found = _Trail(edits=())
    for name, start, stop in zip(node.input, ends, ends[1:], strict=False):
        span = (int(start), int(stop))
        own = _trace(graph, name, place, span) if _is_only_read(graph, name) else None
        if own is None or own.ceiling is not None:
            found = msgspec.structs.replace(found, fixed=(*found.fixed, span))
            continue
        size, flat = span[1] - span[0], (np.zeros, np.ones)
        step = Step(tensor=name, behind=node.output[0], part=span, shift=flat[0](size), slope=flat[1](size))
        found = _Trail(
            edits=found.edits + own.edits, steps=(*found.steps, step, *own.steps), fixed=found.fixed + own.fixed
        )
    return found if found.edits else None


def _is_only_read(graph: Graph, name: str) -> bool:
    return _is_inner(graph, name) and len(graph.consumers[name]) == 1


def source_of(graph: Graph, layer: Layer) -> str:
    """Returns what a layer reads, or what that was before a Reshape that leaves its channels, the last axis, as is."""
    name = layer.source
    while layer.op != "Conv" and name in graph.producers and _keeps_last(graph, graph.producers[name]):
        name = graph.producers[name].input[0]
    return name


def _place(graph: Graph, layer: Layer) -> tuple[int, int] | tuple[None, None]:
    """Returns the axis of the channels that a layer reads, counted from the end, and how many there are."""
    axis, shape = layer.channel_axis(graph), graph.shapes.get(layer.source, ())
    channels = None if axis is None else shape[axis]
    return (None, None) if axis is None or channels is None else (axis - len(shape), channels)


def _keeps_last(graph: Graph, node: onnx.NodeProto) -> bool:
    if node.op_type != "Reshape":
        return False
    before, after = (graph.shapes.get(name) or (None,) for name in (node.input[0], node.output[0]))
    return before[-1] is not None and before[-1] == after[-1]


def _copies(graph: Graph, name: str, readers: set[str]) -> tuple[str, ...] | None:
    """Returns the other shapes of a tensor that layers read, None if something else reads it."""
    if not _is_inner(graph, name):
        return None
    found: list[str] = []
    for node in graph.consumers[name]:
        if node.name in readers:
            continue
        inner = _copies(graph, node.output[0], readers) if _keeps_last(graph, node) else None
        if inner is None:
            return None
        found += [node.output[0], *inner]
    return tuple(found)


def _is_inner(graph: Graph, name: str) -> bool:
    return name in graph.producers and graph.is_float(name) and name not in graph.outputs | graph.captured


def _made_by(graph: Graph, node: onnx.NodeProto, place: int, part: tuple[int, int]) -> list[ScaledConstant] | None:
    """Returns the constants that scale every channel of what a node makes, None if it has none."""
    channels = part[1] - part[0]
    if node.op_type == "Mul":
        side = _constant_side(graph, node)
        fits = side is not None and _holds_channels(graph, node.input[side], place, channels)
        return (
            [ScaledConstant(node=node.name, index=side, axis=place, part=part)] if fits and side is not None else None
        )
    edits: list[ScaledConstant] = []
    for index, axis in _weights_of(node):
        if index >= len(node.input) or not node.input[index]:
            continue
        dims = graph.initializers[node.input[index]].dims if graph.is_float_constant(node.input[index]) else ()
        if not dims or dims[axis] != channels:
            return None
        edits.append(
            ScaledConstant(node=node.name, index=index, axis=axis if axis < 0 else axis - len(dims), part=part)
        )
    return edits or None


def _weights_of(node: onnx.NodeProto) -> tuple[tuple[int, int], ...]:
    numbers = {item.name: item.i for item in node.attribute}
    if node.op_type == "Gemm":
        return (1, 0 if numbers.get("transB", 0) else 1), (2, -1)
    grouped = node.op_type == "ConvTranspose" and numbers.get("group", 1) != 1
    inward = node.op_type == "LayerNormalization" and numbers.get("axis", -1) != -1
    return () if grouped or inward else _WEIGHTS.get(node.op_type, ())


def _pass(
    graph: Graph, node: onnx.NodeProto, place: int, part: tuple[int, int]
) -> tuple[Step, list[ScaledConstant], float | None] | None:
    """Returns how scaled channels pass through a node: the tensor before, what is scaled with it, and its ceiling."""
    channels = part[1] - part[0]
    flat = Step(
        tensor=node.input[0] if node.input else "", behind=node.output[0], part=part,
        shift=np.zeros(channels), slope=np.ones(channels),
    )  # fmt: skip
    if node.op_type in {"Relu", "LeakyRelu", "PRelu", "Clip"}:
        bounds = _slope_of(graph, node, channels)
        return bounds and (msgspec.structs.replace(flat, slope=bounds[0], below=True), [], bounds[1])
    gate = find_silu(graph, node)
    if gate is not None:
        return msgspec.structs.replace(flat, tensor=gate.input[0], gate=gate.name), [], None
    if node.op_type in _POOLING:
        shapes = [graph.shapes.get(name) or (None,) * -place for name in (node.input[0], node.output[0])]
        keeps = all(len(shape) >= -place and shape[place] == channels for shape in shapes)
        return (msgspec.structs.replace(flat, pooled=True), [], None) if keeps else None
    constant = _constant_side(graph, node) if node.op_type == "Add" else None
    if constant is None:
        return None
    value = graph.constant(node.input[constant])
    if value is None or not _holds_channels(graph, node.input[constant], place, channels) or value.size != channels:
        return None
    step = msgspec.structs.replace(flat, tensor=node.input[1 - constant], shift=value.reshape(-1).astype(np.float64))
    return step, [ScaledConstant(node=node.name, index=constant, axis=place, part=part)], None


def _slope_of(graph: Graph, node: onnx.NodeProto, channels: int) -> tuple[Array, float | None] | None:
    """Returns what an activation multiplies negative values by, and its ceiling; None if it does something else."""
    if node.op_type == "Relu":
        return np.ones(channels), None
    if node.op_type == "LeakyRelu":
        slope = next((item.f for item in node.attribute if item.name == "alpha"), 0.01)
        return (np.full(channels, slope), None) if slope > 0 else None
    if node.op_type == "PRelu":
        value = graph.constant(node.input[1])
        if value is None or value.size not in {1, channels}:
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
