"""The rewrites that advice calls automatic: each leaves every result as it is."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx

from edgekit.model import Model, iterate_graphs, read_proto
from edgekit.prepare import flatten_to_reshape, idle_relu, resize_inputs, sum_to_add
from edgekit.prepare.external import save_graph
from edgekit.prepare.opset import read_opset
from edgekit.prepare.tidy import merge_domains, name_nodes

FIXES: dict[str, Callable[[onnx.GraphProto, int], tuple[str, ...]]] = {
    sum_to_add.FIX_ID: sum_to_add.rewrite_sums,
    resize_inputs.FIX_ID: resize_inputs.leave_out_empty_inputs,
    idle_relu.FIX_ID: idle_relu.drop_idle_relus,
    flatten_to_reshape.FIX_ID: flatten_to_reshape.write_flattens,
}
"""Each changes a graph in place and returns the names of the nodes it changed; they run in this order."""


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """A rewrite that was applied, by the id that advice has for it, and the nodes it changed."""

    id: str
    nodes: tuple[str, ...]


class FixedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model after the automatic rewrites, and which of them found something to do."""

    model: Model
    fixes: tuple[Fix, ...]


def fix_model(model: Model, out: Path) -> FixedModel:
    """Writes a model to `out` with every automatic rewrite applied; the results it gives are the same.

    Raises:
        OutputError: `out` cannot be written.
    """
    proto = read_proto(model, weights=False)
    merge_domains(proto)
    name_nodes(proto.graph)
    opset = read_opset(proto)
    fixes = tuple(
        Fix(id=name, nodes=nodes)
        for name, apply in FIXES.items()
        if (nodes := tuple(node for graph in iterate_graphs(proto.graph) for node in apply(graph, opset)))
    )
    name_nodes(proto.graph)
    return FixedModel(model=save_graph(proto, model, out), fixes=fixes)
