"""Rounds the weights of a QDQ graph with second moments of layer inputs, and corrects biases.

With the rounding qronos, layers are rounded one after another, each for the inputs that reach it through the layers
rounded before. Results are stored beside the statistics that they depend on.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import replacing_file
from edgekit.data.npz import MALFORMED
from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order, single_blas_thread
from edgekit.model.tensors import HEADERS, Array, Tensors
from edgekit.quantize.calibration.held_out import read_fitted
from edgekit.quantize.calibration.moments import (
    InputMoments,
    block_sizes,
    open_moments,
    patches_per_sample,
    scale_moments,
)
from edgekit.quantize.gptq import (
    FOUR_LIMIT,
    LIMIT,
    Rounded,
    add_spread,
    damp_moment,
    find_inactive,
    isolate_inactive,
    join_pieces,
    pack_int4,
    refit_weights,
    round_comq,
    round_gptq,
    round_nearest,
    search_scale,
    shrink_moment,
    split_pieces,
    weight_scale,
)
from edgekit.quantize.graph.layers import LAYER_OPS, Layer, locate_patches, read_layers
from edgekit.quantize.graph.sessions import open_graph


def recall(statistics: Path, key: str) -> dict[str, Array] | None:
    """Returns the arrays that were stored under a key; None if there are none, or if their file is damaged."""
    path = _locate(statistics, key)
    if not path.is_file():
        return None
    try:
        with HEADERS, path.open("rb") as file, np.load(file, allow_pickle=False) as fields:
            return {name: fields[name] for name in fields.files}
    except MALFORMED:
        # The caller rounds again, and replaces the file.
        return None


def remember(statistics: Path, key: str, arrays: Mapping[str, Array]) -> None:
    """Stores arrays under a key: a digest of everything they depend on except the statistics.

    Raises:
        OutputError: the folder of statistics cannot be written.
    """
    with replacing_file(_locate(statistics, key)) as temporary, temporary.open("wb") as file:
        # numpy names each stored array by its keyword.
        np.savez(file, allow_pickle=False, **arrays)


def _locate(statistics: Path, key: str) -> Path:
    return statistics / "rounded" / f"{key}.npz"


# The scale of an int32 bias is that of the input times that of the weight, which must be large enough for the bias to
# fit. ONNX Runtime's _adjust_weight_scale_for_int32_bias (qdq_quantizer.py) ensures that before weights are corrected,
# not after.
_INT32_MARGIN = 1.001 / (2**31 - 1)


class QdqLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a layer's initializers in a QDQ graph, and the step of its quantized input.

    `limit` is the largest magnitude of the weight's integers, `source` the tensor that the layer reads in that graph.
    """

    source: str
    weight: str
    weight_scale: str
    weight_zero: str
    bias: str | None
    bias_scale: str | None
    step: float
    per_channel: bool
    limit: int

    @property
    def has_four_bits(self) -> bool:
        """True if its weight gets 4 bits."""
        return self.limit == FOUR_LIMIT

    def least_scale(self, layer: Layer, bias: Array) -> Array:
        """Returns the smallest scale [groups, outputs, 1] of the weight with which the bias fits into int32."""
        return (np.abs(bias) * _INT32_MARGIN / self.step).reshape(layer.groups, layer.outputs, 1)


def find_places(
    qdq: onnx.GraphProto,
    initializers: dict[str, onnx.TensorProto],
    graph: Graph,
    limit: int,
    bits: Mapping[str, int],
) -> Iterator[tuple[str, tuple[Layer, QdqLayer]]]:
    """Yields, by node name, layers of the float graph with their counterparts in its QDQ form."""
    places = _find_layers(qdq, initializers, limit)
    for layer in read_layers(graph):
        place = places.get(layer.node)
        if place is not None and (layer.bias is None) == (place.bias is None):
            is_few = layer.weight in bits and place.per_channel
            yield layer.node, (layer, msgspec.structs.replace(place, limit=FOUR_LIMIT) if is_few else place)


def _find_layers(graph: onnx.GraphProto, initializers: dict[str, onnx.TensorProto], limit: int) -> dict[str, QdqLayer]:
    """Returns the layers with a symmetric int8 weight whose input, weight and bias (if any) come from DQ nodes."""
    dequantized = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, QdqLayer] = {}
    for node in (node for node in graph.node if node.op_type in LAYER_OPS):
        source, weight, bias, *_ = (*(dequantized.get(name) for name in node.input), None)
        if source is None or weight is None:
            continue
        stored, zero = initializers.get(weight.input[0]), initializers.get(weight.input[2])
        if stored is None or zero is None or stored.data_type != onnx.TensorProto.INT8:
            continue
        scale = numpy_helper.to_array(initializers[weight.input[1]])
        if numpy_helper.to_array(zero).any() or scale.dtype != np.float32:
            continue
        found[node.name] = QdqLayer(
            source=node.input[0],
            weight=weight.input[0],
            weight_scale=weight.input[1],
            weight_zero=weight.input[2],
            bias=bias.input[0] if bias is not None else None,
            bias_scale=bias.input[1] if bias is not None else None,
            step=float(numpy_helper.to_array(initializers[source.input[1]])),
            per_channel=scale.ndim > 0,
            limit=limit,
        )
    return found


def write_layer(
    initializers: Mapping[str, onnx.TensorProto], place: QdqLayer, *, integers: Array, scale: Array, bias: Array
) -> None:
    """Writes integers, scale [channels] and bias [channels] of a layer into its QDQ graph."""

    def store(name: str, value: Array) -> None:
        initializers[name].CopyFrom(numpy_helper.from_array(value, name))

    if place.has_four_bits:
        initializers[place.weight].CopyFrom(pack_int4(integers, place.weight))
        initializers[place.weight_zero].CopyFrom(pack_int4(np.zeros(scale.shape, np.int8), place.weight_zero))
    else:
        store(place.weight, np.ascontiguousarray(integers))
    store(place.weight_scale, np.asarray(scale if place.per_channel else scale[0]))
    if place.bias is not None and place.bias_scale is not None:
        # Integer kernels have no input for the scale of the bias (ONNX operator QLinearConv): it is the product of the
        # scales of input and weight.
        step = (np.float32(place.step) * scale).astype(np.float32)
        counts = np.clip(np.rint(bias / step.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
        store(place.bias, counts)
        store(place.bias_scale, step if place.per_channel else step[:1])


Places = Mapping[str, tuple[Layer, QdqLayer]]
"""Layers of the float graph by node name, with their counterparts in its QDQ form."""


class _Inputs(msgspec.Struct, frozen=True, kw_only=True):
    """Patches [P, groups, inputs] of a layer's input: in the float graph, and behind the layers rounded so far."""

    true: Array
    rounded: Array


def round_in_order(qdq: onnx.ModelProto, graph: Graph, statistics: Path, places: Places) -> None:
    """Rounds layers in graph order, so that each compensates for the errors that reach it.

    As Qronos does (S. Zhang et al., arXiv:2505.11695): with X the inputs of a layer in the float graph and Y those
    behind the layers rounded before, W' = W X'Y (Y'Y)^-1 comes nearest to W X, and W' is rounded with the moment Y'Y.
    Unlike there, both moments are shrunk (`shrink_moment`), or W' would overfit the samples, and weights of 4 bits are
    rounded by COMQ instead of GPTQ.

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
        # Layers that read the same tensor get the same inputs: the model runs once for all of them.
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
    """Returns patches [P, groups, inputs] of each layer's input; `names` maps input tensors to their names in `proto`.

    Layers whose input size is unknown are omitted; without samples, all are.
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
    # The bias corrects the mean error, so only deviations from the mean matter.
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
    """Returns the moment of `seen` in blocks, and the weights [groups, outputs, inputs] that fit it best."""
    ones, twos = (np.swapaxes(each.reshape(len(each), -1, size), 0, 1) for each in (true, seen))
    moment, both = (np.swapaxes(each, 1, 2) @ twos / len(true) for each in (twos, ones))
    share = len(true) / 4 / (size + len(true) / 4)
    left = shrink_moment(moment, len(true))
    split = split_pieces(matrix, layer.groups, size)
    # W' = W (S + share (X'Y - Y'Y)) S^-1, with S the shrunk Y'Y: if no errors reach the layer, W' is W.
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


Rounding = Literal["nearest", "bias", "gptq", "refit", "comq", "qronos"]
"""How weights are rounded.

nearest: each weight by itself. bias: the same, then the mean of the output error is subtracted from the bias (bias
correction, M. Nagel et al., arXiv:1906.04721, section 4.2). gptq: minimizes the error of the layer's output, then
corrects the bias. refit: first refitted by least squares to inputs that carry the noise of their own quantization, then
gptq. comq: as gptq, but weights of 4 bits are rounded by coordinate descent (`round_comq`). qronos: layer by layer,
each for the inputs that reach it through the layers rounded before, otherwise as comq (`round_in_order`).
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
    """Rewrites the weights, scales and biases of `qdq`, the QDQ form of `graph`, in place.

    `factors` holds, for each layer, the factors by which its input channels were scaled since the calibration. `limit`
    is the largest magnitude of the integers; the weights that `bits` names get 4 bits. Results are stored in the folder
    `statistics`, for other targets that quantize the same layers in the same way.

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
    """Yields the result of `_correct_layer` for each layer that has moments; layers are corrected in parallel."""
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
    """Returns integers, scale [channels] and corrected bias of a layer, and stores them; None without moments."""
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
    """Returns E[W x] - E[Wq x], the mean error [groups, outputs] of each output channel."""
    errors, rows = np.empty(matrix.shape[:2]), max(1, _ERRORS_AT_ONCE // matrix.shape[2])
    # In parts: in double precision each step over a whole large layer would take twice its memory.
    for start in range(0, matrix.shape[1], rows):
        part = slice(start, start + rows)
        stored = Rounded(integers=rounded.integers[:, part], scale=rounded.scale[:, part])
        errors[:, part] = ((matrix[:, part].astype(np.float64) - stored.values) * mean[:, None]).sum(axis=2)
    return errors


def _round_plainly(graph: Graph, layer: Layer, place: QdqLayer) -> dict[str, Array]:
    """Returns 4-bit integers, scale [channels] and bias of a layer, with each weight rounded to nearest."""
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
    # The bias corrects the mean error, so only deviations from the mean matter.
    blocks, size = moments.second_moment(centred=layer.bias is not None), moments.size
    spread = moments.spread.reshape(-1, size)
    inactive = find_inactive(blocks, spread)
    blocks = isolate_inactive(add_spread(shrink_moment(blocks, moments.count), spread, moments.count), inactive)
    pieces = layer.inputs // size
    split = split_pieces(matrix, layer.groups, size)
    noise = place.step**2 / 12 if refit else 0.0
    if refit:
        # Least squares would set the weights of inputs that were always zero to zero.
        split = np.where(inactive[:, None], split, refit_weights(split, blocks, noise))
    scale = find_scale(join_pieces(split, layer.groups))
    if rounding == "comq" and place.has_four_bits:
        found = round_comq(split, blocks, np.repeat(scale, pieces, axis=0), fits_scale=pieces == 1)
        return Rounded(integers=join_pieces(found.integers, layer.groups), scale=found.scale if pieces == 1 else scale)
    found = round_gptq(split, blocks, np.repeat(scale, pieces, axis=0), noise, place.limit)
    return Rounded(integers=join_pieces(found.integers, layer.groups), scale=scale)
