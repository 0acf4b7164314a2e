"""Adds nodes that measure activations to the float graph, so ONNX Runtime returns a few numbers per tensor."""

import math
from collections.abc import Collection, Iterator
from copy import deepcopy

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.data.data_check import find_missing
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import find_infinite_tensors
from edgekit.model.model import refill
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import patches_per_sample
from edgekit.quantize.graph import float_graph
from edgekit.quantize.graph.layers import (
    Layer,
    PatchIndices,
    locate_patches,
    read_layers,
    sample_offsets,
    sample_positions,
)

LOWS, HIGHS, SUMS, SCORES = "edgekit.lows", "edgekit.highs", "edgekit.sums", "edgekit.scores"
PICKS, PATCHES = "edgekit.picks", "edgekit.vectors."

PICKED_VALUES = 1 << 18
"""About how many values of a tensor its histogram counts, over all samples.

The share that percentile-99.9 clips at an end is then exact to 0.009 points (95 % of samples drawn at random);
tools/bench/calibrate_ratio.py shows what it costs.
"""

# The values picked from this many tensors are joined into one output; a single output would be in memory twice.
# Chosen by hand.
_PICKED_TOGETHER = 16

# Operators whose output size depends on their data.
_SHAPED_BY_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
TensorAxis = tuple[str, int | None]
"""A tensor, and its channel axis or None: two layers may read one tensor with channels on different axes."""
# Operators that can turn finite values into NaN.
_NAN_OPS = frozenset(
    {"Div", "Sqrt", "Log", "Pow", "Reciprocal", "Acos", "Asin", "Atanh", "Acosh", "BatchNormalization"}
)


class AugmentedGraph(msgspec.Struct, frozen=True, kw_only=True):
    """A graph that measures its activations, and which tensors the entries of its added outputs belong to, in order.

    `extremes` lists all measured tensors with their channel axis. `lows` and `highs` are the tensors in the vectors of
    minima and maxima, with the number of entries of each; they omit `bounds`, which follow from the operator alone,
    such as the 0 of a Relu. `aliases` maps a tensor before a Relu or Clip to the one after it. `scores` are the tensors
    before a Softmax whose lowest unmasked value is measured too. `picks` are the tensors in the vectors of picked
    values, with the number of values. `patches` says how to read the input patches of layers from the output that is
    named PATCHES and the first layer's node: several layers, such as queries, keys and values, may share patches.
    `channel_axes` holds the channel axis of each layer's input, by node name, `factors` the tensor and the axis whose
    channels a constant multiplies, by the constant.
    """

    proto: onnx.ModelProto
    extremes: tuple[TensorAxis, ...]
    channel_axes: dict[str, int | None]
    factors: dict[str, TensorAxis]
    lows: tuple[tuple[TensorAxis, int], ...]
    highs: tuple[tuple[TensorAxis, int], ...]
    scores: tuple[float_graph.AttentionScores, ...]
    picks: tuple[tuple[str, int], ...]
    patches: tuple[tuple[tuple[Layer, ...], PatchIndices], ...]
    bounds: dict[str, tuple[float | None, float | None]]
    aliases: dict[str, str]
    patch_samples: int

    @property
    def output_bytes(self) -> int:
        """About how many bytes of picked values and patches one sample gives."""
        layers = [layers[0] for layers, _ in self.patches]
        patches = (each.groups * each.inputs * patches_per_sample(each, self.patch_samples) for each in layers)
        return 4 * (sum(count for _, count in self.picks) + sum(patches))


def augment_graph(
    graph: Graph, kept: Collection[str] = (), *, picked: int = 0, patch_samples: int = 0
) -> AugmentedGraph:
    """Returns the graph with the minimum and maximum of each float activation, and the tensors `kept`, as outputs.

    Also outputs are `picked` values of each activation, at fixed positions, and, with `patch_samples`, patches of the
    input of each layer with weights: as many as one of so many samples should contribute.
    """
    aliases, layers, after = float_graph.folded_activations(graph), read_layers(graph), set[str]()
    # Tensors of unknown size after an operator with data-dependent size may be empty.
    for node in graph.nodes:
        if node.op_type in _SHAPED_BY_DATA or not after.isdisjoint(node.input):
            after.update(node.output)
    unsized = {name for name in after if graph.static_shape(name) is None}
    unsure = {*aliases, *unsized, *find_infinite_tensors(graph), *find_missing(graph)}
    names = [name for name in float_graph.float_activations(graph) if name not in unsure and 0 not in graph.dims(name)]
    bounds = {name: float_graph.known_bounds(graph, graph.producers[name]) for name in names if name in graph.producers}
    factors = dict(_find_factors(graph))
    # The channel axes of each tensor that its layers and factors use.
    axes = dict[str, dict[int | None, None]]()
    for name, axis in (*((layer.source, layer.channel_axis(graph)) for layer in layers), *factors.values()):
        axes.setdefault(name, {})[axis] = None
    extremes = [(name, axis) for name in names for axis in axes.get(name, (None,))]
    lows, highs = ([each for each in extremes if bounds.get(each[0], (None, None))[end] is None] for end in (0, 1))
    sums = tuple(name for name in names if name in graph.producers and _may_make_nan(graph, graph.producers[name]))
    measured = {name for name, _ in lows if graph.dims(name)}
    scores = [each for each in float_graph.find_attention_scores(graph) if each.tensor in measured]
    builder = _Builder(graph)
    builder.proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted({*kept} - graph.outputs))
    lowest = [builder.lowest_score(each) for each in scores]
    builder.concat(LOWS, [builder.reduce("ReduceMin", *each) for each in lows])
    builder.concat(HIGHS, [builder.reduce("ReduceMax", *each) for each in highs])
    builder.concat(SCORES, lowest)
    # Sums reveal NaN, which ONNX Runtime's minimum and maximum skip.
    builder.concat(SUMS, [builder.reduce("ReduceSum", name) for name in sums])
    picks = {name: min(picked, _count_pickable(graph, name)) for name in names}
    picks = {name: count for name, count in picks.items() if count}
    for output, part in pick_outputs(len(picks)):
        builder.concat(output, [builder.pick(name, count) for name, count in list(picks.items())[part]])
    read = [layer for layer in layers if graph.is_float(layer.source) and layer.source not in unsized]
    patches = tuple(builder.patches(read, patch_samples)) if patch_samples else ()
    builder.measure_early()
    return AugmentedGraph(
        extremes=tuple(extremes),
        channel_axes={layer.node: layer.channel_axis(graph) for layer in layers},
        factors={name: each for name, each in factors.items() if each in extremes},
        lows=tuple((each, _count_entries(graph, *each)) for each in lows),
        highs=tuple((each, _count_entries(graph, *each)) for each in highs),
        scores=tuple(scores),
        picks=tuple(picks.items()),
        patches=patches,
        bounds=bounds,
        aliases=aliases,
        patch_samples=patch_samples,
        proto=builder.proto,
    )


def pick_outputs(tensors: int) -> Iterator[tuple[str, slice]]:
    """Yields the names of the outputs with the picked values of several tensors, and the tensors in each."""
    for start in range(0, tensors, _PICKED_TOGETHER):
        yield f"{PICKS}.{start}", slice(start, min(start + _PICKED_TOGETHER, tensors))


def picked_values(samples: int) -> int:
    """Returns how many values of a tensor each of `samples` samples adds to its histogram."""
    return int(np.clip(PICKED_VALUES // max(1, samples), 256, 8192))


def _may_make_nan(graph: Graph, node: Node) -> bool:
    """Returns True if a node may turn finite values into NaN: not a Div by finite constants other than 0."""
    divisor = graph.constant(node.input[1]) if node.op_type == "Div" else None
    return node.op_type in _NAN_OPS and (divisor is None or not (divisor.all() and np.isfinite(divisor).all()))


def _find_factors(graph: Graph) -> Iterator[tuple[str, TensorAxis]]:
    """Yields each constant with one number for each channel that a Mul multiplies, with the tensor and its axis."""
    for node in graph.nodes:
        for name, factor in (node.input, node.input[::-1]) if node.op_type == "Mul" else ():
            shape, numbers = graph.dims(name), graph.constant(factor)
            if numbers is not None and name not in graph.constants and len(graph.readers(factor)) == 1:
                axes = [axis for axis, size in enumerate(numbers.shape, len(shape) - numbers.ndim) if size > 1]
                if len(axes) == 1 and axes[0] >= 0 and shape[axes[0]] == numbers.size:
                    yield factor, (name, axes[0])


def _count_entries(graph: Graph, name: str, axis: int | None) -> int:
    axis = 1 if _is_image(graph, name, axis) else axis
    return 1 if axis is None else graph.dims(name)[axis] or 1


def _count_pickable(graph: Graph, name: str) -> int:
    """Returns how many values there are to pick from; with an unknown batch size, those of the first element."""
    first, *rest = graph.dims(name) or (None,)
    known = [dim for dim in (1 if first is None else first, *rest) if dim is not None]
    return math.prod(known) if rest and len(known) == len(rest) + 1 else 0


def _is_image(graph: Graph, name: str, axis: int | None) -> bool:
    """Returns True for one image with a known number of channels: its extremes are computed plane by plane."""
    shape = graph.dims(name)
    return len(shape) == 4 and shape[0] == 1 and shape[1] is not None and axis in {None, 1}


class _Builder:
    """Adds measuring nodes to a copy of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.proto = deepcopy(graph.model)
        self._graph = graph
        self._count = 0
        self._stored: set[str] = set()
        self._rows: dict[tuple[str, str], str] = {}
        self._constant("edgekit.flat", np.array([-1]))

    def reduce(self, op: str, name: str, axis: int | None = None) -> str:
        """Adds a reduction to one value, or to one value for each index of an axis, or for each plane of an image."""
        rank = len(self._graph.dims(name))
        if _is_image(self._graph, name, axis) and op != "ReduceSum":
            return self._flatten(self._reduce_planes(op, name))
        source = self._reduce_planes(op, name) if rank == 4 and axis in {None, 1} else name
        others = None if axis is None else [at for at in range(rank) if at != axis]
        source = source if others else self._rows.get((op, source), source)
        reduced = self._reduce_axes(op, source, others, keepdims=0)
        return self._flatten(reduced) if axis is None else reduced

    def lowest_score(self, scores: float_graph.AttentionScores) -> str:
        """Adds the lowest value before a Softmax that is not masked; fully masked rows are ignored.

        The extremes of rows are reused: those of the whole tensor follow from them.
        """
        last = [len(self._graph.dims(scores.tensor)) - 1]
        lowest, highest = (
            self._rows.setdefault((op, scores.tensor), self._reduce_axes(op, scores.tensor, last, keepdims=1))
            for op in ("ReduceMin", "ReduceMax")
        )
        least = self._node("Sub", [highest, self._number(scores.margin)])
        if scores.may_hide_rows:
            seen = self._node("Greater", [highest, self._number(float_graph.MASK_VALUE / 10)])
            least = self._node("Where", [seen, least, self._number(0.0)])
        return self._flatten(self._node("ReduceMin", [self._node("Max", [lowest, least])], keepdims=0))

    def pick(self, name: str, count: int) -> str:
        """Adds values of a tensor at fixed positions."""
        size = _count_pickable(self._graph, name)
        positions = self._constant(f"edgekit.positions.{size}.{count}", sample_positions(size, count))
        # ONNX Runtime's Gather would call memcpy for each single value; GatherElements assigns it.
        return self._node("GatherElements", [self._flatten(name), positions], axis=0)

    def patches(self, layers: Collection[Layer], samples: int) -> Iterator[tuple[tuple[Layer, ...], PatchIndices]]:
        """Adds outputs with input patches of layers with known sizes; yields the layers and the patches' positions."""
        found = [(layer, locate_patches(self._graph, layer, patches_per_sample(layer, samples))) for layer in layers]
        by_key: dict[object, list[tuple[Layer, PatchIndices]]] = {}
        for layer, where in found:
            if where is not None:
                by_key.setdefault(where.key(layer), []).append((layer, where))
        for (layer, where), *others in by_key.values():
            name = self._gather_open(layer.source, where.open_rows) if where.open_rows else layer.source
            for place, (axis, indices) in enumerate(where.gathers):
                stored = self._constant(f"{layer.node}.edgekit.{place}", indices)
                name = self._node("Gather", [name, stored], axis=axis)
                if where.kernel and not place:
                    name = self._node("Transpose", [name], perm=[0, *range(2, 2 + len(where.kernel)), 1])
            self.proto.graph.node.append(helper.make_node("Identity", [name], [PATCHES + layer.node]))
            self.proto.graph.output.append(onnx.ValueInfoProto(name=PATCHES + layer.node))
            yield (layer, *(other for other, _ in others)), where

    def _gather_open(self, name: str, count: int) -> str:
        """Adds `count` rows of a tensor with a varying number of rows, picked as in `sample_positions`."""
        axis, double = len(self._graph.dims(name)) - 2, onnx.TensorProto.DOUBLE
        shape = self._node("Shape", [name])
        rows = self._node("Gather", [shape, self._constant(f"edgekit.axes.{axis}", np.array([axis]))], axis=0)
        taken = self._node("Min", [rows, self._constant(f"edgekit.rows.{count}", np.array([count]))])
        parts = self._store(f"edgekit.parts.{count}", sample_offsets(count))
        parts = self._node("Slice", [parts, self._constant("edgekit.axes.0", np.array([0])), taken])
        sizes = [self._node("Cast", [each], to=double) for each in (rows, taken)]
        places = self._node("Mul", [parts, self._node("Div", sizes)])
        places = self._node("Cast", [places], to=onnx.TensorProto.INT64)
        last = self._node("Sub", [rows, self._constant("edgekit.rows.1", np.array([1]))])
        return self._node("Gather", [name, self._node("Min", [places, last])], axis=axis)

    def concat(self, name: str, parts: list[str]) -> None:
        """Adds an output of concatenated vectors, if there are any."""
        if parts:
            self.proto.graph.node.append(helper.make_node("Concat", parts, [name], axis=0))
            self.proto.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None]))

    def measure_early(self) -> None:
        """Moves each measuring node right after the node that it measures, so that memory is freed early."""
        own, places, order = len(self._graph.proto.node), dict[str, int](), list[tuple[int, int]]()
        for index, node in enumerate(self.proto.graph.node):
            place = index if index < own else max((places.get(name, -1) for name in node.input), default=-1)
            places.update(dict.fromkeys(node.output, place))
            order.append((place, index))
        refill(self.proto.graph.node, [self.proto.graph.node[index] for _, index in sorted(order)])

    def _reduce_planes(self, op: str, name: str) -> str:
        # A pool runs in ONNX Runtime's blocked layout, NCHWc, while a reduction would first convert the whole tensor to
        # NCHW. There is no pooling operator for minima.
        name = self._rows.get((op, name), name)
        if op == "ReduceMax":
            return self._node("GlobalMaxPool", [name])
        return self._reduce_axes(op, name, [2, 3], keepdims=1)

    def _reduce_axes(self, op: str, name: str, axes: list[int] | None, *, keepdims: int) -> str:
        if axes is None:
            return self._node(op, [name], keepdims=keepdims)
        # Axes became an input of ReduceMin and ReduceMax with opset 18, of ReduceSum with 13.
        if self._graph.opset < 18 and op != "ReduceSum":
            return self._node(op, [name], keepdims=keepdims, axes=axes)
        stored = self._constant(f"edgekit.axes.{'.'.join(map(str, axes))}", np.array(axes))
        return self._node(op, [name, stored], keepdims=keepdims)

    def _flatten(self, name: str) -> str:
        return self._node("Reshape", [name, "edgekit.flat"])

    def _node(self, op: str, inputs: list[str], **attributes: int | list[int]) -> str:
        self._count += 1
        output = f"edgekit.{self._count}"
        node = helper.make_node(op, inputs, [output])
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.proto.graph.node.append(node)
        return output

    def _number(self, value: float) -> str:
        return self._store(f"edgekit.number.{value}", np.array(value, np.float32))

    def _constant(self, name: str, value: Array) -> str:
        return self._store(name, value.astype(np.int64))

    def _store(self, name: str, value: Array) -> str:
        if name not in self._stored:
            self._stored.add(name)
            self.proto.graph.initializer.append(numpy_helper.from_array(value, name))
        return name
