"""Attention and MultiHeadAttention of ONNX Runtime as products and a Softmax: its optimizers fuse them."""

from collections.abc import Sequence

import numpy as np
import onnx

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer, replace_nodes
from edgekit.prepare.rewrites.heads import MASKED, OPSET_SINCE, Heads, Parts, input_of, real, static_float

FIX_ID = "split-attention"
_WIDTHS = "qkv_hidden_sizes"
_PACKED_MASK, _PACKED_PAST, _PACKED_BIAS = 3, 4, 5
_MULTI_BIAS, _MULTI_MASK, _MULTI_SCORES, _MULTI_PAST = 3, 4, 5, 6


def split_attentions(graph: onnx.GraphProto, opset: int) -> tuple[str, ...]:
    """Writes each Attention and MultiHeadAttention of ONNX Runtime in operators of ONNX, in place.

    Masks may be of each row, or say how many rows count; a cache grows at its end. Returns the names of the nodes. The
    last bits may differ (1e-5 relative).
    """
    ops = {"Attention", "MultiHeadAttention"} if opset >= OPSET_SINCE else set[str]()
    return replace_nodes(graph, opset, ops, _expand)


def _expand(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    if not node.domain:
        # ONNX has an Attention too, since opset 23.
        return None
    return _expand_packed(graph, node) if node.op_type == "Attention" else _expand_multi(graph, node)


def _expand_packed(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    """Writes the form whose weights make queries, keys and values of one input."""
    shape, weight = static_float(graph, node.input[0], 3), static_float(graph, input_of(node, 1), 2)
    count, is_open = node.integer("num_heads", 0), any(node.has_input(at) for at in (_PACKED_PAST, 6))
    if shape is None or weight is None or count < 1 or is_open or node.integer("do_rotary", 0) or any(node.output[1:]):
        return None
    widths = node.entries(_WIDTHS) or (weight[1] // 3,) * 3
    # Words where numbers belong are no list, and no default either.
    if len(widths) != 3 or (_WIDTHS in node.attributes and node.entries(_WIDTHS) is None):
        return None
    heads = Heads(
        batch=shape[0], tokens=shape[1], rows=shape[1], heads=count, keys=count, size=widths[0] // count,
        value_size=widths[-1] // count, dtype=str(graph.value(node.input[0]).dtype),
    )  # fmt: skip
    parts = Parts(writer=Writer(graph=graph, node=node), heads=heads)
    whole = [count * size for size in (heads.size, heads.size, heads.value_size)]
    mask = _find_form(graph, input_of(node, _PACKED_MASK), heads)
    if not heads.is_sound or tuple(widths) != tuple(whole) or sum(whole) != weight[1] or mask is None:
        return None
    made = parts.writer.add("MatMul", [node.input[0], node.input[1]], "product")
    if node.has_input(2):
        made = parts.writer.add("Add", [made, node.input[2]], "shifted")
    names = parts.cut(made, "packed", whole, 2)
    sizes = zip(names, ("query", "key", "value"), (heads.size, heads.size, heads.value_size), strict=True)
    query, key, value = (parts.to_heads(x, part, (count, heads.tokens, size)) for x, part, size in sizes)
    biases = _list_biases(parts, mask, _PACKED_BIAS, 0)
    parts.attend((query, key, value), real(node, "scale"), biases)
    return parts.writer.nodes


def _expand_multi(graph: Graph, node: Node) -> Sequence[onnx.NodeProto] | None:
    """Writes the form that is given queries, keys and values, and a cache of these or none."""
    shapes = [graph.value(input_of(node, at)).static_shape for at in range(3)]
    past = [graph.value(input_of(node, at)).static_shape for at in (_MULTI_PAST, _MULTI_PAST + 1)]
    heads = _read_heads(node, shapes, past, str(graph.value(node.input[0]).dtype))
    is_open = any(node.has_input(at) for at in (8, 9)) or any(node.output[3:])
    mask = None if heads is None else _find_form(graph, input_of(node, _MULTI_MASK), heads)
    # A key that comes in as heads, and goes out as it is, has no maker that could bear the name.
    is_open |= any(len(shapes[at] or ()) == 4 and not past[0] and any(node.output[at : at + 1]) for at in (1, 2))
    if heads is None or not heads.is_sound or heads.dtype not in FLOATS or is_open or mask is None:
        return None
    parts = Parts(writer=Writer(graph=graph, node=node), heads=heads)
    before = past[0][2] if past[0] else 0
    sizes = (heads.size, heads.size, heads.value_size)
    shifts: Sequence[str] = ("", "", "")
    if node.has_input(_MULTI_BIAS):
        shifts = parts.cut(node.input[_MULTI_BIAS], "shifts", [heads.heads * size for size in sizes], 0)
    made: list[str] = []
    for at, (part, shift, size) in enumerate(zip(("query", "key", "value"), shifts, sizes, strict=True)):
        x = node.input[at]
        if len(shapes[at] or ()) == 3:
            x = parts.writer.add("Add", [x, shift], f"{part}_shifted") if shift else x
            x = parts.to_heads(x, part, (heads.heads, heads.rows - before if at else heads.tokens, size))
        if at and before:
            x = parts.writer.add("Concat", [node.input[_MULTI_PAST + at - 1], x], f"{part}_all", axis=2)
        made.append(x)
    query, key, value = made[0], parts.publish(made[1], 1), parts.publish(made[2], 2)
    parts.attend((query, key, value), real(node, "scale"), _list_biases(parts, mask, _MULTI_SCORES, before))
    return parts.writer.nodes


def _read_heads(
    node: Node, shapes: Sequence[tuple[int, ...] | None], past: Sequence[tuple[int, ...] | None], dtype: str
) -> Heads | None:
    """Returns the sizes of what is given queries, keys and values; keys may be in heads already."""
    count, (query, key, value) = node.integer("num_heads", 0), shapes
    caches = [shape for shape in past if shape is not None]
    if (
        query is None
        or key is None
        or value is None
        or count < 1
        or len(query) != 3
        or not {len(key), len(value)} <= {3, 4}
    ):
        return None
    if len(caches) not in {0, 2} or any(len(shape) != 4 for shape in caches):
        return None
    if any(node.has_input(at) for at in (_MULTI_PAST, _MULTI_PAST + 1)) and not caches:
        return None
    size = query[2] // count
    value_size = value[3] if len(value) == 4 else value[2] // count
    rows = key[1] if len(key) == 3 else key[2]
    wanted = [(query[0], rows, count * width) for width in (size, value_size)]
    in_heads = [(query[0], count, rows, width) for width in (size, value_size)]
    if query[2] != count * size or any(
        shape not in pair for shape, *pair in zip((key, value), wanted, in_heads, strict=True)
    ):
        return None
    before = caches[0][2] if caches else 0
    if caches and caches != [(query[0], count, before, width) for width in (size, value_size)]:
        return None
    return Heads(
        batch=query[0], tokens=query[1], rows=before + rows, heads=count, keys=count, size=size,
        value_size=value_size, dtype=dtype,
    )  # fmt: skip


def _find_form(graph: Graph, mask: str, heads: Heads) -> str | None:
    """Returns which form a mask has: "" for none, "rows" or "lengths"; None for one that is not written here."""
    if not mask:
        return ""
    value = graph.value(mask)
    forms: dict[tuple[int, ...], str] = {(heads.batch, heads.rows): "rows", (heads.batch,): "lengths"}
    return forms.get(value.static_shape or ()) if value.dtype == "int32" else None


def _list_biases(parts: Parts, form: str, scores_at: int, before: int) -> list[str]:
    """Returns what is added to the scores: for rows that do not count, for later ones, and what the node is given."""
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
        biases.append(parts.hide("bias", counts, real(node, "mask_filter_value", MASKED)))
    if node.integer("unidirectional", 0):
        later = np.triu(np.full((heads.tokens, heads.rows), MASKED), 1 + before)
        biases.append(writer.constant("later", later[None, None], heads.dtype))
    return biases + [name for name in (input_of(node, scores_at),) if name]
