"""The QDQ graph of a plan: placed by ONNX Runtime's quantizer, then with better weights."""

from pathlib import Path

import onnx

from edgekit.graph.graph import Graph
from edgekit.graph.rewrite import set_nodes
from edgekit.model.model import Model, order_nodes
from edgekit.model.tensors import Array
from edgekit.quantize._ort_quantizer import QdqRequest, find_grids, place_qdq
from edgekit.quantize.calibration.calibrate import Calibration, open_float_graph
from edgekit.quantize.equalization.equalize import equalize_calibration, equalize_graph, scaled_layers
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.qdq.blocks import store_blocks
from edgekit.quantize.ranges.shared import share_ranges, shared_tensors
from edgekit.quantize.rounding.gptq import LIMIT, REDUCED_LIMIT
from edgekit.quantize.rounding.weights import round_qdq_weights

# Operators with a grid of their own that the range of their group replaces: a provider that takes a Concat with one
# scale alone takes its Sigmoid with any. A Softmax keeps its.
_REPLACEABLE_GRIDS = frozenset({"Sigmoid"})


def plan_graph(model: Model, plan: QuantPlan, calibration: Calibration) -> Graph:
    """Returns the float graph of a model, which was calibrated, with the channels of tensors scaled as planned.

    Raises:
        ModelError: the model is quantized already, or older than opset 13.
        UsageError: the plan is not of this model.
    """
    return equalize_graph(open_float_graph(model, calibration), plan.factors, Path(calibration.statistics))


def plan_calibration(model: Model, plan: QuantPlan, calibration: Calibration) -> Calibration:
    """Returns what the calibration of a model says of the graph that a plan quantizes.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    graph = open_float_graph(model, calibration)
    return equalize_calibration(graph, calibration, plan.factors) if plan.factors else calibration


def build_qdq(graph: Graph, plan: QuantPlan, statistics: Path, subject: str) -> onnx.ModelProto:
    """Returns the QDQ form of a float graph as planned, rounded with the statistics of a calibration.

    Raises:
        ModelError: ORT's quantizer refuses the model.
        UsageError: the statistics are gone.
    """
    return round_weights(place_plan(graph, plan, subject), graph, plan, statistics)


def place_plan(graph: Graph, plan: QuantPlan, subject: str) -> onnx.ModelProto:
    """Returns the QDQ form of a float graph with every weight rounded to the nearest.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    placed = place_qdq(graph.model, _request(plan, graph), subject, graph.folder)
    _feed_floats(placed.graph, {node.name for node in plan.float_nodes})
    nodes = order_nodes(placed.graph)
    set_nodes(placed.graph, nodes)
    return placed


def find_plan_grids(graph: Graph, plan: QuantPlan, subject: str) -> dict[str, Array]:
    """Returns scales and zero points of activations, by their names in the placed graph of any plan with other ranges.

    Raises:
        ModelError: ORT's quantizer refuses the model.
    """
    return find_grids(graph.model, _request(plan, graph), subject, graph.folder)


def round_weights(placed: onnx.ModelProto, graph: Graph, plan: QuantPlan, statistics: Path) -> onnx.ModelProto:
    """Returns a placed graph with its weights rounded as planned.

    Raises:
        UsageError: the statistics are gone.
    """
    qdq = onnx.ModelProto()
    qdq.CopyFrom(placed)
    scaled = scaled_layers(graph, plan.factors)
    round_qdq_weights(qdq, graph, statistics, plan.rounding, scaled, _limit(plan), plan.bits)
    if plan.block:
        store_blocks(qdq, graph, plan, statistics, scaled)
    return qdq


def _limit(plan: QuantPlan) -> int:
    return REDUCED_LIMIT if plan.reduce_range else LIMIT


def _request(plan: QuantPlan, graph: Graph) -> QdqRequest:
    ranges, grids = plan.ranges, plan.grids
    if plan.shared_ops:
        floats = {node.name for node in plan.float_nodes}
        shared = shared_tensors(graph, plan.shared_ops, floats)
        ranges = share_ranges(graph, ranges, plan.shared_ops, floats)
        freed = {name for name in shared & grids.keys() if graph.producers[name].op_type in _REPLACEABLE_GRIDS}
        grids = {name: grid for name, grid in grids.items() if name not in freed}
    return QdqRequest(
        scheme=plan.scheme,
        activation=plan.activation,
        weight="int8" if plan.weight_symmetric else plan.weight,
        activation_symmetric=plan.activation_symmetric,
        weight_symmetric=plan.weight_symmetric,
        op_types=plan.op_types,
        excluded=tuple(node.name for node in plan.float_nodes),
        ranges={name: (span.low, span.high) for name, span in ranges.items()},
        grids=grids,
        weight_limit=_limit(plan),
        axes=plan.axes,
        wide={name: (span.low, span.high) for name, span in plan.wide.items()},
        contrib=bool(plan.bits),
        float_bias=plan.float_bias,
    )


def _feed_floats(graph: onnx.GraphProto, kept: set[str]) -> None:
    """Lets nodes kept float read float tensors that no quantized node makes as they are, not through Q and DQ."""
    # ONNX Runtime's quantizer puts Q and DQ on every tensor that a quantized node reads too. A float Conv behind such a
    # DQ and before a Q would get its weights quantized per tensor when a session is made: WeightBiasQuantization, on by
    # default (onnxruntime/core/optimizer/qdq_transformer/weight_bias_quantization.cc).
    producers = {name: node for node in graph.node for name in node.output}
    for node in graph.node:
        if node.name not in kept:
            continue
        for index, name in enumerate(node.input):
            source = _float_source(producers, name)
            if source != name and (source not in producers or producers[source].name in kept):
                node.input[index] = source


def _float_source(producers: dict[str, onnx.NodeProto], name: str) -> str:
    dequantize = producers.get(name)
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return name
    quantize = producers.get(dequantize.input[0])
    return quantize.input[0] if quantize is not None and quantize.op_type == "QuantizeLinear" else name
