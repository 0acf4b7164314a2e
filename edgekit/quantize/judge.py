"""How near a quantized candidate comes to the float model on samples that were held out from fitting."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import RuntimeRefusal
from edgekit.model import MAX_PROTOBUF_BYTES, count_weight_bytes, save_proto
from edgekit.prepare.float_weights import OPTIMIZER
from edgekit.quantize.columns import FLOOR, are_scores, find_columns
from edgekit.quantize.graph import Graph
from edgekit.quantize.held_out import read_held_out
from edgekit.quantize.islands import boundless_tensors
from edgekit.tensors import Array

_PASSED_THROUGH = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Identity", "Cast"})
_PICKING = frozenset({"ArgMax", "TopK"})
_SQUASHING = frozenset({"Softmax", "LogSoftmax", "Sigmoid"})
_WORST_DB, _BEST_DB = -20.0, 80.0
_FEW = 32
_MOST_PARTS = 8
_PRECISE: Mapping[str, str] = {"session.x64quantprecision": "1"}


class JudgePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor to compare: an output, or what the node named `reader` squashes into one (`reader` is "" for outputs).

    Behind a Softmax errors of the logits vanish or explode with confidence, so what counts are the logits, less their
    mean where only differences count (`centred`). Where they are few, their errors are mostly luck, so what the last
    layer with weights reads is compared too. Of a tensor put together from parts along an axis, such as boxes and
    scores, `part` (axis, start, stop) is one of them: the largest would hide what happens to the others. What an app
    puts through a sigmoid (`is_column`) is compared no farther down than that tells apart.
    """

    tensor: str
    reader: str
    centred: bool
    part: tuple[int, int, int] | None = None
    is_column: bool = False


def judge_points(graph: Graph) -> tuple[JudgePoint, ...]:
    """Returns the float tensors that stand for the outputs of a graph."""
    points: list[JudgePoint] = []
    boundless, columns = boundless_tensors(graph), find_columns(graph)
    for value in graph.proto.graph.output:
        point = msgspec.structs.replace(_find_point(graph, value.name), is_column=value.name in columns)
        if graph.is_float(point.tensor) and point.tensor not in boundless:
            points += _split_point(graph, point)
            points += _find_features(graph, point.tensor)
    return tuple(dict.fromkeys(points))


def judge_candidate(
    qdq: onnx.ModelProto, points: tuple[JudgePoint, ...], statistics: Path, *, keep_float_weights: bool = False
) -> float:
    """Returns the signal-to-noise ratio in dB of a candidate over all held-out samples.

    Of several points it is that of their mean noise. It runs on the CPU provider with 16-bit products kept from
    saturating (`session.x64quantprecision`). With `keep_float_weights` ONNX Runtime may not quantize float weights
    between Q and DQ nodes, as it does by default.

    Raises:
        UsageError: the statistics are gone.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(qdq)
    nodes = {node.name: node for node in proto.graph.node}
    names = {point: nodes[point.reader].input[0] if point.reader else point.tensor for point in points}
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names.values()))
    session = open_graph(proto, statistics / "candidate.onnx", keep_float_weights=keep_float_weights)
    powers = {point: np.zeros(2) for point in points}
    for inputs, expected in read_held_out(statistics):
        found = session.run(inputs)
        for point, name in names.items():
            powers[point] += powers_of(point, expected[point.tensor], found[name])
    return join_ratios([ratio_db(*power) for power in powers.values()])


def join_ratios(ratios: Sequence[float]) -> float:
    """Returns the ratio in dB that stands for several: that of their mean noise, so that the worst counts most."""
    return float(-10 * np.log10(np.mean(10 ** (-np.asarray(ratios) / 10))))


def powers_of(point: JudgePoint, expected: Array, found: Array) -> Array:
    """Returns the power of a tensor of the float model and that of the difference, float64 [2].

    Where the values decide how many there are and quantizing changed that, the difference is infinite.
    """
    if expected.size != found.size:
        return np.array([1.0, np.inf])
    one, two = expected.astype(np.float64), found.astype(np.float64).reshape(expected.shape)
    if point.part is not None:
        axis, start, stop = point.part
        one, two = (np.take(value, range(start, stop), axis) for value in (one, two))
    if point.is_column and are_scores(one):
        one, two = np.maximum(one, FLOOR), np.maximum(two, FLOOR)
    if point.centred:
        one, two = one - one.mean(axis=-1, keepdims=True), two - two.mean(axis=-1, keepdims=True)
    return np.array([(one**2).sum(), ((one - two) ** 2).sum()])


def ratio_db(signal: float, noise: float) -> float:
    """Returns signal over noise in dB, within -20 and 80."""
    if not np.isfinite(noise):
        return _WORST_DB
    tiny = np.finfo(np.float64).tiny
    return float(np.clip(10 * (np.log10(max(signal, tiny)) - np.log10(max(noise, tiny))), _WORST_DB, _BEST_DB))


def open_graph(proto: onnx.ModelProto, path: Path, *, keep_float_weights: bool = False) -> CpuSession:
    """Returns a session for a graph in memory; `path` is used where that is too big for one protobuf."""
    fits = count_weight_bytes(proto) < MAX_PROTOBUF_BYTES // 2
    if not fits:
        save_proto(proto, path)
    source = proto.SerializeToString() if fits else path
    disabled = (OPTIMIZER,) if keep_float_weights else ()
    try:
        return CpuSession(source, SessionSettings(config=dict(_PRECISE), disabled_optimizers=disabled))
    except RuntimeRefusal:
        # ONNX Runtime 1.31 trips over weights that share a zero point when the key is set.
        return CpuSession(source, SessionSettings(disabled_optimizers=disabled))


def has_held_out(statistics: Path) -> bool:
    """Returns True if a calibration held samples out.

    Raises:
        UsageError: the statistics are gone.
    """
    return next(read_held_out(statistics), None) is not None


def _find_point(graph: Graph, output: str) -> JudgePoint:
    point, name = JudgePoint(tensor=output, reader="", centred=False), output
    while name in graph.producers and graph.producers[name].op_type in _PASSED_THROUGH | _PICKING | _SQUASHING:
        node = graph.producers[name]
        name = node.input[0]
        if node.op_type in _SQUASHING:
            return JudgePoint(tensor=name, reader=node.name, centred=node.op_type != "Sigmoid")
        if node.op_type in _PICKING:
            point = JudgePoint(tensor=name, reader=node.name, centred=False)
    return point


def _split_point(graph: Graph, point: JudgePoint) -> list[JudgePoint]:
    found = None if point.centred else _find_parts(graph, point.tensor)
    if found is None:
        return [point]
    axis, ends = found
    return [msgspec.structs.replace(point, part=(axis, *part)) for part in pairwise(ends)]


def _find_parts(graph: Graph, name: str) -> tuple[int, tuple[int, ...]] | None:
    """Returns along which axis a tensor is put together and where its parts begin and end, None if it is of a piece.

    Of what comes from several levels of a network the parts within each level count, if they are the same in all.
    """
    node, shape = graph.producers.get(name), graph.static_shape(name)
    if node is None or shape is None or not node.input:
        return None
    if node.op_type == "Concat":
        return _find_concat_parts(graph, node, len(shape))
    before = graph.static_shape(node.input[0])
    inner = _find_parts(graph, node.input[0]) if node.op_type in _PASSED_THROUGH | {"Sigmoid"} else None
    if inner is None or before is None:
        return None
    axis, ends = inner
    if node.op_type == "Transpose":
        order = next((list(item.ints) for item in node.attribute if item.name == "perm"), list(range(len(shape)))[::-1])
        return order.index(axis), ends
    return inner if before[: axis + 1] == shape[: axis + 1] else None


def _find_concat_parts(graph: Graph, node: onnx.NodeProto, rank: int) -> tuple[int, tuple[int, ...]] | None:
    axis = next(item.i for item in node.attribute if item.name == "axis") % rank
    inner = {_find_parts(graph, name) for name in node.input}
    if len(inner) == 1:
        (parts,) = inner
        if parts is not None and parts[0] != axis:
            return parts
    shapes = [graph.static_shape(name) for name in node.input]
    if len(shapes) > _MOST_PARTS or any(shape is None for shape in shapes):
        return None
    sizes = [shape[axis] for shape in shapes if shape is not None]
    return axis, tuple(int(end) for end in np.cumsum([0, *sizes]))


def _find_features(graph: Graph, name: str) -> list[JudgePoint]:
    """Returns what the layer before a tensor of few values reads, if it is more."""
    while (math.prod(graph.static_shape(name) or (_FEW,)) < _FEW) and name in graph.producers:
        node = graph.producers[name]
        name = node.input[0] if node.input else ""
        if node.op_type in {"Conv", "Gemm", "MatMul"} and graph.is_float(name) and name in graph.producers:
            return [JudgePoint(tensor=name, reader=node.name, centred=False)]
    return []
