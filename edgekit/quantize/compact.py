"""What a QDQ model can do without: long names for what only quantizers read, and copies of zero points."""

from collections.abc import Mapping

import onnx

from edgekit.model import drop_unread, iterate_captured, iterate_reads

_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})


def compact_qdq(proto: onnx.ModelProto) -> None:
    """Shortens a QDQ model in place; every activation and every node of the user's keeps its name.

    New names are given to the outputs of Q and DQ nodes, to these nodes themselves, and to the constants that only
    they read. Biases of one length share their zero point: int32 has none but 0 (ONNX operator DequantizeLinear). To
    leave it out is allowed, but ONNX Runtime 1.31 then cannot load what it saves in runtime style. Types of
    intermediate tensors follow from the graph. On a MobileNetV2 this is a twelfth of the file.
    """
    graph = proto.graph
    del graph.value_info[:]
    _share_bias_zeros(graph)
    names = _short_names(graph)
    for node in graph.node:
        for field in (node.input, node.output):
            for index, name in enumerate(field):
                field[index] = names.get(name, name)
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)


def _share_bias_zeros(graph: onnx.GraphProto) -> None:
    stored = {tensor.name: tensor for tensor in graph.initializer}
    kept: dict[tuple[int, ...], str] = {}
    for node in graph.node:
        zero = stored.get(node.input[2]) if node.op_type == "DequantizeLinear" and len(node.input) == 3 else None
        if zero is not None and zero.data_type == onnx.TensorProto.INT32:
            node.input[2] = kept.setdefault(tuple(zero.dims), zero.name)
    drop_unread(graph)


def _short_names(graph: onnx.GraphProto) -> Mapping[str, str]:
    quantizers = [node for node in graph.node if node.op_type in _QUANTIZERS]
    others = {
        name for node in graph.node if node.op_type not in _QUANTIZERS for name in (node.name, *iterate_reads(node))
    }
    fixed = {value.name for value in (*graph.input, *graph.output)}
    made = {name for node in quantizers for name in node.output}
    taken = fixed | others | {name for node in graph.node for name in (*node.input, *node.output)}
    fresh = (name for number in range(len(taken) + 4 * len(quantizers) + 1) if (name := f"q{number}") not in taken)
    constants = [tensor.name for tensor in graph.initializer if tensor.name not in others]
    captured = {name for node in graph.node for name in iterate_captured(node)}
    names = {name: next(fresh) for name in (*constants, *sorted(made)) if name not in fixed | captured}
    for node in quantizers:
        node.name = next(fresh)
    return names
