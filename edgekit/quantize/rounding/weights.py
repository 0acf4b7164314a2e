"""Better integers for the weights of a QDQ graph: rounded with second moments, their mean error put into the bias."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import replacing_file
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.moments import InputMoments, open_moments, scale_moments
from edgekit.quantize.graph.graph import Graph
from edgekit.quantize.graph.layers import Layer, read_layers
from edgekit.quantize.rounding.gptq import (
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

nearest: each by itself. bias: the same, and the mean of the error is taken out of the bias. gptq: so that the layer's
output errs least, then bias. refit: first refitted to inputs that carry the noise of their own quantization, then gptq.
"""

ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)

_INT32_MARGIN = 1.001 / (2**31 - 1)


class _Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Where a layer's parameters are in a QDQ graph: names of initializers, and the step of the quantized input.

    `limit` is the largest magnitude of its integers.
    """

    weight: str
    weight_scale: str
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
) -> None:
    """Rewrites weights, their scales and biases of the QDQ form of `graph`; `qdq` is changed.

    `factors` holds by layer those that the channels of its input were multiplied by since the calibration.
    `limit` is the largest magnitude of the integers.
    What was rounded once is kept in the folder `statistics` for other targets that quantize the same inputs alike.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    if rounding == "nearest":
        return
    initializers = {tensor.name: tensor for tensor in qdq.graph.initializer}
    seats = _find_seats(qdq.graph, initializers, limit)
    layers = [layer for layer in read_layers(graph) if layer.node in seats]
    layers = [layer for layer in layers if (layer.bias is None) == (seats[layer.node].bias is None)]
    with open_moments(statistics / "moments.npz") as stored:

        def read(layer: Layer) -> InputMoments | None:
            moment = stored(layer.node)
            scaled = moment is not None and layer.node in factors
            return scale_moments(moment, layer, np.asarray(factors[layer.node])) if moment and scaled else moment

        for layer in layers:
            corrected = _correct_layer(graph, layer, seats[layer.node], read, statistics, rounding)
            if corrected is not None:
                _write(initializers, seats[layer.node], **corrected)


def _correct_layer(
    graph: Graph,
    layer: Layer,
    seat: _Seat,
    read: Callable[[Layer], InputMoments | None],
    statistics: Path,
    rounding: Rounding,
) -> dict[str, Array] | None:
    """Returns integers, scale [channels] and corrected bias of a layer, remembered; None where it has no moments."""
    weight = numpy_helper.to_array(graph.initializers[layer.weight])
    matrix, bias = layer.to_matrix(weight), _read_bias(graph, layer)
    floor = np.abs(bias).reshape(layer.groups, layer.outputs, 1) * _INT32_MARGIN / seat.step
    plain = weight_scale(matrix, per_channel=seat.per_channel, floor=floor, limit=seat.limit)
    step = seat.step.hex() if rounding == "refit" else ""
    key = hashlib.sha256(f"{layer.node}:{rounding}:{seat.per_channel}:{step};".encode())
    for part in (plain, np.ascontiguousarray(weight), bias):
        key.update(part.tobytes())
    memory = statistics / "rounded" / f"{key.hexdigest()[:24]}.npz"
    if memory.is_file():
        with np.load(memory, allow_pickle=False) as fields:
            return {name: fields[name] for name in fields.files}
    moment = read(layer)
    if moment is None:
        return None
    rounded = _round_layer(layer, matrix, moment, seat, floor, rounding)
    mean_error = ((matrix.astype(np.float64) - rounded.values) * moment.mean[:, None]).sum(axis=2)
    corrected = {
        "integers": layer.from_matrix(rounded.integers, weight.shape),
        "scale": rounded.scale.reshape(-1),
        "bias": bias + mean_error.reshape(-1),
    }
    with replacing_file(memory) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **corrected)
    return corrected


def _round_layer(
    layer: Layer, matrix: Array, moment: InputMoments, seat: _Seat, floor: Array, rounding: Rounding
) -> Rounded:
    if rounding == "bias":
        scale = weight_scale(matrix, per_channel=seat.per_channel, floor=floor, limit=seat.limit)
        return round_nearest(matrix, scale, seat.limit)
    blocks = moment.blocks.astype(np.float64)
    size = blocks.shape[-1]
    if layer.bias is not None:
        mean = moment.mean.reshape(-1, size, 1)
        blocks = blocks - mean * np.swapaxes(mean, 1, 2)
    blocks = add_spread(shrink_moment(blocks, moment.count), moment.spread.reshape(-1, size), moment.count)
    pieces = layer.inputs // size
    split = (
        matrix.reshape(layer.groups, layer.outputs, pieces, size).transpose(0, 2, 1, 3).reshape(-1, layer.outputs, size)
    )
    noise = seat.step**2 / 12 if rounding == "refit" else 0.0
    if rounding == "refit":
        split = refit_weights(split, blocks, noise)
    scale = weight_scale(_join(split, layer), per_channel=seat.per_channel, floor=floor, limit=seat.limit)
    found = round_gptq(split, blocks, np.repeat(scale, pieces, axis=0), noise, seat.limit)
    return Rounded(integers=_join(found.integers, layer), scale=scale)


def _join(split: Array, layer: Layer) -> Array:
    pieces = split.reshape(layer.groups, -1, layer.outputs, split.shape[-1])
    return pieces.transpose(0, 2, 1, 3).reshape(layer.groups, layer.outputs, layer.inputs)


def _find_seats(graph: onnx.GraphProto, initializers: dict[str, onnx.TensorProto], limit: int) -> dict[str, _Seat]:
    dequantized = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    seats: dict[str, _Seat] = {}
    for node in graph.node:
        sources = [dequantized.get(name) for name in node.input[:3]]
        if (
            node.op_type not in {"Conv", "Gemm", "MatMul"}
            or len(sources) < 2
            or sources[0] is None
            or sources[1] is None
        ):
            continue
        weight, bias = sources[1], sources[2] if len(sources) == 3 else None
        zero = initializers.get(weight.input[2])
        stored = initializers.get(weight.input[0])
        if stored is None or zero is None or stored.data_type != onnx.TensorProto.INT8:
            continue
        scale = numpy_helper.to_array(initializers[weight.input[1]])
        if numpy_helper.to_array(zero).any() or scale.dtype != np.float32:
            continue
        seats[node.name] = _Seat(
            weight=weight.input[0],
            weight_scale=weight.input[1],
            bias=bias.input[0] if bias is not None else None,
            bias_scale=bias.input[1] if bias is not None else None,
            step=float(numpy_helper.to_array(initializers[sources[0].input[1]])),
            per_channel=scale.ndim > 0,
            limit=limit,
        )
    return seats


def _write(
    initializers: dict[str, onnx.TensorProto], seat: _Seat, *, integers: Array, scale: Array, bias: Array
) -> None:
    stored = scale if seat.per_channel else scale[0]
    initializers[seat.weight].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(integers), seat.weight))
    initializers[seat.weight_scale].CopyFrom(numpy_helper.from_array(np.asarray(stored), seat.weight_scale))
    if seat.bias is None or seat.bias_scale is None:
        return
    step = (np.float32(seat.step) * scale).astype(np.float32)
    counts = np.clip(np.rint(bias / step.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
    initializers[seat.bias].CopyFrom(numpy_helper.from_array(counts, seat.bias))
    stored_step = step if seat.per_channel else step[:1]
    initializers[seat.bias_scale].CopyFrom(numpy_helper.from_array(stored_step, seat.bias_scale))


def _read_bias(graph: Graph, layer: Layer) -> Array:
    stored = None if layer.bias is None else graph.constant(layer.bias)
    return np.zeros(layer.groups * layer.outputs) if stored is None else stored.astype(np.float64)
