"""Products, powers, sums and Fourier transforms in the form that most providers take."""

import math
import string
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import known, made_by, need, reduced_axes, split_number
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite
from edgekit.model.tensors import MAX_HALF, Array
from edgekit.prepare.rewrites.norms import reduce_axes

_PLAIN = {"transA": 0, "transB": 0, "alpha": 1.0, "beta": 1.0}


@node_rewrite("gemm-to-matmul", {"Gemm"}, since=7)
def gemm_to_matmul(writer: Writer) -> None:
    """Rewrites Reshape from [1, M, K] to [M, K] and Gemm with a constant [K, N] to MatMul, Add, Reshape to [M, N].

    The MatMul has an input of three dimensions. This undoes ONNX Runtime's MatMulAddFusion.
    """
    graph, node = writer.graph, writer.node
    source, rows = known(made_by(graph, node.input[0], "Reshape")), writer.shape()
    weight = known(graph.constants.get(node.input[1]))
    given = {name: node.attributes.get(name, default) for name, default in _PLAIN.items()}
    need(graph.value(source.input[0]).static_shape == (1, *rows) and given == _PLAIN)
    columns = weight.dims[1]
    if node.has_input(2):
        need(list(known(graph.constants.get(node.input[2])).dims) == [columns])
    shape = writer.ints("shape", [rows[0], columns])
    made = writer.add("MatMul", [source.input[0], node.input[1]], "product")
    if node.has_input(2):
        made = writer.add("Add", [made, node.input[2]], "sum")
    writer.add("Reshape", [made, shape])


@node_rewrite("plain-gemm", {"Gemm"}, since=7, floats=True)
def plain_gemm(writer: Writer) -> None:
    """Rewrites Gemm(A, B, C) with alpha, beta or transA to Gemm(alpha * Transpose(A), B, beta * C).

    A bias with a row for each row of A is added behind it. The factor alpha moves from the product to A, so the last
    bits may differ (1e-6 relative). transB stays.
    """
    node, biased = writer.node, writer.node.has_input(2)
    rows = (writer.graph.value(node.given(2)).shape or ()) if biased else ()
    is_matrix = len(rows) == 2 and rows[0] != 1
    has_factor = node.number("alpha", 1) != 1 or (biased and node.number("beta", 1) != 1)
    need(node.integer("transA", 0) or has_factor or is_matrix)
    kept, (left, *bias) = _keep_turn(node), _carry_out(writer)
    if is_matrix:
        writer.add("Add", [writer.add("Gemm", [left, node.input[1]], "product", **kept), *bias])
    else:
        writer.add("Gemm", [left, node.input[1], *bias], **kept)


def _keep_turn(node: Node) -> dict[str, Any]:
    """Returns the one attribute of a Gemm that a plain one has too, where it has it."""
    return {"transB": 1} if node.integer("transB", 0) else {}


def _carry_out(writer: Writer) -> list[str]:
    """Returns A and, if there is one, C of a Gemm with its transA, alpha and beta carried out."""
    node, graph = writer.node, writer.graph
    alpha, beta = node.number("alpha", 1), node.number("beta", 1)
    # Only factors need the type, which may be unknown for an inner tensor.
    dtype = next((kind for name in node.input if (kind := graph.value(name).dtype)), "")
    need(dtype in FLOATS or alpha == beta == 1)
    left, bias = node.input[0], list(node.input[2:3])
    if node.integer("transA", 0):
        left = writer.add("Transpose", [left], "transposed", perm=[1, 0])
    if alpha != 1:
        left = writer.add("Mul", [left, writer.constant("alpha", alpha, dtype)], "scaled")
    if node.has_input(2) and beta != 1:
        if (value := graph.inline(bias[0])) is not None:
            bias = [writer.constant("bias", value * value.dtype.type(beta), dtype)]
        else:
            bias = [writer.add("Mul", [bias[0], writer.constant("beta", beta, dtype)], "bias")]
    return [left, *bias]


def split_gemm(writer: Writer) -> None:
    """Splits a Gemm whose bias is computed, or has not one number for each column, into MatMul and Add.

    ONNX Runtime itself fuses the sum of two products in a recurrent cell, or a product and a residual, into such a Gemm
    (MatMulAddFusion). Its integer Gemm takes only a constant int32 bias, so such a Gemm would stay float between Q and
    DQ nodes (`qdq_transformer/selectors_actions/qdq_selectors.cc`, GemmNodeGroupSelector), and the only bias of
    MatMulNBits is a constant vector. The factor of such a bias goes into its values: ONNX Runtime's quantizer drops the
    attribute (`set_default_beta` in quantization/operators/gemm.py) and leaves the values as they are.
    """
    graph, node = writer.graph, writer.node
    bias, weight = graph.constants.get(node.given(2)), graph.constants.get(node.input[1])
    columns = None if weight is None else weight.dims[1 - node.integer("transB", 0)]
    is_vector = bias is not None and (columns is None or list(bias.dims) == [columns])
    need(node.has_input(2) and not (is_vector and node.number("beta", 1) == 1))
    (left, added), right = _carry_out(writer), node.input[1]
    if is_vector:
        writer.add("Gemm", [left, right, added], **_keep_turn(node))
        return
    if node.integer("transB", 0):
        if (values := graph.constant(right)) is None:
            right = writer.add("Transpose", [right], "right", perm=[1, 0])
        else:
            right = writer.constant("weight", np.ascontiguousarray(values.T), values.dtype.name)
    writer.add("Add", [writer.add("MatMul", [left, right], "product"), added])
    product, total = writer.nodes[-2:]
    # The node with the weight keeps the name of the Gemm.
    product.name, total.name = total.name, f"{total.name}/sum"


@node_rewrite("flat-bias", {"Gemm"}, since=7)
def flat_bias(writer: Writer) -> None:
    """Rewrites Gemm with a constant bias of one number, or [1, N], as scikit-learn's layers have, to a bias [N].

    Only with this does XNNPACK take a Gemm, and ONNX Runtime's quantizer give its weight a scale per column.
    """
    graph, node = writer.graph, writer.node
    bias, weight = known(graph.constants.get(node.given(2))), graph.constants.get(node.input[1])
    dims = () if weight is None or len(weight.dims) != 2 else weight.dims
    count = dims[0 if node.integer("transB", 0) else 1] if dims else 0
    number = graph.number(node.input[2])
    if number is not None and count > 1 and writer.dtype:
        writer.copy(node).input[2] = writer.constant("bias", [number] * count)
    elif len(bias.dims) == 2 and bias.dims[0] == 1:
        writer.copy(node).input[2] = writer.reshaped("bias", node.input[2], [bias.dims[1]])


@node_rewrite("matmul-to-2d", {"MatMul"}, since=5, floats=True)
def matmul_to_2d(writer: Writer) -> None:
    """Rewrites [..., M, K] @ constant [K, N] to Reshape to [-1, K], MatMul, and Reshape to [..., M, N].

    A constant [M, K] on the left, such as the matrix of a Fourier transform, moves to the right, since NNAPI and
    XNNPACK take constants only there: constant @ x = (x^T @ constant^T)^T. The order of summation may differ (1e-6
    relative).
    """
    constants, add, (left, right) = writer.graph.constants, writer.add, writer.node.input
    data, matrix = (writer.shape(at) for at in ((0, 1) if right in constants else (1, 0)))
    need(len(matrix) == 2 and (left in constants) != (right in constants))
    if right in constants and len(data) >= 3:
        rows = writer.reshape(left, "flat", [-1, data[-1]], "rows")
        writer.reshape(add("MatMul", [rows, right], "product"), "whole", [*data[:-1], matrix[1]])
    elif left in constants and len(data) >= 2 and writer.opset >= _NO_BIAS_SINCE:
        turn = [*range(len(data) - 2), len(data) - 1, len(data) - 2]
        rows = writer.reshape(add("Transpose", [right], "turned", perm=turn), "flat", [-1, data[-2]], "rows")
        product = add("Gemm", [rows, left], "product", transB=1)
        whole = writer.reshape(product, "whole", [*data[:-2], data[-1], matrix[0]], "whole")
        add("Transpose", [whole], perm=turn)


# The first opset in which a Gemm needs no bias.
_NO_BIAS_SINCE = 11


@node_rewrite("join-rows", {"MatMul"}, floats=True)
def join_rows(writer: Writer) -> None:
    """Rewrites a MatMul of several matrices with one, as of heads that share keys, to one MatMul of all their rows.

    NNAPI repeats no matrix. The matrices must lie side by side: a batch of [heads, rows, size] with [1, size, columns].
    """
    many, one, made = list(writer.shape()), list(writer.shape(1)), writer.made
    need(min(len(many), len(one)) > 2 and 0 not in (*many, *one))
    one = [1] * (len(many) - len(one)) + one
    need(len(one) == len(many))
    # The axes before the rows along which the second operand has one matrix.
    start = len(many) - 2
    while start > 0 and one[start - 1] == 1:
        start -= 1
    need(math.prod(many[start:-2]) > 1 and many[:start] == one[:start])
    # Of two axes alone the second operand would have to be constant.
    batch, rows = many[:start] or [1], math.prod(many[start:-1])
    joined = writer.reshape(writer.x, "rows_shape", [*batch, rows, many[-1]], "rows")
    single = writer.reshape(writer.node.input[1], "single_shape", [*batch, *one[-2:]], "single")
    writer.reshape(writer.add("MatMul", [joined, single], "product"), "shape", made)


@node_rewrite("einsum-to-matmul", {"Einsum"}, floats=True)
def einsum_to_matmul(writer: Writer) -> None:
    """Rewrites an Einsum of two tensors, such as a layer in groups, to a MatMul between Transposes and Reshapes.

    Letters of both inputs and the output number matrices; those of both inputs alone are summed. An Einsum with a
    letter twice in a term, or one summed in a single input, stays.
    """
    equation = str(writer.node.attributes.get("equation", "")).replace(" ", "")
    shapes = [writer.graph.value(name).static_shape or () for name in writer.node.input]
    terms = equation.replace("->", ",").split(",")
    # Letters for the axes of an ellipsis, which are aligned at the last one.
    free = [letter for letter in string.ascii_letters if letter not in equation]
    pairs = zip(terms, map(len, shapes), strict=False)
    counts = [rank - len(term.replace("...", "")) if "..." in term else 0 for term, rank in pairs]
    most = max(counts)
    pairs = zip(terms, [*counts, most], strict=False)
    terms = [term.replace("...", "".join(free[most - count : most])) for term, count in pairs]
    need("->" in equation and len(terms) == 3 and "".join(terms).isalpha())
    sizes = dict(chain.from_iterable(map(zip, terms, shapes)))
    one, two, out = terms
    stack = "".join(letter for letter in out if letter in one and letter in two)
    rows, columns = ("".join(each for each in out if each in term and each not in stack) for term in (one, two))
    summed = "".join(each for each in one if each in two and each not in out)
    parts = [[*([stack] if stack else []), *each] for each in ([rows, summed], [summed, columns], [rows, columns])]
    need(all(sorted("".join(groups)) == sorted(term) for groups, term in zip(parts, terms, strict=True)))
    # Sizes of 1 may stand for others, and a Reshape to 0 would copy a size.
    need([tuple(sizes.get(each) for each in term) for term in (one, two)] == shapes and 0 not in sizes.values())
    operands = zip(writer.node.input, terms, parts, ("left", "right"), strict=False)
    given = [_arrange(writer, name, term, groups, sizes, part) for name, term, groups, part in operands]
    made, order = parts[2], "".join(parts[2])
    is_split, is_turned = any(len(group) != 1 for group in made), order != out
    product = writer.add("MatMul", given, "product" if is_split or is_turned else "")
    if is_split:
        product = writer.reshape(product, "whole", [sizes[each] for each in order], "split" if is_turned else "")
    if is_turned:
        writer.add("Transpose", [product], perm=[order.index(letter) for letter in out])


def _arrange(writer: Writer, name: str, term: str, groups: Sequence[str], sizes: Mapping[str, int], part: str) -> str:
    """Adds a Transpose and a Reshape, where needed, after which a tensor has one axis for each group of letters.

    The letters of `term` name the axes of the tensor: for "abc" and the groups "b", "ac", [2, 3, 4] becomes [3, 8].
    """
    shape, perm = [math.prod(sizes[each] for each in group) for group in groups], list(map(term.index, "".join(groups)))
    is_turned, is_joined = perm != sorted(perm), any(len(group) != 1 for group in groups)
    value = writer.graph.inline(name) if is_turned or is_joined else None
    if value is not None:
        return writer.constant(part, value.transpose(perm).reshape(shape))
    name = writer.add("Transpose", [name], f"{part}_turned", perm=perm) if is_turned else name
    return writer.reshape(name, f"{part}_shape", shape, part) if is_joined else name


@node_rewrite("neg-to-mul", {"Neg"}, floats=True)
def neg_to_mul(writer: Writer) -> None:
    """Rewrites Neg(x) of floats to x * -1."""
    writer.add("Mul", [writer.x, writer.constant("minus_one", -1)])


@node_rewrite("plain-power", {"Pow"}, since=7, floats=True)
def plain_power(writer: Writer) -> None:
    """Rewrites Pow(x, 2) to x * x, Pow(x, 4) to the square of that, and Pow(x, 0.5) to Sqrt(x), for QNN.

    In float the HTP's powers of -0 with these exponents are -4, 16 and 131,008 (targets/qnn/NOTES.md). A convolution or
    a difference may give -0, and so does half precision for a small negative number.
    """
    exponent, shape = writer.number(1), known(writer.graph.value(writer.x).shape)
    # An exponent of more axes would add these to the result.
    need(len(writer.graph.value(writer.node.input[1]).shape or ()) <= len(shape))
    squared = [writer.x] * 2
    if exponent == 2:
        writer.add("Mul", squared)
    elif exponent == 4:
        writer.add("Mul", [writer.add("Mul", squared, "square")] * 2)
    elif exponent == 0.5:
        writer.add("Sqrt", [writer.x])


@node_rewrite("divide-one", {"Reciprocal"}, since=10)
def divide_one(writer: Writer) -> None:
    """Writes a quantized Reciprocal(x) as Div(1, x), for QNN.

    The HTP's Reciprocal is off by up to the whole range if x is negative or beyond 1, its Div is right
    (targets/qnn/NOTES.md).
    """
    read = known(writer.graph.producers.get(writer.x))
    need(read.op_type == "DequantizeLinear" and read.has_input(2))
    kind, scale = writer.graph.value(read.input[2]).dtype or "", writer.constant("scale", 1, "float32")
    number, zero = writer.constants({"number": 1, "zero": 0}, kind)
    one = writer.add("DequantizeLinear", [number, scale, zero], "one", domain=read.domain)
    writer.add("Div", [one, writer.x])


@node_rewrite("reciprocal-to-div", {"Reciprocal"}, since=7, floats=True)
def reciprocal_to_div(writer: Writer) -> None:
    """Writes a Reciprocal(x) that computes in float as Div(1, x), with the same result to the bit."""
    writer.add("Div", [writer.constant("one", 1), writer.x])


@node_rewrite("widen-kernel", {"Conv"}, since=10)
def widen_kernel(writer: Writer) -> None:
    """Gives a depthwise convolution of 16 bits with a kernel of one element two more, zeros, for QNN.

    The HTP's kernel for one element is wrong in channels whose weight is small (targets/qnn/NOTES.md).
    """
    graph, node = writer.graph, writer.node
    read, weight = (known(graph.producers.get(name)) for name in node.input[:2])
    need({read.op_type, weight.op_type} == {"DequantizeLinear"} and graph.value(read.given(2)).dtype == "uint16")
    values = known(graph.inline(weight.input[0]))
    need(node.integer("group", 1) != 1 and math.prod(values.shape[1:]) == 1)
    padding = [0] * (values.ndim - 3) + [1]
    constant = writer.constant("values", np.pad(values, [(0, 0)] * (values.ndim - 1) + [(1, 1)]), values.dtype.name)
    given = [constant, *weight.input[1:]]
    wide = writer.add("DequantizeLinear", given, "wide", domain=weight.domain, **weight.attributes)
    kept: dict[str, Any] = {name: node.attributes[name] for name in ("group", "strides") if name in node.attributes}
    kept |= {"kernel_shape": [1 + 2 * each for each in padding]}
    kept |= {"pads": np.add(node.entries("pads") or 0, padding * 2).tolist()}
    writer.add("Conv", [node.input[0], wide, *node.input[2:]], **kept)


@node_rewrite("sum-to-mean", {"ReduceSum"}, floats=True)
def sum_to_mean(writer: Writer) -> None:
    """Rewrites a ReduceSum to the mean, times the number of elements that each result sums up."""
    node, before, after = writer.node, writer.shape(), writer.made
    axes = reduced_axes(writer.graph, node)
    need(0 not in (*before, *after) and (axes is not None or not node.has_input(1)))
    count = math.prod(before) // math.prod(after)
    # A factor that is no finite float16, or a node that sums nothing up.
    need(1 != count <= MAX_HALF)
    listed, keepdims = axes or range(len(before)), node.integer("keepdims", 1)
    mean = reduce_axes(writer, "ReduceMean", node.input[0], "mean", listed, keepdims=keepdims)
    writer.add("Mul", [mean, writer.constant("count", count)])


@node_rewrite("sum-to-add", {"Sum"}, since=7)
def sum_to_add(writer: Writer) -> None:
    """Rewrites Sum(a, b, c) to Add(Add(a, b), c)."""
    total, *rest = writer.node.input
    for index, name in enumerate(rest, start=1):
        total = writer.add("Add", [total, name], f"add_{index}" if index < len(rest) else "")


_GRID_SINCE = 20
# The grid is a constant.
_MOST_PLACES = 1 << 22


@node_rewrite("affine-grid-to-matmul", {"AffineGrid"}, since=_GRID_SINCE, floats=True)
def affine_grid_to_matmul(writer: Writer) -> None:
    """Rewrites AffineGrid(theta, size) with a constant size to theta @ [x, y, 1], a Transpose and a Reshape.

    With a third axis it is theta @ [x, y, z, 1]. The last bits may differ (1e-6 relative).
    """
    size, theta = writer.array(1), writer.shape()
    need(size.shape in {(4,), (5,)})
    batch, _, *sizes = size.tolist()
    corners = bool(writer.node.integer("align_corners", 0))
    # One place between two corners is not defined.
    need(min(sizes) >= 1 + corners and math.prod(sizes) <= _MOST_PLACES)
    need(theta == (batch, len(sizes), len(sizes) + 1))
    places = [np.linspace(-1, 1, count) if corners else (2 * np.arange(count) + 1) / count - 1 for count in sizes]
    # The first number is that of the last axis.
    axes = [*np.meshgrid(*places, indexing="ij")[::-1], np.ones(sizes)]
    product = writer.add("MatMul", [writer.x, writer.constant("grid", [axis.ravel() for axis in axes])], "product")
    turned = writer.add("Transpose", [product], "turned", perm=[0, 2, 1])
    writer.reshape(turned, "shape", [batch, *sizes, len(sizes)])


_DFT_AXIS_SINCE = 20
# A matrix of so many numbers is a constant of 8 MB.
_MOST_TURNS = 1 << 21


@node_rewrite("dft-to-matmul", {"DFT"}, since=17, floats=True)
def dft_to_matmul(writer: Writer) -> None:
    """Rewrites a DFT of the last axis but that of real and imaginary part to a product with a constant matrix.

    The last bits may differ (1e-6 relative).
    """
    node, shape, made = writer.node, writer.shape(), writer.made
    axis = writer.number(2) if node.has_input(2) else node.integer("axis", -2 if writer.opset >= _DFT_AXIS_SINCE else 1)
    halves, inverse = node.integer("onesided", 0), node.integer("inverse", 0)
    length = int(writer.number(1)) if node.has_input(1) else shape[-2]
    need(len(shape) == len(made) > 2 and axis % len(shape) == len(shape) - 2)
    need(0 not in shape and shape[-2] <= length)
    # Of half a spectrum the length is not known otherwise.
    need(not (halves and inverse) or (node.has_input(1) and shape[-2] == length // 2 + 1))
    need(math.prod(shape[-2:]) * math.prod(made[-2:]) <= _MOST_TURNS)
    turns = _find_turns(length, shape[-2:], made[-2:], inverse=bool(inverse), halves=bool(halves))
    flat = writer.reshape(writer.x, "rows", [-1, math.prod(shape[-2:])], "flat")
    writer.reshape(writer.add("MatMul", [flat, writer.constant("turns", turns)], "product"), "sizes", made)


@node_rewrite("stft-to-conv", {"STFT"}, since=17, floats=True)
def stft_to_conv(writer: Writer) -> None:
    """Rewrites an STFT of real numbers to a Conv whose kernels are the turning windows. 1e-6 relative."""
    node, shape, made = writer.node, writer.shape(), writer.made
    step, window = int(writer.number(1)), writer.array(2) if node.has_input(2) else None
    length = int(writer.number(3)) if node.has_input(3) else len(known(window))
    need(shape[2:] in {(), (1,)} and len(made) == 4 and step > 0 and length * math.prod(made[-2:]) <= _MOST_TURNS)
    turns = _find_turns(length, (length, 1), made[-2:], inverse=False, halves=False)
    kernels = (turns if window is None else turns * window[:, None]).T[:, None, None]
    # A plane of one row, since NNAPI has no Conv of lines.
    plane = writer.reshape(writer.x, "plane_shape", [shape[0], 1, 1, shape[1]], "plane")
    parts = writer.add("Conv", [plane, writer.constant("kernels", kernels)], "parts", strides=[1, step])
    writer.reshape(writer.add("Transpose", [parts], "frames", perm=[0, 3, 1, 2]), "shape", made)


def _find_turns(length: int, given: tuple[int, ...], made: tuple[int, ...], *, inverse: bool, halves: bool) -> Array:
    """Returns the matrix of a DFT of `length` from numbers with the axes `given` to those `made`, both of parts last.

    With `halves` an inverse adds to each number of half a spectrum its conjugate, which leaves the real part.
    """
    (count, parts), (most, kinds) = given, made
    need(1 <= parts <= 2 and 1 <= kinds <= 2)
    angles = np.outer(np.arange(count), np.arange(most)) % length * (2 * np.pi / length)
    turns = np.exp(1j * angles) / length if inverse else np.exp(-1j * angles)
    if inverse and halves:
        places = np.arange(count)
        turns = turns * np.where((places == 0) | (2 * places == length), 1, 2)[:, None]
    whole = np.stack([turns, 1j * turns])[:parts]
    values = np.stack([whole.real, whole.imag * (not (inverse and halves))])[:kinds]
    return values.transpose(2, 1, 3, 0).reshape(count * parts, most * kinds)


# More than this many times the scale, a shift before padding would cost digits of what it is added to. A choice.
_MOST_SHIFT = 16


@node_rewrite("scale-to-conv", {"Conv"}, since=7)
def scale_to_conv(writer: Writer) -> None:
    """Takes the numbers of x * a + b before a Conv into its weights and bias; with padding x + b / a is left.

    PaddleOCR's networks scale and shift after each activation function; quantized, each step would be rounded again.
    """
    graph, node = writer.graph, writer.node
    product, shift = _split_only(graph, node.input[0], "Add")
    x, scale = _split_only(graph, product, "Mul")
    names = [name for name in node.input[1:] if name]
    constants = [graph.constants.get(name) for name in names]
    # Weights that lie on the disk stay.
    need(all(each is not None and each.data_type == onnx.TensorProto.FLOAT for each in constants))
    need(scale and not any(map(graph.is_external, names)))
    if any(node.entries("pads") or ()) or node.attributes.get("auto_pad", "NOTSET") not in {"NOTSET", "VALID"}:
        need(abs(shift) <= _MOST_SHIFT * abs(scale))
        x, shift = writer.add("Add", [x, writer.constant("shift", shift / scale, "float32")], "shifted"), 0.0
    weight, bias = graph.inline(names[0]), graph.inline(names[-1]) if names[1:] else np.zeros(())
    # A model that is only checked was loaded without its weights.
    if weight is not None and bias is not None:
        weight = weight.astype(np.float64)
        bias = bias + shift * weight.sum(axis=tuple(range(1, weight.ndim)))
        names = [writer.constant("weight", scale * weight, "float32"), writer.constant("bias", bias, "float32")]
    writer.add("Conv", [x, *names], **node.attributes)


def _split_only(graph: Graph, name: str, op: str) -> tuple[str, float]:
    """Returns the other operand and the number of an Add or Mul whose result is read once."""
    need(len(graph.readers(name)) == 1 and name not in graph.outputs)
    return split_number(graph, known(made_by(graph, name, op)))
