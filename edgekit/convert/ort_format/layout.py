"""Writes records as an ORT-format file; fixed rules determine the position of every byte.

Order: header; each distinct vtable once, sorted by its bytes; tables and vectors in the order of a walk from the root;
each distinct string once, sorted; weights in the order of the walk, aligned so that kernels can use them in place.
"""

import functools
import struct
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

import msgspec

from edgekit.convert.ort_format.tables import IDENTIFIER, NUMBER_SIZES, ROOT, SCHEMA, UNIONS, Field, Record, number
from edgekit.errors import ModelError

_MAX_BYTES = 2**31 - 1
_HEADER_BYTES = 8
_Link: TypeAlias = "int | bytes | _Blob"


class _Blob:
    """Weights, written last and directly from the source file's bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.start = 0


class _Block:
    """A table or a vector, with the positions of its offsets to later parts of the file.

    The first `lead` bytes come before the part that is aligned.
    """

    def __init__(self, content: bytearray, *, align: int, lead: int, vtable: bytes = b"") -> None:
        self.content = content
        self.align = align
        self.lead = lead
        self.vtable = vtable
        self.links: list[tuple[int, _Link]] = []
        self.start = 0


def write_tables(root: Record, path: Path) -> None:
    """Writes the records of a file in the given order.

    Raises:
        ModelError: the file would have 2 GB or more, which flatbuffers cannot address.
    """
    walk = _Walk()
    walk.add_table(root, ROOT)
    blocks, blobs = walk.blocks, walk.blobs
    cursor, vtables, strings = _HEADER_BYTES, dict[bytes, int](), dict[bytes, int]()
    for vtable in sorted({block.vtable for block in blocks if block.vtable}):
        vtables[vtable] = cursor
        cursor += len(vtable)
    for block in blocks:
        # Alignment is that of a vector's elements, not of the four bytes of its length before them.
        cursor += -(cursor + block.lead) % block.align
        block.start = cursor
        cursor += len(block.content)
    cursor += -cursor % 4
    for string in sorted({link for block in blocks for _, link in block.links if isinstance(link, bytes)}):
        strings[string] = cursor
        cursor += 4 + len(string) + 1
        cursor += -cursor % 4
    for blob in blobs:
        cursor += 4
        size = len(blob.data)
        # Weights are used in place (session.use_ort_model_bytes_for_initializers), and kernels load 64 bytes at a time.
        cursor += -cursor % (64 if size >= 64 else 16 if size >= 16 else 8)
        blob.start = cursor
        cursor += len(blob.data)
    if cursor > _MAX_BYTES:
        raise ModelError(f"'{path.name}' would have {cursor} bytes", hint="the ORT format ends at 2 GB: load the .onnx")
    with path.open("wb") as file:
        file.write(struct.pack("<I", blocks[0].start) + IDENTIFIER)
        file.writelines(vtables)
        for block in blocks:
            if block.vtable:
                # The offset to the vtable is signed and counts backwards; all other offsets are unsigned and point
                # forward.
                struct.pack_into("<i", block.content, 0, block.start - vtables[block.vtable])
            for offset, link in block.links:
                if isinstance(link, int):
                    target = blocks[link].start
                else:
                    target = strings[link] if isinstance(link, bytes) else link.start - 4
                struct.pack_into("<I", block.content, offset, target - block.start - offset)
            _pad_to(file, block.start)
            file.write(block.content)
        for string, place in strings.items():
            _pad_to(file, place)
            file.write(struct.pack("<I", len(string)) + string + b"\0")
        for blob in blobs:
            _pad_to(file, blob.start - 4)
            file.write(struct.pack("<I", len(blob.data)))
            file.write(blob.data)
        _pad_to(file, file.tell() + -file.tell() % 8)


class _Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The layout that tables with the same fields share: the offset of each field, in the order of slots."""

    fields: tuple[tuple[int, Field], ...]
    size: int
    align: int
    vtable: bytes


class _Walk:
    """Collects blocks and weights; a parent comes before the parts that it points to."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []
        self.blobs: list[_Blob] = []

    def add_table(self, record: Record, kind: str) -> int:
        shape = _shape_table(kind, frozenset(record))
        block = self._add_block(_Block(bytearray(shape.size), align=shape.align, lead=0, vtable=shape.vtable))
        index = len(self.blocks) - 1
        for offset, field in shape.fields:
            value = record[field.name]
            if field.kind in NUMBER_SIZES:
                block.content[offset : offset + NUMBER_SIZES[field.kind]] = cast("bytes", value)
            elif isinstance(value, dict):
                of = UNIONS[field.of][number(record, f"{field.name}_type")] if field.kind == "union" else field.of
                block.links.append((offset, self.add_table(value, of)))
            else:
                block.links.append((offset, value if isinstance(value, bytes) else self._add_vector(value, field)))
        return index

    def _add_vector(self, value: memoryview | list[bytes] | list[Record], field: Field) -> _Link:
        if isinstance(value, memoryview):
            if field.kind == "weights":
                self.blobs.append(_Blob(value))
                return self.blobs[-1]
            size = NUMBER_SIZES[field.kind[1:-1]]
            count = struct.pack("<I", len(value) // size)
            self._add_block(_Block(bytearray(count + bytes(value)), align=8 if size == 8 else 4, lead=4))
            return len(self.blocks) - 1
        block = self._add_block(_Block(bytearray(4 + 4 * len(value)), align=4, lead=0))
        index = len(self.blocks) - 1
        struct.pack_into("<I", block.content, 0, len(value))
        for place in range(len(value)):
            item = value[place]
            link = item if isinstance(item, bytes) else self.add_table(item, field.of)
            block.links.append((4 + 4 * place, link))
        return index

    def _add_block(self, block: _Block) -> _Block:
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


def _pad_to(file: BinaryIO, position: int) -> None:
    file.write(bytes(position - file.tell()))
