"""Constants of float nodes in a quantized model.

An optimizer of ONNX Runtime that would quantize them is switched off. To save bytes they may be stored as integers with
a scale for each channel, which a Cast and a Mul turn back into float.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import view_part
from edgekit.model.model import list_names, refill
from edgekit.model.tensors import Array
from edgekit.target import Target

OPTIMIZER = "WeightBiasQuantization"
LAYOUT = "NhwcTransformer"
TURNING = "GemmTransposeFusion"
DISABLED = "optimization.disable_specified_optimizers"
"""The session config entry that switches optimizers off.

If it lacks one that would harm the graph, results are wrong, and ONNX Runtime reports no error.
"""

_WEIGHTED = frozenset({"Conv", "ConvTranspose", "Gemm"})
_PASSED = frozenset({"Relu", "Clip"})
# Before it rounds weights, ONNX Runtime moves Q and DQ past these (qdq_transformer/qdq_propagation.cc).
_MOVED = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def find_float_weights(graph: onnx.GraphProto, *, directly: bool = False) -> tuple[str, ...]:
    """Returns the names of the nodes whose float weights ONNX Runtime would quantize, in graph order.

    These are layers with a constant float weight that read a DQ with one scale, and whose only reader is a Q, perhaps
    after Relu and Clip (core/optimizer/qdq_transformer/weight_bias_quantization.cc). Operators past which ONNX Runtime
    moves Q and DQ may be in between, unless `directly`. XNNPACK's provider computes wrong values with such weights.
    """
    view, found, moved = view_part(graph), list[str](), frozenset[str]() if directly else _MOVED
    # A session folds what `narrow_constants` wrote before it rounds weights.
    narrow = find_narrow(graph)
    for node in view.nodes:
        if node.op_type not in _WEIGHTED or not (view.is_float_constant(node.input[1]) or node.input[1] in narrow):
            continue
        source = view.producers.get(node.input[0])
        while source is not None and source.op_type in moved:
            source = view.producers.get(source.input[0])
        if source is None or source.op_type != "DequantizeLinear":
            continue
        scale = view.constants.get(source.input[1])
        # A computed scale is taken for one number: quantizing silently is worse than an unnecessary entry.
        if scale is not None and list(scale.dims) not in ([], [1]):
            continue
        last = node
        while last is node or last.op_type in _PASSED | moved:
            readers = view.consumers.get(last.output[0], ()) if len(last.output) == 1 else ()
            if len(readers) != 1 or last.output[0] in view.outputs:
                break
            last = readers[0]
        if last.op_type == "QuantizeLinear":
            found.append(node.proto.name)
    return tuple(found)


def find_cubics(graph: onnx.GraphProto) -> tuple[str, ...]:
    """Returns the names of the cubic Resize nodes of a quantized graph, in graph order.

    ONNX Runtime computes integer convolutions in NHWC, and moves the Transpose after one past a Resize; the cubic
    kernel then refuses to shrink (`ScalesValidation` of core/providers/cpu/tensor/upsamplebase.h).
    """
    if not any(node.op_type == "QuantizeLinear" for node in graph.node):
        return ()
    resizes = (node for node in graph.node if node.op_type == "Resize")
    return tuple(node.name for node in resizes if any(item.s == b"cubic" for item in node.attribute))


def find_harmful(graph: onnx.GraphProto, provider: str = "") -> dict[str, tuple[str, ...]]:
    """Returns the optimizers that would harm a graph on a provider, with the names of the nodes concerned.

    ONNX Runtime writes a MatMul and an Add as Gemm (matmul_add_fusion.cc), and a Gemm of a Transpose as a Gemm with
    transA (gemm_transpose_fusion.cc), which XNNPACK's provider computes as if it were 0.
    """
    turned = set[str]()
    for node in graph.node if provider == "XnnpackExecutionProvider" else ():
        perms = [list(item.ints) for item in node.attribute if item.name == "perm"]
        # A Transpose without the attribute may be of a matrix. A Reshape that keeps the shape is dropped before the
        # fusion; the shape may not be known here, so any Reshape counts.
        turns = node.op_type == "Transpose" and perms in ([], [[1, 0]])
        if turns or (node.op_type == "Reshape" and node.input[0] in turned):
            turned.add(node.output[0])
    products = (node for node in graph.node if node.op_type in {"Gemm", "MatMul"})
    gemms = tuple(node.name for node in products if node.input[0] in turned)
    found = {OPTIMIZER: find_float_weights(graph), LAYOUT: find_cubics(graph), TURNING: gemms}
    return {name: nodes for name, nodes in found.items() if nodes}


_REASONS = {
    OPTIMIZER: "{} layers keep float weights between Q and DQ nodes ({}): ONNX Runtime would round them to 8 bits per"
    " tensor",
    LAYOUT: "{} cubic Resize nodes ({}) stand between integers: ONNX Runtime would give them NHWC, which they refuse",
    TURNING: "{} matrix products ({}) read a Transpose: ONNX Runtime would write both as one Gemm, which XNNPACK"
    " computes wrongly",
}


def disable_harmful(target: Target, graph: onnx.GraphProto) -> tuple[Target, tuple[str, ...]]:
    """Returns a target whose session switches off the optimizers that would harm the graph, and notes about it."""
    if not (found := find_harmful(graph, target.provider)):
        return target, ()
    off = target.session.config.get(DISABLED, "").split(";")
    value = ";".join([*(name for name in off if name and name not in found), *found])
    session = msgspec.structs.replace(target.session, config={**target.session.config, DISABLED: value})
    notes = (
        _REASONS[name].format(len(nodes), ", ".join(f"'{each}'" for each in nodes[:3]))
        + f", so the session needs {DISABLED} = {value}"
        for name, nodes in found.items()
    )
    return msgspec.structs.replace(target, session=session), tuple(notes)


_FLOAT = onnx.TensorProto.FLOAT
_MOST: Mapping[int, int] = {8: 127, 16: 32767}
_INTEGERS = frozenset({onnx.TensorProto.INT8, onnx.TensorProto.INT16})
# At most this share of a constant's elements may be scales: a vector would get one for each element.
_MOST_SCALES = 1 / 16


class Narrow(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the constants and of the outputs of Cast and Mul that replace a float constant."""

    integers: str
    scales: str
    cast: str
    mul: str


def narrow_constants(graph: onnx.GraphProto, bits: Mapping[str, int]) -> None:
    """Stores float initializers as integers of 8 or 16 bits by name, in place; the float tensors keep their names."""
    taken = {*list_names(graph), *(node.name for node in graph.node)}
    added: list[onnx.NodeProto] = []
    for tensor in [tensor for tensor in graph.initializer if tensor.name in bits]:
        whole = tensor.name
        prefix = whole
        while {f"{prefix}_{part}" for part in ("integers", "scales", "counts")} & taken:
            prefix += "_"
        integers, scales, counts = (f"{prefix}_{part}" for part in ("integers", "scales", "counts"))
        values, scale = round_by_channel(numpy_helper.to_array(tensor), bits[whole])
        tensor.CopyFrom(numpy_helper.from_array(values, integers))
        graph.initializer.append(numpy_helper.from_array(scale, scales))
        added.append(helper.make_node("Cast", [integers], [counts], name=counts, to=_FLOAT))
        added.append(helper.make_node("Mul", [counts, scales], [whole], name=integers))
    if added:
        refill(graph.node, [*added, *graph.node])


def round_by_channel(values: Array, bits: int) -> tuple[Array, Array]:
    """Returns integers of the shape of `values`, and float32 scales along the axis with the least squared error.

    The scales have the rank of the values: integers * scales approximates the values.
    """
    axes = [axis for axis, size in enumerate(values.shape) if 1 < size <= values.size * _MOST_SCALES]
    every = tuple(range(values.ndim))
    found: list[tuple[float, Array, Array]] = []
    for others in [tuple(each for each in every if each != axis) for axis in axes] or [every]:
        scales = (np.abs(values).max(axis=others, keepdims=True) / np.float32(_MOST[bits])).astype(np.float32)
        scales = np.maximum(scales, np.finfo(np.float32).tiny)
        integers = np.rint(values / scales).astype(np.dtype(f"int{bits}"))
        found.append((float(np.square(integers * scales - values, dtype=np.float64).sum()), integers, scales))
    _, integers, scales = min(found, key=lambda each: each[0])
    return integers, scales


def find_narrow(graph: onnx.GraphProto) -> dict[str, Narrow]:
    """Returns the constants and nodes that replace each float constant, by the name of the float value."""
    fed = {value.name for value in graph.input}
    types = {tensor.name: tensor.data_type for tensor in graph.initializer if tensor.name not in fed}
    casts = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "Cast" and types.get(node.input[0]) in _INTEGERS
        if any(attribute.name == "to" and attribute.i == _FLOAT for attribute in node.attribute)
    }
    return {
        node.output[0]: Narrow(
            integers=casts[node.input[0]].input[0], scales=node.input[1], cast=node.input[0], mul=node.output[0]
        )
        for node in graph.node
        if node.op_type == "Mul" and node.input[0] in casts and types.get(node.input[1]) == _FLOAT
    }


def widen_constants(graph: onnx.GraphProto) -> None:
    """Turns the Cast and Mul of such constants back into float initializers, in place, as a session does by folding.

    The initializers have no data.
    """
    found = find_narrow(graph)
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    for whole, narrow in found.items():
        graph.initializer.add(name=whole, data_type=_FLOAT, dims=shapes[narrow.integers])
    made = {name for narrow in found.values() for name in (narrow.cast, narrow.mul)}
    if made:
        refill(graph.node, [node for node in graph.node if made.isdisjoint(node.output)])
