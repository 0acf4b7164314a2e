"""The integer grids that the results of a quantized model are rounded to: what rounding alone costs a layer."""

import msgspec
import numpy as np
import numpy.typing as npt
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
