"""Writes the quantized graph: with Q and DQ nodes, and in QOperator form.

ONNX Runtime's quantizer places Q and DQ nodes, then the weights are rounded again. MatMuls whose 4-bit weights are
quantized in blocks become MatMulNBits between Q and DQ of 16 bits. `compact_qdq` removes what a file does not need.
"""

import hashlib
import os
import string
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import defs, helper

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.errors import ModelError
from edgekit.graph.graph import Graph
from edgekit.model import model as models
from edgekit.model.external import DataPlace, count_bytes, point_to
from edgekit.model.soundness import read_opsets
from edgekit.model.tensors import Array
from edgekit.prepare.clean import import_contrib, restore_metadata, sort_values
from edgekit.prepare.external import is_absent
from edgekit.prepare.interface import name_nodes
from edgekit.quantize._ort_quantizer import place_qdq
from edgekit.quantize.calibration.calibrate import Calibration, assume_ranges, open_float_graph
from edgekit.quantize.calibration.moments import StoredMoments
from edgekit.quantize.channel_pairs import SUFFIX, find_channel_source
from edgekit.quantize.equalize import equalize_calibration, equalize_graph
from edgekit.quantize.finer_weights import multiply_gains, split_weights
from edgekit.quantize.graph.float_graph import float_activations, read_float_graph
from edgekit.quantize.graph.layers import Layer, read_layers
from edgekit.quantize.plan import QuantPlan, draft_plan
from edgekit.quantize.ranges import TensorRange
from edgekit.quantize.rounding import Rounder, recall_rounded, round_qdq_weights
from edgekit.quantize.weight_blocks import BlockForm, Blocks, quantize_blocks, round_blocks, write_product
from edgekit.target import Precision, Target

# The provider leaves a MatMulNBits of another rank to the CPU (targets/qnn/rules.toml).
_RANK = 3
# Roundings that treat each weight by itself; the others use the moments of the layer's input.
_WITHOUT_MOMENTS = frozenset({"nearest", "bias"})


def store_blocks(qdq: onnx.ModelProto, how: Rounder, block: int) -> None:
    """Turns each MatMul [., ., K] whose weight [K, N] has 4 bits into a MatMulNBits; changes `qdq`.

    `block` weights share a scale. Weights are rounded from their float values, with scales that LPBQ can represent: to
    nearest, or by `round_blocks` if the rounding uses moments of samples.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    graph = how.graph
    form = BlockForm(bits=4, block=block, lpbq=True)
    layers = {layer.node: layer for layer in read_layers(graph) if layer.op == "MatMul" and layer.weight in how.bits}
    made = {name for node in qdq.graph.node for name in node.output}
    # A node that stayed float reads its weight directly, not from a DequantizeLinear.
    found = [
        (node, layers[node.name])
        for node in qdq.graph.node
        if node.op_type == "MatMul" and node.name in layers and node.input[1] in made
    ]
    found = [(node, layer) for node, layer in found if len(graph.value(layer.source).shape or ()) == _RANK]
    if not found:
        return
    stored = StoredMoments(how.statistics)
    for node, layer in found:
        weight = graph.weight(layer.weight)
        learns = how.rounding not in _WITHOUT_MOMENTS
        blocks = _round_by_moments(how, layer, weight, form, stored) if learns else None
        blocks = blocks or quantize_blocks(weight, form.bits, form.block, lpbq=True)
        write_product(qdq.graph, node, layer.weight, blocks, form, len(weight))
    # The DequantizeLinear nodes of the replaced weights have no readers any more.
    models.drop_unread(qdq.graph, ["DequantizeLinear"])
    import_contrib(qdq)


def _round_by_moments(
    how: Rounder, layer: Layer, weight: Array, form: BlockForm, stored: StoredMoments
) -> Blocks | None:
    """Returns the blocks of a weight, rounded with its layer's moments, stored once; None if it has no moments."""
    key = hashlib.sha256(f"blocks {form.block}:{layer.node}:{how.factors.get(layer.node)}".encode())
    key.update(np.ascontiguousarray(weight).tobytes())

    def compute() -> dict[str, Array] | None:
        moments = how.read_moments(stored, layer)
        return (
            None
            if moments is None
            else dict(zip(("values", "scales"), round_blocks(weight, moments, form), strict=True))
        )

    found = recall_rounded(how.statistics, key.hexdigest(), compute)
    return None if found is None else (found["values"], found["scales"])


def plan_graph(model: models.Model, plan: QuantPlan, calibration: Calibration) -> Graph:
    """Returns the float graph of a calibrated model, with channels scaled as planned (equalization).

    Raises:
        ModelError: the model is quantized already, or older than opset 13.
        UsageError: the plan was made for another model.
    """
    return equalize_graph(open_float_graph(model, calibration), plan.factors, Path(calibration.statistics))


def plan_calibration(model: models.Model, plan: QuantPlan, calibration: Calibration) -> Calibration:
    """Returns the calibration of a model, adapted to the graph that a plan quantizes.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    graph = open_float_graph(model, calibration)
    return equalize_calibration(graph, calibration, plan.factors) if plan.factors else calibration


def build_qdq(graph: Graph, plan: QuantPlan, statistics: Path, subject: str) -> onnx.ModelProto:
    """Returns the QDQ form of a float graph as planned; weights are rounded with a calibration's statistics.

    Raises:
        ModelError: ORT's quantizer refuses the model.
        UsageError: the statistics are gone.
    """
    return round_weights(place_plan(graph, plan, subject), graph, plan, statistics)


def place_plan(graph: Graph, plan: QuantPlan, subject: str) -> onnx.ModelProto:
    """Returns the QDQ form of a float graph with every weight rounded to nearest.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    placed, kept = place_qdq(graph, plan, subject), {node.name for node in plan.float_nodes}
    # ONNX Runtime's quantizer puts Q and DQ on a tensor for all its readers if one of them is quantized. A float Conv
    # between such a DQ and a Q would get its weights quantized per tensor when a session is made:
    # WeightBiasQuantization, on by default (onnxruntime/core/optimizer/qdq_transformer/weight_bias_quantization.cc).
    # So float nodes read the tensors of float producers and inputs themselves.
    makers = {name: node for node in placed.graph.node for name in node.output}
    for node in (node for node in placed.graph.node if node.name in kept):
        for index, name in enumerate(node.input):
            dequantize = makers.get(name)
            is_dequantized = dequantize is not None and dequantize.op_type == "DequantizeLinear"
            quantize = makers.get(dequantize.input[0]) if dequantize is not None and is_dequantized else None
            if quantize is not None and quantize.op_type == "QuantizeLinear":
                source = makers.get(quantize.input[0])
                if source is None or source.name in kept:
                    node.input[index] = quantize.input[0]
    multiply_gains(placed.graph, graph)
    nodes = models.order_nodes(placed.graph)
    models.refill(placed.graph.node, nodes)
    return placed


def place_unmeasured(model: models.Model, target: Target, precision: Precision) -> models.Model:
    """Writes beside a model its QDQ form as if each tensor had been seen from -1 to 1: for a check, not to run.

    Weights without values, and those in another file, count as zeros.

    Raises:
        ModelError: the model is quantized already, no node can be quantized, ORT's quantizer refuses it, or its weights
            are large: a check reads none, but these would be rounded (VGG-19: 3 s and 900 MB).
    """
    proto, zeros, filled = models.read_proto(model, weights=False), model.path.with_name("zeros.data"), model
    absent = {tensor.name: count_bytes(tensor) or 0 for tensor in proto.graph.initializer if is_absent(tensor)}
    if sum(absent.values()) > models.LARGE_BYTES:
        raise ModelError(f"the weights of '{model.name}' are too large to be rounded in a check", hint="quantize it")
    if absent:
        for tensor in proto.graph.initializer:
            if tensor.name in absent:
                point_to(tensor, DataPlace(zeros.name, 0, absent[tensor.name]))
        # All these weights are read from one file, which has a length and takes no space.
        zeros.touch()
        os.truncate(zeros, max(absent.values()))
        filled = models.save_proto(proto, model.path.with_name("filled.onnx"))
    graph = read_float_graph(filled)
    calibration = assume_ranges(filled, dict.fromkeys(float_activations(graph), TensorRange(low=-1.0, high=1.0)))
    plan = draft_plan(filled, graph, calibration, target, precision)
    # Nothing reads the values, so it does not matter that some are infinite.
    with np.errstate(all="ignore"):
        placed = place_plan(graph, plan, model.name)
    return models.save_proto(placed, model.path.with_name("placed.onnx"))


def round_weights(placed: onnx.ModelProto, graph: Graph, plan: QuantPlan, statistics: Path) -> onnx.ModelProto:
    """Returns a placed graph with its weights rounded as planned.

    Raises:
        UsageError: the statistics are gone.
    """
    qdq = deepcopy(placed)
    # The input of each layer before equalization.
    sources = {layer.node: find_channel_source(graph, layer).removesuffix(SUFFIX) for layer in read_layers(graph)}
    how = Rounder(
        graph=graph, statistics=statistics, rounding=plan.rounding,
        factors={node: plan.factors[source] for node, source in sources.items() if source in plan.factors},
        limit=plan.find_weight_limit(), bits=plan.bits,
    )  # fmt: skip
    round_qdq_weights(qdq, how)
    split_weights(qdq, how)
    if plan.block:
        store_blocks(qdq, how, plan.block)
    return qdq


_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_LETTERS = string.ascii_letters
_DIGITS = _LETTERS + string.digits
# Defaults of Conv's attributes (ONNX operator Conv), which its schema states only in prose.
_CONV_DEFAULTS: Mapping[str, int] = {"dilations": 1, "strides": 1, "pads": 0}


def compact_qdq(proto: onnx.ModelProto) -> None:
    """Makes a QDQ model smaller, in place; the user's activations and nodes keep their names.

    Short names are given to Q and DQ nodes, to their outputs, and to the constants that only they read. Activations
    share equal scales and zero points, biases of equal length share their zero point. Types of intermediate tensors,
    which follow from the graph, and attributes with default values are removed. On a MobileNetV2 this saves a twelfth
    of the file.
    """
    graph = proto.graph
    del graph.value_info[:]
    opsets = read_opsets(proto.opset_import)
    for node in graph.node:
        node.ClearField("doc_string")
        if node.domain in {"", "ai.onnx"} and defs.has(node.op_type):
            schema = defs.get_schema(node.op_type, opsets.get("", 1))
            models.refill(
                node.attribute, [item for item in node.attribute if not _is_default(node.op_type, item, schema)]
            )
    _share_constants(graph)
    quantizers = [node for node in graph.node if node.op_type in _QUANTIZERS]
    for node, name in zip(quantizers, _free_names({node.name for node in graph.node}), strict=False):
        node.name = name
    others = [node for node in graph.node if node.op_type not in _QUANTIZERS]
    kept = {name for node in others for name in node.output}
    kept |= {value.name for value in (*graph.input, *graph.output)}
    kept |= {name for part in models.iterate_graphs(graph) if part is not graph for name in models.list_names(part)}
    made = {name for node in quantizers for name in node.output} - kept
    read = {name for node in others for name in node.input}
    own = [*(each.name for each in graph.initializer if each.name not in kept | read), *sorted(made)]
    models.rename_tensors(graph, dict(zip(own, _free_names(models.list_names(graph)), strict=False)))


def _is_default(op: str, attribute: onnx.AttributeProto, schema: defs.OpSchema) -> bool:
    if op == "Conv" and attribute.name in _CONV_DEFAULTS:
        return set(attribute.ints) == {_CONV_DEFAULTS[attribute.name]}
    known = schema.attributes.get(attribute.name)
    if known is None or not known.default_value.name or attribute.type != known.default_value.type:
        return False
    return bool(helper.get_attribute_value(attribute) == helper.get_attribute_value(known.default_value))


def _share_constants(graph: onnx.GraphProto) -> None:
    stored = {tensor.name: tensor for tensor in graph.initializer}
    kept: dict[tuple[int, bytes], str] = {}
    for node in graph.node:
        if node.op_type not in _QUANTIZERS:
            continue
        # Biases (int32) have no zero point but 0 (ONNX operator DequantizeLinear), so all of one length share it.
        # Weights (int8) share nothing: with `session.x64quantprecision` ONNX Runtime 1.31 turns weight and zero point
        # into uint8 (avx2_weight_s8_to_u8.cc), and cannot load a model where weights share a zero point. Nor may the
        # zero point be omitted: ONNX Runtime cannot load the model that it then saves in runtime style, or computes it
        # wrongly.
        first = 1
        if node.input[0] in stored:
            first = 2 if stored[node.input[0]].data_type == onnx.TensorProto.INT32 else len(node.input)
        for place in range(first, len(node.input)):
            constant = stored.get(node.input[place])
            if constant is not None:
                unnamed = deepcopy(constant)
                unnamed.name = ""
                # Deterministic, because these bytes are compared.
                contents = unnamed.SerializeToString(deterministic=True)
                node.input[place] = kept.setdefault((place, contents), constant.name)
    models.drop_unread(graph)
    zeros = {node.input[2] for node in graph.node if node.op_type in _QUANTIZERS and len(node.input) > 2}
    for tensor in graph.initializer:
        if tensor.name in zeros and tensor.data_type == onnx.TensorProto.INT32 and not any(tensor.raw_data):
            # As varints of a protobuf, zeros take one byte each; in raw_data they take four.
            size = len(tensor.raw_data) // 4
            tensor.ClearField("raw_data")
            tensor.int32_data.extend([0] * size)


def _free_names(taken: set[str]) -> Iterator[str]:
    """Yields names that are not taken: a letter, then as few letters and digits as possible."""
    for number in count():
        rest, name = number // len(_LETTERS), _LETTERS[number % len(_LETTERS)]
        while rest:
            rest, last = divmod(rest - 1, len(_DIGITS))
            name += _DIGITS[last]
        if name not in taken:
            yield name


# The optimizers of ONNX Runtime's extended level that make no QOperator nodes, switched off
# (onnxruntime/core/optimizer/graph_transformer_utils.cc).
_OTHER_FUSIONS = (
    "AttentionFusion", "BiasDropoutFusion", "BiasGeluFusion", "BiasSoftmaxFusion", "ConvActivationFusion",
    "DynamicQuantizeMatMulFusion", "EmbedLayerNormFusion", "FastGeluFusion", "GatherSliceToSplitFusion",
    "GatherToSliceFusion", "GemmActivationFusion", "GeluApproximation", "GeluFusionL2", "LayerNormFusionL2",
    "MatMulActivationFusion", "MatMulIntegerToFloatFusion", "MatMulScaleFusion", "MatmulTransposeFusion",
    "QuickGeluFusion", "SimplifiedLayerNormFusion", "SkipLayerNormFusion",
)  # fmt: skip


class QOperatorModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in QOperator form, with the number of integer operators of each type."""

    model: models.Model
    operators: dict[str, int]


def write_qoperator(model: models.Model, out: Path, cpu: str) -> QOperatorModel:
    """Writes the QOperator form of a prepared QDQ model to `out`, with its scales, zero points and weights unchanged.

    Raises:
        ModelError: no node between DQ and Q nodes has an integer operator in ONNX Runtime.
        RuntimeRefusal: ONNX Runtime cannot load the model.
    """
    # Prepacked weights would have the layout of this machine's kernels. If int8 is not allowed, ONNX Runtime turns
    # activations into uint8 (QDQS8ToU8Transformer): x64 multiplies u8 by s8, Arm s8 by s8.
    settings = SessionSettings(
        level=Level.EXTENDED,
        config={"session.disable_prepacking": "1", "session.qdqisint8allowed": "1" if cpu == "arm" else "0"},
        disabled_optimizers=_OTHER_FUSIONS,
        threads=1,
        libraries=model.custom_ops,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    optimize_graph(model.path, out, settings)
    proto = onnx.load(str(out))
    name_nodes(proto.graph)
    restore_metadata(proto, models.read_proto(model, weights=False))
    sort_values(proto.graph)
    ops = [node.op_type for node in proto.graph.node]
    counts = Counter(op for op in ops if op.startswith("QLinear") or op in {"QGemm", "MatMulIntegerToFloat"})
    if not counts:
        raise ModelError(
            f"no node of '{model.name}' became an integer operator on {cpu}", hint="give a QDQ model: edgekit quantize"
        )
    out.write_bytes(proto.SerializeToString(deterministic=True))
    written = models.load_model(out, custom_ops=model.custom_ops)
    return QOperatorModel(model=written, operators=dict(sorted(counts.items())))
