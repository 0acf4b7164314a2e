"""Where ONNX Runtime's layout transformation to NHWC stores a tensor with its axes permuted.

ONNX Runtime puts a Transpose before and after each operator whose provider wants channels last, and pushes them through
the following nodes (core/optimizer/layout_transformation/layout_transformation.cc,
core/optimizer/transpose_optimization/onnx_transpose_optimization.cc). Two that meet cancel; one that reaches an output
of the graph stays there.
"""

from collections.abc import Collection, Mapping, Sequence
from weakref import WeakKeyDictionary

from edgekit.graph.constants import MAIN_DOMAINS
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import reduced_axes

Order = tuple[int, ...]

# GetLayoutSensitiveOps of ONNX Runtime, and the operators that QNN adds (qnn_execution_provider.cc).
LAID_OUT = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalLpPool",
    "GlobalMaxPool", "GridSample", "GroupNormalization", "InstanceNormalization", "LRN", "LpPool", "MaxPool", "Resize",
    "SpaceToDepth", "Upsample",
})  # fmt: skip
"""The operators that QNN wants with channels last."""
# The result for each graph in use: a rule asks for it at each node.
_KNOWN: WeakKeyDictionary[Graph, dict[frozenset[str], dict[str, Order]]] = WeakKeyDictionary()
# Operators through which a Transpose of the first input is pushed.
_FIRST = frozenset({
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh",
    "DequantizeLinear", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN",
    "LeakyRelu", "Log", "Neg", "Not", "Pad", "QuantizeLinear", "Reciprocal", "Relu", "Round", "Selu", "Shrink",
    "Sigmoid", "Sign", "Sin", "Sinh", "Slice", "Softplus", "Softsign", "Split", "Sqrt", "Tan", "Tanh",
    "ThresholdedRelu", "Tile",
})  # fmt: skip
# From opset 13 on these compute along one axis, which a Transpose may move.
_ALONG_AXIS = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
# Operators through which a Transpose of any input is pushed; the other inputs get the inverse.
_ANY = frozenset({
    "Add", "And", "BitShift", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min",
    "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor",
})  # fmt: skip
_REDUCING = frozenset({
    "ArgMax", "ArgMin", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
})  # fmt: skip


def find_orders(graph: Graph, layers: Collection[str] = LAID_OUT) -> dict[str, Order]:
    """Returns the `perm` that restores the original axes, for each tensor that is stored with its axes permuted.

    `layers` are the operators that the provider takes and wants with channels last.
    """
    known, kinds = _KNOWN.setdefault(graph, {}), frozenset(layers)
    if kinds not in known:
        orders: dict[str, Order] = {}
        for node in graph.nodes:
            # Q and DQ of 16 bits are ONNX Runtime's own before opset 21.
            is_known = node.domain in MAIN_DOMAINS or node.op_type in {"QuantizeLinear", "DequantizeLinear"}
            order = _order_after(graph, node, orders, kinds) if is_known else None
            if order is not None and list(order) != sorted(order):
                orders.update(dict.fromkeys(node.output, order))
        known[kinds] = orders
    return known[kinds]


def _order_after(graph: Graph, node: Node, orders: Mapping[str, Order], layers: Collection[str]) -> Order | None:
    op, shape = node.op_type, graph.value(node.output[0]).shape
    rank = 0 if shape is None else len(shape)
    if op in layers:
        return (0, rank - 1, *range(1, rank - 1)) if rank >= 3 else None
    if op in _ANY:
        return next((orders[name] for name in node.input if name in orders and len(orders[name]) == rank), None)
    if op == "Concat":
        computed = [name for name in node.input if name not in graph.constants]
        moved = [orders[name] for name in computed if name in orders]
        # ONNX Runtime's cost estimate: the removed Transposes must outweigh those added at other inputs and after it.
        return moved[0] if 2 * len(moved) - len(computed) > 1 else None
    if (order := orders.get(node.input[0])) is None:
        return None
    if op in _FIRST or (op in _ALONG_AXIS and node.since >= 13):
        return order
    if op in {"Reshape", "Expand"}:
        return order if shape == graph.value(node.input[0]).shape else None
    if op == "Transpose":
        perm = node.entries("perm") or tuple(reversed(range(len(order))))
        return tuple(order[axis] for axis in perm)
    if op in _REDUCING and node.integer("keepdims", 1):
        return order
    if op in {*_REDUCING, "Squeeze", "Unsqueeze"}:
        given = (node.integer("axis", 0),) if op in {"ArgMax", "ArgMin"} else reduced_axes(graph, node)
        axes = [axis % (rank if op == "Unsqueeze" else len(order)) for axis in given or ()]
        return None if given is None else _insert(order, axes) if op == "Unsqueeze" else _drop(order, axes)
    return None


def _drop(order: Order, axes: Sequence[int]) -> Order:
    kept = [stored for axis, stored in enumerate(order) if axis not in axes]
    return tuple(sorted(kept).index(stored) for stored in kept)


def _insert(order: Order, axes: Sequence[int]) -> Order:
    others = [axis for axis in range(len(order) + len(axes)) if axis not in axes]
    places = dict(zip(others, (others[stored] for stored in order), strict=True))
    return tuple(places.get(axis, axis) for axis in range(len(order) + len(axes)))
