"""Activation functions: Clip, PRelu, HardSwish, GELU and Softmax, fused into one node or split into simpler ones."""

import math
from collections.abc import Callable, Iterable
from itertools import pairwise, permutations

import numpy as np
import onnx

from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import beside, factors, is_near, made_by, reduced_axis, square_of, walk_product
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite, replace_nodes, rewrite


@node_rewrite(
    "clip-to-relu", {"Clip"}, "write {count} of Clip from zero to nothing as Relu, which is the same", since=11
)
def clip_to_relu(writer: Writer) -> None:
    """Rewrites Clip(x, 0, no upper bound) to Relu(x); both give the same result for any number."""
    graph, node = writer.graph, writer.node
    dtype = graph.value(node.input[1]).dtype if node.has_input(1) else None
    if dtype is None or dtype not in FLOATS:
        return
    high = graph.number(node.input[2]) if node.has_input(2) else float("inf")
    if graph.number(node.input[1]) == 0 and high is not None and high >= float(np.finfo(dtype).max):
        writer.add("Relu", node.input[:1])


@node_rewrite(
    "clip-to-min-max", {"Clip"}, "write {count} of Clip as Max and Min, which is the same", since=13, floats=True
)
def clip_to_min_max(writer: Writer) -> None:
    """Rewrites Clip(x, low, high) with constant bounds to Min(Max(x, low), high).

    The result is the same to the bit, because ONNX defines Clip by this formula.
    """
    value, *bounds = writer.node.input
    steps = [(op, name) for op, name in zip(("Max", "Min"), bounds, strict=False) if name]
    if any(writer.graph.number(name) is None for _, name in steps):
        return
    for op, name in steps:
        value = writer.add(op, [value, name], "" if (op, name) == steps[-1] else op.lower())


# An image model has one slope per channel: shape [C, 1, 1].
_SLOPE_AXES = 3


@node_rewrite(
    "plain-slope",
    {"PRelu"},
    "leave the first axis, of size 1, out of the slope of {count} of PRelu, which is the same",
    since=7,
)
def plain_slope(writer: Writer) -> None:
    """Rewrites a PRelu with a constant slope of shape [1, C, 1, 1] to one with a slope of shape [C, 1, 1].

    The result is the same to the bit, because broadcasting adds leading axes of size 1.
    """
    node, slope = writer.node, writer.graph.constants.get(writer.node.input[1])
    if slope is None or len(slope.dims) <= _SLOPE_AXES or set(slope.dims[:-_SLOPE_AXES]) != {1}:
        return
    plain = onnx.TensorProto()
    plain.CopyFrom(slope)
    plain.name = f"{node.proto.name}/slope"
    del plain.dims[:-_SLOPE_AXES]
    writer.graph.proto.initializer.append(plain)
    writer.add("PRelu", [node.input[0], plain.name])


_HARD_SWISH_SINCE = 14


@node_rewrite(
    "split-hard-swish",
    {"HardSwish"},
    "write {count} of HardSwish as x * Clip(x + 3, 0, 6) / 6",
    since=_HARD_SWISH_SINCE,
    floats=True,
)
def split_hard_swish(writer: Writer) -> None:
    """Rewrites HardSwish(x) to x * (Clip(x + 3, 0, 6) * (1 / 6)).

    NNAPI has no HardSwish, but takes a Clip from 0 to 6. The last bits may differ (1e-6 relative).
    """
    x = writer.node.input[0]
    three, low, high, sixth = (
        writer.constant(part, value) for part, value in (("three", 3), ("low", 0), ("six", 6), ("sixth", 1 / 6))
    )
    gate = writer.add("Clip", [writer.add("Add", [x, three], "moved"), low, high], "gate")
    writer.add("Mul", [x, writer.add("Mul", [gate, sixth], "scaled")])


@node_rewrite(
    "join-hard-swish",
    {"Mul", "Div"},
    "write x * Clip(x + 3, 0, 6) / 6 as HardSwish, {count}",
    since=_HARD_SWISH_SINCE,
)
def join_hard_swish(writer: Writer) -> None:
    """Fuses x * Clip(x + 3, 0, 6) / 6, or x * HardSigmoid(x), into HardSwish(x).

    The factors may stand in any order. The last node of the pattern is replaced. The last bits may differ (1e-6
    relative).
    """
    graph = writer.graph
    whole = _divided_by_six(graph, writer.node)
    product = writer.node if whole is None else made_by(graph, whole, "Mul")
    data = _gated(graph, product, scaled=whole is None) if product is not None else None
    if data is not None and graph.value(data).dtype in FLOATS:
        writer.add("HardSwish", [data])


def _gated(graph: Graph, node: Node, *, scaled: bool) -> str | None:
    """Returns x of x * gate, where gate is Clip(x + 3, 0, 6).

    With `scaled` the gate is Clip(x + 3, 0, 6) / 6 or HardSigmoid(x).
    """
    if node.op_type != "Mul" or node.domain:
        return None
    for data, gate in permutations(node.input, 2):
        made = graph.producers.get(gate)
        if made is None:
            continue
        if scaled and _is_hard_sigmoid(made) and made.input[0] == data:
            return data
        inner = _divided_by_six(graph, made) if scaled else gate
        if inner is not None and _gate_of(graph, inner) == data:
            return data
    return None


def _is_hard_sigmoid(node: Node) -> bool:
    alpha, beta = (float(node.attributes.get(name, default)) for name, default in (("alpha", 0.2), ("beta", 0.5)))
    return node.op_type == "HardSigmoid" and not node.domain and _is_close(alpha, 1 / 6) and beta == 0.5


def _divided_by_six(graph: Graph, node: Node) -> str | None:
    """Returns the value that a node divides by 6 (or multiplies by 1/6), or None for any other node."""
    if node.domain or node.op_type not in {"Mul", "Div"}:
        return None
    if node.op_type == "Mul":
        return _beside(graph, permutations(node.input, 2), 1 / 6)
    # Only the second operand of a Div is the divisor.
    return _beside(graph, pairwise(node.input), 6.0)


def _gate_of(graph: Graph, name: str) -> str | None:
    """Returns x if a value is Clip(x + 3, 0, 6), else None."""
    clip = made_by(graph, name, "Clip")
    add = made_by(graph, clip.input[0], "Add") if clip is not None else None
    if clip is None or add is None or [graph.number(bound) for bound in clip.input[1:]] != [0, 6]:
        return None
    return _beside(graph, permutations(add.input, 2), 3.0)


def _beside(graph: Graph, pairs: Iterable[tuple[str, ...]], factor: float) -> str | None:
    """Returns the first operand of the first pair whose second operand is the constant `factor`, else None."""
    for value, constant in pairs:
        number = graph.number(constant)
        if number is not None and _is_close(number, factor):
            return value
    return None


def _is_close(number: float, wanted: float) -> bool:
    """Returns True if a constant of the model equals the wanted number within rounding, such as 0.16667 for 1/6."""
    return math.isclose(number, wanted, abs_tol=1e-5)


def _add_bias(writer: Writer) -> str:
    """Returns the first input, plus the bias if the node has one, as ONNX Runtime's BiasGelu and FastGelu may."""
    node = writer.node
    return writer.add("Add", node.input[:2], "sum") if node.has_input(1) else node.input[0]


@node_rewrite(
    "exact-gelu", {"FastGelu"}, "write {count} of Gelu with Tanh as the exact one, at most 4.8e-4 apart", floats=True
)
def write_exact_gelu(writer: Writer) -> None:
    """Rewrites ONNX Runtime's FastGelu(x, bias) to its exact Gelu(x + bias); the bias is optional.

    FastGelu approximates the exact formula by Tanh. Both differ by at most 4.8e-4: a hundredth of an 8-bit step over a
    usual range of GELU, and less than the precision of fp16 at 1.
    """
    writer.add("Gelu", [_add_bias(writer)], domain=ORT_DOMAIN)


@node_rewrite("split-gelu", {"Gelu"}, "write {count} of Gelu with Erf", since=9, floats=True)
def split_gelu(writer: Writer) -> None:
    """Rewrites an exact Gelu(x), of ONNX or ONNX Runtime, to x / 2 * (1 + Erf(x / sqrt 2)).

    The last bits may differ (1e-6 relative).
    """
    if _gelu_form(writer.node) == "none":
        _write_gelu(writer, _bend_erf)


@node_rewrite("split-tanh-gelu", {"Gelu", "FastGelu"}, "write {count} of Gelu with Tanh", floats=True)
def split_tanh_gelu(writer: Writer) -> None:
    """Rewrites FastGelu, or a Gelu with `approximate="tanh"`, to the formula with Tanh.

    It is x / 2 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))). The last bits may differ (1e-5 relative).
    """
    if _gelu_form(writer.node) == "tanh":
        _write_gelu(writer, _bend_tanh)


def _gelu_form(node: Node) -> str:
    return "tanh" if node.op_type == "FastGelu" else str(node.attributes.get("approximate", "none"))


def _write_gelu(writer: Writer, bend: Callable[[Writer, str], str]) -> None:
    data = _add_bias(writer)
    one, half = writer.constant("one", 1), writer.constant("half", 0.5)
    gate = writer.add("Add", [bend(writer, data), one], "gate")
    writer.add("Mul", [writer.add("Mul", [data, half], "halved"), gate])


def _bend_erf(writer: Writer, data: str) -> str:
    root = writer.constant("root", math.sqrt(0.5))
    return writer.add("Erf", [writer.add("Mul", [data, root], "narrow")], "bent")


def _bend_tanh(writer: Writer, data: str) -> str:
    cubic, root = writer.constant("cubic", _CUBIC), writer.constant("root", math.sqrt(2 / math.pi))
    # x * (1 + 0.044715 * x * x) avoids a Pow, which some providers lack.
    square = writer.add("Mul", [writer.add("Mul", [data, data], "square"), cubic], "bow")
    moved = writer.add("Add", [data, writer.add("Mul", [data, square], "third")], "moved")
    return writer.add("Tanh", [writer.add("Mul", [moved, root], "narrow")], "bent")


@node_rewrite(
    "split-bias-gelu", {"BiasGelu", "FastGelu"}, "write {count} of Gelu with a bias as Add and Gelu", floats=True
)
def split_bias_gelu(writer: Writer) -> None:
    """Rewrites BiasGelu(x, bias) to Gelu(x + bias), and FastGelu(x, bias) to FastGelu(x + bias).

    The last bits may differ (1e-6 relative).
    """
    if writer.node.has_input(1):
        op = {"BiasGelu": "Gelu"}.get(writer.node.op_type, writer.node.op_type)
        writer.add(op, [_add_bias(writer)], domain=ORT_DOMAIN)


_GELU_SINCE = 20
_CUBIC = 0.044715


@rewrite("join-gelu", "write the parts of GELU as one node, {count}")
def join_gelu(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Fuses x / 2 * (1 + Erf(x / sqrt 2)), and GELU's approximation with Tanh, into one node.

    The last node of the pattern is replaced: by ONNX's Gelu from opset 20 on, before that by ONNX Runtime's Gelu or
    FastGelu. The last bits may differ (1e-6 relative; with Tanh 1e-5).
    """
    # A quick test: every network has Mul and Div nodes, but few have these.
    has_gate = any(node.op_type in {"Erf", "Tanh"} for node in graph.node)
    return replace_nodes(graph, opset, {"Mul", "Div"}, _join_gelu) if has_gate else ()


def _join_gelu(writer: Writer) -> None:
    graph, output = writer.graph, writer.node.output[0]
    for gate in walk_product(graph, output):
        bent = made_by(graph, beside(graph, made_by(graph, gate, "Add"), 1.0) or "", "Erf", "Tanh")
        if bent is None:
            continue
        data = _find_erf(graph, bent) if bent.op_type == "Erf" else _find_tanh(graph, bent)
        if data is None or not _is_half(graph, output, data, gate):
            return
        if writer.opset >= _GELU_SINCE:
            writer.add("Gelu", [data], approximate="none" if bent.op_type == "Erf" else "tanh")
        else:
            writer.add("Gelu" if bent.op_type == "Erf" else "FastGelu", [data], domain=ORT_DOMAIN)
        return


def _is_half(graph: Graph, output: str, data: str, gate: str) -> bool:
    """Returns True if a product is 0.5 * data * gate, and `data` is not float16."""
    number, values = factors(graph, output, data)
    return is_near(number, 0.5) and sorted(values) == sorted((data, gate)) and graph.value(data).dtype != "float16"


def _find_erf(graph: Graph, erf: Node) -> str | None:
    """Returns x if a node is Erf(x / sqrt 2), else None."""
    node = made_by(graph, erf.input[0], "Div", "Mul")
    if node is None:
        return None
    if node.op_type == "Mul":
        return beside(graph, node, math.sqrt(0.5))
    return node.input[0] if is_near(graph.number(node.input[1]), math.sqrt(2)) else None


def _find_tanh(graph: Graph, tanh: Node) -> str | None:
    """Returns x if a node is Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)), in any equivalent form, else None."""
    node = made_by(graph, tanh.input[0], "Mul")
    inside = beside(graph, node, math.sqrt(2 / math.pi))
    added = made_by(graph, inside, "Add") if inside is not None else None
    if added is not None:
        return next((x for x, cubic in (added.input, added.input[::-1]) if _is_power(graph, cubic, x, 3)), None)
    # GPT-J and transformers' FastGELUActivation factor x out: Tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x^2)).
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
    """Returns True if a value is 0.044715 * data^power, written with Pow or with products."""
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


@node_rewrite("join-softmax", {"Div"}, "write the parts of Softmax as one node, {count}")
def join_softmax(writer: Writer) -> None:
    """Fuses exp(x - max(x)) / sum(exp(x - max(x))) along one axis into Softmax, which JAX exports in this form.

    The form without the maximum, exp(x) / sum(exp(x)), is fused too. The last bits may differ (1e-6 relative).
    """
    graph, node = writer.graph, writer.node
    raised = made_by(graph, node.input[0], "Exp")
    axis = None if raised is None else _kept_axis(graph, node.input[1], "ReduceSum", node.input[0])
    if raised is None or axis is None:
        return
    shifted = made_by(graph, raised.input[0], "Sub")
    is_shifted = shifted is not None and _kept_axis(graph, shifted.input[1], "ReduceMax", shifted.input[0]) == axis
    data = shifted.input[0] if shifted is not None and is_shifted else raised.input[0]
    rank = len(graph.value(data).shape or ())
    # Before opset 13 Softmax normalises over all axes from `axis` to the last.
    one_axis = writer.opset >= _ONE_AXIS_SINCE or axis == rank - 1
    if rank and one_axis and graph.value(data).dtype in {None, "float32"}:
        writer.add("Softmax", [data], axis=axis)


_ONE_AXIS_SINCE = 13


def _kept_axis(graph: Graph, name: str, op: str, data: str) -> int | None:
    """Returns the axis along which a value is the reduction `op` of `data`, else None.

    The value must still have this axis, with size 1, as with keepdims=1.
    """
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
