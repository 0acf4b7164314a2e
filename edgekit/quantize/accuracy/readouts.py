"""What the graph shows of an output: which of its axes a layer with weights makes, and which operators follow it.

Each class has its own weights, so the class axis is the output axis of a linear layer. An axis that comes from the
input, such as audio frames or pixels, holds places. The output of a normalization or a Tanh holds no class scores.
"""

from collections.abc import Sequence
from typing import Literal

from edgekit.graph.constants import MOVES
from edgekit.graph.graph import Graph, Node
from edgekit.quantize.graph.compared_tensors import CHOOSING_OPS

Origin = Literal["weights", "places", "unknown"]
Readout = Literal["biased", "projected", "shaped", "unknown"]
"""What makes an output: "biased" is a linear layer with a bias, "projected" one without, "shaped" a layer with an
operator after it that scores do not have, such as a Tanh or a normalization, and "unknown" that no layer is found."""

_LINEAR = frozenset({"Gemm", "MatMul", "Conv", "ConvTranspose", "FusedGemm", "FusedConv", "FusedMatMul"})
_PASSING = frozenset({"QuantizeLinear", "DequantizeLinear", "Identity", "Cast", "Dropout"})
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_POOLS = frozenset({"AveragePool", "GlobalAveragePool", "MaxPool", "GlobalMaxPool"})
_REDUCING = frozenset({"ReduceMean", "ReduceSum", "ReduceMax"})
# Operators that may be between a layer and the scores of classes: SqueezeNet pools after a Relu.
_BEHIND_SCORES = (
    _PASSING | MOVES | _POOLS | frozenset({"ReduceMean", "Relu", "Clip", "Neg", "Resize", "Slice", "Gather"})
)
_CLASSIFIERS = frozenset({"LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"})
# Operators that compute each entry of one tensor, so that its axes stay what they are.
_SAME_SHAPE = (
    _PASSING
    | _POOLS
    | frozenset({
        "Relu", "Clip", "LeakyRelu", "PRelu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "Sigmoid", "Softmax",
        "LogSoftmax", "Softplus", "Tanh", "Exp", "Log", "Sqrt", "Pow", "Neg", "Abs", "Erf", "Resize", "Upsample", "Pad",
        "BatchNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization", "Slice",
    })
)  # fmt: skip
# Few nodes follow the last layer with weights: a longer walk is a cycle in a malicious file.
_MOST_NODES = 200


def find_readout(graph: Graph, name: str) -> Readout:
    """Returns what makes an output, before operators that only move, pool, cut or scale its numbers."""
    has_bias = False
    for _ in range(_MOST_NODES):
        node = graph.producers.get(name)
        if node is None:
            return "unknown"
        if node.op_type in _CLASSIFIERS:
            return "biased"
        if _is_linear(graph, node):
            return "biased" if has_bias or (node.op_type != "MatMul" and node.has_input(2)) else "projected"
        inputs = [each for each in node.input if not _is_constant(graph, each)]
        if node.op_type not in _BEHIND_SCORES | _ARITHMETIC or not inputs or len(inputs) > 1:
            break
        has_bias = has_bias or node.op_type == "Add"
        name = inputs[0]
    return "shaped"


def find_origins(graph: Graph, name: str, room: int = _MOST_NODES) -> tuple[Origin, ...]:
    """Returns the origin of each axis: "weights" for the output axis of a layer, "places" for an axis of its input.

    At most `room` nodes are looked at.
    """
    node, shape = graph.producers.get(name), graph.dims(name)
    nothing: list[Origin] = ["unknown" for _ in shape]
    unknown = tuple(nothing)
    if node is None or room < 1 or not shape:
        return unknown
    if _is_linear(graph, node):
        made = 1 if node.op_type.endswith(("Conv", "ConvTranspose")) else len(shape) - 1
        axes: list[Origin] = ["weights" if axis == made else "places" for axis in range(len(shape))]
        return tuple(axes)
    inputs = [each for each in node.input if each and not _is_constant(graph, each)]
    sides = [(graph.dims(each), find_origins(graph, each, room // max(1, len(inputs)) - 1)) for each in inputs[:2]]
    found: Sequence[Origin] | None = None
    if not sides:
        return unknown
    source, origins = sides[0]
    if node.op_type in _ARITHMETIC | {"Concat", "Max", "Min", "Where", "Sum"}:
        found = [_join(sides, axis - len(shape)) for axis in range(len(shape))]
    elif node.op_type in _SAME_SHAPE:
        found = origins
    elif node.op_type == "Transpose":
        order = node.entries("perm") or tuple(reversed(range(len(shape))))
        found = [origins[axis] for axis in order] if len(order) == len(origins) else None
    elif node.op_type in MOVES | _REDUCING | CHOOSING_OPS | {"Gather", "Split"}:
        found = _match(source, shape, origins, is_moved=node.op_type in MOVES)
    return tuple(found) if found is not None and len(found) == len(shape) else unknown


def _join(sides: Sequence[tuple[Sequence[int | None], tuple[Origin, ...]]], axis: int) -> Origin:
    """Returns the origin of an axis, counted from the end, of an elementwise result: "weights" if one side has that."""
    present = [(dims[axis], origins[axis]) for dims, origins in sides if -axis <= len(dims)]
    found: set[Origin] = {origin for size, origin in present if size != 1}
    if not found:
        # Axes of 1 may be joined, as the chance of no and that of yes; what a reduction leaves of one is no place.
        return "weights" if {origin for _, origin in present} == {"weights"} else "unknown"
    if len(found) < 2:
        return found.pop()
    return "weights" if found == {"weights", "places"} else "unknown"


def _match(
    source: Sequence[int | None], shape: Sequence[int | None], origins: Sequence[Origin], *, is_moved: bool
) -> list[Origin] | None:
    """Returns the origins of axes after a change of shape, None where sizes are unknown or 0.

    The parts of an axis that is split have its origin. An axis joined of weights and places holds no classes.
    """
    pairs = zip(source, origins, strict=True)
    before: list[tuple[int | None, Origin]] = [(size, origin) for size, origin in pairs if size != 1]
    found: list[Origin] = []
    joined: list[Origin] = []
    left = 1
    for size in shape:
        if not size:
            return None
        if size == 1:
            found.append("places")
            continue
        if left == 1:
            joined.clear()
        # Where axes were removed, the others keep their order and size; else the sizes multiply to the same.
        while before and (left % size if is_moved else left != size):
            length, made = before.pop(0)
            if not length:
                return None
            left = left * length if is_moved else length
            joined.append(made)
        if left % size:
            return None
        left = left // size if is_moved else 1
        # The origin of a removed axis passes to no other axis.
        if not joined or (is_moved and len(set(joined)) > 1):
            joined.append("places")
        found.append(joined[-1])
    return found


def _is_linear(graph: Graph, node: Node) -> bool:
    return node.op_type in _LINEAR and len(node.input) > 1 and _is_constant(graph, node.input[1])


def _is_constant(graph: Graph, name: str) -> bool:
    """Returns True for a constant of the file, also one that is dequantized, cast, transposed or reshaped."""
    for _ in range(_MOST_NODES):
        if not name or name in graph.constants:
            return True
        node = graph.producers.get(name)
        if node is None or node.op_type not in _PASSING | {"Transpose", "Reshape"} or not node.input:
            return node is not None and node.op_type == "Constant"
        name = node.input[0]
    return False
