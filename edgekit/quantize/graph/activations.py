"""What lies between a layer and the tensor that its activation makes: one value, written down several times."""

from collections.abc import Iterator

from edgekit.graph.graph import Graph, Node

# What ONNX Runtime's providers fuse into the layer before, and what acts as these do.
_ACTIVATIONS = frozenset({"Clip", "HardSwish", "LeakyRelu", "PRelu", "Relu"})
# What a Sigmoid or HardSigmoid is spelled with.
_SIGMOID_OPS = frozenset({"Add", "Clip", "Div", "HardSigmoid", "Mul", "Sigmoid"})


def find_before_activation(graph: Graph, name: str) -> tuple[str, ...]:
    """Returns the tensors from which an activation function alone makes a tensor, back to a layer or another operator.

    Of y = Relu(x) that is x, of y = x * sigmoid(x) both factors, and what they are made of where that is an activation
    too. If one of them has 8 bits, the tensor holds no more than these.
    """
    found: dict[str, None] = {}
    waiting = [name]
    while waiting:
        maker = graph.producers.get(waiting.pop())
        for before in _read_activation(graph, maker) if maker is not None else ():
            if before in graph.producers and before not in found:
                found[before] = None
                waiting.append(before)
    return tuple(found)


def _read_activation(graph: Graph, node: Node) -> Iterator[str]:
    if node.op_type in _ACTIVATIONS:
        yield node.input[0]
    elif node.op_type in {"Mul", "Div"}:
        yield from _find_silu_inputs(graph, node)


def _find_silu_inputs(graph: Graph, node: Node) -> list[str]:
    """Returns what SiLU or HardSwish, scaled by a constant or not, is made of; nothing where a node is neither."""
    inputs = _list_variables(graph, node)
    if len(inputs) == 1 and inputs[0] in graph.producers:
        inner = graph.producers[inputs[0]]
        before = _find_silu_inputs(graph, inner) if inner.op_type == "Mul" else []
        return [inputs[0], *before] if before else []
    if node.op_type == "Mul" and len(inputs) == 2:
        for value, sigmoid in (inputs, inputs[::-1]):
            between = _trace_sigmoid(graph, sigmoid, value)
            if between:
                return [*between, value]
    return []


def _trace_sigmoid(graph: Graph, sigmoid: str, value: str) -> list[str]:
    """Returns the tensors from a sigmoid back to the value that it is computed from alone, nothing where it is not."""
    found: list[str] = []
    while sigmoid != value:
        maker = graph.producers.get(sigmoid)
        inputs = [] if maker is None or maker.op_type not in _SIGMOID_OPS else _list_variables(graph, maker)
        if len(inputs) != 1:
            return []
        found.append(sigmoid)
        sigmoid = inputs[0]
    return found


def _list_variables(graph: Graph, node: Node) -> list[str]:
    return [name for name in node.input if name and name not in graph.constants]
