"""Why a layer stands out: in what way its result is not the expected one, and what its nodes have otherwise."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx

from edgekit.graph.constants import read_dequantized
from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Array
from edgekit.verify.layers.matching import DEQUANTIZE, QUANTIZE
from edgekit.verify.metrics.changes import describe_change, describe_pairs
from edgekit.verify.metrics.tensor_metrics import measure_errors, sqnr_db

# Rounding to 8 bits leaves more of a weight than this, the worst grid of four bits too.
_LEAST_WEIGHT_DB = 12.0
_MOST_CAUSES = 3
_ROUNDING = frozenset({QUANTIZE, DEQUANTIZE})


def find_causes(
    pairs: Sequence[tuple[Array, Array]], a: Graph, b: Graph, results: Sequence[str], *, scaled: bool
) -> Iterator[str]:
    """Yields at most three causes why a layer of `b` gives the second of each pair, and not the first.

    `results` name what the layer's nodes compute; `scaled` means that the channels of weights are scaled in `b`.
    """
    change = describe_pairs(pairs)
    found = [f"its result {change}"] if change else []
    nodes = {node.name: node for node in a.nodes if node.name}
    for node in dict.fromkeys(b.producers[name] for name in results):
        other = nodes.get(node.name)
        if other is not None and node.op_type not in _ROUNDING:
            found.extend(_compare_nodes(other, node, a, b, scaled=scaled))
    yield from found[:_MOST_CAUSES]


def _compare_nodes(wanted: Node, node: Node, a: Graph, b: Graph, *, scaled: bool) -> Iterator[str]:
    if node.op_type != wanted.op_type:
        yield f"its operator is {node.op_type}, in the reference {wanted.op_type}"
        return
    ours, theirs = _read_attributes(node), _read_attributes(wanted)
    for name in sorted(ours.keys() & theirs.keys()):
        if not _is_same(ours[name], theirs[name]):
            yield f"its attribute '{name}' is {_show(ours[name])}, in the reference {_show(theirs[name])}"
    for place, (its, mine) in enumerate(zip(wanted.input, node.input, strict=False)):
        expected, stored = _read_weight(its, a), _read_weight(mine, b)
        if expected is None or stored is None or scaled or expected.shape != stored.shape or not expected.size:
            continue
        lost = sqnr_db([measure_errors(expected.astype(np.float64), stored.astype(np.float64))])
        if lost < _LEAST_WEIGHT_DB:
            change = describe_change(expected[np.newaxis], stored[np.newaxis])
            yield f"its input {place}, '{mine}', {change or f'lies {lost:.1f} dB from that of the reference'}"


def _read_attributes(node: Node) -> dict[str, Any]:
    """Returns the attributes of a node, those that it leaves out with the defaults of the operator."""
    try:
        schema = onnx.defs.get_schema(node.op_type, node.since, node.domain)
    except onnx.defs.SchemaError:
        return node.attributes
    known = {name: item.default_value for name, item in schema.attributes.items() if item.default_value.type}
    values = {name: onnx.helper.get_attribute_value(value) for name, value in known.items()}
    defaults = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    return defaults | node.attributes


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(list(value) if isinstance(value, tuple) else value)


def _read_weight(name: str, graph: Graph) -> Array | None:
    """Returns a constant of numbers, dequantized if it is rounded; None for anything else."""
    node = graph.producers.get(name)
    try:
        if node is None:
            value = graph.constant(name)
        elif node.op_type == DEQUANTIZE and all(part in graph.constants for part in node.reads):
            value = read_dequantized(node.proto, graph.weight)
        else:
            value = None
    except ValueError:
        return None
    return value if value is not None and value.dtype.kind in "fiu" else None
