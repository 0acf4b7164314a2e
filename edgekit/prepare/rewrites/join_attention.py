"""Attention written as one node: exporters take it apart into products, scales, a mask and a Softmax.

ONNX Runtime's own optimizers know the spellings of older exporters, family by family; this one goes by what is
computed.
"""

import math
from collections.abc import Sequence

import msgspec
import onnx

from edgekit.graph.contrib import ORT_DOMAIN
from edgekit.graph.graph import Graph, Node, Shape
from edgekit.graph.match import factors, made_by
from edgekit.graph.rewrite import Writer, replace_nodes
from edgekit.prepare.rewrites.heads import OPSET_SINCE
from edgekit.prepare.rewrites.idle_nan_guard import find_guarded

FIX_ID = "join-attention"

_SWAP_HEADS, _TURN, _TURN_APART = (0, 2, 1, 3), (0, 1, 3, 2), (0, 2, 3, 1)


class _Attention(msgspec.Struct, frozen=True, kw_only=True):
    """What a pattern computes: Softmax(scale * query * turned + mask) * value, each in heads.

    `query` and `value` are [batch, heads, rows, size], `turned` are the keys as [batch, heads, size, rows]; `mask` is
    "" where nothing is added. `instead` is what stands for NaN, "" where NaN stays.
    """

    query: str
    turned: str
    value: str
    mask: str
    scale: float
    instead: str


class _Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of attention; rows that ask, and that are asked, may not be known."""

    heads: int
    size: int
    value_size: int
    batch: int | None
    tokens: int | None
    rows: int | None


def join_attentions(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each attention over heads as MultiHeadAttention of ONNX Runtime, in place.

    Keys that several heads share, and a cache before them, are joined outside, as the model has them. Returns the names
    of the Transposes that end such a pattern. The last bits may differ (1e-5 relative).
    """
    # Before opset 13 Softmax took all axes behind its own together.
    return replace_nodes(graph, opset, {"Transpose"} if opset >= OPSET_SINCE else (), _join)


def _join(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    found = _match(graph, node) if node.entries("perm") == _SWAP_HEADS else None
    sizes = _read_sizes(graph, found) if found is not None else None
    # The kernel of the CPU provider is for float32 alone.
    if found is None or sizes is None or graph.value(found.query).dtype != "float32":
        return None
    writer = Writer(graph=graph, node=node)
    mask = _fit_mask(writer, found, sizes)
    if mask is None:
        return None
    width = sizes.heads * sizes.size
    query = _find_rows(writer, found.query, _SWAP_HEADS, "query") or _join_heads(writer, found.query, width)
    # Both in rows, or both in heads: the kernel knows no third form.
    pair = [_find_key_rows(writer, found.turned), _find_rows(writer, found.value, _SWAP_HEADS, "value")]
    if not all(pair):
        pair = [_find_keys(writer, found.turned), found.value]
    inputs = [query, *pair, "", "", mask] if mask else [query, *pair]
    mixed = writer.add(
        "MultiHeadAttention", inputs, "attention", domain=ORT_DOMAIN, num_heads=sizes.heads, scale=found.scale
    )
    if found.instead:
        # The kernel's rows are NaN where the Softmax is.
        asked = writer.add("IsNaN", [mixed], "asked")
        mixed = writer.add("Where", [asked, found.instead, mixed], "guarded")
    writer.add("Reshape", [mixed, writer.constant("apart", [0, 0, sizes.heads, sizes.value_size], "int64")])
    return writer.nodes


def _match(graph: Graph, node: Node) -> _Attention | None:
    """Returns the attention whose heads a Transpose puts beside each other, if nothing else reads its steps."""
    mixed = _only(graph, node.input[0], "MatMul")
    guard = _only(graph, mixed.input[0], "Where") if mixed is not None else None
    if mixed is not None and guard is not None:
        softmax, instead = find_guarded(graph, guard), guard.input[1]
    else:
        softmax, instead = _only(graph, mixed.input[0], "Softmax") if mixed is not None else None, ""
    if mixed is None or softmax is None or softmax.integer("axis", -1) not in {-1, 3}:
        return None
    added = _only(graph, softmax.input[0], "Add")
    pairs = ((softmax.input[0], ""),) if added is None else (added.input, added.input[::-1])
    for scores, mask in pairs:
        product = _product_of(graph, scores)
        if product is not None:
            scale, query, turned = product
            return _Attention(query=query, turned=turned, value=mixed.input[1], mask=mask, scale=scale, instead=instead)
    return None


def _product_of(graph: Graph, scores: str) -> tuple[float, str, str] | None:
    """Returns scale, query and turned keys where a value is their product: numbers may stand at each of them."""
    scale, names = factors(graph, scores)
    product = _only(graph, names[0], "MatMul") if len(names) == 1 else None
    if product is None:
        return None
    (by_query, query), (by_key, turned) = (factors(graph, name) for name in product.input)
    return (scale * by_query * by_key, query[0], turned[0]) if len(query) == len(turned) == 1 else None


def _read_sizes(graph: Graph, found: _Attention) -> _Sizes | None:
    """Returns the sizes, if they are those of attention and those that the kernel must be told are known."""
    query, turned, value = (_dims(graph, name) for name in (found.query, found.turned, found.value))
    if not len(query) == len(turned) == len(value) == 4:
        return None
    heads, size, value_size = query[1], query[3], value[3]
    # A product repeats keys of one text for several, the kernel does not.
    if heads is None or size is None or value_size is None or turned[:3] != (query[0], heads, size):
        return None
    if value[:3] != (query[0], heads, turned[3]):
        return None
    return _Sizes(heads=heads, size=size, value_size=value_size, batch=query[0], tokens=query[2], rows=turned[3])


def _dims(graph: Graph, name: str) -> Shape:
    """Returns the shape of a value, constant or not; () where its rank is not known."""
    return graph.value(name).shape or ()


def _find_rows(writer: Writer, name: str, perm: tuple[int, ...], part: str) -> str:
    """Returns the rows [batch, rows, heads * size] that a value was cut from; "" where it was computed in heads."""
    graph = writer.graph
    turned = made_by(graph, _skip_idle(graph, name), "Transpose")
    if turned is None or turned.entries("perm") != perm:
        return ""
    apart = turned.input[0]
    cut = made_by(graph, apart, "Reshape")
    shape, rows = _dims(graph, apart), _dims(graph, cut.input[0] if cut is not None else "")
    width = math.prod(size or 0 for size in shape[2:])
    if cut is not None and len(rows) == 3 and (rows[0], rows[2]) == (shape[0], width) and rows[0] is not None:
        # Of the same batch and width, the rows in between are as many.
        return cut.input[0]
    return writer.add("Reshape", [apart, writer.constant(f"{part}_shape", [0, 0, width], "int64")], part)


def _find_key_rows(writer: Writer, turned: str) -> str:
    """Returns the rows that turned keys were cut from, by one Transpose or by two; "" as `_find_rows` does."""
    keys = _unturn(writer.graph, turned)
    if keys:
        return _find_rows(writer, keys, _SWAP_HEADS, "key")
    return _find_rows(writer, turned, _TURN_APART, "key")


def _find_keys(writer: Writer, turned: str) -> str:
    """Returns the keys [batch, heads, rows, size], turned back if the model has them turned alone."""
    return _unturn(writer.graph, turned) or writer.add("Transpose", [turned], "keys", perm=_TURN)


def _unturn(graph: Graph, turned: str) -> str:
    """Returns the keys in heads behind a Transpose of their last two axes; "" where there is none."""
    node = made_by(graph, _skip_idle(graph, turned), "Transpose")
    return node.input[0] if node is not None and node.entries("perm") == _TURN else ""


def _skip_idle(graph: Graph, name: str) -> str:
    """Returns the value behind Reshapes that leave the shape as it is."""
    node = made_by(graph, name, "Reshape")
    while node is not None and _same_shape(graph, node.input[0], name):
        name = node.input[0]
        node = made_by(graph, name, "Reshape")
    return name


def _same_shape(graph: Graph, one: str, other: str) -> bool:
    shape = graph.value(one).static_shape
    return shape is not None and shape == graph.value(other).static_shape


def _only(graph: Graph, name: str, op: str) -> Node | None:
    """Returns the node that makes a value, behind idle Reshapes, if it is this operator and nothing else reads it."""
    while name not in graph.outputs and name not in graph.captured and len(graph.consumers.get(name, ())) == 1:
        node = made_by(graph, name, op, "Reshape")
        if node is None or node.op_type == op:
            return node
        if not _same_shape(graph, node.input[0], name):
            return None
        name = node.input[0]
    return None


def _join_heads(writer: Writer, name: str, width: int) -> str:
    beside = writer.add("Transpose", [name], "query_rows", perm=_SWAP_HEADS)
    return writer.add("Reshape", [beside, writer.constant("query_shape", [0, 0, width], "int64")], "query")


def _fit_mask(writer: Writer, found: _Attention, sizes: _Sizes) -> str | None:
    """Returns a mask as the kernel wants it, with each query's row; "" for none, None for one that does not fit."""
    if not found.mask:
        return ""
    name, mask = found.mask, _dims(writer.graph, found.mask)
    if 1 < len(mask) < 4:
        axes = writer.constant("mask_axes", list(range(4 - len(mask))), "int64")
        name, mask = writer.add("Unsqueeze", [name, axes], "mask_apart"), (*(1,) * (4 - len(mask)), *mask)
    if len(mask) != 4 or sizes.tokens is None or sizes.rows is None or mask[3] != sizes.rows:
        return None
    if mask[0] not in {1, sizes.batch} or mask[1] not in {1, sizes.heads} or mask[2] not in {1, sizes.tokens}:
        return None
    if mask[2] == sizes.tokens:
        return name
    # One row for all queries, as BERT masks its padding.
    shape = writer.constant("mask_shape", [1, 1, sizes.tokens, 1], "int64")
    return writer.add("Expand", [name, shape], "mask")
