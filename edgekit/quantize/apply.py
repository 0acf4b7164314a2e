"""Quantizes a model as planned, and checks that the result is what was planned."""

import math
from pathlib import Path

import msgspec
import onnx

from edgekit._files import AnyPath, as_path
from edgekit.errors import DataError, ModelError
from edgekit.model.external import load_external
from edgekit.model.model import Model, save_proto
from edgekit.prepare.constants import find_float_weights, find_narrow, narrow_constants
from edgekit.prepare.fix import QNN_REWRITES
from edgekit.prepare.interface import drop_idle_nodes
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites.recurrent import split_lstm
from edgekit.prepare.rewrites.signs import store_weights
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.plan import FloatNode, QuantPlan
from edgekit.quantize.qdq import build_qdq, compact_qdq, plan_graph

_FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE})
_SCALING = frozenset({"QuantizeLinear", "DequantizeLinear"})


class QuantizedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a model: how many nodes compute in integers, which in float and why, and the sizes in bytes.

    `float_constants` holds the bytes of each constant that stays float, largest first, without the scales of Q and DQ,
    `wide_constants` those of each that is stored in 16 bits.
    """

    quantized_nodes: int
    float_nodes: tuple[FloatNode, ...]
    size_before: int
    size_after: int
    float_constants: dict[str, int]
    wide_constants: dict[str, int] = {}


class QuantizedModel(QuantizedFacts, frozen=True, kw_only=True):
    """A QDQ model, and what is told of it."""

    model: Model


class NothingQuantizedError(ModelError):
    """Raised for a plan that leaves all nodes in float: each has a neighbour that computes in float."""


def quantize_model(
    model: Model, plan: QuantPlan, calibration: Calibration, out: AnyPath, *, is_trial: bool = False
) -> QuantizedModel:
    """Writes the QDQ form of a prepared float model to the file `out`; equal arguments give equal bytes.

    The calibration is the one that the plan was made with, or another one of the same samples. With `is_trial` the
    model is written to be measured on this PC only: an LSTM stays one node, which computes the same and is loaded in a
    hundredth of the time.

    Raises:
        DataError: the plan is of another model, or the calibration of other samples.
        ModelError: ORT's quantizer refuses the model, or left no node or a wrong node quantized.
        UsageError: the calibration's statistics are gone.
    """
    out = as_path(out)
    if plan.model_sha256 != model.sha256:
        raise DataError(
            f"the plan was made for another model than '{model.path.name}'", hint="plan the quantization of this model"
        )
    if plan.samples_sha256 != calibration.samples_sha256:
        raise DataError("the plan was made with other samples than the calibration", hint="plan again with these")
    graph = plan_graph(model, plan, calibration)
    quantized = build_qdq(graph, plan, Path(calibration.statistics), model.path.name)
    load_external(quantized.graph, graph.folder)
    dequantized = {node.output[0] for node in quantized.graph.node if node.op_type == "DequantizeLinear"}
    requantized = {node.input[0] for node in quantized.graph.node if node.op_type == "QuantizeLinear"}
    computing = [node for node in quantized.graph.node if node.op_type not in _SCALING]
    # Nodes between DQ and Q compute in integers.
    are_integer = [
        not dequantized.isdisjoint(node.input) and not requantized.isdisjoint(node.output) for node in computing
    ]
    # Float weights that are not directly between DQ and Q are protected by session options (`disable_harmful`).
    if found := find_float_weights(quantized.graph, directly=True):
        raise ModelError(
            f"node '{found[0]}' would keep a float weight between Q and DQ nodes, which ONNX Runtime rounds to 8 bits"
            " per tensor",
            hint="keep its neighbours float too, or quantize its weight",
        )
    if not any(are_integer):
        words = f"no node of '{model.path.name}' was quantized"
        raise NothingQuantizedError(words, hint="build it with --precision fp32")
    # Rounding returns signed integers; a zero point of 128 turns them into the uint8 that the target takes. An x64 CPU
    # without VNNI adds pairs of u8 x s8 products in 16 bits, which saturate (VPMADDUBSW), but those of u8 x u8 exactly
    # (VPMADDWD); ONNX Runtime's own conversion of weights (avx2_weight_s8_to_u8.cc) skips files in ORT format.
    if plan.weight == "uint8" and plan.weight_symmetric:
        store_weights(quantized.graph, "uint8")
    elif plan.unsigned_ops:
        store_weights(quantized.graph, "uint8", plan.unsigned_ops)
    if plan.scheme == "qnn":
        opset = read_opset(quantized)
        wanted = [each for each in QNN_REWRITES if not (is_trial and each is split_lstm)]
        # Rewrites want type and shape of what each DequantizeLinear returns: those of what was quantized.
        stated = len(quantized.graph.value_info)
        makers = {node.output[0]: node.input[0] for node in quantized.graph.node if node.op_type == "QuantizeLinear"}
        known = {value.name: value for value in (*quantized.graph.input, *quantized.graph.value_info)}
        for node in (node for node in quantized.graph.node if node.op_type == "DequantizeLinear"):
            if (source := known.get(makers.get(node.input[0], ""))) is not None:
                quantized.graph.value_info.add().CopyFrom(source)
                quantized.graph.value_info[-1].name = node.output[0]
        if [name for each in wanted for name in each(quantized.graph, opset)]:
            drop_idle_nodes(quantized.graph)
        del quantized.graph.value_info[stated:]
    narrow_constants(quantized.graph, plan.narrow.bits)
    compact_qdq(quantized)
    float_constants = _measure_float_constants(quantized.graph)
    wide = {name: 2 * graph.weight(name).size for name in plan.wide if graph.is_float_constant(name)}
    written = save_proto(quantized, out)
    planned = {node.name: node for node in plan.float_nodes}
    unplanned = "it is not between quantized neighbours"
    return QuantizedModel(
        model=written,
        quantized_nodes=sum(are_integer),
        float_nodes=tuple(
            planned.get(node.name) or FloatNode(name=node.name, op=node.op_type, reason=unplanned)
            for node, is_integer in zip(computing, are_integer, strict=True)
            if not is_integer and any(graph.is_float(name) for name in (*node.input, *node.output))
        ),
        size_before=model.size_bytes,
        size_after=written.size_bytes,
        float_constants=float_constants,
        wide_constants=dict(sorted(wide.items(), key=lambda item: (-item[1], item[0]))),
    )


def _measure_float_constants(graph: onnx.GraphProto) -> dict[str, int]:
    read = {name for node in graph.node if node.op_type not in _SCALING for name in node.input}
    stored = {
        tensor.name: math.prod(tensor.dims) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in graph.initializer
    }
    floats = {tensor.name for tensor in graph.initializer if tensor.data_type in _FLOATS}
    narrow = find_narrow(graph)
    sizes = {name: stored[name] for name in floats & read - {each.scales for each in narrow.values()}}
    sizes |= {name: stored[each.integers] + stored[each.scales] for name, each in narrow.items()}
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
