"""A read-only view of an ONNX graph, with the types and shapes of its values; big weights are never read."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper, shape_inference

from edgekit.model.model import Model, iterate_graphs, tensor_dtype
from edgekit.model.skim import skim_model
from edgekit.model.tensors import Array

Shape = tuple[int | None, ...]

_SMALL_ELEMENTS = 1 << 14
_MAIN_DOMAINS = ("", "ai.onnx")


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """The element type and shape of a value; None where shape inference does not know."""

    dtype: str | None = None
    shape: Shape | None = None

    @property
    def is_static(self) -> bool:
        """True if every dimension is known."""
        return self.shape is not None and None not in self.shape

    @property
    def elements(self) -> int:
        """How many elements it has, unknown dimensions counted as one; 0 if not even the rank is known."""
        return int(np.prod([1 if dim is None else dim for dim in self.shape])) if self.shape is not None else 0


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node; `since` is the opset version in which its operator took the form it has.

    `inputs` and `outputs` have one entry at least, empty where there is none.
    """

    index: int
    name: str
    op: str
    domain: str
    since: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    bodies: "tuple[Graph, ...]" = ()

    def has_input(self, position: int) -> bool:
        """Returns True if there is an input at this position and its name is not empty."""
        return position < len(self.inputs) and bool(self.inputs[position])

    def integer(self, name: str, default: int) -> int:
        """Returns an attribute that is a whole number; the default if it is absent or something else."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) else default

    def entries(self, name: str) -> tuple[int, ...] | None:
        """Returns an attribute that is a list of whole numbers; None if it is absent or no list."""
        value = self.attributes.get(name)
        return cast("tuple[int, ...]", value) if isinstance(value, tuple) else None


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph in topological order, without its Constant nodes, which are constants as ORT makes them.

    `values` and `constants` of a body include those of the graphs around it. `producers` and `consumers` hold
    positions in `nodes`. `external` names the constants that lie in another file.
    """

    nodes: tuple[Node, ...]
    values: dict[str, Value]
    constants: dict[str, onnx.TensorProto]
    outputs: frozenset[str]
    producers: dict[str, int]
    consumers: dict[str, tuple[int, ...]]
    external: frozenset[str] = frozenset()

    def value(self, name: str) -> Value:
        """Returns what is known of a value."""
        constant = self.constants.get(name)
        if constant is not None:
            return Value(dtype=tensor_dtype(constant.data_type), shape=tuple(constant.dims))
        return self.values.get(name, Value())

    def array(self, name: str) -> Array | None:
        """Returns the value of a small constant, or None if it is no constant, is big, or lies in another file."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        if int(np.prod(tensor.dims, dtype=np.int64)) > _SMALL_ELEMENTS:
            return None
        try:
            return numpy_helper.to_array(tensor)
        except (ValueError, TypeError):
            return None


def read_graph(model: Model) -> Graph:
    """Returns the main graph of a model, with shapes inferred where the file does not hold them.

    Raises:
        ModelError: the model file is gone or unreadable.
    """
    return view_graph(skim_model(model.path))


def view_graph(proto: onnx.ModelProto) -> Graph:
    """Returns the main graph of a protobuf in memory, with shapes inferred."""
    return view_inferred(infer_model(proto))


def view_inferred(proto: onnx.ModelProto) -> Graph:
    """Returns the main graph of a protobuf that holds the shapes of its values."""
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    return _view(proto.graph, opsets, ir_version=proto.ir_version, outer=None)


def is_in_chain(graph: Graph, node: Node, ops: tuple[str, ...]) -> bool:
    """Returns True if the node is in a chain of these operators, each read by the next alone; Q and DQ do not count."""
    for place, op in enumerate(ops):
        if op != node.op:
            continue
        before = [found.op for found in _walk(graph, node, _previous, place)]
        after = [found.op for found in _walk(graph, node, _next, len(ops) - place - 1)]
        if (*reversed(before), node.op, *after) == ops:
            return True
    return False


def _walk(graph: Graph, node: Node, step: Callable[[Graph, Node], Node | None], count: int) -> list[Node]:
    found: list[Node] = []
    at = step(graph, node)
    while at is not None and len(found) < count:
        if at.op not in {"QuantizeLinear", "DequantizeLinear"}:
            found.append(at)
        at = step(graph, at)
    return found


def _previous(graph: Graph, node: Node) -> Node | None:
    index = graph.producers.get(node.inputs[0]) if node.inputs else None
    return None if index is None else graph.nodes[index]


def _next(graph: Graph, node: Node) -> Node | None:
    indices = graph.consumers.get(node.outputs[0], ())
    return graph.nodes[indices[0]] if len(indices) == 1 else None


def infer_model(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy with the shapes that onnx can infer; operators of ORT are inferred by their likes."""
    light = onnx.ModelProto()
    light.CopyFrom(_without_weights(proto))
    for node in _nodes(light):
        likeness = _LIKENESSES.get(node.op_type) if node.domain == "com.microsoft" else None
        if likeness is not None:
            kept = [node.input[at] for at in likeness[1] if at < len(node.input)]
            node.op_type, node.domain, node.input[:] = likeness[0], "", kept
    inferred = light
    for data_prop in (True, False):
        with contextlib.suppress(shape_inference.InferenceError, ValueError, RuntimeError, TypeError):
            inferred = shape_inference.infer_shapes(light, data_prop=data_prop)
            break
    for node, original in zip(_nodes(inferred), _nodes(proto), strict=True):
        if original.domain == "com.microsoft":
            node.CopyFrom(original)
    return inferred


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in iterate_graphs(proto.graph):
        yield from graph.node


_LIKENESSES: dict[str, tuple[str, tuple[int, ...]]] = {
    "QuantizeLinear": ("QuantizeLinear", (0, 1, 2)),
    "DequantizeLinear": ("DequantizeLinear", (0, 1, 2)),
    **dict.fromkeys(
        ("Gelu", "QuickGelu", "FastGelu", "BiasGelu", "QLinearSigmoid", "QLinearLeakyRelu"), ("Identity", (0,))
    ),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), ("Add", (0, 3))),
    "QLinearAveragePool": ("AveragePool", (0,)),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", (0,)),
    "FusedConv": ("Conv", (0, 1)),
    "FusedGemm": ("Gemm", (0, 1)),
}
"""Operators of ORT that onnx cannot infer: the operator, and which inputs, that give the same shape and type."""


def _without_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Empties big initializers, in place, so that no copy holds them; their type and shape stay."""
    for tensor in proto.graph.initializer:
        if max(len(tensor.raw_data), len(tensor.float_data), len(tensor.int32_data)) > _SMALL_ELEMENTS * 8:
            for field in ("raw_data", "float_data", "int32_data"):
                tensor.ClearField(field)
    return proto


def _view(graph: onnx.GraphProto, opsets: Mapping[str, int], *, ir_version: int, outer: Graph | None) -> Graph:
    inputs = {value.name for value in graph.input}
    constants = dict(outer.constants) if outer else {}
    values = dict(outer.values) if outer else {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        values[value.name] = _value(value)
    for tensor in graph.initializer:
        if tensor.name in inputs and ir_version >= 4:
            continue
        constants[tensor.name] = tensor
    for node in graph.node:
        constant = _constant(node)
        if constant is not None:
            constants[node.output[0]] = constant
    shell = Graph(nodes=(), values=values, constants=constants, outputs=frozenset(), producers={}, consumers={})
    kept = [node for node in graph.node if not _is_constant(node)]
    nodes = tuple(
        _node(
            node,
            index,
            opsets,
            tuple(_view(body, opsets, ir_version=ir_version, outer=shell) for body in _bodies(node)),
        )
        for index, node in enumerate(kept)
    )
    return Graph(
        nodes=nodes,
        values=values,
        constants=constants,
        outputs=frozenset(value.name for value in graph.output),
        producers={name: node.index for node in nodes for name in node.outputs if name},
        consumers=_consumers(nodes, kept),
        external=frozenset(n for n, t in constants.items() if t.data_location == onnx.TensorProto.EXTERNAL),
    )


def _consumers(nodes: Iterable[Node], protos: Iterable[onnx.NodeProto]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for node, proto in zip(nodes, protos, strict=True):
        for name in (*node.inputs, *(name for body in _bodies(proto) for name in _free_names(body))):
            if name:
                found.setdefault(name, []).append(node.index)
    return {name: tuple(indices) for name, indices in found.items()}


def _free_names(body: onnx.GraphProto) -> Iterator[str]:
    made = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    made |= {name for node in body.node for name in node.output}
    used = [name for node in body.node for name in node.input]
    used += [value.name for value in body.output]
    used += [name for node in body.node for inner in _bodies(node) for name in _free_names(inner)]
    yield from sorted({name for name in used if name and name not in made})


def _bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _node(proto: onnx.NodeProto, index: int, opsets: Mapping[str, int], bodies: tuple[Graph, ...]) -> Node:
    domain = "" if proto.domain in _MAIN_DOMAINS else proto.domain
    return Node(
        index=index,
        name=proto.name or f"{proto.op_type}_{index}",
        op=proto.op_type,
        domain=domain,
        since=_since(proto.op_type, domain, opsets),
        inputs=tuple(proto.input) or ("",),
        outputs=tuple(proto.output) or ("",),
        attributes={attribute.name: _attribute(attribute) for attribute in proto.attribute},
        bodies=bodies,
    )


def _since(op: str, domain: str, opsets: Mapping[str, int]) -> int:
    version = opsets.get(domain, opsets.get("ai.onnx", 1) if not domain else 1)
    try:
        return onnx.defs.get_schema(op, version, domain).since_version
    except onnx.defs.SchemaError:
        return 1


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value: object = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if attribute.type in _LISTS:
        entries = cast("Iterable[object]", value)
        return tuple(entry.decode(errors="replace") if isinstance(entry, bytes) else entry for entry in entries)
    return "tensor or graph"


_LISTS = (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS, onnx.AttributeProto.STRINGS)


def _is_constant(node: onnx.NodeProto) -> bool:
    return _constant(node) is not None


def _constant(node: onnx.NodeProto) -> onnx.TensorProto | None:
    if node.op_type != "Constant" or node.domain not in _MAIN_DOMAINS or not node.output:
        return None
    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        array = _constant_array(attribute)
        if array is not None:
            return numpy_helper.from_array(array, node.output[0])
    return None


def _constant_array(attribute: onnx.AttributeProto) -> Array | None:
    if attribute.name == "value_float":
        return np.asarray(attribute.f, np.float32)
    if attribute.name == "value_floats":
        return np.asarray(attribute.floats, np.float32)
    if attribute.name == "value_int":
        return np.asarray(attribute.i, np.int64)
    return np.asarray(attribute.ints, np.int64) if attribute.name == "value_ints" else None


def _value(value: onnx.ValueInfoProto) -> Value:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        return Value(dtype=kind.removesuffix("_type") if kind else None)
    tensor = value.type.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None for dim in tensor.shape.dim
        )
    return Value(dtype=tensor_dtype(tensor.elem_type) if tensor.elem_type else None, shape=shape)
