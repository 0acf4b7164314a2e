"""Faults for one layer of a deployed model: with integers between Q and DQ, in half precision, or in float32.

Each function changes the model in place and returns True, or returns False if the layer has nothing that it could
corrupt.
"""

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgekit.model.tensors import Array

Fault = Callable[[onnx.ModelProto, str, np.random.Generator], bool]

_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "HardSwish", "HardSigmoid", "Gelu", "Tanh", "LeakyRelu", "Clip", "Erf"})


def find_node(proto: onnx.ModelProto, layer: str) -> onnx.NodeProto:
    """Returns the node of this name."""
    return next(node for node in proto.graph.node if node.name == layer)


def find_weight(
    proto: onnx.ModelProto, layer: str, place: int = 1
) -> tuple[onnx.NodeProto | None, onnx.TensorProto] | None:
    """Returns a weight of a layer, and the DQ node before it if there is one; None if it has no such weight."""
    producers = {name: node for node in proto.graph.node for name in node.output}
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    node = next((node for node in proto.graph.node if node.name == layer), None)
    if node is None or len(node.input) <= place or node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
        return None
    if node.input[place] in tensors:
        tensor = tensors[node.input[place]]
        return (None, tensor) if tensor.data_type in {TensorProto.FLOAT, TensorProto.FLOAT16} else None
    rounded = producers.get(node.input[place])
    if rounded is None or rounded.op_type != "DequantizeLinear" or rounded.input[0] not in tensors:
        return None
    return rounded, tensors[rounded.input[0]]


def list_layers(proto: onnx.ModelProto) -> list[str]:
    """Returns the layers with a weight of at least two axes."""
    found = ((node.name, find_weight(proto, node.name)) for node in proto.graph.node if node.name)
    return [name for name, weight in found if weight is not None and len(weight[1].dims) >= 2]


def change_weight(proto: onnx.ModelProto, layer: str, change: Callable[[Array], Array | None], place: int = 1) -> bool:
    """Changes a layer's stored weight; returns False if it has none, or if it would stay the same."""
    found = find_weight(proto, layer, place)
    values = None if found is None else change(numpy_helper.to_array(found[1]).copy())
    if found is None or values is None or np.array_equal(values, numpy_helper.to_array(found[1])):
        return False
    found[1].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(values), found[1].name))
    return True


def replace_constant(
    proto: onnx.ModelProto, node: onnx.NodeProto, place: int, change: Callable[[Array], Array | None], name: str
) -> bool:
    """Gives a node a changed constant of its own; returns False if the input is none, or if it would stay the same."""
    held = next((tensor for tensor in proto.graph.initializer if tensor.name == node.input[place]), None)
    values = None if held is None else numpy_helper.to_array(held)
    changed = None if values is None else change(values)
    if values is None or changed is None or np.array_equal(changed, values):
        return False
    proto.graph.initializer.append(numpy_helper.from_array(np.asarray(changed, values.dtype), name))
    node.input[place] = name
    return True


def double_scale(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Doubles the scale of the layer's weight, or the weight if it has no scale."""
    found = find_weight(proto, layer)
    if found is None:
        return False
    if found[0] is None:
        return change_weight(proto, layer, lambda values: (values * 2).astype(values.dtype))
    return replace_constant(proto, found[0], 1, lambda scale: scale * np.float32(2), "seeded.scale")


def shift_zero_point(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Reads the layer's result with a zero point that is off by one."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    follower = find_node(proto, layer)
    for _ in range(3):
        follower = next((other for other in proto.graph.node if follower.output[0] in other.input), follower)
        if follower.op_type == "DequantizeLinear":
            break
    if follower.op_type != "DequantizeLinear" or len(follower.input) < 3:
        return False
    zero = numpy_helper.to_array(tensors[follower.input[2]])
    if zero.dtype.itemsize > 1:
        return False
    moved = (zero + 1 if zero.max() < np.iinfo(zero.dtype).max else zero - 1).astype(zero.dtype)
    proto.graph.initializer.append(numpy_helper.from_array(moved, "seeded.zero"))
    follower.input[2] = "seeded.zero"
    return True


def swap_channels(proto: onnx.ModelProto, layer: str, rng: np.random.Generator) -> bool:
    """Swaps two channels along the weight's first axis."""

    def change(values: Array) -> Array | None:
        if values.ndim < 2 or values.shape[0] < 2:
            return None
        first, second = rng.choice(values.shape[0], 2, replace=False)
        values[[first, second]] = values[[second, first]]
        return values

    return change_weight(proto, layer, change)


def flip_bit(proto: onnx.ModelProto, layer: str, rng: np.random.Generator) -> bool:
    """Flips a high bit of one weight: bit 6 of an integer (64 steps), the highest bit of a float's exponent."""
    return _flip(proto, layer, rng, {1: 6, 2: 14, 4: 30})


def flip_middle_bit(proto: onnx.ModelProto, layer: str, rng: np.random.Generator) -> bool:
    """Flips a middle bit of one weight: bit 4 of an integer (16 steps), a middle bit of a float's fraction."""
    return _flip(proto, layer, rng, {1: 4, 2: 5, 4: 12})


def _flip(proto: onnx.ModelProto, layer: str, rng: np.random.Generator, bits: dict[int, int]) -> bool:
    def change(values: Array) -> Array | None:
        width = values.dtype.itemsize
        flat = values.reshape(-1).view(np.dtype(f"u{width}"))
        flat[rng.integers(values.size)] ^= flat.dtype.type(1 << bits[width])
        return values

    return change_weight(proto, layer, change)


def transpose_weight(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Stores the weight with its axes in another order."""

    def change(values: Array) -> Array | None:
        if values.ndim < 2:
            return None
        return np.ascontiguousarray(np.moveaxis(values, 0, -1)).reshape(values.shape)

    return change_weight(proto, layer, change)


def overflow_half(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Computes the layer's result in half precision, a thousand million times too large."""
    node, graph = find_node(proto, layer), proto.graph
    name, place = node.output[0], list(graph.node).index(node)
    weight = find_weight(proto, layer)
    if weight is not None and weight[1].data_type == TensorProto.FLOAT16:
        return change_weight(proto, layer, lambda values: np.clip(values.astype(np.float64) * 1e7, -6e4, 6e4).astype(
            values.dtype))  # fmt: skip
    node.output[0] = "seeded.result"
    graph.initializer.append(numpy_helper.from_array(np.array(1e9, np.float32), "seeded.factor"))
    added = [
        helper.make_node("Mul", ["seeded.result", "seeded.factor"], ["seeded.large"]),
        helper.make_node("Cast", ["seeded.large"], ["seeded.half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["seeded.half"], ["seeded.float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["seeded.float", "seeded.factor"], [name], name=layer + ".seeded"),
    ]
    for offset, extra in enumerate(added):
        graph.node.insert(place + 1 + offset, extra)
    return True


def drop_bias(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Sets the layer's bias to zeros."""
    if len(find_node(proto, layer).input) < 3:
        return False
    return change_weight(proto, layer, np.zeros_like, place=2)


def shift_padding(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Moves the padding from the beginning of each axis to its end."""
    pads = next((attribute for attribute in find_node(proto, layer).attribute if attribute.name == "pads"), None)
    half = 0 if pads is None else len(pads.ints) // 2
    if pads is None or not any(pads.ints[:half]):
        return False
    begin, end = list(pads.ints[:half]), list(pads.ints[half:])
    del pads.ints[:]
    pads.ints.extend([0] * half + [first + second for first, second in zip(begin, end, strict=True)])
    return True


def change_axis(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Lets a Softmax run along the axis before its own."""
    node = find_node(proto, layer)
    if node.op_type not in {"Softmax", "LogSoftmax"}:
        return False
    for attribute in node.attribute:
        if attribute.name == "axis":
            attribute.i = attribute.i - 1
            return True
    node.attribute.append(helper.make_attribute("axis", -2))
    return True


def change_epsilon(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Sets the epsilon of a normalization to one."""
    node = find_node(proto, layer)
    if not node.op_type.endswith("Normalization"):
        return False
    kept = [attribute for attribute in node.attribute if attribute.name != "epsilon"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("epsilon", 1.0)])
    return True


def drop_activation(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Makes an activation an Identity."""
    node = find_node(proto, layer)
    if node.op_type not in _ACTIVATIONS:
        return False
    node.op_type, node.domain = "Identity", ""
    del node.attribute[:]
    del node.input[1:]
    return True


def take_neighbour(proto: onnx.ModelProto, layer: str, rng: np.random.Generator) -> bool:
    """Gives the layer the weight of another layer of the same shape."""
    mine = find_weight(proto, layer)
    if mine is None:
        return False
    others = [name for name in list_layers(proto) if name != layer]
    same = [name for name in others if (found := find_weight(proto, name)) and found[1].dims == mine[1].dims]
    if not same:
        return False
    other = find_node(proto, str(rng.choice(same)))
    find_node(proto, layer).input[1] = other.input[1]
    return True


def swap_outputs(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Swaps the layer's result with another output of the model of the same shape."""
    node = find_node(proto, layer)
    shapes = {value.name: tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
              for value in proto.graph.output}  # fmt: skip
    name = node.output[0]
    other = next((one for one in shapes if name in shapes and one != name and shapes[one] == shapes[name]), None)
    if other is None:
        return False
    for place, output in ((item, index) for item in proto.graph.node for index, _ in enumerate(item.output)):
        held = place.output[output]
        place.output[output] = {name: other, other: name}.get(held, held)
    return True


FAULTS: dict[str, Fault] = {
    "scale x2": double_scale,
    "zero point +1": shift_zero_point,
    "channels swapped": swap_channels,
    "fp16 overflow": overflow_half,
    "bit flip": flip_bit,
    "wrong transpose": transpose_weight,
}
"""The kinds of fault that edgekit promises to find."""

HELD_OUT: dict[str, Fault] = {
    "middle bit flip": flip_middle_bit,
    "bias dropped": drop_bias,
    "padding shifted": shift_padding,
    "axis wrong": change_axis,
    "epsilon changed": change_epsilon,
    "activation dropped": drop_activation,
    "neighbour's weight": take_neighbour,
    "outputs swapped": swap_outputs,
}
"""Kinds of fault from which no rule was made."""


def list_subjects(proto: onnx.ModelProto, fault: Fault) -> Iterator[str]:
    """Yields the layers into which a fault can be put."""
    weighted = fault in FAULTS.values() or fault in {flip_middle_bit, take_neighbour}
    names = list_layers(proto) if weighted else [node.name for node in proto.graph.node if node.name]
    for name in names:
        copy = onnx.ModelProto()
        copy.CopyFrom(proto)
        if fault(copy, name, np.random.default_rng(0)):
            yield name
