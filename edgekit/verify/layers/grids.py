"""The quantization grids (scale, zero point, limits) to which the results of a quantized model are rounded.

A region is the set of nodes between a layer's result and the tensors given as its inputs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Literal

import msgspec
import numpy as np
from onnx import TensorProto

from edgekit.graph.constants import MOVES
from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array
from edgekit.verify.layers.matching import DEQUANTIZE, QUANTIZE, MatchedTensor, sort_nodes, walk_back
from edgekit.verify.metrics.tensor_metrics import Floats

# The steps of an 8-bit grid. 16-bit grids are measured in 8-bit steps too, because 8-bit weights cost more than the
# steps of a 16-bit grid.
_STEPS = 255.0
_MOVERS = MOVES | {"Identity"}


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

    def round_values(self, values: Array) -> Floats:
        """Returns the values after QuantizeLinear and DequantizeLinear."""
        # In place, here and below: to get memory for a large tensor takes longer than to compute one.
        steps = values.astype(np.float64)
        steps /= self.scale
        # rint rounds halves to even, as QuantizeLinear does (ONNX operator specification).
        np.rint(steps, out=steps)
        steps += self.zero
        steps.clip(self.low, self.high, out=steps)
        steps -= self.zero
        steps *= self.scale
        return steps


class StepErrors(msgspec.Struct, frozen=True, kw_only=True):
    """How far a result is from its expected values: sums over the elements, in the result's own unit.

    `energies` holds the sums of squares per channel, once for each axis that may hold the channels. `low` and `high`
    are the range of the expected values. For an image the last of the axes is that of the channels.
    """

    count: int
    total: float
    energies: tuple[Floats, ...]
    low: float
    high: float
    is_image: bool = False

    def find_step(self, grid: Grid | None, least: float = 0.0) -> float:
        """Returns the size of a step: that of the grid or, without one, a 255th of the range of the values."""
        return max(least, grid.step if grid is not None else (self.high - self.low) / _STEPS)

    def measure_channels(self, step: float) -> tuple[float, float]:
        """Returns the root of the mean square, in steps, of the worst channel and of the middle one."""
        return max((float(roots.max()), float(np.median(roots))) for roots in self._find_roots(step))

    def expect_rounding(self, step: float, noise: Floats, sigmas: float) -> tuple[float, float]:
        """Returns the errors, in steps, that rounded weights explain: that of one channel, and that of the mean of all.

        `noise` is the independent error that the rounded weights add: one number for each channel, or one for all.
        Rounding explains up to `sigmas` times the noise of a channel; the rest of the channel's error is its excess.
        The first result is the worst channel's error without the largest excess, divided by `sigmas`. The error of the
        mean of n rounded values is smaller than that of a single value by the root of n.
        """
        middle = math.sqrt(float(np.square(noise).mean())) / step
        excess = max(
            float((roots - sigmas * (noise / step if noise.size == roots.size else middle)).max())
            for roots in self._find_roots(step)
        )
        channels = len(self.energies[-1]) if self.is_image else min(len(energies) for energies in self.energies)
        of_channel = (self.measure_channels(step)[0] - excess) / sigmas
        return of_channel, middle / math.sqrt(channels) + 1.0 / math.sqrt(max(1, self.count))

    def _find_roots(self, step: float) -> tuple[Floats, ...]:
        return tuple(np.sqrt(energies * len(energies) / max(1, self.count)) / step for energies in self.energies)


def measure_steps(grid: Grid | None, wanted: Array, own: Array) -> StepErrors:
    """Returns how far a layer's result is from the float values rounded to its grid: clipping and rounding cancel out.

    Channels are the last axis and, for results of three or more axes, the second one too.
    """
    error = wanted.astype(np.float64) if grid is None else grid.round_values(wanted)
    low, high = float(error.min()), float(error.max())
    np.subtract(own, error, out=error)
    total, squares = float(error.sum()), np.square(error, out=error)
    axes = [error.ndim - 1] if error.ndim < 3 else [error.ndim - 1, 1]
    places = range(error.ndim)
    return StepErrors(
        count=error.size,
        total=total,
        energies=tuple(
            np.atleast_1d(squares.sum(axis=tuple(place for place in places if place != axis))) for axis in axes
        ),
        low=low,
        high=high,
        is_image=error.ndim > 3,
    )


def add_steps(found: Iterable[StepErrors | None]) -> StepErrors | None:
    """Returns the sums over all samples; if a channel axis changes its length, the worse sample counts."""
    if not (known := [steps for steps in found if steps is not None]):
        return None

    def add(one: Floats, other: Floats) -> Floats:
        return one + other if one.shape == other.shape else max(one, other, key=np.sum)

    return StepErrors(
        count=sum(steps.count for steps in known),
        total=sum(steps.total for steps in known),
        energies=tuple(reduce(add, axis) for axis in zip(*(steps.energies for steps in known), strict=False)),
        low=min(steps.low for steps in known),
        high=max(steps.high for steps in known),
        is_image=known[0].is_image,
    )


def find_grids(graph: Graph) -> tuple[dict[str, Grid | None], dict[str, Grid | None]]:
    """Returns the grids of the tensors after a DQ, and those of all tensors that are rounded later.

    A tensor is rounded later if a Q reads it, or an operator that only moves its elements before a Q. A QLinear
    operator reads integers: then there is no DQ. None stands for an unknown grid, such as one with several scales.
    """
    rounded = {node.output[0]: read_grid(node, graph) for node in graph.nodes if node.op_type == QUANTIZE}
    later = {node.input[0]: rounded[node.output[0]] for node in graph.nodes if node.op_type == QUANTIZE}
    for node in reversed(sort_nodes(graph)):
        if node.op_type in _MOVERS and node.output[0] in later:
            later.setdefault(node.input[0], later[node.output[0]])
    after = (node for node in graph.nodes if node.op_type == DEQUANTIZE and node.input[0] in rounded)
    return {node.output[0]: rounded[node.input[0]] for node in after}, later


def read_grid(node: Node, graph: Graph) -> Grid | None:
    """Returns the grid of a QuantizeLinear with a single scale stored in the model file, else None."""
    given = [graph.array(name) for name in node.input[1:3] if name]
    if not given or any(value is None or value.size != 1 for value in given):
        return None
    scale, *zeros = (value.reshape(()) for value in given if value is not None)
    zero = zeros[0] if zeros else np.zeros((), np.uint8)
    if zero.dtype.kind not in "iu" or not float(scale) > 0.0:
        return None
    limits = np.iinfo(zero.dtype)
    return Grid(scale=float(scale), zero=int(zero), low=int(limits.min), high=int(limits.max))


Arithmetic = Literal["float", "half", "int8", "int4"]
"""The coarsest numbers that a result is computed with: float32 and wider, 16 bits, 8 bits, fewer."""

# The error as a share of a value, and the smallest normal number: smaller numbers are as far apart as there, or are
# taken for zero.
_ROUNDING: Mapping[Arithmetic, tuple[float, float]] = {"float": (2.0**-20, 2.0**-126), "half": (2.0**-8, 2.0**-14)}


def allow_rounding(arithmetic: Arithmetic, reach: float) -> float:
    """Returns the error that rounding may cause in a result whose inputs have values up to `reach`, which may cancel.

    Float32 has 24 bits and half precision 11 (IEEE 754): four and three bits are added for sums over many terms.
    Integers have a grid, whose step is allowed instead.
    """
    share, normal = _ROUNDING.get(arithmetic, (0.0, 0.0))
    return share * max(reach, normal)


# From fine to coarse: the coarser of two models decides how large rounding errors may be.
_ORDER: Sequence[Arithmetic] = ("float", "half", "int8", "int4")
_INTEGER_OPS = ("QLinear", "ConvInteger", "MatMulInteger", "DynamicQuantize", "QGemm", "QAttention", "QOrdered")
_INTEGERS_ONLY = ("QLinear", "QGemm", "QAttention", "QOrdered")
_HALF = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
_FOUR_BITS = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})
# Large constants of float layers may be stored as bytes, followed by a Cast and a factor.
_BYTES = frozenset({TensorProto.INT8, TensorProto.UINT8})
# Operators whose result may change abruptly with a small change of input, or is random.
_JUMPING = frozenset({
    "ArgMax", "ArgMin", "Ceil", "Equal", "Floor", "GatherND", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod",
    "NonMaxSuppression", "NonZero", "OneHot", "Round", "ScatterND", "Sign", "TopK", "Unique", "Where", "RandomNormal",
    "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial",
})  # fmt: skip


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that compute a tensor from given tensors.

    `reads` are the given tensors, by their names in the first model. `roundings` counts the Q nodes before the tensor's
    own, `results` names what the nodes compute.

    `jumps` means that a small change of an input may change the result abruptly: ArgMax may choose another index, and
    an operator on integers knows no values between them. Operators that read only the model's own inputs do not count,
    because these inputs are the same in both models.
    """

    arithmetic: Arithmetic = "float"
    reads: tuple[str, ...] = ()
    roundings: int = 0
    jumps: bool = False
    results: tuple[str, ...] = ()


def find_regions(a: Graph, b: Graph, matched: Sequence[MatchedTensor]) -> dict[str, Region]:
    """Returns the region in `b` of each matched tensor, by its name in `a`, in the coarser arithmetic of both."""
    first = _find_regions(a, {item.tensor: frozenset({item.in_a}) for item in matched})
    second = _find_regions(b, {item.tensor: item.copies_in_b for item in matched})
    return {
        name: msgspec.structs.replace(
            region,
            arithmetic=max(region.arithmetic, first[name].arithmetic, key=_ORDER.index),
            jumps=region.jumps or first[name].jumps,
        )
        for name, region in second.items()
    }


def _find_regions(graph: Graph, ends: Mapping[str, frozenset[str]]) -> dict[str, Region]:
    types = {name: tensor.data_type for name, tensor in graph.constants.items()}
    given = {copy: name for name, copies in ends.items() for copy in copies}
    is_half = (
        not _HALF.isdisjoint(types.values())
        or any(graph.values[name].dtype in {"float16", "bfloat16"} for name in graph.inputs)
        or any(node.integer("to", 0) in _HALF for node in graph.nodes if node.op_type == "Cast")
    )
    regions, stops = dict[str, Region](), frozenset(given)
    for tensor, copies in ends.items():
        made, met = walk_back(graph, copies, stops)
        nodes = list(dict.fromkeys(graph.producers[name] for name in sorted(made)))
        ops = [node.op_type for node in nodes]
        moved = {node.op_type for node in nodes if not any(node.input) or not (made | met).isdisjoint(node.input)}
        stored = {types.get(name, 0) for node in nodes for name in node.input if name not in graph.producers}
        own = {graph.producers[name].input[0] for name in made & copies if graph.producers[name].op_type == DEQUANTIZE}
        arithmetic: Arithmetic = "half" if is_half else "float"
        if "MatMulNBits" in ops or not stored.isdisjoint(_FOUR_BITS):
            arithmetic = "int4"
        elif DEQUANTIZE in ops or any(op.startswith(_INTEGER_OPS) for op in ops) or not stored.isdisjoint(_BYTES):
            arithmetic = "int8"
        regions[tensor] = Region(
            arithmetic=arithmetic,
            reads=tuple(sorted({given[name] for name in met})),
            roundings=sum(
                node.op_type.startswith("DynamicQuantize") or (node.op_type == QUANTIZE and node.output[0] not in own)
                for node in nodes
            ),
            jumps=not _JUMPING.isdisjoint(moved) or any(_reads_integers(node, graph) for node in nodes),
            # An output that nobody reads may have no name, such as all steps of a GRU beside the last one.
            results=tuple(next(filter(None, node.output)) for node in nodes),
        )
    return regions


def _reads_integers(node: Node, graph: Graph) -> bool:
    """Returns True for an operator on integers, and for a DQ node after a node that is no Q node."""
    before = graph.producers.get(node.input[0]) if node.op_type == DEQUANTIZE else None
    return node.op_type.startswith(_INTEGERS_ONLY) or (before is not None and before.op_type != QUANTIZE)
