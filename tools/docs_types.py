"""Describes the values of a struct's field in words, for the reference pages."""

import enum
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    Path: "path",
    Any: "anything",
    object: "anything",
}
_BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


def type_hints(kind: Any) -> dict[str, Any]:
    """Returns the annotations of a struct or a function, with their constraints."""
    return typing.get_type_hints(kind, include_extras=True)


def describe_type(hint: Any, *, links: bool) -> str:
    """Returns the type of a field in words; a struct by its name, which links to its table on the same page."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is typing.Annotated:
        return " ".join((describe_type(parts[0], links=links), *_describe_bounds(parts[1:])))
    if origin in {Union, types.UnionType}:
        return " or ".join(describe_type(part, links=links) for part in parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {describe_type(parts[1], links=links)}"
    if isinstance(origin, type) and issubclass(origin, Sequence | frozenset):
        return _describe_sequence(parts, links=links)
    return _describe_plain(hint, links=links)


def _describe_plain(hint: Any, *, links: bool) -> str:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})" if links else f"`{hint.__name__}`"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _describe_sequence(parts: tuple[Any, ...], *, links: bool) -> str:
    if parts[-1:] == (Ellipsis,) or len(parts) == 1:
        return f"list of {describe_type(parts[0], links=links)}"
    return f"[{', '.join(describe_type(part, links=links) for part in parts)}]"


def _describe_bounds(constraints: Sequence[object]) -> list[str]:
    found = [one for one in constraints if isinstance(one, msgspec.Meta)]
    return [
        words.format(f"{getattr(meta, key):g}")
        for meta in found
        for key, words in _BOUNDS.items()
        if getattr(meta, key) is not None
    ]


def describe_default(field: msgspec.structs.FieldInfo) -> str:
    """Returns the default of a field as JSON, "" if there is none and the field is required."""
    if field.required:
        return ""
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    text = msgspec.json.encode(msgspec.to_builtins(value, enc_hook=str)).decode()
    return f"`{text}`" if len(text) <= 30 else "see its table"


def list_properties(kind: type) -> dict[str, Any]:
    """Returns the types of a value's properties, by name: they are written into its JSON too."""
    found = {
        name: member
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, property) and not name.startswith("_")
    }
    return {name: type_hints(member.fget).get("return", object) for name, member in found.items()}


def find_structs(roots: Sequence[type], *, computed: bool) -> list[type]:
    """Returns each struct in the fields of some structs, at any depth; with `computed` also in their properties."""
    found: dict[type, None] = {}
    waiting: list[Any] = list(roots)
    while waiting:
        hint = waiting.pop()
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in found:
            found[hint] = None
            waiting += type_hints(hint).values()
            waiting += list_properties(hint).values() if computed else ()
        waiting += get_args(hint)
    return list(found)
