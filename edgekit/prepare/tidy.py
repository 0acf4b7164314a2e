"""Small changes that leave what a model computes as it is: names, domains, order, stamps."""

from collections.abc import Collection, Iterable, MutableSequence
from typing import TypeVar

import onnx
from google.protobuf.message import Message

from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.model.model import iterate_graphs, keep_used_opsets, rename_tensors

_MessageT = TypeVar("_MessageT", bound=Message)

_MADE = ".prepared"


def merge_domains(proto: onnx.ModelProto) -> None:
    """Writes ONNX's own domain empty everywhere, in place: "ai.onnx" means the same, and files mix the two."""
    for part in iterate_graphs(proto.graph):
        for node in part.node:
            node.domain = _domain(node.domain)
    for entry in proto.opset_import:
        entry.domain = _domain(entry.domain)


def import_contrib(proto: onnx.ModelProto) -> None:
    """Imports ONNX Runtime's own operators where a graph has such, in place."""
    used = any(node.domain == ORT_DOMAIN for graph in iterate_graphs(proto.graph) for node in graph.node)
    if used and all(entry.domain != ORT_DOMAIN for entry in proto.opset_import):
        proto.opset_import.add(domain=ORT_DOMAIN, version=1)


def drop_initializer_inputs(graph: onnx.GraphProto) -> None:
    """Takes initializers out of the inputs, so that they count as constants, in place.

    IR version 3 wanted each initializer among the inputs, where a caller could replace it.
    """
    initializers = {tensor.name for tensor in graph.initializer}
    _replace(graph.input, [value for value in graph.input if value.name not in initializers])


def name_nodes(graph: onnx.GraphProto) -> None:
    """Gives every node, in bodies too, a name of its own, in place; names that are unique already stay.

    A node without a name is called after its operator and its first output, so that the name does not depend on what
    stands before it.
    """
    nodes = [node for part in iterate_graphs(graph) for node in part.node]
    taken = {node.name for node in nodes}
    seen: set[str] = set()
    # Where thousands bear one name, the numbers that are taken are not tried again for each.
    counts: dict[str, int] = {}
    for node in nodes:
        if not node.name or node.name in seen:
            # Not a running number: a node in front would rename all behind it, and reports of two versions could not be
            # compared.
            stem = node.name or f"{node.op_type}_{next(filter(None, node.output), '')}"
            name = stem
            while name in taken:
                counts[stem] = counts.get(stem, 0) + 1
                name = f"{stem}_{counts[stem]}"
            node.name = name
            taken.add(node.name)
        seen.add(node.name)


def rename_made(graph: onnx.GraphProto, given: Collection[str]) -> None:
    """Gives initializers that ONNX Runtime made, which are none of the names `given`, names of their own, in place.

    A session that optimizes the graph again makes constants of the same names, and ONNX Runtime 1.31 fails on two that
    are alike ("Attempt to replace the existing tensor").
    """
    made = {tensor.name: f"{tensor.name}{_MADE}" for tensor in graph.initializer if tensor.name not in given}
    rename_tensors(graph, made)


def restore_stamps(proto: onnx.ModelProto, origin: onnx.ModelProto) -> None:
    """Puts back the origin's metadata and texts, and drops the opsets that no node needs, in place."""
    keep_used_opsets(proto)
    _replace(proto.metadata_props, list(origin.metadata_props))
    proto.producer_name = origin.producer_name
    proto.producer_version = origin.producer_version
    proto.doc_string = origin.doc_string
    proto.graph.name = origin.graph.name or "graph"


def sort_values(graph: onnx.GraphProto) -> None:
    """Sorts initializers and value infos by name, in place: ONNX Runtime writes them in the order of a hash table."""
    for part in iterate_graphs(graph):
        part.initializer.sort(key=lambda tensor: tensor.name)
        part.value_info.sort(key=lambda value: value.name)


def _replace(field: MutableSequence[_MessageT], values: Iterable[_MessageT]) -> None:
    kept = list(values)
    del field[:]
    field.extend(kept)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
