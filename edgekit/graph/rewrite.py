"""Rewrites of a graph: nodes are replaced by others that compute the same.

A rewrite of a node says what it needs, by `need` and `known` and by what it asks its `Writer`. The node stays as it is
if something is missing.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.constants import ML_DOMAIN, is_own
from edgekit.graph.graph import Graph, Node, view_part
from edgekit.graph.match import MisfitError, known, need
from edgekit.model.model import refill
from edgekit.model.tensors import Array

FLOATS = frozenset({"float32", "float16"})
"""The element types for which rewrites that add constants are written."""

# Operators whose first output may be left out too.
_FREE_OUTPUTS = frozenset({"LSTM"})

Write = Callable[["Writer"], None]
"""Adds the nodes that replace `Writer.node`; the node stays if none are added, or if `need` or `known` ends it."""
Change = Callable[[onnx.GraphProto, int], tuple[str, ...]]
"""Changes a graph of an opset version in place, and returns the names of the nodes it changed."""


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """A rewrite and its id.

    `finds` says whether the rewrite would change a graph of an opset, and changes nothing; True may be wrong.
    """

    id: str
    change: Change
    finds: Callable[[Graph, int], bool] = lambda _graph, _opset: True

    def __call__(self, graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
        """Changes a graph in place, and returns the names of the nodes it changed."""
        return self.change(graph, opset)


def rewrite(id_: str, ops: Collection[str] = ()) -> Callable[[Change], Rewrite]:
    """Decorates a function that changes a whole graph, if it has one of these operators: returns it as a `Rewrite`."""

    def wrap(change: Change) -> Rewrite:
        def has_any(nodes: Iterable[Node | onnx.NodeProto]) -> bool:
            return not ops or any(node.op_type in ops for node in nodes)

        return Rewrite(
            id=id_,
            change=lambda graph, opset: change(graph, opset) if has_any(graph.node) else (),
            finds=lambda view, _opset: has_any(view.nodes),
        )

    return wrap


def node_rewrite(id_: str, ops: Collection[str], *, since: int = 1, floats: bool = False) -> Callable[[Write], Rewrite]:
    """Decorates a function that replaces one node: returns a `Rewrite` that applies it to all nodes of these operators.

    It applies to models of opset `since` and later; with `floats`, only to nodes that compute in `FLOATS`: the first
    input is one, and they are not between DequantizeLinear and QuantizeLinear, where providers compute in integers.
    """

    def wrap(write: Write) -> Rewrite:
        def change(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
            return replace_nodes(graph, opset, ops, write, floats=floats) if opset >= since else ()

        def finds(view: Graph, opset: int) -> bool:
            stored = len(view.proto.initializer)
            found = opset >= since and any(_list_written(view, opset, ops, write, floats=floats))
            # What the rewrite would store is not kept.
            del view.proto.initializer[stored:]
            return found

        return Rewrite(id=id_, change=change, finds=finds)

    return wrap


def replace_nodes(
    graph: onnx.GraphProto,
    opset: int,
    ops: Collection[str],
    write: Write,
    *,
    floats: bool = False,
    folder: Path = Path(),
) -> tuple[str, ...]:
    """Replaces each node of these operators by the nodes that `write` adds, in place, and returns the replaced names.

    A node for which it adds none stays, and one that ONNX's checker refuses. Types and shapes are those in the graph:
    infer them first. External data lie in `folder`.
    """
    # Most rewrites find nothing: then no view of the graph is made.
    if not any(node.op_type in ops for node in graph.node):
        return ()
    view = view_part(graph, opset, folder)
    written = {each.node.output: each for each in _list_written(view, opset, ops, write, floats=floats)}
    if written:
        made = {output: writer.nodes for output, writer in written.items()}
        refill(graph.node, [new for node in graph.node for new in made.get(tuple(node.output), (node,))])
    return tuple(writer.node.proto.name for writer in written.values())


def _list_written(view: Graph, opset: int, ops: Collection[str], write: Write, *, floats: bool) -> Iterator["Writer"]:
    """Yields for each node that is replaced the writer with the nodes that replace it."""
    for node in view.nodes:
        # An invalid node may lack inputs that a rewrite relies on.
        if node.op_type not in ops or not _is_valid(node, opset):
            continue
        writer = Writer(graph=view, node=node, opset=opset)
        try:
            need(not floats or (writer.dtype in FLOATS and not _is_unit(view, node)))
            write(writer)
        except MisfitError:
            continue
        if writer.nodes:
            yield writer


def _is_unit(graph: Graph, node: Node) -> bool:
    """Returns True for a node between DequantizeLinear and QuantizeLinear."""
    made_by, read_by = graph.producers.get(node.input[0]), graph.readers(node.output[0])
    if made_by is None or made_by.op_type != "DequantizeLinear" or node.output[0] in graph.outputs:
        return False
    return bool(read_by) and all(reader.op_type == "QuantizeLinear" for reader in read_by)


def _is_valid(node: Node, opset: int) -> bool:
    if not node.input[0] or not (node.output[0] or (node.op_type in _FREE_OUTPUTS and any(node.output))):
        return False
    # An operator that ONNX has in no version, such as Erfc, has no rules either.
    if is_own(node.proto, opset) or not (node.domain or onnx.defs.has(node.op_type)):
        return True
    # `check_model` would require the whole model to be valid.
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {"": opset, ML_DOMAIN: 1}
    try:
        onnx.checker.check_node(node.proto, context)
    except onnx.checker.ValidationError:
        return False
    return node.domain in {"", ML_DOMAIN}


def reshape_tensor(tensor: onnx.TensorProto, name: str, shape: Sequence[int]) -> onnx.TensorProto:
    """Returns a copy of a constant with another name and shape; its data may lie in a file."""
    copy = deepcopy(tensor)
    copy.name, copy.dims[:] = name, shape
    return copy


class Writer(msgspec.Struct, kw_only=True):
    """Adds the nodes that replace `node`, named after it and a part; the last has the name and the output of `node`.

    `cuts` holds the constants with the sizes of each Split.
    """

    graph: Graph
    node: Node
    opset: int
    nodes: list[onnx.NodeProto] = []
    cuts: dict[tuple[int, ...], str] = {}

    @property
    def dtype(self) -> str:
        """The element type of the node's first input, "" where it is not known."""
        return self.graph.value(self.node.input[0]).dtype or ""

    @property
    def x(self) -> str:
        """The name of the node's first input."""
        return self.node.input[0]

    def shape(self, at: int = 0) -> tuple[int, ...]:
        """Returns the shape of an input, which the rewrite needs."""
        return known(self.graph.value(self.node.given(at)).static_shape)

    @property
    def made(self) -> tuple[int, ...]:
        """The shape of the node's first output, which the rewrite needs."""
        return known(self.graph.value(self.node.output[0]).static_shape)

    def array(self, at: int) -> Array:
        """Returns an input that is a small constant, which the rewrite needs."""
        return known(self.graph.array(self.node.given(at)))

    def number(self, at: int) -> float:
        """Returns an input that is a constant number, which the rewrite needs."""
        return known(self.graph.number(self.node.given(at)))

    def add(self, op: str, inputs: Sequence[str], part: str = "", *, into: str = "", **attributes: Any) -> str:
        """Adds a node and returns its output; without a `part` it is the last, with the name of the replaced node.

        The output is named after the node's first one and the part, unless `into` names it: another of its outputs.
        """
        name = f"{self.node.proto.name}/{part}" if part else self.node.proto.name
        own = next(filter(None, self.node.output))
        output = into or (f"{own}/{part}" if part else own)
        # Where a node is called as its output is, so may be a constant, which is named after the node.
        if part and output == name and any(tensor.name == output for tensor in self.graph.proto.initializer):
            output += "-made"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=name, **attributes))
        return output

    def requantize(self, name: str, parameters: Sequence[str], domain: str, parts: tuple[str, str]) -> str:
        """Adds Q and DQ with this scale and zero point after a value, and returns the result."""
        values = self.add("QuantizeLinear", [name, *parameters], parts[0], domain=domain)
        return self.add("DequantizeLinear", [values, *parameters], parts[1], domain=domain)

    def cut(self, name: str, part: str, sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        """Adds a Split of opset 13 or later and returns its outputs; equal `sizes` share one constant."""
        key = tuple(sizes)
        if key not in self.cuts:
            self.cuts[key] = self.constant(f"{part}_sizes", key, "int64")
        first = self.add("Split", [name, self.cuts[key]], part, axis=axis)
        names = (first, *(f"{first}_{place}" for place in range(1, len(sizes))))
        self.nodes[-1].output[:] = names
        return names

    def copy(self, node: Node) -> onnx.NodeProto:
        """Adds a copy of a node and returns it for changes."""
        self.nodes.append(deepcopy(node.proto))
        return self.nodes[-1]

    def constant(self, part: str, value: Any, dtype: str = "") -> str:
        """Adds a constant and returns its name; without a `dtype` it has that of the node's first input."""
        name = self._name_constant(part)
        self.graph.proto.initializer.append(numpy_helper.from_array(np.asarray(value, dtype or self.dtype), name))
        return name

    def ints(self, part: str, values: Any) -> str:
        """Adds a constant of int64, such as a shape or axes, and returns its name."""
        return self.constant(part, values, "int64")

    def reshape(self, x: str, sizes: str, shape: Sequence[int], part: str = "", *, into: str = "") -> str:
        """Adds a Reshape as `add`; `sizes` is the part of the name of the constant with the shape."""
        return self.add("Reshape", [x, self.ints(sizes, shape)], part, into=into)

    def constants(self, values: Mapping[str, Any], dtype: str = "") -> list[str]:
        """Adds constants by their parts and returns their names; for the type see `constant`."""
        return [self.constant(part, value, dtype) for part, value in values.items()]

    def reshaped(self, part: str, name: str, shape: Sequence[int]) -> str:
        """Adds the constant `name` in another shape, and returns its new name; its data need not be loaded."""
        made = self._name_constant(part)
        self.graph.proto.initializer.append(reshape_tensor(self.graph.constants[name], made, shape))
        return made

    def _name_constant(self, part: str) -> str:
        name = f"{self.node.proto.name}/{part}"
        # An earlier rewrite of a node with this name may have made the same part.
        while name in self.graph.constants or name in self.graph.producers:
            name += "-made"
        return name
