"""What ONNX Runtime's optimizers and its quantizer wrote for its CPU provider, as the operators that others take.

A session that saves its model (`optimized_model_filepath`) writes FusedConv and its like at the level "extended", and
QLinear operators in place of Q and DQ nodes. The quantizer's format QOperator has QLinear operators too. The CPU
provider makes the same of the plain operators whenever a session starts.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import known, made_by, need
from edgekit.graph.rewrite import Writer, node_rewrite, rewrite
from edgekit.model.tensors import Array
from edgekit.prepare.rewrites.float16 import MOVED, store_float_weights

# The inputs of a plain Conv or Gemm: what FusedConv reads beyond them is added to the result.
_PLAIN_INPUTS = 3
FUSED = frozenset({"FusedConv", "FusedGemm", "FusedMatMul"})
# The attributes of activation functions, in the order of FusedConv's `activation_params`.
_ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "Relu": (), "Sigmoid": (), "Tanh": (), "Softplus": (), "Softsign": (), "Clip": ("min", "max"),
    "LeakyRelu": ("alpha",), "Elu": ("alpha",), "ThresholdedRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"),
    "Selu": ("alpha", "gamma"),
}  # fmt: skip


@node_rewrite("split-fused", FUSED, floats=True)
def split_fused(writer: Writer) -> None:
    """Rewrites FusedConv and FusedGemm to Conv and Gemm, an Add and an activation; FusedMatMul with Transposes and Mul.

    Sources: conv_activation_fusion.cc, conv_add_act_fusion.cc, gemm_activation_fusion.cc, matmul_scale_fusion.cc and
    matmul_transpose_fusion.cc of ONNX Runtime.
    """
    node = writer.node
    if node.op_type == "FusedMatMul":
        sides, alpha = list(node.input), node.number("alpha", 1.0)
        need(len(sides) == len("AB") and not any(node.integer(f"transBatch{side}", 0) for side in "AB"))
        for place, (side, name) in enumerate(zip("AB", node.input, strict=True)):
            rank = len(known(writer.graph.value(name).shape))
            # As the operator is defined, a vector is not transposed.
            if node.integer(f"trans{side}", 0) and rank > 1:
                turned = [*range(rank - 2), rank - 1, rank - 2]
                sides[place] = writer.add("Transpose", [name], f"turned_{side}", perm=turned)
        made = writer.add("MatMul", sides, "product" if alpha != 1 else "")
        if alpha != 1:
            writer.add("Mul", [made, writer.constant("alpha", alpha)])
        return
    kind, given = node.attributes.get("activation", ""), node.attributes.get("activation_params", ())
    need(not kind or (kind in _ACTIVATIONS and all(isinstance(number, float) for number in given)))
    product = {name: value for name, value in node.attributes.items() if not name.startswith("activation")}
    op, has_sum = node.op_type.removeprefix("Fused"), node.has_input(_PLAIN_INPUTS)
    made = writer.add(op, node.input[:_PLAIN_INPUTS], "product" if kind or has_sum else "", **product)
    if has_sum:
        made = writer.add("Add", [made, node.input[_PLAIN_INPUTS]], "sum" if kind else "")
    if kind:
        # FusedConv lists the numbers, FusedGemm names each.
        params = dict(zip(_ACTIVATIONS[kind], given, strict=False))
        named = {name: node.number(f"activation_{name}", math.nan) for name in _ACTIVATIONS[kind]}
        params |= {name: value for name, value in named.items() if not math.isnan(value)}
        if kind == "Clip" and writer.opset >= _CLIP_INPUTS_SINCE:
            bounds = [writer.constant(name, params[name]) if name in params else "" for name in ("min", "max")]
            writer.add(kind, [made, *bounds])
        else:
            writer.add(kind, [made], **params)


_CLIP_INPUTS_SINCE = 11


# The operator; for each of its inputs the position of the integers, which scale and zero point follow, or of a tensor
# that is not quantized; the position of the result's scale; that of an int32 bias.
_LINEAR: Mapping[str, tuple[str, Sequence[tuple[int, bool]], int, int]] = {
    "QLinearConv": ("Conv", ((0, True), (3, True)), 6, 8),
    "QLinearMatMul": ("MatMul", ((0, True), (3, True)), 6, 0),
    "QGemm": ("Gemm", ((0, True), (3, True)), 7, 6),
    "QLinearAdd": ("Add", ((0, True), (3, True)), 6, 0),
    "QLinearMul": ("Mul", ((0, True), (3, True)), 6, 0),
    "QLinearWhere": ("Where", ((0, False), (1, True), (4, True)), 7, 0),
    **{
        f"QLinear{op}": (op, ((0, True),), 3, 0)
        for op in ("AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax")
    },
}
LINEAR = frozenset({*_LINEAR, "QLinearConcat"})
"""The operators of the format QOperator that are written as a float operator between DQ and Q nodes."""
# Attributes that only the QLinear operators have.
_OWN = frozenset({"channels_last", "opset"})
# The first opset with a scale for each channel in DequantizeLinear.
_DQ_AXIS_SINCE = 13


@node_rewrite("split-qlinear", LINEAR, since=_DQ_AXIS_SINCE)
def split_qlinear(writer: Writer) -> None:
    """Rewrites QLinearConv and its like to DequantizeLinear, Conv and QuantizeLinear, with the same numbers.

    The scale of an int32 bias is that of the input times that of the weights, as QLinearConv is defined. Only rounding
    may differ: where a result lies in the middle of two integers, sums in float may fall to the other side.
    """
    node, graph = writer.node, writer.graph
    op, places, result, bias = _LINEAR.get(node.op_type, ("Concat", (), 0, 0))
    if node.op_type == "QLinearConcat":
        places = [(at, True) for at in range(2, len(node.input) if "axis" in node.attributes else 0, 3)]
    quantized = [at for at, is_quantized in places if is_quantized]
    need(quantized and all(map(node.has_input, (*(at for at, _ in places), *(at + 1 for at in quantized)))))
    # A QGemm without a scale for its result gives floats.
    gives_float = node.op_type == "QGemm" and not node.has_input(result)
    scales = [known(graph.inline(node.input[at + 1])).reshape(-1) for at in quantized]
    need((gives_float or node.has_input(result + 1)) and _is_plain(writer, op, [scale.size for scale in scales]))
    # The outputs of weights are the first axis of a convolution, and the last of a product.
    axis = 0 if op == "Conv" or node.integer("transB", 0) else 1
    inputs = [node.input[at] for at, _ in places]
    for place, (at, is_quantized) in enumerate(places):
        if is_quantized:
            given = [node.input[at], *_flatten(writer, f"input_{at}", node.input[at + 1 : at + 3])]
            inputs[place] = writer.add("DequantizeLinear", given, f"input_{at}", axis=axis)
    if bias and node.has_input(bias):
        scale = node.number("alpha", 1.0) * scales[0] * scales[1]
        last = len(graph.value(node.input[bias]).shape or (0,)) - 1
        inputs.append(_add_bias(writer, node.input[bias], scale if scale.size > 1 else scale[0], last))
    own = {name: value for name, value in node.attributes.items() if name not in _OWN}
    made = writer.add(op, inputs, "" if gives_float else "float", **own)
    if not gives_float:
        writer.add("QuantizeLinear", [made, *_flatten(writer, "result", node.input[result : result + 2])])


def _add_bias(writer: Writer, values: str, scale: Array, axis: int) -> str:
    """Adds the DequantizeLinear of an int32 bias with the scale of the products, and returns its result.

    Its zero points are stated: without them ONNX Runtime cannot save its optimizations (`state_zeros`).
    """
    parameters = writer.constant("bias_scale", scale, "float32"), writer.constant("bias_zero", 0 * scale, "int32")
    return writer.add("DequantizeLinear", [values, *parameters], "bias", axis=axis)


def _is_plain(writer: Writer, op: str, scales: Sequence[int]) -> bool:
    """Returns True if the plain operator computes the same; `scales` are the numbers of the inputs' scales."""
    node, graph = writer.node, writer.graph
    if node.integer("channels_last", 0):
        return False
    if op == "Softmax" and node.integer("opset", _DQ_AXIS_SINCE) < _DQ_AXIS_SINCE:
        return _is_last(writer)
    if op in {"Conv", "MatMul", "Gemm"} and scales[0] == 1:
        # A stack of weights has its scales along another axis.
        return op == "Conv" or scales[1] == 1 or len(graph.value(node.input[3]).shape or ()) == len("KN")
    return all(count == 1 for count in scales)


def _is_last(writer: Writer) -> bool:
    """Returns True if a Softmax runs over the last axis, where its definition did not change with opset 13."""
    rank = len(writer.graph.value(writer.node.input[0]).shape or ())
    return writer.node.integer("axis", -1) in {-1, rank - 1}


@node_rewrite("new-qlinear-softmax", {"QLinearSoftmax"})
def renew_softmax(writer: Writer) -> None:
    """Gives a QLinearSoftmax over the last axis the definition of opset 13, if it has the one before.

    Where ONNX Runtime's transpose optimizer moves the axis of the old one forward, it runs over all axes behind it too.
    """
    need(writer.node.integer("opset", _DQ_AXIS_SINCE) < _DQ_AXIS_SINCE and _is_last(writer))
    copy = writer.copy(writer.node)
    next(each for each in copy.attribute if each.name == "opset").i = _DQ_AXIS_SINCE


def _flatten(writer: Writer, part: str, names: Sequence[str]) -> list[str]:
    """Returns the names of a scale and a zero point: as scalars if they hold one number, else as lists."""
    found: list[str] = []
    for name, what in zip(filter(None, names), ("scale", "zero"), strict=False):
        shape = tuple(writer.graph.constants[name].dims) if name in writer.graph.constants else ()
        plain = () if math.prod(shape) == 1 else (math.prod(shape),)
        found.append(name if shape == plain else writer.reshaped(f"{part}_{what}", name, plain))
    return found


# Operators that only move elements; their quantized inputs and results have the same scale.
_MOVING = MOVED | {"Gather", "Pad", "Resize"}


@node_rewrite("spread-quantizers", _MOVING, since=_DQ_AXIS_SINCE)
def spread_quantizers(writer: Writer) -> None:
    """Writes DequantizeLinear and QuantizeLinear around an operator that moves quantized integers.

    Models from TensorFlow Lite have such a Reshape between a QuantizeLinear and a DequantizeLinear, and QLinear
    operators have it between them. The result is the same.
    """
    graph, node = writer.graph, writer.node
    parameters = {each.input[1:3] for each in _find_quantizers(graph, node)}
    need(len(parameters) == 1 and len(node.output) == 1 and node.attributes.get("mode") not in {"linear", "cubic"})
    scale, rest = parameters.pop(), list(node.input[1:])
    if node.op_type == "Pad":
        zero, value = (known(graph.number(name)) if name else 0.0 for name in ((*scale, "")[1], (*rest, "", "")[1]))
        # Only what stands for zero is zero in float too.
        need(zero == value)
        # Without a value QNN's HTP pads int8 with a wrong one where the zero point is -128.
        rest[1:2] = [writer.constant("zero_value", 0.0, "float32")]
    moved = writer.add("DequantizeLinear", [node.input[0], *scale], "dequantized")
    moved = writer.add(node.op_type, [moved, *rest], "float", **node.attributes)
    writer.add("QuantizeLinear", [moved, *scale])


def _find_quantizers(graph: Graph, node: Node) -> Sequence[Node]:
    """Returns the QuantizeLinear of the integers that a node moves, or the DequantizeLinear nodes that read them."""
    source, read = _find_maker(graph, node, _MOVING), graph.readers(node.output[0])
    if source is not None:
        return [source] if source.op_type == "QuantizeLinear" else []
    while len(read) == 1 and read[0].op_type in _MOVING:
        read = graph.readers(read[0].output[0])
    return read if all(each.op_type == "DequantizeLinear" for each in read) else []


@rewrite("complete-units", {"DequantizeLinear"})
def complete_units(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes a float bias between Q and DQ nodes as int32, and a Q and DQ before a Relu, in place.

    Training for quantization gives such layers, whose providers then compute in float. Weights of layers whose result
    is not quantized become float constants.
    """
    changed = _complete_unit(graph, opset)
    return (*changed, *store_float_weights(graph, opset)) if changed else ()


@node_rewrite("complete-unit", {"Conv", "ConvTranspose", "Gemm", "Relu"}, since=_DQ_AXIS_SINCE)
def _complete_unit(writer: Writer) -> None:
    graph, node, after = writer.graph, writer.node, known(_read_on(writer.graph, writer.node))
    source = known(_find_maker(graph, node, MOVED))
    if node.op_type != "Relu":
        last = known(_read_on(graph, after)) if after.op_type == "Relu" else after
        need(last.op_type == "QuantizeLinear" and source.op_type == "DequantizeLinear")
        # A constant bias becomes integers with the scale of the products, as ONNX Runtime writes it in a session.
        weight = known(made_by(graph, node.input[1], "DequantizeLinear"))
        bias, one, other = (known(graph.inline(name)) for name in (node.given(2), source.input[1], weight.input[1]))
        need(bias.dtype == one.dtype == other.dtype == np.float32 and one.size == 1 and bias.ndim == 1)
        scale = one * other
        need(scale.size in {1, bias.size} and (scale > 0).all())
        steps = np.round(bias / scale)
        need(np.abs(steps).max(initial=0) < np.iinfo(np.int32).max)
        rounded = _add_bias(writer, writer.constant("bias_values", steps, "int32"), scale, 0)
        writer.copy(node).input[2] = rounded
        return
    need(after.op_type == "QuantizeLinear" and graph.number(after.input[1]) is not None)
    need(any(made_by(graph, name, "DequantizeLinear") for name in source.input))
    need(source.op_type != "DequantizeLinear" and _read_on(graph, source) is node)
    # What a Relu gives, rounded, is a Relu of what is rounded.
    values = writer.add("QuantizeLinear", [node.input[0], *after.input[1:]], "quantized", **after.attributes)
    writer.add("Relu", [writer.add("DequantizeLinear", [values, *after.input[1:]], "dequantized")])


def _find_maker(graph: Graph, node: Node, moving: Collection[str]) -> Node | None:
    """Returns the node that makes what a node reads first, before operators of `moving`; None if none makes it."""
    source = graph.producers.get(node.input[0])
    while source is not None and source.op_type in moving:
        source = graph.producers.get(source.input[0])
    return source


def _read_on(graph: Graph, node: Node) -> Node | None:
    """Returns the only reader of what a node makes, behind operators that move values; None if others read it too."""
    while len(readers := graph.consumers.get(node.output[0], ())) == 1 and node.output[0] not in graph.outputs:
        if readers[0].op_type not in MOVED:
            return readers[0]
        node = readers[0]
    return None
