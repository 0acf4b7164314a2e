"""Splits the attention of ONNX and of ONNX Runtime into MatMul, Softmax and Add, for providers that lack it."""

from collections.abc import Sequence

import msgspec
import numpy as np
from onnx import helper

from edgekit.graph.graph import Graph, Node
from edgekit.graph.match import known, need
from edgekit.graph.rewrite import FLOATS, Writer, node_rewrite

OPSET_SINCE = 13
"""The first opset in which the sizes of Split and the axes of Unsqueeze are inputs."""
MASKED = -1e4
"""Added to masked scores: Softmax makes 0 of it, and float16 can hold it."""


_MOST_ROWS = 1 << 20
# A causal mask is written as a constant.
_MOST_SCORES = 1 << 26


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of attention: number of queries (`tokens`), of key rows (`rows`), and of heads.

    `heads` counts the query heads and `keys` the key heads; `heads` / `keys` query heads share each key head. The first
    `before` rows are those of a cache.
    """

    batch: int
    tokens: int
    rows: int
    heads: int
    keys: int
    size: int
    value_size: int
    dtype: str
    before: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of a query, a key and a value."""
        return self.size, self.size, self.value_size

    @property
    def is_sound(self) -> bool:
        """True if the sizes are positive, consistent, and no larger than any real model's."""
        sizes = (self.batch, self.tokens, self.rows, self.heads, self.keys, self.size, self.value_size)
        is_small = max(self.rows, self.tokens) <= _MOST_ROWS and self.rows * self.tokens <= _MOST_SCORES
        return min(sizes) > 0 and self.heads % self.keys == 0 and is_small


class Parts(msgspec.Struct, kw_only=True):
    """Builds the nodes that replace one attention node; a constant that several of them read is written once.

    `turned` is how many elements of each head a rotary embedding rotates; `is_first` says that all rows are new ones.
    """

    writer: Writer
    heads: Heads
    turned: int = 0
    is_first: bool = False
    made: dict[str, str] = {}

    @property
    def node(self) -> Node:
        """The node that is replaced."""
        return self.writer.node

    def rows(self, count: int, shape: Sequence[int]) -> str:
        """Returns the numbers 0 to `count` - 1 as a constant of this shape."""
        name = f"rows_{'x'.join(map(str, shape))}"
        if name not in self.made:
            self.made[name] = self.writer.constant(name, np.arange(count).reshape(shape), "int32")
        return self.made[name]

    def reshape(self, x: str, part: str, shape: Sequence[int]) -> str:
        """Adds a Reshape."""
        return self.writer.reshape(x, f"{part}_shape", list(shape), part)

    def to_heads(self, x: str, part: str, sizes: Sequence[int]) -> str:
        """Adds nodes from [batch, rows, heads * size] to [batch, heads, rows, size]; `sizes` is (heads, rows, size)."""
        heads, rows, size = sizes
        apart = self.reshape(x, f"{part}_apart", [self.heads.batch, rows, heads, size])
        return self.writer.add("Transpose", [apart], f"{part}_heads", perm=[0, 2, 1, 3])

    def hide(self, counts: str, value: float = MASKED) -> str:
        """Adds a Where that turns a bool mask into an additive bias: 0 where True, else `value`, at least `MASKED`."""
        numbers = self.writer.constants({"bias_kept": 0, "bias_away": max(value, MASKED)}, self.heads.dtype)
        return self.writer.add("Where", [counts, *numbers], "bias")

    def publish(self, name: str, position: int) -> str:
        """Renames a value to the node's output at this position, if the node has it; returns the value's final name."""
        output = self.node.output[position] if position < len(self.node.output) else ""
        if not output:
            return name
        maker = next(node for node in self.writer.nodes if name in node.output)
        maker.output[list(maker.output).index(name)] = output
        return output

    def attend(self, parts: tuple[str, str, str], scale: float, biases: Sequence[str], *, merges: bool = True) -> None:
        """Adds Softmax(scale * query @ key^T + biases) @ value, and last the Reshape that merges the heads.

        `parts` are query [batch, heads, tokens, size], key [batch, keys, rows, size] and value; each of `biases` is
        broadcast to [batch, heads, tokens, rows]. Without `merges` the heads stay apart.
        """
        (query, key, value), of, add = parts, self.heads, self.writer.add
        # Where query heads share a key head, their queries become rows of one MatMul, so that no key is repeated.
        together = (of.batch, of.keys, of.heads // of.keys * of.tokens)
        asked = add("Mul", [query, self.writer.constant("scale", scale or of.size**-0.5, of.dtype)], "scaled")
        asked = self._regroup(asked, "query", (*together, of.size))
        scores = add("MatMul", [asked, add("Transpose", [key], "turned", perm=[0, 1, 3, 2])], "scores")
        scores = self._regroup(scores, "each", (of.batch, of.heads, of.tokens, of.rows))
        for place, bias in enumerate(biases):
            scores = add("Add", [scores, bias], f"masked{place}")
        chances = add("Softmax", [scores], "chances", axis=-1)
        mixed = add("MatMul", [self._regroup(chances, "all", (*together, of.rows)), value], "mixed")
        mixed = self._regroup(mixed, "apart", (of.batch, of.heads, of.tokens, of.value_size))
        self.finish(mixed, merges=merges)

    def finish(self, made: str, *, merges: bool) -> None:
        """Makes heads, which the last node computed, the node's output: apart, or merged by a Transpose and Reshape."""
        if merges:
            of, rows = self.heads, self.writer.add("Transpose", [made], "beside", perm=[0, 2, 1, 3])
            self.writer.reshape(rows, "joined", [of.batch, of.tokens, of.heads * of.value_size])
        else:
            self.writer.nodes[-1].name = self.node.proto.name
            self.publish(made, 0)

    def _regroup(self, x: str, part: str, shape: Sequence[int]) -> str:
        return x if self.heads.heads == self.heads.keys else self.reshape(x, f"{part}_rows", shape)


def static_float(graph: Graph, name: str, rank: int) -> tuple[int, ...] | None:
    """Returns the shape of a float value of rank `rank`, or None if the value is another or its shape is unknown."""
    value = graph.value(name)
    shape = value.static_shape
    return shape if shape is not None and len(shape) == rank and value.dtype in FLOATS else None


_NAMES = ("query", "key", "value")
_WIDTHS = "qkv_hidden_sizes"
_PACKED_MASK, _PACKED_PAST, _PACKED_BIAS = 3, 4, 5
_MULTI_BIAS, _MULTI_MASK, _MULTI_SCORES, _MULTI_PAST = 3, 4, 5, 6
_ONNX_MASK, _ONNX_PAST, _ONNX_LENGTHS = 3, 4, 6


@node_rewrite("split-attention", {"Attention", "MultiHeadAttention"}, since=OPSET_SINCE)
def split_attention(writer: Writer) -> None:
    """Rewrites an Attention or MultiHeadAttention to Softmax(scale * query @ key^T + bias) @ value.

    The Attention is that of ONNX, since opset 23, or ONNX Runtime's. A mask of the latter may have an entry for each
    key row, or give the number of valid rows. New keys and values are appended to the end of a cache. The last bits may
    differ (1e-5 relative). Where a mask hides all keys of a query, its result is another.
    """
    if writer.node.op_type == "MultiHeadAttention":
        _expand_multi(writer)
    elif writer.node.domain:
        _expand_packed(writer)
    else:
        _expand_onnx(writer)


def _expand_packed(writer: Writer) -> None:
    """Splits Attention, which multiplies one input by packed weights to make query, key and value."""
    graph, node = writer.graph, writer.node
    batch, tokens, _ = known(static_float(graph, node.input[0], 3))
    _, columns = known(static_float(graph, node.given(1), 2))
    count = node.integer("num_heads", 0)
    need(count >= 1 and not any(node.has_input(at) for at in (_PACKED_PAST, 6)))
    need(not node.integer("do_rotary", 0) and not any(node.output[1:]))
    # A list of strings is malformed and must not be taken for an absent attribute.
    widths = known(node.entries(_WIDTHS)) if _WIDTHS in node.attributes else (columns // 3,) * 3
    need(len(widths) == 3)
    heads = Heads(
        batch=batch, tokens=tokens, rows=tokens, heads=count, keys=count, size=widths[0] // count,
        value_size=widths[-1] // count, dtype=writer.dtype,
    )  # fmt: skip
    parts, whole = Parts(writer=writer, heads=heads), [count * size for size in heads.sizes]
    need(heads.is_sound and [*widths] == whole and sum(whole) == columns)
    mask = _find_form(graph, node.given(_PACKED_MASK), heads)
    made = writer.add("MatMul", [node.input[0], node.input[1]], "product")
    if node.has_input(2):
        made = writer.add("Add", [made, node.input[2]], "shifted")
    sizes = zip(writer.cut(made, "packed", whole, 2), _NAMES, heads.sizes, strict=True)
    query, key, value = (parts.to_heads(x, part, (count, tokens, size)) for x, part, size in sizes)
    parts.attend((query, key, value), node.number("scale"), _list_biases(parts, mask, _PACKED_BIAS))


def _expand_multi(writer: Writer) -> None:
    """Splits MultiHeadAttention, whose inputs are query, key and value, with or without a cache."""
    graph, node = writer.graph, writer.node
    need(not any(node.has_input(at) for at in (8, 9)) and len(graph.value(node.input[0]).shape or ()) == 3)
    heads = _read_heads(graph, node, (node.integer("num_heads", 0),) * 3, _MULTI_PAST)
    mask, parts = _find_form(graph, node.given(_MULTI_MASK), heads), Parts(writer=writer, heads=heads)
    shifts: Sequence[str] = ("", "", "")
    if node.has_input(_MULTI_BIAS):
        shifts = writer.cut(node.input[_MULTI_BIAS], "shifts", [heads.heads * size for size in heads.sizes], 0)
    biases = _list_biases(parts, mask, _MULTI_SCORES)
    parts.attend(_take_parts(parts, _MULTI_PAST, shifts), node.number("scale"), biases)


def _expand_onnx(writer: Writer) -> None:
    """Splits the Attention of ONNX, whose inputs are query, key and value, in heads or not, with or without a cache."""
    graph, node = writer.graph, writer.node
    counts = [node.integer(name, 0) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
    heads = _read_heads(graph, node, counts, _ONNX_PAST)
    # In opset 23 the softcap came behind the mask. In float16 a Softmax in float32 is another.
    need(not node.has_input(_ONNX_LENGTHS) and node.number("softcap") == 0)
    need("softmax_precision" not in node.attributes)
    ranks = {len(graph.value(name).shape or ()) for name in node.input[:3]}
    need(len(ranks) == 1)
    parts, biases = Parts(writer=writer, heads=heads), list[str]()
    if mask := node.given(_ONNX_MASK):
        value, most = graph.value(mask), (heads.batch, heads.heads, heads.tokens, heads.rows)
        shape = value.static_shape or ()
        need(all(size in {1, whole} for size, whole in zip(shape[::-1], most[::-1], strict=False)))
        # The last axis may be shorter than there are keys: then it is filled up.
        need(2 <= len(shape) <= len(most) and shape[-1] == heads.rows and value.dtype in {"bool", heads.dtype})
        fixed = graph.inline(mask)
        if value.dtype == "bool" and fixed is not None:
            mask = writer.constant("bias", np.where(fixed, 0, MASKED))
        elif value.dtype == "bool":
            mask = parts.hide(mask)
        biases.append(mask)
    if node.integer("is_causal", 0):
        biases.append(_hide_later(parts))
    taken = _take_parts(parts, _ONNX_PAST, ("", "", ""))
    parts.attend(taken, node.number("scale"), biases, merges=ranks == {3})


def _read_heads(graph: Graph, node: Node, counts: Sequence[int], past_at: int) -> Heads:
    """Returns the sizes of attention whose inputs are query, key and value, if they are known and sound.

    `counts` are the heads of each, 0 where only its shape tells; the cache is input `past_at` and the next.
    """
    in_heads = [_part_heads(graph, node.given(at), count) for at, count in enumerate(counts)]
    (batch, count, tokens, size), (_, keys, rows, _), (*_, value_size) = in_heads
    past = [graph.value(node.input[at]).static_shape or () for at in (past_at, past_at + 1) if node.has_input(at)]
    before = past[0][2] if past and len(past[0]) == 4 else 0
    wanted = [(batch, keys, each, width) for each in (rows, before) for width in (size, value_size)]
    need([*in_heads[1:], *past] == wanted[: 4 if past else 2])
    # If such a key passes through unchanged, no new node makes it, and so none can be renamed to the output.
    passes = any(len(graph.value(node.input[at]).shape or ()) == 4 and any(node.output[at : at + 1]) for at in (1, 2))
    heads = Heads(
        batch=batch, tokens=tokens, rows=before + rows, heads=count, keys=keys, size=size, value_size=value_size,
        dtype=graph.value(node.input[0]).dtype or "", before=before,
    )  # fmt: skip
    need(heads.is_sound and heads.dtype in FLOATS and not any(node.output[3:]) and (before > 0 or not passes))
    return heads


def _part_heads(graph: Graph, name: str, count: int) -> tuple[int, ...]:
    """Returns the shape of [batch, rows, heads * size] or [batch, heads, rows, size] as the latter."""
    shape = known(graph.value(name).static_shape)
    if len(shape) == 3 and count > 0 and shape[2] % count == 0:
        return (shape[0], count, shape[1], shape[2] // count)
    need(len(shape) == 4 and count in {0, shape[1]})
    return shape


def _take_parts(parts: Parts, past_at: int, shifts: Sequence[str]) -> tuple[str, str, str]:
    """Returns query, key and value in heads, each with its shift added, the last two behind those of the cache."""
    writer, heads, made = parts.writer, parts.heads, list[str]()
    for at, (part, shift, size) in enumerate(zip(_NAMES, shifts, heads.sizes, strict=True)):
        x = parts.node.input[at]
        if len(writer.graph.value(x).shape or ()) == 3:
            x = writer.add("Add", [x, shift], f"{part}_shifted") if shift else x
            count, rows = (heads.keys, heads.rows - heads.before) if at else (heads.heads, heads.tokens)
            x = parts.to_heads(x, part, (count, rows, size))
        if at and heads.before:
            x = writer.add("Concat", [parts.node.input[past_at + at - 1], x], f"{part}_all", axis=2)
        made.append(x)
    return made[0], parts.publish(made[1], 1), parts.publish(made[2], 2)


def _find_form(graph: Graph, mask: str, heads: Heads) -> str:
    """Returns the form of a mask: "" for none, "rows" or "lengths"; another form is not supported here."""
    value = graph.value(mask)
    forms: dict[tuple[int, ...], str] = {(heads.batch, heads.rows): "rows", (heads.batch,): "lengths"}
    need(not mask or value.dtype == "int32")
    return known(forms.get(value.static_shape or ())) if mask else ""


def _list_biases(parts: Parts, form: str, scores_at: int) -> list[str]:
    """Returns the biases of the scores: for masked rows, for later rows (causal mask), and the node's own bias."""
    writer, heads, node = parts.writer, parts.heads, parts.node
    biases: list[str] = []
    if form:
        mask = node.input[_PACKED_MASK if node.op_type == "Attention" else _MULTI_MASK]
        each = [heads.batch, 1, 1, heads.rows if form == "rows" else 1]
        mask = parts.reshape(mask, "mask", each)
        if form == "rows":
            counts = writer.add("Greater", [mask, writer.constant("nothing", 0, "int32")], "counts")
        else:
            counts = writer.add("Less", [parts.rows(heads.rows, (1, 1, 1, heads.rows)), mask], "counts")
        biases.append(parts.hide(counts, node.number("mask_filter_value", MASKED)))
    if node.integer("unidirectional", 0):
        biases.append(_hide_later(parts))
    return biases + [name for name in (node.given(scores_at),) if name]


def _hide_later(parts: Parts) -> str:
    """Returns the bias of a causal mask: each query sees the keys of the cache and those up to its own place."""
    later = np.triu(np.full((parts.heads.tokens, parts.heads.rows), MASKED), 1 + parts.heads.before)
    return parts.writer.constant("later", later[None, None], parts.heads.dtype)


# The inputs of GroupQueryAttention. Those after the bias are sinks, quantized caches, and norms of query and key.
_PAST, _LENGTHS, _TOTAL, _COS, _SIN, _POSITIONS, _BIAS = 3, 5, 6, 7, 8, 9, 10
_OTHERS = range(11, 16)
_KEPT_WHOLE = (
    "smooth_softmax", "qk_output", "kv_cache_bit_width", "sliding_window_cache", "rotary_interleaved", "softcap",
)  # fmt: skip


@node_rewrite("split-grouped-attention", {"GroupQueryAttention"}, since=OPSET_SINCE)
def split_grouped_attention(writer: Writer) -> None:
    """Splits GroupQueryAttention into its rotary embedding, cache update, mask, MatMuls and Softmax.

    New rows are written into the cache at the position that `seqlens_k` gives. The rows after them keep their old
    values, which do not affect any result. The last bits may differ (1e-5 relative).
    """
    graph, node, heads = writer.graph, writer.node, _read_grouped_heads(writer)
    table = graph.value(node.given(_COS)).static_shape
    turned = 2 * table[1] if table and node.integer("do_rotary", 0) else 0
    case = Parts(writer=writer, heads=heads, turned=turned, is_first=heads.tokens == writer.number(_TOTAL))
    query, key, value = node.input[:3]
    if not node.has_input(1):
        widths = [count * heads.size for count in (heads.heads, heads.keys, heads.keys)]
        query, key, value = case.writer.cut(node.input[0], "packed", widths, 2)
    query = case.to_heads(query, "query", (heads.heads, heads.tokens, heads.size))
    new = (heads.keys, heads.tokens, heads.size)
    key, value = case.to_heads(key, "key", new), case.to_heads(value, "value", new)
    last = case.reshape(node.input[_LENGTHS], "last", [heads.batch, 1, 1, 1])
    column, row = _find_places(case, last)
    if case.turned:
        turns = _find_turns(case, node.given(_POSITIONS) or row, (node.input[_COS], node.input[_SIN]))
        query, key = (_rotate(case, given, part, turns) for given, part in ((query, "query"), (key, "key")))
    key, value = (case.publish(_update_cache(case, new, at, last, row), at) for at, new in ((1, key), (2, value)))
    # Later tokens are hidden, padding, and tokens before the local window.
    rows = case.rows(heads.rows, (1, 1, 1, heads.rows))
    counts = writer.add("LessOrEqual", [rows, column], "earlier")
    if case.is_first:
        counts = writer.add("And", [counts, writer.add("LessOrEqual", [rows, last], "text")], "counts")
    if (window := node.integer("local_window_size", -1)) > 0:
        bound = writer.add("Sub", [column, writer.constant("window", window, "int32")], "bound")
        counts = writer.add("And", [counts, writer.add("Greater", [rows, bound], "near")], "seen")
    biases = [case.hide(counts), *filter(None, [node.given(_BIAS)])]
    case.attend((query, key, value), node.number("scale"), biases)


def _read_grouped_heads(writer: Writer) -> Heads:
    """Returns the sizes of a GroupQueryAttention, if they are known, agree, and it uses no feature that is not here."""
    graph, node = writer.graph, writer.node
    need(all(node.attributes.get(f"{part}_quant_type", "NONE") == "NONE" for part in "kv"))
    need(not any(node.number(name) > 0 for name in _KEPT_WHOLE) and node.integer("causal", 1))
    need(not any(node.has_input(at) for at in _OTHERS) and not any(node.output[3:]))
    need(node.has_input(_PAST) == node.has_input(_PAST + 1) and node.has_input(1) == node.has_input(2))
    (batch, tokens, width), total = known(static_float(graph, node.input[0], 3)), writer.number(_TOTAL)
    count, keys = node.integer("num_heads", 0), node.integer("kv_num_heads", 0)
    need(total.is_integer() and count >= 1 and keys >= 1)
    size = width // (count if node.has_input(1) else count + 2 * keys)
    past = known(static_float(graph, node.input[_PAST], 4)) if node.has_input(_PAST) else (batch, keys, 0, size)
    heads = Heads(
        batch=batch, tokens=tokens, rows=max(int(total), past[2]), heads=count, keys=keys, size=size, value_size=size,
        dtype=writer.dtype, before=past[2],
    )  # fmt: skip
    need(heads.is_sound and (past[0], past[1], past[3]) == (batch, keys, size))
    # Without a cache all tokens are new; with a cache there must be room for them.
    need(total == tokens or (past[2] > 0 and tokens < total <= past[2] + tokens))
    tables = [static_float(graph, node.given(at), 2) for at in (_COS, _SIN)]
    turned = 2 * (tables[0] or (0, 0))[1]
    need(not node.integer("do_rotary", 0) or (tables[0] == tables[1] and 0 < turned <= size))
    need(not node.has_input(_POSITIONS) or writer.shape(_POSITIONS) == (batch, tokens))
    need(not node.has_input(_BIAS) or (graph.value(node.input[_BIAS]).shape or ())[-1:] == (heads.rows,))
    need(graph.value(node.given(_LENGTHS)).dtype == "int32")
    return heads


def _find_places(case: Parts, last: str) -> tuple[str, str]:
    """Returns the cache position of each new token, twice: as [.., tokens, 1] and as [.., 1, tokens]."""
    tokens = case.heads.tokens
    if tokens == 1 and not case.is_first:
        return last, last
    column, row = case.rows(tokens, (1, 1, tokens, 1)), case.rows(tokens, (1, 1, 1, tokens))
    if case.is_first:
        return column, row
    start = case.writer.add("Sub", [last, case.writer.constant("before", tokens - 1, "int32")], "start")
    return case.writer.add("Add", [start, column], "places"), case.writer.add("Add", [start, row], "places_row")


@node_rewrite("split-rotary", {"RotaryEmbedding"}, since=OPSET_SINCE, floats=True)
def split_rotary(writer: Writer) -> None:
    """Rewrites ONNX's RotaryEmbedding, since opset 23, or ONNX Runtime's, to products of halves and their sums.

    Neighbours that are turned together stay. The last bits may differ (1e-6 relative).
    """
    graph, node = writer.graph, writer.node
    at, order = (1, (2, 3)) if node.domain else (3, (1, 2))
    places, tables = node.given(at), [node.given(each) for each in order]
    cos, sin = (known(static_float(graph, name, 2 if places else 3)) for name in tables)
    turned = 2 * cos[-1]
    is_flat, count = len(graph.value(node.input[0]).shape or ()) == 3, node.integer("num_heads", 0)
    if is_flat and node.domain and not count and turned:
        count = (graph.dims(node.input[0])[-1] or 0) // turned
    batch, count, tokens, size = _part_heads(graph, node.input[0], count)
    need(not any(node.number(name) for name in ("interleaved", "is_packed_batching")) and node.number("scale", 1) == 1)
    need(cos == sin and (writer.shape(at) if places else cos[:2]) == (batch, tokens))
    need(turned == (node.integer("rotary_embedding_dim", 0) or size) <= size)
    heads = Heads(
        batch=batch, tokens=tokens, rows=tokens, heads=count, keys=count, size=size, value_size=size, dtype=writer.dtype
    )
    need(heads.is_sound)
    parts = Parts(writer=writer, heads=heads, turned=turned)
    if places:
        turns = _find_turns(parts, places, tables)
    else:
        each = [batch, 1, tokens, turned // 2]
        turns = parts.reshape(tables[0], "cos", each), parts.reshape(tables[1], "sin", each)
    x = parts.to_heads(node.input[0], "x", (count, tokens, size)) if is_flat else node.input[0]
    parts.finish(_rotate(parts, x, "x", turns), merges=is_flat)


def _find_turns(case: Parts, places: str, tables: Sequence[str]) -> tuple[str, str]:
    """Returns cosines and sines of each token, [batch, 1, tokens, half of the rotated size], from rows of tables."""
    add, rows = case.writer.add, case.reshape(places, "turns", [-1, 1, case.heads.tokens])
    return add("Gather", [tables[0], rows], "cos", axis=0), add("Gather", [tables[1], rows], "sin", axis=0)


def _rotate(case: Parts, x: str, part: str, turns: tuple[str, str]) -> str:
    """Adds a rotary embedding: the first `turned` elements of each head are rotated, the others are copied."""
    add, (cos, sin) = case.writer.add, turns
    rest = case.heads.size - case.turned
    low, high, *others = case.writer.cut(x, f"{part}_halves", [*[case.turned // 2] * 2, *([rest] if rest else [])], 3)

    def turn(op: str, name: str, one: str, two: str) -> str:
        return add(op, [add("Mul", [one, cos], f"{name}_cos"), add("Mul", [two, sin], f"{name}_sin")], name)

    made = [turn("Sub", f"{part}_low", low, high), turn("Add", f"{part}_high", high, low)]
    return add("Concat", [*made, *others], f"{part}_turned", axis=3)


def _update_cache(case: Parts, new: str, position: int, last: str, places: str) -> str:
    """Returns the cache with the new rows written into it."""
    add, heads, part = case.writer.add, case.heads, ("", "key", "value")[position]
    past = case.node.input[_PAST + position - 1]
    if case.is_first:
        if heads.rows == heads.tokens:
            return new
        # The rows that follow the new ones in the cache.
        ends = {f"{part}_from": [heads.tokens], f"{part}_to": [heads.rows], f"{part}_axis": [2]}
        bounds = case.writer.constants(ends, "int64")
        return add("Concat", [new, add("Slice", [past, *bounds], f"{part}_rest")], f"{part}_cache", axis=2)
    if heads.rows > heads.before:
        empty = np.zeros((heads.batch, heads.keys, heads.rows - heads.before, heads.size))
        past = add("Concat", [past, case.writer.constant(f"{part}_empty", empty, heads.dtype)], f"{part}_all", axis=2)
    column = case.rows(heads.rows, (1, 1, heads.rows, 1))
    if heads.tokens == 1:
        is_new = add("Equal", [column, last], f"{part}_new")
    else:
        start = add("Sub", [last, case.writer.constant(f"{part}_before", heads.tokens - 1, "int32")], f"{part}_start")
        is_new = add("GreaterOrEqual", [column, start], f"{part}_new")
        # A MatMul with a 0/1 matrix moves each new token to its row of the cache.
        chosen = add("Equal", [column, places], f"{part}_chosen")
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(heads.dtype))
        new = add("MatMul", [add("Cast", [chosen], f"{part}_choice", to=kind), new], f"{part}_moved")
    return add("Where", [is_new, new, past], f"{part}_cache")
