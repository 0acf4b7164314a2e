"""Layers rounded one after another, each for what reaches it through the layers that were rounded before."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.calibration.fitted import read_fitted
from edgekit.quantize.calibration.moments import block_sizes, patches_per_sample
from edgekit.quantize.graph.layers import Layer, locate_patches
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.rounding.comq import round_comq
from edgekit.quantize.rounding.four_bits import search_scale
from edgekit.quantize.rounding.gptq import (
    Rounded,
    damp_moment,
    join_pieces,
    round_gptq,
    shrink_moment,
    split_pieces,
    weight_scale,
)
from edgekit.quantize.rounding.memory import recall, remember
from edgekit.quantize.rounding.places import QdqLayer, write_layer

Places = Mapping[str, tuple[Layer, QdqLayer]]
"""Layers of the float graph by their node, and where they are in its QDQ form."""


class _Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """Patches [P, groups, inputs] of what a layer reads: in the float graph, and behind what was rounded."""

    true: Array
    rounded: Array


def round_in_order(qdq: onnx.ModelProto, graph: Graph, statistics: Path, places: Places) -> None:
    """Rewrites the parameters of layers, in graph order, so that each makes up for the errors that reach it.

    As Qronos does (S. Zhang et al., arXiv:2505.11695): with X the inputs of a layer in the float graph and Y those
    behind the layers rounded before, W' = W X'Y (Y'Y)^-1 comes nearest to W X, and W' is rounded with the moment Y'Y.
    Here both moments are pulled towards what is known without samples (`shrink_moment`), or W' would learn the samples
    by heart, and weights of 4 bits are rounded by COMQ instead of GPTQ.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    initializers = {tensor.name: tensor for tensor in qdq.graph.initializer}
    key = _digest(qdq, places)
    if known := recall(statistics, key):
        for index, (_, place) in enumerate(places.values()):
            own = {name: known[f"{index}.{name}"] for name in ("integers", "scale", "bias")}
            write_layer(initializers, place, **own)
        return
    samples = list(read_fitted(statistics))
    sizes = block_sizes([layer for layer, _ in places.values()])
    layers = [layer for layer, _ in places.values()]
    true = _gather(graph.model, {layer.source: layer.source for layer in layers}, graph, layers, samples)
    kept: dict[str, Array] = {}
    seen: dict[str, Array] = {}
    for index, (layer, place) in enumerate(places.values()):
        # Layers that read one tensor side by side see it alike: the model runs once for all of them.
        if layer.node not in seen:
            beside = [each for each, other in places.values() if other.source == place.source]
            seen = _gather(qdq, {layer.source: place.source}, graph, beside, samples)
        inputs = _Inputs(true=true[layer.node], rounded=seen[layer.node]) if layer.node in true else None
        own = _round_layer(graph, layer, place, inputs, sizes[layer.node])
        write_layer(initializers, place, **own)
        kept |= {f"{index}.{name}": value for name, value in own.items()}
    remember(statistics, key, kept)


def _digest(qdq: onnx.ModelProto, places: Places) -> str:
    limits = [(node, place.limit) for node, (_, place) in places.items()]
    digest = hashlib.sha256(repr(limits).encode())
    digest.update(qdq.SerializeToString(deterministic=True))
    return digest.hexdigest()[:24]


def _gather(
    proto: onnx.ModelProto,
    names: Mapping[str, str],
    graph: Graph,
    layers: Sequence[Layer],
    samples: Sequence[Tensors],
) -> dict[str, Array]:
    """Returns patches [P, groups, inputs] of what each layer reads, by its node; `names` holds their sources there.

    Layers whose input has no known size are left out, all where there are no samples.
    """
    places = {each.node: locate_patches(graph, each, patches_per_sample(each, len(samples))) for each in layers}
    where = {each.node: (names[each.source], place) for each in layers if (place := places[each.node]) is not None}
    if not where or not samples:
        return {}
    seen = onnx.ModelProto()
    seen.CopyFrom(proto)
    del seen.graph.output[:]
    seen.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in dict.fromkeys(name for name, _ in where.values())
    )
    session = open_graph(seen, graph.folder, keep_float_weights=True)

    def cut(sample: Tensors) -> dict[str, Array]:
        values = session.run(sample)
        return {node: place.cut(values[name]) for node, (name, place) in where.items()}

    rows = [patches for _, patches in map_in_order(cut, samples)]
    sizes = {each.node: (each.groups, each.inputs) for each in layers}
    patches = {node: np.concatenate([row[node] for row in rows]) for node in where}
    return {node: found.astype(np.float64).reshape(-1, *sizes[node]) for node, found in patches.items()}


def _round_layer(graph: Graph, layer: Layer, place: QdqLayer, inputs: _Inputs | None, size: int) -> dict[str, Array]:
    """Returns integers, scale [channels] and bias [channels] of a layer."""
    weight = graph.weight(layer.weight)
    stored = None if layer.bias is None else graph.constant(layer.bias)
    bias = np.zeros(layer.groups * layer.outputs) if stored is None else stored.astype(np.float64)
    matrix, floor = layer.to_matrix(weight).astype(np.float64), place.least_scale(layer, bias)
    if inputs is None:
        inputs = _Inputs(true=np.zeros((1, *matrix.shape[::2])), rounded=np.zeros((1, *matrix.shape[::2])))
    true_mean, mean = inputs.true.mean(axis=0), inputs.rounded.mean(axis=0)
    # The bias takes the mean error, so only what varies is left to err.
    true, seen = (inputs.true, inputs.rounded) if stored is None else (inputs.true - true_mean, inputs.rounded - mean)
    moment, fitted = _fit(matrix, true, seen, size, layer)
    rounded = _round(fitted, moment, layer, place, floor)
    corrected = (matrix * true_mean[:, None]).sum(axis=2) - (rounded.values * mean[:, None]).sum(axis=2)
    return {
        "integers": layer.from_matrix(rounded.integers, weight.shape),
        "scale": rounded.scale.reshape(-1),
        "bias": bias + corrected.reshape(-1),
    }


def _fit(matrix: Array, true: Array, seen: Array, size: int, layer: Layer) -> tuple[Array, Array]:
    """Returns the moment of what is seen, in blocks, and the weights [groups, outputs, inputs] that suit it best."""
    ones, twos = (np.swapaxes(each.reshape(len(each), -1, size), 0, 1) for each in (true, seen))
    moment, both = (np.swapaxes(each, 1, 2) @ twos / len(true) for each in (twos, ones))
    share = len(true) / 4 / (size + len(true) / 4)
    left = shrink_moment(moment, len(true))
    split = split_pieces(matrix, layer.groups, size)
    # W' = W (S + share (X'Y - Y'Y)) S^-1, with S the shrunk Y'Y: without errors before, W' is W.
    change = np.swapaxes(np.linalg.solve(damp_moment(left), np.swapaxes(share * split @ (both - moment), 1, 2)), 1, 2)
    return left, join_pieces(split + change, layer.groups)


def _round(matrix: Array, moment: Array, layer: Layer, place: QdqLayer, floor: Array) -> Rounded:
    size = moment.shape[-1]
    pieces, split = layer.inputs // size, split_pieces(matrix, layer.groups, size)
    if place.has_four_bits:
        energy = np.diagonal(moment, axis1=1, axis2=2).reshape(layer.groups, layer.inputs)
        scale = search_scale(matrix, energy=energy, floor=floor)
        found = round_comq(split, moment, np.repeat(scale, pieces, axis=0), fits_scale=pieces == 1, floor=floor)
        scale = found.scale if pieces == 1 else scale
    else:
        scale = weight_scale(matrix, per_channel=place.per_channel, floor=floor, limit=place.limit)
        found = round_gptq(split, moment, np.repeat(scale, pieces, axis=0), limit=place.limit)
    return Rounded(integers=join_pieces(found.integers, layer.groups), scale=scale)
