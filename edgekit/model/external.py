"""Data in files: where weights outside the model's own file lie, an ONNX file without its weights, arrays in a file.

The keys of `TensorProto.external_data` are those of onnx.proto: `location` is relative to the model's folder; `offset`
and `length` are decimal. A file is read without its weights by skipping the protobuf fields that hold much data (wire
format: https://protobuf.dev/programming-guides/encoding).
"""

import math
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import onnx
from google.protobuf.message import DecodeError

from edgekit._files import read_chunks
from edgekit.errors import ModelError
from edgekit.model.tensors import Array

PAGE_BYTES = 4096
"""Large weights begin at a page, so that ONNX Runtime can map them (onnx's external_data_helper does the same)."""
LEAST_BYTES = 1024
"""Weights up to this size stay in the model file: shape inference and constant folding do not read external data."""

MAX_DATA_BYTES = 1 << 17
"""Data of a tensor beyond this size are skipped by `skim_model`, and stay in a file by `point_into`."""


def begin_page(out: IO[bytes]) -> int:
    """Pads a file with zeros to the next page and returns the position: data written there can be memory-mapped."""
    out.write(bytes(-out.tell() % PAGE_BYTES))
    return out.tell()


class DataPlace(msgspec.Struct, frozen=True):
    """The external data of a tensor: `length` bytes from `offset` on, in `file` of the model's folder."""

    file: str
    offset: int
    length: int


def read_external_entries(tensor: onnx.TensorProto) -> dict[str, str]:
    """Returns `TensorProto.external_data` as a dict; empty if the data lie in the model's own file."""
    return {entry.key: entry.value for entry in tensor.external_data}


def read_place(tensor: onnx.TensorProto) -> DataPlace | None:
    """Returns where the external data of a tensor lie, None if they lie in the model's own file.

    A missing length stands for the whole tensor, as in ONNX Runtime: the bytes that its type and shape need.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = read_external_entries(tensor)
    length = int(entries["length"]) if "length" in entries else count_bytes(tensor) or 0
    return DataPlace(file=entries["location"], offset=int(entries.get("offset", "0")), length=length)


def list_files(tensors: Iterable[onnx.TensorProto]) -> Iterator[str]:
    """Yields the files that hold data of these tensors; every `location`, even if a malicious tensor has two."""
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield from (entry.value for entry in tensor.external_data if entry.key == "location")


def point_to(tensor: onnx.TensorProto, place: DataPlace) -> None:
    """Makes a tensor refer to external data, in place; raw data that it has are dropped."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place.file), ("offset", place.offset), ("length", place.length)):
        tensor.external_data.add(key=key, value=str(value))


def copy_data(folder: Path, place: DataPlace, out: IO[bytes]) -> None:
    """Appends the data at a place, in a file of `folder`, to an open file.

    Raises:
        OSError: the file cannot be read, or ends before the data do.
    """
    with (folder / place.file).open("rb") as file:
        file.seek(place.offset)
        if sum(out.write(chunk) for chunk in read_chunks(file, place.length)) < place.length:
            raise OSError(f"'{folder / place.file}' ends within a weight")


def load_external(graph: onnx.GraphProto, folder: Path, most: int = sys.maxsize) -> None:
    """Loads external data of up to `most` bytes a tensor from `folder` into the initializers of a graph, in place.

    Data that are cut off are loaded as far as they go; `model.read_proto` finds them.

    Raises:
        OSError: a file cannot be read.
    """
    for tensor in graph.initializer:
        place = read_place(tensor)
        if place is not None and place.length <= most:
            with (folder / place.file).open("rb") as file:
                file.seek(place.offset)
                tensor.raw_data = file.read(place.length)
            tensor.ClearField("data_location")
            del tensor.external_data[:]


def move_weight(tensor: onnx.TensorProto, folder: Path, out: IO[bytes], *, most: int = MAX_DATA_BYTES) -> None:
    """Moves an initializer of more than `most` bytes to the end of an open file, as external data, in place.

    They may be external data already, in `folder`.
    """
    place, data = read_place(tensor), tensor.raw_data
    length = len(data) if place is None else place.length
    if length > most:
        start = begin_page(out)
        if place is None:
            out.write(data)
        else:
            copy_data(folder, place, out)
        point_to(tensor, DataPlace(Path(out.name).name, start, length))


def count_bytes(tensor: onnx.TensorProto) -> int | None:
    """Returns the size of a tensor's raw data; None for strings, which have none, and for elements of 6 bits.

    Elements of 2 and 4 bits are packed (onnx.proto, `raw_data`), though numpy holds each in a byte.
    """
    dtype: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    if dtype.kind == "O" or name.startswith("FLOAT6"):
        return None
    bits = 2 if name.endswith("INT2") else 4 if name.endswith(("INT4", "FLOAT4E2M1")) else 8 * dtype.itemsize
    return -(-math.prod(tensor.dims) * bits // 8)


# Nesting of subgraphs: protobuf itself stops at 100 messages, and each graph is three (graph, node, attribute).
_MAX_DEPTH = 64
# The fields of each message that may contain tensors.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "constant", 6: "graph", 10: "constant", 11: "graph"},
    "tensor": {},
    "constant": {},
}
LISTS_OF_TREES = ("nodes_", "class_", "target_", "leaf_")
"""The prefixes of attributes of tree ensembles with an entry for each node: no shape and no rule depends on them."""
# A list of more bytes is very long; field 1 of an attribute is its name, a text.
_LONG_LIST = 1 << 16
_NAME = 0x0A
# The last field of a serialized attribute is its type (field 20): numbers, texts and lists of them contain no tensor.
_WITHOUT_TENSORS = tuple(b"\xa0\x01" + bytes([kind]) for kind in (1, 2, 3, 6, 7, 8))
_TENSORS = frozenset({"tensor", "constant"})
# float_data 4, int32_data 5, string_data 6, int64_data 7, raw_data 9, double_data 10, uint64_data 11 (onnx.proto).
_RAW_DATA = 9
_TENSOR_DATA = frozenset({4, 5, 6, 7, 9, 10, 11})


def skim_model(path: Path) -> onnx.ModelProto:
    """Returns the model without the data of its large tensors; their names, types and shapes stay.

    Very long lists of tree ensembles are empty.

    Raises:
        ModelError: the file cannot be read or is no ONNX model.
    """
    return _read(path, location="")


def point_into(path: Path) -> onnx.ModelProto:
    """Returns the model with the raw data of its large initializers as external data in the file itself, `path`.

    So a model of gigabytes can be processed without being in memory.

    Raises:
        ModelError: the file cannot be read or is no ONNX model.
    """
    return _read(path, location=path.name)


# What files of other kinds begin with, at an offset, and how a model is made of each.
_OTHER_KINDS = (
    (4, b"TFL3", "it is a TensorFlow Lite model, of which tf2onnx makes one: python -m tf2onnx.convert --tflite"),
    (0, b"PK\x03\x04", "it is an archive: a .npz is for --data; unpack others, or, of PyTorch, use torch.onnx.export"),
    (0, b"\x80", "it is a pickle, as PyTorch writes: torch.onnx.export makes a model of it"),
    (0, b"\x89HDF", "it is an HDF5 file, as Keras writes: tf2onnx makes a model of it"),
)


def _read(path: Path, location: str) -> onnx.ModelProto:
    try:
        # Mapped, so that skipped weights are never read from the disk.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            kept = _skim(data, "model", (0, len(data)), 0, location)
            return onnx.ModelProto.FromString(b"".join(kept))
    except FileNotFoundError as error:
        raise ModelError(f"there is no file '{path}'", hint="check the path of the model") from error
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror}", hint="give the path of an .onnx file") from error
    except (DecodeError, ValueError, IndexError, KeyError) as error:
        with path.open("rb") as file:
            head = file.read(8)
        if not head:
            raise ModelError(f"'{path}' is empty", hint="export or download the model again") from error
        known = (hint for offset, magic, hint in _OTHER_KINDS if head[offset:].startswith(magic))
        # A file that lists several models is no model itself.
        hint = next(known, "give the path of an .onnx file, or export it again")
        if path.suffix == ".toml":
            hint = "edgekit group takes a .toml, edgekit run an edgekit.toml"
        raise ModelError(f"'{path}' is not an ONNX model, or is cut off", hint=hint) from error


def _skim(data: mmap.mmap, kind: str, span: tuple[int, int], depth: int, location: str) -> Iterator[bytes]:
    """Yields a serialized message of a kind without the large data in it; `span` is its begin and end in `data`.

    With a `location`, raw data become external data in that file, and what lies in other fields stays.
    """
    at, end = span
    place = b""
    while at < end:
        start = at
        key, at = _read_varint(data, at)
        field, wire = key >> 3, key & 7
        # All long fields have wire type 2; varints and fixed numbers stay as they are.
        if wire != 2:
            # Wire types 3 and 4 are groups, which onnx.proto does not use; 6 and 7 do not exist. All raise a KeyError:
            # the file is no model.
            at = _read_varint(data, at)[1] if wire == 0 else at + {1: 8, 5: 4}[wire]
            yield data[start:at]
            continue
        size, body = _read_varint(data, at)
        at = body + size
        # A length beyond the end of its message: the file is cut off, or no protobuf. Without this check a random file
        # could be read as a model.
        if at > end:
            raise ValueError(at)
        inner = _INSIDE[kind].get(field)
        # Only to save time: trees have millions of numbers in attributes, each a field of its own.
        if inner == "attribute" and data[at - 3 : at] in _WITHOUT_TENSORS:
            inner = None
            if not location and size > _LONG_LIST and (named := _read_name(data, body)):
                yield write_varint(key) + write_varint(len(named) + 3) + named + data[at - 3 : at]
                continue
        # A message of up to MAX_DATA_BYTES cannot contain larger data.
        if inner is not None and depth < _MAX_DEPTH and size > MAX_DATA_BYTES:
            # The length changes with what is left out, so the field is written anew.
            kept = b"".join(_skim(data, inner, (body, at), depth + 1, location))
            yield write_varint(key) + write_varint(len(kept)) + kept
        elif kind not in _TENSORS or field not in _TENSOR_DATA or size <= MAX_DATA_BYTES:
            yield data[start:at]
        # External data are raw bytes (onnx.proto): other data fields have another encoding, and stay in the message.
        elif location and kind == "tensor" and field == _RAW_DATA:
            tensor = onnx.TensorProto()
            point_to(tensor, DataPlace(location, body, size))
            place = tensor.SerializeToString()
        elif location:
            yield data[start:at]
    # Last, because the last of equal fields counts: a tensor loaded from external data still has `data_location`.
    yield place


def _read_name(data: mmap.mmap, body: int) -> bytes:
    """Returns the name of an attribute as a field, empty where it is not first or is none of `LISTS_OF_TREES`."""
    if data[body] != _NAME:
        return b""
    size, at = _read_varint(data, body + 1)
    name = data[at : at + size].decode(errors="replace")
    return data[body : at + size] if name.startswith(LISTS_OF_TREES) else b""


def _read_varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    # A varint has ten bytes of seven bits at most.
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(at)


def write_varint(value: int) -> bytes:
    """Returns a number as protobuf writes it: seven bits a byte, the lowest first."""
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


# So many bytes of the arrays in a file may stay in memory while none is used: to free and map pages again takes longer
# than to use a small array. Chosen by hand.
_HELD_BYTES = 2 << 20


class FileArray:
    """An array whose `values` lie in a file; `release` frees their memory until they are used again."""

    def __init__(self, file: "ArrayFile", mapping: mmap.mmap, shape: Sequence[int], dtype: Any) -> None:
        self._file, self._mapping = file, mapping
        self.values: Array = np.frombuffer(mapping, dtype, math.prod(shape)).reshape(shape)

    def release(self, used_bytes: int | None = None) -> None:
        """Says that no value is used now, of `used_bytes` that were, by default of all: the file holds them."""
        self._file.release(self._mapping, len(self._mapping) if used_bytes is None else used_bytes)


class ArrayFile:
    """A file for arrays, created with the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size_bytes = 0
        self._held, self._held_bytes = dict[mmap.mmap, None](), 0

    def release(self, mapping: mmap.mmap, used_bytes: int) -> None:
        """Frees the memory of released arrays, if the system supports it, once `used_bytes` add up to 2 MB."""
        self._held[mapping] = None
        self._held_bytes += used_bytes
        if self._held_bytes < _HELD_BYTES:
            return
        # Only Linux promises that this writes the pages of a shared mapping to the file (madvise(2)).
        for each in self._held if sys.platform == "linux" else ():
            each.madvise(mmap.MADV_DONTNEED)
        self._held.clear()
        self._held_bytes = 0

    def zeros(self, shape: Sequence[int], dtype: Any) -> FileArray:
        """Returns an array of zeros.

        Raises:
            OSError: the file cannot be written.
        """
        step, length = mmap.ALLOCATIONGRANULARITY, max(1, math.prod(shape)) * np.dtype(dtype).itemsize
        start, self._size_bytes = self._size_bytes, self._size_bytes + -(-length // step) * step
        with self._path.open("r+b" if start else "w+b") as file:
            # On a full disk, writing to a page that was not reserved would end the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), start, self._size_bytes - start)
            else:
                file.truncate(self._size_bytes)
            return FileArray(self, mmap.mmap(file.fileno(), length, offset=start), shape, dtype)
