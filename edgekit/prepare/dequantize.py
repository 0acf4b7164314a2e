"""Computes the float model of a dynamically quantized one (`onnxruntime.quantization.quantize_dynamic`).

Dynamic quantization computes the range of an activation in each run, which only the CPU provider can. Hubs often offer
such a file and not the float model. The float model is computed from its integer weights and their scales; it can be
quantized with samples for any target.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import ModelError
from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.graph.match import made_by
from edgekit.model import model as models
from edgekit.prepare.interface import drop_idle_nodes

# Operators followed by a Cast and a Mul with the scales.
_LAYERS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
# Operators that take scales as inputs: the float operator, and for each of its inputs the position it comes from, or
# the positions of integers, scale and zero point.
_WHOLE: Mapping[str, tuple[str, Sequence[tuple[int, ...]]]] = {
    "DequantizeLinear": ("Identity", [(0, 1, 2)]),
    "DynamicQuantizeMatMul": ("MatMul", [(0,), (1, 2, 3)]),
    "MatMulIntegerToFloat": ("MatMul", [(0, 2, 4), (1, 3, 5)]),
    "DynamicQuantizeLSTM": ("LSTM", [(0,), (1, 8, 9), (2, 10, 11), (3,), (4,), (5,), (6,), (7,)]),
    "QAttention": ("Attention", [(0, 3, 6), (1, 4, 7), (2,), (5,), (8,)]),
}
# Products that ONNX Runtime's optimizer fused with the bias at this position.
_BIASES = {"DynamicQuantizeMatMul": 4, "MatMulIntegerToFloat": 6}
# Operators whose weights may have a scale for each index of the last axis.
_WIDE = frozenset({*_BIASES, "DynamicQuantizeLSTM", "MatMulInteger", "QAttention"})
# Operators that ONNX Runtime's quantizer and optimizer fuse.
_FUSED = frozenset({"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"})


def dequantize_model(model: models.Model, out: Path) -> models.Model:
    """Writes the float model of a dynamically quantized one to `out`, and returns it.

    The product Mul(Cast(MatMulInteger(DynamicQuantizeLinear(x), W)), scale of x * scale of W) becomes MatMul(x, W), and
    a ConvInteger likewise a Conv; what ONNX Runtime fuses (DynamicQuantizeMatMul, QAttention) becomes float too. A
    constant with a DequantizeLinear, perhaps after a Gather, becomes a float constant. Subgraphs are changed as well.

    Raises:
        ModelError: the model is not dynamically quantized, or has other quantized operators too.
        OutputError: `out` cannot be written.
    """
    proto = models.read_proto(model)
    models.refill(proto.graph.node, models.order_nodes(proto.graph))
    writer = _Writer(proto)
    found = [writer.write(graph, node) for graph in _iterate(view_model(proto), {}) for node in graph.nodes]
    # Subgraphs first: what they no longer read is idle in the graphs around them.
    for part in reversed([*models.iterate_graphs(proto.graph)]):
        models.refill(part.node, models.order_nodes(part))
        drop_idle_nodes(part)
    if left := sorted(
        {*models.find_integer_ops(proto), *({node.op_type for node in models.iterate_nodes(proto.graph)} & _FUSED)}
    ):
        words = f"'{model.path.name}' has quantized operators that cannot be made float: {', '.join(left)}"
        raise ModelError(words, hint="give the float model that it was made from")
    if not any(found):
        raise ModelError(f"'{model.path.name}' is not dynamically quantized", hint="leave out --dequantize")
    return models.save_proto(proto, out)


def _iterate(graph: Graph, outer: Mapping[str, Node]) -> Iterator[Graph]:
    """Yields a graph and its subgraphs, whose producers include those of the graphs around them."""
    graph = msgspec.structs.replace(graph, producers={**outer, **graph.producers})
    yield graph
    for body in (body for node in graph.nodes for body in node.bodies):
        yield from _iterate(body, graph.producers)


class _Writer:
    """Replaces integer layers and the weights that they read by float ones, in place."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._graph, self._taken = proto.graph, models.list_names(proto.graph)
        # The float constant made from integers, scale and zero point, by the ids of these tensors.
        self._made: dict[tuple[int, ...], str] = {}
        # The scale and zero point of a Gather or Transpose that used to pass integers on.
        self._moving: dict[Node, tuple[str, str]] = {}

    def write(self, graph: Graph, node: Node) -> bool:
        """Replaces an integer layer by a float one and returns True, False for any other node."""
        if node.op_type in _LAYERS:
            return self._write_layer(graph, node)
        if node.op_type not in _WHOLE:
            return False
        op, places = _WHOLE[node.op_type]
        named = [list(map(node.given, place)) for place in places]
        inputs = [self._make_float(graph, node, *names) if len(names) > 1 else names[0] for names in named]
        at = _BIASES.get(node.op_type, len(node.input))
        if not _put(node, op, inputs, node):
            return False
        if node.has_input(at):
            node.proto.output[0] = f"{node.output[0]}/product"
            graph.proto.node.append(onnx.helper.make_node("Add", [node.proto.output[0], node.input[at]], node.output))
        return True

    def _write_layer(self, graph: Graph, node: Node) -> bool:
        biased = _follow(graph, node, "Add")
        last = _follow(graph, _follow(graph, biased or node, "Cast"), "Mul")
        product = next(filter(None, (made_by(graph, name, "Mul") for name in (last.input if last else ()))), None)
        bias = _find_bias(graph, node, biased) if biased is not None else []
        if last is None or product is None or bias is None:
            return False
        zeros = [node.given(at) for at in (2, 3)]
        for scales in (product.input, product.input[::-1]):
            operands = zip(node.input[:2], scales, zeros, strict=True)
            inputs = [self._make_float(graph, node, *names) for names in operands]
            if _put(node, _LAYERS[node.op_type], [*inputs, *bias], last):
                return True
        return False

    def _make_float(self, graph: Graph, reader: Node, name: str, scale: str, zero: str) -> str | None:
        """Returns the float tensor of integers; None if they are neither a quantized activation nor constant."""
        source = graph.producers.get(name)
        if source is not None and source.op_type == "DynamicQuantizeLinear":
            return source.input[0] if source.output[1] == scale else None
        if not graph.constants.keys() >= {scale, *filter(None, [zero])}:
            return None
        is_single = graph.value(scale).elements == 1
        if name in graph.constants:
            return self._store(graph, reader, name, scale, zero) if is_single or reader.op_type in _WIDE else None
        # The quantizer lets these operators pass integers on.
        if source is None or source.op_type not in {"Gather", "Transpose"} or not is_single:
            return None
        if source in self._moving:
            return name if self._moving[source] == (scale, zero) else None
        if (moved := self._make_float(graph, reader, source.input[0], scale, zero)) is None:
            return None
        self._moving[source], source.proto.input[0] = (scale, zero), moved
        return name

    def _store(self, graph: Graph, reader: Node, *names: str) -> str:
        """Adds (integers - zero point) * scale as a constant to the main graph, once, and returns its name."""
        key = tuple(id(graph.constants.get(name)) for name in names)
        if key in self._made:
            return self._made[key]
        new = next(free for n in range(len(self._taken) + 1) if (free := f"{names[0]}_{n}") not in self._taken)
        parts = [graph.weight(name).astype(np.float32) if name else np.zeros((), np.float32) for name in names]
        if reader.op_type == "DynamicQuantizeLSTM":
            # [directions, inputs, gates] and [directions, gates]; an LSTM's weights are [directions, gates, inputs].
            whole, *rest = parts
            parts = [
                whole.transpose(0, 2, 1),
                *(part.reshape(len(part), -1, 1) if part.ndim else part for part in rest),
            ]
        integers, scale, zero = parts
        self._graph.initializer.append(numpy_helper.from_array((integers - zero) * scale, new))
        self._taken.add(new)
        self._made[key] = new
        return new


def _find_bias(graph: Graph, layer: Node, biased: Node) -> list[str] | None:
    """Returns the float bias of a convolution to which ONNX Runtime's older quantizers add Floor(bias / scales).

    None if anything else is added.
    """
    name = next((name for name in biased.input if name != layer.output[0]), "")
    for op in ("Reshape", "Cast", "Floor", "Div"):
        node = made_by(graph, name, op)
        if node is None or layer.op_type != "ConvInteger":
            return None
        name = node.input[0]
    return [name]


def _put(node: Node, op: str, inputs: Sequence[str | None], last: Node) -> bool:
    """Replaces the nodes from `node` to `last` by a float layer and returns True, False if an input is unknown."""
    if None in inputs:
        return False
    # Nothing reads the nodes between any more.
    last.proto.output[0] = f"{node.output[0]}/idle"
    node.proto.op_type, node.proto.domain = op, ORT_DOMAIN if op == "Attention" else ""
    node.proto.output[0] = last.output[0]
    node.proto.input[:] = [name or "" for name in inputs]
    while not node.proto.input[-1]:
        del node.proto.input[-1]
    return True


def _follow(graph: Graph, node: Node | None, op: str) -> Node | None:
    """Returns the only reader of a node's first output if it is this operator, else None."""
    readers = graph.readers(node.output[0]) if node is not None and node.output[0] not in graph.outputs else ()
    return readers[0] if len(readers) == 1 and readers[0].op_type == op else None
