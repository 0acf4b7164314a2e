"""Computes the float model of a quantized one: its weights are the integers times their scales.

Hubs often offer the quantized file and not the float model, in a form that only some providers take. Dynamic
quantization (`onnxruntime.quantization.quantize_dynamic`), for example, computes the range of an activation in each
run, which only the CPU provider can. The float model can be quantized with samples for any target.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.errors import ModelError
from edgekit.graph.constants import ORT_DOMAIN, read_dequantized
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.graph.match import attempt, known, made_by, need
from edgekit.model import model as models
from edgekit.prepare.clean import drop_initializer_inputs, prepare_model
from edgekit.prepare.fix import apply_rewrites
from edgekit.prepare.interface import drop_idle_nodes, name_nodes
from edgekit.prepare.rewrites import fused
from edgekit.prepare.rewrites.float16 import MOVED

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
# Operators that ONNX Runtime's quantizer and optimizer fuse.
_FUSED = frozenset({"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention"})
# Layers behind which quantizers leave a Relu or Relu6 out, if the range of the integers clips the same values. A sum
# with one number, as in a GELU, is none: its range begins at 0 where no value lies below.
_ACTIVATED = frozenset({"Add", "BatchNormalization", "Conv", "ConvTranspose", "Gemm", "MatMul"})
# Operators that move or choose elements, so that they compute the same of integers as of the floats that these stand
# for, with the inputs that hold elements.
_MOVING: Mapping[str, slice] = {
    **dict.fromkeys(MOVED | {"DepthToSpace", "Expand", "Gather", "GatherElements", "GatherND"}, slice(1)),
    **dict.fromkeys(("Identity", "ReduceMax", "ReduceMin", "Resize", "SpaceToDepth", "Split", "Tile"), slice(1)),
    **dict.fromkeys(("Clip", "Concat", "Max", "Min"), slice(None)),
    "Pad": slice(0, 3, 2),
    "Where": slice(1, 3),
}


def dequantize_model(model: models.Model, out: Path, *, keeps_ranges: bool = False) -> models.Model:
    """Writes the float model of a quantized one to `out`, and returns it.

    A QuantizeLinear and the DequantizeLinear that reads it go, also those of which ONNX Runtime's QLinear operators
    consist, and those with operators between them that move or choose integers. Where the range of the integers begins
    at 0, a Relu stays behind a layer: quantizers leave it out. The product Mul(Cast(MatMulInteger(
    DynamicQuantizeLinear(x), W)), scale of x * scale of W) becomes MatMul(x, W), and a ConvInteger likewise a Conv;
    what ONNX Runtime fuses (DynamicQuantizeMatMul, QAttention) becomes float too. A constant with a DequantizeLinear
    becomes a float constant. Inputs and outputs keep their types: a QuantizeLinear whose integers are an output, or are
    computed with, becomes Div, Round, Add, Clip and Cast, and a DequantizeLinear of an input Cast, Sub and Mul.
    Subgraphs are changed as well.

    With `keeps_ranges` a Clip stays in place of each QuantizeLinear with one scale. What it cuts off is an error of
    ranges that a calibration chose, but a part of the network if training learned the ranges (PACT, LSQ).

    Raises:
        ModelError: the model is not quantized, or has quantized operators for which there is no float form here.
        OutputError: `out` cannot be written.
    """
    proto = models.read_proto(model)
    if not _LAYERS.keys() & {node.op_type for node in models.iterate_nodes(proto.graph)}:
        # Exporters compute scales, zero points or weights in the graph. Beside layers of integers they do not, and
        # folding would join the scales of both factors.
        proto = models.read_proto(prepare_model(model, out.with_name(f"{out.stem}-folded.onnx"), may_stay_open=True))
    drop_initializer_inputs(proto.graph)
    name_nodes(proto.graph)
    apply_rewrites(proto, (fused.split_qlinear.id,))
    writer, found = _Writer(proto, keeps_ranges=keeps_ranges), list[bool | None]()
    for write in (writer.write, writer.write_rounding):
        models.refill(proto.graph.node, models.order_nodes(proto.graph))
        nodes = [(graph, node) for graph in _iterate(view_model(proto), {}) for node in graph.nodes]
        found += [attempt(write, graph, node) for graph, node in nodes]
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
        raise ModelError(f"'{model.path.name}' is not quantized", hint="leave out --dequantize")
    return models.save_proto(proto, out)


def _iterate(graph: Graph, outer: Mapping[str, Node]) -> Iterator[Graph]:
    """Yields a graph and its subgraphs, whose producers include those of the graphs around them."""
    graph = msgspec.structs.replace(graph, producers={**outer, **graph.producers})
    yield graph
    for body in (body for node in graph.nodes for body in node.bodies):
        yield from _iterate(body, graph.producers)


class _Writer:
    """Replaces integer layers and the weights that they read by float ones, in place."""

    def __init__(self, proto: onnx.ModelProto, *, keeps_ranges: bool) -> None:
        self._graph, self._taken, self._keeps_ranges = proto.graph, models.list_names(proto.graph), keeps_ranges
        # The float constant made from integers, scale and zero point, by the ids of these tensors.
        self._made: dict[tuple[int, ...], str] = {}
        # Those of one element.
        self._numbers: set[str] = set()
        # What an operator that moved integers gives in float, by the graph that reads it, their scale and zero point.
        self._moved: dict[tuple[Graph, Node, str, str], Sequence[str]] = {}
        # The Clip or Relu in place of a QuantizeLinear, by this and the graph that reads it.
        self._clips: dict[tuple[Graph, Node], str] = {}

    def write(self, graph: Graph, node: Node) -> bool:
        """Replaces an integer layer by a float one and returns True.

        Raises:
            MisfitError: it is another node, or reads something else than quantized activations and constants.
        """
        if node.op_type in _LAYERS:
            biased = _follow(graph, node, "Add")
            last = known(_follow(graph, known(_follow(graph, biased or node, "Cast")), "Mul"))
            product = known(next(filter(None, (made_by(graph, name, "Mul") for name in last.input)), None))
            bias = [] if biased is None else [_find_bias(graph, node, biased)]

            def read(scales: tuple[str, ...]) -> list[str]:
                operands = zip(node.input[:2], scales, map(node.given, (2, 3)), strict=True)
                return [self._make_float(graph, node, *names) for names in operands]

            inputs = known(attempt(read, product.input) or attempt(read, product.input[::-1]))
            _put(node, _LAYERS[node.op_type], [*inputs, *bias], last)
            return True
        op, places = known(_WHOLE.get(node.op_type))
        named = [list(map(node.given, place)) for place in places]
        inputs = [self._make_float(graph, node, *names) if len(names) > 1 else names[0] for names in named]
        at = _BIASES.get(node.op_type, len(node.input))
        _put(node, op, inputs, node)
        if node.has_input(at):
            node.proto.output[0] = f"{node.output[0]}/product"
            graph.proto.node.append(onnx.helper.make_node("Add", [node.proto.output[0], node.input[at]], node.output))
        return True

    def _make_float(self, graph: Graph, reader: Node, name: str, scale: str, zero: str) -> str:
        """Returns the float tensor of integers that are a quantized activation, or constant."""
        source = graph.producers.get(name)
        if source is not None and source.op_type in {"QuantizeLinear", "DynamicQuantizeLinear"}:
            pairs = zip(source.output[1:] or (source.input[1], source.given(2)), (scale, zero), strict=True)
            need(all(one == other or _is_equal(graph, one, other) for one, other in pairs))
            return self._keep_range(graph, source)
        if name in graph.constants:
            need(graph.constants.keys() >= {scale, *filter(None, [zero])})
            return self._store(graph, reader, name, scale, zero)
        if source is None:
            need(name in graph.inputs and graph.constants.keys() >= {scale, *filter(None, [zero])})
            # By definition, (Cast(x) - zero point) * scale.
            kind = graph.constants[scale].data_type
            need(graph.value(scale).elements == 1)
            shift = np.zeros(()) if not zero else graph.weight(zero)
            stored = numpy_helper.from_array(shift.astype(graph.weight(scale).dtype), self._name(f"{name}_zero"))
            self._graph.initializer.append(stored)
            wide, shifted, made = (self._name(f"{name}_{op}") for op in ("Cast", "Sub", "Mul"))
            graph.proto.node.append(onnx.helper.make_node("Cast", [name], [wide], wide, to=kind))
            graph.proto.node.append(onnx.helper.make_node("Sub", [wide, stored.name], [shifted], shifted))
            graph.proto.node.append(onnx.helper.make_node("Mul", [shifted, scale], [made], made))
            return made
        # The first of thousands comes first, by a stack of its own: Python's is not deep enough.
        stack = [source]
        while stack:
            node = stack[-1]
            places = [*filter(node.has_input, range(*known(_MOVING.get(node.op_type)).indices(len(node.input))))]
            before = [graph.producers.get(node.input[at]) for at in places]
            missing = [
                each
                for each in before
                if each is not None and each.op_type in _MOVING and (graph, each, scale, zero) not in self._moved
            ]
            stack += missing
            if not missing:
                self._move(graph, reader, stack.pop(), places, scale, zero)
        return self._moved[graph, source, scale, zero][source.output.index(name)]

    def _move(self, graph: Graph, reader: Node, node: Node, places: Sequence[int], scale: str, zero: str) -> None:
        """Writes an operator that moves integers for floats; `places` are its inputs that hold elements."""
        if (graph, node, scale, zero) in self._moved:
            return
        # Else each channel has its own, or numbers are computed, or an integer 0 is written.
        need(graph.value(scale).elements == 1 and node.attributes.get("mode") not in {"linear", "cubic"})
        need(node.op_type != "Pad" or node.has_input(2) or not zero or graph.number(zero) == 0)
        copy = onnx.NodeProto()
        copy.CopyFrom(node.proto)
        for at in places:
            copy.input[at] = self._make_float(graph, reader, node.input[at], scale, zero)
        copy.output[:] = [self._name(each) if each else "" for each in node.output]
        graph.proto.node.append(copy)
        self._moved[graph, node, scale, zero] = copy.output

    def write_rounding(self, graph: Graph, node: Node) -> bool:
        """Replaces a QuantizeLinear that is left by its definition, Cast(Clip(Round(x / scale) + zero point)).

        Raises:
            MisfitError: it is another node, has several scales, or no zero point of a type that numpy has.
        """
        need(node.op_type == "QuantizeLinear")
        source, scale, zero = node.input[0], graph.weight(node.input[1]), known(graph.constant(node.given(2)))
        need(scale.size == 1 and zero.dtype.kind in "iu")
        limits, result = np.iinfo(zero.dtype), node.output[0]
        numbers = [np.array(each, scale.dtype) for each in (scale.item(), zero.item(), limits.min, limits.max)]
        stored = [numpy_helper.from_array(number, self._name(f"{result}_bound")) for number in numbers]
        self._graph.initializer.extend(stored)
        by, shift, low, high = (each.name for each in stored)
        for op, operands in (("Div", [by]), ("Round", []), ("Add", [shift]), ("Clip", [low, high])):
            made = self._name(f"{result}_{op}")
            graph.proto.node.append(onnx.helper.make_node(op, [source, *operands], [made], made))
            source = made
        kind = graph.constants[node.input[2]].data_type
        node.proto.CopyFrom(onnx.helper.make_node("Cast", [source], node.output, node.name, to=kind))
        return True

    def _keep_range(self, graph: Graph, quantizer: Node) -> str:
        """Returns the tensor that a QuantizeLinear reads, or a Clip of it that its range means: see `dequantize_model`.

        Of a range that begins at 0 that is a Relu, or a Relu6 if it ends at 6, up to a step.
        """
        name, layer = quantizer.input[0], graph.producers.get(quantizer.input[0])
        zero = graph.constant(quantizer.input[2]) if quantizer.has_input(2) else np.zeros((), np.uint8)
        scale = graph.constant(quantizer.given(1))
        if scale is None or scale.size > 1 or zero is None or zero.dtype.kind not in "iu":
            return name
        limits = np.iinfo(zero.dtype)
        bounds = [(each - float(zero.item())) * float(scale.item()) for each in (limits.min, limits.max)]
        if not self._keeps_ranges:
            if bounds[0] or layer is None or layer.op_type not in _ACTIVATED:
                return name
            if any(self._is_number(graph, each) for each in layer.input):
                return name
            bounds = [0.0, 6.0] if abs(bounds[1] - 6) <= scale.item() else []
        if (graph, quantizer) not in self._clips:
            made = self._name(f"{name}_clip")
            stored = [numpy_helper.from_array(np.array(each, scale.dtype), self._name(made)) for each in bounds]
            self._graph.initializer.extend(stored)
            inputs = [name, *(each.name for each in stored)]
            graph.proto.node.append(onnx.helper.make_node("Clip" if stored else "Relu", inputs, [made], made))
            self._clips[graph, quantizer] = made
        return self._clips[graph, quantizer]

    def _is_number(self, graph: Graph, name: str) -> bool:
        """Returns True for a constant of one element, also one that was quantized: then an Identity reads it now."""
        source = graph.producers.get(name)
        stored = source.proto.input[0] if source is not None and source.input else name
        return stored in self._numbers or (stored in graph.constants and graph.value(stored).elements == 1)

    def _name(self, stem: str) -> str:
        new = next(free for n in range(len(self._taken) + 1) if (free := f"{stem}_{n}") not in self._taken)
        self._taken.add(new)
        return new

    def _store(self, graph: Graph, reader: Node, *names: str) -> str:
        """Adds (integers - zero point) * scale as a constant to the main graph, once, and returns its name.

        The scale is that of the tensor or of each channel: of the first axis for ConvInteger, of the attribute's for
        DequantizeLinear, and of the last for others.
        """
        key = (reader.integer("axis", 1), *(id(graph.constants.get(name)) for name in names))
        if key in self._made:
            return self._made[key]
        new = self._name(names[0])
        if reader.op_type == "DequantizeLinear":
            stored = dict(zip(reader.input, names, strict=False))
            value = read_dequantized(reader.proto, lambda name: graph.weight(stored[name]))
        else:
            parts = [graph.weight(name).astype(np.float32) if name else np.zeros((), np.float32) for name in names]
            whole, *rest = parts
            if reader.op_type == "DynamicQuantizeLSTM":
                # Its weights and those of an LSTM are [directions, inputs, gates] and [directions, gates, inputs].
                whole = whole.transpose(0, 2, 1)
                rest = [part.reshape(len(part), -1, 1) if part.ndim else part for part in rest]
            elif reader.op_type == "ConvInteger":
                # The product with the scales comes after the layer: they lie along the output's channels.
                ones = [1] * (whole.ndim - 2)
                need(rest[0].size == 1 or rest[0].shape[-whole.ndim + 1 :] == (len(whole), *ones))
                rest = [part.reshape(-1, 1, *ones) for part in rest]
            scale, zero = rest
            value = (whole - zero) * scale
        self._graph.initializer.append(numpy_helper.from_array(value, new))
        self._made[key] = new
        self._numbers.update([new] if value.size == 1 else [])
        return new


def _is_equal(graph: Graph, one: str, other: str) -> bool:
    """Returns True if two constants hold the same numbers."""
    both = {one, other} <= graph.constants.keys()
    return both and np.array_equal(graph.weight(one).reshape(-1), graph.weight(other).reshape(-1))


def _find_bias(graph: Graph, layer: Node, biased: Node) -> str:
    """Returns the float bias of a convolution to which ONNX Runtime's older quantizers add Floor(bias / scales)."""
    name = next((name for name in biased.input if name != layer.output[0]), "")
    need(layer.op_type == "ConvInteger")
    for op in ("Reshape", "Cast", "Floor", "Div"):
        name = known(made_by(graph, name, op)).input[0]
    return name


def _put(node: Node, op: str, inputs: Sequence[str], last: Node) -> None:
    """Replaces the nodes from `node` to `last` by a float layer."""
    # Nothing reads the nodes between any more.
    last.proto.output[0] = f"{node.output[0]}/idle"
    node.proto.op_type, node.proto.domain = op, ORT_DOMAIN if op == "Attention" else ""
    node.proto.output[0] = last.output[0]
    if op == "Identity":
        del node.proto.attribute[:]
    node.proto.input[:] = inputs
    while not node.proto.input[-1]:
        del node.proto.input[-1]


def _follow(graph: Graph, node: Node, op: str) -> Node | None:
    """Returns the only reader of a node's first output if it is this operator, else None."""
    readers = graph.readers(node.output[0]) if node.output[0] not in graph.outputs else ()
    return readers[0] if len(readers) == 1 and readers[0].op_type == op else None
