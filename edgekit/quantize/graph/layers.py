"""Layers with constant weights as matrices, and the positions of the input patches that they multiply (im2col)."""

import math

import msgspec
import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.spatial import place_windows
from edgekit.model.tensors import Array

_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
LAYER_OPS = _CONVOLUTIONS | {"Gemm", "MatMul"}
"""Operators whose constant weights are rounded with statistics of their inputs."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A Conv, ConvTranspose, Gemm or MatMul: for each group a matrix [outputs, inputs] times a patch of `source`.

    It makes `groups` x `outputs` channels from `groups` x `inputs` values. `bias` is None if there is none. A patch of
    a ConvTranspose (of one group) holds, for a position of the output, the value that each kernel tap reads, or 0.
    """

    node: str
    op: str
    source: str
    weight: str
    bias: str | None
    groups: int
    outputs: int
    inputs: int
    transposed: bool

    def channel_axis(self, graph: Graph) -> int | None:
        """Returns the axis of the source that the weight sums over, None if its size is unknown."""
        shape = graph.dims(self.source)
        axis = 1 if self.op in _CONVOLUTIONS else len(shape) - 1
        return axis if len(shape) > 1 and shape[axis] else None

    def to_matrix(self, weight: Array) -> Array:
        """Returns the weight as float [groups, outputs, inputs]."""
        matrix = weight.swapaxes(0, 1) if self.transposed else weight
        return matrix.reshape(self.groups, self.outputs, self.inputs)

    def from_matrix(self, matrix: Array, shape: tuple[int, ...]) -> Array:
        """Returns a matrix in the shape of the weight."""
        if self.transposed:
            return np.ascontiguousarray(matrix.reshape(shape[1], shape[0], *shape[2:]).swapaxes(0, 1))
        return matrix.reshape(shape)


class PatchIndices(msgspec.Struct, frozen=True, kw_only=True):
    """The positions of patches in a layer's input: the indices to gather along each axis, and their meaning.

    `gathers` holds (axis, indices). For a Conv there are `positions` x `kernel` indices of each spatial axis, and those
    not `inside` [positions, kernel] fall into the padding. After the first of these, channels become the last axis:
    gathering along the last axis copies value by value. From a tensor whose number of rows varies between samples, at
    most `open_rows` rows are gathered, spread over all.
    """

    gathers: tuple[tuple[int, Array], ...]
    open_rows: int = 0
    kernel: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()
    inside: tuple[Array, ...] = ()

    def key(self, layer: Layer) -> tuple[object, ...]:
        """Returns a key that is equal for layers with the same patches."""
        gathers = tuple((axis, indices.tobytes()) for axis, indices in self.gathers)
        inside = tuple(each.tobytes() for each in self.inside)
        return (
            layer.source, layer.groups, layer.inputs, gathers, self.open_rows, self.kernel, self.positions, inside
        )  # fmt: skip

    def cut(self, value: Array) -> Array:
        """Returns the patches, [patches, values], of a whole tensor."""
        if self.open_rows:
            value = np.take(value, sample_positions(value.shape[-2], self.open_rows), -2)
        for place, (axis, indices) in enumerate(self.gathers):
            value = np.take(value, indices, axis)
            value = np.moveaxis(value, 1, -1) if self.kernel and not place else value
        return self.patches(value)

    def patches(self, values: Array) -> Array:
        """Returns gathered values as patches, [patches, values]: im2col at the positions."""
        rank = len(self.kernel)
        if not rank:
            return values.reshape(-1, values.shape[-1])
        pairs = [size for pair in zip(self.positions, self.kernel, strict=True) for size in pair]
        grid = values.reshape(len(values), *pairs, values.shape[-1])
        for axis, inside in enumerate(self.inside):
            if not inside.all():
                shape = [1] * grid.ndim
                shape[1 + 2 * axis : 3 + 2 * axis] = inside.shape
                grid = grid * inside.reshape(shape)
        order = (0, *range(1, 1 + 2 * rank, 2), 1 + 2 * rank, *range(2, 2 + 2 * rank, 2))
        return grid.transpose(order).reshape(-1, values.shape[-1] * math.prod(self.kernel))


def read_layers(graph: Graph) -> tuple[Layer, ...]:
    """Returns the layers whose constant weight no other node reads, in graph order."""
    return tuple(layer for node in graph.nodes if (layer := read_layer(graph, node)) is not None)


def locate_patches(graph: Graph, layer: Layer, count: int) -> PatchIndices | None:
    """Returns the positions of about `count` patches, spread over the layer's input; None if sizes are unknown."""
    shape = graph.dims(layer.source)
    if layer.op not in _CONVOLUTIONS:
        if len(shape) < 2:
            return None
        if shape[-2] is None:
            return PatchIndices(gathers=(), open_rows=count)
        return PatchIndices(gathers=((len(shape) - 2, sample_positions(shape[-2], count)),))
    spatial = tuple(dim for dim in shape[2:] if dim is not None)
    if len(shape) < 3 or len(spatial) < len(shape) - 2:
        return None
    kernel = tuple(graph.constants[layer.weight].dims[2:])
    stride, dilation, begin, _, sizes = place_windows(graph.readers(layer.weight)[0], spatial, kernel)
    gathers: list[tuple[int, Array]] = []
    inside: list[Array] = []
    for axis, size in enumerate(sizes):
        # About the same number of positions along each axis; longer axes compensate for shorter ones.
        positions = sample_positions(size, round(count ** (1 / (len(sizes) - axis))))
        count = max(1, -(-count // len(positions)))
        reach = np.arange(kernel[axis])[None] * dilation[axis]
        if layer.op == "ConvTranspose":
            # A ConvTranspose is a Conv of its input with stride - 1 zeros between neighbours, which are not stored
            # here.
            taps, left = np.divmod(positions[:, None] + begin[axis] - reach, stride[axis])
        else:
            taps, left = positions[:, None] * stride[axis] + reach - begin[axis], 0
        inside.append((taps >= 0) & (taps < spatial[axis]) & (left == 0))
        gathers.append((axis + 1 if axis else 2, np.clip(taps, 0, spatial[axis] - 1).reshape(-1)))
    counts = tuple(map(len, inside))
    return PatchIndices(gathers=tuple(gathers), kernel=kernel, positions=counts, inside=tuple(inside))


def expand_channel_factors(layer: Layer, factors: Array) -> Array:
    """Returns factors of a layer's input channels repeated for each of its inputs, [groups, 1, inputs]."""
    taps = layer.groups * layer.inputs // len(factors)
    return np.repeat(factors, taps).reshape(layer.groups, 1, layer.inputs)


def sample_positions(size: int, count: int) -> Array:
    """Returns `count` of `size` positions, ascending: a random one in each of equal parts, or all if there are fewer.

    The draw is seeded. Every n-th position would instead coincide with the rows of an image.
    """
    parts = sample_offsets(min(count, size))
    return (parts * (size / max(1, len(parts)))).astype(np.int64).clip(0, size - 1)


def sample_offsets(count: int) -> Array:
    """Returns a random position in each of `count` equal parts, in units of a part; seeded."""
    return np.arange(count) + np.random.default_rng(0).random(count)


def read_layer(graph: Graph, node: Node) -> Layer | None:
    """Returns a node as a layer; None if its weight is not constant, has no values, or other nodes read it."""
    if node.op_type not in LAYER_OPS or node.domain not in {"", "ai.onnx"}:
        return None
    weight = graph.constants.get(node.input[1])
    alone = graph.readers(node.input[1]) == (node,) and node.input[1] not in graph.captured | graph.outputs
    if weight is None or not alone or weight.data_type != onnx.TensorProto.FLOAT or node.input[0] in graph.constants:
        return None
    if 0 in weight.dims:
        return None
    numbers = node.attributes
    bias = node.input[2] if node.op_type != "MatMul" and node.has_input(2) else None
    vector = graph.constants.get(bias or "")
    # A bias is a constant with one axis that no other node reads.
    if bias is not None and (vector is None or len(vector.dims) != 1 or len(graph.readers(bias)) != 1):
        return None
    groups, transposed = int(numbers.get("group", 1)), node.op_type != "Conv" and not numbers.get("transB", 0)
    is_product = all(numbers.get(name, 1) == 1 for name in ("alpha", "beta")) and not numbers.get("transA", 0)
    if node.op_type not in _CONVOLUTIONS and (not is_product or len(weight.dims) != 2):
        return None
    has_other_pads = numbers.get("auto_pad", "NOTSET") != "NOTSET" or numbers.get("output_shape")
    if node.op_type == "ConvTranspose" and (groups > 1 or has_other_pads):
        return None
    outputs = weight.dims[1 if transposed else 0]
    return Layer(
        node=node.name, op=node.op_type, source=node.input[0], weight=node.input[1], bias=bias, groups=groups,
        outputs=outputs // groups, inputs=math.prod(weight.dims) // outputs, transposed=transposed,
    )  # fmt: skip
