"""Products whose weights of 4 bits lie in blocks, between Q and DQ of 16 bits: what Qualcomm's HTP computes as LPBQ."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx

from edgekit.graph.graph import Graph
from edgekit.graph.rewrite import set_nodes
from edgekit.model.model import drop_unread
from edgekit.model.tensors import Array
from edgekit.prepare.tidy import import_contrib
from edgekit.quantize.calibration.moments import StoredMoments, open_moments, scale_moments
from edgekit.quantize.graph.layers import Layer, read_layers
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.rounding.memory import recall, remember
from edgekit.quantize.weight_only.blocks import BlockForm, Blocks, quantize_blocks, write_product
from edgekit.quantize.weight_only.learned import round_blocks

# The provider leaves a MatMulNBits of another rank to the CPU (targets/qnn/rules.toml).
_RANK = 3
# Those that look at each weight alone; the others learn from the moments of the layer's input.
_PLAIN = frozenset({"nearest", "bias"})


def store_blocks(
    qdq: onnx.ModelProto,
    graph: Graph,
    plan: QuantPlan,
    statistics: Path,
    factors: Mapping[str, tuple[float, ...]],
) -> None:
    """Makes each MatMul [., ., K] whose weight [K, N] has 4 bits a MatMulNBits; `qdq`, the QDQ form, is changed.

    Weights are rounded from their float values, with scales that LPBQ can hold: to the nearest, or by `round_blocks`
    where the plan's rounding learns from samples.

    Args:
        qdq: the QDQ form of `graph`, whose nodes keep their names.
        graph: the float graph.
        plan: says which weights have 4 bits, and how many share a scale.
        statistics: the folder of a calibration's statistics.
        factors: holds by layer those that the channels of its input were multiplied by since the calibration.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    form = BlockForm(bits=4, block=plan.block, lpbq=True)
    layers = {layer.node: layer for layer in read_layers(graph) if layer.op == "MatMul" and layer.weight in plan.bits}
    found = list(_find_products(qdq.graph, graph, layers))
    if not found:
        return
    with open_moments(statistics / "moments.npz") as stored:
        for node, layer in found:
            weight = graph.weight(layer.weight)
            blocks = None if plan.rounding in _PLAIN else _learn(layer, weight, form, stored, statistics, factors)
            blocks = blocks or quantize_blocks(weight, form.bits, form.block, lpbq=True)
            write_product(qdq.graph, node, layer.weight, blocks, form, len(weight))
    _drop_idle(qdq.graph)
    drop_unread(qdq.graph)
    import_contrib(qdq)


def _find_products(
    qdq: onnx.GraphProto, graph: Graph, layers: Mapping[str, Layer]
) -> Iterator[tuple[onnx.NodeProto, Layer]]:
    made = {name for node in qdq.node for name in node.output}
    for node in qdq.node:
        layer = layers.get(node.name)
        # A node that was left in float reads its weight as it is.
        if layer is None or node.op_type != "MatMul" or node.input[1] not in made:
            continue
        shape = graph.value(layer.source).shape
        if shape is not None and len(shape) == _RANK:
            yield node, layer


def _learn(
    layer: Layer,
    weight: Array,
    form: BlockForm,
    stored: StoredMoments,
    statistics: Path,
    factors: Mapping[str, tuple[float, ...]],
) -> Blocks | None:
    """Returns the blocks of a weight by its layer's moments, remembered; None where it has none."""
    key = hashlib.sha256(f"blocks {form.block}:{layer.node}:{factors.get(layer.node)}".encode())
    key.update(np.ascontiguousarray(weight).tobytes())
    if known := recall(statistics, key.hexdigest()[:24]):
        return known["values"], known["scales"]
    moments = stored(layer.node)
    if moments is None:
        return None
    if layer.node in factors:
        moments = scale_moments(moments, layer, np.asarray(factors[layer.node]))
    values, scales = round_blocks(weight, moments, form)
    remember(statistics, key.hexdigest()[:24], {"values": values, "scales": scales})
    return values, scales


def _drop_idle(graph: onnx.GraphProto) -> None:
    """Drops the DequantizeLinear nodes of weights that nobody reads any more."""
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    kept = [node for node in graph.node if node.op_type != "DequantizeLinear" or node.output[0] in read]
    set_nodes(graph, kept)
