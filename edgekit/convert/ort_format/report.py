"""What an ORT-format file holds, what goes into it and what comes out."""

import collections
from collections.abc import Iterator
from pathlib import Path

import msgspec
import onnx

from edgekit.convert.ort_format.canonical import CANONICAL_VERSION, is_canonical
from edgekit.convert.ort_format.tables import (
    Record,
    TableFile,
    iterate_graphs,
    number,
    open_tables,
    records,
    table,
    text,
    texts,
)
from edgekit.model.model import tensor_dtype
from edgekit.model.tensors import TensorSpec

_TENSOR, _NAMED = 1, 2


def read_interface(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs, without the initializers, and the outputs of an ORT-format file; nothing of it is run.

    Raises:
        ModelError: the file is missing, cut off, altered, or no ORT-format file.
    """
    with open_tables(path) as file:
        graph = table(table(file.root, "model"), "graph")
        values = {text(value, "name"): table(value, "type") for value in records(graph, "node_args")}
        stored = {text(tensor, "name") for tensor in records(graph, "initializers")}
        inputs = tuple(_spec(name, values.get(name, {})) for name in texts(graph, "inputs") if name not in stored)
        return inputs, tuple(_spec(name, values.get(name, {})) for name in texts(graph, "outputs"))


def _spec(name: str, kind: Record) -> TensorSpec:
    if number(kind, "value_type") != _TENSOR:
        return TensorSpec(name=name, dtype="sequence", shape=None)
    tensor = table(kind, "value")
    shape = tuple(_dim(table(dim, "value")) for dim in records(table(tensor, "shape"), "dim"))
    has_shape = "shape" in tensor
    return TensorSpec(name=name, dtype=tensor_dtype(number(tensor, "elem_type")), shape=shape if has_shape else None)


def _dim(value: Record) -> int | str | None:
    if number(value, "dim_type") == _NAMED:
        return text(value, "dim_param") or None
    return number(value, "dim_value") or None


ABSENT_NODE = 0xFFFFFFFF
"""The node index that a saved optimisation writes where it has no node (ORT's kEmptyNodeIndex)."""

# ORT's `core/flatbuffers/schema/README.md`: version 5 brought the kernel type strings, version 6 the float8 types. Who
# writes 6 was measured (model/versions.py).
_WRITERS = {
    "4": "ONNX Runtime 1.12 or older",
    "5": "ONNX Runtime 1.13 to 1.15",
    "6": "ONNX Runtime 1.16 or newer",
}


class OrtNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of an ORT-format graph; `op` bears its domain unless that is ONNX's own."""

    index: int
    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class SavedOptimization(msgspec.Struct, frozen=True, kw_only=True):
    """A fusion that the runtime style saved for the load: which nodes, by index, become which operators."""

    optimizer: str
    action: str
    nodes: tuple[int, ...]
    produces: tuple[str, ...]


class OrtGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The main graph of an ORT-format file."""

    nodes: tuple[OrtNode, ...]
    saved: tuple[SavedOptimization, ...]
    outputs: tuple[str, ...]


class OrtFileReport(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an ORT-format file.

    `format_version` is what its writer put first, and `writer` which ONNX Runtimes do that; their own version is not in
    the file. `canonical_form` is the version of edgekit's order where the file is in it, None where it is not. `ops`
    counts the nodes of every graph, bodies included, by domain and operator; `saved_optimizations` counts what the
    runtime style saved, by the operator it produces. `kernels` are the operators that a build must have, as
    `domain:operator:opset`, and `types` the element types that occur.
    """

    format_version: str
    writer: str
    canonical_form: int | None
    ir_version: int
    producer: str
    opsets: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: dict[str, int]
    nodes: int
    initializers: int
    initializer_bytes: int
    saved_optimizations: dict[str, int]
    kernels: tuple[str, ...]
    types: tuple[str, ...]
    metadata: dict[str, str]
    size_bytes: int


def inspect_ort(path: Path) -> OrtFileReport:
    """Returns what an ORT-format file of any known version holds; nothing of it is run.

    Raises:
        ModelError: the file is missing, cut off, altered, or no ORT-format file.
    """
    with open_tables(path) as file:
        report = _report_file(file, path.stat().st_size)
    return msgspec.structs.replace(report, canonical_form=CANONICAL_VERSION if is_canonical(path) else None)


def read_graph(path: Path) -> OrtGraph:
    """Returns the nodes of the main graph and the optimisations saved for them.

    Raises:
        ModelError: the file is missing, cut off, altered, or no ORT-format file.
    """
    with open_tables(path) as file:
        graph = table(table(file.root, "model"), "graph")
        return OrtGraph(
            nodes=tuple(_read_node(node) for node in records(graph, "nodes")),
            saved=tuple(_saved_optimizations(graph)),
            outputs=tuple(texts(graph, "outputs")),
        )


def bare_op(op_id: str) -> str:
    """Returns the operator of ORT's `domain:op:version`, without the version."""
    domain, _, rest = op_id.partition(":")
    return _qualified(domain, rest.rpartition(":")[0] or rest)


def _report_file(file: TableFile, size_bytes: int) -> OrtFileReport:
    model = table(file.root, "model")
    graph = table(model, "graph")
    graphs = list(iterate_graphs(graph))
    nodes = [node for part in graphs for node in records(part, "nodes")]
    tensors = [tensor for part in graphs for tensor in records(part, "initializers")]
    produced = [op for part in graphs for saved in _saved_optimizations(part) for op in saved.produces]
    return OrtFileReport(
        format_version=text(file.root, "ort_version"),
        writer=_WRITERS.get(text(file.root, "ort_version"), "unknown"),
        canonical_form=None,
        ir_version=number(model, "ir_version"),
        producer=" ".join(filter(None, (text(model, "producer_name"), text(model, "producer_version")))),
        opsets={
            text(entry, "domain") or "ai.onnx": number(entry, "version") for entry in records(model, "opset_import")
        },
        inputs=tuple(texts(graph, "inputs")),
        outputs=tuple(texts(graph, "outputs")),
        ops=_count(_qualified(text(node, "domain"), text(node, "op_type")) for node in nodes),
        nodes=len(nodes),
        initializers=len(tensors),
        initializer_bytes=sum(len(tensor.get("raw_data", b"")) for tensor in tensors),
        saved_optimizations=_count(bare_op(op) for op in produced),
        kernels=tuple(sorted({_kernel(node) for node in nodes} | set(produced))),
        types=tuple(sorted({_type_name(number) for part in graphs for number in _element_types(part)})),
        metadata={text(entry, "key"): text(entry, "value") for entry in records(model, "metadata_props")},
        size_bytes=size_bytes,
    )


def _element_types(graph: Record) -> Iterator[int]:
    yield from (number(tensor, "data_type") for tensor in records(graph, "initializers"))
    for value in records(graph, "node_args"):
        kind = table(value, "type")
        while kind:
            inner = table(kind, "value")
            element = inner.get("elem_type", inner.get("value_type", b""))
            if isinstance(element, bytes):
                yield int.from_bytes(element, "little")
            kind = element if isinstance(element, dict) else {}


def _type_name(number: int) -> str:
    known = onnx.TensorProto.DataType.values()
    return tensor_dtype(number) if number in known else f"type {number}"


def _read_node(node: Record) -> OrtNode:
    return OrtNode(
        index=number(node, "index"),
        name=text(node, "name"),
        op=_qualified(text(node, "domain"), text(node, "op_type")),
        inputs=tuple(texts(node, "inputs")),
        outputs=tuple(texts(node, "outputs")),
    )


def _saved_optimizations(graph: Record) -> Iterator[SavedOptimization]:
    for container in records(table(graph, "runtime_optimizations"), "records"):
        for saved in records(container, "runtime_optimization_records"):
            indices = table(saved, "nodes_to_optimize_indices").get("node_indices", memoryview(b""))
            yield SavedOptimization(
                optimizer=text(container, "optimizer_name"),
                action=text(saved, "action_id"),
                nodes=tuple(memoryview(bytes(indices)).cast("I")),  # type: ignore[arg-type]
                produces=tuple(texts(saved, "produced_op_ids")),
            )


def _qualified(domain: str, op: str) -> str:
    return f"{domain}.{op}" if domain else op


def _kernel(node: Record) -> str:
    return f"{text(node, 'domain')}:{text(node, 'op_type')}:{number(node, 'since_version')}"


def _count(ops: Iterator[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(ops).items()))
