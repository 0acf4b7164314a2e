"""Activations as a provider takes them: Clip, HardSwish and GELU, written as one node or taken apart."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, permutations

import numpy as np
import onnx

from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import beside, factors, is_near, made_by, reduced_axis, square_of, walk_product
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes

CLIP_TO_RELU = "clip-to-relu"


def write_relus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each such Clip a Relu, in place, and returns the names of the nodes; both give the same for any number."""
    return replace_nodes(graph, opset, {"Clip"}, _clip_to_relu) if opset >= 11 else ()


def _clip_to_relu(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    dtype = graph.value(node.input[1]).dtype if node.has_input(1) else None
    if dtype is None or dtype not in FLOATS:
        return None
    low = graph.number(node.input[1])
    high = graph.number(node.input[2]) if node.has_input(2) else float("inf")
    limit = float(np.finfo(dtype).max)
    if low != 0 or high is None or high < limit:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Relu", node.input[:1])
    return writer.nodes


CLIP_TO_MIN_MAX = "clip-to-min-max"


def write_min_max(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Makes each Clip with constant bounds a Max and a Min, in place, and returns the names of the nodes.

    The result is the same to the bit, for Clip is defined as Min(Max(x, low), high).
    """
    return replace_nodes(graph, opset, {"Clip"}, _clip_to_min_max) if opset >= 13 else ()


def _clip_to_min_max(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS:
        return None
    names = [*node.input[1:], "", ""][:2]
    steps = [(op, name) for op, name in zip(("Max", "Min"), names, strict=True) if name]
    if not steps or any(graph.number(name) is None for _, name in steps):
        return None
    writer = Writer(graph=graph, node=node)
    value = node.input[0]
    for op, name in steps:
        value = writer.add(op, [value, name], "" if name == steps[-1][1] and op == steps[-1][0] else op.lower())
    return writer.nodes


PLAIN_SLOPE = "plain-slope"
# A slope per channel of pictures: [C, 1, 1].
_SLOPE_AXES = 3


def write_plain_slopes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Leaves out the first axis of each constant slope [1, C, 1, 1] of a PRelu, in place; returns the nodes' names.

    The result is the same to the bit: axes of one element at the front of a slope say nothing.
    """
    return replace_nodes(graph, opset, {"PRelu"}, _plain_slope) if opset >= 7 else ()


def _plain_slope(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    slope = graph.constants.get(node.input[1])
    if slope is None or len(slope.dims) <= _SLOPE_AXES or set(slope.dims[:-_SLOPE_AXES]) != {1}:
        return None
    writer = Writer(graph=graph, node=node)
    plain = onnx.TensorProto()
    plain.CopyFrom(slope)
    plain.name = f"{node.proto.name}/slope"
    del plain.dims[:-_SLOPE_AXES]
    graph.proto.initializer.append(plain)
    writer.add("PRelu", [node.input[0], plain.name])
    return writer.nodes


SPLIT_HARD_SWISH = "split-hard-swish"
JOIN_HARD_SWISH = "join-hard-swish"
_JOIN_SINCE = 14


def split_hard_swishes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each HardSwish as x * Clip(x + 3, 0, 6) / 6, in place, and returns the names of the nodes.

    NNAPI has no HardSwish, but takes a Clip from 0 to 6. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"HardSwish"}, _split) if opset >= _JOIN_SINCE else ()


def join_hard_swishes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each x * Clip(x + 3, 0, 6) / 6, or x * HardSigmoid(x), as HardSwish, in place.

    Returns the names of the nodes that end such a pattern. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Mul", "Div"}, _hard_swish) if opset >= _JOIN_SINCE else ()


def _split(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS:
        return None
    dtype, writer = str(graph.value(node.input[0]).dtype), Writer(graph=graph, node=node)
    three, low, high, sixth = (
        writer.constant(part, value, dtype) for part, value in (("three", 3), ("low", 0), ("six", 6), ("sixth", 1 / 6))
    )
    moved = writer.add("Add", [node.input[0], three], "moved")
    gate = writer.add("Clip", [moved, low, high], "gate")
    scaled = writer.add("Mul", [gate, sixth], "scaled")
    writer.add("Mul", [node.input[0], scaled])
    return writer.nodes


def _hard_swish(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    data = _find_data(graph, node)
    if data is None or graph.value(data).dtype not in FLOATS:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("HardSwish", [data])
    return writer.nodes


def _find_data(graph: Graph, node: Node) -> str | None:
    """Returns x where the node ends x * gate(x) / 6 in any order."""
    whole = _unscale(graph, node)
    if whole is not None:
        product = graph.producers.get(whole)
        return _match_product(graph, product, scaled=False) if product is not None else None
    return _match_product(graph, node, scaled=True)


def _match_product(graph: Graph, node: Node, *, scaled: bool) -> str | None:
    if node.op_type != "Mul" or node.domain:
        return None
    for data, gate in permutations(node.input, 2):
        made = graph.producers.get(gate)
        if made is None:
            continue
        if scaled and _is_hard_sigmoid(made) and made.input[0] == data:
            return data
        inner = _unscale(graph, made) if scaled else gate
        if inner is not None and _gate_of(graph, inner) == data:
            return data
    return None


def _is_hard_sigmoid(node: Node) -> bool:
    alpha, beta = (float(node.attributes.get(name, default)) for name, default in (("alpha", 0.2), ("beta", 0.5)))
    return node.op_type == "HardSigmoid" and not node.domain and _is_close(alpha, 1 / 6) and beta == 0.5


def _unscale(graph: Graph, node: Node) -> str | None:
    """Returns what a node divides by six, or None if it does something else."""
    if node.domain or node.op_type not in {"Mul", "Div"}:
        return None
    if node.op_type == "Mul":
        return _beside(graph, permutations(node.input, 2), 1 / 6)
    # Of a Div only the second operand divides.
    return _beside(graph, pairwise(node.input), 6.0)


def _gate_of(graph: Graph, name: str) -> str | None:
    """Returns x where a value is Clip(x + 3, 0, 6)."""
    clip = graph.producers.get(name)
    if clip is None or clip.op_type != "Clip" or clip.domain:
        return None
    add = graph.producers.get(clip.input[0])
    bounds = [graph.number(bound) for bound in clip.input[1:]]
    if add is None or add.op_type != "Add" or add.domain or bounds != [0, 6]:
        return None
    return _beside(graph, permutations(add.input, 2), 3.0)


def _beside(graph: Graph, pairs: Iterable[tuple[str, ...]], factor: float) -> str | None:
    """Returns what stands beside a number in one of the pairs of operands."""
    for value, constant in pairs:
        number = graph.number(constant)
        if number is not None and _is_close(number, factor):
            return value
    return None


def _is_close(number: float, wanted: float) -> bool:
    """Returns True if a number of a file is the one that is meant: one sixth is rounded there."""
    return math.isclose(number, wanted, abs_tol=1e-5)


EXACT_GELU = "exact-gelu"


def write_exact_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each FastGelu of ONNX Runtime as its exact Gelu, behind an Add where it has a bias, in place.

    Returns the names of the nodes. The formula with Tanh was made to stand for the exact one: they are at most 4.8e-4
    apart, a hundredth of a step of 8 bits over a usual range of GELU, and less than fp16 has at 1.
    """
    return replace_nodes(graph, opset, {"FastGelu"}, _write)


def _write(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS:
        return None
    writer = Writer(graph=graph, node=node)
    data = writer.add("Add", node.input[:2], "sum") if node.has_input(1) else node.input[0]
    writer.add("Gelu", [data], domain=ORT_DOMAIN)
    return writer.nodes


SPLIT_GELU = "split-gelu"
TANH_ID = "split-tanh-gelu"
_ERF_SINCE = 9


def split_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each exact Gelu, of ONNX or ONNX Runtime, as x / 2 * (1 + Erf(x / sqrt 2)), in place.

    Returns the names of the nodes. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Gelu"}, _expander("none", _bend_erf)) if opset >= _ERF_SINCE else ()


def split_tanh_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Gelu with Tanh, FastGelu too, as x / 2 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))), in place.

    Returns the names of the nodes. The last bits may differ (1e-5 relative).
    """
    return replace_nodes(graph, opset, {"Gelu", "FastGelu"}, _expander("tanh", _bend_tanh))


def _expander(
    form: str, bend: Callable[[Writer, str, str], str]
) -> Callable[[Graph, Node], Sequence[onnx.NodeProto] | None]:
    def expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
        found = "tanh" if node.op_type == "FastGelu" else node.attributes.get("approximate", "none")
        dtype = str(graph.value(node.input[0]).dtype)
        if found != form or dtype not in FLOATS:
            return None
        writer = Writer(graph=graph, node=node)
        # FastGelu may add a bias first.
        data = writer.add("Add", node.input[:2], "sum") if node.has_input(1) else node.input[0]
        one, half = (writer.constant(part, value, dtype) for part, value in (("one", 1), ("half", 0.5)))
        gate = writer.add("Add", [bend(writer, data, dtype), one], "gate")
        writer.add("Mul", [writer.add("Mul", [data, half], "halved"), gate])
        return writer.nodes

    return expand


def _bend_erf(writer: Writer, data: str, dtype: str) -> str:
    root = writer.constant("root", math.sqrt(0.5), dtype)
    return writer.add("Erf", [writer.add("Mul", [data, root], "narrow")], "bent")


def _bend_tanh(writer: Writer, data: str, dtype: str) -> str:
    cubic, root = writer.constant("cubic", 0.044715, dtype), writer.constant("root", math.sqrt(2 / math.pi), dtype)
    # x * (1 + 0.044715 * x * x) spares a Pow, which some providers lack.
    square = writer.add("Mul", [writer.add("Mul", [data, data], "square"), cubic], "bow")
    moved = writer.add("Add", [data, writer.add("Mul", [data, square], "third")], "moved")
    return writer.add("Tanh", [writer.add("Mul", [moved, root], "narrow")], "bent")


SPLIT_BIAS_GELU = "split-bias-gelu"


def split_bias_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each BiasGelu as Add and Gelu, and FastGelu with a bias as Add and FastGelu, in place.

    Returns the names of the nodes. The last bits may differ (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"BiasGelu", "FastGelu"}, _split_bias_gelu)


def _split_bias_gelu(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if graph.value(node.input[0]).dtype not in FLOATS or not node.has_input(1):
        return None
    writer = Writer(graph=graph, node=node)
    total = writer.add("Add", node.input[:2], "sum")
    writer.add({"BiasGelu": "Gelu"}.get(node.op_type, node.op_type), [total], domain=ORT_DOMAIN)
    return writer.nodes


JOIN_GELU = "join-gelu"
_SINCE = 20
_CUBIC = 0.044715


def join_gelus(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each x / 2 * (1 + Erf(x / sqrt 2)), and the form with Tanh, as one node, in place.

    That is ONNX's Gelu from opset 20 on, and before it ONNX Runtime's Gelu and FastGelu. Returns the names of the
    nodes that end such a pattern. The last bits may differ (1e-6 relative; with Tanh 1e-5).
    """
    if not any(node.op_type in {"Erf", "Tanh"} for node in graph.node):
        return ()
    return replace_nodes(graph, opset, {"Mul", "Div"}, lambda view, node: _join_gelu(view, node, opset))


def _join_gelu(graph: Graph, node: Node, opset: int) -> Sequence[onnx.NodeProto] | None:
    output = node.output[0]
    for gate in walk_product(graph, output):
        bent = made_by(graph, beside(graph, made_by(graph, gate, "Add"), 1.0) or "", "Erf", "Tanh")
        if bent is None:
            continue
        data = _find_erf(graph, bent) if bent.op_type == "Erf" else _find_tanh(graph, bent)
        if data is None or not _is_half(graph, output, data, gate):
            return None
        writer, form = Writer(graph=graph, node=node), "none" if bent.op_type == "Erf" else "tanh"
        if opset >= _SINCE:
            writer.add("Gelu", [data], approximate=form)
        else:
            writer.add("Gelu" if form == "none" else "FastGelu", [data], domain=ORT_DOMAIN)
        return writer.nodes
    return None


def _is_half(graph: Graph, output: str, data: str, gate: str) -> bool:
    """Returns True if a product is half of x times the gate; the type is float32 where the half is."""
    number, values = factors(graph, output, data)
    return is_near(number, 0.5) and sorted(values) == sorted((data, gate)) and graph.value(data).dtype != "float16"


def _find_erf(graph: Graph, erf: Node) -> str | None:
    """Returns x of Erf(x / sqrt 2)."""
    node = made_by(graph, erf.input[0], "Div", "Mul")
    if node is None:
        return None
    if node.op_type == "Mul":
        return beside(graph, node, math.sqrt(0.5))
    return node.input[0] if is_near(graph.number(node.input[1]), math.sqrt(2)) else None


def _find_tanh(graph: Graph, tanh: Node) -> str | None:
    """Returns x of Tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)), the cubic in any of its spellings."""
    node = made_by(graph, tanh.input[0], "Mul")
    inside = beside(graph, node, math.sqrt(2 / math.pi))
    added = made_by(graph, inside, "Add") if inside is not None else None
    if added is not None:
        return next((x for x, cubic in (added.input, added.input[::-1]) if _is_power(graph, cubic, x, 3)), None)
    # The form of GPT-J and of transformers' FastGELUActivation: x stands outside, a square inside.
    for each in walk_product(graph, tanh.input[0]):
        square = beside(graph, made_by(graph, each, "Add"), 1.0)
        if square is None:
            continue
        number, values = factors(graph, tanh.input[0])
        rest = [value for value in values if value != each]
        if len(rest) == 1 and is_near(number, math.sqrt(2 / math.pi)) and _is_power(graph, square, rest[0], 2):
            return rest[0]
    return None


def _is_power(graph: Graph, name: str, data: str, power: int) -> bool:
    """Returns True if a value is 0.044715 times a power of x."""
    number, values = factors(graph, name, data)
    if not is_near(number, _CUBIC):
        return False
    count = 0
    for value in values:
        pow_ = made_by(graph, value, "Pow")
        if value == data:
            count += 1
        elif square_of(graph, value) == data:
            count += 2
        elif pow_ is not None and pow_.input[0] == data and graph.number(pow_.input[1]) == power:
            count += power
        else:
            return False
    return count == power


JOIN_SOFTMAX = "join-softmax"


def join_softmaxes(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each exp(x - max(x)) / sum(exp(x - max(x))) along one axis as Softmax, in place, as JAX takes it apart.

    Where nothing is subtracted, too. Returns the names of the nodes that end such a pattern. The last bits may differ
    (1e-6 relative).
    """
    return replace_nodes(graph, opset, {"Div"}, lambda view, node: _join_softmax(view, node, opset))


def _join_softmax(graph: Graph, node: Node, opset: int) -> Sequence[onnx.NodeProto] | None:
    raised = made_by(graph, node.input[0], "Exp")
    axis = None if raised is None else _reduced_axis(graph, node.input[1], "ReduceSum", node.input[0])
    if raised is None or axis is None:
        return None
    shifted = made_by(graph, raised.input[0], "Sub")
    is_shifted = shifted is not None and _reduced_axis(graph, shifted.input[1], "ReduceMax", shifted.input[0]) == axis
    data = shifted.input[0] if shifted is not None and is_shifted else raised.input[0]
    rank = len(graph.value(data).shape or ())
    # Before opset 13 Softmax goes along all axes from its own on.
    if not rank or (opset < _ONE_AXIS_SINCE and axis != rank - 1) or graph.value(data).dtype not in {None, "float32"}:
        return None
    writer = Writer(graph=graph, node=node)
    writer.add("Softmax", [data], axis=axis)
    return writer.nodes


_ONE_AXIS_SINCE = 13


def _reduced_axis(graph: Graph, name: str, op: str, data: str) -> int | None:
    """Returns the axis along which a value is `op` of `data`, and has size 1 there; None for any other value."""
    shape, reduced = graph.value(data).static_shape, name
    while (node := made_by(graph, reduced, "Reshape", "Unsqueeze", "Identity")) is not None:
        reduced = node.input[0]
    node = made_by(graph, reduced, op)
    axis = None if node is None or node.input[0] != data or shape is None else reduced_axis(graph, node)
    if axis is None or shape is None or graph.value(name).static_shape != (
        *shape[: axis % len(shape)], 1, *shape[axis % len(shape) + 1 :]
    ):  # fmt: skip
        return None
    return axis % len(shape)
