"""Models with external data: the weights are moved into the model file or beside it without being loaded."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import onnx
from google.protobuf.message import Message

from edgekit._files import move_file, read_chunks, replacing_file, work_folder, write_file
from edgekit.errors import ModelError
from edgekit.model.external import LEAST_BYTES, DataPlace, begin_page, point_to, read_place, read_words
from edgekit.model.model import MOST_INLINE_BYTES, Model, copy_fields, iterate_graphs, load_model, read_proto

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
    """Returns the bytes before the data, the place and size of the data, and the bytes after them."""
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
    copy_fields(message, made, {field.name for field, _ in message.ListFields() if not wanted(field.number)})
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


def write_beside(proto: onnx.ModelProto, source: Model, path: Path) -> Model:
    """Writes a graph whose external weights still lie with `source`, copies these beside it, and returns it."""
    if points_into(proto, source):
        write_inline(proto, source.path.parent, path)
        return load_model(path, custom_ops=source.custom_ops)
    if source.external_files:
        gather_data(proto, source.path.parent, path.with_name(f"{path.name}.data"))
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return load_model(path, custom_ops=source.custom_ops)


def save_graph(proto: onnx.ModelProto, source: Model, out: Path) -> Model:
    """Writes a graph to `out` and its external weights beside it, and returns it. Weights that are there already stay.

    Raises:
        OutputError: `out` cannot be written.
    """
    if out.exists() and out.samefile(source.path) and not points_into(proto, source):
        write_file(out, proto.SerializeToString(deterministic=True))
    else:
        with work_folder(out.parent) as work:
            write_beside(proto, source, work / out.name)
            for path in sorted(work.iterdir(), key=lambda path: path.name == out.name):
                move_file(path, out.with_name(path.name))
    return load_model(out, custom_ops=source.custom_ops)


def points_into(proto: onnx.ModelProto, source: Model) -> bool:
    """Returns True if weights of a graph lie in the very file of the model, as `point_into` leaves them."""
    return any(read_words(tensor).get("location") == source.path.name for tensor in proto.graph.initializer)


def refuse_inline(model: Model) -> None:
    """Refuses a model whose weights one protobuf cannot hold.

    Raises:
        ModelError: the model has 2 GB or more.
    """
    if model.size_bytes > MOST_INLINE_BYTES:
        raise ModelError(
            f"'{model.path}' has {model.size_bytes / 1e9:.1f} GB, and a file with its weights inside ends at 2 GB",
            hint="leave --inline-data out",
        )


def place_weights(model: Model, *, external: bool) -> Model:
    """Moves the weights of a model out of its file into one beside it, or back, and returns it; each file is whole.

    Raises:
        ModelError: the weights are to be inside, and have 2 GB or more.
        OutputError: the folder cannot be written.
    """
    path, data = model.path, model.path.with_name(f"{model.path.name}.data")
    if external == bool(model.external_files):
        return model
    proto = read_proto(model)
    if external:
        with replacing_file(data) as temporary:
            proto = spill_data(proto, temporary)
        write_file(path, proto.SerializeToString(deterministic=True))
    else:
        refuse_inline(model)
        write_file(path, proto.SerializeToString(deterministic=True))
        for name in model.external_files:
            (path.parent / name).unlink()
    return load_model(path, custom_ops=model.custom_ops)


def spill_data(proto: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """Returns the model with its large weights in the file `path`; the memory they took is free once `proto` is."""
    with path.open("wb") as out:
        for tensor in proto.graph.initializer:
            data = tensor.raw_data
            if len(data) > LEAST_BYTES:
                point_to(tensor, DataPlace(path.name, begin_page(out), len(data)))
                out.write(data)
    # Protobuf keeps the memory of fields that were cleared; only a new message is without it.
    return onnx.ModelProto.FromString(proto.SerializeToString())


def gather_data(proto: onnx.ModelProto, folder: Path, path: Path) -> None:
    """Copies the external weights of a graph from `folder` into the file `path`, and points to them there, in place.

    Weights of several files go into one, each file on a page of its own.
    """
    places = [(tensor, place) for tensor in _iterate_tensors(proto.graph) if (place := read_place(tensor))]
    starts: dict[str, int] = {}
    with path.open("wb") as out:
        for name in sorted({place.file for _, place in places}):
            starts[name] = begin_page(out)
            with (folder / name).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    for tensor, place in places:
        point_to(tensor, DataPlace(path.name, starts[place.file] + place.offset, place.length))


def _iterate_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for part in iterate_graphs(graph):
        yield from part.initializer
        for node in part.node:
            yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))
