"""Where a key stands in a TOML file: readers of TOML give values and no places."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from edgekit.errors import UsageError, suggest_name

_Value = TypeVar("_Value")

FILE = "edgekit.toml"

Place = tuple[str, ...]
"""A key with those of the tables that it lies in."""

_WORD = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")


def find_position(text: str, place: Place) -> tuple[int, int]:
    """Returns line and column, from 1, of a key, or of the nearest table above it that the text names."""
    known: dict[Place, tuple[int, int]] = {}
    for names, spot in _list_keys(text):
        known[names] = spot
        for end in range(1, len(names)):
            known.setdefault(names[:end], spot)
    lines = text.splitlines()
    for end in range(len(place), 0, -1):
        found = known.get(place[:end])
        if found is None:
            continue
        line, column = found
        if end < len(place):
            # In an inline table: the next key stands behind the one that was found.
            inner = re.search(rf"[{{,]\s*[\"']?({re.escape(place[end])})[\"']?\s*=", lines[line - 1][column - 1 :])
            column += inner.start(1) if inner else 0
        return line, column
    return 1, 1


def refuse_at(path: Path, text: str, place: Place, said: str, *, hint: str) -> UsageError:
    """Returns the error that says of a key of a file, with its line and column, what is wrong."""
    line, column = find_position(text, place)
    where = f"'{path}', line {line}, column {column}"
    return UsageError(f"{where}: {'.'.join(place)}: {said}" if place else f"{where}: {said}", hint=hint)


def _list_keys(text: str) -> Iterator[tuple[Place, tuple[int, int]]]:
    """Yields the keys and headers of a text; of tables in a row (`[[a]]`) the last counts."""
    table: Place = ()
    quote = ""
    for number, line in enumerate(text.splitlines(), start=1):
        # What looks like a key inside a text of several lines is none.
        if quote:
            quote = "" if quote in line else quote
            continue
        column = len(line) - len(line.lstrip()) + 1
        bare = line.strip()
        if bare.startswith("["):
            table = _split(bare.strip("[]"))[0]
            yield table, (number, column)
        elif bare and not bare.startswith("#"):
            names, end = _split(bare)
            if names and bare[end : end + 1] == "=":
                yield (*table, *names), (number, column)
                quote = next((mark for mark in ('"""', "'''") if bare.count(mark) == 1), "")


def _split(text: str) -> tuple[Place, int]:
    """Returns a dotted key at the beginning of a text, and where it ends."""
    names: list[str] = []
    at = 0
    while found := _WORD.match(text, at):
        names.append(next(group for group in found.groups() if group is not None))
        at = found.end()
        if text[at : at + 1] != ".":
            break
        at += 1
    return tuple(names), at


def convert_at(value: object, kind: type[_Value], place: Place, path: Path, text: str) -> _Value:
    """Returns a table of the file as a struct.

    Raises:
        UsageError: it has an unknown key or a value of the wrong type, which is named with its line and column.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said, _, where = str(error).partition(" - at `$")
        unknown = re.search(r"unknown field `([^`]*)`", said)
        inner = tuple(re.findall(r"\.([^.\[`]+)", where.replace("[...]", ""))) + ((unknown[1],) if unknown else ())
        fields = getattr(kind, "__struct_encode_fields__", ())
        hint = (
            suggest_name(unknown[1], fields) if unknown and not where.strip("`") else "edgekit schema prints the keys"
        )
        raise refuse_at(path, text, (*place, *inner), said, hint=hint) from error


def require_name(name: str, known: Mapping[str, object], what: str, place: Place, path: Path, text: str) -> None:
    """Refuses the name of something that the file has not.

    Raises:
        UsageError: there is no such name.
    """
    if name not in known:
        raise refuse_at(path, text, place, f"the file has no {what} '{name}'", hint=suggest_name(name, known))
