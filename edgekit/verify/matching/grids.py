"""The grids that the results of a quantized model are rounded to: what rounding alone costs a layer, in steps."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, read_proto
from edgekit.model.tensors import Array
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE, sort_nodes

# The steps of an 8-bit grid. Grids of 16 bits are measured in steps of 8: weights of 8 bits cost more than theirs.
_STEPS = 255.0

# Where channels differ much in size, what is expected by the largest of them is far too much.
_MOST_NOISE = 1.0

_MOVERS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})

_Floats = npt.NDArray[np.float64]


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """Scale, zero point and limits of a tensor's integers."""

    scale: float
    zero: int
    low: int
    high: int

    @property
    def step(self) -> float:
        """The size of a step if the grid had 8 bits."""
        return self.scale * max(1.0, (self.high - self.low) / _STEPS)

    def round_values(self, values: Array) -> _Floats:
        """Returns what QuantizeLinear and DequantizeLinear make of the values."""
        # In place: new memory for each step costs as much as the steps. rint rounds halves to even, as QuantizeLinear
        # does (ONNX operator specification).
        steps: _Floats = np.atleast_1d(values.astype(np.float64))
        steps /= self.scale
        np.rint(steps, out=steps)
        steps += self.zero
        np.clip(steps, self.low, self.high, out=steps)
        steps -= self.zero
        steps *= self.scale
        return steps.reshape(values.shape)

    def read_values(self, integers: Array) -> Array:
        """Returns what DequantizeLinear makes of integers."""
        values: Array = ((integers.astype(np.float64) - self.zero) * self.scale).astype(np.float32)
        return values


class StepErrors(msgspec.Struct, frozen=True, kw_only=True):
    """How far a result lies from where it should: sums over the elements, in the result's own unit.

    `energies` holds the sums of squares channel by channel, once for each axis that may hold the channels. `low` and
    `high` are the ends of the values that should be. Of an image the last of the axes is that of the channels.
    """

    count: int
    total: float
    energies: tuple[_Floats, ...]
    low: float
    high: float
    is_image: bool = False

    def find_step(self, grid: Grid | None, least: float = 0.0) -> float:
        """Returns the size of a step: that of the grid, or a 255th of the range of the values where there is none."""
        own = grid.step if grid is not None else (self.high - self.low) / _STEPS
        return max(own, least)

    def measure_offset(self, step: float) -> float:
        """Returns the mean distance in steps, with its sign taken away; a wrong zero point makes it one."""
        return abs(self.total) / max(1, self.count) / step

    def measure_channels(self, step: float) -> tuple[float, float]:
        """Returns the root of the mean square in steps, of the worst channel and of the middle one beside it."""
        found = [(0.0, 0.0)]
        for energies in self.energies:
            roots = np.sqrt(energies * len(energies) / max(1, self.count)) / step
            found.append((float(roots.max()), float(np.median(roots))))
        return max(found)

    def expect_rounding(self, step: float, noise: float) -> tuple[float, float]:
        """Returns what may be expected of a channel, and of the mean of all, where weights are rounded: in steps.

        `noise` is what the weights add to each channel, independently. The mean of n rounded values may be off by the
        root of n less than one of them.
        """
        channels = len(self.energies[-1]) if self.is_image else min(len(energies) for energies in self.energies)
        noise_steps = min(noise / step, _MOST_NOISE)
        return noise_steps, noise_steps / math.sqrt(channels) + 1.0 / math.sqrt(max(1, self.count))


def measure_steps(grid: Grid | None, wanted: Array, own: Array) -> StepErrors:
    """Returns how far a layer's result lies from the float values rounded to its grid: clipping and rounding cancel.

    Channels are the last axis and, of results with three axes and more, the second one too.
    """
    exact = np.asarray(wanted, dtype=np.float64)
    target = exact if grid is None else grid.round_values(exact)
    error = np.asarray(own, dtype=np.float64) - target
    axes = [error.ndim - 1] if error.ndim < 3 else [error.ndim - 1, 1]
    squares = error * error
    return StepErrors(
        count=error.size,
        total=float(error.sum()),
        energies=tuple(_sum_along(squares, axis) for axis in axes),
        low=float(target.min()),
        high=float(target.max()),
        is_image=error.ndim > 3,
    )


def add_steps(first: StepErrors | None, second: StepErrors) -> StepErrors:
    """Returns the sums of two samples together; where a channel axis changes its length, the worse one counts."""
    if first is None:
        return second
    return StepErrors(
        count=first.count + second.count,
        total=first.total + second.total,
        energies=tuple(_add_channels(one, other) for one, other in zip(first.energies, second.energies, strict=False)),
        low=min(first.low, second.low),
        high=max(first.high, second.high),
        is_image=first.is_image,
    )


def find_grids(model: Model) -> dict[str, Grid | None]:
    """Returns the grid of each tensor that is rounded, by the names before the Q node and behind the DQ node.

    None stands for a grid that cannot be told, such as one of several scales.
    """
    graph = view_model(read_proto(model, weights=False))
    rounded = {node.output[0]: read_grid(node, graph) for node in graph.nodes if node.op_type == QUANTIZE}
    grids = {node.output[0]: rounded[node.input[0]] for node in graph.nodes if node.op_type == DEQUANTIZE
             and node.input[0] in rounded}  # fmt: skip
    return grids | {node.input[0]: rounded[node.output[0]] for node in graph.nodes if node.op_type == QUANTIZE}


def follow_moves(grids: Mapping[str, Grid | None], graph: Graph) -> dict[str, Grid | None]:
    """Returns the grids with those of the tensors whose values are only moved before they are rounded."""
    found = dict(grids)
    for node in reversed(sort_nodes(graph)):
        if node.op_type in _MOVERS and node.output[0] in found:
            found.setdefault(node.input[0], found[node.output[0]])
    return found


def read_grid(node: Node, graph: Graph) -> Grid | None:
    """Returns the grid of a QuantizeLinear with one scale that the model file holds, None of another."""
    given = [graph.array(name) for name in node.input[1:3] if name]
    if not given or any(value is None or value.size != 1 for value in given):
        return None
    scale, *zeros = (value.reshape(()) for value in given if value is not None)
    zero = zeros[0] if zeros else np.zeros((), np.uint8)
    if zero.dtype.kind not in "iu" or not float(scale) > 0.0:
        return None
    limits = np.iinfo(zero.dtype)
    return Grid(scale=float(scale), zero=int(zero), low=int(limits.min), high=int(limits.max))


def _sum_along(squares: _Floats, axis: int) -> _Floats:
    if squares.ndim == 0:
        return squares.reshape(1)
    others: Sequence[int] = [place for place in range(squares.ndim) if place != axis]
    return np.atleast_1d(np.asarray(squares.sum(axis=tuple(others)), dtype=np.float64))


def _add_channels(first: _Floats, second: _Floats) -> _Floats:
    if first.shape == second.shape:
        return first + second
    return first if first.mean() * len(first) >= second.mean() * len(second) else second
