"""Keeping fp16 graphs whole: ONNX Runtime's CPU provider has few fp16 kernels, and rewrites what it has none for.

Around a node without a kernel it puts casts (ORT's `insert_cast_transformer.cc`), and a node that ONNX defines as a
function it replaces by the function's body. The provider of another device has the kernels, so both must not stay.
"""

import re
from collections.abc import MutableSequence
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

from edgekit.graph.rewrite import set_nodes
from edgekit.model.model import iterate_graphs
from edgekit.prepare.shapes.infer import infer_types

# How the names of inserted casts, and of the values between them, begin: ONNX Runtime's and ours.
_INSERTED = re.compile(r"^(InsertedPrecisionFreeCast_|EdgekitGuard\d+_)+")


def guard_half(proto: onnx.ModelProto) -> None:
    """Puts the casts that ONNX Runtime would insert around fp16 functions, so that it keeps these whole, in place."""
    if not _has_half(proto.graph):
        return
    types = infer_types(proto)
    nodes: list[onnx.NodeProto] = []
    for count, node in enumerate(proto.graph.node):
        if _is_function(node) and any(types.get(name) == TensorProto.FLOAT16 for name in node.input):
            nodes.extend(_guard_node(node, types, f"EdgekitGuard{count}_"))
        else:
            nodes.append(node)
    set_nodes(proto.graph, nodes)


def strip_casts(graph: onnx.GraphProto) -> bool:
    """Removes inserted casts, ours and ONNX Runtime's, and gives the values their names back, in place.

    Returns True if there was one. Where ONNX Runtime merged them with casts of the model, the types no longer fit.
    """
    stripped = False
    for part in iterate_graphs(graph):
        kept = [node for node in part.node if not _INSERTED.match(node.name)]
        stripped |= len(kept) < len(part.node)
        set_nodes(part, kept)
        values = [value for value in part.value_info if not _INSERTED.match(value.name)]
        del part.value_info[:]
        part.value_info.extend(values)
        for node in part.node:
            _strip_prefix(node.input)
            _strip_prefix(node.output)
    return stripped


def _has_half(graph: onnx.GraphProto) -> bool:
    return any(tensor.data_type == TensorProto.FLOAT16 for tensor in graph.initializer) or any(
        value.type.tensor_type.elem_type == TensorProto.FLOAT16 for value in graph.input
    )


def _is_function(node: onnx.NodeProto) -> bool:
    if node.domain or not defs.has(node.op_type):
        return False
    schema: Any = defs.get_schema(node.op_type)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _guard_node(node: onnx.NodeProto, types: dict[str, int], prefix: str) -> list[onnx.NodeProto]:
    halves = list(dict.fromkeys(name for name in node.input if types.get(name) == TensorProto.FLOAT16))
    outputs = [name for name in node.output if types.get(name) == TensorProto.FLOAT16]
    inside = onnx.NodeProto()
    inside.CopyFrom(node)
    inside.input[:] = [f"{prefix}{name}" if name in halves else name for name in node.input]
    inside.output[:] = [f"{prefix}{name}" if name in outputs else name for name in node.output]
    before = [_cast(name, f"{prefix}{name}", TensorProto.FLOAT) for name in halves]
    return [*before, inside, *(_cast(f"{prefix}{name}", name, TensorProto.FLOAT16) for name in outputs)]


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    name = source if _INSERTED.match(source) else result
    return helper.make_node("Cast", [source], [result], name=f"{name}/cast", to=to)


def _strip_prefix(names: MutableSequence[str]) -> None:
    names[:] = [_INSERTED.sub("", name) for name in names]
