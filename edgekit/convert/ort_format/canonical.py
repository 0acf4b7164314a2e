"""Rewrites ORT-format files in one canonical order, so that a model always gives the same bytes, and repairs them.

ONNX Runtime writes parts of the file in the order of a hash table that is seeded anew in each process, gives
ReorderOutput nodes their indices and names in that order, and saves optimisations that it cannot replay. This module
adds the missing operator to such optimisations, numbers these nodes by their outputs, sorts every list without a
defined order, and lays out tables, vectors, strings and weights by fixed rules.

ORT 1.31 saves the QDQ actions of MatMul and Split without the operator they produce (they have no `RunForSave` of their
own, `qdq_actions.cc`), and then refuses the file where saved optimisations are switched on: "Not enough produced nodes
in the runtime optimization record" (`selector_action_transformer.cc`).
"""

import filecmp
import struct
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import cast

from edgekit._files import replacing_file, work_folder
from edgekit.convert.ort_format import tables
from edgekit.convert.ort_format.tables import Field, Record, Value, iterate_graphs, number, records, table, text
from edgekit.errors import ModelError

_INPUT, _OUTPUT = 0, 1

# Operator -> type parameter -> the arguments of that type, from the schemas of ONNX and of ORT's contrib operators.
_QLINEAR = {"T1": ((_INPUT, 0), (_INPUT, 2)), "T2": ((_INPUT, 3), (_INPUT, 5)), "T3": ((_INPUT, 7), (_OUTPUT, 0))}
_SPLIT = {"T": ((_INPUT, 0), (_OUTPUT, 0)), "split": ((_INPUT, 1),)}
_TYPES: Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]] = {
    ":QLinearMatMul:10": {**_QLINEAR, "a_scale": ((_INPUT, 1),), "b_scale": ((_INPUT, 4),), "y_scale": ((_INPUT, 6),)},
    ":QLinearMatMul:21": {**_QLINEAR, "TS": ((_INPUT, 1), (_INPUT, 4), (_INPUT, 6))},
    ":Split:13": _SPLIT,
    ":Split:18": _SPLIT,
    "com.microsoft:MatMulIntegerToFloat:1": {
        "T1": ((_INPUT, 0), (_INPUT, 4)),
        "T2": ((_INPUT, 1), (_INPUT, 5)),
        "T3": ((_INPUT, 2), (_INPUT, 3), (_INPUT, 6), (_OUTPUT, 0)),
    },
}


# Domains that ONNX Runtime 1.31 registers itself: loading a file may add nodes of these (level 1, saved optimizations).
_OWN_DOMAINS = frozenset({
    "", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft",
    "com.microsoft.experimental", "com.microsoft.nchwc", "org.pytorch.aten",
})  # fmt: skip


def repair_saved(root: Record) -> None:
    """Adds the produced operator to each saved optimisation that lacks it, and its kernel types, in place."""
    model = table(root, "model")
    # A model may import the main domain twice, as "" and as "ai.onnx": the newer opset counts.
    imported = (entry for entry in records(model, "opset_import") if text(entry, "domain") in {"", "ai.onnx"})
    opset = max((number(entry, "version") for entry in imported), default=0)
    produced: set[str] = set()
    for graph in iterate_graphs(table(model, "graph")):
        for entry in records(table(graph, "runtime_optimizations"), "records"):
            for saved in records(entry, "runtime_optimization_records"):
                action = text(saved, "action_id")
                # A later ONNX Runtime may write the operator itself.
                if action not in {"MatMul", "dropSplitQDQ"} or saved.get("produced_op_ids"):
                    continue
                if action == "dropSplitQDQ":
                    op = ":Split:18" if opset >= 18 else ":Split:13"
                elif number(table(saved, "nodes_to_optimize_indices"), "num_outputs"):
                    op = ":QLinearMatMul:21" if opset >= 21 else ":QLinearMatMul:10"
                else:
                    # No Q node follows: the result stays float.
                    op = "com.microsoft:MatMulIntegerToFloat:1"
                saved["produced_op_ids"] = [op.encode()]
                produced.add(op)
    known = cast("list[Record]", table(root, "kernel_type_str_resolver").get("op_kernel_type_str_args", []))
    present = {text(entry, "op_id") for entry in known}
    # A minimal build finds kernels by these entries only.
    for op in sorted(produced - present):
        arguments: list[Record] = []
        for name, places in _TYPES[op].items():
            # The positions of its arguments; a field with its default value is absent, as ONNX Runtime writes it.
            fields = [{"arg_type": bytes([kind]), "index": index.to_bytes(4, "little")} for kind, index in places]
            given: list[Record] = [{key: value for key, value in each.items() if any(value)} for each in fields]
            arguments.append({"kernel_type_str": name.encode(), "args": given})
        known.append({"op_id": op.encode(), "kernel_type_str_args": arguments})


_DOMAIN, _OP = "com.microsoft.nchwc", "ReorderOutput"
_EDGE = struct.Struct("<Iii")


def renumber_reorders(graph: Record) -> None:
    """Gives ReorderOutput nodes indices and names in the order of their outputs, in place.

    A graph with saved optimisations, which refer to nodes by index, has no ReorderOutput and stays as it is.
    """
    if "runtime_optimizations" in graph:
        return
    nodes = (node for node in records(graph, "nodes") if text(node, "domain") == _DOMAIN)
    reorders = [node for node in nodes if text(node, "op_type") == _OP]
    slots = sorted(((number(node, "index"), node.get("name", b"")) for node in reorders), key=itemgetter(0))
    moved: dict[int, int] = {}
    ordered = sorted(reorders, key=lambda node: cast("list[bytes]", node["outputs"])[0])
    for node, (index, name) in zip(ordered, slots, strict=True):
        moved[number(node, "index")] = index
        node["name"] = name
        _set_index(node, "index", index)
    for edges in records(graph, "node_edges") if moved else ():
        index = number(edges, "node_index")
        _set_index(edges, "node_index", moved.get(index, index))
        for side in edges.keys() & {"input_edges", "output_edges"}:
            ends = _EDGE.iter_unpack(cast("memoryview", edges[side]))
            # ONNX Runtime keeps edges in a set ordered by node index, then by both argument indices (graph.h).
            renumbered = sorted((moved.get(node, node), source, target) for node, source, target in ends)
            edges[side] = memoryview(b"".join(_EDGE.pack(*end) for end in renumbered))


def _set_index(record: Record, name: str, index: int) -> None:
    """Sets a number of a table; as in ONNX Runtime's files, the default zero is left out."""
    record.pop(name, None)
    if index:
        record[name] = index.to_bytes(4, "little")


CANONICAL_VERSION = 1
"""The version of the canonical form; increment it with each change, which alters every digest."""

KNOWN_FORMATS = ("5", "6")


def canonicalize_file(path: Path) -> None:
    """Rewrites an ORT-format file in canonical order, with saved optimisations that a session can replay.

    The new file is read back and compared before it replaces the old one.

    Raises:
        ModelError: the file is damaged, or of a format whose order is not known.
    """
    with tables.open_tables(path) as file:
        version = text(file.root, "ort_version")
        if version not in KNOWN_FORMATS:
            words = f"'{path}' has ORT format version '{version}', whose order is not known"
            raise ModelError(words, hint=f"known: {', '.join(KNOWN_FORMATS)}; convert it with ONNX Runtime 1.31")
        if file.unknown:
            unknown = ", ".join(sorted(file.unknown))
            raise ModelError(f"'{path}' holds tables that are not known: {unknown}", hint="use ONNX Runtime 1.31")
        # Before sorting, so that added entries are sorted as well.
        repair_saved(file.root)
        # ONNX Runtime writes each domain that its process knows, including those that an earlier session loaded for
        # another model.
        model = table(file.root, "model")
        nodes = (node for graph in iterate_graphs(table(model, "graph")) for node in records(graph, "nodes"))
        kept = _OWN_DOMAINS | {text(node, "domain") for node in nodes}
        model["opset_import"] = [entry for entry in records(model, "opset_import") if text(entry, "domain") in kept]
        root = sort_tables(file.root, tables.ROOT)
        with replacing_file(path) as temporary:
            tables.write_tables(root, temporary)
            with tables.open_tables(temporary) as written:
                if written.root != root:
                    raise ModelError(f"'{path}' changed while it was put in order", hint="report this as a bug")


def is_canonical(path: Path) -> bool:
    """Returns True if an ORT-format file is in canonical order, byte for byte.

    Raises:
        ModelError: the file is damaged.
    """
    with tables.open_tables(path) as file, work_folder() as work:
        if file.unknown or text(file.root, "ort_version") not in KNOWN_FORMATS:
            return False
        tables.write_tables(sort_tables(file.root, tables.ROOT), work / "sorted.ort")
        return filecmp.cmp(path, work / "sorted.ort", shallow=False)


def sort_tables(record: Record, kind: str) -> Record:
    """Returns a table with every list that has a sort key in the schema sorted by it, recursively.

    The ReorderOutput nodes of a graph are renumbered in place.
    """
    fields = {field.name: field for field in tables.SCHEMA[kind]}
    # Node indices of x64 files come from a hash table too, and everything that is sorted below refers to them.
    if kind == "Graph":
        renumber_reorders(record)
    return {name: _sort_value(value, fields[name], record) for name, value in record.items()}


def _sort_value(value: Value, field: Field, record: Record) -> Value:
    if isinstance(value, dict):
        union = field.kind == "union"
        return sort_tables(value, tables.UNIONS[field.of][number(record, f"{field.name}_type")] if union else field.of)
    if field.kind != "[table]":
        return value
    items = [sort_tables(item, field.of) for item in cast("list[Record]", value)]
    # `sorted` is stable: records whose keys are equal keep the order that ONNX Runtime gave them.
    return sorted(items, key=lambda item: [_key_part(item, path, field.of) for path in field.key])


def _key_part(record: Record, path: str, kind: str) -> bytes | int:
    head, _, tail = path.partition(".")
    field = next(field for field in tables.SCHEMA[kind] if field.name == head)
    if tail:
        return _key_part(cast("Record", record.get(head, {})), tail, field.of)
    return cast("bytes", record.get(head, b"")) if field.kind == "string" else number(record, head)
