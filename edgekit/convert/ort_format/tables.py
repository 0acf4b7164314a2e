"""Reads an ORT-format file (flatbuffers) into records, without trusting any byte, and writes records to such a file.

`schema.toml` defines the tables and their slots.
"""

import contextlib
import functools
import mmap
import struct
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, cast

import msgspec

from edgekit.errors import ModelError, reading
from edgekit.serialize import ready_type


class Field(msgspec.Struct, frozen=True):
    """A slot of a table.

    `kind` is "string", "table", "union", "weights", "deprecated", or the struct code of a number; a kind in brackets is
    a vector of it. `of` names the table or union. `key` holds the paths of the fields by which a vector is sorted.
    """

    name: str
    kind: str
    of: str = ""
    key: tuple[str, ...] = ()


NUMBER_SIZES = {"b": 1, "B": 1, "?": 1, "i": 4, "I": 4, "f": 4, "q": 8, "edge": 12}
"""The size of each kind of number in bytes; `edge` is the struct EdgeEnd (node index, source and destination slot)."""

UNIONS = {"TypeInfoValue": {1: "TensorTypeAndShape", 2: "SequenceType", 3: "MapType"}}
"""The tables that a union may hold, by the number in the slot before it."""

ROOT = "InferenceSession"

_SCALARS = frozenset({*NUMBER_SIZES, "string", "weights", "deprecated"})


def _read_field_kind(name: str, text: str) -> Field:
    """Returns a field from its line in `schema.toml`, for example `[Tensor] sorted by name`."""
    word, _, order = text.partition(" sorted by ")
    bare = word.strip("[]")
    kind = bare if bare in _SCALARS else "union" if bare in UNIONS else "table"
    of = "" if bare in _SCALARS else bare
    return Field(name, f"[{kind}]" if word.startswith("[") else kind, of, tuple(order.split(", ")) if order else ())


SCHEMA: Mapping[str, tuple[Field, ...]] = {
    table: tuple(_read_field_kind(name, text) for name, text in slots.items())
    for table, slots in msgspec.toml.decode(
        (Path(__file__).parent / "schema.toml").read_bytes(), type=ready_type(dict[str, dict[str, str]])
    ).items()
}
"""The slots of every table, in order."""


Value: TypeAlias = "bytes | memoryview | Record | list[bytes] | list[Record]"
Record: TypeAlias = dict[str, Value]
"""The fields that are present in a table; numbers and vectors of numbers are raw bytes of the file, strings bytes."""

IDENTIFIER = b"ORTM"
_MAX_DEPTH = 128
_MAX_RANK = 1024
_UINT32 = struct.Struct("<I")


class TableFile:
    """An ORT-format file as records that point into its bytes.

    `unknown` names the slots that this reader has no field for: those of a newer format, and deprecated ones.
    """

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name
        self._strings: dict[int, bytes] = {}
        self._vtables: dict[tuple[int, str], list[tuple[int, Field]]] = {}
        self._parts = 0
        self.unknown: set[str] = set()
        if len(data) < 8 or bytes(data[4:8]) != IDENTIFIER:
            raise self._broken("it does not begin like one")
        self.root = self._read_table(self._offset(0), ROOT, 0)

    def _broken(self, reason: str) -> ModelError:
        return ModelError(f"'{self._name}' is no whole ORT-format file: {reason}", hint="convert the .onnx model again")

    def _spend(self, parts: int) -> None:
        """Refuses files with more tables and list items than bytes for them: a malicious file may share parts."""
        self._parts += parts
        if self._parts > len(self._data) // 4:
            raise self._broken("its tables share parts")

    def _bytes(self, position: int, size: int) -> memoryview:
        if position < 0 or position + size > len(self._data):
            raise self._broken(f"it points at byte {position + size} of {len(self._data)}")
        return self._data[position : position + size]

    def _uint32(self, position: int) -> int:
        if position + 4 > len(self._data):
            raise self._broken(f"it points at byte {position + 4} of {len(self._data)}")
        return cast("int", _UINT32.unpack_from(self._data, position)[0])

    def _offset(self, position: int) -> int:
        return position + self._uint32(position)

    def _read_table(self, position: int, kind: str, depth: int) -> Record:
        if depth > _MAX_DEPTH:
            raise self._broken("its tables are nested too deeply")
        self._spend(1)
        vtable = position - int.from_bytes(self._bytes(position, 4), "little", signed=True)
        # Many tables may share a vtable, which holds the offsets of their fields.
        if (vtable, kind) not in self._vtables:
            count = max(int.from_bytes(self._bytes(vtable, 2), "little") - 4, 0) // 2
            slots = struct.unpack(f"<{count}H", self._bytes(vtable + 4, count * 2))
            fields, present = SCHEMA[kind], list[tuple[int, Field]]()
            for index, slot in enumerate(slots):
                if slot and (index >= len(fields) or fields[index].kind == "deprecated"):
                    self.unknown.add(f"{kind}.{fields[index].name if index < len(fields) else index}")
                elif slot:
                    present.append((slot, fields[index]))
            self._vtables[vtable, kind] = present
        record: Record = {}
        for slot, field in self._vtables[vtable, kind]:
            record[field.name] = self._read_field(position + slot, field, record, depth + 1)
        return record

    def _read_field(self, position: int, field: Field, record: Record, depth: int) -> Value:
        if field.kind in NUMBER_SIZES:
            return bytes(self._bytes(position, NUMBER_SIZES[field.kind]))
        target = self._offset(position)
        if field.kind == "string":
            return self._read_string(target)
        if field.kind in ("table", "union"):
            kind = field.of
            if field.kind == "union":
                tag = number(record, f"{field.name}_type")
                if tag not in UNIONS[field.of]:
                    raise self._broken(f"it holds a value of unknown kind {tag}")
                kind = UNIONS[field.of][tag]
            return self._read_table(target, kind, depth)
        count = self._uint32(target)
        element = "B" if field.kind == "weights" else field.kind[1:-1]
        data = self._bytes(target + 4, count * NUMBER_SIZES.get(element, 4))
        if element in NUMBER_SIZES:
            return data
        self._spend(count)
        # A model of 200 bytes may have such a shape, and reading and sorting its parts took half a minute.
        if field.of == "Dimension" and count > _MAX_RANK:
            words = f"the model has a tensor of {count} dimensions, and edgekit reads at most {_MAX_RANK} in ORT format"
            raise ModelError(words, hint="look for a wrong Reshape in the model")
        places = [self._offset(target + 4 + 4 * index) for index in range(count)]
        if element == "string":
            return [self._read_string(place) for place in places]
        return [self._read_table(place, field.of, depth) for place in places]

    def _read_string(self, position: int) -> bytes:
        if position not in self._strings:
            self._strings[position] = bytes(self._bytes(position + 4, self._uint32(position)))
        return self._strings[position]


@contextlib.contextmanager
def open_tables(path: Path) -> Generator[TableFile]:
    """Yields an ORT-format file as records; they are valid only inside the block.

    Raises:
        ModelError: the file is missing, cut off, altered, or no ORT-format file.
    """
    with reading(f"'{path}'", ModelError, "give the path of an .ort file"), path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
    yield TableFile(memoryview(data), str(path))


def text(record: Record, name: str) -> str:
    """Returns a string field as text, empty if it is absent."""
    return cast("bytes", record.get(name, b"")).decode(errors="replace")


def number(record: Record, name: str) -> int:
    """Returns an integer field, zero if it is absent."""
    return int.from_bytes(cast("bytes", record.get(name, b"")), "little", signed=False)


def texts(record: Record, name: str) -> list[str]:
    """Returns a list of strings as text."""
    return [item.decode(errors="replace") for item in cast("list[bytes]", record.get(name, []))]


def records(record: Record, name: str) -> list[Record]:
    """Returns a list of tables, empty if it is absent."""
    return cast("list[Record]", record.get(name, []))


def table(record: Record, name: str) -> Record:
    """Returns a table field, a table without fields if it is absent."""
    return cast("Record", record.get(name, {}))


def iterate_graphs(graph: Record) -> Iterator[Record]:
    """Yields a graph and, depth first, the subgraphs of its control-flow nodes."""
    yield graph
    for node in records(graph, "nodes"):
        for attribute in records(node, "attributes"):
            for body in (table(attribute, "g"), *records(attribute, "graphs")):
                if body:
                    yield from iterate_graphs(body)


# The order of a written file: the header; each distinct vtable once, sorted by its bytes; tables and vectors in the
# order of a depth-first walk from the root; each distinct string once, sorted; weights in the order of the walk,
# aligned so that kernels can use them in place.
_MAX_BYTES = 2**31 - 1
_HEADER_BYTES = 8


class _Part(msgspec.Struct, eq=False):
    """A vtable, table, vector, string or weights, with the positions of its offsets to other parts (`links`).

    The bytes after the first `lead` are aligned. `data` are written after `content`: weights need not be copied.
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


class _Walk:
    """Collects the parts of a file, each before the tables, vectors and weights that it points to."""

    def __init__(self) -> None:
        self.vtables: dict[bytes, _Part] = {}
        self.blocks: list[_Part] = []
        self.strings: dict[bytes, _Part] = {}
        self.weights: list[_Part] = []

    def add_table(self, record: Record, kind: str) -> _Part:
        fields, size, align, vtable = _lay_out(kind, frozenset(record))
        block = self._add_block(_Part(bytearray(size), align=align))
        block.links.append((0, self.vtables.setdefault(vtable, _Part(bytearray(vtable)))))
        for offset, field in fields:
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
            # They may be used in place (session.use_ort_model_bytes_for_initializers), by kernels that load 64 bytes.
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
def _lay_out(kind: str, present: frozenset[str]) -> tuple[tuple[tuple[int, Field], ...], int, int, bytes]:
    """Returns what tables with the same fields share: offsets and fields by slot, size, alignment, vtable."""
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
    return placed, size, align, vtable + bytes(-len(vtable) % 4)
