"""Rotary embeddings written as one node: exporters take each apart into halves, products and a sum (Su et al. 2021)."""

from collections.abc import Sequence

import msgspec
import numpy as np
import onnx

from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import made_by
from edgekit.graph.rewrite import Writer, replace_nodes
from edgekit.model.tensors import Array
from edgekit.prepare.rewrites.heads import OPSET_SINCE

FIX_ID = "join-rotary"

# What may lie between the cosine of an angle and the table that is multiplied: types, axes, a factor for all angles.
_TABLE_OPS = ("Cast", "Identity", "Mul", "Reshape", "Unsqueeze")


def join_rotaries(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each x * cos + rotate_half(x) * sin over heads as RotaryEmbedding of ONNX Runtime, in place.

    x is [batch, heads, rows, size]; the tables hold a row for each row of x, the same in all texts, and their halves
    are equal. Returns the names of the sums. The last bits may differ (1e-6 relative).
    """
    tables: dict[str, str] = {}
    ops = {"Add"} if opset >= OPSET_SINCE else set[str]()
    return replace_nodes(graph, opset, ops, lambda view, node: _join(view, node, tables))


class _Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """What is turned, and the tables [.., rows, size] that it and its turned halves are multiplied by."""

    x: str
    cos: str
    sin: str


def _join(graph: Graph, node: Node, tables: dict[str, str]) -> Sequence[onnx.NodeProto] | None:
    found = _match(graph, node)
    shape = graph.value(found.x).static_shape if found is not None else None
    if found is None or shape is None or len(shape) != 4 or graph.value(found.x).dtype != "float32":
        return None
    if not all(_has_equal_halves(graph, name, shape) for name in (found.cos, found.sin)):
        return None
    writer = Writer(graph=graph, node=node)
    cos, sin = (_write_table(writer, name, shape, tables) for name in (found.cos, found.sin))
    # A single number is the place of the first row.
    first = writer.constant("first_row", [0], "int64")
    writer.add("RotaryEmbedding", [found.x, first, cos, sin], domain=ORT_DOMAIN, interleaved=0)
    return writer.nodes


def _match(graph: Graph, node: Node) -> _Rotation | None:
    for one, other in (node.input, node.input[::-1]):
        plain, turning = made_by(graph, one, "Mul"), made_by(graph, other, "Mul")
        if plain is None or turning is None:
            return None
        for turned, sin in (turning.input, turning.input[::-1]):
            x = _find_turned(graph, turned)
            if x is not None and x in plain.input:
                return _Rotation(x=x, cos=plain.input[1 - plain.input.index(x)], sin=sin)
    return None


def _find_turned(graph: Graph, name: str) -> str | None:
    """Returns x where a value is its second half with the other sign, then its first half."""
    joined = made_by(graph, name, "Concat")
    negated = made_by(graph, joined.input[0], "Neg") if joined is not None and len(joined.input) == 2 else None
    if joined is None or negated is None or joined.integer("axis", 0) not in {-1, 3}:
        return None
    second, first = _find_half(graph, negated.input[0]), _find_half(graph, joined.input[1])
    if second is None or first is None or second[0] != first[0]:
        return None
    return first[0] if (first[1], second[1]) == (0, 1) else None


def _find_half(graph: Graph, name: str) -> tuple[str, int] | None:
    """Returns x and 0 or 1 where a value is the first or the second half of x along the last of four axes."""
    node = made_by(graph, name, "Slice", "Split")
    shape = graph.value(node.input[0]).shape if node is not None else None
    if node is None or shape is None or len(shape) != 4 or shape[3] is None or shape[3] % 2:
        return None
    half = shape[3] // 2
    if graph.dims(name)[-1:] != (half,):
        return None
    if node.op_type == "Split":
        return (node.input[0], node.output.index(name)) if node.integer("axis", 0) in {-1, 3} else None
    start, _, axis, step = (graph.number(node.input[at]) if at < len(node.input) else 1 for at in range(1, 5))
    place = {0: 0, half: 1, -half: 1}.get(int(start)) if start is not None else None
    return (node.input[0], place) if place is not None and axis in {-1, 3} and step == 1 else None


def _has_equal_halves(graph: Graph, name: str, shape: tuple[int, ...]) -> bool:
    """Returns True if a table has a row for each row of x, of x's size, and repeats itself after half of it."""
    own = graph.value(name).static_shape
    if own is None or len(own) < 2 or own[-2:] != shape[-2:] or any(size != 1 for size in own[:-2]):
        return False
    array = graph.inline(name)
    if name in graph.constants:
        half = shape[-1] // 2
        return array is not None and np.array_equal(array[..., :half], array[..., half:])
    while True:
        node = made_by(graph, name, "Cos", "Sin", *_TABLE_OPS)
        if node is None or (node.op_type == "Mul" and graph.number(node.input[1]) is None):
            return False
        if node.op_type in {"Cos", "Sin"}:
            angles = made_by(graph, node.input[0], "Concat")
            return angles is not None and len(angles.input) == 2 and angles.input[0] == angles.input[1]
        if graph.dims(node.input[0])[-1:] != shape[-1:]:
            return False
        name = node.input[0]


def _write_table(writer: Writer, name: str, shape: tuple[int, ...], tables: dict[str, str]) -> str:
    """Returns the first half of a table as [rows, size / 2]; it is written once for all that read it."""
    if name in tables:
        return tables[name]
    rows, half = shape[2], shape[3] // 2
    part = f"table{len(tables)}"
    array = writer.graph.inline(name)
    if array is not None:
        value: Array = array.reshape(rows, 2 * half)[:, :half]
        tables[name] = writer.constant(part, value, "float32")
        return tables[name]
    places = [
        writer.constant(f"{part}_{word}", [at], "int64") for word, at in (("start", 0), ("end", half), ("axis", -1))
    ]
    cut = writer.add("Slice", [name, *places], f"{part}_half")
    tables[name] = writer.add("Reshape", [cut, writer.constant(f"{part}_shape", [rows, half], "int64")], part)
    return tables[name]
