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
            if name not in lists:
                continue
            within = _list_kinds(lists[name])
            each = value if within and isinstance(value, Sequence) else ()
            if isinstance(value, str | os.PathLike):
                problem, hint = f"{value!r:.60}", f"[{value!r:.60}] is a list of one"
            elif others := [it for it in each if not isinstance(it, within)]:
                problem, hint = f"{others[0]!r:.60} in it", f"it holds a {within[0].__name__} each"
            else:
                continue
            words = f"{function.__name__} wants a list as '{name}', and was given {problem}"
            raise UsageError(words, hint=hint)
        return function(*given, **named)

    return checked


def _list_kinds(hint: Any) -> tuple[type, ...]:
    """Returns the types that a type hint allows if all are structs, mappings, texts or None, else ()."""
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    members = [typing.get_origin(one) or one for one in hints]
    structs = [one for one in members if isinstance(one, type) and issubclass(one, msgspec.Struct | Mapping | str)]
    others = [one for one in members if one not in structs and one is not types.NoneType]
    return () if others or not structs else (*structs, *(one for one in members if one is types.NoneType))
