"""Comparing the weights of a quantized model with the float weights that they were rounded from."""

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import external_data_helper, numpy_helper

from edgekit.model import Model, read_proto
from edgekit.tensors import Array

FAR_STEPS = 12.0
"""Farther than any clean INT8 model of the benchmarks had a single weight (4.7); bit 4 is 16 steps."""
_ISOLATED = 3


def measure_weights(a: Model, b: Model) -> dict[str, float]:
    """Returns, for each node of `b` with quantized weights, how many steps its worst weight lies from that of `a`.

    Nodes are matched by name. Rounding to the nearest gives half a step at most, refitted weights lie a few steps off.
    Weights at an end of their grid do not count, as they may be clipped on purpose; nor do channels of which most
    weights differ, and tensors of which more than a few are far off, because a quantizer equalizes and prunes: what is
    wrong with those shows in the layer's output. One tensor is in memory at a time.
    """
    floats, quantized = _Initializers(a), _Initializers(b)
    nodes_a = {node.name: node for node in floats.graph.node if node.name}
    rounded = {node.output[0]: node for node in quantized.graph.node if node.op_type == "DequantizeLinear"}
    steps: dict[str, float] = {}
    for node in quantized.graph.node:
        other = nodes_a.get(node.name)
        if other is None or other.op_type != node.op_type:
            continue
        for mine, theirs in zip(node.input, other.input, strict=False):
            if mine in rounded and theirs in floats.tensors and rounded[mine].input[0] in quantized.tensors:
                found = _measure_steps(quantized, rounded[mine], floats.read(theirs))
                steps[node.name] = max(found, steps.get(node.name, 0.0))
    return steps


class _Initializers:
    """The initializers of a model, read one by one, from external files where they lie there."""

    def __init__(self, model: Model) -> None:
        self.graph = read_proto(model, weights=False).graph
        self.tensors: Mapping[str, onnx.TensorProto] = {tensor.name: tensor for tensor in self.graph.initializer}
        self._folder = model.path.parent

    def read(self, name: str) -> Array:
        tensor = onnx.TensorProto()
        tensor.CopyFrom(self.tensors[name])
        if external_data_helper.uses_external_data(tensor):
            external_data_helper.load_external_data_for_tensor(tensor, str(self._folder))
        return numpy_helper.to_array(tensor)


def _measure_steps(quantized: _Initializers, node: onnx.NodeProto, wanted: Array) -> float:
    values = quantized.read(node.input[0])
    if values.shape != wanted.shape or not values.size or wanted.dtype.kind != "f" or values.dtype.kind not in "iu":
        return 0.0
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    scale = _spread(quantized.read(node.input[1]), axis, values.ndim)
    has_zero = len(node.input) > 2 and node.input[2] in quantized.tensors
    zero = _spread(quantized.read(node.input[2]), axis, values.ndim) if has_zero else 0.0
    steps = np.atleast_1d(np.abs(values.astype(np.float64) - zero - wanted / scale))
    limits = np.iinfo(values.dtype)
    steps[np.atleast_1d((values <= limits.min + 1) | (values == limits.max))] = 0.0
    channels = np.moveaxis(steps, axis if scale.size > 1 else 0, 0)
    rows = channels.reshape(len(channels), -1)
    kept = rows[np.median(rows, axis=1) <= 1.0]
    isolated = np.count_nonzero(kept > FAR_STEPS) <= _ISOLATED
    return float(kept.max()) if kept.size and isolated else 0.0


def _spread(value: Array, axis: int, rank: int) -> Array:
    """Returns a scale or zero point of a tensor or of each channel in a shape that broadcasts over `rank` axes."""
    if value.size == 1:
        return value.astype(np.float64).reshape(())
    return value.astype(np.float64).reshape([-1 if place == axis % rank else 1 for place in range(rank)])
