"""Facts about an ORT-format file: inputs, outputs, nodes, and which quantized nodes will run in float."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import onnx

from edgekit.convert.ort_format.canonical import CANONICAL_VERSION, is_canonical
from edgekit.convert.ort_format.tables import Record, iterate_graphs, number, open_tables, records, table, text, texts
from edgekit.model.model import tensor_dtype
from edgekit.model.tensors import TensorSpec, name_dim

_TENSOR, _NAMED = 1, 2


def read_interface(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Returns the inputs (without initializers) and the outputs of an ORT-format file, without running it.

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
    shape = tuple(
        name_dim(text(size, "dim_param")) if number(size, "dim_type") == _NAMED else number(size, "dim_value") or None
        for size in [table(dim, "value") for dim in records(table(tensor, "shape"), "dim")]
    )
    has_shape = "shape" in tensor
    return TensorSpec(name=name, dtype=tensor_dtype(number(tensor, "elem_type")), shape=shape if has_shape else None)


ABSENT_NODE = 0xFFFFFFFF
"""The node index that a saved optimisation holds in place of a missing node (ORT's kEmptyNodeIndex)."""

# ORT's `core/flatbuffers/schema/README.md`: version 5 added the kernel type strings, version 6 the float8 types. Which
# ONNX Runtimes write 6 was measured (`ORT_FORMATS` in model/model.py).
_WRITERS = {"4": "ONNX Runtime 1.12 or older", "5": "ONNX Runtime 1.13 to 1.15", "6": "ONNX Runtime 1.16 or newer"}


class OrtNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of an ORT-format graph; `op` includes its domain unless that is ONNX's own."""

    index: int
    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class SavedOptimization(msgspec.Struct, frozen=True, kw_only=True):
    """A fusion that the runtime style saved for load time: which nodes, by index, become which operators."""

    optimizer: str
    nodes: tuple[int, ...]
    produces: tuple[str, ...]


class OrtGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The main graph of an ORT-format file."""

    nodes: tuple[OrtNode, ...]
    saved: tuple[SavedOptimization, ...]
    outputs: tuple[str, ...]


class OrtFileReport(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of an ORT-format file.

    `writer` says which ONNX Runtimes write `format_version`; their own version is not in the file. `canonical_form` is
    the version of edgekit's canonical order, None if the file is not in it. `ops` counts the nodes of all graphs,
    subgraphs included, by domain and operator; `saved_optimizations` counts those of the runtime style by the operator
    they produce. `kernels` are the operators that a build needs, as `domain:operator:opset`, and `types` the element
    types that occur.
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
    """Returns the contents of an ORT-format file of any known version, without running it.

    Raises:
        ModelError: the file is missing, cut off, altered, or no ORT-format file.
    """
    with open_tables(path) as file:
        model = table(file.root, "model")
        graph = table(model, "graph")
        graphs = list(iterate_graphs(graph))
        nodes = [node for part in graphs for node in records(part, "nodes")]
        tensors = [tensor for part in graphs for tensor in records(part, "initializers")]
        produced = [op for part in graphs for saved in _saved_optimizations(part) for op in saved.produces]
        kernels = {f"{text(node, 'domain')}:{text(node, 'op_type')}:{number(node, 'since_version')}" for node in nodes}
        types = {number for part in graphs for number in _element_types(part)}
        known = onnx.TensorProto.DataType.values()
        imports = records(model, "opset_import")
        opsets = {text(entry, "domain") or "ai.onnx": number(entry, "version") for entry in imports}
        return OrtFileReport(
            format_version=text(file.root, "ort_version"),
            writer=_WRITERS.get(text(file.root, "ort_version"), "unknown"),
            canonical_form=CANONICAL_VERSION if is_canonical(path) else None,
            ir_version=number(model, "ir_version"),
            producer=" ".join(filter(None, (text(model, "producer_name"), text(model, "producer_version")))),
            opsets=opsets,
            inputs=tuple(texts(graph, "inputs")),
            outputs=tuple(texts(graph, "outputs")),
            ops=_count(_qualified(text(node, "domain"), text(node, "op_type")) for node in nodes),
            nodes=len(nodes),
            initializers=len(tensors),
            initializer_bytes=sum(len(tensor.get("raw_data", b"")) for tensor in tensors),
            saved_optimizations=_count(bare_op(op) for op in produced),
            kernels=tuple(sorted(kernels | set(produced))),
            types=tuple(sorted(tensor_dtype(each) if each in known else f"type {each}" for each in types)),
            metadata={text(entry, "key"): text(entry, "value") for entry in records(model, "metadata_props")},
            size_bytes=path.stat().st_size,
        )


def read_graph(path: Path) -> OrtGraph:
    """Returns the nodes of the main graph and the optimisations saved for them.

    Raises:
        ModelError: the file is missing, cut off, altered, or no ORT-format file.
    """
    with open_tables(path) as file:
        graph = table(table(file.root, "model"), "graph")
        saved, outputs = tuple(_saved_optimizations(graph)), tuple(texts(graph, "outputs"))
        return OrtGraph(nodes=read_nodes(graph), saved=saved, outputs=outputs)


def read_nodes(graph: Record) -> tuple[OrtNode, ...]:
    """Returns the nodes of a graph as `OrtNode`."""
    return tuple(
        OrtNode(
            index=number(node, "index"),
            name=text(node, "name"),
            op=_qualified(text(node, "domain"), text(node, "op_type")),
            inputs=tuple(texts(node, "inputs")),
            outputs=tuple(texts(node, "outputs")),
        )
        for node in records(graph, "nodes")
    )


def bare_op(op_id: str) -> str:
    """Returns `domain.op`, or `op` of ONNX's own domain, from ORT's `domain:op:version`."""
    domain, _, rest = op_id.partition(":")
    return _qualified(domain, rest.rpartition(":")[0] or rest)


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


def _saved_optimizations(graph: Record) -> Iterator[SavedOptimization]:
    for container in records(table(graph, "runtime_optimizations"), "records"):
        for saved in records(container, "runtime_optimization_records"):
            indices = table(saved, "nodes_to_optimize_indices").get("node_indices", memoryview(b""))
            yield SavedOptimization(
                optimizer=text(container, "optimizer_name"),
                nodes=tuple(memoryview(bytes(indices)).cast("I")),  # type: ignore[arg-type]
                produces=tuple(texts(saved, "produced_op_ids")),
            )


def _qualified(domain: str, op: str) -> str:
    return f"{domain}.{op}" if domain else op


def _count(ops: Iterator[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(ops).items()))


# The order in which a session replays them (ORT's `graph_transformer_utils.cc`).
_REPLAY_ORDER: Mapping[str, int] = {
    "QDQSelectorActionTransformer": 0, "ConvActivationFusion": 1, "MatMulNBitsFusion": 2,
}  # fmt: skip

# Operators with weights that have 8-bit kernels in ORT's CPU provider; they take nearly all the time.
_FLOAT_OPS = {
    "Conv": "Conv", "com.microsoft.FusedConv": "Conv", "Gemm": "Gemm", "com.microsoft.FusedGemm": "Gemm",
    "MatMul": "MatMul", "com.microsoft.FusedMatMul": "MatMul",
}  # fmt: skip

_ACTIVATIONS = frozenset({"Relu", "Clip", "LeakyRelu"})


class UnfusedNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node between DQ and Q nodes that will nevertheless run in float.

    `activation` names the operator between it and its Q node, or the fused operator that contains one; it is empty if
    there is none.
    """

    name: str
    op: str
    activation: str

    @property
    def sentence(self) -> str:
        """Why the node runs in float."""
        because = f"keeps a float {self.activation}" if self.activation else "has quantized types that no kernel takes"
        return f"'{self.name}' ({self.op}) {because}"


def replay_saved(graph: OrtGraph) -> tuple[OrtNode, ...]:
    """Returns the nodes that remain after a session has replayed the saved optimisations.

    An optimisation whose nodes no longer exist is skipped. A DQ node is removed when no node reads it any more (ORT's
    `selectors_actions/actions.cc`).
    """
    left = {node.index: node for node in graph.nodes}
    fresh = itertools.count(-1, -1)
    for saved in sorted(graph.saved, key=lambda saved: _REPLAY_ORDER.get(saved.optimizer, len(_REPLAY_ORDER))):
        indices = [index for index in dict.fromkeys(saved.nodes) if index != ABSENT_NODE]
        if not indices or any(index not in left for index in indices):
            continue
        members = [left[index] for index in indices]
        for index in indices:
            if left[index].op != "DequantizeLinear":
                del left[index]
        made = {name for node in members for name in node.outputs}
        read = [name for node in members for name in node.inputs]
        for op_id in saved.produces:
            # The fused node, with the fields that are needed to count and connect it.
            left[next(fresh)] = OrtNode(
                index=-1,
                name=next((node.name for node in members if node.op != "DequantizeLinear"), ""),
                op=bare_op(op_id),
                inputs=tuple(name for name in read if name not in made),
                outputs=tuple(name for node in members for name in node.outputs if name not in read),
            )
    needed = {name for node in left.values() for name in node.inputs} | set(graph.outputs)
    return tuple(node for node in left.values() if node.op != "DequantizeLinear" or needed & set(node.outputs))


def count_ops(nodes: Iterable[OrtNode]) -> dict[str, int]:
    """Returns how many nodes of each operator there are, without domains, most frequent first."""
    counter = collections.Counter(node.op.rpartition(".")[2] for node in nodes)
    return dict(sorted(counter.items(), key=lambda entry: (-entry[1], entry[0])))


def find_unfused(nodes: Iterable[OrtNode], outputs: Iterable[str]) -> tuple[UnfusedNode, ...]:
    """Returns the Conv, Gemm and MatMul nodes between DQ and Q nodes that will run in float.

    Nodes of the graph's `outputs`, which must be float, are not among them.
    """
    left = tuple(nodes)
    dequantized = {name for node in left if node.op == "DequantizeLinear" for name in node.outputs}
    readers: dict[str, list[OrtNode]] = collections.defaultdict(list)
    for node in left:
        for name in node.inputs:
            readers[name].append(node)
    for name in outputs:
        readers[name] = []
    found: list[UnfusedNode] = []
    for node in left:
        if node.op not in _FLOAT_OPS or not dequantized.issuperset(node.inputs[:2]):
            continue
        reader = _only_reader(node, readers)
        activation = reader if reader is not None and reader.op in _ACTIVATIONS else None
        last = reader if activation is None else _only_reader(activation, readers)
        if last is not None and last.op == "QuantizeLinear":
            within = "" if node.op == _FLOAT_OPS[node.op] else node.op
            op = within if activation is None else activation.op
            found.append(UnfusedNode(name=node.name, op=_FLOAT_OPS[node.op], activation=op))
    return tuple(found)


def _only_reader(node: OrtNode, readers: Mapping[str, Sequence[OrtNode]]) -> OrtNode | None:
    users = [user for name in node.outputs for user in readers.get(name, [])]
    return users[0] if len(users) == 1 else None
