"""Weights of 16 bits, each as the sum of two weights of 8 bits: every device that takes those can run it.

W is about W1 + W2: W1 is W in 8 bits, and W2 is the rest, W - W1, in 8 bits with steps 254 times finer (REx, E. Yvinec
et al., arXiv:2203.14645). The layer becomes two, whose outputs are added in 16 bits. It costs twice the products.

The ranges of the new outputs follow without a calibration. A channel x of the input lies within [l, h], and is 0 where
it is padded. So W2 x lies within [p, q]: p is the sum of min(w l, w h, 0), q that of max(w l, w h, 0). The layer's
output has the range [a, b], which may clamp it in place of a Relu. Then W1 x + bias needs the range [a - q, b - p]: a
value beyond it gives a sum beyond [a, b], whatever W2 x is.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph
from edgekit.model.model import order_nodes, refill
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import InputMoments, open_moments
from edgekit.quantize.gains import add_grid, make_dequantizer
from edgekit.quantize.gptq import round_nearest, weight_scale
from edgekit.quantize.graph.layers import Layer, expand_channel_factors
from edgekit.quantize.rounding import QdqLayer, find_places, read_bias, read_moments, write_layer

SPLIT_BITS = 16
"""The bits of a weight that is the sum of two."""
_MOST, _TINY = 65535, float(np.finfo(np.float32).tiny)


def split_weights(
    qdq: onnx.ModelProto,
    graph: Graph,
    weights: Collection[str],
    statistics: Path,
    factors: Mapping[str, tuple[float, ...]],
    limit: int,
) -> None:
    """Turns the layers of some weights, between inputs and outputs of 16 bits, into two and their sum; changes `qdq`.

    `factors` and `limit` are those of `round_qdq_weights`.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    if not weights:
        return
    places = find_places(qdq.graph, graph, limit, {})
    with open_moments(statistics / "moments.npz") as stored:
        for layer, place in places.values():
            moments = read_moments(stored, layer, factors) if layer.weight in weights and place.is_wide else None
            if moments is not None:
                _split_layer(qdq.graph, graph, layer, place, moments)
    nodes = order_nodes(qdq.graph)
    refill(qdq.graph.node, nodes)


def _split_layer(qdq: onnx.GraphProto, graph: Graph, layer: Layer, place: QdqLayer, moments: InputMoments) -> None:
    """Replaces a layer by those of W1 and W2 and their sum, which takes over its name and output."""
    constants, nodes = {tensor.name: tensor for tensor in qdq.initializer}, {each.name: each for each in qdq.node}
    node, makers = nodes[layer.node], {each.output[0]: each for each in qdq.node}
    rounder = next(each for each in qdq.node if each.op_type == "QuantizeLinear" and each.input[0] == node.output[0])
    step, zero = (float(numpy_helper.to_array(constants[name])) for name in rounder.input[1:])
    matrix, (bias, floor) = layer.to_matrix(graph.weight(layer.weight)), read_bias(graph, layer, place)
    scale = weight_scale(matrix, per_channel=place.per_channel, floor=floor, limit=place.limit)
    low, high = bound_outputs(layer, matrix - round_nearest(matrix, scale, place.limit).values, moments)
    # W may be W1, and the values of a calibration so large that their sums are infinite.
    if not _TINY < (high - low) / _MOST < math.inf:
        return
    # The scales of weights depend on the steps of the outputs (`least_multiplier`).
    ends = {"first": (step * -zero - high, step * (_MOST - zero) - low), "rest": (low, high)}
    steps = {part: (stop - start) / _MOST for part, (start, stop) in ends.items()}
    first = round_nearest(matrix, np.maximum(scale, place.least * steps["first"] / step), place.limit)
    rest, least = matrix - first.values, place.least * steps["rest"] / step
    finer = weight_scale(rest, per_channel=place.per_channel, floor=least, limit=place.limit)
    second = round_nearest(rest, finer, place.limit)
    shape, prefix, made, name = graph.weight(layer.weight).shape, f"{node.output[0]}.edgekit", node.output[0], node.name
    integers = layer.from_matrix(first.integers, shape)
    write_layer(constants, place, integers=integers, scale=first.scale.reshape(-1), bias=bias)
    dequantizer, other = onnx.NodeProto(), onnx.NodeProto()
    dequantizer.CopyFrom(makers[node.input[1]])
    other.CopyFrom(node)
    dequantizer.name = dequantizer.output[0] = f"{prefix}.weight"
    scales = finer.reshape(-1) if place.per_channel else finer.reshape(-1)[0]
    values = layer.from_matrix(second.integers, shape), scales, np.zeros(scales.shape, np.int8)
    for index, value in enumerate(values):
        dequantizer.input[index] = f"{prefix}.weight.{index}"
        qdq.initializer.append(numpy_helper.from_array(np.asarray(value), dequantizer.input[index]))
    refill(other.input, [node.input[0], dequantizer.output[0]])
    for part, each in (("first", node), ("rest", other)):
        each.name = each.output[0] = f"{prefix}.{part}"
        grid = add_grid(qdq, each.name, steps[part], np.uint16(round(-ends[part][0] / steps[part])))
        names = [f"{each.name}.integers", f"{each.name}.rounded"]
        qdq.node.append(helper.make_node("QuantizeLinear", [each.name, *grid], names[:1], domain=rounder.domain))
        qdq.node.append(make_dequantizer([names[0], *grid], names[1], rounder.domain))
    qdq.node.extend([dequantizer, other])
    qdq.node.append(helper.make_node("Add", [f"{prefix}.first.rounded", f"{prefix}.rest.rounded"], [made], name=name))


def bound_outputs(layer: Layer, matrix: Array, moments: InputMoments) -> tuple[float, float]:
    """Returns the lowest and highest output that a matrix [groups, outputs, inputs] makes of a layer's inputs."""
    ends = [expand_channel_factors(layer, each[0].astype(np.float64)) * matrix for each in (moments.low, moments.high)]
    low, high = np.minimum(np.minimum(*ends), 0).sum(axis=2), np.maximum(np.maximum(*ends), 0).sum(axis=2)
    return float(low.min()), float(high.max())
