"""Better integers for the weights of a QDQ graph: rounded with second moments, their mean error put into the bias."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order, single_blas_thread
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import InputMoments, open_moments, scale_moments
from edgekit.quantize.graph.layers import Layer
from edgekit.quantize.rounding.comq import round_comq
from edgekit.quantize.rounding.four_bits import search_scale
from edgekit.quantize.rounding.gptq import (
    LIMIT,
    Rounded,
    add_spread,
    find_still,
    free_still,
    join_pieces,
    refit_weights,
    round_gptq,
    round_nearest,
    shrink_moment,
    split_pieces,
    weight_scale,
)
from edgekit.quantize.rounding.in_order import Places, round_in_order
from edgekit.quantize.rounding.memory import recall, remember
from edgekit.quantize.rounding.places import QdqLayer, find_places, write_layer

Rounding = Literal["nearest", "bias", "gptq", "refit", "comq", "qronos"]
"""How weights are rounded.

nearest: each by itself. bias: the same, and the mean of the error is taken out of the bias (bias correction, M. Nagel
et al., arXiv:1906.04721, section 4.2). gptq: so that the layer's output errs least, then bias. refit: first refitted by
least squares to inputs that carry the noise of their own quantization, then gptq. comq: gptq, but weights of 4 bits by
coordinate descent (`round_comq`). qronos: layer by layer for what reaches each through those before, then as comq
(`round_in_order`).
"""


_ERRORS_AT_ONCE = 1 << 20


def round_qdq_weights(
    qdq: onnx.ModelProto,
    graph: Graph,
    statistics: Path,
    rounding: Rounding,
    factors: Mapping[str, tuple[float, ...]],
    limit: int = LIMIT,
    bits: Mapping[str, int] | None = None,
) -> None:
    """Rewrites weights, their scales and biases of the QDQ form of `graph`; `qdq` is changed.

    `factors` holds by layer those that the channels of its input were multiplied by since the calibration.
    `limit` is the largest magnitude of the integers; the weights that `bits` names get 4 bits.
    What was rounded once is kept in the folder `statistics` for other targets that quantize the same inputs alike.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    few = bits or {}
    if rounding == "nearest" and not few:
        return
    initializers = {tensor.name: tensor for tensor in qdq.graph.initializer}
    places = dict(find_places(qdq.graph, initializers, graph, limit, few))
    if rounding == "nearest":
        for layer, place in places.values():
            if place.has_four_bits:
                write_layer(initializers, place, **_round_plainly(graph, layer, place))
        return
    if rounding == "qronos":
        round_in_order(qdq, graph, statistics, places)
        return
    for place, corrected in _correct_layers(graph, places, statistics, rounding, factors):
        write_layer(initializers, place, **corrected)


def _correct_layers(
    graph: Graph,
    places: Places,
    statistics: Path,
    rounding: Rounding,
    factors: Mapping[str, tuple[float, ...]],
) -> Iterator[tuple[QdqLayer, dict[str, Array]]]:
    """Yields what `_correct_layer` returns for each layer that has moments; layers are corrected side by side."""
    with single_blas_thread(), open_moments(statistics / "moments.npz") as stored:

        def read(layer: Layer) -> InputMoments | None:
            moments = stored(layer.node)
            if moments is None or layer.node not in factors:
                return moments
            return scale_moments(moments, layer, np.asarray(factors[layer.node]))

        def correct(place: tuple[Layer, QdqLayer]) -> dict[str, Array] | None:
            return _correct_layer(graph, *place, read, statistics, rounding)

        for (_, place), corrected in map_in_order(correct, places.values()):
            if corrected is not None:
                yield place, corrected


def _correct_layer(
    graph: Graph,
    layer: Layer,
    place: QdqLayer,
    read: Callable[[Layer], InputMoments | None],
    statistics: Path,
    rounding: Rounding,
) -> dict[str, Array] | None:
    """Returns integers, scale [channels] and corrected bias of a layer, remembered; None where it has no moments."""
    weight = graph.weight(layer.weight)
    stored = None if layer.bias is None else graph.constant(layer.bias)
    bias = np.zeros(layer.groups * layer.outputs) if stored is None else stored.astype(np.float64)
    matrix, floor = layer.to_matrix(weight), place.least_scale(layer, bias)
    largest = weight_scale(matrix, per_channel=place.per_channel, floor=floor, limit=place.limit)
    step = place.step.hex() if rounding == "refit" else ""
    key = hashlib.sha256(f"{layer.node}:{rounding}:{place.per_channel}:{step};".encode())
    for part in (largest, np.ascontiguousarray(weight), bias):
        key.update(part.tobytes())
    if known := recall(statistics, key.hexdigest()[:24]):
        return known
    moments = read(layer)
    if moments is None:
        return None
    find_scale = _scale_finder(place, floor, moments)
    if rounding == "bias":
        rounded = round_nearest(matrix, find_scale(matrix), place.limit)
    else:
        rounded = _round_with_moments(layer, matrix, moments, place, find_scale, rounding)
    corrected = {
        "integers": layer.from_matrix(rounded.integers, weight.shape),
        "scale": rounded.scale.reshape(-1),
        "bias": bias + _mean_error(matrix, rounded, moments.mean).reshape(-1),
    }
    remember(statistics, key.hexdigest()[:24], corrected)
    return corrected


def _mean_error(matrix: Array, rounded: Rounded, mean: Array) -> Array:
    """Returns E[W x] - E[Wq x], the error [groups, outputs] that every output of a channel has."""
    errors, rows = np.empty(matrix.shape[:2]), max(1, _ERRORS_AT_ONCE // matrix.shape[2])
    # Part by part: in double precision all of a large layer takes twice its memory for each step.
    for start in range(0, matrix.shape[1], rows):
        part = slice(start, start + rows)
        stored = Rounded(integers=rounded.integers[:, part], scale=rounded.scale[:, part])
        errors[:, part] = ((matrix[:, part].astype(np.float64) - stored.values) * mean[:, None]).sum(axis=2)
    return errors


def _round_plainly(graph: Graph, layer: Layer, place: QdqLayer) -> dict[str, Array]:
    """Returns integers of 4 bits, scale [channels] and bias of a layer, each weight rounded by itself."""
    weight = graph.weight(layer.weight)
    stored = None if layer.bias is None else graph.constant(layer.bias)
    bias = np.zeros(layer.groups * layer.outputs) if stored is None else stored.astype(np.float64)
    matrix = layer.to_matrix(weight)
    scale = search_scale(matrix, energy=np.ones((layer.groups, layer.inputs)), floor=place.least_scale(layer, bias))
    integers = round_nearest(matrix, scale, place.limit).integers
    return {"integers": layer.from_matrix(integers, weight.shape), "scale": scale.reshape(-1), "bias": bias}


def _scale_finder(place: QdqLayer, floor: Array, moments: InputMoments) -> Callable[[Array], Array]:
    if not place.has_four_bits:
        return partial(weight_scale, per_channel=place.per_channel, floor=floor, limit=place.limit)
    return partial(search_scale, energy=moments.energy(), floor=floor)


def _round_with_moments(
    layer: Layer,
    matrix: Array,
    moments: InputMoments,
    place: QdqLayer,
    find_scale: Callable[[Array], Array],
    rounding: Rounding,
) -> Rounded:
    refit = rounding == "refit"
    # The bias takes the mean error, so only what varies is left to err.
    blocks, size = moments.second_moment(centred=layer.bias is not None), moments.size
    spread = moments.spread.reshape(-1, size)
    still = find_still(blocks, spread)
    blocks = free_still(add_spread(shrink_moment(blocks, moments.count), spread, moments.count), still)
    pieces = layer.inputs // size
    split = split_pieces(matrix, layer.groups, size)
    noise = place.step**2 / 12 if refit else 0.0
    if refit:
        # Least squares would take the weights of inputs that never fired for nothing.
        split = np.where(still[:, None], split, refit_weights(split, blocks, noise))
    scale = find_scale(join_pieces(split, layer.groups))
    if rounding == "comq" and place.has_four_bits:
        found = round_comq(split, blocks, np.repeat(scale, pieces, axis=0), fits_scale=pieces == 1)
        return Rounded(integers=join_pieces(found.integers, layer.groups), scale=found.scale if pieces == 1 else scale)
    found = round_gptq(split, blocks, np.repeat(scale, pieces, axis=0), noise, place.limit)
    return Rounded(integers=join_pieces(found.integers, layer.groups), scale=scale)
