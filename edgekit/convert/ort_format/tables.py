"""Reads an ORT-format file into records; no byte of the file is trusted.

`schema.toml` defines the tables and what each of their slots holds.
"""

import contextlib
import mmap
import struct
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, cast

import msgspec

from edgekit.errors import ModelError


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
"""Which table a union holds, by the number in the slot before it."""

ROOT = "InferenceSession"

_SCALARS = frozenset({*NUMBER_SIZES, "string", "weights", "deprecated"})


def _read_field_kind(name: str, text: str) -> Field:
    """Returns a line of `schema.toml` as a field."""
    word, _, order = text.partition(" sorted by ")
    bare = word.strip("[]")
    kind = bare if bare in _SCALARS else "union" if bare in UNIONS else "table"
    of = "" if bare in _SCALARS else bare
    return Field(name, f"[{kind}]" if word.startswith("[") else kind, of, tuple(order.split(", ")) if order else ())


SCHEMA: Mapping[str, tuple[Field, ...]] = {
    table: tuple(_read_field_kind(name, text) for name, text in slots.items())
    for table, slots in msgspec.toml.decode(
        (Path(__file__).parent / "schema.toml").read_bytes(), type=dict[str, dict[str, str]]
    ).items()
}
"""The slots of every table, in order."""


Value: TypeAlias = "bytes | memoryview | Record | list[bytes] | list[Record]"
Record: TypeAlias = dict[str, Value]
"""The fields that are present in a table: numbers and vectors of numbers as raw bytes of the file, strings as bytes."""

IDENTIFIER = b"ORTM"
_MAX_DEPTH = 128
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
        """Counts tables and list items against the file's size: each occupies four bytes, unless a file shares them."""
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
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise ModelError(f"cannot read '{path}': {error.strerror}", hint="give the path of an .ort file") from error
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
