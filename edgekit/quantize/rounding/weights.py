"""Better integers for the weights of a QDQ graph: rounded with second moments, their mean error put into the bias."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import replacing_file
from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order, single_blas_thread
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import InputMoments, open_moments, scale_moments
from edgekit.quantize.graph.layers import Layer, read_layers
from edgekit.quantize.rounding.four_bits import pack_int4, search_scale
from edgekit.quantize.rounding.gptq import (
    FOUR_LIMIT,
    LIMIT,
    Rounded,
    add_spread,
    refit_weights,
    round_gptq,
    round_nearest,
    shrink_moment,
    weight_scale,
)

Rounding = Literal["nearest", "bias", "gptq", "refit"]
"""How weights are rounded.

nearest: each by itself. bias: the same, and the mean of the error is taken out of the bias (bias correction, M. Nagel
et al., arXiv:1906.04721, section 4.2). gptq: so that the layer's output errs least, then bias. refit: first refitted by
least squares to inputs that carry the noise of their own quantization, then gptq.
"""

# A bias is int32 with the step of the input times that of the weight, which must be so large that the bias fits: ONNX
# Runtime's _adjust_weight_scale_for_int32_bias (qdq_quantizer.py) sees to it before weights are corrected, not after.
_INT32_MARGIN = 1.001 / (2**31 - 1)


class _QdqLayer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a layer's parameters are in a QDQ graph: names of initializers, and the step of the quantized input.

    `limit` is the largest magnitude of its integers.
    """

    weight: str
    weight_scale: str
    weight_zero: str
    bias: str | None
    bias_scale: str | None
    step: float
    per_channel: bool
    limit: int


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
    places = dict(_find_places(qdq.graph, initializers, graph, limit, few))
    if rounding == "nearest":
        for layer, place in places.values():
            if place.limit == FOUR_LIMIT:
                _write(initializers, place, **_round_plainly(graph, layer, place))
        return
    with single_blas_thread(), open_moments(statistics / "moments.npz") as stored:

        def read(layer: Layer) -> InputMoments | None:
            moments = stored(layer.node)
            if moments is None or layer.node not in factors:
                return moments
            return scale_moments(moments, layer, np.asarray(factors[layer.node]))

        def correct(place: tuple[Layer, _QdqLayer]) -> dict[str, Array] | None:
            return _correct_layer(graph, *place, read, statistics, rounding)

        for (_, place), corrected in map_in_order(correct, places.values()):
            if corrected is not None:
                _write(initializers, place, **corrected)


def _correct_layer(
    graph: Graph,
    layer: Layer,
    place: _QdqLayer,
    read: Callable[[Layer], InputMoments | None],
    statistics: Path,
    rounding: Rounding,
) -> dict[str, Array] | None:
    """Returns integers, scale [channels] and corrected bias of a layer, remembered; None where it has no moments."""
    weight = numpy_helper.to_array(graph.constants[layer.weight])
    stored = None if layer.bias is None else graph.constant(layer.bias)
    bias = np.zeros(layer.groups * layer.outputs) if stored is None else stored.astype(np.float64)
    matrix, floor = layer.to_matrix(weight), _least_scale(layer, place, bias)
    largest = weight_scale(matrix, per_channel=place.per_channel, floor=floor, limit=place.limit)
    step = place.step.hex() if rounding == "refit" else ""
    key = hashlib.sha256(f"{layer.node}:{rounding}:{place.per_channel}:{step};".encode())
    for part in (largest, np.ascontiguousarray(weight), bias):
        key.update(part.tobytes())
    memory = statistics / "rounded" / f"{key.hexdigest()[:24]}.npz"
    if memory.is_file():
        with np.load(memory, allow_pickle=False) as fields:
            return {name: fields[name] for name in fields.files}
    moments = read(layer)
    if moments is None:
        return None
    find_scale = _scale_finder(place, floor, moments)
    if rounding == "bias":
        rounded = round_nearest(matrix, find_scale(matrix), place.limit)
    else:
        rounded = _round_with_moments(layer, matrix, moments, place, find_scale, refit=rounding == "refit")
    # E[W x] - E[Wq x]: the error that every output of the channel has.
    mean_error = ((matrix.astype(np.float64) - rounded.values) * moments.mean[:, None]).sum(axis=2)
    corrected = {
        "integers": layer.from_matrix(rounded.integers, weight.shape),
        "scale": rounded.scale.reshape(-1),
        "bias": bias + mean_error.reshape(-1),
    }
    with replacing_file(memory) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **corrected)
    return corrected


def _round_plainly(graph: Graph, layer: Layer, place: _QdqLayer) -> dict[str, Array]:
    """Returns integers of 4 bits, scale [channels] and bias of a layer, each weight rounded by itself."""
    weight = numpy_helper.to_array(graph.constants[layer.weight])
    stored = None if layer.bias is None else graph.constant(layer.bias)
    bias = np.zeros(layer.groups * layer.outputs) if stored is None else stored.astype(np.float64)
    matrix = layer.to_matrix(weight)
    scale = search_scale(matrix, energy=np.ones((layer.groups, layer.inputs)), floor=_least_scale(layer, place, bias))
    integers = round_nearest(matrix, scale, place.limit).integers
    return {"integers": layer.from_matrix(integers, weight.shape), "scale": scale.reshape(-1), "bias": bias}


def _least_scale(layer: Layer, place: _QdqLayer, bias: Array) -> Array:
    return (np.abs(bias) * _INT32_MARGIN / place.step).reshape(layer.groups, layer.outputs, 1)


def _scale_finder(place: _QdqLayer, floor: Array, moments: InputMoments) -> Callable[[Array], Array]:
    if place.limit != FOUR_LIMIT:
        return partial(weight_scale, per_channel=place.per_channel, floor=floor, limit=place.limit)
    energy = np.diagonal(moments.blocks, axis1=1, axis2=2).reshape(moments.mean.shape)
    return partial(search_scale, energy=energy, floor=floor)


def _round_with_moments(
    layer: Layer,
    matrix: Array,
    moments: InputMoments,
    place: _QdqLayer,
    find_scale: Callable[[Array], Array],
    *,
    refit: bool,
) -> Rounded:
    blocks = moments.blocks.astype(np.float64)
    size = blocks.shape[-1]
    if layer.bias is not None:
        # The bias takes the mean error, so only what varies is left to err: the covariance counts.
        mean = moments.mean.reshape(-1, size, 1)
        blocks = blocks - mean * np.swapaxes(mean, 1, 2)
    blocks = add_spread(shrink_moment(blocks, moments.count), moments.spread.reshape(-1, size), moments.count)
    pieces = layer.inputs // size
    cut = matrix.reshape(layer.groups, layer.outputs, pieces, size)
    split = cut.transpose(0, 2, 1, 3).reshape(-1, layer.outputs, size)
    noise = place.step**2 / 12 if refit else 0.0
    if refit:
        split = refit_weights(split, blocks, noise)
    scale = find_scale(_join(split, layer))
    found = round_gptq(split, blocks, np.repeat(scale, pieces, axis=0), noise, place.limit)
    return Rounded(integers=_join(found.integers, layer), scale=scale)


def _join(split: Array, layer: Layer) -> Array:
    pieces = split.reshape(layer.groups, -1, layer.outputs, split.shape[-1])
    return pieces.transpose(0, 2, 1, 3).reshape(layer.groups, layer.outputs, layer.inputs)


def _find_places(
    qdq: onnx.GraphProto,
    initializers: dict[str, onnx.TensorProto],
    graph: Graph,
    limit: int,
    bits: Mapping[str, int],
) -> Iterator[tuple[str, tuple[Layer, _QdqLayer]]]:
    """Yields, by node, layers of the float graph and where they are in its QDQ form."""
    places = _find_layers(qdq, initializers, limit)
    for layer in read_layers(graph):
        place = places.get(layer.node)
        if place is not None and (layer.bias is None) == (place.bias is None):
            is_few = layer.weight in bits and place.per_channel
            yield layer.node, (layer, msgspec.structs.replace(place, limit=FOUR_LIMIT) if is_few else place)


def _find_layers(graph: onnx.GraphProto, initializers: dict[str, onnx.TensorProto], limit: int) -> dict[str, _QdqLayer]:
    """Returns the layers whose input, weight and bias if any come from DQ nodes, with a symmetric int8 weight."""
    dequantized = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, _QdqLayer] = {}
    for node in (node for node in graph.node if node.op_type in {"Conv", "Gemm", "MatMul"}):
        source, weight, bias, *_ = (*(dequantized.get(name) for name in node.input), None)
        if source is None or weight is None:
            continue
        stored, zero = initializers.get(weight.input[0]), initializers.get(weight.input[2])
        if stored is None or zero is None or stored.data_type != onnx.TensorProto.INT8:
            continue
        scale = numpy_helper.to_array(initializers[weight.input[1]])
        if numpy_helper.to_array(zero).any() or scale.dtype != np.float32:
            continue
        found[node.name] = _QdqLayer(
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


def _write(
    initializers: dict[str, onnx.TensorProto], place: _QdqLayer, *, integers: Array, scale: Array, bias: Array
) -> None:
    def store(name: str, value: Array) -> None:
        initializers[name].CopyFrom(numpy_helper.from_array(value, name))

    if place.limit == FOUR_LIMIT:
        initializers[place.weight].CopyFrom(pack_int4(integers, place.weight))
        initializers[place.weight_zero].CopyFrom(pack_int4(np.zeros(scale.shape, np.int8), place.weight_zero))
    else:
        store(place.weight, np.ascontiguousarray(integers))
    store(place.weight_scale, np.asarray(scale if place.per_channel else scale[0]))
    if place.bias is not None and place.bias_scale is not None:
        # Integer kernels take no scale of the bias (ONNX operator QLinearConv): it is the product of the other two.
        step = (np.float32(place.step) * scale).astype(np.float32)
        counts = np.clip(np.rint(bias / step.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
        store(place.bias, counts)
        store(place.bias_scale, step if place.per_channel else step[:1])
