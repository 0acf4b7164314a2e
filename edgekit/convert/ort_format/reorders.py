"""Numbering the ReorderOutput nodes of x64 files: ONNX Runtime hands their indices and names out in hash order."""

import struct
from typing import cast

from edgekit.convert.ort_format.tables import Record, Value, number, records, text

_DOMAIN, _OP = "com.microsoft.nchwc", "ReorderOutput"
_EDGE = struct.Struct("<Iii")


def renumber_reorders(graph: Record) -> Record:
    """Returns a graph whose ReorderOutput nodes have their indices and names in the order of their outputs.

    A graph with saved optimisations stays as it is: these refer to nodes by index, and have no such nodes.
    """
    nodes = records(graph, "nodes")
    reorders = [node for node in nodes if text(node, "domain") == _DOMAIN and text(node, "op_type") == _OP]
    # One node has nothing to be exchanged with.
    if len(reorders) < 2 or "runtime_optimizations" in graph:
        return graph
    slots = sorted(((number(node, "index"), node.get("name")) for node in reorders), key=lambda slot: slot[0])
    ordered = sorted(reorders, key=lambda node: cast("list[bytes]", node["outputs"])[0])
    moved = {number(node, "index"): index for node, (index, _) in zip(ordered, slots, strict=True)}
    names = {index: name or b"" for index, name in slots}
    renumbered: Record = dict(graph)
    renumbered["nodes"] = [_renumber_node(node, moved, names) for node in nodes]
    renumbered["node_edges"] = [_renumber_edges(edges, moved) for edges in records(graph, "node_edges")]
    return renumbered


def _renumber_node(node: Record, moved: dict[int, int], names: dict[int, Value]) -> Record:
    index = moved.get(number(node, "index"))
    return node if index is None else _with_index(node, "index", index) | {"name": names[index]}


def _renumber_edges(edges: Record, moved: dict[int, int]) -> Record:
    index = number(edges, "node_index")
    changed = _with_index(edges, "node_index", moved.get(index, index))
    for name in ("input_edges", "output_edges"):
        if name in edges:
            ends = _EDGE.iter_unpack(cast("memoryview", edges[name]))
            # ONNX Runtime keeps edges in a set ordered by node index, then by both argument indices (graph.h).
            renumbered = sorted((moved.get(node, node), source, target) for node, source, target in ends)
            changed[name] = memoryview(b"".join(_EDGE.pack(*end) for end in renumbered))
    return changed


def _with_index(record: Record, name: str, index: int) -> Record:
    """Returns a table with a number set; zero is the default, which the format leaves out."""
    rest = {key: value for key, value in record.items() if key != name}
    return rest | {name: index.to_bytes(4, "little")} if index else rest
