"""The only module that calls ORT's quantizer: Q and DQ nodes are placed with given ranges and settings."""

import contextlib
import logging
import math
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import onnx
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
from onnxruntime.quantization.quant_utils import QuantizationMode, add_infer_metadata
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from edgekit.errors import ModelError
from edgekit.graph.constants import read_array
from edgekit.model.model import copy_fields, drop_unread, refill
from edgekit.model.tensors import Array
from edgekit.quantize._ort_model import ChannelQuantizer, IndexedModel, channel_overrides, reading_from

GENERAL_OPS: tuple[str, ...] = tuple(sorted({*QDQRegistry, *QLinearOpsRegistry}))
"""The operators that ORT's general rules can quantize."""
QNN_EXCLUDED_OPS = frozenset({"Cast"})
"""The operators that ORT's QNN rules leave alone (execution_providers/qnn/quant_config.py, OP_TYPES_TO_EXCLUDE)."""

DYNAMIC_OPS = ("Attention", "EmbedLayerNormalization", "Gather", "LSTM", "MatMul")
"""Operators with kernels for int8 weights and dynamically quantized activations; ConvInteger has none for them."""

_TYPES: dict[str, Any] = {
    "uint8": QuantType.QUInt8,
    "int8": QuantType.QInt8,
    "uint16": QuantType.QUInt16,
    "int16": QuantType.QInt16,
}
_FULL = 127
# Initializers with at least this many values are weights: ORT's quantizer does not need their values for the scales of
# activations.
_LARGE = 1024
_ROUNDED_AT_ONCE = 1 << 20
_FAILURES = (ValueError, TypeError, AssertionError, KeyError, IndexError, AttributeError, RuntimeError)


class Grid(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fixed scale and zero point that a provider demands of a tensor."""

    scale: float
    zero_point: int


class QdqRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of ORT's quantizer.

    `ranges` holds low and high of every float activation. `axes` holds the channel axis of weights that get a scale per
    channel. `wide` holds low and high of activations that get 16 bits where the others get 8; a reader that takes only
    8 bits of such an activation gets the range in `ranges`. `weight_limit` is the largest magnitude of a weight. With
    `float_bias` biases get no Q and DQ. `unsigned` weights are asymmetric: they have a zero point. With `contrib`, ONNX
    Runtime's own Q and DQ nodes are placed, for types that those of the model's opset do not support.
    """

    scheme: Literal["qnn", "ort"]
    activation: str
    weight: str
    activation_symmetric: bool
    weight_symmetric: bool
    op_types: tuple[str, ...]
    excluded: tuple[str, ...]
    ranges: dict[str, tuple[float, float]]
    grids: dict[str, Grid]
    axes: dict[str, int]
    wide: dict[str, tuple[float, float]] = {}
    unsigned: tuple[str, ...] = ()
    weight_limit: int = 127
    contrib: bool = False
    float_bias: bool = False


def place_qdq(proto: onnx.ModelProto, request: QdqRequest, subject: str, folder: Path = Path()) -> onnx.ModelProto:
    """Returns the QDQ form of a float model; `proto` needs inferred types in value_info.

    External weights are read from `folder`; those that stay float are not moved.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    # The scales of these weights are given, so the quantizer does not read their values before they are rounded.
    weights = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.name in request.axes}
    quantizer = _open_quantizer(proto, request, subject, left_out=weights.keys(), folder=folder)
    quantizer.model = IndexedModel(quantizer.model.model)
    with _asking_ort(subject), reading_from(folder):
        quantized: onnx.ModelProto = quantizer.quantize_model()
    _quantize_weights(quantized.graph, weights, folder)
    del quantized.metadata_props[:]
    quantized.metadata_props.extend(proto.metadata_props)
    return quantized


def find_grids(proto: onnx.ModelProto, request: QdqRequest, subject: str, folder: Path = Path()) -> dict[str, Array]:
    """Returns the scales and zero points of activations, by their names in the graph that `place_qdq` returns.

    The placement of Q and DQ does not depend on the ranges: to try other ranges, these scales replace those of a placed
    graph, without a second placement. External weights are read from `folder`.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    large = {tensor.name for tensor in proto.graph.initializer if math.prod(tensor.dims) >= _LARGE}
    quantizer = _open_quantizer(
        proto, msgspec.structs.replace(request, axes={}), subject, left_out=large, folder=folder
    )
    found: dict[str, Array] = {}
    for name, parameters in quantizer.quantization_params.items():
        for suffix, each in (("", parameters.original), ("_convert", parameters.converted)):
            if each is not None:
                found[f"{name}_scale{suffix}"] = np.asarray(each["scale"])
                found[f"{name}_zero_point{suffix}"] = np.asarray(each["zero_point"])
    return found


def _open_quantizer(
    proto: onnx.ModelProto, request: QdqRequest, subject: str, *, left_out: Collection[str], folder: Path
) -> Any:
    """Returns ORT's quantizer for a copy of a model in which some initializers have no values."""
    options, op_types = _options(proto, request, subject, folder)
    options["AddQDQPairToWeight"] = True  # `_quantize_weights` rounds the float weights that this leaves
    ranges = TensorsData(
        CalibrationMethod.MinMax,
        {
            name: TensorData(lowest=np.float32(low), highest=np.float32(high))
            for name, (low, high) in request.ranges.items()
        },
    )
    # A copy without metadata, in which some initializers have a type and a shape but no values.
    copy = onnx.ModelProto()
    copy_fields(proto, copy, {"graph", "metadata_props"})
    copy_fields(proto.graph, copy.graph, {"initializer"})
    for tensor in proto.graph.initializer:
        if tensor.name not in left_out:
            copy.graph.initializer.append(tensor)
        else:
            copy.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    with _asking_ort(subject), reading_from(folder):
        add_infer_metadata(copy)
        return ChannelQuantizer(
            copy,
            False,  # noqa: FBT003 - per_channel: `axes` says it weight by weight
            request.weight_limit < _FULL,
            _TYPES[request.weight],
            _TYPES[request.activation],
            ranges,
            [],
            list(request.excluded),
            op_types,
            options,
        )


def _quantize_weights(graph: onnx.GraphProto, weights: Mapping[str, onnx.TensorProto], folder: Path) -> None:
    """Rounds the float weights that Q nodes read, and removes these Q nodes: ORT would loop over channels in Python.

    `weights` are the initializers whose values were left out of the graph.
    """
    stored = {tensor.name: weights.get(tensor.name, tensor) for tensor in graph.initializer}
    rounding = {
        node.output[0]: node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] in stored
    }
    rounded: dict[str, onnx.TensorProto] = {}
    for node in graph.node:
        made = rounding.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if made is None:
            continue
        quantized = f"{made.input[0]}_quantized"
        if quantized not in stored and quantized not in rounded:
            axis = next((item.i for item in made.attribute if item.name == "axis"), 1)
            weight, scale, zero = (read_array(stored[each], folder) for each in made.input)
            integers = _round_weight(weight, scale, zero, axis)
            # Each is written in place: building a new list would keep every weight in memory twice.
            rounded[quantized] = graph.initializer.add(name=quantized, dims=integers.shape, raw_data=integers.tobytes())
            rounded[quantized].data_type = onnx.helper.np_dtype_to_tensor_dtype(integers.dtype)
        node.input[0] = quantized
    refill(graph.node, [node for node in graph.node if node.output[0] not in rounding])
    drop_unread(graph)
    for tensor in graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name])


def _round_weight(weight: Array, scale: Array, zero: Array, axis: int) -> Array:
    """Returns integers as QuantizeLinear makes them (quant_utils.py, quantize_nparray)."""
    if not weight.ndim:
        return _round_weight(weight.reshape(1), scale, zero, axis).reshape(())
    limits, rounded = np.iinfo(zero.dtype), np.empty(weight.shape, zero.dtype)
    shape = [-1 if index == axis else 1 for index in range(weight.ndim)] if scale.ndim else ()
    scales, zeros = scale.reshape(shape), zero.reshape(shape).astype(np.float32)
    # In parts: for a large embedding table each step over the whole array would take as much memory again.
    rows = max(1, _ROUNDED_AT_ONCE * len(weight) // weight.size) if weight.size else 1
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        own, shift = (each[part] if scale.ndim and axis == 0 else each for each in (scales, zeros))
        counts = np.rint(weight[part] / own) + shift
        np.clip(counts, limits.min, limits.max, out=counts)
        rounded[part] = counts
    return rounded


def quantize_dynamically(
    proto: onnx.ModelProto, kept: Sequence[str], subject: str, *, per_channel: bool = True
) -> onnx.ModelProto:
    """Returns a dynamically quantized model: int8 weights, per channel or not, and activations quantized at each run.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    with _asking_ort(subject):
        quantizer: Any = ONNXQuantizer(
            copy,
            per_channel,
            False,  # noqa: FBT003 - reduce_range
            QuantizationMode.IntegerOps,
            False,  # noqa: FBT003 - static
            QuantType.QInt8,
            QuantType.QUInt8,
            None,
            [],
            list(kept),
            list(DYNAMIC_OPS),
            {"MatMulConstBOnly": True},
        )
        quantized: onnx.ModelProto = quantizer.quantize_model()
        return quantized


def _options(
    proto: onnx.ModelProto, request: QdqRequest, subject: str, folder: Path
) -> tuple[dict[str, Any], list[str]]:
    weights = {tensor.name: tensor for tensor in proto.graph.initializer if tensor.name in request.axes}
    overrides: dict[str, list[dict[str, Any]]] = {
        name: channel_overrides(
            channel_scales(read_array(weights[name], folder), axis, request.weight_limit), axis, QuantType.QInt8
        )
        for name, axis in request.axes.items()
    }
    kind, dtype = _TYPES[request.activation], np.dtype(request.activation)
    overrides |= {name: [{"quant_type": QuantType.QUInt8, "symmetric": False}] for name in request.unsigned}
    for name, grid in request.grids.items():
        numbers = {"scale": np.array(grid.scale, np.float32), "zero_point": np.array(grid.zero_point, dtype)}
        overrides[name] = [{"quant_type": kind, **numbers}]
    # To a graph output that a Relu or Clip reads too ORT would give the range after the Relu or Clip.
    clamped = {node.input[0] for node in proto.graph.node if node.op_type in {"Relu", "Clip"}}
    for name in clamped & {value.name for value in proto.graph.output} & request.ranges.keys():
        low, high = request.ranges[name]
        own = {"rmin": np.float32(low), "rmax": np.float32(high)}
        overrides[name] = [{"quant_type": kind, **own}]
    # ORT itself gives these the 16-bit scale that QNN requires, and refuses a range in addition.
    fixed = {node.output[0] for node in proto.graph.node if node.op_type in {"Sigmoid", "Tanh"}}
    for name, (low, high) in request.wide.items():
        own = {"rmin": np.float32(low), "rmax": np.float32(high)}
        own = {} if request.scheme == "qnn" and name in fixed else own
        overrides[name] = [{"quant_type": QuantType.QUInt16, **own}]
    if request.scheme == "qnn":
        configure: Any = get_qnn_qdq_config
        with _asking_ort(subject):
            config: Any = configure(
                proto,
                None,
                activation_type=_TYPES[request.activation],
                weight_type=_TYPES[request.weight],
                init_overrides=overrides,
                activation_symmetric=request.activation_symmetric,
                weight_symmetric=request.weight_symmetric,
                op_types_to_quantize=list(request.op_types),
                nodes_to_exclude=list(request.excluded),
            )
        opset = max(entry.version for entry in proto.opset_import if entry.domain in {"", "ai.onnx"})
        contrib = {"UseQDQContribOps": True} if (request.wide or request.contrib) and opset < 21 else {}
        return {**config.extra_options, **contrib}, sorted(config.op_types_to_quantize)
    return {
        "ActivationSymmetric": request.activation_symmetric,
        "WeightSymmetric": request.weight_symmetric,
        "QuantizeBias": not request.float_bias,
        "TensorQuantOverrides": overrides,
    }, list(request.op_types)


def channel_scales(weight: Array, axis: int, limit: int = _FULL) -> Array:
    """Returns the symmetric int8 scale of each channel, float32 [C]: its largest magnitude over `limit`.

    A channel of zeros gets the largest scale: its bias, whose scale is this one times the input's, then fits into
    int32.
    """
    others = tuple(index for index in range(weight.ndim) if index != axis)
    scales = np.abs(weight).max(axis=others).astype(np.float32) / np.float32(limit)
    return np.where(scales > np.finfo(np.float32).tiny, scales, scales.max() or np.float32(1)).astype(np.float32)


@contextlib.contextmanager
def _asking_ort(subject: str) -> Generator[None]:
    """Turns the exceptions of ORT's quantizer into a ModelError, and silences its log.

    Put only calls of the quantizer inside: the same exceptions from edgekit's code would be bugs of edgekit. It logs
    with `logging.warning`, which installs a handler on a root logger that has none.
    """
    root = logging.getLogger()
    handler, level = logging.NullHandler(), root.manager.disable
    root.addHandler(handler)
    logging.disable(logging.CRITICAL)
    try:
        with np.errstate(all="ignore"):
            yield
    except _FAILURES as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"ONNX Runtime's quantizer refuses '{subject}': {first[:300]}", hint="build it with --precision fp32"
        ) from error
    finally:
        logging.disable(level)
        root.removeHandler(handler)
