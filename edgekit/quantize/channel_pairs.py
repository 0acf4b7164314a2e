"""Finds the pairs for cross-layer equalization: tensors whose channels the constants around them can scale.

The factors are noted in the model's metadata.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.graph.float_regions import find_float_regions
from edgekit.quantize.graph.layers import Layer, read_layers
from edgekit.serialize import ready_type

SUFFIX = "_equalized"
"""The suffix of a scaled tensor's name."""
NOTE = "edgekit.equalized"
"""The metadata key of the factors: JSON, by the name that the tensor had before."""
# Characters 40 to 120, printable ASCII, for the powers -40 to 40: metadata in ONNX is text.
_ZERO_POWER, _MOST_POWER = 80, 40

# The constant inputs that determine the size of output channels, as (input, axis of the channels), from the shapes that
# the ONNX operators demand. Both weight and bias, since a bias must be scaled too.
_CONSTANT_AXES: dict[str, tuple[tuple[int, int], ...]] = {
    "Conv": ((1, 0), (2, 0)),
    "ConvTranspose": ((1, 1), (2, 0)),
    "BatchNormalization": ((1, 0), (2, 0)),
    "InstanceNormalization": ((1, 0), (2, 0)),
    "LayerNormalization": ((1, -1), (2, -1)),
    "MatMul": ((1, -1),),
}


class ScaledConstant(msgspec.Struct, frozen=True, kw_only=True):
    """A constant to multiply: an input of a node, and its channel axis, counted from the end (negative)."""

    node: str
    index: int
    axis: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor before that of a pair, and how to invert the node after it: value = (value - shift) / slope.

    With `negative_only` the slope applies to negative values only; if it is not positive, the node cannot be inverted.
    """

    tensor: str
    shift: Array
    slope: Array
    negative_only: bool = False


class EqualizationPair(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose channels `constants` make, and that only layers with weights, its `consumers`, read.

    `axis` is the channel axis, counted from the end. `ceiling` is the upper bound of a Clip. `reshaped` are reshaped
    forms of the tensor that layers read instead.
    """

    tensor: str
    axis: int
    channels: int
    constants: tuple[ScaledConstant, ...]
    steps: tuple[Step, ...]
    ceiling: float | None
    consumers: tuple[Layer, ...]
    reshaped: tuple[str, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor whose channels are scaled."""
        return (self.tensor, *(step.tensor for step in self.steps), *self.reshaped)


def find_equalization_pairs(graph: Graph) -> tuple[EqualizationPair, ...]:
    """Returns the pairs of a graph, in graph order, without compared tensors and without inputs of float layers."""
    floats = find_float_regions(graph)
    layers: dict[str, list[Layer]] = {}
    for layer in read_layers(graph):
        # The weights of a ConvTranspose have their inputs on another axis, which the factors do not support.
        if layer.node in floats or layer.op == "ConvTranspose":
            continue
        layers.setdefault(find_channel_source(graph, layer), []).append(layer)
    compared = {each.tensor for each in find_compared_tensors(graph)}
    pairs = (_find_pair(graph, name, tuple(consumers)) for name, consumers in layers.items())
    return tuple(pair for pair in pairs if pair is not None and compared.isdisjoint(pair.tensors))


def find_channel_source(graph: Graph, layer: Layer) -> str:
    """Returns the input of a layer, or the tensor before Reshapes that keep its channels, the last axis."""
    name = layer.source
    while layer.op != "Conv" and name in graph.producers and _keeps_last_axis(graph, graph.producers[name]):
        name = graph.producers[name].input[0]
    return name


def _find_pair(graph: Graph, name: str, consumers: tuple[Layer, ...]) -> EqualizationPair | None:
    # The axis of the input channels, counted from the end, and their number.
    places: set[tuple[int, int]] = set()
    for layer in consumers:
        axis, shape = layer.channel_axis(graph), graph.dims(layer.source)
        channels = None if axis is None else shape[axis]
        if axis is None or channels is None:
            return None
        places.add((axis - len(shape), channels))
    reshaped = _find_reshaped(graph, name, {layer.node for layer in consumers})
    if len(places) != 1 or reshaped is None:
        return None
    ((axis, channels),) = places
    # Back to the constants that determine the size of the channels.
    constants, steps, ceiling = tuple[ScaledConstant, ...](), tuple[Step, ...](), None
    node = graph.producers.get(name)
    while node is not None:
        if (made := _find_constants(graph, node, axis, channels)) is not None:
            return EqualizationPair(
                tensor=name, axis=axis, channels=channels, constants=constants + made, steps=steps, ceiling=ceiling,
                consumers=consumers, reshaped=reshaped,
            )  # fmt: skip
        if (passed := _pass_back(graph, node, axis, channels)) is None:
            return None
        added, step, limit = passed
        if not _is_inner(graph, step.tensor) or len(graph.readers(step.tensor)) != 1:
            return None
        constants, steps, ceiling = constants + added, (*steps, step), ceiling if limit is None else limit
        node = graph.producers.get(step.tensor)
    return None


def _keeps_last_axis(graph: Graph, node: Node) -> bool:
    if node.op_type != "Reshape":
        return False
    before, after = (graph.dims(name) or (None,) for name in (node.input[0], node.output[0]))
    return before[-1] is not None and before[-1] == after[-1]


def _find_reshaped(graph: Graph, name: str, consumers: set[str]) -> tuple[str, ...] | None:
    """Returns the reshaped forms of a tensor that layers read; None if something else reads the tensor."""
    if not _is_inner(graph, name):
        return None
    found: list[str] = []
    for node in graph.readers(name):
        if node.name in consumers:
            continue
        inner = _find_reshaped(graph, node.output[0], consumers) if _keeps_last_axis(graph, node) else None
        if inner is None:
            return None
        found += [node.output[0], *inner]
    return tuple(found)


def _is_inner(graph: Graph, name: str) -> bool:
    return name in graph.producers and graph.is_float(name) and name not in graph.outputs | graph.captured


def _find_constants(graph: Graph, node: Node, axis: int, channels: int) -> tuple[ScaledConstant, ...] | None:
    """Returns the constants by which every channel of a node's output can be scaled, None if there are none."""
    if node.op_type == "Mul":
        return _find_constant_input(graph, node, axis, channels)
    axes = _CONSTANT_AXES.get(node.op_type, ())
    if node.op_type == "Gemm":
        axes = ((1, 0 if node.integer("transB", 0) else 1), (2, -1))
    # The output axis of the weight of a grouped ConvTranspose, [inputs, outputs / groups, ...], is shared by the
    # groups.
    grouped = node.op_type == "ConvTranspose" and node.integer("group", 1) != 1
    inward = node.op_type == "LayerNormalization" and node.integer("axis", -1) != -1
    found: list[ScaledConstant] = []
    for index, own_axis in () if grouped or inward else axes:
        if not node.has_input(index):
            continue
        dims = graph.constants[node.input[index]].dims if graph.is_float_constant(node.input[index]) else ()
        if not dims or dims[own_axis] != channels:
            return None
        from_end = own_axis if own_axis < 0 else own_axis - len(dims)
        found.append(ScaledConstant(node=node.name, index=index, axis=from_end))
    return tuple(found) or None


def _pass_back(
    graph: Graph, node: Node, axis: int, channels: int
) -> tuple[tuple[ScaledConstant, ...], Step, float | None] | None:
    """Returns how scaled channels pass through a node: constants to scale, the step before it, and a ceiling."""
    step = Step(tensor=node.input[0], shift=np.zeros(channels), slope=np.ones(channels))
    if node.op_type in {"Relu", "LeakyRelu", "PRelu", "Clip"}:
        bounds = _read_slope(graph, node, channels)
        return bounds and ((), msgspec.structs.replace(step, slope=bounds[0], negative_only=True), bounds[1])
    constants = _find_constant_input(graph, node, axis, channels) if node.op_type == "Add" else None
    value = graph.constant(node.input[constants[0].index]) if constants else None
    if constants is None or value is None or value.size != channels:
        return None
    before = node.input[1 - constants[0].index]
    return constants, msgspec.structs.replace(step, tensor=before, shift=value.reshape(-1).astype(np.float64)), None


def _read_slope(graph: Graph, node: Node, channels: int) -> tuple[Array, float | None] | None:
    """Returns an activation function's slope for negative values [channels] and its ceiling; None for others."""
    if node.op_type == "Relu":
        return np.ones(channels), None
    if node.op_type == "LeakyRelu":
        slope = node.attributes.get("alpha", 0.01)
        return (np.full(channels, slope), None) if slope > 0 else None
    if node.op_type == "PRelu":
        value = graph.constant(node.input[1])
        if value is None or value.size not in {1, channels}:
            return None
        return np.broadcast_to(value.reshape(-1).astype(np.float64), (channels,)), None
    low, high = (graph.number(node.input[index]) if node.has_input(index) else None for index in (1, 2))
    return (np.ones(channels), high) if low == 0 and (high is not None or not node.has_input(2)) else None


def _find_constant_input(graph: Graph, node: Node, axis: int, channels: int) -> tuple[ScaledConstant, ...] | None:
    """Returns the input that is a float constant with these channels; None if both or neither are constants."""
    found = [index for index, name in enumerate(node.input) if graph.is_float_constant(name)]
    dims = graph.constants[node.input[found[0]]].dims if len(found) == 1 and len(node.input) == 2 else ()
    if len(dims) < -axis or dims[axis] != channels:
        return None
    return (ScaledConstant(node=node.name, index=found[0], axis=axis),)


# The factors in the model's metadata: they are needed to compare the layers of the quantized model with those of the
# float model.


def write_scaling(proto: onnx.ModelProto, factors: Mapping[str, Array]) -> None:
    """Notes the factors of tensors, powers of two, by the names before: one printable character for each channel."""
    exponents = {name: np.log2(its).round().clip(-_MOST_POWER, _MOST_POWER) for name, its in factors.items()}
    powers = {name: "".join(chr(_ZERO_POWER + int(power)) for power in its) for name, its in exponents.items()}
    proto.metadata_props.add(key=NOTE, value=msgspec.json.encode(powers, order="sorted").decode())


def read_scaling(proto: onnx.ModelProto) -> dict[str, Array]:
    """Returns the factors of the channels of each scaled tensor, by its name in the model; empty if there are none.

    Metadata that cannot be read were not written by edgekit, and count as none.
    """
    text = next((entry.value for entry in proto.metadata_props if entry.key == NOTE), "{}")
    try:
        powers = msgspec.json.decode(text, type=ready_type(dict[str, str]))
    except (msgspec.MsgspecError, RecursionError):
        return {}
    numbers = {
        name: np.array([ord(power) - _ZERO_POWER for power in its]).clip(-_MOST_POWER, _MOST_POWER)
        for name, its in powers.items()
    }
    # Powers of two scale a float without rounding, so that the equalized model computes the same as before.
    return {name + SUFFIX: np.ldexp(1.0, exponents) for name, exponents in numbers.items()}


def scale_channels(value: Array, factors: Array) -> Array:
    """Returns a float tensor with each channel times its factor; channels are axis 1 of images, else the last axis.

    A tensor whose axis has another number of channels is returned as it is.
    """
    axis = 1 if value.ndim > 2 and value.shape[1] == len(factors) else value.ndim - 1
    if value.ndim == 0 or value.dtype.kind != "f" or value.shape[axis] != len(factors):
        return value
    shape = [-1 if place == axis else 1 for place in range(value.ndim)]
    return np.asarray(value * factors.astype(value.dtype).reshape(shape), dtype=value.dtype)
