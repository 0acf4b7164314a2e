"""Validity of a model: a file that breaks ONNX's rules, or that ONNX Runtime refuses, is refused before any stage.

The rules are those of onnx's IR (https://onnx.ai/onnx/repo-docs/IR.html) and of the operators' schemas. Rules of onnx's
own checker that ONNX Runtime does not need (names of graphs, sorted nodes, data of every tensor) are not checked.
"""

import math
import re
from collections import ChainMap, Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

import msgspec
import onnx
from google.protobuf.message import Message

from edgekit.model.external import read_external_entries

# Far above the largest weights; a product of dimensions beyond it is a size that no memory can hold.
_MOST_ELEMENTS = 1 << 40
_MAIN = ("", "ai.onnx")
# The keys of external data in onnx.proto, and the one that ONNX Runtime adds for prepacked weights.
_EXTERNAL_KEYS = frozenset({"basepath", "checksum", "length", "location", "offset"})
_PREPACKED = "prepacked"
# Terms of letters, each with one ellipsis at most (ONNX operator Einsum 12).
_TERM = rb" *(?:[A-Za-z] *)*(?:\.\.\. *(?:[A-Za-z] *)*)?"
_EQUATION = re.compile(_TERM + rb"(?:," + _TERM + rb")*(?:->" + _TERM + rb")?")
_TYPES = frozenset(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}


class _Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator's schema requires: least and most inputs and outputs, the types of attributes by name."""

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    attributes: dict[str, int]
    required: frozenset[str]


def find_invalid_text(message: Message) -> bytes | None:
    """Returns the first text in a model that is no UTF-8, which protobuf returns as bytes, or None."""
    for field, value in message.ListFields():
        if field.type not in {field.TYPE_STRING, field.TYPE_MESSAGE}:
            continue
        for entry in value if hasattr(value, "extend") else (value,):
            if field.type == field.TYPE_STRING and not isinstance(entry, str):
                return bytes(entry)
            strange = find_invalid_text(entry) if isinstance(entry, Message) else None
            if strange is not None:
                return strange
    return None


def find_flaws(proto: onnx.ModelProto) -> Iterator[str]:
    """Yields descriptions of the flaws that make a model invalid; tensor data may be left out."""
    named = {(function.domain, function.name, function.overload): function for function in proto.functions}
    if len(named) < len(proto.functions):
        yield "two local functions of one name"
    calls: dict[tuple[str, str, str], set[tuple[str, str, str]]] = {}
    for key, function in named.items():
        called, waiting = set[tuple[str, str, str]](), list(function.node)
        while waiting:
            node = waiting.pop()
            called.add((node.domain, node.op_type, node.overload))
            waiting.extend(inner for body in list_bodies(node) for inner in body.node)
        calls[key] = called & named.keys()
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        yield f"local function '{error.args[1][0][1]}' calls itself"
    for entry in (*proto.opset_import, *(entry for function in proto.functions for entry in function.opset_import)):
        if not 0 < entry.version < 2**31:
            yield f"the invalid opset {entry.version} of domain '{entry.domain}'"
    yield from _check_graph(proto.graph, read_opsets(proto.opset_import), ChainMap[str, None]())
    for function in proto.functions:
        own = read_opsets(function.opset_import)
        for index, node in enumerate(function.node):
            yield from _check_node(node, f"node {index} of function '{function.name}'", own)


def read_opsets(entries: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Returns the imported versions by domain; ONNX's own domain is ""."""
    return {"" if entry.domain in _MAIN else entry.domain: entry.version for entry in entries}


def list_bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Returns the graphs that a node of control flow runs."""
    # Graphs are walked often, and to ask each attribute takes most of a walk.
    if _has_no_body(node.op_type, "" if node.domain in _MAIN else node.domain):
        return []
    return [
        body
        for attribute in node.attribute
        for body in ((attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs)
    ]


@lru_cache(maxsize=4096)
def _has_no_body(op: str, domain: str) -> bool:
    """Returns True for an ONNX operator that runs no graph; ONNX Runtime refuses one that has a graph all the same."""
    try:
        attributes = onnx.defs.get_schema(op, domain).attributes.values()
    except onnx.defs.SchemaError:
        return False
    graphs = {onnx.defs.OpSchema.AttrType.GRAPH, onnx.defs.OpSchema.AttrType.GRAPHS}
    return not any(attribute.type in graphs for attribute in attributes)


def _check_graph(graph: onnx.GraphProto, opsets: Mapping[str, int], outer: ChainMap[str, None]) -> Iterator[str]:
    """Yields the flaws of a graph and its subgraphs; `outer` holds the names of enclosing graphs that it may read."""
    made = [name for node in graph.node for name in node.output if name]
    given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    given |= {tensor.values.name for tensor in graph.sparse_initializer}
    twice = next((name for name, count in Counter(made).items() if count > 1 or name in given), None)
    if twice is not None:
        yield f"tensor '{twice}' is made twice"
    sparse = (part for tensor in graph.sparse_initializer for part in (tensor.values, tensor.indices))
    for tensor in (*graph.initializer, *sparse):
        yield from _check_tensor(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from _check_value(value)
    scope = outer.new_child(dict.fromkeys((*made, *given)))
    for index, node in enumerate(graph.node):
        where = f"node '{node.name}' ({node.op_type})" if node.name else f"node {index} ({node.op_type})"
        yield from (f"{where} reads '{name}', which nothing makes" for name in node.input if name and name not in scope)
        yield from (
            f"{where} takes its attribute '{attribute.name}' from a function, but is in none"
            for attribute in node.attribute
            if attribute.ref_attr_name
        )
        yield from _check_node(node, where, opsets)
        for body in list_bodies(node):
            yield from _check_graph(body, opsets, scope)
    yield from (f"output '{value.name}' is made by nothing" for value in graph.output if value.name not in scope)
    # Nodes may be in any order, since a quantizer appends its own, but form no cycle.
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    reads = enumerate(map(iterate_reads, graph.node))
    needs = {index: [makers[name] for name in names if name in makers] for index, names in reads}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        yield f"node '{graph.node[error.args[1][0]].name}' needs what is made of its own output"


def iterate_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yields the names that a node reads, and those that its subgraphs read from the graphs around them."""
    yield from filter(None, node.input)
    for body in list_bodies(node):
        yield from find_captured(body)


def find_captured(body: onnx.GraphProto) -> dict[str, None]:
    """Returns the names that a subgraph, and the subgraphs inside it, read from the graphs around it."""
    # A tensor of a subgraph may have the same name as an output of the node around it.
    own = {value.name for value in body.input} | {tensor.name for tensor in body.initializer} | {""}
    own.update(tensor.values.name for tensor in body.sparse_initializer)
    own.update(name for node in body.node for name in node.output)
    read = (*(name for node in body.node for name in iterate_reads(node)), *(value.name for value in body.output))
    return dict.fromkeys(name for name in read if name not in own)


def _check_node(node: onnx.NodeProto, where: str, opsets: Mapping[str, int]) -> Iterator[str]:
    for attribute in node.attribute:
        if attribute.type not in onnx.AttributeProto.AttributeType.values() or not attribute.type:
            yield f"{where} has the attribute '{attribute.name}' without a type"
        for tensor in (*((attribute.t,) if attribute.HasField("t") else ()), *attribute.tensors):
            yield from _check_tensor(tensor)
    domain = "" if node.domain in _MAIN else node.domain
    form = _read_signature(node.op_type, domain, opsets.get(domain, 1)) if domain in opsets or not domain else None
    if form is None:
        return
    for side, names, (least, most) in (("inputs", node.input, form.inputs), ("outputs", node.output, form.outputs)):
        if not least <= len(names) <= most:
            yield f"{where} has {len(names)} {side}, the operator takes {least} to {most}"
    given = {attribute.name: attribute for attribute in node.attribute}
    yield from (f"{where} lacks the attribute '{name}'" for name in sorted(form.required - given.keys()))
    for name, attribute in given.items():
        if form.attributes.get(name, attribute.type) != attribute.type and not attribute.ref_attr_name:
            yield f"{where} has the attribute '{name}' of another type than its operator wants"
    if not domain and node.op_type == "Loop" and "body" in given:
        # The body takes the iteration, the condition and the loop-carried values; it gives the condition, these values,
        # and the scan outputs.
        body = given["body"].g
        if len(body.input) != len(node.input) or len(body.output) != 1 + len(node.output):
            yield f"{where} and its body do not have the same number of inputs and outputs"
    if not domain and node.op_type == "Split" and "num_outputs" in given:
        # onnx's shape inference looks up the size of each output in a list of `num_outputs` entries, and crashes the
        # process beyond its end.
        parts = given["num_outputs"]
        if not parts.ref_attr_name and parts.i < len(node.output):
            yield f"{where} has {len(node.output)} outputs, and num_outputs says {parts.i}"
    # onnx's shape inference does not terminate on a text that is no equation.
    if "equation" in given and _EQUATION.fullmatch(given["equation"].s) is None:
        yield f"{where} has an invalid equation"


def _check_tensor(tensor: onnx.TensorProto) -> Iterator[str]:
    if tensor.data_type not in _TYPES:
        yield f"tensor '{tensor.name}' has the invalid type {tensor.data_type}"
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        where = read_external_entries(tensor)
        odd = next((key for key in where if key not in _EXTERNAL_KEYS and not key.startswith(_PREPACKED)), None)
        if odd is not None:
            yield f"tensor '{tensor.name}' has external data with the unknown key '{odd[:80]}'"
        if not where.get("location"):
            yield f"tensor '{tensor.name}' has external data without a location"
        numbers = [where[key] for key in ("offset", "length") if key in where]
        if not all(number.isascii() and number.isdigit() and len(number) < 19 for number in numbers):
            yield f"tensor '{tensor.name}' has external data with an invalid offset or length"
    if any(dim < 0 for dim in tensor.dims) or math.prod(tensor.dims) > _MOST_ELEMENTS:
        yield f"tensor '{tensor.name}' has the shape {list(tensor.dims)[:8]}"


def _check_value(value: onnx.ValueInfoProto) -> Iterator[str]:
    tensor = value.type.tensor_type
    # Unknown dimensions may be negative numbers; the product of the known ones must fit into some memory.
    if math.prod(max(1, dim.dim_value) for dim in tensor.shape.dim) > _MOST_ELEMENTS:
        yield f"tensor '{value.name}' has the shape {[dim.dim_value for dim in tensor.shape.dim][:8]}"
    if tensor.elem_type and tensor.elem_type not in _TYPES:
        yield f"tensor '{value.name}' has the invalid type {tensor.elem_type}"


@lru_cache(maxsize=4096)
def _read_signature(op: str, domain: str, version: int) -> _Signature | None:
    """Returns what an operator requires of its nodes, None for one that onnx does not know."""
    try:
        schema = onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None
    # The numbers of the types are those of AttributeProto; onnx annotates them as bare enums.
    attributes: dict[str, Any] = dict(schema.attributes)
    types = {name: int(entry.type.value) for name, entry in attributes.items()}
    return _Signature(
        inputs=(schema.min_input, schema.max_input),
        outputs=(schema.min_output, schema.max_output),
        attributes=types,
        required=frozenset(name for name, entry in schema.attributes.items() if entry.required),
    )
