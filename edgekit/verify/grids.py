"""The integer grids that the results of a quantized model are rounded to: what rounding alone costs a layer."""

import msgspec
import numpy as np
from onnx import numpy_helper

from edgekit.model import Model, read_proto
from edgekit.tensors import Array


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Scale, zero point and limits of a tensor's integers."""

    scale: float
    zero: int
    low: int
    high: int

    def round_values(self, values: Array) -> Array:
        """Returns what QuantizeLinear and DequantizeLinear make of the values."""
        steps = np.clip(np.rint(values.astype(np.float64) / self.scale) + self.zero, self.low, self.high)
        rounded: Array = ((steps - self.zero) * self.scale).astype(values.dtype)
        return rounded


def find_grids(model: Model) -> dict[str, Grid]:
    """Returns the grid of each tensor that a QuantizeLinear with one scale reads, by the tensor's name."""
    graph = read_proto(model, weights=False).graph
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    grids: dict[str, Grid] = {}
    for node in graph.node:
        if node.op_type != "QuantizeLinear" or len(node.input) < 3:
            continue
        if any(sizes.get(name) != 1 or not _is_inside(tensors[name]) for name in node.input[1:3]):
            continue
        zero = numpy_helper.to_array(tensors[node.input[2]])
        if zero.dtype.kind not in "iu":
            continue
        limits = np.iinfo(zero.dtype)
        scale = float(numpy_helper.to_array(tensors[node.input[1]]).reshape(()))
        if scale > 0.0:
            grids[node.input[0]] = Grid(
                scale=scale, zero=int(zero.reshape(())), low=int(limits.min), high=int(limits.max)
            )
    return grids


def _is_inside(tensor: object) -> bool:
    """Returns True if a tensor's data lies in the model file itself."""
    return not getattr(tensor, "external_data", ())
