"""What lies between a layer's result and the values it is given: in which arithmetic, and how often it is rounded."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
from onnx import TensorProto

from edgekit.graph.graph import Graph, Node
from edgekit.verify.matching.match import MatchedTensor
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE

Arithmetic = Literal["float", "half", "int8", "int4"]
"""The coarsest numbers that a result is computed with: float32 and wider, 16 bits, 8 bits, fewer."""

ROUNDING: Mapping[Arithmetic, float] = {"float": 2.0**-20, "half": 2.0**-8, "int8": 0.0, "int4": 0.0}
"""What a value of one that is read may cost a result, generously: where large values cancel, rounding is no fault.

Float32 has 24 bits and half precision 11 (IEEE 754): four and three bits are granted for sums over many terms. Integers
have a grid, whose step is granted instead.
"""
# From fine to coarse: the coarser of two models decides what rounding may cost.
_ORDER: Sequence[Arithmetic] = ("float", "half", "int8", "int4")
_INTEGER_OPS = ("QLinear", "ConvInteger", "MatMulInteger", "DynamicQuantize", "QGemm", "QAttention", "QOrdered")
_INTEGERS_ONLY = ("QLinear", "QGemm", "QAttention", "QOrdered")
_HALF = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
_FOUR_BITS = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2})
# Large constants of float layers may be stored as bytes, with a Cast and a factor behind them.
_BYTES = frozenset({TensorProto.INT8, TensorProto.UINT8})
# Operators that a small change can make jump, or that draw.
_JUMPING = frozenset({
    "ArgMax", "ArgMin", "Ceil", "Equal", "Floor", "GatherND", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Mod",
    "NonMaxSuppression", "NonZero", "OneHot", "Round", "ScatterND", "Sign", "TopK", "Unique", "Where", "RandomNormal",
    "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial",
})  # fmt: skip


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that compute a tensor from tensors that are given.

    `reads` are those tensors, by their name in the first model. `roundings` counts the Q nodes before the tensor's own,
    `results` names what the nodes compute. `jumps` tells of an operator whose result is no smooth function of its
    inputs, or that computes on integers only, so that what lies between two of them cannot be given; one that reads
    nothing but the model's own inputs is the same in both.
    """

    arithmetic: Arithmetic = "float"
    reads: tuple[str, ...] = ()
    roundings: int = 0
    jumps: bool = False
    results: tuple[str, ...] = ()


def find_regions(a: Graph, b: Graph, matched: Sequence[MatchedTensor]) -> dict[str, Region]:
    """Returns the region of each matched tensor, by its name in `a`: that of `b`, in the coarser arithmetic of both."""
    ends_a = {item.tensor: (item.in_a,) for item in matched}
    ends_b = {item.tensor: tuple(sorted(item.copies_in_b)) for item in matched}
    first, second = _walk_all(a, ends_a), _walk_all(b, ends_b)
    return {
        name: msgspec.structs.replace(
            region,
            arithmetic=max(region.arithmetic, first[name].arithmetic, key=_ORDER.index),
            jumps=region.jumps or first[name].jumps,
        )
        for name, region in second.items()
    }


def _walk_all(graph: Graph, ends: Mapping[str, tuple[str, ...]]) -> dict[str, Region]:
    types = {name: tensor.data_type for name, tensor in graph.constants.items()}
    given = {name: key for key, names in ends.items() for name in names}
    is_half = _uses_half(graph, types.values())
    return {key: _walk(names, graph.producers, given, types, is_half=is_half) for key, names in ends.items()}


def _walk(
    names: Sequence[str],
    producers: Mapping[str, Node],
    given: Mapping[str, str],
    types: Mapping[str, int],
    *,
    is_half: bool,
) -> Region:
    nodes: dict[str, Node] = {}
    reads, constants = dict[str, None](), set[str]()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        node = producers.get(name)
        if name in given and name not in names:
            reads[given[name]] = None
        elif node is None:
            constants.add(name)
        elif node.output[0] not in nodes:
            nodes[node.output[0]] = node
            waiting.extend(source for source in node.input if source)
    ops = [node.op_type for node in nodes.values()]
    moved = [
        node.op_type
        for node in nodes.values()
        if not any(node.input) or any(source in given or source in nodes for source in node.input)
    ]
    own = {producers[name].input[0] for name in names if name in producers and producers[name].op_type == DEQUANTIZE}
    return Region(
        arithmetic=_name_arithmetic(ops, {types.get(name, 0) for name in constants}, is_half=is_half),
        reads=tuple(reads),
        roundings=sum(
            node.op_type.startswith("DynamicQuantize") or (node.op_type == QUANTIZE and node.output[0] not in own)
            for node in nodes.values()
        ),
        jumps=not _JUMPING.isdisjoint(moved) or any(_reads_integers(node, producers) for node in nodes.values()),
        results=tuple(nodes),
    )


def _reads_integers(node: Node, producers: Mapping[str, Node]) -> bool:
    """Returns True for an operator on integers, and for a DQ node behind one that is no Q node."""
    before = producers.get(node.input[0]) if node.op_type == DEQUANTIZE else None
    return node.op_type.startswith(_INTEGERS_ONLY) or (before is not None and before.op_type != QUANTIZE)


def _name_arithmetic(ops: Sequence[str], types: set[int], *, is_half: bool) -> Arithmetic:
    if "MatMulNBits" in ops or not types.isdisjoint(_FOUR_BITS):
        return "int4"
    if DEQUANTIZE in ops or any(op.startswith(_INTEGER_OPS) for op in ops) or not types.isdisjoint(_BYTES):
        return "int8"
    return "half" if is_half else "float"


def _uses_half(graph: Graph, types: Iterable[int]) -> bool:
    if not _HALF.isdisjoint(types) or any(graph.values[name].dtype in {"float16", "bfloat16"} for name in graph.inputs):
        return True
    return any(node.integer("to", 0) in _HALF for node in graph.nodes if node.op_type == "Cast")
