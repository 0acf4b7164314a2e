"""The only module that calls ORT's quantizer: Q and DQ nodes are placed with given ranges and settings."""

import contextlib
import logging
import math
from collections.abc import Collection, Generator, Sequence
from copy import deepcopy
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx.shape_inference import InferenceError
from onnxruntime.quantization import QuantType
from onnxruntime.quantization.calibrate import CalibrationMethod, TensorData, TensorsData
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from onnxruntime.quantization.onnx_quantizer import ONNXQuantizer
from onnxruntime.quantization.quant_utils import QuantizationMode, add_infer_metadata

from edgekit.errors import ModelError
from edgekit.graph.constants import read_array
from edgekit.graph.graph import Graph
from edgekit.graph.inference import infer_model
from edgekit.model.model import copy_without_weights, drop_unread, refill
from edgekit.model.tensors import Array
from edgekit.quantize._ort_model import ChannelQuantizer, channel_overrides, reading_from
from edgekit.quantize.finer_weights import NORM
from edgekit.quantize.gptq import scale_zeros
from edgekit.quantize.graph.float_graph import WITH_BIAS
from edgekit.quantize.graph.layers import read_layer
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.ranges import TensorRange, share_ranges

DYNAMIC_OPS = ("Attention", "EmbedLayerNormalization", "Gather", "LSTM", "MatMul")
"""Operators with kernels for int8 weights and dynamically quantized activations; ConvInteger has none for them."""

_TYPES: dict[str, Any] = {
    "uint8": QuantType.QUInt8,
    "int8": QuantType.QInt8,
    "uint16": QuantType.QUInt16,
    "int16": QuantType.QInt16,
}
# Operators whose own grid is replaced by the shared range of their group: a provider that requires one scale for all
# inputs of a Concat accepts any scale of a Sigmoid. A Softmax keeps its own.
_REPLACEABLE_GRIDS = frozenset({"Sigmoid"})
# Initializers with at least this many values are weights: ORT's quantizer does not need their values for the scales of
# activations.
_LARGE = 1024
_ROUNDED_AT_ONCE = 1 << 20
_FAILURES = (
    ValueError, TypeError, AssertionError, KeyError, IndexError, AttributeError, RuntimeError, InferenceError,
)  # fmt: skip


def place_qdq(graph: Graph, plan: QuantPlan, subject: str) -> onnx.ModelProto:
    """Returns the QDQ form of a float graph, with every weight rounded to nearest.

    Weights that stay float are not moved.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    # The scales of these weights are given, so the quantizer does not read their values before they are rounded.
    weights = {tensor.name: tensor for tensor in graph.proto.initializer if tensor.name in plan.axes}
    quantizer = _open_quantizer(graph, plan, subject, left_out=weights.keys())
    with _asking_ort(subject), reading_from(graph.folder):
        quantized: onnx.ModelProto = quantizer.quantize_model()
    # The quantizer leaves Q nodes on float weights, because it would round each channel in a loop of Python.
    placed = quantized.graph
    stored = {tensor.name: weights.get(tensor.name, tensor) for tensor in placed.initializer}
    rounding = {
        node.output[0]: node for node in placed.node if node.op_type == "QuantizeLinear" and node.input[0] in stored
    }
    for node in placed.node:
        made = rounding.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if made is None:
            continue
        axis = next((item.i for item in made.attribute if item.name == "axis"), 1)
        weight, scale, zero = (read_array(stored[each], graph.folder) for each in made.input)
        integers = _round_weight(weight, scale, zero, axis)
        # ORT quantizes each weight once. Each is written in place: a new list would keep all weights in memory twice.
        node.input[0] = f"{made.input[0]}_quantized"
        dtype = onnx.helper.np_dtype_to_tensor_dtype(integers.dtype)
        placed.initializer.add(name=node.input[0], dims=integers.shape, data_type=dtype, raw_data=integers.tobytes())
    refill(placed.node, [node for node in placed.node if node.output[0] not in rounding])
    drop_unread(placed)
    for tensor in placed.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(weights[tensor.name])
    refill(quantized.metadata_props, graph.model.metadata_props)
    return quantized


def find_plan_grids(graph: Graph, plan: QuantPlan) -> dict[str, Array]:
    """Returns the scales and zero points of activations, by their names in the graph that `place_qdq` returns.

    The placement of Q and DQ does not depend on the ranges: to try other ranges, these scales replace those of a placed
    graph, without a second placement. The names are the same for all plans that differ only in ranges.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    large = {tensor.name for tensor in graph.proto.initializer if math.prod(tensor.dims) >= _LARGE}
    quantizer = _open_quantizer(graph, msgspec.structs.replace(plan, axes={}), "the candidate", left_out=large)
    found: dict[str, Array] = {}
    for name, parameters in quantizer.quantization_params.items():
        for suffix, each in (("", parameters.original), ("_convert", parameters.converted)):
            if each is not None:
                found[f"{name}_scale{suffix}"] = np.asarray(each["scale"])
                found[f"{name}_zero_point{suffix}"] = np.asarray(each["zero_point"])
    return found


def _open_quantizer(graph: Graph, plan: QuantPlan, subject: str, *, left_out: Collection[str]) -> Any:
    """Returns ORT's quantizer for a copy of a model in which some initializers have no values."""
    if plan.shared_ops:
        # One range for all inputs and the output of each operator of which the target demands it.
        floats = {node.name for node in plan.float_nodes}
        ranges, shared = share_ranges(graph, plan.ranges, plan.shared_ops, floats)
        freed = {name for name in shared & plan.grids.keys() if graph.producers[name].op_type in _REPLACEABLE_GRIDS}
        grids = {name: grid for name, grid in plan.grids.items() if name not in freed}
        plan = msgspec.structs.replace(plan, ranges=ranges, grids=grids)
    proto, (options, op_types) = graph.model, _options(graph, plan, subject)
    options["AddQDQPairToWeight"] = True  # `place_qdq` rounds the float weights that this leaves
    # `round_qdq_weights` makes room for the biases of the layers that it knows, without ORT's loop over channels.
    biased = (node for node in graph.nodes if node.op_type in WITH_BIAS and node.has_input(2))
    options["QDQDisableWeightAdjustForInt32Bias"] = all(read_layer(graph, node) for node in biased)
    ranges = {
        name: TensorData(lowest=np.float32(span.low), highest=np.float32(span.high))
        for name, span in plan.ranges.items()
    }
    # A copy without metadata, in which some initializers have a type and a shape but no values.
    copy = copy_without_weights(proto)
    del copy.metadata_props[:]
    for tensor in proto.graph.initializer:
        if tensor.name not in left_out:
            copy.graph.initializer.append(tensor)
        else:
            copy.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    with _asking_ort(subject), reading_from(graph.folder):
        add_infer_metadata(copy)
        return ChannelQuantizer(
            copy,
            False,  # noqa: FBT003 - per_channel: `axes` says it weight by weight
            plan.reduce_range,
            _weight_type(plan),
            _TYPES[plan.activation],
            TensorsData(CalibrationMethod.MinMax, ranges),
            [],
            [node.name for node in plan.float_nodes],
            op_types,
            options,
        )


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
    copy = deepcopy(proto)
    # The quantizer wants the type of each input, and onnx infers none after ONNX Runtime's own operators. It transposes
    # weights, whose stated shapes would then be wrong.
    stored = {tensor.name for tensor in proto.graph.initializer}
    refill(copy.graph.value_info, [v for v in infer_model(proto).graph.value_info if v.name not in stored])
    # Attention of opset 23 has no packed weights, and the quantizer takes it for ONNX Runtime's own.
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
            [*kept, *(node.name for node in proto.graph.node if node.op_type == "Attention" and not node.domain)],
            list(DYNAMIC_OPS),
            {"MatMulConstBOnly": True},
        )
        quantized: onnx.ModelProto = quantizer.quantize_model()
        return quantized


def _weight_type(plan: QuantPlan) -> Any:
    return QuantType.QInt8 if plan.weight_symmetric else _TYPES[plan.weight]


def _options(graph: Graph, plan: QuantPlan, subject: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the options of ORT's quantizer, and the operators that it quantizes."""
    proto, kind, dtype = graph.model, _TYPES[plan.activation], np.dtype(plan.activation)

    def own_range(span: TensorRange) -> dict[str, Any]:
        return {"rmin": np.float32(span.low), "rmax": np.float32(span.high)}

    overrides: dict[str, list[dict[str, Any]]] = {
        name: channel_overrides(
            channel_scales(graph.weight(name), axis, plan.find_weight_limit()), axis, QuantType.QInt8
        )
        for name, axis in plan.axes.items()
    }
    # The gains of normalizations are positive, and a transformer's largest is ten times the others: as asymmetric uint8
    # they use all steps.
    floats = [node.name for node in plan.float_nodes]
    norms = [node for node in graph.nodes if node.op_type == NORM and node.name not in floats]
    gains = [node.input[1] for node in norms if graph.is_float_constant(node.input[1])]
    for name in gains if NORM in plan.unsigned_ops else ():
        overrides[name] = [{"quant_type": QuantType.QUInt8, "symmetric": False}]
    for name, grid in plan.grids.items():
        numbers = {"scale": np.array(grid.scale, np.float32), "zero_point": np.array(grid.zero_point, dtype)}
        overrides[name] = [{"quant_type": kind, **numbers}]
    # ORT would give a constant the range of all its values, and a graph output that a Relu or Clip reads too the range
    # after the Relu or Clip.
    clamped = {node.input[0] for node in proto.graph.node if node.op_type in {"Relu", "Clip"}}
    for name in plan.ranges.keys() & ((clamped & graph.outputs) | graph.constants.keys()):
        overrides[name] = [{"quant_type": kind, **own_range(plan.ranges[name])}]
    # ORT itself gives these the 16-bit scale that QNN requires, and refuses a range in addition.
    fixed = {node.output[0] for node in proto.graph.node if node.op_type in {"Sigmoid", "Tanh"}}
    for name, span in plan.wide.items():
        own = {} if plan.scheme == "qnn" and name in fixed else own_range(span)
        overrides[name] = [{"quant_type": QuantType.QUInt16, **own}]
    if plan.scheme == "qnn":
        configure: Any = get_qnn_qdq_config
        with _asking_ort(subject):
            config: Any = configure(
                proto,
                None,
                activation_type=kind,
                weight_type=_weight_type(plan),
                init_overrides=overrides,
                activation_symmetric=plan.activation_symmetric,
                weight_symmetric=plan.weight_symmetric,
                op_types_to_quantize=list(plan.op_types),
                nodes_to_exclude=floats,
            )
        # ONNX Runtime's own Q and DQ nodes have types that those of the model's opset do not support.
        contrib = {"UseQDQContribOps": True} if (plan.wide or plan.bits) and graph.opset < 21 else {}
        return {**config.extra_options, **contrib}, sorted(config.op_types_to_quantize)
    return {
        "ActivationSymmetric": plan.activation_symmetric,
        "WeightSymmetric": plan.weight_symmetric,
        "QuantizeBias": not plan.float_bias,
        "TensorQuantOverrides": overrides,
    }, list(plan.op_types)


def channel_scales(weight: Array, axis: int, limit: int) -> Array:
    """Returns the symmetric int8 scale of each channel, float32 [C]: its largest magnitude over `limit`."""
    others = tuple(index for index in range(weight.ndim) if index != axis)
    return scale_zeros(np.abs(weight).max(axis=others).astype(np.float32) / np.float32(limit)).astype(np.float32)


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
