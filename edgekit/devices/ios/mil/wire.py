"""Protocol Buffers, as far as a Core ML model needs them: fields by their numbers, in the order of the file."""

import struct
from collections.abc import Iterator, Mapping

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
