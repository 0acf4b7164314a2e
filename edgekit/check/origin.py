"""The check of a prepared model told in the nodes of the model that the user has."""

from collections.abc import Iterable, Mapping

import msgspec

from edgekit.check.macs import count_bytes, count_macs
from edgekit.check.open_work import count_open
from edgekit.check.report import CheckedNode, CheckReport, ModelNode
from edgekit.check.trace import Trace, trace_nodes
from edgekit.graph.graph import infer_graph, read_graph
from edgekit.model.model import Model
from edgekit.model.skim import skim_model
from edgekit.prepare.shapes.dims import fix_dims
from edgekit.prepare.tidy import drop_initializer_inputs, merge_domains, name_nodes


class TracedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the user's model, the work it stands for there, and what became of it."""

    name: str
    op: str
    domain: str
    macs: int
    bytes: int
    trace: Trace


def trace_model(source: Model, prepared: Model, dims: Mapping[str, int]) -> tuple[TracedNode, ...]:
    """Returns each node of a model, bodies included, with what became of it when it was prepared with `dims`.

    Work is counted at the sizes of `count_open` where a dimension has no number.

    Raises:
        ModelError: a model file is gone or unreadable.
    """
    proto = skim_model(source.path)
    # As the preparation begins, so that both graphs name what has no name alike.
    merge_domains(proto)
    drop_initializer_inputs(proto.graph)
    name_nodes(proto.graph)
    fix_dims(proto.graph, dims, may_stay_open=True)
    return tuple(
        TracedNode(
            name=node.name,
            op=node.op_type,
            domain=node.domain or "ai.onnx",
            macs=count_macs(graph, node),
            bytes=count_bytes(graph, node),
            trace=trace,
        )
        for graph, node, trace in trace_nodes(count_open(infer_graph(proto)), read_graph(prepared))
    )


def tell_of_model(report: CheckReport, traced: Iterable[TracedNode]) -> CheckReport:
    """Returns a report that also lists the nodes of the user's model."""
    checked = {node.name: node for node in report.node_list}
    return msgspec.structs.replace(report, model_nodes=tuple(_judge(node, checked) for node in traced))


def _judge(node: TracedNode, checked: Mapping[str, CheckedNode]) -> ModelNode:
    now = [checked[name] for name in node.trace.became if name in checked]
    kept = now[0] if node.trace.fate == "kept" and now else None
    macs, size_bytes = (kept.macs, kept.bytes) if kept else (node.macs, node.bytes) if now else (0, 0)
    reasons = tuple(dict.fromkeys(reason for other in now for reason in other.reasons))
    return ModelNode(
        name=node.name,
        op=node.op,
        domain=node.domain,
        taken=all(other.taken for other in now),
        reasons=reasons,
        macs=macs,
        bytes=size_bytes,
        fate=node.trace.fate,
        became=node.trace.became,
        note=node.trace.note,
    )
