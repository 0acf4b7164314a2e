"""What a rewrite looks at: the constants, types and shapes of a graph's values, and who reads them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.tensors import Array

FLOATS: Mapping[int, str] = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.FLOAT16: "float16"}
"""The element types that rewrites with numbers in them know."""

_MAX_ELEMENTS = 1 << 14
_ORT_DOMAIN = "com.microsoft"


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A graph seen from above; shapes are those that the graph holds, which `fix_model` infers first.

    `captured` are the values that the bodies of nodes read.
    """

    graph: onnx.GraphProto
    constants: dict[str, onnx.TensorProto]
    types: dict[str, onnx.TypeProto.Tensor]
    makers: dict[str, onnx.NodeProto]
    readers: dict[str, list[onnx.NodeProto]]
    outputs: frozenset[str]
    captured: frozenset[str]

    def array(self, name: str) -> Array | None:
        """Returns the value of a small constant, or None if it is none, is large or lies in another file."""
        tensor = self.constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return None
        return numpy_helper.to_array(tensor) if np.prod(tensor.dims, dtype=object) <= _MAX_ELEMENTS else None

    def number(self, name: str) -> float | None:
        """Returns the only number of a constant, or None if it is none or has several."""
        array = self.array(name)
        return (
            float(array.reshape(-1)[0]) if array is not None and array.size == 1 and array.dtype.kind in "fiu" else None
        )

    def dtype(self, name: str) -> int:
        """Returns the element type of a value, 0 if it is not known."""
        tensor = self.constants.get(name)
        found = self.types.get(name)
        return tensor.data_type if tensor is not None else found.elem_type if found is not None else 0

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a value, or None if a dimension of it is not known."""
        tensor = self.constants.get(name)
        if tensor is not None:
            return tuple(tensor.dims)
        found = self.types.get(name)
        if found is None or not found.HasField("shape"):
            return None
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in found.shape.dim]
        known = [dim for dim in dims if dim is not None]
        return tuple(known) if len(known) == len(dims) else None

    def sole_reader(self, name: str) -> onnx.NodeProto | None:
        """Returns the node that alone reads a value, or None if several do, or a body or a caller does."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.outputs | self.captured else None


def view_scene(graph: onnx.GraphProto) -> Scene:
    """Returns a graph seen from above."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and not node.domain and node.attribute[:1] and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    return Scene(
        graph=graph,
        constants=constants,
        types={
            value.name: value.type.tensor_type
            for value in (*graph.value_info, *graph.input, *graph.output)
            if value.type.HasField("tensor_type")
        },
        makers={name: node for node in graph.node for name in node.output if name},
        readers=readers,
        outputs=frozenset(value.name for value in graph.output),
        captured=frozenset(_captured(graph)),
    )


def _captured(graph: onnx.GraphProto) -> set[str]:
    bodies = [body for node in graph.node for item in node.attribute for body in (item.g, *item.graphs)]
    names = {name for body in bodies for node in body.node for name in node.input}
    names |= {value.name for body in bodies for value in body.output}
    return names.union(*(_captured(body) for body in bodies))


def read_attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Returns an attribute's value, a text as str, or the default where it is absent."""
    for attribute in node.attribute:
        if attribute.name == name:
            value: Any = helper.get_attribute_value(attribute)
            return value.decode() if isinstance(value, bytes) else value
    return default


def replace_nodes(
    graph: onnx.GraphProto,
    opset: int,
    ops: Collection[str],
    expand: Callable[[Scene, onnx.NodeProto], Sequence[onnx.NodeProto] | None],
) -> tuple[str, ...]:
    """Puts what `expand` returns in the place of each node of these operators, in place; None keeps it.

    Nodes that ONNX does not allow are not shown to `expand`. Returns the names of the nodes replaced.
    """
    if not any(node.op_type in ops for node in graph.node):
        return ()
    scene = view_scene(graph)
    nodes: list[onnx.NodeProto] = []
    changed: list[str] = []
    for node in graph.node:
        made = expand(scene, node) if node.op_type in ops and _is_valid(node, opset) else None
        nodes.extend([node] if made is None else made)
        if made is not None:
            changed.append(node.name)
    if changed:
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
    return tuple(changed)


def _is_valid(node: onnx.NodeProto, opset: int) -> bool:
    if not node.input or not node.input[0] or not node.output or not node.output[0]:
        return False
    if node.domain == _ORT_DOMAIN:
        return True
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {"": opset}
    try:
        onnx.checker.check_node(node, context)
    except onnx.checker.ValidationError:
        return False
    return not node.domain


class Writer(msgspec.Struct, kw_only=True):
    """Writes the nodes that stand for one: each is named after it, and the last bears its name and its output."""

    scene: Scene
    node: onnx.NodeProto
    nodes: list[onnx.NodeProto] = []

    def add(self, op: str, inputs: Sequence[str], part: str = "", **attributes: Any) -> str:
        """Adds a node and returns its output; without a `part` to name it, it is the last."""
        name = f"{self.node.name}/{part}" if part else self.node.name
        output = f"{self.node.output[0]}/{part}" if part else self.node.output[0]
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=name, **attributes))
        return output

    def constant(self, part: str, value: Any, dtype: str) -> str:
        """Adds a constant and returns its name."""
        name = f"{self.node.name}/{part}"
        self.scene.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name
