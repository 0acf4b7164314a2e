"""Channels scaled through x * sigmoid(x), which is exact where what the sigmoid reads is scaled back.

(s x) * sigmoid(x) is s times SiLU. So a channel that is small where a convolution makes it is scaled up there, a
product with one over its factor feeds the sigmoid, and the weights behind scale it back. What the sigmoid reads may
have few bits for a small channel: near 0 a sigmoid is about one half.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.scaling import SUFFIX
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.graph.graph import Graph
from edgekit.quantize.ranges.methods import TensorRange, sigmoid, snap_range

RESTORED = ".edgekit.back"
"""What a tensor that is scaled back has behind its name."""
LEAST_RATIO = 8.0
"""Channels less unequal than this are not worth a product before the sigmoid."""
_SIGMOID_REACH = 8.0
"""Beyond it a sigmoid is within a step of 1/256 of its end."""
_LOST = 0.001
"""Negative values whose product is less than this share of the channel's largest may be clipped."""
_KNEE, _FAR = 1.3, 40.0
"""From minus _KNEE down x sigmoid(x) only falls off; at minus _FAR nothing is left."""
_HALVINGS = 60


def find_silu(graph: Graph, product: onnx.NodeProto) -> onnx.NodeProto | None:
    """Returns the node that squashes x where a node computes x times that, and nothing else reads either; else None."""
    if product.op_type != "Mul" or len(product.input) != 2:
        return None
    for name, squashed in (product.input, product.input[::-1]):
        gate = graph.producers.get(squashed)
        if gate is None or gate.op_type not in {"Sigmoid", "HardSigmoid"} or gate.input[0] != name:
            continue
        readers = {node.name for node in graph.consumers[name]}
        alone = readers == {gate.name, product.name} and len(graph.consumers[squashed]) == 1
        inner = {name, squashed}.isdisjoint(graph.outputs | graph.captured)
        return gate if alone and inner and _numbers(gate).get("beta", 0.5) == 0.5 else None
    return None


def saturation_of(gate: onnx.NodeProto) -> float:
    """Returns how far from 0 a squashing node still changes."""
    return _SIGMOID_REACH if gate.op_type == "Sigmoid" else 0.5 / _numbers(gate).get("alpha", 0.2)


def clip_silu_tails(graph: Graph, calibration: Calibration) -> Calibration:
    """Returns a calibration in which x, where only x * sigmoid(x) reads it, loses the low values that come to about 0.

    No integers are spent on them, whatever the range method.
    """
    gates = {
        gate.input[0]: (gate, node.output[0])
        for node in graph.proto.graph.node
        if (gate := find_silu(graph, node)) is not None
    }
    seen = calibration.ranges["minmax"]
    lows = {
        name: -float(_lost_below(gate, np.array(max(abs(seen[made].low), abs(seen[made].high)))))
        for name, (gate, made) in gates.items()
        if made in seen
    }
    ranges = {
        method: {
            name: snap_range(TensorRange(low=max(span.low, lows[name]), high=span.high)) if name in lows else span
            for name, span in its.items()
        }
        for method, its in calibration.ranges.items()
    }
    return msgspec.structs.replace(calibration, ranges=ranges)


def invert_silu(gate: onnx.NodeProto, low: Array, high: Array, floor: Array) -> tuple[Array, Array]:
    """Returns the lowest and highest value that matter of each channel of x, from those of x times its squashed value.

    `floor` is about the lowest value of each channel. Where the product is next to nothing it does not count.
    """
    enough = _lost_below(gate, np.maximum(np.maximum(np.abs(low), np.abs(high)), np.finfo(np.float32).tiny))
    below, above = np.zeros(len(high)), np.maximum(2 * high, 0.0)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        is_less = middle * _squash(gate, middle) < high
        below, above = np.where(is_less, middle, below), np.where(is_less, above, middle)
    return np.maximum(np.minimum(floor, 0.0), -enough), above


def _lost_below(gate: onnx.NodeProto, reach: Array) -> Array:
    """Returns how far below 0 x times its squashed value is next to nothing beside what it reaches."""
    places = np.linspace(_KNEE, _FAR, 4096)
    rest = np.abs(-places * _squash(gate, -places))
    return np.asarray(np.interp(-_LOST * reach, -rest, places))


def restore_sigmoid_inputs(proto: onnx.ModelProto, gates: Mapping[str, Array]) -> None:
    """Lets each squashing node read its channels scaled back; `proto` is changed.

    `gates` holds by the node's name the factors, in the shape of a constant that fits what it reads. A tensor that is
    scaled back has RESTORED behind the name that it had before it was scaled.
    """
    graph = proto.graph
    for index, node in reversed(list(enumerate(graph.node))):
        if node.name not in gates:
            continue
        made = node.input[0]
        restored, constant = f"{made.removesuffix(SUFFIX)}{RESTORED}", f"{node.name}.edgekit.factors"
        graph.initializer.append(numpy_helper.from_array((1 / gates[node.name]).astype(np.float32), constant))
        back = helper.make_node("Mul", [made, constant], [restored], name=f"{node.name}.edgekit.scale")
        node.input[0] = restored
        graph.node.insert(index, back)
        for value in [value for value in graph.value_info if value.name == made]:
            graph.value_info.add().CopyFrom(value)
            graph.value_info[-1].name = restored


def _squash(gate: onnx.NodeProto, values: Array) -> Array:
    if gate.op_type == "Sigmoid":
        return sigmoid(values)
    return np.clip(values * _numbers(gate).get("alpha", 0.2) + 0.5, 0, 1)


def _numbers(node: onnx.NodeProto) -> dict[str, float]:
    return {item.name: item.f for item in node.attribute if item.type == onnx.AttributeProto.FLOAT}
