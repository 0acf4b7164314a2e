"""Models written with weights inside that never were in memory: each is copied from the file where it lies."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import onnx
from google.protobuf.message import Message

from edgekit._files import read_chunks
from edgekit.model.external import DataPlace, read_place

_MessageT = TypeVar("_MessageT", bound=Message)

_LENGTH_DELIMITED = 2
# Field numbers of onnx.proto.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9


def write_inline(proto: onnx.ModelProto, folder: Path, path: Path) -> None:
    """Writes a model to `path` with the initializers inside that lie in files of `folder`.

    The bytes are those of `SerializeToString(deterministic=True)`: fields in the order of their numbers.
    """
    graph = proto.graph
    light = _keep(graph, lambda number: number != _INITIALIZER)
    head, tail = _split(light, _INITIALIZER)
    tensors = [_open_tensor(tensor) for tensor in graph.initializer]
    sizes = [len(before) + size + len(after) for before, _, size, after in tensors]
    frames = [_frame(_INITIALIZER, size) for size in sizes]
    length = len(head) + len(tail) + sum(sizes) + sum(map(len, frames))
    first, last = _split(_keep(proto, lambda number: number != _GRAPH), _GRAPH)
    with path.open("wb") as out:
        out.write(first + _frame(_GRAPH, length) + head)
        for frame, (before, place, _, after) in zip(frames, tensors, strict=True):
            out.write(frame + before)
            if place is not None:
                _copy(place, folder, out)
            out.write(after)
        out.write(tail + last)


def _open_tensor(tensor: onnx.TensorProto) -> tuple[bytes, DataPlace | None, int, bytes]:
    """Returns the bytes before the data, where the data lie and how many they are, and the bytes behind."""
    place = read_place(tensor)
    if place is None:
        return tensor.SerializeToString(deterministic=True), None, 0, b""
    bare = onnx.TensorProto()
    bare.CopyFrom(tensor)
    bare.ClearField("external_data")
    bare.ClearField("data_location")
    # ONNX Runtime writes an empty one with weights that lie outside alone.
    if not bare.doc_string:
        bare.ClearField("doc_string")
    before, after = _split(bare, _RAW_DATA)
    return before + _frame(_RAW_DATA, place.length), place, place.length, after


def _split(message: Message, field: int) -> tuple[bytes, bytes]:
    """Returns the bytes of the fields before and behind a field."""
    before, behind = _keep(message, lambda number: number < field), _keep(message, lambda number: number > field)
    return before.SerializeToString(deterministic=True), behind.SerializeToString(deterministic=True)


def _keep(message: _MessageT, wanted: Callable[[int], bool]) -> _MessageT:
    made = type(message)()
    for field, value in message.ListFields():
        if wanted(field.number):
            if isinstance(value, Message):
                getattr(made, field.name).CopyFrom(value)
            elif isinstance(value, (str, bytes, int, float)):
                setattr(made, field.name, value)
            else:
                getattr(made, field.name).extend(value)
    return made


def _frame(field: int, length: int) -> bytes:
    return bytes(_varint(field << 3 | _LENGTH_DELIMITED)) + bytes(_varint(length))


def _varint(value: int) -> Iterator[int]:
    while value > 0x7F:
        yield value & 0x7F | 0x80
        value >>= 7
    yield value


def _copy(place: DataPlace, folder: Path, out: BinaryIO) -> None:
    left = place.length
    with (folder / place.file).open("rb") as file:
        file.seek(place.offset)
        for block in read_chunks(file, left):
            out.write(block)
            left -= len(block)
    if left:
        raise OSError(f"'{folder / place.file}' ends within a weight")
