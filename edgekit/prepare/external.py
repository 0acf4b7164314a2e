"""Models with external data: weights are moved between the model file and external files without being loaded."""

import shutil
from pathlib import Path

import onnx
from google.protobuf.message import Message

from edgekit._files import move_file, replacing_file, work_folder, write_file
from edgekit.errors import ModelError
from edgekit.model import external as data
from edgekit.model.external import DataPlace, copy_data, point_to, read_external_entries, read_place, write_varint
from edgekit.model.model import MOST_INLINE_BYTES, Model, copy_fields, iterate_tensors, load_model, read_proto

_LENGTH_DELIMITED = 2
# Field numbers of onnx.proto.
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9


def write_inline(proto: onnx.ModelProto, folder: Path, path: Path) -> None:
    """Writes a model to `path` with all weights inside; external data are copied from files of `folder`.

    The bytes are those of `SerializeToString(deterministic=True)`: fields in the order of their numbers.
    """
    graph = proto.graph
    head, tail = _split(graph, _INITIALIZER)
    # For each tensor the bytes before its data, the place of its external data, and the bytes after them.
    tensors: list[tuple[bytes, DataPlace | None, bytes]] = []
    length = len(head) + len(tail)
    for tensor in graph.initializer:
        place = read_place(tensor)
        before, after = b"", tensor.SerializeToString(deterministic=True)
        if place is not None:
            bare = onnx.TensorProto()
            # ONNX Runtime gives tensors with external data alone an empty `doc_string`.
            skipped = {"external_data", "data_location", *(() if tensor.doc_string else ("doc_string",))}
            copy_fields(tensor, bare, skipped)
            before, after = _split(bare, _RAW_DATA)
            before += _frame(_RAW_DATA, place.length)
        size = len(before) + len(after) + (place.length if place is not None else 0)
        tensors.append((_frame(_INITIALIZER, size) + before, place, after))
        length += len(tensors[-1][0]) + size - len(before)
    first, last = _split(proto, _GRAPH)
    with path.open("wb") as out:
        out.write(first + _frame(_GRAPH, length) + head)
        for before, place, after in tensors:
            out.write(before)
            if place is not None:
                copy_data(folder, place, out)
            out.write(after)
        out.write(tail + last)


def _split(message: Message, field: int) -> tuple[bytes, bytes]:
    """Returns the serialized fields of a message before a field number, and those after it."""
    before, after = type(message)(), type(message)()
    numbers = {each.name: each.number for each, _ in message.ListFields()}
    copy_fields(message, before, {name for name, number in numbers.items() if number >= field})
    copy_fields(message, after, {name for name, number in numbers.items() if number <= field})
    return before.SerializeToString(deterministic=True), after.SerializeToString(deterministic=True)


def _frame(field: int, length: int) -> bytes:
    return write_varint(field << 3 | _LENGTH_DELIMITED) + write_varint(length)


def write_with_weights(proto: onnx.ModelProto, source: Model, path: Path) -> Model:
    """Writes a graph with external weights in the files of `source`, copies these too, and returns it."""
    if points_into(proto, source):
        write_inline(proto, source.path.parent, path)
        return load_model(path, custom_ops=source.custom_ops)
    if source.external_files:
        gather_data(proto, source.path.parent, path.with_name(f"{path.name}.data"))
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return load_model(path, custom_ops=source.custom_ops)


def save_graph(proto: onnx.ModelProto, source: Model, out: Path) -> Model:
    """Writes a graph to `out` and its external weights next to it, and returns it.

    If `out` is the file of `source`, its external files stay.

    Raises:
        OutputError: `out` cannot be written.
    """
    if out.exists() and out.samefile(source.path) and not points_into(proto, source):
        write_file(out, proto.SerializeToString(deterministic=True))
    else:
        with work_folder(out.parent) as work:
            write_with_weights(proto, source, work / out.name)
            for path in sorted(work.iterdir(), key=lambda path: path.name == out.name):
                move_file(path, out.with_name(path.name))
    return load_model(out, custom_ops=source.custom_ops)


def points_into(proto: onnx.ModelProto, source: Model) -> bool:
    """Returns True if external data of a graph lie inside the model file `source`, as after `point_into`."""
    return any(read_external_entries(tensor).get("location") == source.path.name for tensor in proto.graph.initializer)


def refuse_inline(model: Model) -> None:
    """Refuses a model whose weights one protobuf cannot hold.

    Raises:
        ModelError: the model has 2 GB or more.
    """
    if model.size_bytes > MOST_INLINE_BYTES:
        words = f"'{model.path}' has {model.size_bytes / 1e9:.1f} GB, and a file with its weights inside ends at 2 GB"
        raise ModelError(words, hint="leave --inline-data out")


def place_weights(model: Model, *, external: bool) -> Model:
    """Moves the weights of a model into external data in `NAME.onnx.data`, or back, and returns it.

    Raises:
        ModelError: the weights are to be inside, and have 2 GB or more.
        OutputError: the folder cannot be written.
    """
    path, beside = model.path, model.path.with_name(f"{model.path.name}.data")
    if external == bool(model.external_files):
        return model
    proto = read_proto(model)
    if external:
        with replacing_file(beside) as temporary, temporary.open("wb") as out:
            for tensor in proto.graph.initializer:
                data.move_weight(tensor, path.parent, out, most=data.LEAST_BYTES)
        write_file(path, proto.SerializeToString(deterministic=True))
    else:
        refuse_inline(model)
        write_file(path, proto.SerializeToString(deterministic=True))
        for name in model.external_files:
            (path.parent / name).unlink()
    return load_model(path, custom_ops=model.custom_ops)


def gather_data(proto: onnx.ModelProto, folder: Path, path: Path) -> None:
    """Copies the external files of a graph from `folder` into the one file `path`, and points to it, in place."""
    places = [(tensor, place) for tensor in iterate_tensors(proto.graph) if (place := read_place(tensor))]
    starts: dict[str, int] = {}
    with path.open("wb") as out:
        for name in sorted({place.file for _, place in places}):
            starts[name] = data.begin_page(out)
            with (folder / name).open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
    for tensor, place in places:
        point_to(tensor, DataPlace(path.name, starts[place.file] + place.offset, place.length))
