"""ORT-format files in one canonical order, so that one model has one sequence of bytes.

ONNX Runtime writes parts of the file in the order of a hash table that is seeded anew in each process. Here every list
without an order is sorted, and tables, vectors, strings and weights are laid out front to back by fixed rules.
"""

import filecmp
from pathlib import Path
from typing import cast

from edgekit._files import replacing_file, work_folder
from edgekit.convert.ort_format.layout import write_tables
from edgekit.convert.ort_format.mend import mend_saved
from edgekit.convert.ort_format.reorders import renumber_reorders
from edgekit.convert.ort_format.schema import ROOT, SCHEMA, UNIONS, Field
from edgekit.convert.ort_format.tables import Record, TableFile, Value, number, open_tables, text
from edgekit.errors import ModelError

CANONICAL_VERSION = 1
"""Grows with each change of the layout, since that changes every digest."""

KNOWN_FORMATS = ("5", "6")
# What is compared at once: small enough to stay in a CPU's cache, three times as fast as a MiB.
_CHUNK_BYTES = 1 << 16


def canonicalize_file(path: Path) -> None:
    """Rewrites an ORT-format file in canonical order, with saved optimisations that a session can replay.

    The file is read back and compared before it replaces the old.

    Raises:
        ModelError: the file is damaged, or of a format whose order is not known.
    """
    with open_tables(path) as file:
        _refuse_unknown(file, path)
        # Before sorting: what is written in must take its place in the order, too.
        mend_saved(file.root)
        root = sort_tables(file.root, ROOT)
        with replacing_file(path) as temporary:
            write_tables(root, temporary)
            with open_tables(temporary) as written:
                if not _same_value(written.root, root):
                    raise ModelError(f"'{path}' changed while it was put in order", hint="report this as a bug")


def is_canonical(path: Path) -> bool:
    """Returns True if an ORT-format file is in canonical order, byte for byte.

    Raises:
        ModelError: the file is damaged.
    """
    with open_tables(path) as file, work_folder() as work:
        if file.unknown or text(file.root, "ort_version") not in KNOWN_FORMATS:
            return False
        write_tables(sort_tables(file.root, ROOT), work / "sorted.ort")
        return filecmp.cmp(path, work / "sorted.ort", shallow=False)


def sort_tables(record: Record, kind: str) -> Record:
    """Returns a table with every list that has no order sorted by its key, all the way down."""
    fields = {field.name: field for field in SCHEMA[kind]}
    # Node indices of x64 files come from a hash table, too, and everything that is sorted below refers to them.
    numbered = renumber_reorders(record) if kind == "Graph" else record
    return {name: _sort_value(value, fields[name], record) for name, value in numbered.items()}


def _sort_value(value: Value, field: Field, record: Record) -> Value:
    if isinstance(value, dict):
        union = field.kind == "union"
        return sort_tables(value, UNIONS[field.of][number(record, f"{field.name}_type")] if union else field.of)
    if field.kind != "[table]":
        return value
    items = [sort_tables(item, field.of) for item in cast("list[Record]", value)]
    # `sorted` is stable: records whose keys are equal keep the order that ONNX Runtime gave them.
    return sorted(items, key=lambda item: _sort_key(item, field)) if field.key else items


def _sort_key(record: Record, field: Field) -> tuple[bytes | int, ...]:
    return tuple(_key_part(record, path, field.of) for path in field.key)


def _key_part(record: Record, path: str, kind: str) -> bytes | int:
    head, _, tail = path.partition(".")
    field = next(field for field in SCHEMA[kind] if field.name == head)
    if tail:
        return _key_part(cast("Record", record.get(head, {})), tail, field.of)
    return cast("bytes", record.get(head, b"")) if field.kind == "string" else number(record, head)


def _refuse_unknown(file: TableFile, path: Path) -> None:
    version = text(file.root, "ort_version")
    if version not in KNOWN_FORMATS:
        raise ModelError(
            f"'{path}' has ORT format version '{version}', whose order is not known",
            hint=f"known: {', '.join(KNOWN_FORMATS)}; convert it with ONNX Runtime 1.31",
        )
    if file.unknown:
        names = ", ".join(sorted(file.unknown))
        raise ModelError(f"'{path}' holds tables that are not known: {names}", hint="use ONNX Runtime 1.31")


def _same_value(left: Value, right: Value) -> bool:
    match left, right:
        case dict(), dict():
            return left.keys() == right.keys() and all(_same_value(value, right[name]) for name, value in left.items())
        case list(), list():
            return len(left) == len(right) and all(map(_same_value, left, right))
        case memoryview(), memoryview():
            return len(left) == len(right) and all(
                bytes(left[start : start + _CHUNK_BYTES]) == bytes(right[start : start + _CHUNK_BYTES])
                for start in range(0, len(left), _CHUNK_BYTES)
            )
        case _:
            return left == right
