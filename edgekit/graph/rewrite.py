"""Putting nodes in the place of others."""

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.graph.contrib import ORT_DOMAIN, ORT_OWN
from edgekit.graph.graph import Graph, Node, view_part

FLOATS = frozenset({"float32", "float16"})
"""The element types that rewrites with numbers in them know."""

Expand = Callable[[Graph, Node], Sequence[onnx.NodeProto] | None]


def replace_nodes(
    graph: onnx.GraphProto, opset: int, ops: Collection[str], expand: Expand, folder: Path = Path()
) -> tuple[str, ...]:
    """Puts what `expand` returns in the place of each node of these operators, in place; None keeps it.

    Shapes are those that the graph holds, which `fix_model` infers first. Nodes that ONNX does not allow are not shown
    to `expand`. Returns the names of the nodes replaced. External data lie in `folder`.
    """
    # The view costs a pass over the graph, and most rewrites find nothing.
    if not any(node.op_type in ops for node in graph.node):
        return ()
    view = view_part(graph, opset, folder)
    made: dict[str, Sequence[onnx.NodeProto]] = {}
    changed: list[str] = []
    for node in view.nodes:
        # What ONNX's checker refuses may lack inputs that a rewrite relies on.
        nodes = expand(view, node) if node.op_type in ops and _is_valid(node, opset) else None
        if nodes is not None:
            made[node.output[0]] = nodes
            changed.append(node.proto.name)
    if changed:
        kept = [new for node in graph.node for new in made.get(node.output[0] if node.output else "", (node,))]
        set_nodes(graph, kept)
    return tuple(changed)


def set_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Gives a graph other nodes, some of which may be its own, in place."""
    kept = list(nodes)
    del graph.node[:]
    graph.node.extend(kept)


def copy_fields(source: Any, target: Any, skipped: Collection[str]) -> None:
    """Copies the fields of a message but for some; a copy of the whole would hold these too for a while."""
    for field, value in source.ListFields():
        if field.name in skipped:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def _is_valid(node: Node, opset: int) -> bool:
    if not node.input[0] or not node.output[0]:
        return False
    if node.domain == ORT_DOMAIN or (node.op_type in ORT_OWN and not node.domain):
        return True
    # The checker of one node; `check_model` would want a whole model that is valid.
    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = {"": opset}
    try:
        onnx.checker.check_node(node.proto, context)
    except onnx.checker.ValidationError:
        return False
    return not node.domain


class Writer(msgspec.Struct, kw_only=True):
    """Writes the nodes that stand for one: each is named after it, and the last bears its name and its output."""

    graph: Graph
    node: Node
    nodes: list[onnx.NodeProto] = []

    def add(self, op: str, inputs: Sequence[str], part: str = "", **attributes: Any) -> str:
        """Adds a node and returns its output; without a `part` to name it, it is the last."""
        name = f"{self.node.proto.name}/{part}" if part else self.node.proto.name
        output = f"{self.node.output[0]}/{part}" if part else self.node.output[0]
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=name, **attributes))
        return output

    def constant(self, part: str, value: Any, dtype: str) -> str:
        """Adds a constant and returns its name."""
        name = f"{self.node.proto.name}/{part}"
        self.graph.proto.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name
