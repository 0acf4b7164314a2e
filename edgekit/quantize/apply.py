"""Applies a plan: one from a file, which anyone may have edited, is checked first; so is the result of each.

A plan from a file is checked against the model and the target.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import onnx

from edgekit._files import AnyPath, as_path
from edgekit.errors import DataError, ModelError, UsageError, reading, reraised, suggest_name
from edgekit.graph.graph import Graph
from edgekit.model.external import load_external
from edgekit.model.model import Model, save_proto
from edgekit.prepare.constants import find_float_weights, find_narrow, narrow_constants
from edgekit.prepare.fix import QNN_REWRITES
from edgekit.prepare.interface import drop_idle_nodes
from edgekit.prepare.opset import read_opset
from edgekit.prepare.rewrites.recurrent import split_lstm
from edgekit.prepare.rewrites.signs import store_weights
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.finer_weights import SPLIT_BITS
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.plan import FloatNode, QuantPlan, draft_plan, find_float_constants
from edgekit.quantize.qdq import build_qdq, compact_qdq, plan_calibration, plan_graph
from edgekit.quantize.ranges import RANGE_METHODS
from edgekit.serialize import UNDECODABLE, ready_type
from edgekit.target import Target

MAX_PLAN_BYTES = 1 << 26
"""A larger file was not written by edgekit: a plan takes about 100 bytes a tensor."""
# Fields that only the target decides.
_GIVEN = (
    "scheme", "activation", "weight", "activation_symmetric", "weight_symmetric", "reduce_range", "shared_ops",
    "unsigned_ops", "float_bias",
)  # fmt: skip
_HINT = "correct it, or plan again: edgekit quantize --plan-only"
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def read_plan(path: Path) -> QuantPlan:
    """Returns the plan in a file.

    Raises:
        UsageError: the file cannot be read or holds no plan.
    """
    malformed = UsageError(f"'{path}' is no plan", hint="make one: edgekit quantize --plan-only")
    with reading(f"'{path}'", UsageError, "--plan takes a .json file"), path.open("rb") as stream:
        data = stream.read(MAX_PLAN_BYTES)
    with reraised(UNDECODABLE, malformed, quote=True):
        return msgspec.json.decode(data, type=ready_type(QuantPlan))


def require_origin(plan: QuantPlan, model: Model, samples_sha256: str, target: Target) -> None:
    """Refuses a plan that was made for another model, with other samples or for another target.

    Raises:
        UsageError: it was made for another.
    """
    again = "plan it again: edgekit quantize --plan-only"
    if plan.model_sha256 != model.sha256:
        raise UsageError("the plan was made for another model", hint=again)
    if plan.samples_sha256 != samples_sha256:
        raise UsageError("the plan was made with other samples", hint="give the same --data and --samples")
    if plan.target != target.name:
        raise UsageError(f"the plan is for target '{plan.target}'", hint=f"give --target {plan.target}")


def require_plan(plan: QuantPlan, model: Model, calibration: Calibration, target: Target) -> None:
    """Refuses a plan from a file that cannot be applied.

    A user may leave operators out, keep nodes float, change ranges and, where the target takes 16 bits, give them to
    tensors. Names must exist, ranges must yield valid scales, and what only the target decides must be unchanged.

    Raises:
        UsageError: the plan names something that does not exist, holds an impossible number, or asks for what the
            target does not take.
        ModelError: no node of the model can be quantized.
    """
    graph = plan_graph(model, plan, calibration)
    # A fresh plan for the target shows which names exist and what only the target decides.
    own = draft_plan(model, graph, plan_calibration(model, plan, calibration), target, plan.precision)
    complaint = next(_complaints(plan, own, graph, target), None)
    if complaint is not None:
        raise UsageError(f"the plan {complaint[0]}", hint=complaint[1])


_Complaint = tuple[str, str]


def _complaints(plan: QuantPlan, own: QuantPlan, graph: Graph, target: Target) -> Iterator[_Complaint]:
    for field in _GIVEN:
        if getattr(plan, field) != getattr(own, field):
            yield f"has {field} = {_show(plan, field)}, but target '{target.name}' takes {_show(own, field)}", _HINT
    if plan.method not in RANGE_METHODS:
        yield f"has the range method '{plan.method}'", suggest_name(plan.method, RANGE_METHODS)
    for op in sorted({*plan.op_types} - {*own.op_types}):
        yield f"quantizes '{op}', which this model or target does not have", suggest_name(op, own.op_types)
    ops = {node.name: node.op_type for node in graph.nodes}
    for node in plan.float_nodes:
        if node.name not in ops:
            yield f"keeps node '{node.name}' float, which does not exist", suggest_name(node.name, ops)
        elif ops[node.name] != node.op:
            yield f"takes node '{node.name}' for {node.op}; it is {ops[node.name]}", _HINT
    constants = dict(find_float_constants(graph, plan))
    for name in plan.narrow.bits:
        if name not in constants:
            yield f"narrows '{name}', which is no large constant of float nodes alone", suggest_name(name, constants)
    yield from _odd_ranges(plan, own, target)
    if plan.block not in {0, own.block}:
        takes = f"takes {own.block}" if own.block else "takes none"
        yield f"has blocks of {plan.block} weights, but {plan.precision} of target '{target.name}' {takes}", _HINT
    layers = {layer.weight for layer in read_layers(graph)} if "int16" in target.precisions and not own.bits else set()
    for weight, bits in plan.bits.items():
        if own.bits.get(weight) != bits and not (bits == SPLIT_BITS and weight in layers):
            takes = f"takes {own.bits[weight]}" if weight in own.bits else "has 8 for it"
            yield f"gives '{weight}' {bits} bits, but {plan.precision} of target '{target.name}' {takes}", _HINT
    for weight, axis in plan.axes.items():
        if own.axes.get(weight) != axis:
            takes = f"takes axis {own.axes[weight]}" if weight in own.axes else "has no scale per channel for it"
            yield f"gives '{weight}' a scale for each index of axis {axis}, but target '{target.name}' {takes}", _HINT


def _show(plan: QuantPlan, field: str) -> str:
    value = getattr(plan, field)
    return ", ".join(cast("tuple[str, ...]", value)) or "none" if isinstance(value, tuple) else f"{value}".lower()


def _odd_ranges(plan: QuantPlan, own: QuantPlan, target: Target) -> Iterator[_Complaint]:
    for tables in (plan.ranges, plan.wide, plan.grids):
        for name in sorted(set(tables) - set(own.ranges) - set(own.wide)):
            yield f"has numbers for '{name}', which is no float tensor of it", suggest_name(name, own.ranges)
    missing = next((name for name in own.ranges if name not in plan.ranges), None)
    if missing is not None:
        yield f"lacks the range of '{missing}'", _HINT
    if plan.wide and not target.widens(plan.precision):
        yield f"gives '{next(iter(plan.wide))}' 16 bits, which target '{target.name}' does not take", _HINT
    for name, span in (*plan.ranges.items(), *plan.wide.items()):
        if not (span.low <= span.high and max(span.high, 0.0) - min(span.low, 0.0) <= _MOST):
            yield f"gives '{name}' the range from {span.low:g} to {span.high:g}, which has no scale", _HINT
    limits = np.iinfo(plan.activation)
    for name, grid in plan.grids.items():
        if not _LEAST <= grid.scale <= _MOST or not limits.min <= grid.zero_point <= limits.max:
            what = f"scale {grid.scale:g} and the zero point {grid.zero_point}"
            yield f"gives '{name}' the {what}, which {plan.activation} cannot have", _HINT


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
