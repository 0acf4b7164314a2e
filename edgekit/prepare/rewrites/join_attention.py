"""Fuses attention, and rotary embeddings, into one node each of ONNX Runtime.

Exporters write attention as MatMul, scale, mask and Softmax nodes, and a rotary embedding (Su et al. 2021) as a
rotation of halves, products and a sum.
"""

import math
from itertools import permutations

import msgspec
import numpy as np
import onnx

from edgekit.graph.constants import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import MisfitError, attempt, factors, known, made_by, need
from edgekit.graph.rewrite import Writer, node_rewrite, replace_nodes, rewrite
from edgekit.prepare.rewrites.idle import find_guarded
from edgekit.prepare.rewrites.split_attention import OPSET_SINCE

# The axes of a Transpose: rows and heads change places; keys per head are transposed; rows become transposed keys.
_SWAP_HEADS, _TURN, _TURN_ROWS = (0, 2, 1, 3), (0, 1, 3, 2), (0, 2, 3, 1)


class _Attention(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a matched pattern that computes Softmax(scale * query @ turned + mask) @ value per head.

    `query` and `value` are [batch, heads, rows, size]; `turned` holds the transposed keys [batch, heads, size, rows].
    `mask` is "" if no mask is added. `instead` is the value by which a Where replaces NaN of the Softmax, "" without
    such a Where.
    """

    query: str
    turned: str
    value: str
    mask: str
    scale: float
    instead: str


# Before opset 13 Softmax normalises over all axes from `axis` to the last.
@node_rewrite("join-attention", {"Transpose"}, since=OPSET_SINCE)
def join_attention(writer: Writer) -> None:
    """Fuses attention over heads into ONNX Runtime's MultiHeadAttention.

    The pattern is Transpose(Softmax(scale * query @ key^T + mask) @ value, perm=[0, 2, 1, 3]). The nodes that repeat
    keys shared by several heads, and those that append to a cache, stay as the model has them. The last bits may differ
    (1e-5 relative).
    """
    graph, node = writer.graph, writer.node
    need(node.entries("perm") == _SWAP_HEADS)
    found = _match_attention(graph, node)
    query_dims, turned_dims, value_dims = (
        graph.value(name).shape or () for name in (found.query, found.turned, found.value)
    )
    need(len(query_dims) == len(turned_dims) == len(value_dims) == 4)
    # The number of query rows (`tokens`) and of key rows (`rows`) may be unknown.
    (batch, *_, size), tokens, rows = query_dims, query_dims[2], turned_dims[3]
    heads, width, value_size = known(query_dims[1]), known(size) * known(query_dims[1]), known(value_dims[3])
    # MatMul broadcasts keys of batch size 1 to all samples; the kernel does not.
    need(turned_dims[:3] == (batch, heads, size) and value_dims[:3] == (batch, heads, rows))
    # The kernel of the CPU provider supports float32 only.
    need(graph.value(found.query).dtype == "float32")
    mask = found.mask
    if mask:
        dims, tokens = known(graph.value(mask).shape), known(tokens)
        missing = 4 - len(dims) if len(dims) > 1 else 0
        # Leading axes of size 1 are added up to four axes.
        whole = (1,) * missing + dims
        need(len(whole) == 4 and whole[3] == known(rows))
        need(whole[0] in {1, batch} and whole[1] in {1, heads} and whole[2] in {1, tokens})
        if missing:
            mask = writer.add("Unsqueeze", [mask, writer.ints("mask_axes", list(range(missing)))], "mask_apart")
        if whole[2] != tokens:
            # The kernel needs a row for each query; the mask has one for all, such as BERT's padding mask.
            mask = writer.add("Expand", [mask, writer.ints("mask_shape", [1, 1, tokens, 1])], "mask")
    query = _find_rows(writer, found.query, _SWAP_HEADS, "query")
    if not query:
        apart = writer.add("Transpose", [found.query], "query_rows", perm=_SWAP_HEADS)
        query = writer.reshape(apart, "query_shape", [0, 0, width], "query")
    # The kernel takes key and value either both as [batch, rows, heads * size] or both as [batch, heads, rows, size].
    # `keys` are [batch, heads, rows, size], from before the model's own Transpose of the last two axes.
    turn = made_by(graph, _skip_idle(graph, found.turned), "Transpose")
    keys = turn.input[0] if turn is not None and turn.entries("perm") == _TURN else ""
    key_rows = _find_rows(writer, keys or found.turned, _SWAP_HEADS if keys else _TURN_ROWS, "key")
    pair = [key_rows, _find_rows(writer, found.value, _SWAP_HEADS, "value")]
    if not all(pair):
        pair = [keys or writer.add("Transpose", [found.turned], "keys", perm=_TURN), found.value]
    inputs = [query, *pair, "", "", mask] if mask else [query, *pair]
    mixed = writer.add("MultiHeadAttention", inputs, "attention", domain=ORT_DOMAIN, num_heads=heads, scale=found.scale)
    if found.instead:
        # The kernel's result is NaN in the rows in which the Softmax is NaN.
        asked = writer.add("IsNaN", [mixed], "asked")
        mixed = writer.add("Where", [asked, found.instead, mixed], "guarded")
    writer.reshape(mixed, "apart", [0, 0, heads, value_size])


def _match_attention(graph: Graph, node: Node) -> _Attention:
    """Returns the attention pattern that ends in this Transpose; no other node may read its intermediate values."""
    mixed = known(_only(graph, node.input[0], "MatMul"))
    guard = _only(graph, mixed.input[0], "Where")
    softmax = known(_only(graph, mixed.input[0], "Softmax") if guard is None else find_guarded(graph, guard))
    need(softmax.integer("axis", -1) in {-1, 3})
    added = _only(graph, softmax.input[0], "Add")
    for scores, mask in ((softmax.input[0], ""),) if added is None else permutations(added.input):
        scale, names = factors(graph, scores)
        product = _only(graph, names[0], "MatMul") if len(names) == 1 else None
        if product is None:
            continue
        # The scale may be applied to the product, to the query, to the keys, or split among them.
        (by_query, query), (by_key, turned) = (factors(graph, name) for name in product.input)
        if len(query) == len(turned) == 1:
            return _Attention(
                query=query[0], turned=turned[0], value=mixed.input[1], mask=mask, scale=scale * by_query * by_key,
                instead="" if guard is None else guard.input[1],
            )  # fmt: skip
    raise MisfitError


def _find_rows(writer: Writer, name: str, perm: tuple[int, ...], part: str) -> str:
    """Returns the value [batch, rows, heads * size] from which heads were split by Reshape and Transpose.

    Returns "" if the value was computed per head.
    """
    graph = writer.graph
    turned = made_by(graph, _skip_idle(graph, name), "Transpose")
    if turned is None or turned.entries("perm") != perm:
        return ""
    apart = turned.input[0]
    cut = made_by(graph, apart, "Reshape")
    shape, rows = graph.dims(apart), () if cut is None else graph.value(cut.input[0]).shape or ()
    width = math.prod(size or 0 for size in shape[2:])
    if cut is not None and len(rows) == 3 and (rows[0], rows[2]) == (shape[0], width) and rows[0] is not None:
        # Batch and width are equal, so the number of rows in between is equal too.
        return cut.input[0]
    return writer.reshape(apart, f"{part}_shape", [0, 0, width], part)


def _skip_idle(graph: Graph, name: str) -> str:
    """Returns the value before Reshapes that do not change the shape."""
    node = made_by(graph, name, "Reshape")
    while node is not None and _same_shape(graph, node.input[0], name):
        name = node.input[0]
        node = made_by(graph, name, "Reshape")
    return name


def _same_shape(graph: Graph, one: str, other: str) -> bool:
    shape = graph.value(one).static_shape
    return shape is not None and shape == graph.value(other).static_shape


def _only(graph: Graph, name: str, op: str) -> Node | None:
    """Returns the node of this operator that makes a value, if nothing else reads it; idle Reshapes are skipped."""
    while name not in graph.outputs and name not in graph.captured and len(graph.consumers.get(name, ())) == 1:
        node = made_by(graph, name, op, "Reshape")
        if node is None or node.op_type == op:
            return node
        if not _same_shape(graph, node.input[0], name):
            return None
        name = node.input[0]
    return None


# Operators allowed between Cos or Sin and the Mul: casts, changes of axes, and one factor for all angles.
_TABLE_OPS = ("Cast", "Identity", "Mul", "Reshape", "Unsqueeze")


@rewrite("join-rotary")
def join_rotary(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Fuses each x * cos + rotate_half(x) * sin over heads, in place, into ONNX Runtime's RotaryEmbedding.

    rotate_half(x) is [-x2, x1] for the halves [x1, x2] of the last axis. x is [batch, heads, rows, size]. The tables
    cos and sin have one row for each row of x, the same for all samples, and their two halves are equal. Returns the
    names of the Add nodes. The last bits may differ (1e-6 relative).
    """
    tables: dict[str, str] = {}

    def join(writer: Writer) -> None:
        view, (x, *angles) = writer.graph, _match_rotary(writer.graph, writer.node)
        shape = known(view.value(x).static_shape)
        need(len(shape) == 4 and view.value(x).dtype == "float32")
        need(all(_has_equal_halves(view, name, shape) for name in angles))
        cos, sin = (_write_table(writer, name, shape, tables) for name in angles)
        # Position ids of one element give the position of the first row.
        writer.add("RotaryEmbedding", [x, writer.ints("first_row", [0]), cos, sin], domain=ORT_DOMAIN, interleaved=0)

    return replace_nodes(graph, opset, {"Add"} if opset >= OPSET_SINCE else (), join)


def _match_rotary(graph: Graph, node: Node) -> tuple[str, str, str]:
    """Returns the rotated value x, and the tables [.., rows, size] that x and rotate_half(x) are multiplied by."""
    for one, other in permutations(node.input):
        by_cos, by_sin = known(made_by(graph, one, "Mul")), known(made_by(graph, other, "Mul"))
        for rotated, sin in permutations(by_sin.input):
            x = attempt(_find_rotated, graph, rotated)
            if x is not None and x in by_cos.input:
                return x, by_cos.input[1 - by_cos.input.index(x)], sin
    raise MisfitError


def _find_rotated(graph: Graph, name: str) -> str:
    """Returns x where a value is rotate_half(x), which is Concat(-second half, first half)."""
    joined = known(made_by(graph, name, "Concat"))
    need(len(joined.input) == 2 and joined.integer("axis", 0) in {-1, 3})
    negated = known(made_by(graph, joined.input[0], "Neg"))
    (x, first), (other, second) = _find_half(graph, joined.input[1]), _find_half(graph, negated.input[0])
    need((x, first, second) == (other, 0, 1))
    return x


def _find_half(graph: Graph, name: str) -> tuple[str, int]:
    """Returns (x, 0) for the first half of x along the last of its four axes, (x, 1) for the second half."""
    node = known(made_by(graph, name, "Slice", "Split"))
    shape = known(graph.value(node.input[0]).shape)
    need(len(shape) == 4)
    half, odd = divmod(known(shape[3]), 2)
    need(not odd and graph.dims(name)[-1:] == (half,))
    if node.op_type == "Split":
        need(node.integer("axis", 0) in {-1, 3})
        return node.input[0], node.output.index(name)
    start, _, axis, step = (graph.number(node.input[at]) if at < len(node.input) else 1 for at in range(1, 5))
    need(axis in {-1, 3} and step == 1)
    return node.input[0], known({0: 0, half: 1, -half: 1}.get(int(known(start))))


def _has_equal_halves(graph: Graph, name: str, shape: tuple[int, ...]) -> bool:
    """Returns True if a table has one row of x's size for each row of x, and its second half equals its first."""
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
    """Returns the first half of a table as [rows, size / 2]; all nodes that read the table share the result."""
    if name not in tables:
        rows, half, part = shape[2], shape[3] // 2, f"table{len(tables)}"
        if (array := writer.graph.inline(name)) is not None:
            tables[name] = writer.constant(part, array.reshape(rows, 2 * half)[:, :half], "float32")
        else:
            places = writer.constants({f"{part}_start": [0], f"{part}_end": [half], f"{part}_axis": [-1]}, "int64")
            cut = writer.add("Slice", [name, *places], f"{part}_half")
            tables[name] = writer.reshape(cut, f"{part}_shape", [rows, half], part)
    return tables[name]
