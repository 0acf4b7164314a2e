"""A check of the argument types of public functions, with an error of one line."""

import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from edgekit.errors import UsageError

_LISTS = (Sequence, Collection)


def check_kinds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a public function: refuses arguments that are not the struct, list, dict or text that is due.

    Passing "cpu" for a Target then raises a UsageError, not an AttributeError from inside.
    """
    signature, hints = inspect.signature(function), typing.get_type_hints(function)
    kinds = {name: found for name in signature.parameters if (found := _list_kinds(hints.get(name)))}
    lists = {name: typing.get_args(hint)[0] for name, hint in hints.items() if typing.get_origin(hint) in _LISTS}

    @functools.wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        for name, value in signature.bind(*given, **named).arguments.items():
            wanted = kinds.get(name, ())
            if wanted and not isinstance(value, wanted):
                kind = wanted[0].__name__
                hint = f"help(edgekit.{function.__name__}) says what it takes"
                if issubclass(wanted[0], msgspec.Struct):
                    hint = f"what makes one: help(edgekit.{kind})"
                words = f"{function.__name__} wants a {kind} as '{name}', and was given {value!r:.60}"
                raise UsageError(words, hint=hint)
            if name in lists:
                _check_list(function.__name__, name, value, _list_kinds(lists[name]))
        return function(*given, **named)

    return checked


def _check_list(function: str, name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if isinstance(value, str | os.PathLike):
        problem, hint = f"{value!r:.60}", f"[{value!r:.60}] is a list of one"
    elif kinds and isinstance(value, Sequence) and (other := [one for one in value if not isinstance(one, kinds)]):
        problem, hint = f"{other[0]!r:.60} in it", f"it holds a {kinds[0].__name__} each"
    else:
        return
    raise UsageError(f"{function} wants a list as '{name}', and was given {problem}", hint=hint)


def _list_kinds(hint: Any) -> tuple[type, ...]:
    """Returns the types that a type hint allows if all are structs, mappings, texts or None, else ()."""
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    members = [typing.get_origin(one) or one for one in hints]
    structs = [one for one in members if isinstance(one, type) and issubclass(one, msgspec.Struct | Mapping | str)]
    others = [one for one in members if one not in structs and one is not types.NoneType]
    return () if others or not structs else (*structs, *(one for one in members if one is types.NoneType))
