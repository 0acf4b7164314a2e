"""Activation functions: Clip, PRelu, HardSwish, GELU and Softmax, fused into one node or split into simpler ones."""

import math
from collections.abc import Callable
from itertools import permutations

import numpy as np
import onnx

from edgekit.graph import match
from edgekit.graph.constants import ORT_DOMAIN, RESHAPES
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import is_near, known, made_by, need
from edgekit.graph.nhwc import find_orders
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite


@node_rewrite("clip-to-relu", {"Clip"}, since=11)
def clip_to_relu(writer: Writer) -> None:
    """Rewrites Clip(x, 0, no upper bound) to Relu(x), with the same result for any number."""
    dtype = writer.graph.value(writer.node.given(1)).dtype
    high = writer.number(2) if writer.node.has_input(2) else math.inf
    need(dtype in FLOATS and writer.number(1) == 0 and high >= float(np.finfo(dtype).max))
    writer.add("Relu", [writer.x])


@node_rewrite("clip-to-min-max", {"Clip"}, since=13, floats=True)
def clip_to_min_max(writer: Writer) -> None:
    """Rewrites Clip(x, low, high) to Min(Max(x, low), high).

    The result is the same to the bit, because ONNX defines Clip by this formula. Bounds may be computed, such as the
    loudest level minus 80 dB.
    """
    value, *bounds = writer.node.input
    steps = [(op, name) for op, name in zip(("Max", "Min"), bounds, strict=False) if name]
    for op, name in steps:
        value = writer.add(op, [value, name], "" if (op, name) == steps[-1] else op.lower())


# An image model has one slope per channel: shape [C, 1, 1].
_SLOPE_AXES = 3


@node_rewrite("plain-slope", {"PRelu"}, since=7)
def plain_slope(writer: Writer) -> None:
    """Rewrites a PRelu with a constant slope of shape [1, C, 1, 1] to one with a slope of shape [C, 1, 1].

    The result is the same to the bit, because broadcasting adds leading axes of size 1.
    """
    slope = known(writer.graph.constants.get(writer.node.input[1]))
    need(set(slope.dims[:-_SLOPE_AXES]) == {1})
    writer.add("PRelu", [writer.x, writer.reshaped("slope", writer.node.input[1], slope.dims[-_SLOPE_AXES:])])


@node_rewrite("leaky-slope", {"PRelu"}, since=7, floats=True)
def write_slope_as_leaky(writer: Writer) -> None:
    """Rewrites a PRelu whose constant slope is one number to a LeakyRelu, with the same result to the bit."""
    ranks = [len(writer.graph.value(name).shape or ()) for name in writer.node.input]
    need(ranks[1] <= ranks[0])
    writer.add("LeakyRelu", [writer.x], alpha=writer.number(1))


_HARD_SWISH_SINCE = 14


@node_rewrite("split-hard-swish", {"HardSwish"}, since=_HARD_SWISH_SINCE, floats=True)
def split_hard_swish(writer: Writer) -> None:
    """Rewrites HardSwish(x) to x * (Clip(x + 3, 0, 6) * (1 / 6)).

    NNAPI has no HardSwish, but takes a Clip from 0 to 6. The last bits may differ (1e-6 relative).
    """
    writer.add("Mul", [writer.x, _add_gate(writer, writer.x, 3, "scaled")])


@node_rewrite("split-hard-sigmoid", {"HardSigmoid"}, since=13, floats=True)
def split_hard_sigmoid(writer: Writer) -> None:
    """Rewrites HardSigmoid(x), which is Clip(a * x + b, 0, 1), to Clip(6 * a * x + 6 * b, 0, 6) * (1 / 6), as above."""
    x, slope = writer.x, 6 * writer.node.number("alpha", 0.2)
    if not is_near(slope, 1):
        x = writer.add("Mul", [x, *writer.constants({"slope": slope})], "sloped")
    _add_gate(writer, x, 6 * writer.node.number("beta", 0.5))


def _add_gate(writer: Writer, x: str, offset: float, part: str = "") -> str:
    three, low, high, sixth = writer.constants({"three": offset, "low": 0, "six": 6, "sixth": 1 / 6})
    gate = writer.add("Clip", [writer.add("Add", [x, three], "moved"), low, high], "gate")
    return writer.add("Mul", [gate, sixth], part)


@node_rewrite("join-hard-swish", {"Mul", "Div"}, since=_HARD_SWISH_SINCE)
def join_hard_swish(writer: Writer) -> None:
    """Fuses x * Clip(x + 3, 0, 6) / 6, or x * HardSigmoid(x), into HardSwish(x).

    The factors may be in any order. The last node of the pattern is replaced. The last bits may differ (1e-6 relative).
    """
    graph = writer.graph
    whole = match.scaled_by(graph, writer.node, 1 / 6)
    product = known(made_by(graph, writer.node.output[0] if whole is None else whole, "Mul"))
    for data, gate in permutations(product.input, 2):
        # The gate is Clip(x + 3, 0, 6) if the product is divided by 6, else Clip(...) / 6 or a HardSigmoid.
        inner = gate if whole is not None else match.scaled_by(graph, graph.producers.get(gate), 1 / 6)
        clip = made_by(graph, inner or "", "Clip")
        sigmoid = made_by(graph, gate, "HardSigmoid") if whole is None else None
        is_gate = False
        if clip is not None and [graph.number(bound) for bound in clip.input[1:]] == [0, 6]:
            is_gate = match.other_operand(graph, made_by(graph, clip.input[0], "Add"), 3.0) == data
        elif sigmoid is not None and sigmoid.input[0] == data:
            is_gate = is_near(sigmoid.number("alpha", 0.2), 1 / 6) and sigmoid.number("beta", 0.5) == 0.5
        if is_gate and graph.value(data).dtype in FLOATS:
            writer.add("HardSwish", [data])
            return


# The axes [N, C, H, W].
_IMAGE_AXES = 4


@node_rewrite("part-silu", {"Mul"}, since=10)
def part_silu(writer: Writer) -> None:
    """Lets the product in x * Sigmoid(x) of 16 bits read x through a second pair of Q and DQ, for QNN.

    QNN fuses the two nodes only if they read the same tensor. Its fused kernel computes tensors of three axes rightly,
    but for shape [N, C, H, W] it is wrong at some sizes, which depend on the operators around it
    (targets/qnn/NOTES.md); so it is not used for four axes at all. The provider drops a second pair that changes
    nothing, so the scale of the second one is larger by a factor of 1 + 2^-16: a value changes by one step at most.
    """
    graph, node = writer.graph, writer.node
    need(len(graph.value(node.output[0]).shape or range(_IMAGE_AXES)) >= _IMAGE_AXES)
    for name, gate in permutations(node.input):
        read, source = _made_by(graph, name, "DequantizeLinear"), gate
        for op in ("DequantizeLinear", "QuantizeLinear", "Sigmoid", "DequantizeLinear"):
            made = _made_by(graph, source, op)
            source = "" if made is None else made.input[0]
        if read is not None and read.input[0] == source and _is_wide(graph, read):
            wider = writer.constant("scale", known(graph.number(read.input[1])) * (1 + 2**-16), "float32")
            again = writer.requantize(name, [wider, read.input[2]], read.domain, ("quantized", "again"))
            writer.add("Mul", [again, gate])
            return


# A mask of so many times the range that it needs is written with a smaller one. A choice.
_MASK_EXCESS = 4


@node_rewrite("narrow-mask", {"Add"}, since=10)
def narrow_mask(writer: Writer) -> None:
    """Adds a quantized mask through a second pair of Q and DQ, whose range ends where the sum is cut off, for QNN.

    The HTP's Add loses the digits of the scores if the mask's scale is hundreds of times theirs (targets/qnn/NOTES.md).
    """
    graph, node = writer.graph, writer.node
    ends = [_find_span(graph, each) for each in graph.readers(node.output[0])]
    need(ends and None not in ends)
    for mask, scores in permutations(node.input):
        read = known(graph.producers.get(mask))
        own, other = known(_find_span(graph, read)), known(_find_span(graph, graph.producers.get(scores)))
        # Of all that is lower the sum is below the range of its Q, whatever the score is.
        least = min(end[0] for end in filter(None, ends)) - other[1]
        needed = max(own[1], 0) - least
        if least < 0 and own[1] - own[0] > _MASK_EXCESS * needed:
            limits = np.iinfo(own[2])
            scale = needed / (limits.max - limits.min - 1)
            zero = writer.constant("zero", limits.min + math.ceil(-least / scale), own[2])
            names = [writer.constant("scale", scale, "float32"), zero]
            narrow = writer.requantize(mask, names, read.domain, ("mask-values", "mask"))
            writer.add("Add", [narrow, scores])
            return


def _find_span(graph: Graph, node: Node | None) -> tuple[float, float, str] | None:
    """Returns the lowest and the highest value of a Q or DQ node, and its integer type; None of another node."""
    if node is None or node.op_type not in {"QuantizeLinear", "DequantizeLinear"} or not node.has_input(2):
        return None
    scale, zero = graph.number(node.input[1]), graph.array(node.input[2])
    if scale is None or zero is None or zero.dtype.kind not in "iu":
        return None
    limits = np.iinfo(zero.dtype)
    return scale * (limits.min - int(zero)), scale * (limits.max - int(zero)), zero.dtype.name


# A LeakyRelu is fused with a Concat also through an operator that only names other axes.
_JOINING = RESHAPES | {"Concat"}
# The axes [N, C, D, H, W].
_VOLUME_AXES = 5


@node_rewrite("leaky-to-max", {"LeakyRelu"}, since=10)
def write_leaky_as_max(writer: Writer) -> None:
    """Writes a LeakyRelu of uint8 with five axes before a Concat as Max(x, alpha * x), for QNN.

    The HTP fuses both nodes, and then takes the one's integers for those of the other's scale (targets/qnn/NOTES.md).
    The product has the integers of x, with a scale that is smaller by alpha.
    """
    graph, x, alpha = writer.graph, writer.x, writer.node.number("alpha", 0.01)
    read, readers = known(_made_by(graph, x, "DequantizeLinear")), graph.readers(writer.node.output[0])
    # What reads the result behind its QuantizeLinear and DequantizeLinear.
    for _ in range(2):
        readers = tuple(reader for each in readers for reader in graph.readers(each.output[0]))
    low, high, kind = known(_find_span(graph, read))
    need(any(reader.op_type in _JOINING for reader in readers))
    need(kind == "uint8" and 0 < alpha < 1 and len(graph.value(x).shape or ()) == _VOLUME_AXES)
    one = writer.constants({"one": 1, "zero": 0}, "uint8")
    slope = writer.add("DequantizeLinear", [one[0], writer.constant("alpha", alpha, "float32"), one[1]], "slope")
    scale = writer.constant("scale", alpha * (high - low) / np.iinfo(kind).max, "float32")
    scaled = writer.add("Mul", [x, slope], "scaled")
    parts = ("scaled-values", "scaled-again")
    writer.add("Max", [x, writer.requantize(scaled, [scale, read.input[2]], read.domain, parts)])


@node_rewrite("flat-softplus", {"Softplus"}, since=10)
def flatten_softplus(writer: Writer) -> None:
    """Computes a float or 16-bit Softplus of four axes in three axes, between Reshapes, for QNN.

    For shape [N, C, H, W] QNN's kernel is wrong at some sizes (targets/qnn/NOTES.md), also in float after a 16-bit
    input; for three axes it is right. Each Reshape gets pairs of Q and DQ with the existing scales. A Softplus before
    Tanh, as in Mish, is right and stays.
    """
    graph, node = writer.graph, writer.node
    read = _made_by(graph, node.input[0], "DequantizeLinear")
    rounded = None if read is None else _made_by(graph, read.input[0], "QuantizeLinear")
    # Where a model ends with the Softplus, the quantizer writes no shape of what the last Q reads.
    names = (node.output[0], node.input[0], *(() if rounded is None else rounded.input[:1]))
    shape = next((found for found in map(graph.static_shape, names) if found), ())
    written = [reader for reader in graph.readers(node.output[0]) if reader.op_type == "QuantizeLinear"]
    need(len(shape) == _IMAGE_AXES)
    # The first two axes, and the others joined; behind the Softplus the shape itself.
    three, four = [*shape[:2], -1], shape
    if read is None:
        need(not written)
        made = writer.add("Softplus", [writer.reshape(node.input[0], "three", three, "flat")], "made")
        writer.reshape(made, "four", four)
        return
    need(len(written) == 1 and written[0].has_input(2) and _is_wide(graph, read))
    after = written[0]
    again = [reader for each in graph.readers(after.output[0]) for reader in graph.readers(each.output[0])]
    need(all(reader.op_type != "Tanh" for reader in again))
    value = writer.reshape(node.input[0], "three", three, "flat")
    value = writer.requantize(value, read.input[1:3], read.domain, ("flat-values", "flat-again"))
    value = writer.add("Softplus", [value], "made")
    value = writer.requantize(value, after.input[1:3], after.domain, ("made-values", "made-again"))
    writer.reshape(value, "four", four)


def _is_wide(graph: Graph, read: Node) -> bool:
    """Returns True for a DequantizeLinear of uint16."""
    zero = graph.constants.get(read.given(2))
    return zero is not None and zero.data_type == onnx.TensorProto.UINT16


@node_rewrite("gate-first", {"Mul"}, since=6, floats=True)
def put_gate_first(writer: Writer) -> None:
    """Writes x * HardSigmoid(x) as HardSigmoid(x) * x, for QNN.

    In the first form, with the slope of HardSwish, the provider fuses both in float, and what comes out is
    x * HardSwish(x); in the second it does not (targets/qnn/NOTES.md).
    """
    x, gate = writer.node.input
    made = known(made_by(writer.graph, gate, "HardSigmoid"))
    need(made.input[0] == x and is_near(made.number("alpha", 0.2), 1 / 6))
    writer.add("Mul", [gate, x])


@node_rewrite("split-mish", {"Mish"}, since=18)
def split_mish(writer: Writer) -> None:
    """Rewrites Mish(x) to x * Tanh(Softplus(x)), as ONNX Runtime does for a provider without it. 1e-6 relative."""
    gate = writer.add("Tanh", [writer.add("Softplus", [writer.x], "softplus")], "gate")
    writer.add("Mul", [writer.x, gate])


_SELU_ALPHA, _SELU_GAMMA = 1.6732632423543772, 1.0507009873554805


def _write_elu(writer: Writer, curve: Callable[[str, float, str], str]) -> None:
    """Writes Celu(x) as alpha * curve(x / alpha, 1), and Selu(x) as gamma * curve(x, alpha)."""
    node, x = writer.node, writer.x
    alpha = node.number("alpha", _SELU_ALPHA if node.op_type == "Selu" else 1.0)
    scale = {"Celu": alpha, "Selu": node.number("gamma", _SELU_GAMMA)}.get(node.op_type, 1.0)
    need(alpha > 0)
    if node.op_type == "Celu":
        x = x if alpha == 1 else writer.add("Mul", [x, writer.constant("inverse", 1 / alpha)], "narrow")
        alpha = 1.0
    made = curve(x, alpha, "" if scale == 1 else "bent")
    if scale != 1:
        writer.add("Mul", [made, writer.constant("scale", scale)])


@node_rewrite("scaled-elu", {"Celu", "Selu"}, since=6, floats=True)
def write_as_scaled_elu(writer: Writer) -> None:
    """Rewrites Celu(x) to alpha * Elu(x / alpha), and Selu(x) to gamma * Elu(x). 1e-6 relative."""
    _write_elu(writer, lambda x, alpha, part: writer.add("Elu", [x], part, alpha=alpha))


@node_rewrite("split-elu", {"Celu", "Elu", "Selu"}, since=13, floats=True)
def split_elu(writer: Writer) -> None:
    """Rewrites Elu(x) to Max(x, 0) + alpha * Exp(Min(x, 0)) - alpha, and as above Celu and Selu. 1e-6 relative.

    Exp gets no positive number, so that it is never infinite and its range is 0 to 1.
    """

    def curve(x: str, alpha: float, part: str) -> str:
        zero, factor = writer.constants({"zero": 0, "alpha": alpha})
        raised = writer.add("Exp", [writer.add("Min", [x, zero], "negative")], "raised")
        low = writer.add("Sub", [writer.add("Mul", [raised, factor], "lowered"), factor], "low")
        return writer.add("Add", [writer.add("Max", [x, zero], "high"), low], part)

    _write_elu(writer, curve)


@node_rewrite("log-sigmoid-to-softplus", {"Log"}, floats=True)
def write_log_sigmoid_as_softplus(writer: Writer) -> None:
    """Rewrites Log(Sigmoid(x)), PyTorch's LogSigmoid, to -Softplus(-x). The last bits may differ (1e-6 relative).

    Core ML has no Log, and in half precision a sigmoid of less than -17 is 0.
    """
    sigmoid, minus = known(made_by(writer.graph, writer.x, "Sigmoid")), writer.constant("minus", -1)
    turned = writer.add("Mul", [sigmoid.input[0], minus], "turned")
    writer.add("Mul", [writer.add("Softplus", [turned], "softplus"), minus])


@node_rewrite("split-swish", {"Swish", "QuickGelu"}, floats=True)
def split_swish(writer: Writer) -> None:
    """Rewrites ONNX's Swish, or ONNX Runtime's QuickGelu, to x * Sigmoid(alpha * x). 1e-6 relative."""
    alpha = writer.node.number("alpha", 1.0 if writer.node.op_type == "Swish" else 1.702)
    scaled = writer.x if alpha == 1 else writer.add("Mul", [writer.x, writer.constant("alpha", alpha)], "scaled")
    writer.add("Mul", [writer.x, writer.add("Sigmoid", [scaled], "gate")])


# The kernels are right up to 88.4, and e to this power is far beyond what half precision holds.
_MOST_EXPONENT = 80.0


@node_rewrite("bounded-exp", {"Exp", "Softplus"}, since=12, floats=True)
def bound_exponent(writer: Writer) -> None:
    """Limits the input of a float Exp to -80 and 80, and that of a Softplus to -80, for QNN.

    Beyond 127.5 * ln 2 the HTP's kernels wrap around: Exp(-100) is -131,008 and Exp(90) is 0 (targets/qnn/NOTES.md). So
    a mask of -10,000 before an Exp would not make its places 0.
    """
    node, graph = writer.node, writer.graph
    bounds = [-_MOST_EXPONENT, _MOST_EXPONENT] if node.op_type == "Exp" else [-_MOST_EXPONENT]
    made = made_by(graph, node.input[0], "Clip")
    need(made is None or [graph.number(name) for name in made.input[1:]] != bounds)
    limits = [writer.constant(name, bound) for name, bound in zip(("low", "high"), bounds, strict=False)]
    writer.add(node.op_type, [writer.add("Clip", [node.input[0], *limits], "bounded")])


def _made_by(graph: Graph, name: str, op: str) -> Node | None:
    """Returns the node that computes a value if it is this operator, in any domain: contrib Q and DQ have 16 bits."""
    node = graph.producers.get(name)
    return node if node is not None and node.op_type == op else None


def _add_bias(writer: Writer) -> str:
    """Returns the first input, plus the second if there is one: the bias of ONNX Runtime's BiasGelu and FastGelu."""
    node = writer.node
    return writer.add("Add", node.input[:2], "sum") if node.has_input(1) else node.input[0]


@node_rewrite("exact-gelu", {"FastGelu"}, floats=True)
def write_exact_gelu(writer: Writer) -> None:
    """Rewrites ONNX Runtime's FastGelu(x, bias) to its exact Gelu(x + bias); the bias is optional.

    FastGelu approximates the exact formula by Tanh; they differ by at most 4.8e-4: a hundredth of an 8-bit step in a
    usual range of GELU, and less than the precision of fp16 at 1.
    """
    writer.add("Gelu", [_add_bias(writer)], domain=ORT_DOMAIN)


@node_rewrite("split-gelu", {"Gelu"}, since=9, floats=True)
def split_gelu(writer: Writer) -> None:
    """Rewrites an exact Gelu(x), of ONNX or ONNX Runtime, to x / 2 * (1 + Erf(x / sqrt 2)).

    The last bits may differ (1e-6 relative).
    """
    _write_gelu(writer, "none", "none")


@node_rewrite("tanh-for-erf", {"Gelu"}, since=9, floats=True)
def write_tanh_for_erf(writer: Writer) -> None:
    """Rewrites an exact Gelu(x) to the approximation with Tanh, for NNAPI, which has no Erf. 4.8e-4 apart, as above."""
    _write_gelu(writer, "none", "tanh")


@node_rewrite("split-tanh-gelu", {"Gelu", "FastGelu"}, floats=True)
def split_tanh_gelu(writer: Writer) -> None:
    """Rewrites FastGelu, or a Gelu with `approximate="tanh"`, to the formula with Tanh.

    It is x / 2 * (1 + Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))). The last bits may differ (1e-5 relative).
    """
    _write_gelu(writer, "tanh", "tanh")


def _write_gelu(writer: Writer, given: str, form: str) -> None:
    """Writes a GELU of one form as x / 2 * (1 + Erf(x / sqrt 2)) ("none"), or as the approximation with Tanh."""
    node = writer.node
    need(given == ("tanh" if node.op_type == "FastGelu" else str(node.attributes.get("approximate", "none"))))
    add, data, moved = writer.add, _add_bias(writer), ""
    one, half = writer.constants({"one": 1, "half": 0.5})
    bend, factor = "Erf", math.sqrt(0.5)
    if form == "tanh":
        bend, factor, cubic = "Tanh", math.sqrt(2 / math.pi), writer.constant("cubic", _CUBIC)
        # x * (1 + 0.044715 * x * x) avoids a Pow, which some providers lack.
        square = add("Mul", [add("Mul", [data, data], "square"), cubic], "bow")
        moved = add("Add", [data, add("Mul", [data, square], "third")], "moved")
    narrow = add("Mul", [moved or data, writer.constant("root", factor)], "narrow")
    gate = add("Add", [add(bend, [narrow], "bent"), one], "gate")
    add("Mul", [add("Mul", [data, half], "halved"), gate])


@node_rewrite("split-bias-gelu", {"BiasGelu", "FastGelu"}, floats=True)
def split_bias_gelu(writer: Writer) -> None:
    """Rewrites BiasGelu(x, bias) to Gelu(x + bias), and FastGelu(x, bias) to FastGelu(x + bias).

    The last bits may differ (1e-6 relative).
    """
    need(writer.node.has_input(1))
    op = {"BiasGelu": "Gelu"}.get(writer.node.op_type, writer.node.op_type)
    writer.add(op, [_add_bias(writer)], domain=ORT_DOMAIN)


_GELU_SINCE = 20
_CUBIC = 0.044715


@node_rewrite("join-gelu", {"Mul", "Div"})
def join_gelu(writer: Writer) -> None:
    """Fuses x / 2 * (1 + Erf(x / sqrt 2)), and GELU's approximation with Tanh, into one node.

    The last node of the pattern is replaced: by ONNX's Gelu from opset 20 on, before that by ONNX Runtime's Gelu or
    FastGelu. The last bits may differ (1e-6 relative; with Tanh 1e-5).
    """
    graph, output = writer.graph, writer.node.output[0]
    for gate in match.walk_product(graph, output):
        bent = made_by(graph, match.other_operand(graph, made_by(graph, gate, "Add"), 1.0) or "", "Erf", "Tanh")
        if bent is None:
            continue
        is_exact, narrow = bent.op_type == "Erf", graph.producers.get(bent.input[0])
        data = known(match.scaled_by(graph, narrow, math.sqrt(0.5))) if is_exact else _find_tanh(graph, bent)
        number, values = match.factors(graph, output, data)
        need(is_near(number, 0.5) and sorted(values) == sorted((data, gate)) and graph.value(data).dtype != "float16")
        if writer.opset >= _GELU_SINCE:
            writer.add("Gelu", [data], approximate="none" if is_exact else "tanh")
        else:
            writer.add("Gelu" if is_exact else "FastGelu", [data], domain=ORT_DOMAIN)
        return


def _find_tanh(graph: Graph, tanh: Node) -> str:
    """Returns x where a node is Tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)), in any equivalent form."""
    factor = math.sqrt(2 / math.pi)
    inside = match.other_operand(graph, made_by(graph, tanh.input[0], "Mul"), factor)
    if (added := made_by(graph, inside or "", "Add")) is not None:
        return known(next((x for x, cubic in permutations(added.input) if _is_power(graph, cubic, x, 3)), None))
    # GPT-J and transformers' FastGELUActivation factor x out: Tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x^2)).
    number, values = match.factors(graph, tanh.input[0])
    need(is_near(number, factor) and len(values) == 2)
    sums = ((x, match.other_operand(graph, made_by(graph, total, "Add"), 1.0)) for x, total in permutations(values))
    return known(next((x for x, square in sums if square is not None and _is_power(graph, square, x, 2)), None))


def _is_power(graph: Graph, name: str, data: str, power: int) -> bool:
    """Returns True if a value is 0.044715 * data^power, written with Pow or with products."""
    number, values = match.factors(graph, name, data)
    exponents: list[float] = []
    for value in values:
        raised = made_by(graph, value, "Pow")
        if raised is not None and raised.input[0] == data:
            exponents.append(graph.number(raised.input[1]) or math.nan)
        else:
            exponents.append(1 if value == data else 2 if match.square_of(graph, value) == data else math.nan)
    return is_near(number, _CUBIC) and sum(exponents) == power


@node_rewrite("join-softmax", {"Div"})
def join_softmax(writer: Writer) -> None:
    """Fuses exp(x - max(x)) / sum(exp(x - max(x))) along one axis into Softmax, which JAX exports in this form.

    The form without the maximum, exp(x) / sum(exp(x)), is fused too. JAX writes max(max(x), -inf). The last bits may
    differ (1e-6 relative).
    """
    graph, node = writer.graph, writer.node
    raised = known(made_by(graph, node.input[0], "Exp"))
    axis = known(_kept_axis(graph, node.input[1], "ReduceSum", node.input[0]))
    shifted, data = made_by(graph, raised.input[0], "Sub"), raised.input[0]
    if shifted is not None and _kept_axis(graph, shifted.input[1], "ReduceMax", shifted.input[0]) == axis:
        data = shifted.input[0]
    rank = len(graph.value(data).shape or ())
    # Before opset 13 Softmax normalises over all axes from `axis` to the last.
    need(rank and (writer.opset >= _ONE_AXIS_SINCE or axis == rank - 1))
    need(graph.value(data).dtype in {None, "float32"})
    writer.add("Softmax", [data], axis=axis)


@node_rewrite("plain-softmax", {"Reshape"}, since=13)
def plain_softmax(writer: Writer) -> None:
    """Removes the Flatten and the Reshape around a Softmax over the last axis.

    Up to opset 12 Softmax normalised over all axes from `axis` on. onnx's converter writes it with these nodes, even if
    `axis` is the last one, and providers and the quantizer then do not find attention and its masks.
    """
    graph, node = writer.graph, writer.node
    softmax = known(made_by(graph, node.input[0], "Hardmax", "LogSoftmax", "Softmax"))
    flat = known(made_by(graph, softmax.input[0], "Flatten", "Reshape"))
    before, rows, after = (graph.value(name).static_shape for name in (*flat.input[:1], *flat.output, *node.output))
    need(before and rows and before == after and before[-1] == rows[-1])
    need(softmax.output[0] not in graph.outputs | graph.captured and len(graph.readers(softmax.output[0])) == 1)
    need(softmax.integer("axis", -1) in {-1, len(rows or ()) - 1})
    writer.add(softmax.op_type, [flat.input[0]], axis=-1)


@node_rewrite("flat-softmax", {"Softmax"}, since=13)
def flatten_softmax(writer: Writer) -> None:
    """Computes a Softmax over the last axis between Reshapes, where a change to NHWC would make that axis another one.

    No Transpose goes through a Reshape, so the axis stays the last one. XNNPACK takes the node before the change, and
    would compute over all axes from the moved one on (targets/xnnpack/NOTES.md).
    """
    shape = known(writer.graph.value(writer.x).shape)
    order = known(find_orders(writer.graph).get(writer.x))
    need(shape and writer.node.integer("axis", -1) % len(shape) == len(shape) - 1 != order[-1])
    sizes = [-1 if size is None else size for size in shape]
    need(sizes[-1] > 0 and sizes.count(-1) <= 1)
    flat = writer.reshape(writer.x, "rows", [-1, sizes[-1]], "flat")
    made = writer.add("Softmax", [flat], "made", axis=-1)
    writer.reshape(made, "shape", sizes)


_ONE_AXIS_SINCE = 13


def _kept_axis(graph: Graph, name: str, op: str, data: str) -> int | None:
    """Returns the axis along which a value is the reduction `op` of `data`, else None.

    The value must still have this axis, with size 1, as with keepdims=1.
    """
    reduced = match.unshape(graph, name)
    reduced = match.unshape(graph, match.other_operand(graph, made_by(graph, reduced, "Max"), -math.inf) or reduced)
    node = made_by(graph, reduced, op)
    axis = None if node is None or node.input[0] != data else match.reduced_axis(graph, node)
    axis = None if axis is None else axis % max(len(graph.value(data).shape or ()), 1)
    return axis if axis is not None and match.keeps_axis(graph, name, data, axis) else None
