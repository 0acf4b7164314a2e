"""Faults besides the promised ones: mistakes of exporters, converters and people. Data for `seeded_faults`."""

from collections.abc import Callable

import numpy as np
import onnx
from layer_faults import Fault, change_weight, find_node, find_weight, replace_constant
from onnx import TensorProto, helper, numpy_helper

from edgekit.model.tensors import Array

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16}
_SLOPES = {"LeakyRelu": ("alpha", 0.01), "Elu": ("alpha", 1.0), "HardSigmoid": ("alpha", 0.2), "Gemm": ("alpha", 1.0)}


def swap_inputs(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Swaps the inputs of a Sub, Div or Pow."""
    node = find_node(proto, layer)
    if node.op_type not in {"Sub", "Div", "Pow"} or node.input[0] == node.input[1]:
        return False
    node.input[0], node.input[1] = node.input[1], node.input[0]
    return True


def swap_joined(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Exchanges the first two inputs of a Concat."""
    node = find_node(proto, layer)
    if node.op_type != "Concat" or len(node.input) < 2 or node.input[0] == node.input[1]:
        return False
    node.input[0], node.input[1] = node.input[1], node.input[0]
    return True


def clip_activation(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Halves the scale of the layer's result, so that the larger half of its range is clipped."""
    return _rescale(proto, layer, 0.5, both=True)


def double_activation(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Dequantizes the layer's result with twice its scale."""
    return _rescale(proto, layer, 2.0, both=False)


def _rescale(proto: onnx.ModelProto, layer: str, factor: float, *, both: bool) -> bool:
    result = find_node(proto, layer).output[0]
    rounding = [node for node in proto.graph.node if node.op_type == "QuantizeLinear" and node.input[0] == result]
    reading = [node for node in proto.graph.node if node.op_type == "DequantizeLinear"
               and rounding and node.input[0] == rounding[0].output[0]]  # fmt: skip
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    if len(rounding) != 1 or not reading or rounding[0].input[1] not in tensors:
        return False
    scale = numpy_helper.to_array(tensors[rounding[0].input[1]]) * np.float32(factor)
    proto.graph.initializer.append(numpy_helper.from_array(np.asarray(scale, np.float32), "seeded.scale"))
    for node in (*(rounding if both else []), *reading):
        node.input[1] = "seeded.scale"
    return True


def permute_scales(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Gives each channel of the weight the scale of the next one."""
    return _change_rounding(proto, layer, 1, lambda scale: np.roll(scale, 1) if scale.size > 1 else None)


def shift_weight_zero(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Reads the weight with a zero point that is off by one."""
    return _change_rounding(
        proto, layer, 2, lambda zero: zero + zero.dtype.type(1) if zero.dtype.itemsize == 1 else None
    )


def _change_rounding(proto: onnx.ModelProto, layer: str, place: int, change: Callable[[Array], Array | None]) -> bool:
    found = find_weight(proto, layer)
    if found is None or found[0] is None or len(found[0].input) <= place:
        return False
    return replace_constant(proto, found[0], place, change, "seeded.rounding")


def double_bias(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Doubles the layer's bias."""
    if len(find_node(proto, layer).input) < 3:
        return False
    return change_weight(proto, layer, lambda values: (values * 2).astype(values.dtype), place=2)


def change_operand(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Multiplies the float constant of an Add, Mul, Sub, Div, PRelu or of a normalization by 1.5."""
    node = find_node(proto, layer)
    if node.op_type not in {"Add", "Mul", "Sub", "Div", "PRelu"} and not node.op_type.endswith("Normalization"):
        return False
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    known = (at for at, name in enumerate(node.input) if name in tensors and tensors[name].data_type in _FLOATS)
    place = next(known, None)
    return place is not None and replace_constant(proto, node, place, lambda values: values * 1.5, "seeded.operand")


def narrow_clip(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Halves the upper limit of a Clip."""
    node = find_node(proto, layer)
    is_limited = node.op_type == "Clip" and len(node.input) >= 3
    return is_limited and replace_constant(proto, node, 2, lambda limit: limit / 2, "seeded.limit")


def change_slope(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Doubles the alpha of a LeakyRelu, Elu, HardSigmoid or Gemm."""
    node = find_node(proto, layer)
    if node.op_type not in _SLOPES:
        return False
    name, default = _SLOPES[node.op_type]
    value = next((item.f for item in node.attribute if item.name == name), default)
    _set_attribute(node, name, value * 2)
    return True


def count_padding(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Inverts count_include_pad of an AveragePool."""
    node = find_node(proto, layer)
    pads = next((list(item.ints) for item in node.attribute if item.name == "pads"), list[int]())
    if node.op_type != "AveragePool" or not any(pads):
        return False
    counted = next((item.i for item in node.attribute if item.name == "count_include_pad"), 0)
    _set_attribute(node, "count_include_pad", 1 - counted)
    return True


def change_resize(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Changes the coordinate transformation of a Resize."""
    node = find_node(proto, layer)
    if node.op_type != "Resize":
        return False
    name = "coordinate_transformation_mode"
    mode = next((item.s for item in node.attribute if item.name == name), b"half_pixel")
    _set_attribute(node, name, "half_pixel" if mode != b"half_pixel" else "align_corners")
    return True


def reverse_time(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Runs an LSTM, GRU or RNN from the last step to the first."""
    node = find_node(proto, layer)
    if node.op_type not in {"LSTM", "GRU", "RNN"} or any(item.s == b"bidirectional" for item in node.attribute):
        return False
    is_reverse = any(item.name == "direction" and item.s == b"reverse" for item in node.attribute)
    _set_attribute(node, "direction", "forward" if is_reverse else "reverse")
    return True


def move_reset(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Applies the reset gate of a GRU at the other place; frameworks differ in this."""
    node = find_node(proto, layer)
    if node.op_type != "GRU":
        return False
    placed = next((item.i for item in node.attribute if item.name == "linear_before_reset"), 0)
    _set_attribute(node, "linear_before_reset", 1 - placed)
    return True


def change_pool(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Exchanges the maximum and the mean in pooling and reductions."""
    node = find_node(proto, layer)
    others = {"MaxPool": "AveragePool", "GlobalAveragePool": "GlobalMaxPool", "ReduceMean": "ReduceMax"}
    if node.op_type not in others or len(node.output) > 1:
        return False
    node.op_type = others[node.op_type]
    kept = [item for item in node.attribute if item.name not in {"dilations", "storage_order"}]
    del node.attribute[:]
    node.attribute.extend(kept)
    return True


def dilate(proto: onnx.ModelProto, layer: str, _rng: np.random.Generator) -> bool:
    """Doubles dilation and padding of a convolution whose padding is even."""
    node = find_node(proto, layer)
    known = {item.name: list(item.ints) for item in node.attribute}
    pads, kernel = known.get("pads", []), known.get("kernel_shape", [])
    if node.op_type != "Conv" or kernel != [3] * len(kernel) or pads != [1] * len(pads) or not pads or not kernel:
        return False
    _set_attribute(node, "dilations", [2] * len(kernel))
    _set_attribute(node, "pads", [2] * len(pads))
    return True


def _set_attribute(node: onnx.NodeProto, name: str, value: float | str | list[int]) -> None:
    kept = [item for item in node.attribute if item.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


OTHERS: dict[str, Fault] = {
    "inputs swapped": swap_inputs,
    "joined swapped": swap_joined,
    "activation clipped": clip_activation,
    "activation scale x2": double_activation,
    "scales permuted": permute_scales,
    "weight zero point +1": shift_weight_zero,
    "bias doubled": double_bias,
    "operand changed": change_operand,
    "limit halved": narrow_clip,
    "slope doubled": change_slope,
    "padding counted": count_padding,
    "pixels shifted": change_resize,
    "time reversed": reverse_time,
    "reset moved": move_reset,
    "pool changed": change_pool,
    "dilated": dilate,
}
