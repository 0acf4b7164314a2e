"""Transformers that compute the same with other weights: channels scaled as AWQ does, streams turned as QuaRot does."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import open_moments


class _Norm(msgspec.Struct, frozen=True, kw_only=True):
    """A normalisation: what it reads, its gain and shift, and the weights of the layers that read it."""

    source: str
    gain: str
    shift: str
    readers: tuple[Node, ...]


class _Weights:
    """The constants of a model while they are changed."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._stored = {tensor.name: tensor for tensor in proto.graph.initializer}

    def get(self, name: str) -> Array:
        return numpy_helper.to_array(self._stored[name]).astype(np.float64)

    def set(self, name: str, value: Array) -> None:
        self._stored[name].CopyFrom(numpy_helper.from_array(np.asarray(value, np.float32), name))


def scale_streams(proto: onnx.ModelProto, graph: Graph, statistics: Path, exponent: float) -> int:
    """Divides gain and shift of normalisations by (E x^2)^(exponent / 2), which their readers' weights take back.

    Returns how many normalisations there are.
    """
    weights, count = _Weights(proto), 0
    with open_moments(statistics / "moments.npz") as read:
        for norm in _find_norms(graph):
            moments = read(norm.readers[0].name)
            if moments is None:
                continue
            energy = moments.energy().reshape(-1)
            factors = np.maximum(energy, 1e-6 * energy.max()) ** (exponent / 2)
            factors /= np.exp(np.log(factors).mean())
            weights.set(norm.gain, weights.get(norm.gain) / factors)
            weights.set(norm.shift, weights.get(norm.shift) / factors)
            for node in norm.readers:
                weights.set(node.input[1], weights.get(node.input[1]) * factors[:, None])
            count += 1
    return count


def rotate_streams(proto: onnx.ModelProto, graph: Graph) -> int:
    """Turns the stream that all normalisations read; returns how many weights were turned, 0 where there is none."""
    weights, norms = _Weights(proto), list(_find_norms(graph))
    if not norms:
        return 0
    width = len(weights.get(norms[0].gain))
    turn = _turn(width)
    done: set[str] = set()
    for norm in norms:
        gain, shift = weights.get(norm.gain), weights.get(norm.shift)
        for node in norm.readers:
            name = node.input[1]
            bias = _bias_behind(graph, node)
            weights.set(bias, weights.get(bias) + shift @ weights.get(name))
            weights.set(name, turn.T @ (gain[:, None] * weights.get(name)))
            done.add(name)
        weights.set(norm.gain, np.ones(width))
        weights.set(norm.shift, np.zeros(width))
    seen: set[str] = set()
    for norm in norms:
        for name, axis in _writers(graph, norm.source, width, seen):
            value = weights.get(name)
            weights.set(name, np.moveaxis(np.tensordot(value, turn, (axis, 0)), -1, axis))
            done.add(name)
    return len(done)


def _turn(width: int) -> Array:
    """Returns an orthogonal matrix that keeps means, so that layer normalisation and it can change places."""
    rng = np.random.default_rng(0)
    base, _ = np.linalg.qr(np.column_stack([np.ones(width), rng.normal(size=(width, width - 1))]))
    inner, _ = np.linalg.qr(rng.normal(size=(width - 1, width - 1)))
    whole = np.eye(width)
    whole[1:, 1:] = inner
    return np.asarray(base @ whole @ base.T)


def _find_norms(graph: Graph) -> Iterator[_Norm]:
    for node in graph.nodes:
        found = _spelled(graph, node) if node.op_type == "Add" else (*node.input[:3],)
        if found is None or node.op_type not in {"Add", "LayerNormalization"}:
            continue
        readers = [each for reader in graph.readers(node.output[0]) for each in _follow(graph, reader)]
        if readers and all(each.op_type in {"MatMul", "Gemm"} and each.input[1] in graph.constants for each in readers):
            yield _Norm(source=found[0], gain=found[1], shift=found[2], readers=tuple(readers))


def _spelled(graph: Graph, node: Node) -> tuple[str, ...] | None:
    """Returns source, gain and shift of a normalisation that is spelled out and ends with this Add."""
    gained = graph.producers.get(node.input[0])
    if node.input[1] not in graph.constants or gained is None or gained.op_type != "Mul":
        return None
    divided = graph.producers.get(gained.input[0])
    if gained.input[1] not in graph.constants or divided is None or divided.op_type != "Div":
        return None
    return graph.producers[divided.input[0]].input[0], gained.input[1], node.input[1]


def _follow(graph: Graph, node: Node) -> Iterator[Node]:
    """Yields what reads a tensor behind nodes that change its shape or its number of rows alone."""
    if node.op_type not in {"ReduceMean", "Reshape", "Squeeze"}:
        yield node
        return
    for reader in graph.readers(node.output[0]):
        yield from _follow(graph, reader)


def _bias_behind(graph: Graph, node: Node) -> str:
    if node.op_type == "Gemm":
        return node.input[2]
    (reader,) = graph.readers(node.output[0])
    return next(name for name in reader.input if name in graph.constants)


def _writers(graph: Graph, name: str, width: int, seen: set[str]) -> Iterator[tuple[str, int]]:
    """Yields the constants that make a stream, each once, with the axis of its channels."""
    if name in seen:
        return
    seen.add(name)
    if name in graph.constants:
        yield name, len(graph.constants[name].dims) - 1
        return
    node = graph.producers[name]
    if node.op_type == "Add":
        for each in node.input:
            yield from _writers(graph, each, width, seen)
    elif node.op_type in {"MatMul", "Gemm"}:
        yield node.input[1], 1
        if node.op_type == "Gemm":
            yield node.input[2], 0
    elif node.op_type == "Conv":
        yield node.input[1], 0
        if len(node.input) > 2:
            yield node.input[2], 0
    else:
        yield from _writers(graph, node.input[0], width, seen)
