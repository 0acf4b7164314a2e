"""An ML Program and its weights, read from a `.mlpackage`.

The format is that of coremltools' mlmodel/format/Model.proto and MIL.proto; weights lie in the blob file of
mlmodel/src/MILBlob/Blob/StorageFormat.hpp. Of Protocol Buffers only what a Core ML model needs is read: fields by their
numbers, in the order of the file.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from edgekit.model.tensors import Array

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_BITS = 70

Fields = Mapping[int, tuple[int | bytes, ...]]
"""What a message holds: numbers, and bytes that may be text, packed numbers or another message."""


def read_message(data: bytes) -> Fields:
    """Returns the fields of a message.

    Raises:
        ValueError: it is no message.
    """
    found: dict[int, list[int | bytes]] = {}
    for number, value in _iterate_fields(data):
        found.setdefault(number, []).append(value)
    return {number: tuple(values) for number, values in found.items()}


def _iterate_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in {_FIXED32, _FIXED64}:
            size = 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"a field is of kind {kind}")
        if at + size > len(data):
            raise ValueError("it is cut off")
        yield number, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift >= _MOST_BITS:
            raise ValueError("it is cut off")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def find_message(fields: Fields, number: int) -> Fields | None:
    """Returns the message in a field, None where the field is absent."""
    data = fields.get(number, (None,))[-1]
    return read_message(data) if isinstance(data, bytes) else None


def list_messages(fields: Fields, number: int) -> tuple[Fields, ...]:
    """Returns the messages of a field that may be there several times."""
    return tuple(read_message(data) for data in fields.get(number, ()) if isinstance(data, bytes))


def list_pairs(fields: Fields, number: int) -> Iterator[tuple[str, Fields]]:
    """Yields keys and values of a map whose values are messages."""
    for entry in list_messages(fields, number):
        yield read_text(entry, 1), find_message(entry, 2) or {}


def read_text(fields: Fields, number: int) -> str:
    """Returns the text in a field, empty where it is absent."""
    data = fields.get(number, (b"",))[-1]
    return data.decode() if isinstance(data, bytes) else ""


def list_texts(fields: Fields, number: int) -> tuple[str, ...]:
    """Returns the texts of a field that may be there several times."""
    return tuple(data.decode() for data in fields.get(number, ()) if isinstance(data, bytes))


def read_number(fields: Fields, number: int) -> int:
    """Returns the whole number in a field, 0 where it is absent; negative ones fill 64 bits."""
    value = fields.get(number, (0,))[-1]
    if not isinstance(value, int):
        raise ValueError("a number was expected")  # noqa: TRY004 - the file is wrong, not the caller
    return value - (1 << 64) if value >> 63 else value


def list_numbers(fields: Fields, number: int) -> list[int]:
    """Returns the whole numbers of a field, packed or one by one."""
    out: list[int] = []
    for value in fields.get(number, ()):
        if isinstance(value, int):
            out.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _read_varint(value, at)
            out.append(one)
    return [value - (1 << 64) if value >> 63 else value for value in out]


def list_floats(fields: Fields, number: int, width: int) -> Array:
    """Returns the floating-point numbers of a field, of `width` bytes each."""
    data = b"".join(value for value in fields.get(number, ()) if isinstance(value, bytes))
    if len(data) % width:
        raise ValueError("it is cut off")
    return np.frombuffer(data, f"<f{width}")


def read_struct(form: str, data: bytes, at: int) -> tuple[int, ...]:
    """Returns whole numbers at a place of a file.

    Raises:
        ValueError: the file ends before.
    """
    try:
        return struct.unpack_from(form, data, at)
    except struct.error as error:
        raise ValueError("it is cut off") from error


DTYPES: Mapping[int, type[np.generic]] = {
    1: np.bool_,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    21: np.int8,
    22: np.int16,
    23: np.int32,
    24: np.int64,
    31: np.uint8,
    32: np.uint16,
}
"""Element types by their numbers in MIL.proto."""

_TEXT = 2
_PROGRAM, _NETWORK = 502, 500
_SENTINEL = 0xDEADBEEF
_BLOB_KINDS: Mapping[int, type[np.generic]] = {
    1: np.float16,
    2: np.float32,
    3: np.uint8,
    4: np.int8,
    6: np.int16,
    7: np.uint16,
    14: np.int32,
}
_MOST_ELEMENTS = 1 << 31

Value = Array | str
"""A constant: numbers, or text."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation gives, or a function takes: its name, element type and shape, -1 where that is not known."""

    name: str
    dtype: type[np.generic] | None
    shape: tuple[int, ...]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation: constants stand in `constants`, names of values in `inputs`, both by the parameter."""

    kind: str
    name: str
    inputs: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, Value]
    results: tuple[Result, ...]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The function `main` of an ML Program; `opset` says which operations there are, such as CoreML6."""

    specification: int
    opset: str
    inputs: tuple[Result, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]


class UnknownProgramError(ValueError):
    """A model that is none that edgekit reads, with what it is."""


def read_package(folder: Path) -> Program:
    """Returns the program in a `.mlpackage` of ONNX Runtime, with all its weights.

    Raises:
        UnknownProgramError: it is a neural network, which edgekit does not compute.
        ValueError: it is damaged, or holds what no builder of ONNX Runtime's writes.
        OSError: a file cannot be read.
    """
    files = sorted(folder.rglob("*/model.mlmodel")) if folder.is_dir() else [folder]
    path = next((path for path in files if path.stat().st_size > 0), None)
    if path is None:
        raise ValueError("it holds no model.mlmodel")
    return read_program(path.read_bytes(), path.parent)


def read_program(data: bytes, folder: Path) -> Program:
    """Returns the program in a model's bytes; its blob files are named from `folder` on.

    Raises:
        UnknownProgramError: it is another kind of model.
        ValueError: it is damaged.
        OSError: a blob file cannot be read.
    """
    model = read_message(data)
    program = find_message(model, _PROGRAM)
    if program is None:
        kind = "a neural network" if _NETWORK in model else "no ML Program"
        raise UnknownProgramError(f"the model is {kind}: edgekit computes ML Programs only")
    function = dict(list_pairs(program, 2)).get("main")
    if function is None:
        raise ValueError("it has no function main")
    opset = read_text(function, 2)
    block = dict(list_pairs(function, 3)).get(opset)
    if block is None:
        raise ValueError(f"it has no block for {opset!r}")
    blobs = _Blobs(folder)
    return Program(
        specification=read_number(model, 1),
        opset=opset,
        inputs=tuple(_read_result(entry) for entry in list_messages(function, 1)),
        outputs=list_texts(block, 2),
        operations=tuple(_read_operation(entry, blobs) for entry in list_messages(block, 3)),
    )


class _Blobs:
    """The blob files of a package, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, bytes] = {}

    def read(self, name: str, offset: int, count: int) -> Array:
        """Returns the elements behind the record at an offset of a file."""
        if name not in self._files:
            # The package's own root stands before it.
            path = self._folder / name.removeprefix("@model_path/")
            if not path.resolve().is_relative_to(self._folder.resolve()):
                raise ValueError(f"its blob file {name!r} lies outside")
            self._files[name] = path.read_bytes()
        data = self._files[name]
        sentinel, kind, size, start = read_struct("<IIQQ", data, offset)
        if sentinel != _SENTINEL or kind not in _BLOB_KINDS:
            raise ValueError(f"there is no blob at {offset}")
        dtype = np.dtype(_BLOB_KINDS[kind])
        if size != count * dtype.itemsize or start + size > len(data):
            raise ValueError(f"the blob at {offset} is cut off")
        return np.frombuffer(data, dtype, count, start)


def _read_result(entry: Fields) -> Result:
    kind = find_message(entry, 2) or {}
    tensor = find_message(kind, 1) or {}
    return Result(
        name=read_text(entry, 1),
        dtype=DTYPES.get(read_number(tensor, 1)),
        shape=tuple(_list_dimensions(tensor)),
    )


def _list_dimensions(tensor: Fields) -> Iterator[int]:
    for dimension in list_messages(tensor, 3):
        constant = find_message(dimension, 1)
        yield -1 if constant is None else read_number(constant, 1)


def _read_operation(entry: Fields, blobs: _Blobs) -> Operation:
    inputs: dict[str, tuple[str, ...]] = {}
    constants: dict[str, Value] = {}
    if list_messages(entry, 4):
        raise ValueError(f"its operation {read_text(entry, 1)!r} has a body")
    for parameter, argument in list_pairs(entry, 2):
        bindings = list_messages(argument, 1)
        values = [value for value in (find_message(binding, 2) for binding in bindings) if value is not None]
        if values:
            constants[parameter] = _read_value(values[0], blobs)
        else:
            inputs[parameter] = tuple(read_text(binding, 1) for binding in bindings)
    attributes = {name: _read_value(value, blobs) for name, value in list_pairs(entry, 5)}
    name = attributes.pop("name", "")
    return Operation(
        kind=read_text(entry, 1),
        name=name if isinstance(name, str) else "",
        inputs=inputs,
        constants={**attributes, **constants},
        results=tuple(_read_result(result) for result in list_messages(entry, 3)),
    )


def _read_value(value: Fields, blobs: _Blobs) -> Value:
    kind = find_message(find_message(value, 2) or {}, 1)
    if kind is None:
        raise ValueError("it has a constant that is no tensor")
    shape = tuple(_list_dimensions(kind))
    count = math.prod(shape)
    if not 0 <= count <= _MOST_ELEMENTS or min(shape, default=0) < 0:
        raise ValueError("it has a constant of no size")
    blob = find_message(value, 5)
    if blob is not None:
        return blobs.read(read_text(blob, 1), read_number(blob, 2), count).reshape(shape)
    tensor = find_message(find_message(value, 3) or {}, 1)
    if tensor is None:
        raise ValueError("it has a constant without a value")
    number = read_number(kind, 1)
    if number == _TEXT:
        return "".join(list_texts(find_message(tensor, 4) or {}, 1))
    found = _read_elements(tensor, number)
    if found.size != count:
        raise ValueError(f"it has a constant of {found.size} elements where {count} were expected")
    return found.astype(DTYPES[number]).reshape(shape)


def _read_elements(tensor: Fields, number: int) -> Array:
    if number not in DTYPES:
        raise ValueError(f"it has a constant of element type {number}")
    for field, width in ((1, 4), (6, 8)):
        if (floats := find_message(tensor, field)) is not None:
            return list_floats(floats, 1, width)
    for field in (2, 3, 5):
        if (whole := find_message(tensor, field)) is not None:
            return np.array(list_numbers(whole, 1), np.int64)
    raw = find_message(tensor, 7)
    if raw is None:
        raise ValueError("it has a constant without elements")
    # What is narrower than the lists above stands as bytes.
    data = b"".join(part for part in raw.get(1, ()) if isinstance(part, bytes))
    return np.frombuffer(data, DTYPES[number])
