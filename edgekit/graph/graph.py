"""A model's graph, read once: nodes, constants, types and shapes of values, producers and consumers."""

import functools
import math
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import onnx

from edgekit.graph.constants import MAIN_DOMAINS, is_small, list_constants, read_array, read_constant
from edgekit.graph.inference import infer_model
from edgekit.model.external import skim_model
from edgekit.model.model import Model, is_long_list, read_spec, tensor_dtype
from edgekit.model.soundness import find_captured, list_bodies, read_opsets
from edgekit.model.tensors import Array

Shape = tuple[int | None, ...]
_T = TypeVar("_T")

_LISTS = (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS, onnx.AttributeProto.STRINGS)


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """The element type (numpy's name) and shape of a tensor; None where shape inference does not know it.

    `counted` is the shape for counting MACs where inputs have open dimensions, with an assumed size for each
    (`check/macs.py`).
    """

    dtype: str | None = None
    shape: Shape | None = None
    counted: Shape | None = None

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape, None if a dimension is not known."""
        return None if self.shape is None or None in self.shape else cast("tuple[int, ...]", self.shape)

    @property
    def sizes(self) -> Shape | None:
        """The shape for counting MACs."""
        return self.shape if self.counted is None else self.counted

    @property
    def elements(self) -> int:
        """The number of elements, with 1 for unknown dimensions; 0 if not even the rank is known."""
        sizes = self.sizes
        return 0 if sizes is None else math.prod(1 if dim is None else dim for dim in sizes)


class Node(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A node with the fields of ONNX's NodeProto. Two nodes are equal only if they are the same object.

    `index` is its place in the graph. `since` is the opset that introduced the version of the operator (the schema's
    `since_version`). `input` and `output` have at least one entry, an empty name where the node has none. `attributes`
    are numbers, strings and tuples of them; tensors, graphs and very long lists are replaced by a string that says so.
    `bodies` are the subgraphs of control flow; `captured` are the names that these read from outer graphs. `proto` is
    the node in the protobuf.
    """

    index: int
    name: str
    op_type: str
    domain: str
    since: int
    input: tuple[str, ...]
    output: tuple[str, ...]
    attributes: dict[str, Any]
    bodies: "tuple[Graph, ...]" = ()
    captured: tuple[str, ...] = ()
    proto: onnx.NodeProto

    @property
    def reads(self) -> tuple[str, ...]:
        """The names that the node and its subgraphs read."""
        return (*filter(None, self.input), *self.captured)

    def has_input(self, position: int) -> bool:
        """Returns True if there is an input at this position and its name is not empty."""
        return position < len(self.input) and bool(self.input[position])

    def given(self, position: int) -> str:
        """Returns the name of the input at this position, "" if it is absent."""
        return self.input[position] if self.has_input(position) else ""

    def number(self, name: str, default: float = 0.0) -> float:
        """Returns a numeric attribute; the default if it is absent or of another type."""
        value = self.attributes.get(name)
        return float(value) if isinstance(value, int | float) else default

    def integer(self, name: str, default: int) -> int:
        """Returns an integer attribute; the default if it is absent or of another type."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) else default

    def entries(self, name: str) -> tuple[int, ...] | None:
        """Returns an attribute that is a list of integers; None if it is absent or something else."""
        value = self.attributes.get(name)
        if not isinstance(value, tuple):
            return None
        # An operator without a schema may have a list of mixed types.
        entries = cast("tuple[object, ...]", value)
        numbers = tuple(each for each in entries if isinstance(each, int))
        return numbers if len(numbers) == len(entries) else None


class Graph(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """A graph with its nodes in file order, without Constant nodes: these are `constants`, as in ONNX Runtime.

    `proto` is the graph's protobuf, `model` the whole model's: opsets, functions, metadata. `values` has the types and
    shapes of inputs and computed tensors. In a subgraph, `values` and `constants` include those of the outer graphs.
    `consumers` lists a node once for each input through which it reads a tensor, and once for each of its subgraphs
    that reads it, as ONNX Runtime has edges; `captured` are the names that subgraphs read. External data lie in
    `folder`.
    """

    proto: onnx.GraphProto
    model: onnx.ModelProto
    folder: Path
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    constants: Mapping[str, onnx.TensorProto]
    inputs: tuple[str, ...]
    outputs: frozenset[str]
    producers: Mapping[str, Node]
    consumers: Mapping[str, tuple[Node, ...]]
    captured: frozenset[str]

    @property
    def fed(self) -> tuple[str, ...]:
        """The inputs without an initializer, which a caller must give."""
        stored = {tensor.name for tensor in self.proto.initializer}
        return tuple(name for name in self.inputs if name not in stored)

    @property
    def opset(self) -> int:
        """The opset version of ONNX's own domain, 1 if the model imports none."""
        return read_opsets(self.model.opset_import).get("", 1)

    def iterate(self) -> "Iterator[Graph]":
        """Yields the graph and, depth first, the subgraphs of its nodes."""
        yield self
        for body in (body for node in self.nodes for body in node.bodies):
            yield from body.iterate()

    def value(self, name: str) -> Value:
        """Returns type and shape of any tensor, as far as they are known."""
        if (constant := self.constants.get(name)) is not None:
            return Value(dtype=tensor_dtype(constant.data_type), shape=tuple(constant.dims))
        return self.values.get(name, Value())

    def array(self, name: str) -> Array | None:
        """Returns the value of a small constant, or None if it is no constant, is big, or lies in another file."""
        tensor = self.constants.get(name)
        return self.inline(name) if tensor is not None and is_small(tensor) else None

    def inline(self, name: str) -> Array | None:
        """Returns the value of a constant of any size if its data are in the protobuf, else None."""
        tensor = self.constants.get(name)
        if tensor is None or self.is_external(name):
            return None
        try:
            return read_array(tensor, self.folder)
        # The data of large constants may have been left out.
        except (ValueError, TypeError):
            return None

    def number(self, name: str) -> float | None:
        """Returns the value of a numeric constant of one element, None for any other tensor."""
        array = self.array(name)
        return float(array.reshape(())) if array is not None and array.size == 1 and array.dtype.kind in "fiu" else None

    def constant(self, name: str) -> Array | None:
        """Returns the value of a constant of any size, None if the tensor is no constant.

        Raises:
            ValueError: the graph was read without the data of large constants.
        """
        tensor = self.constants.get(name)
        return None if tensor is None else read_array(tensor, self.folder)

    def weight(self, name: str) -> Array:
        """Returns the value of a tensor that must be a constant, of any size.

        Raises:
            KeyError: it is no constant.
            ValueError: the graph was read without the data of large constants.
        """
        return read_array(self.constants[name], self.folder)

    def is_external(self, name: str) -> bool:
        """Returns True if a tensor is a constant with external data."""
        return name in self.constants and self.constants[name].data_location == onnx.TensorProto.EXTERNAL

    def readers(self, name: str) -> tuple[Node, ...]:
        """Returns the nodes that read a tensor, themselves or in their subgraphs: each once, in graph order."""
        return tuple(dict.fromkeys(self.consumers.get(name, ())))

    def is_float(self, name: str) -> bool:
        """Returns True if a tensor is an input or computed, and known to be float32: only such are quantized."""
        found = self.values.get(name)
        return found is not None and found.dtype == "float32"

    def is_float_constant(self, name: str) -> bool:
        """Returns True if a tensor is a constant of float32."""
        return name in self.constants and self.constants[name].data_type == onnx.TensorProto.FLOAT

    def dims(self, name: str) -> Shape:
        """Returns the shape of an input or computed tensor, () if not even its rank is known."""
        found = self.values.get(name)
        return () if found is None or found.shape is None else found.shape

    def static_shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of an input or computed tensor, None if a dimension is not known."""
        found = self.values.get(name)
        return None if found is None else found.static_shape


def read_graph(model: Model) -> Graph:
    """Returns the main graph of a model without the data of large constants, with types and shapes inferred.

    Raises:
        ModelError: the model file is gone or unreadable.
    """
    return view_model(infer_model(skim_model(model.path)), model.path.parent)


def infer_graph(proto: onnx.ModelProto) -> Graph:
    """Returns the main graph of a protobuf without the data of large constants, with types and shapes inferred."""
    return view_model(infer_model(proto))


def view_model(proto: onnx.ModelProto, folder: Path = Path()) -> Graph:
    """Returns the main graph of a protobuf with the types and shapes in it; external data lie in `folder`."""
    return _View(proto, folder).graph(proto.graph, None)


def view_file(path: Path) -> Graph:
    """Returns the main graph of a file that edgekit wrote with the types and shapes in it; external data stay on disk.

    Raises:
        OSError: the file cannot be read.
    """
    return view_model(onnx.load(str(path), load_external_data=False), path.parent)


def view_part(graph: onnx.GraphProto, opset: int = 1, folder: Path = Path()) -> Graph:
    """Returns a graph without its model and its subgraphs, for rewrites; `opset` is the model's."""
    model = onnx.ModelProto(ir_version=onnx.IR_VERSION, opset_import=[onnx.OperatorSetIdProto(version=opset)])
    return _View(model, folder, enters=False).graph(graph, None)


class _View:
    """Reads the graphs of one model; without `enters`, not the subgraphs of its nodes."""

    def __init__(self, model: onnx.ModelProto, folder: Path, *, enters: bool = True) -> None:
        self._model, self._folder, self._enters = model, folder, enters
        self._opsets = read_opsets(model.opset_import)

    def graph(self, proto: onnx.GraphProto, outer: Graph | None) -> Graph:
        constants, fed = list_constants(proto), {value.name: None for value in proto.input}
        # Before IR version 4, every initializer had to be listed among the inputs too, and was a constant all the same.
        if self._model.ir_version >= 4:
            # From IR version 4 on the caller may give another value for an initializer that is an input.
            constants = {name: tensor for name, tensor in constants.items() if name not in fed}
        values = _read_values(proto)
        shell = Graph(
            proto=proto, model=self._model, folder=self._folder, nodes=(), inputs=tuple(fed),
            values=_within(values, outer.values) if outer else values,
            constants=_within(constants, outer.constants) if outer else constants,
            outputs=frozenset(value.name for value in proto.output),
            producers={}, consumers={}, captured=frozenset(),
        )  # fmt: skip
        kept = [node for node in proto.node if read_constant(node) is None]
        return index_nodes(shell, tuple(self._node(node, index, shell) for index, node in enumerate(kept)))

    def _node(self, proto: onnx.NodeProto, index: int, graph: Graph) -> Node:
        domain = "" if proto.domain in MAIN_DOMAINS else proto.domain
        bodies = list_bodies(proto)
        return Node(
            index=index,
            name=proto.name or f"{proto.op_type}_{index}",
            op_type=proto.op_type,
            domain=domain,
            since=_since(proto.op_type, self._opsets.get(domain, 1), domain),
            # One entry at least, so that rules can ask for input 0 of an operator that has none.
            input=tuple(proto.input) or ("",),
            output=tuple(proto.output) or ("",),
            attributes={attribute.name: _attribute(attribute) for attribute in proto.attribute},
            bodies=tuple(self.graph(body, graph) for body in bodies) if self._enters else (),
            captured=tuple(name for body in bodies for name in sorted(find_captured(body))),
            proto=proto,
        )


@functools.lru_cache(maxsize=4096)
def _since(op: str, version: int, domain: str) -> int:
    try:
        return onnx.defs.get_schema(op, version, domain).since_version
    # A custom operator has no schema in onnx, so its versions cannot be told apart.
    except onnx.defs.SchemaError:
        return 1


def index_nodes(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """Returns the graph with other nodes, and `producers`, `consumers` and `captured` found anew."""
    nodes = tuple(nodes)
    consumers: dict[str, list[Node]] = {}
    for node in nodes:
        # A subgraph reads names of outer graphs without listing them as inputs: its node counts as their reader.
        for name in node.reads:
            consumers.setdefault(name, []).append(node)
    return msgspec.structs.replace(
        graph,
        nodes=nodes,
        producers={name: node for node in nodes for name in node.output if name},
        consumers={name: tuple(found) for name, found in consumers.items()},
        captured=frozenset(name for node in nodes for name in node.captured),
    )


def _within(own: dict[str, _T], outer: Mapping[str, _T]) -> Mapping[str, _T]:
    # A name of the inner graph shadows that of an outer one. Nothing is copied: bodies may be many.
    return ChainMap(own, cast("dict[str, _T]", outer))


def _attribute(attribute: onnx.AttributeProto) -> Any:
    if is_long_list(attribute):
        return "long list"
    value: object = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, (int, float)):
        return value
    # Attributes of text are bytes in onnx.proto, and need not be UTF-8.
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if attribute.type == onnx.AttributeProto.STRINGS:
        return tuple(entry.decode(errors="replace") for entry in attribute.strings)
    # Numbers are not looked at one by one: a tree ensemble has thousands, and a graph is viewed many times.
    if attribute.type in _LISTS:
        return tuple(cast("Iterable[object]", value))
    return "tensor or graph"


def _read_values(graph: onnx.GraphProto) -> dict[str, Value]:
    # The model states the types of its inputs and outputs: these win over inferred ones.
    return {value.name: _value(value) for value in (*graph.value_info, *graph.input, *graph.output)}


def _value(value: onnx.ValueInfoProto) -> Value:
    spec = read_spec(value)
    shape = None if spec.shape is None else tuple(dim if isinstance(dim, int) else None for dim in spec.shape)
    return Value(dtype=None if spec.dtype in {"unknown", "undefined"} else spec.dtype, shape=shape)
