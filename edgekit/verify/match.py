"""Which tensor of one model is which of another: by name, and through the Q and DQ nodes of a quantizer."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import onnx

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_CONSTANT_OPS = frozenset({"Constant", "ConstantOfShape", "Shape"})


class MatchedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that both models compute.

    `in_a` and `in_b` name what the nodes after it read: the value behind Q and DQ, where there are such. `twins_in_b`
    are all tensors of the second model that hold this value. `layer` and `op` are those of the node that computes it
    in the second model.
    """

    tensor: str
    layer: str
    op: str
    in_a: str
    in_b: str
    twins_in_b: frozenset[str]


def match_tensors(a: onnx.GraphProto, b: onnx.GraphProto) -> tuple[MatchedTensor, ...]:
    """Returns the tensors of both graphs that bear one name, inputs included, in the order of computation of `a`.

    ONNX Runtime's quantizer keeps the names of activations, gives a Conv whose Relu or Clip it folds the name of that
    node's output, and reads what it quantized through Q and DQ (`onnxruntime.quantization.qdq_quantizer`).
    """
    reads_a, reads_b = _find_readers(a), _find_readers(b)
    producers_b = {name: node for node in b.node for name in node.output}
    known_b = producers_b.keys() | {value.name for value in b.input}
    matched: list[MatchedTensor] = []
    for name in _ordered_tensors(a):
        if name not in known_b:
            continue
        behind_a, behind_b = _look_behind(name, reads_a), _look_behind(name, reads_b)
        node = producers_b.get(name)
        if node is None and behind_b == (name,):
            continue
        matched.append(
            MatchedTensor(
                tensor=name,
                layer=_name_layer(name, node, producers_b),
                op="Input" if node is None else _real_node(node, producers_b).op_type,
                in_a=behind_a[0],
                in_b=behind_b[0],
                twins_in_b=frozenset(behind_b),
            )
        )
    return tuple(matched)


def order_nodes(graph: onnx.GraphProto) -> tuple[onnx.NodeProto, ...]:
    """Returns the nodes so that each comes after those it reads from; a quantizer appends its nodes out of order."""
    producers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    done: set[int] = set()
    ordered: list[onnx.NodeProto] = []
    for start in range(len(graph.node)):
        stack = [start]
        while stack:
            index = stack[-1]
            waiting = [
                producers[name]
                for name in graph.node[index].input
                if name in producers and producers[name] not in done and producers[name] != index
            ]
            if waiting and index not in done:
                stack.extend(waiting)
                continue
            stack.pop()
            if index not in done:
                done.add(index)
                ordered.append(graph.node[index])
    return tuple(ordered)


def _ordered_tensors(graph: onnx.GraphProto) -> Iterable[str]:
    constants = {tensor.name for tensor in graph.initializer}
    yield from (value.name for value in graph.input if value.name not in constants)
    for node in order_nodes(graph):
        if node.op_type not in _CONSTANT_OPS:
            yield from (name for name in node.output if name)


def _find_readers(graph: onnx.GraphProto) -> Mapping[str, Sequence[onnx.NodeProto]]:
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input[:1]:
            readers.setdefault(name, []).append(node)
    return readers


def _look_behind(name: str, readers: Mapping[str, Sequence[onnx.NodeProto]]) -> tuple[str, ...]:
    """Returns the outputs of the DQ nodes behind a tensor, or the tensor itself where it is not quantized."""
    quantized = [node.output[0] for node in readers.get(name, ()) if node.op_type == _QUANTIZE]
    behind = [node.output[0] for q in quantized for node in readers.get(q, ()) if node.op_type == _DEQUANTIZE]
    return tuple(behind) or (name,)


def _real_node(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]) -> onnx.NodeProto:
    """Returns the node that computes a value, looking back through DQ and Q."""
    while node.op_type in {_QUANTIZE, _DEQUANTIZE} and node.input[0] in producers:
        node = producers[node.input[0]]
    return node


def _name_layer(tensor: str, node: onnx.NodeProto | None, producers: Mapping[str, onnx.NodeProto]) -> str:
    return tensor if node is None else _real_node(node, producers).name or tensor
