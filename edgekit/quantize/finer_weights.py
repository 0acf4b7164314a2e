"""Weights that are finer than 8 bits: each becomes two nodes, between tensors of 16 bits.

Gains (scale inputs) of LayerNormalizations for which 8 bits are too few, in plans with 16-bit activations.

QNN takes only 8-bit gains of a LayerNormalization, and all channels share one scale: if one gain is large, the scale is
too coarse for the others. LayerNormalization(x, gain, bias) is LayerNormalization(x, 1, bias / gain) * gain, in which 1
is exact and the factor of the Mul gets 16 bits.

Such a product is worth its time where the rounded gain loses more than the rounded weights after it. Before the gain
every channel has the variance 1. If a matrix W of 8-bit weights reads the output, and rounding changes the gain g by e
and the matrix by E, the result gets the noise sum of (W_ij e_j)^2 from the gain, and sum of (E_ij g_j)^2 from the
matrix. No product reduces the second, so a gain whose noise is below it stays as it is. If no matrix reads the output,
the noise of the gain is compared with that of weights uniformly distributed over the 127 steps of int8: rounding adds a
variance of 1 / 12 of a squared step to their own of 127^2 / 3, so the noise is 1 / (4 x 127^2) of the signal, the sum
of g_j^2.

Weights of 16 bits, each as the sum of two weights of 8 bits: every device that takes those can run it. W is about
W1 + W2: W1 is W in 8 bits, and W2 is the rest, W - W1, in 8 bits with steps 254 times finer (REx, E. Yvinec et al.,
arXiv:2203.14645). The layer becomes two, whose outputs are added in 16 bits. It costs twice the products. The ranges of
the new outputs follow without a calibration. A channel x of the input lies within [l, h], and is 0 where it is padded.
So W2 x lies within [p, q]: p is the sum of min(w l, w h, 0), q that of max(w l, w h, 0). The layer's output has the
range [a, b], which may clamp it in place of a Relu. Then W1 x + bias needs the range [a - q, b - p]: a value beyond it
gives a sum beyond [a, b], whatever W2 x is.
"""

import math
from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.constants import MOVES
from edgekit.graph.graph import Graph, Node
from edgekit.model.model import drop_unread, order_nodes, refill
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import InputMoments, StoredMoments
from edgekit.quantize.gptq import round_nearest, weight_scale
from edgekit.quantize.graph.layers import Layer, expand_channel_factors
from edgekit.quantize.rounding import Placed, QdqLayer, Rounder, find_places, read_bias, write_layer

NORM = "LayerNormalization"
"""The operator. Gains are positive, so asymmetric uint8 gives them twice the steps of int8."""
_MOST_8, _MOST_16, _MOST_32 = 255, 65535, 2**31 - 1
_EVEN_NOISE = 1 / (4 * 127**2)
# Operators between a normalization and the matrices that read it.
_MOVING = MOVES | {"Gather", "Identity", "Slice"}


def multiply_gains(qdq: onnx.GraphProto, graph: Graph) -> None:
    """Turns gains that lose more than the weights after them into products, in place; nodes are not in order.

    Only normalizations with a 16-bit output are changed. Gains that are computed or zero stay, and so does a gain with
    a bias that would more than double the range.
    """
    norms = {
        node.output[0]: node
        for node in graph.nodes
        if node.op_type == NORM and all(graph.is_float_constant(name) for name in node.input[1:])
    }
    if not norms:
        return
    placed = Placed(qdq)
    for node in [node for node in qdq.node if node.op_type == NORM]:
        norm = norms.get(node.output[0].removesuffix("_QuantizeLinear_Input"))
        if norm is not None:
            _split_norm(qdq, placed, graph, node, norm)
    drop_unread(qdq, ["DequantizeLinear"])


def _split_norm(qdq: onnx.GraphProto, placed: Placed, graph: Graph, node: onnx.NodeProto, norm: Node) -> None:
    """Turns a normalization into one without gain and a product, if its rounded gain loses more than the weights do.

    The tensor between the two gets its 16-bit scale without calibration, since the bias of the normalization (`shift`)
    at most doubles its largest magnitude (`reach`). The product takes over the node's name and output: layers are
    compared by these.
    """
    rounder, rounded = placed.rounders.get(node.output[0]), placed.dequantize(node, 1)
    source = placed.makers.get(node.input[0])
    gain, *biases = (graph.weight(name).astype(np.float64) for name in norm.input[1:])
    is_last = norm.integer("axis", -1) in {-1, len(graph.dims(norm.input[0])) - 1}
    # A float normalization reads its constants directly.
    if rounder is None or rounded is None or source is None or gain.ndim != 1 or not is_last or not gain.all():
        return
    if placed.stored[rounder.input[2]].data_type != onnx.TensorProto.UINT16:
        return
    shift, domain = biases[0] / gain if biases else np.zeros(0), rounder.domain
    # The scale of the shift is that of the normalization's input over 255. Values that are normalized over N channels
    # lie within +-sqrt(N - 1).
    step, reach = float(placed.read(source.input[1])) / _MOST_8, math.sqrt(max(gain.size - 1, 1))
    if np.any(np.abs(shift) > min(reach, step * _MOST_32)):
        return
    pairs = [*_read_matrices(placed, graph, norm.output[0], gain.size)]
    reached = sum([(exact**2).sum(axis=1) for exact, _ in pairs]) if pairs else np.ones_like(gain)
    lost = sum([((weights - exact) ** 2).sum(axis=1) for exact, weights in pairs]) if pairs else reached * _EVEN_NOISE
    if float((reached * (rounded - gain) ** 2).sum()) <= float((lost * gain**2).sum()):
        return
    prefix = f"{norm.output[0]}.edgekit"
    low, high = min(float(gain.min()), 0.0), max(float(gain.max()), 0.0)
    scale = (high - low) / _MOST_16
    zero = round(-low / scale)
    parts = {
        "one": (np.full(gain.size, _MOST_8, np.uint8), 1 / _MOST_8, 0),
        "shift": (np.rint(shift / step).astype(np.int32), step, 0),
        "gain": (np.clip(np.rint(gain / scale) + zero, 0, _MOST_16).astype(np.uint16), scale, zero),
    }
    for part, (values, size, offset) in parts.items():
        grid = _add_grid(qdq, f"{prefix}.{part}", size, values.dtype.type(offset))
        integers = numpy_helper.from_array(values, f"{prefix}.{part}.integers")
        qdq.initializer.append(integers)
        read = [integers.name, *grid]
        qdq.node.append(helper.make_node("DequantizeLinear", read, [f"{prefix}.{part}"], domain=domain))
    even, made, name = f"{prefix}.even", node.output[0], node.name
    node.input[1:] = [f"{prefix}.one", f"{prefix}.shift"][: len(node.input) - 1]
    node.output[0], node.name = even, f"{prefix}.norm"
    rounded_even = _add_rounding(qdq, even, 4 * reach / _MOST_16, _MOST_16 // 2 + 1, domain)
    qdq.node.append(helper.make_node("Mul", [rounded_even, f"{prefix}.gain"], [made], name=name))


def _read_matrices(placed: Placed, graph: Graph, name: str, channels: int) -> Iterator[tuple[Array, Array]]:
    """Yields the matrices [channels, outputs] that read a tensor, each exact and rounded."""
    for reader in graph.readers(name):
        if reader.op_type in _MOVING and reader.input[0] == name:
            yield from _read_matrices(placed, graph, reader.output[0], channels)
        node = placed.nodes.get(reader.name)
        if reader.op_type not in {"Gemm", "MatMul"} or node is None or not graph.is_float_constant(reader.input[1]):
            continue
        exact = graph.weight(reader.input[1]).astype(np.float64)
        found = placed.dequantize(node, 1)
        pair = (exact, exact if found is None else found)
        one, two = (each.T for each in pair) if reader.integer("transB", 0) else pair
        if one.ndim == 2 and len(one) == channels:
            yield one, two


def _add_rounding(qdq: onnx.GraphProto, name: str, scale: float, zero: int, domain: str) -> str:
    """Adds a Q and a DQ node of 16 bits behind a tensor; returns the name of the rounded tensor."""
    grid = _add_grid(qdq, name, scale, np.uint16(zero))
    integers, rounded = f"{name}.integers", f"{name}.rounded"
    qdq.node.append(helper.make_node("QuantizeLinear", [name, *grid], [integers], domain=domain))
    qdq.node.append(helper.make_node("DequantizeLinear", [integers, *grid], [rounded], domain=domain))
    return rounded


def _add_grid(qdq: onnx.GraphProto, name: str, scale: float, zero: np.generic) -> tuple[str, str]:
    """Adds a scale and a zero point; returns their names."""
    qdq.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), f"{name}.scale"))
    qdq.initializer.append(numpy_helper.from_array(np.array(zero), f"{name}.zero"))
    return f"{name}.scale", f"{name}.zero"


SPLIT_BITS = 16
"""The bits of a weight that is the sum of two."""
_TINY = float(np.finfo(np.float32).tiny)


def split_weights(qdq: onnx.ModelProto, how: Rounder) -> None:
    """Turns the layers of weights of 16 bits, between inputs and outputs of 16 bits, into two and their sum, in place.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    if SPLIT_BITS not in how.bits.values():
        return
    stored = StoredMoments(how.statistics)
    for place in find_places(qdq.graph, how):
        is_split = how.bits.get(place.layer.weight) == SPLIT_BITS and place.is_wide
        moments = how.read_moments(stored, place.layer) if is_split else None
        if moments is not None:
            _split_layer(qdq.graph, how.graph, place, moments)
    nodes = order_nodes(qdq.graph)
    refill(qdq.graph.node, nodes)


def _split_layer(qdq: onnx.GraphProto, graph: Graph, place: QdqLayer, moments: InputMoments) -> None:
    """Replaces a layer by those of W1 and W2 and their sum, which takes over its name and output."""
    layer, placed = place.layer, Placed(qdq)
    node = placed.nodes[layer.node]
    rounder = placed.rounders[node.output[0]]
    step, zero = (float(placed.read(name)) for name in rounder.input[1:])
    matrix, (bias, floor) = layer.to_matrix(graph.weight(layer.weight)), read_bias(graph, place)
    scale = weight_scale(matrix, per_channel=place.per_channel, floor=floor, limit=place.limit)
    low, high = bound_outputs(layer, matrix - round_nearest(matrix, scale, place.limit).values, moments)
    # W may be W1, and the values of a calibration so large that their sums are infinite.
    if not _TINY < (high - low) / _MOST_16 < math.inf:
        return
    # The scales of weights depend on the steps of the outputs (`least_multiplier`).
    ends = {"first": (step * -zero - high, step * (_MOST_16 - zero) - low), "rest": (low, high)}
    steps = {part: (stop - start) / _MOST_16 for part, (start, stop) in ends.items()}
    first = round_nearest(matrix, np.maximum(scale, place.least * steps["first"] / step), place.limit)
    rest, least = matrix - first.values, place.least * steps["rest"] / step
    finer = weight_scale(rest, per_channel=place.per_channel, floor=least, limit=place.limit)
    second = round_nearest(rest, finer, place.limit)
    shape, prefix, made, name = graph.weight(layer.weight).shape, f"{node.output[0]}.edgekit", node.output[0], node.name
    integers = layer.from_matrix(first.integers, shape)
    write_layer(placed.stored, place, integers=integers, scale=first.scale.reshape(-1), bias=bias)
    dequantizer, other = deepcopy(placed.makers[node.input[1]]), deepcopy(node)
    dequantizer.name = dequantizer.output[0] = f"{prefix}.weight"
    scales = finer.reshape(-1) if place.per_channel else finer.reshape(-1)[0]
    values = layer.from_matrix(second.integers, shape), scales, np.zeros(scales.shape, np.int8)
    for index, value in enumerate(values):
        dequantizer.input[index] = f"{prefix}.weight.{index}"
        qdq.initializer.append(numpy_helper.from_array(np.asarray(value), dequantizer.input[index]))
    refill(other.input, [node.input[0], dequantizer.output[0]])
    for part, each in (("first", node), ("rest", other)):
        each.name = each.output[0] = f"{prefix}.{part}"
        _add_rounding(qdq, each.name, steps[part], round(-ends[part][0] / steps[part]), rounder.domain)
    qdq.node.extend([dequantizer, other])
    qdq.node.append(helper.make_node("Add", [f"{prefix}.first.rounded", f"{prefix}.rest.rounded"], [made], name=name))


def bound_outputs(layer: Layer, matrix: Array, moments: InputMoments) -> tuple[float, float]:
    """Returns the lowest and highest output that a matrix [groups, outputs, inputs] makes of a layer's inputs."""
    ends = [expand_channel_factors(layer, each[0].astype(np.float64)) * matrix for each in (moments.low, moments.high)]
    low, high = np.minimum(np.minimum(*ends), 0).sum(axis=2), np.maximum(np.maximum(*ends), 0).sum(axis=2)
    return float(low.min()), float(high.max())
