"""Damages the content of ONNX models: the protobuf stays well-formed, but its statements become wrong."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import onnx
from google.protobuf.message import DecodeError, Message
from nasty import damage_bytes, draw_integer, draw_text
from onnx import TensorProto, helper

Mutation = Callable[[Random, onnx.ModelProto], None]

_MOST_NODES = 3000
_MOST_BYTES = 1 << 18


def mutate_model(rng: Random, data: bytes) -> bytes:
    """Returns a model with one to four mutations; in one of six cases its bytes are damaged like those of any file."""
    if rng.random() < 0.15:
        return damage_bytes(rng, data)
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        return damage_bytes(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        # Each mutation walks through the whole model.
        if proto.ByteSize() > _MOST_BYTES:
            break
        try:
            rng.choice(_MUTATIONS)(rng, proto)
        # If a mutation finds nothing to change, or the field does not take the value, the model stays as it is.
        except (IndexError, ValueError, TypeError, KeyError):
            continue
    return proto.SerializeToString()


def _messages(message: Message) -> Iterator[Message]:
    waiting = [message]
    while waiting:
        message = waiting.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting.extend(value if _is_repeated(field) else (value,))


def _is_repeated(field: Any) -> bool:
    repeated = getattr(field, "is_repeated", None)
    return bool(field.label == field.LABEL_REPEATED) if repeated is None else bool(repeated)


def _draw_value(rng: Random, field: Any, old: Any) -> Any:
    if field.type in {field.TYPE_FLOAT, field.TYPE_DOUBLE}:
        return rng.choice((0.0, -1.0, 1e30, float("inf"), float("nan")))
    if field.type == field.TYPE_STRING:
        return draw_text(rng)
    if field.type == field.TYPE_BYTES:
        return rng.choice((b"", old[: len(old) // 2], old * 2, b"\xff\xfe", draw_text(rng).encode()))
    if field.type == field.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    return draw_integer(rng, near=int(old))


def _change_any_field(rng: Random, proto: onnx.ModelProto) -> None:
    """Clears, duplicates, removes or replaces a field of any message."""
    message = rng.choice(list(_messages(proto)))
    field, value = rng.choice(message.ListFields())
    kind = rng.randrange(4)
    if kind == 0:
        message.ClearField(field.name)
    elif _is_repeated(field):
        at = rng.randrange(len(value))
        if kind == 1:
            del value[at]
        elif field.message_type is not None:
            value.add().CopyFrom(value[at])
        elif kind == 2:
            value.append(value[at])
        else:
            value[at] = _draw_value(rng, field, value[at])
    elif field.message_type is None:
        setattr(message, field.name, _draw_value(rng, field, value))


def _set_any_field(rng: Random, proto: onnx.ModelProto) -> None:
    """Sets a scalar field that some message does not have yet."""
    message = rng.choice(list(_messages(proto)))
    field = rng.choice([f for f in message.DESCRIPTOR.fields if f.message_type is None])
    value = _draw_value(rng, field, b"" if field.type == field.TYPE_BYTES else 0)
    if _is_repeated(field):
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def _nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [message for message in _messages(proto) if isinstance(message, onnx.NodeProto)]


def _tensors(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    return [message for message in _messages(proto) if isinstance(message, onnx.TensorProto)]


def _names(proto: onnx.ModelProto) -> list[str]:
    names = [name for node in _nodes(proto) for name in (*node.input, *node.output)]
    names += [value.name for value in (*proto.graph.input, *proto.graph.output)]
    return names + [tensor.name for tensor in proto.graph.initializer]


def _rewire(rng: Random, proto: onnx.ModelProto) -> None:
    """Lets a node read or write a tensor of another node, or its own: duplicate names, cycles, self-references."""
    node = rng.choice(_nodes(proto))
    side = rng.choice((node.input, node.output))
    side[rng.randrange(len(side))] = rng.choice([*_names(proto), "", "nowhere"])


def _change_tensor_type(rng: Random, proto: onnx.ModelProto) -> None:
    rng.choice(_tensors(proto)).data_type = rng.choice((*range(26), 99, -1))


def _change_dims(rng: Random, proto: onnx.ModelProto) -> None:
    tensor = rng.choice(_tensors(proto))
    kind = rng.randrange(4)
    if kind == 0 or not tensor.dims:
        tensor.dims.append(draw_integer(rng))
    elif kind == 1:
        del tensor.dims[-1]
    else:
        at = rng.randrange(len(tensor.dims))
        tensor.dims[at] = draw_integer(rng, near=tensor.dims[at])


def _change_raw_data(rng: Random, proto: onnx.ModelProto) -> None:
    tensor = rng.choice(_tensors(proto))
    data = tensor.raw_data
    tensor.raw_data = rng.choice((b"", data[:-1], data + b"\0", data * 2, b"\xff" * len(data), b"\0" * len(data)))


def _move_data_out(rng: Random, proto: onnx.ModelProto) -> None:
    """States that the data of a tensor are in a file: this one, a missing one, one outside, a folder."""
    tensor = rng.choice(_tensors(proto))
    tensor.data_location = TensorProto.EXTERNAL
    for key in rng.sample(("location", "offset", "length", "checksum"), rng.randrange(1, 5)):
        known = ("net.onnx", "external.data", ".", "sub/x.data", draw_text(rng))
        tensor.external_data.add(key=key, value=rng.choice(known) if key == "location" else str(draw_integer(rng)))


def _change_value_shape(rng: Random, proto: onnx.ModelProto) -> None:
    values = [message for message in _messages(proto) if isinstance(message, onnx.ValueInfoProto)]
    tensor = rng.choice(values).type.tensor_type
    kind = rng.randrange(6)
    if kind == 0:
        tensor.ClearField("shape")
    elif kind == 1:
        tensor.shape.dim.add().dim_value = draw_integer(rng)
    elif kind == 2:
        del tensor.shape.dim[-1]
    elif kind == 3:
        rng.choice(tensor.shape.dim).dim_param = rng.choice(("N", "N*2", "(" * 300, "a/0", draw_text(rng)))
    elif kind == 4:
        tensor.elem_type = rng.randrange(26)
    else:
        dim = rng.choice(tensor.shape.dim)
        dim.dim_value = draw_integer(rng, near=dim.dim_value)


def _change_value_kind(rng: Random, proto: onnx.ModelProto) -> None:
    """Makes a value a sequence, an optional, a map or a sparse tensor."""
    value = rng.choice((*proto.graph.input, *proto.graph.output))
    tensor = onnx.TypeProto()
    tensor.CopyFrom(value.type)
    kind = rng.choice(("sequence_type", "optional_type", "map_type", "sparse_tensor_type", "none"))
    value.ClearField("type")
    if kind in {"sequence_type", "optional_type"}:
        getattr(value.type, kind).elem_type.CopyFrom(tensor)
    elif kind == "map_type":
        value.type.map_type.key_type = 7
        value.type.map_type.value_type.CopyFrom(tensor)
    elif kind == "sparse_tensor_type":
        value.type.sparse_tensor_type.elem_type = 1


def _change_operator(rng: Random, proto: onnx.ModelProto) -> None:
    node = rng.choice(_nodes(proto))
    others = ("Loop", "If", "Scan", "Conv", "Resize", "QuantizeLinear", "LSTM", "Reshape", "Split", "Einsum", "Gather")
    node.op_type = rng.choice((*others, "Cast", "ConstantOfShape", "Range", "Tile", "Expand", draw_text(rng)))
    if rng.random() < 0.2:
        node.domain = rng.choice(("com.microsoft", "local", "ai.onnx.ml", draw_text(rng)))


def _change_arity(rng: Random, proto: onnx.ModelProto) -> None:
    node = rng.choice(_nodes(proto))
    side = rng.choice((node.input, node.output))
    if rng.random() < 0.5:
        del side[rng.randrange(len(side)) :]
    else:
        side.extend(rng.choice(_names(proto)) for _ in range(rng.choice((1, 2, 40))))


def _change_number(rng: Random, proto: onnx.ModelProto) -> None:
    """Changes a number of an attribute slightly: axes, strides and groups that are almost right pass first checks."""
    attribute = rng.choice([attribute for node in _nodes(proto) for attribute in node.attribute])
    if attribute.ints:
        at = rng.randrange(len(attribute.ints))
        attribute.ints[at] = rng.choice((-9, -1, 0, 1, 2, 9, draw_integer(rng)))
        if rng.random() < 0.3:
            attribute.ints.append(rng.randrange(-2, 4))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = rng.choice((-9, -1, 0, 1, 2, 9, draw_integer(rng)))
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = rng.choice((b"", b"\xff", b"same_upper", b"SAME_LOWER", b"cubic", draw_text(rng).encode()))


def _insert_node(rng: Random, proto: onnx.ModelProto) -> None:
    """Puts any operator of ONNX into the graph, with as many inputs as it takes and attributes of the right types."""
    schema = rng.choice(_SCHEMAS)
    inputs = [
        rng.choice(_names(proto))
        for _ in range(rng.randint(schema.min_input, max(schema.min_input, min(schema.max_input, 5))))
    ]
    attributes = [entry for entry in schema.attributes.values() if entry.required or rng.random() < 0.3]
    made = rng.choice(_names(proto))
    node = helper.make_node(schema.name, inputs, [f"new{rng.randrange(99)}"], name=rng.choice(("", "new")))
    for _ in range(rng.randint(schema.min_output, max(schema.min_output, min(schema.max_output, 3))) - 1):
        node.output.append(f"more{rng.randrange(999)}")
    for entry in attributes:
        kind = int(entry.type.value)
        values = {1: 0.5, 2: rng.randrange(-2, 9), 3: draw_text(rng), 6: [0.5, -1.0], 7: [rng.randrange(-2, 5)] * 2}
        if kind in values:
            node.attribute.append(helper.make_attribute(entry.name, values[kind], attr_type=kind))
        elif kind in {5, 10}:
            body = onnx.GraphProto()
            body.CopyFrom(proto.graph)
            node.attribute.append(helper.make_attribute(entry.name, body))
    at = rng.randrange(len(proto.graph.node) + 1)
    proto.graph.node.insert(at, node)
    # The readers of some tensor now read the new one, or the new one is an output.
    for other in proto.graph.node[at + 1 :]:
        other.input[:] = [node.output[0] if name == made else name for name in other.input]
    if rng.random() < 0.5:
        proto.graph.output.add(name=node.output[0])


def _list_schemas() -> list[Any]:
    known = onnx.defs.get_all_schemas_with_history()
    names = sorted({schema.name for schema in known if schema.domain == "" and schema.since_version <= 17})
    return [schema for schema in (onnx.defs.get_schema(name, 17) for name in names) if not schema.deprecated]


_SCHEMAS = _list_schemas()


def _change_attribute(rng: Random, proto: onnx.ModelProto) -> None:
    node = rng.choice([node for node in _nodes(proto) if node.attribute])
    attribute = rng.choice(node.attribute)
    name = attribute.name
    value = (draw_integer(rng), [draw_integer(rng) for _ in range(rng.randrange(7))], draw_text(rng), 1e30)
    attribute.CopyFrom(helper.make_attribute(name, rng.choice(value)))


def _add_attribute(rng: Random, proto: onnx.ModelProto) -> None:
    names = ("axis", "axes", "perm", "kernel_shape", "pads", "strides", "group", "to", "equation", "body", "mode")
    value = (draw_integer(rng), [draw_integer(rng) for _ in range(1, 7)], draw_text(rng), 0.5)
    rng.choice(_nodes(proto)).attribute.append(helper.make_attribute(rng.choice(names), rng.choice(value)))


def _call_itself(rng: Random, proto: onnx.ModelProto) -> None:
    """Adds a local function that calls itself, directly or through another, and a node that calls it."""
    names = rng.choice((("F",), ("F", "G")))
    for name, called in zip(names, (*names[1:], names[0]), strict=True):
        node = helper.make_node(called, ["a"], ["b"], domain="local")
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
        proto.functions.append(helper.make_function("local", name, ["a"], ["b"], [node], opsets))
    if not any(entry.domain == "local" for entry in proto.opset_import):
        proto.opset_import.add(domain="local", version=1)
    target = rng.choice(proto.graph.node)
    proto.graph.node.add().CopyFrom(helper.make_node("F", [target.output[0]], ["called"], domain="local"))


def _nest(rng: Random, proto: onnx.ModelProto) -> None:
    """Puts the graph into nested subgraphs."""
    for _ in range(rng.choice((1, 2, 8, 25, 90))):
        # Each level doubles the size.
        if proto.ByteSize() > 1 << 17:
            return
        body = onnx.GraphProto()
        body.CopyFrom(proto.graph)
        node = helper.make_node("If", [rng.choice(_names(proto))], ["nested"], then_branch=body, else_branch=body)
        del proto.graph.node[:]
        proto.graph.node.append(node)


def _repeat_node(rng: Random, proto: onnx.ModelProto) -> None:
    """Duplicates nodes under the same name, few or many."""
    at = rng.randrange(len(proto.graph.node))
    node = proto.graph.node[at]
    for index in range(rng.choice((1, 2, 50, 50, _MOST_NODES)) if proto.ByteSize() < 1 << 17 else 1):
        added = proto.graph.node.add()
        added.CopyFrom(node)
        if rng.random() < 0.9:
            added.output[0] = f"{node.output[0]}_{index}"


def _change_versions(rng: Random, proto: onnx.ModelProto) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        proto.ir_version = rng.choice((0, 1, 3, 10, 13, 14, 2**40))
    elif kind == 1:
        rng.choice(proto.opset_import).version = rng.choice((-1, 0, 1, 6, 7, 10, 12, 13, 21, 26, 27, 2**31))
    elif kind == 2:
        proto.opset_import.add(domain=draw_text(rng), version=rng.choice((0, 1, 2**31)))
    else:
        proto.opset_import.add(version=rng.choice((1, 11, 17)))


def _make_output(rng: Random, proto: onnx.ModelProto) -> None:
    """Makes an input, a constant, a duplicate or a missing tensor an output of the graph."""
    kind = rng.randrange(3)
    if kind == 0:
        rng.choice(proto.graph.output).name = rng.choice(_names(proto))
    elif kind == 1:
        proto.graph.output.add().name = rng.choice(_names(proto))
    else:
        proto.graph.input.add().CopyFrom(rng.choice((*proto.graph.output, *proto.graph.input)))


def _fill_weights(rng: Random, proto: onnx.ModelProto) -> None:
    """Fills the weights with one number: NaN, infinity, the largest, the smallest, zero."""
    tensor = rng.choice([tensor for tensor in _tensors(proto) if tensor.data_type == TensorProto.FLOAT])
    pattern = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f", b"\x01\0\0\0", b"\0\0\0\0"))
    tensor.raw_data = pattern * (len(tensor.raw_data) // 4)


_MUTATIONS: tuple[Mutation, ...] = (
    *(_change_any_field,) * 5, _set_any_field, *(_rewire,) * 2, _change_tensor_type, *(_change_dims,) * 2,
    _change_raw_data,
    _move_data_out, *(_change_value_shape,) * 2, _change_value_kind, *(_change_operator,) * 2, *(_change_arity,) * 2,
    _change_attribute, *(_change_number,) * 4, *(_insert_node,) * 7, _add_attribute, _call_itself, _nest, _repeat_node,
    _change_versions, _make_output,
    _fill_weights,
)  # fmt: skip
