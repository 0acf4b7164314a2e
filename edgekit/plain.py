"""Values as plain data: what JSON, reports and people read."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec


def to_plain(value: object) -> Any:
    """Returns a value as dicts, lists, strings and numbers, with the public properties of each struct written out.

    A number that JSON cannot hold (NaN, infinity) becomes None; the reports count such numbers where they occur.
    """
    match value:
        case msgspec.Struct():
            names = (*value.__struct_fields__, *_property_names(type(value)))
            return {name: to_plain(getattr(value, name)) for name in names}
        case Mapping():
            items = cast("Mapping[object, object]", value)
            return {str(key): to_plain(item) for key, item in items.items()}
        case tuple() | list():
            return [to_plain(item) for item in cast("Sequence[object]", value)]
        case Path():
            return str(value)
        case float():
            return value if math.isfinite(value) else None
        case _:
            return msgspec.to_builtins(value)


def escape_controls(text: str) -> str:
    r"""Returns a text with what a terminal would obey written out: `\x1b` for ESC; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text)


def to_json(value: object) -> str:
    """Returns a value as JSON for people and scripts: indented, with a newline at the end, keys in their own order."""
    return msgspec.json.format(msgspec.json.encode(to_plain(value)), indent=2).decode() + "\n"


def _property_names(kind: type) -> list[str]:
    return [
        name
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, property) and not name.startswith("_")
    ]
