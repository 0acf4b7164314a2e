"""TOML files read into structs, and values written as JSON for reports, scripts and notebooks."""

import errno
import functools
import inspect
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import msgspec
import msgspec.inspect

from edgekit.errors import EdgekitError, UsageError, suggest_name

_T = TypeVar("_T")
# Far more than anybody writes by hand: a larger file is no TOML, and may have no end (/dev/zero).
_MOST_TOML_BYTES = 1 << 20
_SHELL_PIPES = Path("/dev/fd")
_READING, _READ = threading.Lock(), set[Any]()
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on JSON that is damaged, does not fit its type, or is nested too deep."""


def ready_type(kind: type[_T]) -> type[_T]:
    """Returns a type after msgspec has read its fields: whatever is decoded or converted has its type from here.

    msgspec 0.22 reads the fields of a struct when it first decodes one, and meanwhile other threads find only some of
    them: the process ends with a segmentation fault if two threads decode the same struct for the first time.
    """
    with _READING:
        if kind not in _READ:
            msgspec.json.Decoder(kind)
            _READ.add(kind)
    return kind


def fill(kind: type[_T], *sources: object, **given: Any) -> _T:
    """Returns a struct of type `kind`: each field is that `given`, else that of the first source with its name.

    `fill(CalibrationReport, calibration)` copies what both have. A field that nobody has is its default.
    """
    names = set(cast("Any", kind).__struct_fields__) - given.keys()
    found = {name: getattr(each, name) for each in reversed(sources) for name in names if hasattr(each, name)}
    return kind(**found, **given)


class NotebookPage:
    """Base of reports that a notebook cell shows as an HTML page; `draw_page` is the function that renders it."""

    __slots__ = ()
    draw_page: ClassVar[Callable[[object], str]] = repr

    def _repr_html_(self) -> str:
        return type(self).draw_page(self)


def read_own_toml(path: Path, kind: type[_T]) -> _T:
    """Returns the content of a TOML file that is a part of edgekit.

    Raises:
        UsageError: edgekit is damaged.
    """
    return read_toml(path, kind, hint="edgekit is damaged: install it anew")


def read_toml(
    path: Path,
    kind: type[_T],
    *,
    hint: str,
    keys: str | Callable[[str], str] = "",
    error: type[EdgekitError] = UsageError,
) -> _T:
    """Returns the content of a TOML file as a value of the type `kind`.

    Args:
        path: the file.
        kind: a struct, or a dict.
        hint: the hint if it cannot be read.
        keys: the hint if it is malformed, or a function that makes it from msgspec's message; by default the valid
            keys.
        error: the error to raise.

    Raises:
        EdgekitError: the file cannot be read, is no TOML, does not fit `kind`, is too large or nested too deep.
    """
    try:
        return _read_toml(path, kind)
    except OSError as fault:
        raise error(f"cannot read '{path}': {fault.strerror}", hint=hint) from fault
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        said = keys(str(fault)) if callable(keys) else keys
        named = ", ".join(getattr(kind, "__struct_fields__", ()))
        valid = name_valid(str(fault), kind)
        # A caller knows more of its keys, but not of the values that one takes.
        hint = said if said and "unknown field" in str(fault) else valid or said or f"the keys are {named}"
        raise error(f"'{path}' is malformed: {fault}", hint=hint) from fault


def _read_toml(path: Path, kind: type[_T]) -> _T:
    # A shell's <(command) is a pipe with a writer; opening any other pipe could wait forever.
    if path.is_fifo() and path.parent != _SHELL_PIPES:
        raise OSError(errno.EINVAL, "it is a pipe")
    with path.open("rb") as file:
        data = file.read(_MOST_TOML_BYTES + 1)
    if len(data) > _MOST_TOML_BYTES:
        raise msgspec.DecodeError(f"it is larger than {_MOST_TOML_BYTES} bytes")
    # A struct is frozen and can be cached; a dict could be changed by the caller.
    decode = _decode_once if hasattr(kind, "__struct_fields__") else _decode
    return cast("_T", decode(data, cast("Any", kind)))


def suggest_key(said: str, valid: Iterable[str], otherwise: str) -> str:
    """Returns a hint for the unknown key in msgspec's message `said`, or `otherwise` if the message is another."""
    unknown = re.search(r"unknown field `([^`]*)`", said)
    return suggest_name(unknown[1], valid) if unknown else otherwise


def name_valid(said: str, kind: Any) -> str:
    """Returns a hint with what is valid where msgspec says that a key or a value is none of a type, else "".

    `kind` is the type that was read, `said` the message, which has the path in it.
    """
    found = re.match(r"(?:Invalid enum value|Object contains unknown field `([^`]*)`).*?(?: - at `\$(.*)`)?$", said)
    if found is None:
        return ""
    here = [*_members(msgspec.inspect.type_info(kind))]
    for key in re.findall(r"\.(\w+)|\[", found[2] or ""):
        here = [member for outer in here for inner in _enter(outer, key) for member in _members(inner)]
    if found[1] is not None:
        structs = (each for each in here if isinstance(each, msgspec.inspect.StructType))
        return suggest_name(found[1], [field.encode_name for each in structs for field in each.fields])
    values: list[object] = []
    for each in here:
        match each:
            case msgspec.inspect.LiteralType():
                values += each.values
            case msgspec.inspect.EnumType():
                values += [member.value for member in each.cls]
            case _:
                pass
    return f"valid: {', '.join(map(str, dict.fromkeys(values)))}" if values else ""


def _members(kind: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    """Yields the members of a union, or the type itself if it is none."""
    if isinstance(kind, msgspec.inspect.UnionType):
        for member in kind.types:
            yield from _members(member)
    else:
        yield kind


def _enter(outer: msgspec.inspect.Type, key: str) -> Iterator[msgspec.inspect.Type]:
    """Yields the types of the field `key` of a type; of its items where the key is empty."""
    match outer:
        case msgspec.inspect.StructType():
            yield from (field.type for field in outer.fields if field.encode_name == key)
        case msgspec.inspect.DictType():
            yield outer.value_type
        case msgspec.inspect.VarTupleType():
            yield outer.item_type
        case _:
            pass


@functools.cache
def _list_members(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Returns the names of a struct's fields and of its public properties."""
    members = (member for base in reversed(kind.__mro__) for member in vars(base).items())
    properties = (name for name, it in members if isinstance(it, property) and not name.startswith("_"))
    return (*kind.__struct_fields__, *dict.fromkeys(properties))


def to_builtins(value: object) -> Any:
    """Returns a value as dicts, lists, strings and numbers, with the public properties of each struct written out.

    A number that JSON lacks (NaN, infinity) becomes None; reports count them where they may occur.
    """
    match value:
        case str() | int() | None:
            return msgspec.to_builtins(value)
        case msgspec.Struct():
            fields = {name: getattr(value, name) for name in _list_members(type(value))}
            return {name: to_builtins(field) for name, field in fields.items() if field is not msgspec.UNSET}
        case Mapping():
            items = cast("Mapping[object, object]", value)
            return {str(key): to_builtins(item) for key, item in items.items()}
        case tuple() | list():
            return [to_builtins(item) for item in cast("Sequence[object]", value)]
        case Path():
            return str(value)
        case float():
            return value if math.isfinite(value) else None
        case _:
            return msgspec.to_builtins(value)


def clean_schema(schema: Any) -> Any:
    """Returns a JSON Schema whose descriptions, which are docstrings, have no indentation.

    Python 3.13 removes it from docstrings, earlier versions keep it: the bytes of a schema must not depend on that.
    """
    match schema:
        case dict():
            return {
                key: inspect.cleandoc(value) if key == "description" and isinstance(value, str) else clean_schema(value)
                for key, value in schema.items()
            }
        case list():
            return [clean_schema(each) for each in schema]
        case _:
            return schema


def escape_controls(text: str) -> str:
    r"""Returns a text with its control characters written out, such as `\x1b` for ESC; newlines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else ascii(letter)[1:-1] for letter in text)


def to_json(value: object) -> str:
    """Returns a value as JSON for people and scripts: indented, with a newline at the end, keys in their own order."""
    return msgspec.json.format(msgspec.json.encode(to_builtins(value)), indent=2).decode() + "\n"


def _decode(data: bytes, kind: Any) -> object:
    try:
        return msgspec.toml.decode(data, type=ready_type(kind))
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deep") from error
    # Python refuses to read integers of more than 4,300 digits; msgspec's own errors are ValueErrors too.
    except ValueError as error:
        raise msgspec.DecodeError(" ".join(str(error).split())[:300]) from error


@functools.lru_cache(maxsize=64)
def _decode_once(data: bytes, kind: Any) -> object:
    """Decodes the same bytes only once: a build reads the rules of its target several times."""
    return _decode(data, kind)
