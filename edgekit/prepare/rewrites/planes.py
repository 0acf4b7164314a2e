"""Turns 1D convolutions and pooling, [N, C, L], into 2D ones, [N, C, 1, L], for providers that take only four axes."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph, Node, view_part
from edgekit.graph.rewrite import FLOATS, reshape_tensor, rewrite
from edgekit.model.model import refill

# The shapes of Reshapes to [N, C, 1, L] and back; 0 keeps a dimension, -1 is the rest.
_PLANE, _LINE = (0, 0, 1, -1), (0, 0, -1)
_POOLS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})
# Elementwise operators, and Concat along the channels: they may lie between two layers.
_ELEMENTWISE = frozenset(
    {"Clip", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Tanh"}
)
_JOINING = frozenset({"Add", "Concat", "Div", "Mul", "PRelu", "Sub"})
# The first opset in which the shape of a Reshape is an input.
_SINCE = 5
# The value of an attribute along the new axis.
_ALONG = {"dilations": 1, "kernel_shape": 1, "pads": 0, "strides": 1}


@rewrite("conv-to-planes")
def conv_to_planes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Adds an axis of size 1 to Conv and pooling of [N, C, L], in place, and returns the names of the changed nodes.

    Elementwise operators between them, such as activations or residual sums, get it too, so that a network needs only
    two Reshapes.
    """
    if opset < _SINCE or not any(node.op_type in _POOLS | {"Conv"} for node in graph.node):
        return ()
    view, planes, changed = view_part(graph, opset), _Planes(), list[str]()
    for node in view.nodes:
        if _is_line_layer(view, node):
            planes.write_layer(view, node)
        elif _can_follow(view, node, planes.made):
            planes.write_elementwise(view, node)
        else:
            planes.nodes.append(node.proto)
            continue
        changed.append(node.proto.name)
    if not changed:
        return ()
    read = {name for node in planes.nodes for name in node.input} | view.outputs | view.captured
    refill(graph.node, [node for node in planes.nodes if node.name not in planes.lines or node.output[0] in read])
    graph.initializer.extend(planes.constants.values())
    return tuple(changed)


def _is_line_layer(view: Graph, node: Node) -> bool:
    value = view.value(node.input[0]) if node.input else None
    if value is None or node.domain or len(value.shape or ()) != 3 or value.dtype not in FLOATS:
        return False
    if node.op_type == "Conv":
        return node.input[1] in view.constants and all(not name or name in view.constants for name in node.input[2:])
    return node.op_type in _POOLS and len(node.output) == 1 and not node.integer("storage_order", 0)


def _can_follow(view: Graph, node: Node, made: dict[str, str]) -> bool:
    if node.domain or not any(name in made for name in node.input):
        return False
    if node.op_type in _ELEMENTWISE:
        return node.input[0] in made
    if node.op_type not in _JOINING or (node.op_type == "Concat" and node.integer("axis", 0) != 1):
        return False
    # Constants of fewer axes are broadcast; with one of more axes, the output has more.
    wanted = [name for name in node.input if name not in view.constants]
    return all(len(view.value(name).shape or ()) == 3 for name in (*wanted, node.output[0]))


class _Planes:
    """The new nodes of a graph: `made` maps tensors to theirs of four axes, `lines` names the Reshapes back."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.made: dict[str, str] = {}
        self.lines: set[str] = set()

    def write_layer(self, view: Graph, node: Node) -> None:
        """Adds the 2D form of a Conv or a pooling operator."""
        given = [self._raise(node, node.input[0]), *node.input[1:]]
        if node.op_type == "Conv":
            outputs, inputs, size = view.constants[node.input[1]].dims
            given[1] = self._reshape_constant(view, node.input[1], (outputs, inputs, 1, size))
        self._write(node, given)

    def write_elementwise(self, view: Graph, node: Node) -> None:
        """Adds the form with four axes of an elementwise operator or Concat."""
        given = list(node.input)
        for place, name in enumerate(node.input if node.op_type in _JOINING else node.input[:1]):
            if name not in view.constants:
                given[place] = self._raise(node, name)
            elif len(dims := view.constants[name].dims) > 1:
                given[place] = self._reshape_constant(view, name, (*dims[:-1], 1, dims[-1]))
        self._write(node, given)

    def _write(self, node: Node, given: list[str]) -> None:
        new, name = onnx.NodeProto(), node.output[0]
        new.CopyFrom(node.proto)
        new.input[:] = given
        self.made[name] = new.output[0] = f"{name}/plane"
        for attribute in new.attribute:
            if attribute.name in _ALONG:
                # Before each value, that of the new axis; pads have a value for each end.
                attribute.ints[:] = [each for value in attribute.ints for each in (_ALONG[attribute.name], value)]
        self.nodes += [new, self._make_reshape(f"{node.proto.name}/line", self.made[name], name, _LINE)]
        self.lines.add(self.nodes[-1].name)

    def _raise(self, node: Node, name: str) -> str:
        if name not in self.made:
            self.made[name] = f"{name}/plane"
            self.nodes.append(self._make_reshape(f"{node.proto.name}/{name}/plane", name, self.made[name], _PLANE))
        return self.made[name]

    def _make_reshape(self, name: str, source: str, made: str, shape: tuple[int, ...]) -> onnx.NodeProto:
        sizes = f"{name}/shape"
        self.constants[sizes] = numpy_helper.from_array(np.array(shape, np.int64), sizes)
        return helper.make_node("Reshape", [source, sizes], [made], name=name)

    def _reshape_constant(self, view: Graph, name: str, dims: tuple[int, ...]) -> str:
        made = f"{name}/plane"
        # Layers may share a weight.
        if made not in self.constants:
            self.constants[made] = reshape_tensor(view.constants[name], made, dims)
        return made
