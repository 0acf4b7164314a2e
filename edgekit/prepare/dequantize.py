"""The float model of one that dynamic quantization wrote (`onnxruntime.quantization.quantize_dynamic`).

Dynamic quantization finds the range of an activation in each run, which only the CPU does. Hubs often offer such a file
and not the float model. Its weights are integers with a scale, so a float model is computed from them. It lacks the
rounding of activations, and can be quantized with samples for any target.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from onnx import numpy_helper

from edgekit.errors import ModelError
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.graph.match import made_by
from edgekit.model.model import Model, find_integer_ops, list_names, read_proto, save_proto
from edgekit.prepare.interface import drop_idle_nodes

_LAYERS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
# What ONNX Runtime's quantizer and optimizer write for whole patterns, with operands of their own order.
_FUSED = frozenset({"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"})


class _Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Where a constant of integers becomes float: `node` is then an `op` that reads it, and makes what `last` made.

    `inputs` are those of the node, in which the integers are the constant `integers`.
    """

    node: Node
    last: Node
    op: str
    inputs: tuple[str, ...]
    integers: str
    zero: str
    scale: str


def dequantize_model(model: Model, out: Path) -> Model:
    """Writes the float model of a dynamically quantized one to `out`, and returns it.

    The product Mul(Cast(MatMulInteger(DynamicQuantizeLinear(x), W)), scale of x * scale of W) becomes MatMul(x, W), and
    a convolution a Conv. What a DequantizeLinear makes of a constant, or of rows of one, is float from the start.

    Raises:
        ModelError: the model is not dynamically quantized, or has other integers too.
        OutputError: `out` cannot be written.
    """
    proto = read_proto(model)
    graph, taken, made = view_model(proto), list_names(proto.graph), dict[tuple[str, str, str], str]()
    found = [*_find_layers(graph), *_find_rows(graph)]
    for each in found:
        key = each.integers, each.zero, each.scale
        if key not in made:
            made[key] = next(free for count in range(len(taken) + 1) if (free := f"{key[0]}_{count}") not in taken)
            taken.add(made[key])
            zero = graph.weight(each.zero).astype(np.float32) if each.zero else np.float32(0)
            values = (graph.weight(each.integers).astype(np.float32) - zero) * graph.weight(each.scale)
            proto.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), made[key]))
        # What lies between is idle now.
        each.last.proto.output[0] = f"{each.node.output[0]}/idle"
        each.node.proto.op_type, each.node.proto.output[0] = each.op, each.last.output[0]
        each.node.proto.input[:] = [made[key] if name == each.integers else name for name in each.inputs]
    drop_idle_nodes(proto.graph)
    if left := sorted({*find_integer_ops(proto), *({node.op_type for node in proto.graph.node} & _FUSED)}):
        raise ModelError(
            f"'{model.path.name}' has integers that are no weights of a known layer: {', '.join(left)}",
            hint="give the float model that it was made from",
        )
    if not found:
        raise ModelError(f"'{model.path.name}' is not dynamically quantized", hint="leave out --dequantize")
    out.parent.mkdir(parents=True, exist_ok=True)
    return save_proto(proto, out)


def _find_layers(graph: Graph) -> Iterator[_Stored]:
    """Yields products and convolutions of a dynamically quantized activation with a constant."""
    for layer in graph.nodes:
        source = made_by(graph, layer.input[0], "DynamicQuantizeLinear") if layer.op_type in _LAYERS else None
        scaled = _follow(graph, _follow(graph, layer, "Cast"), "Mul")
        scales = next(filter(None, (made_by(graph, name, "Mul") for name in scaled.input)), None) if scaled else None
        if source is None or scaled is None or scales is None or source.output[1] not in scales.input:
            continue
        scale = scales.input[1 - scales.input.index(source.output[1])]
        zero = layer.input[3] if layer.has_input(3) else ""
        constants = [layer.input[1], scale, *filter(None, [zero])]
        # The scales of a product lie along its last axis, as those of its weight do; a convolution has one.
        is_single = all(graph.value(name).elements == 1 for name in constants[1:])
        if graph.constants.keys() >= {*constants} and (is_single or layer.op_type == "MatMulInteger"):
            yield _Stored(
                node=layer, last=scaled, op=_LAYERS[layer.op_type], inputs=(source.input[0], layer.input[1]),
                integers=layer.input[1], zero=zero, scale=scale,
            )  # fmt: skip


def _find_rows(graph: Graph) -> Iterator[_Stored]:
    """Yields constants behind a DequantizeLinear with one scale, and rows that a Gather takes from one."""
    for last in graph.nodes:
        if last.op_type != "DequantizeLinear":
            continue
        gather = made_by(graph, last.input[0], "Gather")
        node = last if gather is None or _follow(graph, gather, last.op_type) is None else gather
        constants = {node.input[0], *filter(None, last.input[1:])}
        if graph.constants.keys() >= constants and graph.value(last.input[1]).elements == 1:
            yield _Stored(
                node=node, last=last, op="Identity" if node is last else "Gather",
                inputs=node.input[:1] if node is last else node.input,
                integers=node.input[0], zero=last.input[2] if last.has_input(2) else "", scale=last.input[1],
            )  # fmt: skip


def _follow(graph: Graph, node: Node | None, op: str) -> Node | None:
    """Returns the only reader of what a node makes, if it is such an operator."""
    readers = graph.readers(node.output[0]) if node is not None and node.output[0] not in graph.outputs else ()
    return readers[0] if len(readers) == 1 and readers[0].op_type == op else None
