"""Multiply-accumulates and bytes of a node, computed from shapes alone.

For inputs with open dimensions, work is counted at assumed sizes, which the report names (`choose_sizes`).
"""

from collections.abc import Callable, Mapping
from itertools import chain
from math import prod

import msgspec
import onnx

from edgekit.errors import UsageError
from edgekit.graph.constants import ML_DOMAIN
from edgekit.graph.graph import Graph, Node, Value, infer_graph
from edgekit.graph.inference import find_empty_window
from edgekit.model.model import read_inputs
from edgekit.prepare.shapes import fix_dims, formula_names

# All other types count as one byte: 8-bit types, bool, and strings, whose length is unknown.
_BITS = {
    "float64": 64, "int64": 64, "uint64": 64, "float32": 32, "int32": 32, "uint32": 32, "float16": 16, "bfloat16": 16,
    "int16": 16, "uint16": 16, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2,
}  # fmt: skip


def count_macs(graph: Graph, node: Node) -> int:
    """Returns the multiply-accumulates of a node in one inference; 0 for operators without a counter.

    Unknown dimensions count as 1.
    """
    counter = _COUNTERS.get(node.op_type)
    return counter(graph, node) if counter else 0


def count_work(graph: Graph, node: Node) -> int:
    """Returns the multiply-accumulates of a node as `count_macs`, and of ONNX-ML's nodes those that replace them.

    A row is multiplied by all coefficients of a linear model, or by the vectors of a support vector machine. Trees are
    one for each row: how many comparisons they make is in lists that a check does not load (`LISTS_OF_TREES`).
    """
    if node.domain != ML_DOMAIN or not node.op_type.startswith(("Linear", "SVM", "TreeEnsemble")):
        return count_macs(graph, node)
    rows = _dims(graph, node, 0)
    parts = (node.attributes.get(name, ()) for name in ("support_vectors", "coefficients"))
    return (rows[0] if len(rows) > 1 else 1) * max(1, *map(len, parts))


def count_bytes(graph: Graph, node: Node) -> int:
    """Returns the bytes of the computed values that a node reads and writes, without weights."""
    names = dict.fromkeys(name for name in (*node.input, *node.output) if name and name not in graph.constants)
    return sum(value_bytes(graph.value(name)) for name in names)


def value_bytes(value: Value) -> int:
    """Returns the size of a value in bytes; elements of unknown type count as one byte."""
    return (value.elements * _BITS.get(value.dtype or "", 8) + 7) // 8


def _dims(graph: Graph, node: Node, position: int) -> tuple[int, ...]:
    shape = graph.value(node.input[position]).sizes if node.has_input(position) else None
    return tuple(1 if dim is None else dim for dim in shape or ())


def _count_outputs(graph: Graph, node: Node) -> int:
    """Returns the number of elements of a node's first output."""
    return graph.value(node.output[0]).elements if node.output else 0


def _conv(weight: int) -> Callable[[Graph, Node], int]:
    # A weight is [M, C/group, kernel...]: each output element is a sum over all axes but the first, so groups are
    # already accounted for.
    return lambda graph, node: _count_outputs(graph, node) * prod(_dims(graph, node, weight)[1:])


def _matmul(graph: Graph, node: Node) -> int:
    # Each element of [..., M, N] is a sum over the K of [..., M, K].
    return _count_outputs(graph, node) * (_dims(graph, node, 0) or (1,))[-1]


def _gemm(graph: Graph, node: Node) -> int:
    # The sum goes over the columns of A, or over its rows where A is transposed.
    one = _dims(graph, node, 0)
    return _count_outputs(graph, node) * (one[0 if node.integer("transA", 0) else -1] if one else 1)


def _recurrent(graph: Graph, node: Node) -> int:
    data = _dims(graph, node, 0)
    # For each step and each row of [steps, rows, input], W and R of all gates and directions are multiplied once.
    return prod(data[:2]) * (prod(_dims(graph, node, 1)) + prod(_dims(graph, node, 2)))


def _nbits(graph: Graph, node: Node) -> int:
    # B is packed into blocks of bits, so K comes from the attribute and not from its shape (com.microsoft.MatMulNBits).
    return _count_outputs(graph, node) * node.integer("K", 1)


def _einsum(graph: Graph, node: Node) -> int:
    terms = str(node.attributes.get("equation", "")).replace(" ", "").split("->")[0].split(",")
    sizes = dict(chain.from_iterable(zip(term, _dims(graph, node, at), strict=False) for at, term in enumerate(terms)))
    # Each letter is a loop; with one operand nothing is multiplied.
    return prod(sizes.values()) if len(terms) > 1 else 0


def _attention(graph: Graph, node: Node) -> int:
    query, key = _dims(graph, node, 0), _dims(graph, node, 1)
    # Two products, query @ key and weights @ value, each of [S, L, D] per head.
    return 2 * prod(query) * (key[-2] if len(key) >= 2 else 1)


def _grouped_attention(graph: Graph, node: Node) -> int:
    # The output is [B, S, heads * D]; keys and values are those of the cache plus the new ones
    # (com.microsoft.GroupQueryAttention).
    past, new = _dims(graph, node, 3), _dims(graph, node, 0)
    return 2 * _count_outputs(graph, node) * ((past[2] if len(past) == 4 else 0) + (new[1] if len(new) == 3 else 1))


def _packed_attention(graph: Graph, node: Node) -> int:
    if not node.domain:
        return _attention(graph, node)
    # One product with [width, 3 * size] makes queries, keys and values (com.microsoft.Attention).
    rows, made = prod(_dims(graph, node, 0)), _count_outputs(graph, node)
    length = (_dims(graph, node, 0) or (1, 1))[-2]
    return rows * (_dims(graph, node, 1) or (1,))[-1] + 2 * made * length


# How the work of each operator that multiplies is counted.
_COUNTERS: Mapping[str, Callable[[Graph, Node], int]] = {
    **dict.fromkeys(("Conv", "FusedConv", "ConvInteger"), _conv(1)),
    "QLinearConv": _conv(3),
    # The reverse of Conv: a weight is [C, M/group, kernel...], and each input element contributes to all axes but the
    # first.
    "ConvTranspose": lambda graph, node: prod(_dims(graph, node, 0)) * prod(_dims(graph, node, 1)[1:]),
    **dict.fromkeys(("MatMul", "FusedMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QLinearMatMul"), _matmul),
    "DynamicQuantizeMatMul": _matmul, "MatMulNBits": _nbits, "Einsum": _einsum,
    **dict.fromkeys(("Gemm", "FusedGemm", "QGemm"), _gemm),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _recurrent),
    **dict.fromkeys(("Attention", "QAttention"), _packed_attention),
    "GroupQueryAttention": _grouped_attention, "MultiHeadAttention": _attention,
}  # fmt: skip


# The assumed sizes: one sample; an image side that can be halved five times and more; the length of a text.
_SAMPLES, _SIDE, _LENGTH = 1, 224, 128
_PICTURE_RANK, _STATE_RANK = 4, 3


def choose_sizes(graph: Graph) -> dict[str, int]:
    """Returns an assumed size for each open dimension of the inputs, by its name or as `INPUT:AXIS`.

    It is the size that a weight demands, if one does; else 1 for the batch, also in the state [layers, batch, width] of
    a recurrent network, 224 for the sides of images, and 128 for every other length, which a first dimension is too if
    windows slide along it. For a dimension that is a formula, the names in it get a size.
    """
    sizes: dict[str, int] = {}
    # Dimensions that are a single name come before names that occur in formulas only.
    for is_formula in (False, True):
        for spec in read_inputs(graph.proto):
            axes, rank = spec.name_axes(), len(spec.shape or ())
            side = _SIDE if rank >= _PICTURE_RANK and len(axes.keys() - {0}) > 1 else _LENGTH
            # [1, length, width] is one sample of a sequence.
            batch = 1 if rank == _STATE_RANK and [*axes] == [1] and (spec.shape or (1,))[0] != 1 else 0
            for axis, text in axes.items():
                names = formula_names(text)
                for name in (sorted(names) or [text]) if bool(names) == is_formula else ():
                    sizes.setdefault(name, _SAMPLES if axis == batch and rank > 1 else side)
    demanded = _find_demanded(graph) if sizes else {}
    sizes = {name: demanded.get(name, size) for name, size in sizes.items()}
    if _SAMPLES in sizes.values() and not _fits(graph, sizes):
        # A first dimension that windows slide along is no batch.
        longer = {name: _LENGTH if size == _SAMPLES else size for name, size in sizes.items()}
        return longer if _fits(graph, longer) else sizes
    return sizes


def _fits(graph: Graph, sizes: Mapping[str, int]) -> bool:
    """Returns False if a window is larger than its input at these sizes; a formula without a value says nothing."""
    sized = _copy_sized(graph, sizes)
    return sized is None or find_empty_window(sized) is None


def _copy_sized(graph: Graph, sizes: Mapping[str, int]) -> onnx.ModelProto | None:
    """Returns a copy of the model at these sizes, None if a formula of dimensions has no value then."""
    sized = onnx.ModelProto()
    sized.CopyFrom(graph.model)
    try:
        fix_dims(sized.graph, sizes, may_stay_open=True)
    except UsageError:
        return None
    return sized


def _find_demanded(graph: Graph) -> dict[str, int]:
    """Returns the sizes that weights demand of dimensions, by name: MatMul of [n, width] by [80, 75] needs width=80."""
    names = {
        value.name: [dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.proto.value_info, *graph.proto.input)
    }
    demanded: dict[str, int] = {}
    for node in graph.nodes:
        shapes = [graph.value(name).shape if name else None for name in node.input]
        if len(shapes) < 2 or (weight := shapes[1]) is None:
            continue
        # The input, the axis, and the size that it must have there.
        wanted: list[tuple[int, int, int | None]] = []
        match node.op_type, len(weight):
            case "MatMul", 2:
                wanted = [(0, -1, weight[0])]
            case "Gemm", 2:
                wanted = [(0, 0 if node.integer("transA", 0) else 1, weight[1 if node.integer("transB", 0) else 0])]
            case "Conv", rank if rank > 1:
                wanted = [(0, 1, weight[1] and weight[1] * node.integer("group", 1))]
            case (("ConvTranspose" | "BatchNormalization" | "InstanceNormalization"), rank) if rank:
                wanted = [(0, 1, weight[0])]
            case (("LSTM" | "GRU" | "RNN"), 3):
                wanted = [(0, 2, weight[2])]
            case (("LayerNormalization" | "Add" | "Sub" | "Mul" | "Div" | "PRelu"), _):
                # Only a constant says what is not broadcast: a computed tensor may depend on the open dimension.
                wanted = [
                    (1 - at, axis - len(shape), size)
                    for at, shape in enumerate(shapes[:2])
                    if shape and node.input[at] in graph.constants
                    for axis, size in enumerate(shape)
                ]
            case _:
                pass
        for position, axis, size in wanted:
            dims = names.get(node.given(position), [])
            # An entry of size 1 is broadcast.
            if size is not None and size > 1 and -len(dims) <= axis < len(dims) and dims[axis]:
                demanded.setdefault(dims[axis], size)
    return demanded


def assume_sizes(graph: Graph, sizes: Mapping[str, int] | None = None) -> Graph:
    """Returns the graph with `Value.counted` set to the shapes at assumed `sizes`, those of `choose_sizes` by default.

    The same graph is returned if no input has an open dimension, or if a formula of dimensions has no value then.
    """
    # Choosing sizes may take an inference, so it comes last.
    if any(value.counted for value in graph.values.values()):
        return graph
    sizes = choose_sizes(graph) if sizes is None else sizes
    if not sizes or (sized := _copy_sized(graph, sizes)) is None:
        return graph
    known = infer_graph(sized).values
    values = {
        name: msgspec.structs.replace(value, counted=known[name].shape) if name in known else value
        for name, value in graph.values.items()
    }
    return msgspec.structs.replace(graph, values=values)


def count_unsized(graph: Graph) -> int:
    """Returns how many nodes that multiply read or make a tensor of unknown size, subgraphs included."""
    count = 0
    for each in graph.iterate():
        for node in each.nodes:
            names = (*node.input[:2], *node.output[:1]) if node.op_type in _COUNTERS else ()
            shapes = (each.value(name).sizes for name in names if name)
            count += any(shape is None or None in shape for shape in shapes)
    return count
