"""Reads an ONNX file without its weights: protobuf fields that hold much data are skipped, not copied.

The wire format is that of protobuf (https://protobuf.dev/programming-guides/encoding), the field numbers those of
`onnx.proto`.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from edgekit.errors import ModelError
from edgekit.model.external import DataPlace, point_to

MAX_DATA_BYTES = 1 << 17
"""Data of a tensor beyond this are left out."""

# Subgraphs within subgraphs: protobuf itself stops at 100 messages, and each graph is three (graph, node, attribute).
_MAX_DEPTH = 64
# Which fields of a message hold messages with tensors in them.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph"},
    "graph": {1: "node", 5: "tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "constant", 6: "graph", 10: "constant", 11: "graph"},
    "tensor": {},
    "constant": {},
}
_TENSORS = frozenset({"tensor", "constant"})
# float_data 4, int32_data 5, string_data 6, int64_data 7, raw_data 9, double_data 10, uint64_data 11 (onnx.proto).
_RAW_DATA = 9
_TENSOR_DATA = frozenset({4, 5, 6, 7, 9, 10, 11})


def skim_model(path: Path) -> onnx.ModelProto:
    """Returns the model without the data of its big tensors; their names, types and shapes stay.

    Raises:
        ModelError: the file cannot be read or is no ONNX model.
    """
    return _read(path, location="")


def point_into(path: Path) -> onnx.ModelProto:
    """Returns the model with the raw data of its big initializers left in the file, as external data that lie there.

    So a model of gigabytes is worked on without ever being in memory; the data keep their place in the file, `path`.

    Raises:
        ModelError: the file cannot be read or is no ONNX model.
    """
    return _read(path, location=path.name)


def _read(path: Path, location: str) -> onnx.ModelProto:
    try:
        # Mapped, so that weights which are skipped are never read from the disk.
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return onnx.ModelProto.FromString(b"".join(_skim(data, "model", (0, len(data)), 0, location)))
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror}", hint="give the path of an .onnx file") from error
    except (DecodeError, ValueError, IndexError, KeyError) as error:
        # What lists several models is no model.
        hint = (
            "edgekit group takes a .toml, edgekit run an edgekit.toml" if path.suffix == ".toml" else "export it again"
        )
        raise ModelError(f"'{path}' is not an ONNX model, or is cut off", hint=hint) from error


def _skim(data: mmap.mmap, kind: str, span: tuple[int, int], depth: int, location: str) -> Iterator[bytes]:
    """Yields the bytes of a message that are kept; `span` is where it begins and ends.

    With a `location` the raw data that are left out become external data there, and other data stay.
    """
    at, end = span
    place = b""
    while at < end:
        start = at
        key, at = _read_varint(data, at)
        field, wire = key >> 3, key & 7
        # Everything that is long has wire type 2; varints and fixed numbers are kept as they are.
        if wire != 2:
            at = _skip_scalar(data, at, wire)
            yield data[start:at]
            continue
        size, body = _read_varint(data, at)
        at = body + size
        # A length that runs out of its message: cut off, or no protobuf at all. Without this a random file could be
        # read as a model.
        if at > end:
            raise ValueError(at)
        inner = _INSIDE[kind].get(field)
        if inner is not None and depth < _MAX_DEPTH:
            # Its length changes with what is left out, so the field is written anew.
            kept = b"".join(_skim(data, inner, (body, at), depth + 1, location))
            yield _varint(key) + _varint(len(kept)) + kept
        elif kind not in _TENSORS or field not in _TENSOR_DATA or size <= MAX_DATA_BYTES:
            yield data[start:at]
        # External data are raw bytes (onnx.proto): other fields of data have another encoding, and stay in the message.
        elif location and kind == "tensor" and field == _RAW_DATA:
            place = _external_fields(location, body, size)
        elif location:
            yield data[start:at]
    # Last, where it wins: tensors that were loaded from external data say that their data lie in the message.
    yield place


def _external_fields(location: str, offset: int, length: int) -> bytes:
    """Returns the fields of a tensor that say where its data lie."""
    tensor = onnx.TensorProto()
    point_to(tensor, DataPlace(location, offset, length))
    return tensor.SerializeToString()


def _skip_scalar(data: mmap.mmap, at: int, wire: int) -> int:
    if wire == 0:
        return _read_varint(data, at)[1]
    # Wire types 3 and 4 are groups, which onnx.proto has none of, and 6 and 7 do not exist: a KeyError, and no model.
    return at + {1: 8, 5: 4}[wire]


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


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
