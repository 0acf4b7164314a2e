"""The sign of 8-bit numbers: most providers take int8 or uint8, and both can stand for the same values.

A number q with the zero point z stands for (q - z) * scale. With 128 added to both, or taken from both, it stands for
the same value.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.graph.match import known, need
from edgekit.graph.rewrite import Writer, node_rewrite, rewrite
from edgekit.model.model import refill
from edgekit.model.tensors import Array
from edgekit.prepare.external import is_absent
from edgekit.prepare.rewrites.fused import LINEAR, complete_units, split_qlinear, spread_quantizers

UNSIGNED_WEIGHTS, INT8_ACTIVATIONS = "unsigned-weights", "int8-activations"
_Kind = Literal["int8", "uint8"]
_OTHER: dict[_Kind, _Kind] = {"int8": "uint8", "uint8": "int8"}
_TYPES = {"int8": onnx.TensorProto.INT8, "uint8": onnx.TensorProto.UINT8}
# NNAPI's model builder registers the weight of a Gemm as it is, and has no int8 type (targets/nnapi/NOTES.md).
_UNSIGNED_OPS = frozenset({"Gemm", "MatMul"})


@rewrite(UNSIGNED_WEIGHTS, {"DequantizeLinear"})
def write_unsigned_weights(graph: onnx.GraphProto, _opset: int) -> tuple[str, ...]:
    """Stores int8 weights of Gemm and MatMul as uint8, in place, and returns the names of the nodes that read them."""
    return store_weights(graph, "uint8", _UNSIGNED_OPS)


FOUR_BITS: Mapping[int, str] = {onnx.TensorProto.INT4: "int8", onnx.TensorProto.UINT4: "uint8"}
"""The types of 4 bits, with the names of those of 8 that hold the same numbers."""


@rewrite("eight-bit-weights", {"DequantizeLinear"})
def write_eight_bits(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Stores constants of 4 bits as the same numbers of 8, in place, for providers and formats that have no 4 bits.

    Those with a scale for each block stay: a session multiplies them as they are (MatMulNBits). ONNX Runtime's
    quantizer leaves the bias of a layer with weights of 4 bits in float; it becomes integers too, as a session makes it
    where there are 8.
    """
    changed = _write_eight_bits(graph, opset)
    return (*changed, *complete_units(graph, opset)) if changed else ()


@node_rewrite("eight-bit-constant", {"DequantizeLinear"})
def _write_eight_bits(writer: Writer) -> None:
    node, graph = writer.node, writer.graph
    places = [at for at in (0, 2) if node.has_input(at)]
    tensors = [known(graph.constants.get(node.input[at])) for at in places]
    need(not node.integer("block_size", 0) and all(each.data_type in FOUR_BITS for each in tensors))
    need(all(each.data_location != onnx.TensorProto.EXTERNAL for each in tensors))
    copy = writer.copy(node)
    for at, tensor in zip(places, tensors, strict=True):
        kind, part = FOUR_BITS[tensor.data_type], "zero" if at else "numbers"
        if not is_absent(tensor):
            copy.input[at] = writer.constant(part, numpy_helper.to_array(tensor).astype(kind), kind)
            continue
        # The model was loaded without its weights, for a check, which needs the type only.
        copy.input[at] = writer.reshaped(part, tensor.name, tensor.dims)
        graph.proto.initializer[-1].data_type = _TYPES[kind]


def store_weights(graph: onnx.GraphProto, wanted: _Kind, ops: Collection[str] | None = None) -> tuple[str, ...]:
    """Turns constant 8-bit inputs of DequantizeLinear of the other type into `wanted`, in place.

    With `ops`, only for nodes of these operators whose other input is unsigned or float. Constants that other nodes
    read too, and external data, stay. Returns the names of the nodes that read the changed DequantizeLinear nodes.
    """
    given = _TYPES[_OTHER[wanted]]
    if not any(tensor.data_type == given for tensor in graph.initializer):
        return ()
    view, zeros = view_part(graph), _Zeros(graph, wanted)
    changed: list[str] = []
    for tensor in list(graph.initializer):
        readers = view.readers(tensor.name)
        consumers = [each for node in readers for each in view.readers(node.output[0])]
        is_weight = tensor.data_type == given and tensor.data_location != onnx.TensorProto.EXTERNAL and bool(readers)
        if not is_weight or not zeros.are_quantizers(view, tensor.name, readers):
            continue
        # The CPU has no kernel for int8 activations with uint8 weights.
        sources = [view.producers.get(node.input[0]) for node in consumers if ops is None or node.op_type in ops]
        if ops is not None and all(
            made is not None and made.op_type == "DequantizeLinear" and view.value(made.given(2)).dtype == "int8"
            for made in sources
        ):
            continue
        if is_absent(tensor):
            # The model was loaded without its weights, for a check, which needs the type only.
            tensor.data_type = _TYPES[wanted]
        else:
            tensor.CopyFrom(numpy_helper.from_array(_flip(numpy_helper.to_array(tensor)), tensor.name))
        for node in readers:
            node.proto.input[2:] = [zeros.flip(node)]
        changed += [node.name for node in consumers]
    return tuple(dict.fromkeys(changed))


def _retype(wanted: _Kind, graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Stores quantized activations in the type `wanted`, in place, and returns the names of the changed nodes.

    int8 activations get int8 weights too: XNNPACK wants both of one sign, and NNAPI takes either weights beside uint8
    (NOTES.md of both). Inputs and outputs of the model keep their type, behind a DequantizeLinear and a QuantizeLinear.
    """
    view = view_part(graph, opset)
    if not any(view.value(name).dtype == _OTHER[wanted] for name in (*view.inputs, *view.producers)):
        return ()
    # Other operators on the integers would keep their type.
    parted = (*split_qlinear(graph, opset), *spread_quantizers(graph, opset))
    view, zeros = view_part(graph, opset), _Zeros(graph, wanted)
    changed, first, last = dict[str, str](), list[onnx.NodeProto](), list[onnx.NodeProto]()
    made = [node.output[0] for node in view.nodes if node.op_type == "QuantizeLinear"]
    for name in (*view.inputs, *made):
        maker, readers = view.producers.get(name), view.readers(name)
        every = [each for each in (maker, *readers) if each is not None]
        if not every or view.value(name).dtype != _OTHER[wanted] or not zeros.are_quantizers(view, name, every):
            continue
        changed[name] = every[0].name
        old = list(every[0].proto.input[1:])
        new = [old[0], zeros.flip(every[0])]
        for node in every:
            node.proto.input[2:] = [zeros.flip(node)]
        if maker is not None and name not in view.outputs:
            continue
        inner, outer = f"{name}/{wanted}", f"{name}/{wanted}_float"
        for node in readers:
            node.proto.input[0] = inner
        if maker is None:
            first += _requantize(name, outer, inner, old, new)
        else:
            maker.proto.output[0] = inner
            last += _requantize(inner, outer, name, new, old)
    if changed:
        refill(graph.node, [*first, *graph.node, *last])
        refill(graph.value_info, [value for value in graph.value_info if value.name not in changed])
        if wanted == "int8":
            store_weights(graph, wanted)
    return (*parted, *changed.values())


def _requantize(
    source: str, between: str, result: str, read: Sequence[str], written: Sequence[str]
) -> list[onnx.NodeProto]:
    names = [f"{result}_{op}" for op in ("DequantizeLinear", "QuantizeLinear")]
    return [
        helper.make_node("DequantizeLinear", [source, *read], [between], names[0]),
        helper.make_node("QuantizeLinear", [between, *written], [result], names[1]),
    ]


_QUANTIZERS = LINEAR | {"DequantizeLinear", "QuantizeLinear"}
write_uint8_activations = rewrite("uint8-activations", _QUANTIZERS)(partial(_retype, "uint8"))
write_int8_activations = rewrite(INT8_ACTIVATIONS, _QUANTIZERS)(partial(_retype, "int8"))


class _Zeros:
    """The zero points of a graph, and those that were flipped to the type `wanted`."""

    def __init__(self, graph: onnx.GraphProto, wanted: _Kind) -> None:
        self._graph, self._wanted = graph, wanted
        self._stored = {tensor.name: tensor for tensor in graph.initializer}

    def are_quantizers(self, view: Graph, name: str, nodes: Sequence[Node]) -> bool:
        """Returns True if a tensor is read and made by Q and DQ nodes alone, with constant scales and zero points."""
        if name in view.captured or (name in view.constants and name in view.outputs):
            return False
        for node in nodes:
            parameters = [self._stored.get(each) for each in node.input[1:] if each]
            if node.op_type not in {"DequantizeLinear", "QuantizeLinear"} or "output_dtype" in node.attributes:
                return False
            if name not in {node.input[0], node.output[0]} or name in node.input[1:]:
                return False
            if any(each is None or each.data_location == onnx.TensorProto.EXTERNAL for each in parameters):
                return False
            # A damaged file may state a scale of 2^31 entries, without their data.
            entries = max((math.prod(each.dims) for each in parameters if each is not None), default=1)
            if entries > math.prod(size or 1 for size in view.value(name).shape or ()):
                return False
            # ONNX Runtime refuses a zero point of another type than the numbers.
            if node.has_input(2) and self._stored[node.input[2]].data_type != _TYPES[_OTHER[self._wanted]]:
                return False
        return True

    def flip(self, node: Node) -> str:
        """Returns the name of the flipped zero point of a Q or DQ node; an absent one is 0, as ONNX defines it."""
        given = self._stored[node.input[2]] if node.has_input(2) else None
        # Others may share the zero point, so a new one is made.
        sign = "unsigned" if self._wanted == "uint8" else "signed"
        name = f"{given.name if given is not None else node.input[1]}.edgekit.{sign}"
        if name not in self._stored:
            zeros = np.zeros(tuple(self._stored[node.input[1]].dims), _OTHER[self._wanted])
            zero = zeros if given is None else numpy_helper.to_array(given)
            self._stored[name] = numpy_helper.from_array(_flip(zero), name)
            self._graph.initializer.append(self._stored[name])
        return name


def _flip(numbers: Array) -> Array:
    """Returns int8 numbers as uint8 with 128 added, or the reverse: the highest bit of each byte flips."""
    return np.asarray((numbers.view(np.uint8) ^ np.uint8(128)).view(np.uint8 if numbers.dtype == np.int8 else np.int8))
