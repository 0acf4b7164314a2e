"""Which tensor of one model is which of another: by name, and through the Q and DQ nodes of a quantizer."""

from collections.abc import Iterable, Sequence

import msgspec

from edgekit.graph.graph import Graph, Node
from edgekit.model.scaling import SUFFIX
from edgekit.verify.matching.align import align_tensors
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE, sort_nodes

# Names are believed where they match at least so many of the operators that their order matches.
#
# A quantizer keeps the names of all but a few; another exporter shares names such as `output` by accident.
_NAMES_COUNT = 0.8
_CONSTANT_OPS = frozenset({"Constant", "ConstantOfShape", "Shape"})


class MatchedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that both models compute.

    `tensor` is its name in the first model and `raw_b` that in the second. `in_a` and `in_b` name what the nodes after
    it read: the value behind Q and DQ, where there are such. `copies_in_b` are all tensors of the second model that
    hold this value. `layer` and `op` are those of the node that computes it in the second model.
    """

    tensor: str
    layer: str
    op: str
    in_a: str
    raw_b: str
    in_b: str
    copies_in_b: frozenset[str]


def match_tensors(a: Graph, b: Graph) -> tuple[MatchedTensor, ...]:
    """Returns the tensors that both graphs compute, inputs included, in the order of computation of `a`.

    They are matched by name: ONNX Runtime's quantizer keeps the names of activations, gives a Conv whose Relu or Clip
    it folds the name of that node's output, and reads what it quantized through Q and DQ
    (`onnxruntime.quantization.qdq_quantizer`); edgekit adds a word to the names of tensors that it scales. Where the
    order of the operators matches more of them than the names do, as after another export, the order counts.
    """
    made = b.producers
    scaled = {name: name + SUFFIX for name in ordered_tensors(a) if name not in made and name + SUFFIX in made}
    named = _match_pairs(a, b, [(name, scaled.get(name, name)) for name in ordered_tensors(a)])
    aligned = _match_pairs(a, b, align_tensors(a, b))
    return named if _count_alike(a, b, named) >= _NAMES_COUNT * _count_alike(a, b, aligned) else aligned


def _match_pairs(a: Graph, b: Graph, pairs: Iterable[tuple[str, str]]) -> tuple[MatchedTensor, ...]:
    known_b = b.producers.keys() | set(b.inputs)
    rounds_a, rounds_b = _find_rounding(a), _find_rounding(b) - b.outputs
    matched: list[MatchedTensor] = []
    seen: set[str] = set()
    for name, raw in pairs:
        if raw not in known_b or (name in rounds_a and raw in rounds_b):
            continue
        behind_a, behind_b = _look_behind(name, a), _look_behind(raw, b)
        node = b.producers.get(raw)
        if (node is None and behind_b == (raw,)) or behind_b[0] in seen:
            continue
        seen.add(behind_b[0])
        matched.append(
            MatchedTensor(
                tensor=name,
                layer=_name_layer(raw, node, b),
                op="Input" if node is None else _real_node(node, b).op_type,
                in_a=behind_a[0],
                raw_b=raw,
                in_b=behind_b[0],
                copies_in_b=frozenset(behind_b),
            )
        )
    return tuple(matched)


def _find_rounding(graph: Graph) -> frozenset[str]:
    """Returns what Q and DQ nodes give: it belongs to what they round, a weight to the node that reads it."""
    return frozenset(name for node in graph.nodes if node.op_type in {QUANTIZE, DEQUANTIZE} for name in node.output)


def _count_alike(a: Graph, b: Graph, matched: Sequence[MatchedTensor]) -> int:
    """Returns how many of the matched tensors come from the same operator in both graphs."""
    return sum(
        item.tensor in a.producers and _real_node(a.producers[item.tensor], a).op_type == item.op
        for item in matched
        if item.raw_b in b.producers
    )


def ordered_tensors(graph: Graph) -> Iterable[str]:
    """Yields the inputs and what the nodes compute, in the order of computation."""
    yield from graph.fed
    for node in sort_nodes(graph):
        if node.op_type not in _CONSTANT_OPS:
            yield from (name for name in node.output if name)


def _look_behind(name: str, graph: Graph) -> tuple[str, ...]:
    """Returns the outputs of the DQ nodes behind a tensor, or the tensor itself where it is not quantized."""
    quantized = [node.output[0] for node in _find_readers(name, graph) if node.op_type == QUANTIZE]
    behind = [node.output[0] for q in quantized for node in _find_readers(q, graph) if node.op_type == DEQUANTIZE]
    return tuple(behind) or (name,)


def _find_readers(name: str, graph: Graph) -> list[Node]:
    """Returns the nodes whose first input a tensor is: that of Q and DQ nodes is what they round."""
    return [node for node in graph.readers(name) if node.input[0] == name]


def _real_node(node: Node, graph: Graph) -> Node:
    """Returns the node that computes a value, looking back through DQ, Q and casts."""
    while node.op_type in {QUANTIZE, DEQUANTIZE, "Cast"} and node.input[0] in graph.producers:
        node = graph.producers[node.input[0]]
    return node


def _name_layer(tensor: str, node: Node | None, graph: Graph) -> str:
    return tensor if node is None else _real_node(node, graph).name or tensor
