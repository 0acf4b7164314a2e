"""Writes records as an ORT-format file; fixed rules determine the position of every byte.

Order: header; each distinct vtable once, sorted by its bytes; tables and vectors in the order of a walk from the root;
each distinct string once, sorted; weights in the order of the walk, aligned so that kernels can use them in place.
"""

import functools
import struct
from pathlib import Path
from typing import cast

import msgspec

from edgekit.convert.ort_format.tables import (
    IDENTIFIER,
    NUMBER_SIZES,
    ROOT,
    SCHEMA,
    UNIONS,
    Field,
    Record,
    Value,
    number,
)
from edgekit.errors import ModelError

_MAX_BYTES = 2**31 - 1
_HEADER_BYTES = 8


class _Part(msgspec.Struct, eq=False):
    """A vtable, table, vector, string or weights, with the positions of its offsets to other parts.

    The first `lead` bytes come before what is aligned. `data` follow the `content`: weights stay in the source's bytes.
    """

    content: bytearray
    align: int = 4
    lead: int = 0
    data: bytes | memoryview = b""
    links: list[tuple[int, "_Part"]] = []
    start: int = 0


def write_tables(root: Record, path: Path) -> None:
    """Writes the records of a file in the given order.

    Raises:
        ModelError: the file would have 2 GB or more, which flatbuffers cannot address.
    """
    walk = _Walk()
    first = walk.add_table(root, ROOT)
    vtables, strings = ([parts[key] for key in sorted(parts)] for parts in (walk.vtables, walk.strings))
    parts, end = [*vtables, *walk.blocks, *strings, *walk.weights], _HEADER_BYTES
    for part in parts:
        part.start = end + -(end + part.lead) % part.align
        end = part.start + len(part.content) + len(part.data)
    if end > _MAX_BYTES:
        raise ModelError(f"'{path.name}' would have {end} bytes", hint="the ORT format ends at 2 GB: load the .onnx")
    with path.open("wb") as file:
        file.write(struct.pack("<I", first.start) + IDENTIFIER)
        for part in parts:
            for offset, target in part.links:
                # Offsets count forward, except those of tables to their vtables, which come before all tables.
                struct.pack_into("<I", part.content, offset, abs(target.start - part.start - offset))
            file.write(bytes(part.start - file.tell()))
            file.write(part.content)
            file.write(part.data)
        file.write(bytes(-file.tell() % 8))


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The layout that tables with the same fields share: the offset of each field, in the order of slots."""

    fields: tuple[tuple[int, Field], ...]
    size: int
    align: int
    vtable: bytes


class _Walk:
    """Collects the parts of a file; a parent comes before the tables, vectors and weights that it points to."""

    def __init__(self) -> None:
        self.vtables: dict[bytes, _Part] = {}
        self.blocks: list[_Part] = []
        self.strings: dict[bytes, _Part] = {}
        self.weights: list[_Part] = []

    def add_table(self, record: Record, kind: str) -> _Part:
        shape = _shape_table(kind, frozenset(record))
        block = self._add_block(_Part(bytearray(shape.size), align=shape.align))
        block.links.append((0, self.vtables.setdefault(shape.vtable, _Part(bytearray(shape.vtable)))))
        for offset, field in shape.fields:
            value = record[field.name]
            if field.kind in NUMBER_SIZES:
                block.content[offset : offset + NUMBER_SIZES[field.kind]] = cast("bytes", value)
            elif field.kind == "union":
                of = UNIONS[field.of][number(record, f"{field.name}_type")]
                block.links.append((offset, self.add_table(cast("Record", value), of)))
            else:
                block.links.append((offset, self._add_value(value, field)))
        return block

    def _add_value(self, value: Value, field: Field) -> _Part:
        if isinstance(value, dict):
            return self.add_table(value, field.of)
        count = struct.pack("<I", len(value))
        if isinstance(value, bytes):
            return self.strings.setdefault(value, _Part(bytearray(count + value + b"\0")))
        if isinstance(value, list):
            block = self._add_block(_Part(bytearray(count + bytes(4 * len(value)))))
            block.links += [(4 + 4 * at, self._add_value(value[at], field)) for at in range(len(value))]
            return block
        if field.kind == "weights":
            # Used in place (session.use_ort_model_bytes_for_initializers), and kernels load 64 bytes at a time.
            align = 64 if len(value) >= 64 else 16 if len(value) >= 16 else 8
            self.weights.append(_Part(bytearray(count), align=align, lead=4, data=value))
            return self.weights[-1]
        # Alignment is that of the elements, not of the four bytes of the length before them.
        size = NUMBER_SIZES[field.kind[1:-1]]
        count = struct.pack("<I", len(value) // size)
        return self._add_block(_Part(bytearray(count + bytes(value)), align=8 if size == 8 else 4, lead=4))

    def _add_block(self, block: _Part) -> _Part:
        self.blocks.append(block)
        return block


@functools.cache
def _shape_table(kind: str, present: frozenset[str]) -> _Shape:
    fields = [(slot, field) for slot, field in enumerate(SCHEMA[kind]) if field.name in present]
    sizes = {slot: NUMBER_SIZES.get(field.kind, 4) for slot, field in fields}
    order = sorted(sizes, key=lambda slot: (-sizes[slot], slot))
    eights = 8 in sizes.values()
    # One field of four bytes fills the gap after the leading offset; the others follow, the largest first, so that no
    # field needs a gap before it.
    first = next((slot for slot in order if sizes[slot] == 4), None)
    offsets: dict[int, int] = {} if first is None else {first: 4}
    cursor = 8 if eights or first is not None else 4
    for slot in order:
        if slot != first:
            offsets[slot] = cursor
            cursor += sizes[slot]
    size, align = cursor + -cursor % 4, 8 if eights else 4
    placed = tuple((offsets[slot], field) for slot, field in fields)
    slots = [offsets.get(slot, 0) for slot in range(max(offsets, default=-1) + 1)]
    # A vtable holds its own size, the table's size, and an offset for each slot; slots after the last field are left
    # out.
    vtable = struct.pack(f"<{2 + len(slots)}H", 4 + 2 * len(slots), size, *slots)
    return _Shape(fields=placed, size=size, align=align, vtable=vtable + bytes(-len(vtable) % 4))
