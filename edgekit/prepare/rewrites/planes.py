"""Turns 1D convolutions and pooling, [N, C, L], into 2D ones, [N, C, 1, L], for providers that take only four axes."""

import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import need
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes, reshape_tensor, rewrite
from edgekit.model.model import find_reads, refill

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


@rewrite("conv-to-planes", _POOLS | {"Conv"})
def conv_to_planes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Adds an axis of size 1 to Conv and pooling of [N, C, L], in place, and returns the names of the changed nodes.

    Elementwise operators between them, such as activations or residual sums, get it too, so that a network needs only
    two Reshapes.
    """
    if opset < _SINCE:
        return ()
    # The forms with four axes of tensors, and of constants, which layers may share.
    planes, stored = dict[str, str](), dict[str, str]()

    def write(writer: Writer) -> None:
        view, node, name = writer.graph, writer.node, writer.node.output[0]
        need(_is_line_layer(view, node) or _can_follow(view, node, planes))
        raised = node.input if node.op_type in _JOINING else node.input[: 2 if node.op_type == "Conv" else 1]
        for each in raised:
            tensor = view.constants.get(each)
            if tensor is None and each not in planes:
                planes[each] = f"{each}/plane"
                writer.reshape(each, f"{each}/plane/shape", _PLANE, f"{each}/plane")
                writer.nodes[-1].output[0] = planes[each]
            elif tensor is not None and len(tensor.dims) > 1 and each not in stored:
                stored[each] = f"{each}/plane"
                shape = (*tensor.dims[:-1], 1, tensor.dims[-1])
                graph.initializer.append(reshape_tensor(tensor, stored[each], shape))
        new = writer.copy(node)
        new.input[: len(raised)] = [planes.get(each) or stored.get(each, each) for each in raised]
        planes[name] = new.output[0] = f"{name}/plane"
        for attribute in new.attribute:
            if attribute.name in _ALONG:
                # Before each value, that of the new axis; pads have a value for each end.
                attribute.ints[:] = [each for value in attribute.ints for each in (_ALONG[attribute.name], value)]
        writer.reshape(planes[name], "line/shape", _LINE, "line")
        writer.nodes[-1].output[0] = name

    changed = replace_nodes(graph, opset, _POOLS | _ELEMENTWISE | _JOINING | {"Conv"}, write)
    read, lines = find_reads(graph) if changed else set[str](), {f"{name}/line" for name in changed}
    refill(graph.node, [node for node in graph.node if node.name not in lines or node.output[0] in read])
    return changed


def _is_line_layer(view: Graph, node: Node) -> bool:
    value = view.value(node.input[0]) if node.input else None
    if value is None or node.domain or len(value.shape or ()) != 3 or value.dtype not in FLOATS:
        return False
    if node.op_type == "Conv":
        weight, bias = view.constants.get(node.input[1]), node.given(2)
        return weight is not None and len(weight.dims) == 3 and (not bias or bias in view.constants)
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
