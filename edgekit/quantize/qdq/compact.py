"""What a QDQ model can do without: long names for what only quantizers read, what is said twice, what goes unsaid."""

import string
from collections.abc import Iterator, Mapping
from itertools import count

import onnx
from onnx import defs, helper

from edgekit.model.model import drop_unread, iterate_graphs, list_names, read_contents

_QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_LETTERS = string.ascii_letters
_DIGITS = _LETTERS + string.digits
# What a Conv does where an attribute is absent (ONNX operator Conv), which its schema says in words only.
_CONV_DEFAULTS: Mapping[str, int] = {"dilations": 1, "strides": 1, "pads": 0}


def compact_qdq(proto: onnx.ModelProto) -> None:
    """Shortens a QDQ model in place; every activation and every node of the user's keeps its name.

    New names are given to the outputs of Q and DQ nodes, to these nodes themselves, and to the constants that only
    they read. Activations share equal scales and zero points, biases of one length their zero point. Types of
    intermediate tensors follow from the graph, and attributes that say what holds without them are left out. On a
    MobileNetV2 this is a twelfth of the file.
    """
    graph = proto.graph
    del graph.value_info[:]
    _drop_defaults(proto)
    _share_constants(graph)
    tensors, nodes = _short_names(graph), _free_names({node.name for node in graph.node})
    for node in graph.node:
        if node.op_type in _QUANTIZERS:
            node.name = next(nodes)
        for field in (node.input, node.output):
            for index, name in enumerate(field):
                field[index] = tensors.get(name, name)
    for tensor in graph.initializer:
        tensor.name = tensors.get(tensor.name, tensor.name)


def _drop_defaults(proto: onnx.ModelProto) -> None:
    opsets = {entry.domain: entry.version for entry in proto.opset_import}
    version = opsets.get("", opsets.get("ai.onnx", 1))
    for node in proto.graph.node:
        node.ClearField("doc_string")
        if node.domain in {"", "ai.onnx"} and defs.has(node.op_type):
            schema = defs.get_schema(node.op_type, version)
            kept = [item for item in node.attribute if not _is_default(node.op_type, item, schema)]
            del node.attribute[:]
            node.attribute.extend(kept)


def _is_default(op: str, attribute: onnx.AttributeProto, schema: defs.OpSchema) -> bool:
    if op == "Conv" and attribute.name in _CONV_DEFAULTS:
        return set(attribute.ints) == {_CONV_DEFAULTS[attribute.name]}
    known = schema.attributes.get(attribute.name)
    if known is None or not known.default_value.name or attribute.type != known.default_value.type:
        return False
    return bool(helper.get_attribute_value(attribute) == helper.get_attribute_value(known.default_value))


def _share_constants(graph: onnx.GraphProto) -> None:
    stored = {tensor.name: tensor for tensor in graph.initializer}
    kept: dict[tuple[int, bytes], str] = {}
    for node in graph.node:
        if node.op_type not in _QUANTIZERS:
            continue
        # int32, biases, has no zero point but 0 (ONNX operator DequantizeLinear), so one serves all of a length. int8,
        # weights, shares none: with `session.x64quantprecision` ONNX Runtime 1.31 makes both uint8
        # (avx2_weight_s8_to_u8.cc) and cannot load a model where weights share a zero point. Nor may one be left out:
        # what ONNX Runtime then saves in runtime style it cannot load, or computes wrongly.
        first = 1
        if node.input[0] in stored:
            first = 2 if stored[node.input[0]].data_type == onnx.TensorProto.INT32 else len(node.input)
        for place in range(first, len(node.input)):
            constant = stored.get(node.input[place])
            if constant is not None:
                node.input[place] = kept.setdefault((place, read_contents(constant)), constant.name)
    drop_unread(graph)
    zeros = {node.input[2] for node in graph.node if node.op_type in _QUANTIZERS and len(node.input) > 2}
    for tensor in graph.initializer:
        if tensor.name in zeros and tensor.data_type == onnx.TensorProto.INT32 and not any(tensor.raw_data):
            # As a protobuf's varints zeros have a byte each, in raw_data four.
            size = len(tensor.raw_data) // 4
            tensor.ClearField("raw_data")
            tensor.int32_data.extend([0] * size)


def _short_names(graph: onnx.GraphProto) -> Mapping[str, str]:
    """Returns new names of the tensors that quantizers make and of the constants that only they read."""
    quantizers = [node for node in graph.node if node.op_type in _QUANTIZERS]
    others = [node for node in graph.node if node.op_type not in _QUANTIZERS]
    kept = {name for node in others for name in node.output}
    kept |= {value.name for value in (*graph.input, *graph.output)}
    kept |= {name for part in iterate_graphs(graph) if part is not graph for name in list_names(part)}
    made = {name for node in quantizers for name in node.output} - kept
    read = {name for node in others for name in node.input}
    constants = [tensor.name for tensor in graph.initializer if tensor.name not in kept | read]
    return dict(zip((*constants, *sorted(made)), _free_names(list_names(graph)), strict=False))


def _free_names(taken: set[str]) -> Iterator[str]:
    """Yields names of a letter and as few letters and digits as there are, but for those taken."""
    for number in count():
        rest, name = number // len(_LETTERS), _LETTERS[number % len(_LETTERS)]
        while rest:
            rest, last = divmod(rest - 1, len(_DIGITS))
            name += _DIGITS[last]
        if name not in taken:
            yield name
