"""GroupQueryAttention as products and a Softmax: only ONNX Runtime's own providers have the operator."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import Writer, replace_nodes
from edgekit.prepare.rewrites.heads import OPSET_SINCE, Heads, Parts, input_of, real, static_float

FIX_ID = "split-grouped-attention"
# Inputs of the operator; behind the bias are sinks, quantized caches and norms of queries and keys.
_PAST, _LENGTHS, _TOTAL, _COS, _SIN, _POSITIONS, _BIAS = 3, 5, 6, 7, 8, 9, 10
_OTHERS = range(11, 16)
_KEPT_WHOLE = (
    "smooth_softmax", "qk_output", "kv_cache_bit_width", "sliding_window_cache", "rotary_interleaved", "softcap",
)  # fmt: skip


class _Case(Parts, kw_only=True):
    """A node that can be written: how many rows of a cache come in, and how many numbers of each head are rotated."""

    past: int
    turned: int
    is_first: bool


def split_grouped_attentions(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each GroupQueryAttention with its rotation, cache and mask in operators of ONNX, in place.

    New rows come into the cache at the place that `seqlens_k` says; behind them it keeps what it had, on which no
    result depends. Returns the names of the nodes. The last bits may differ (1e-5 relative).
    """
    ops = {"GroupQueryAttention"} if opset >= OPSET_SINCE else set[str]()
    return replace_nodes(graph, opset, ops, _expand)


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    heads = None if _is_kept(node) else _read_heads(graph, node)
    if heads is None or not heads.is_sound or not _fits(graph, node, heads):
        return None
    past, table = graph.value(input_of(node, _PAST)).static_shape, graph.value(input_of(node, _COS)).static_shape
    case = _Case(
        writer=Writer(graph=graph, node=node),
        heads=heads,
        past=past[2] if past else 0,
        turned=2 * table[1] if table and node.integer("do_rotary", 0) else 0,
        is_first=heads.tokens == graph.number(node.input[_TOTAL]),
    )
    query, key, value = _split(case)
    query = case.to_heads(query, "query", (heads.heads, heads.tokens, heads.size))
    new = (heads.keys, heads.tokens, heads.size)
    key, value = case.to_heads(key, "key", new), case.to_heads(value, "value", new)
    last = case.reshape(node.input[_LENGTHS], "last", [heads.batch, 1, 1, 1])
    column, row = _find_places(case, last)
    if case.turned:
        turns = _find_turns(case, row)
        query, key = _rotate(case, query, "query", turns), _rotate(case, key, "key", turns)
    key, value = (case.publish(_remember(case, new, at, last, row), at) for at, new in ((1, key), (2, value)))
    case.attend(
        (query, key, value), real(node, "scale"), [_mask(case, last, column), *filter(None, [input_of(node, _BIAS)])]
    )
    return case.writer.nodes


def _is_kept(node: Node) -> bool:
    """Returns True if a node does what is not written here."""
    quantized = any(node.attributes.get(f"{part}_quant_type", "NONE") != "NONE" for part in "kv")
    options = any(real(node, name) > 0 for name in _KEPT_WHOLE) or not node.integer("causal", 1)
    inputs = any(node.has_input(position) for position in _OTHERS) or not node.has_input(_LENGTHS)
    inputs = inputs or node.has_input(_PAST) != node.has_input(_PAST + 1)
    return quantized or options or inputs or any(node.output[3:]) or node.has_input(1) != node.has_input(2)


def _read_heads(graph: Graph, node: Node) -> Heads | None:
    """Returns the sizes of a node, None where they are not known."""
    shape, total = static_float(graph, node.input[0], 3), graph.number(input_of(node, _TOTAL))
    heads, keys = node.integer("num_heads", 0), node.integer("kv_num_heads", 0)
    if shape is None or total is None or not total.is_integer() or heads < 1 or keys < 1:
        return None
    size = shape[2] // (heads if node.has_input(1) else heads + 2 * keys)
    past = static_float(graph, input_of(node, _PAST), 4) or (0, 0, 0, 0)
    return Heads(
        batch=shape[0], tokens=shape[1], rows=max(int(total), past[2]), heads=heads, keys=keys, size=size,
        value_size=size, dtype=str(graph.value(node.input[0]).dtype),
    )  # fmt: skip


def _fits(graph: Graph, node: Node, heads: Heads) -> bool:
    """Returns True if the other inputs have the shapes that the sizes ask for."""
    past, total = input_of(node, _PAST), graph.number(node.input[_TOTAL])
    shape = static_float(graph, past, 4) if past else (heads.batch, heads.keys, 0, heads.size)
    if shape is None or (shape[0], shape[1], shape[3]) != (heads.batch, heads.keys, heads.size):
        return False
    # Without a cache all tokens are new; with one there is room for them.
    is_known = total == heads.tokens or (shape[2] > 0 and heads.tokens < (total or 0) <= shape[2] + heads.tokens)
    tables = [static_float(graph, input_of(node, at), 2) for at in (_COS, _SIN)]
    turns = not node.integer("do_rotary", 0) or (
        tables[0] == tables[1] and 0 < 2 * (tables[0] or (0, 0))[1] <= heads.size
    )
    places = not node.has_input(_POSITIONS) or graph.value(node.input[_POSITIONS]).static_shape == (
        heads.batch,
        heads.tokens,
    )
    bias = not node.has_input(_BIAS) or (graph.value(node.input[_BIAS]).shape or ())[-1:] == (heads.rows,)
    return is_known and turns and places and bias and graph.value(node.input[_LENGTHS]).dtype == "int32"


def _split(case: _Case) -> tuple[str, ...]:
    """Returns queries, keys and values, which may lie side by side in one input."""
    if case.node.has_input(1):
        return case.node.input[:3]
    return case.cut(
        case.node.input[0], "packed", [each * case.heads.size for each in (case.heads.heads, *[case.heads.keys] * 2)], 2
    )


def _find_places(case: _Case, last: str) -> tuple[str, str]:
    """Returns the row of each new token as [.., tokens, 1], and as [.., 1, tokens]."""
    tokens = case.heads.tokens
    if tokens == 1 and not case.is_first:
        return last, last
    column, row = case.rows(tokens, (1, 1, tokens, 1)), case.rows(tokens, (1, 1, 1, tokens))
    if case.is_first:
        return column, row
    start = case.writer.add("Sub", [last, case.writer.constant("before", tokens - 1, "int32")], "start")
    return case.writer.add("Add", [start, column], "places"), case.writer.add("Add", [start, row], "places_row")


def _find_turns(case: _Case, places: str) -> tuple[str, str]:
    """Returns cosines and sines of each token as [batch, 1, tokens, half of what is turned]."""
    rows = case.reshape(input_of(case.node, _POSITIONS) or places, "turns", [-1, 1, case.heads.tokens])
    cos, sin = (
        case.writer.add("Gather", [case.node.input[at], rows], part, axis=0)
        for at, part in ((_COS, "cos"), (_SIN, "sin"))
    )
    return cos, sin


def _rotate(case: _Case, x: str, part: str, turns: tuple[str, str]) -> str:
    """Adds a rotary embedding: two halves of each head are turned as pairs, and what is left stays."""
    add, (cos, sin) = case.writer.add, turns
    rest = case.heads.size - case.turned
    low, high, *others = case.cut(x, f"{part}_halves", [*[case.turned // 2] * 2, *([rest] if rest else [])], 3)

    def turn(op: str, name: str, one: str, two: str) -> str:
        return add(op, [add("Mul", [one, cos], f"{name}_cos"), add("Mul", [two, sin], f"{name}_sin")], name)

    made = [turn("Sub", f"{part}_low", low, high), turn("Add", f"{part}_high", high, low)]
    return add("Concat", [*made, *others], f"{part}_turned", axis=3)


def _remember(case: _Case, new: str, position: int, last: str, places: str) -> str:
    """Returns the cache with new rows in it."""
    add, heads, part = case.writer.add, case.heads, ("", "key", "value")[position]
    if case.is_first:
        return new if heads.rows == heads.tokens else _put_first(case, new, position)
    past = case.node.input[_PAST + position - 1]
    if heads.rows > case.past:
        empty = np.zeros((heads.batch, heads.keys, heads.rows - case.past, heads.size))
        past = add("Concat", [past, case.writer.constant(f"{part}_empty", empty, heads.dtype)], f"{part}_all", axis=2)
    column = case.rows(heads.rows, (1, 1, heads.rows, 1))
    if heads.tokens == 1:
        is_new = add("Equal", [column, last], f"{part}_new")
    else:
        start = add("Sub", [last, case.writer.constant(f"{part}_before", heads.tokens - 1, "int32")], f"{part}_start")
        is_new = add("GreaterOrEqual", [column, start], f"{part}_new")
        # Each row of the cache asks for the token that belongs there: a product with ones and zeros moves them.
        chosen = add("Equal", [column, places], f"{part}_chosen")
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(heads.dtype))
        new = add("MatMul", [add("Cast", [chosen], f"{part}_choice", to=kind), new], f"{part}_moved")
    return add("Where", [is_new, new, past], f"{part}_cache")


def _put_first(case: _Case, new: str, position: int) -> str:
    """Adds what puts the first rows before what the cache had behind them."""
    part = ("", "key", "value")[position]
    ends = (("from", case.heads.tokens), ("to", case.heads.rows), ("axis", 2))
    bounds = [case.writer.constant(f"{part}_{name}", [value], "int64") for name, value in ends]
    rest = case.writer.add("Slice", [case.node.input[_PAST + position - 1], *bounds], f"{part}_rest")
    return case.writer.add("Concat", [new, rest], f"{part}_cache", axis=2)


def _mask(case: _Case, last: str, places: str) -> str:
    """Returns the bias that hides what comes later, what is no text, and what lies before the window."""
    add, rows = case.writer.add, case.rows(case.heads.rows, (1, 1, 1, case.heads.rows))
    counts = add("LessOrEqual", [rows, places], "earlier")
    if case.is_first:
        counts = add("And", [counts, add("LessOrEqual", [rows, last], "text")], "counts")
    window = case.node.integer("local_window_size", -1)
    if window > 0:
        bound = add("Sub", [places, case.writer.constant("window", window, "int32")], "bound")
        counts = add("And", [counts, add("Greater", [rows, bound], "near")], "seen")
    return case.hide("bias", counts)
