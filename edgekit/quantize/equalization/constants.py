"""The constants of a graph while their channels are scaled: factors are kept, weights read as they are needed."""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.graph.graph import Graph
from edgekit.model.model import drop_unread, rename_tensors
from edgekit.model.scaling import SUFFIX
from edgekit.model.tensors import Array
from edgekit.quantize.equalization.pairs import EqualizationPair, ScaledConstant
from edgekit.quantize.graph.float_graph import move_weight
from edgekit.quantize.graph.layers import Layer, expand_channel_factors

TINY = float(np.finfo(np.float32).tiny)
# Operators whose weights share a scale where they have none a channel.
_ONE_SCALE_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_Constant = tuple[str, int]
"""A node, and which input of it."""


class ScaledConstants:
    """The constants of a graph while they are scaled, by node and input; all factors are powers of two.

    So factors of several passes may be joined before a weight is multiplied: it gets the same bits.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph.nodes}
        self._scaled: set[_Constant] = set()
        self._along: dict[_Constant, dict[int, Array]] = {}
        self._read: dict[str, tuple[Layer, Array]] = {}

    def scale(self, pair: EqualizationPair, factors: Array) -> None:
        """Multiplies the channels of a pair where they are made, and divides them where they are read."""
        for constant in pair.constants:
            place, its = (constant.node, constant.index), factors[slice(*constant.part)]
            self._scaled.add(place)
            known = self._along.setdefault(place, {})
            known[constant.axis] = known.get(constant.axis, 1.0) * its
        for layer in pair.consumers:
            self._scaled.add((layer.node, 1))
            known_factors = self._read[layer.node][1] if layer.node in self._read else 1.0
            self._read[layer.node] = layer, known_factors * factors

    def find_sharing(self, pair: EqualizationPair, per_channel: Collection[str]) -> list[ScaledConstant]:
        """Returns the weights that make a pair's channels and get one scale together."""
        return [
            each
            for each in pair.constants
            if each.index == 1
            and (node := self._nodes[each.node]).op_type in _ONE_SCALE_OPS
            and node.input[1] not in per_channel
        ]

    def producer_sizes(self, pair: EqualizationPair, per_channel: Collection[str]) -> Array:
        """Returns the largest weight that makes each channel, as a share of the largest of all that share its scale."""
        sizes = np.zeros(pair.channels)
        for constant in self.find_sharing(pair, per_channel):
            value = np.abs(self.value(constant.node, constant.index))
            others = tuple(axis for axis in range(value.ndim) if axis != value.ndim + constant.axis)
            sizes[slice(*constant.part)] = value.max(axis=others) / max(float(value.max()), TINY)
        return sizes

    def consumer_sizes(self, pair: EqualizationPair, per_channel: Collection[str]) -> Array | None:
        """Returns the largest weight that reads each channel, as a share of the largest that shares its scale.

        None where each channel is read by weights with a scale of their own.
        """
        sizes = np.zeros(pair.channels)
        for layer in pair.consumers:
            matrix = np.abs(layer.to_matrix(self.value(layer.node, 1)))
            alone = layer.weight in per_channel
            if alone and layer.groups == pair.channels:
                continue
            matrix = matrix / np.maximum(matrix.max(axis=2, keepdims=True) if alone else matrix.max(), TINY)
            sizes = np.maximum(sizes, matrix.max(axis=1).reshape(pair.channels, -1).max(axis=1))
        return sizes if sizes.any() else None

    def value(self, node: str, index: int) -> Array:
        """Returns a constant, scaled."""
        value = self._graph.weight(self._nodes[node].input[index]).astype(np.float32)
        for axis, factors in self._along.get((node, index), {}).items():
            value *= along(factors.astype(np.float32), axis, value.ndim)
        if index != 1 or node not in self._read:
            return value
        layer, read = self._read[node]
        matrix = layer.to_matrix(value) / expand_channel_factors(layer, read).astype(np.float32)
        return layer.from_matrix(matrix, value.shape)

    def write(self, renamed: Mapping[str, str], work: Path | None) -> onnx.ModelProto:
        """Returns the graph with the scaled constants under names of their own, and tensors renamed.

        Large ones lie in a file of the folder `work`, if one is given, where the graph's own weights lie.

        Raises:
            OSError: the folder cannot be written.
        """
        proto = onnx.ModelProto()
        proto.CopyFrom(self._graph.model)
        if work is None:
            self._append(proto.graph, None)
        else:
            with tempfile.NamedTemporaryFile(dir=work, prefix="scaled-", suffix=".data", delete=False) as out:
                self._append(proto.graph, out)
        rename_tensors(proto.graph, renamed)
        drop_unread(proto.graph)
        return proto

    def _append(self, graph: onnx.GraphProto, out: IO[bytes] | None) -> None:
        for node in graph.node:
            for index in (index for index in range(len(node.input)) if (node.name, index) in self._scaled):
                name = f"{node.input[index]}{SUFFIX}.{node.name}"
                tensor = numpy_helper.from_array(self.value(node.name, index), name)
                if out is not None:
                    move_weight(tensor, self._graph.folder, out)
                graph.initializer.append(tensor)
                node.input[index] = tensor.name


def along(values: Array, axis: int, rank: int) -> Array:
    """Returns a vector in a shape that lies along one axis, counted from the end, of a tensor of this rank."""
    return values.reshape([-1 if place == axis else 1 for place in range(-rank, 0)])
