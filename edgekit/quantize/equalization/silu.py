"""Channels scaled through SiLU and HardSwish, x * sigmoid(x), exactly: what the sigmoid reads is scaled back.

(s x) * sigmoid(x) is s times SiLU. So a channel that is small where a convolution makes it is scaled up there, a
product with one over its factor feeds the sigmoid, and the weights behind scale it back. What the sigmoid reads may
have few bits for a small channel: near 0 a sigmoid is about one half.
"""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import set_nodes
from edgekit.model.scaling import SUFFIX
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.ranges.methods import TensorRange, snap_range
from edgekit.quantize.ranges.nonlinearities import sigmoid

RESTORED = ".edgekit.back"
"""What a tensor that is scaled back has behind its name."""
LEAST_RATIO = 8.0
"""Channels less unequal than this are not worth a product before the sigmoid: 3 bits of 8; chosen by hand."""
# Beyond it a sigmoid is within a step of 1/256 of its end: sigmoid(-8) is 3.4e-4.
_SIGMOID_REACH = 8.0
# Negative values whose product is less than this share of the channel's largest may be clipped: a quarter of a step of
# 8 bits over that channel alone.
_NEGLIGIBLE = 0.001
# x sigmoid(x) has its minimum at -1.28; from minus _KNEE down it only falls off, and at minus _FAR nothing is left.
_KNEE, _FAR = 1.3, 40.0
# So many leave 2^-60 of a range: less than float64 tells apart.
_HALVINGS = 60


def find_silu(graph: Graph, product: Node) -> Node | None:
    """Returns the Sigmoid or HardSigmoid of x where a node computes x times that and nothing else reads either."""
    if product.op_type != "Mul" or len(product.input) != 2:
        return None
    for name, squashed in (product.input, product.input[::-1]):
        node = graph.producers.get(squashed)
        if node is None or node.op_type not in {"Sigmoid", "HardSigmoid"} or node.input[0] != name:
            continue
        readers = {reader.name for reader in graph.readers(name)}
        alone = readers == {node.name, product.name} and len(graph.readers(squashed)) == 1
        inner = {name, squashed}.isdisjoint(graph.outputs | graph.captured)
        return node if alone and inner and _numbers(node).get("beta", 0.5) == 0.5 else None
    return None


def saturation_of(node: Node) -> float:
    """Returns how far from 0 a Sigmoid or HardSigmoid still changes."""
    return _SIGMOID_REACH if node.op_type == "Sigmoid" else 0.5 / _numbers(node).get("alpha", 0.2)


def clip_silu_tails(graph: Graph, calibration: Calibration) -> Calibration:
    """Returns a calibration in which x, where only x * sigmoid(x) reads it, loses the low values that come to about 0.

    No integers are spent on them, whatever the range method.
    """
    seen = calibration.ranges["minmax"]
    lows: dict[str, float] = {}
    for product in graph.nodes:
        node = find_silu(graph, product)
        if node is not None and product.output[0] in seen:
            made = seen[product.output[0]]
            lows[node.input[0]] = -float(_negligible_below(node, np.array(max(abs(made.low), abs(made.high)))))
    return calibration.map_ranges(
        lambda name, its: snap_range(TensorRange(low=max(its.low, lows[name]), high=its.high)) if name in lows else its
    )


def invert_silu(node: Node, low: Array, high: Array, floor: Array) -> tuple[Array, Array]:
    """Returns the lowest and highest value that matter of each channel of x, from those of x times its sigmoid, `node`.

    `floor` is about the lowest value of each channel. Where the product is next to nothing it does not count.
    """
    enough = _negligible_below(node, np.maximum(np.maximum(np.abs(low), np.abs(high)), np.finfo(np.float32).tiny))
    # Where x is positive so is the slope, and sigmoid(x) >= 1/2: x is at most twice the product.
    below, above = np.zeros(len(high)), np.maximum(2 * high, 0.0)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        is_less = middle * _squash(node, middle) < high
        below, above = np.where(is_less, middle, below), np.where(is_less, above, middle)
    return np.maximum(np.minimum(floor, 0.0), -enough), above


def _negligible_below(node: Node, reach: Array) -> Array:
    """Returns how far below 0 the product of x and its sigmoid is next to nothing beside what it reaches."""
    places = np.linspace(_KNEE, _FAR, 4096)
    rest = np.abs(-places * _squash(node, -places))
    return np.asarray(np.interp(-_NEGLIGIBLE * reach, -rest, places))


def restore_sigmoid_inputs(proto: onnx.ModelProto, factors: Mapping[str, Array]) -> None:
    """Lets each Sigmoid and HardSigmoid read its channels scaled back; `proto` is changed.

    `factors` are by the node's name and have the shape of a constant that fits what it reads. A tensor that is scaled
    back has RESTORED behind the name that it had before it was scaled.
    """
    graph, nodes = proto.graph, list[onnx.NodeProto]()
    known = {value.name: value for value in graph.value_info}
    for node in reversed(graph.node):
        nodes.append(node)
        if node.name not in factors:
            continue
        made = node.input[0]
        restored, constant = f"{made.removesuffix(SUFFIX)}{RESTORED}", f"{node.name}.edgekit.factors"
        graph.initializer.append(numpy_helper.from_array((1 / factors[node.name]).astype(np.float32), constant))
        node.input[0] = restored
        nodes.append(helper.make_node("Mul", [made, constant], [restored], name=f"{node.name}.edgekit.scale"))
        if made in known:
            graph.value_info.add().CopyFrom(known[made])
            graph.value_info[-1].name = restored
    set_nodes(graph, nodes[::-1])


def _squash(node: Node, values: Array) -> Array:
    if node.op_type == "Sigmoid":
        return sigmoid(values)
    return np.clip(values * _numbers(node).get("alpha", 0.2) + 0.5, 0, 1)


def _numbers(node: Node) -> dict[str, float]:
    return {name: value for name, value in node.attributes.items() if isinstance(value, float)}
