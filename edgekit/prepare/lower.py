"""Lowering the opset where the operators in use mean the same in both; onnx's converter knows few ways down."""

from typing import Any

import onnx
from onnx import defs

from edgekit.model.model import iterate_graphs


def find_newer_ops(proto: onnx.ModelProto, own: int, opset: int) -> tuple[str, ...]:
    """Returns the operators in use that mean something else, or nothing, in the older opset, sorted."""
    nodes = [node for graph in iterate_graphs(proto.graph) for node in graph.node if not node.domain]
    return tuple(sorted({node.op_type for node in nodes if not _means_the_same(node, own, opset)}))


def lower_imports(proto: onnx.ModelProto, opset: int) -> None:
    """Imports the older opset in place of the model's own, in place."""
    for entry in proto.opset_import:
        if not entry.domain:
            entry.version = opset


def _means_the_same(node: onnx.NodeProto, own: int, opset: int) -> bool:
    """Returns True if the operator has the same inputs, outputs and defaults in both opsets.

    An attribute or a trailing input that is new does no harm where the node leaves it out.
    """
    if not defs.has(node.op_type, opset):
        return False
    new: Any = defs.get_schema(node.op_type, own)
    old: Any = defs.get_schema(node.op_type, opset)
    if new.since_version == old.since_version:
        return True
    # Versions differ, but mostly by element types that were added: the signature decides.
    if len(node.input) > old.max_input or len(node.output) > old.max_output:
        return False
    names = [formal.name for formal in old.inputs][: len(node.input)]
    if names != [formal.name for formal in new.inputs][: len(node.input)]:
        return False
    given = {attribute.name for attribute in node.attribute}
    return given <= set(old.attributes) and all(
        _default(old, name) == _default(new, name) for name in set(old.attributes) - given
    )


def _default(schema: Any, name: str) -> bytes | None:
    if name not in schema.attributes:
        return None
    value: bytes = schema.attributes[name].default_value.SerializeToString(deterministic=True)
    return value
