"""The integer grids that the results of a quantized model are rounded to: what rounding alone costs a layer."""

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
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

    def read_values(self, integers: Array) -> Array:
        """Returns what DequantizeLinear makes of integers."""
        values: Array = ((integers.astype(np.float64) - self.zero) * self.scale).astype(np.float32)
        return values


class StepErrors(msgspec.Struct, frozen=True, kw_only=True):
    """How many steps of its grid a result lies from where it should, channel by channel: sums over the elements."""

    count: int
    sums: npt.NDArray[np.float64]
    energies: npt.NDArray[np.float64]

    @property
    def offset_steps(self) -> float:
        """The mean distance in steps, with its sign taken away; a wrong zero point makes it one."""
        return abs(float(self.sums.sum())) / max(1, self.count * len(self.sums))

    @property
    def channel_steps(self) -> tuple[float, float]:
        """The root of the mean square in steps, of the worst channel and of the middle one."""
        roots = np.sqrt(self.energies / max(1, self.count))
        return float(roots.max()), float(np.median(roots))


def measure_steps(grid: Grid, wanted: Array, own: Array) -> StepErrors:
    """Returns how far a layer's result lies from the float values rounded to its grid: clipping and rounding cancel.

    Channels are the second axis of images, else the last.
    """
    steps = (own.astype(np.float64) - grid.round_values(wanted)) / grid.scale
    rows = np.moveaxis(steps, 1 if steps.ndim > 2 else -1, 0) if steps.ndim else steps.reshape(1)
    rows = rows.reshape(len(rows), -1)
    return StepErrors(count=rows.shape[1], sums=rows.sum(axis=1), energies=(rows * rows).sum(axis=1))


def add_steps(first: StepErrors | None, second: StepErrors) -> StepErrors:
    """Returns the sums of two samples together."""
    if first is None or first.sums.shape != second.sums.shape:
        return second
    return StepErrors(
        count=first.count + second.count,
        sums=first.sums + second.sums,
        energies=first.energies + second.energies,
    )


def find_grids(model: Model) -> dict[str, Grid]:
    """Returns the grid of each tensor that a QuantizeLinear with one scale reads, by the tensor's name."""
    graph = read_proto(model, weights=False).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    found = {node.input[0]: read_grid(node, tensors) for node in graph.node if node.op_type == "QuantizeLinear"}
    return {name: grid for name, grid in found.items() if grid is not None}


def read_grid(node: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> Grid | None:
    """Returns the grid of a QuantizeLinear with one scale, None of another; `tensors` are the graph's initializers."""
    if len(node.input) < 3 or not all(name in tensors and _is_scalar(tensors[name]) for name in node.input[1:3]):
        return None
    scale, zero = (numpy_helper.to_array(tensors[name]).reshape(()) for name in node.input[1:3])
    if zero.dtype.kind not in "iu" or not float(scale) > 0.0:
        return None
    limits = np.iinfo(zero.dtype)
    return Grid(scale=float(scale), zero=int(zero), low=int(limits.min), high=int(limits.max))


def _is_scalar(tensor: onnx.TensorProto) -> bool:
    """Returns True for one number whose data lies in the model file itself."""
    return int(np.prod(tensor.dims)) == 1 and not tensor.external_data
