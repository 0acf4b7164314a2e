"""Declares commands: the annotation of each parameter of a function is the command's option or argument.

    @as_command
    def command(
        model: Annotated[Path, Argument()], html: Annotated[Path | None, Option("Write a page.", "FILE")],
        progress: Progress,
    ) -> Answer:

The type says the rest: a `bool` is a flag, a `tuple` may be given several times, a type with `None` is optional.
`Annotated[DeviceChoice, From(choose_devices)]` is the result of a function, whose parameters are options too. A command
with the parameter `progress` has -v and -q; one that returns an `Answer` has --json.
"""

import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import msgspec

from edgekit.cli.main import NO, UNPROVEN, YES
from edgekit.cli.screen import show_json, showing_progress
from edgekit.evidence import Verdict

_CODES: dict[Verdict | bool, int] = {"pass": YES, True: YES, "fail": NO, False: NO, "not proven": UNPROVEN}


class Answer(msgspec.Struct, frozen=True):
    """The result of a command: the value that --json prints, the function that prints it as text, and its verdict.

    The verdict gives the exit code; with `accept_unproven`, "not proven" counts as a pass.
    """

    value: object
    show: Callable[[], object]
    verdict: Verdict | bool = True
    accept_unproven: bool = False


def exit_code(verdict: Verdict | bool, *, accept_unproven: bool) -> int:
    """Returns the exit code of a verdict; "not proven" gives UNPROVEN, or YES if the user accepts that."""
    return YES if accept_unproven and verdict == "not proven" else _CODES[verdict]


_Function = Callable[..., int | Answer | None]


class Argument:
    """A positional argument; `settings` are further parameters of `click.Argument`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def make(self, name: str, hint: Any) -> click.Parameter:
        """Returns click's argument for a parameter of this name and type."""
        kind, optional, several = _read_type(hint)
        required = not (optional or "default" in self._settings)
        known: dict[str, Any] = {"type": kind, "required": required, "nargs": -1 if several else 1}
        return click.Argument([name], **{**known, **self._settings})


class _Number(click.FloatRange):
    # Replaces click's name in messages: "'five' is not a valid float range".
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        # A range accepts NaN, because every comparison with it is false; as a limit it would never fail.
        if math.isnan(found):
            self.fail(f"'{value}' is no number", param, ctx)
        return found


class _Integer(click.IntRange):
    name = "integer"


class Option:
    """An option: its help, the placeholder of its value, and its words ("-q --quiet") if not the parameter's name.

    `within` is the pair of the smallest and the largest number allowed; other `settings` go to `click.Option`.
    """

    def __init__(self, help_text: str | None, metavar: str | None = None, words: str = "", **settings: Any) -> None:
        self._words, self._within = words.split(), settings.pop("within", None)
        self._settings: dict[str, Any] = {"help": help_text, "metavar": metavar, **settings}

    def make(self, name: str, hint: Any) -> click.Parameter:
        """Returns click's option for a parameter of this name and type."""
        kind, optional, several = _read_type(hint)
        known: dict[str, Any] = {"type": kind, "multiple": several, "required": not (optional or several)}
        if self._within is not None:
            known["type"] = _Integer(*self._within) if kind is int else _Number(*self._within)
        # The annotated type is that of the callback's result, not of the text on the command line.
        if "callback" in self._settings:
            known = {}
        elif kind is bool:
            known = {} if "default" in self._settings else {"is_flag": True}
        elif {"default", "flag_value"} & self._settings.keys():
            known["required"] = False
        return click.Option([*(self._words or [f"--{name.replace('_', '-')}"]), name], **{**known, **self._settings})


class From:
    """Marks a parameter whose value a function (or class) makes from the options that annotate its own parameters."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


def number(help_text: str, low: float, high: float | None = None, metavar: str = "X", **settings: Any) -> Option:
    """Returns an option that takes a number from `low` to `high`, but not NaN."""
    return Option(help_text, metavar, within=(low, high), **settings)


def as_command(function: _Function) -> click.Command:
    """Returns the command that calls a function with the values of its options."""
    return _make(function, None, None)


def subcommand(group: click.Group, name: str, line: str | None = None) -> Callable[[_Function], click.Command]:
    """Returns a decorator that adds a command to a group; `line` is its short help, by default the first sentence."""

    def add(function: _Function) -> click.Command:
        command = _make(function, name, line)
        group.add_command(command)
        return command

    return add


Json = Annotated[bool, Option("Print one JSON object on stdout.", words="--json")]
# Both options write one parameter, so that the last one given counts: -1, 0 or 1.
Volume = Annotated[
    int,
    Option(
        "Say each step; else a log gets a line each minute.", words="-v --verbose", flag_value=1, type=int, default=0
    ),
    Option("No progress.", words="-q --quiet", flag_value=-1, type=int),
]


def _make(function: _Function, name: str | None, line: str | None) -> click.Command:
    hints = get_type_hints(function)
    returns_answer, shows_progress = hints["return"] is Answer, "progress" in hints
    shared = {**({"as_json": Json} if returns_answer else {}), **({"volume": Volume} if shows_progress else {})}

    def run(**values: Any) -> int | None:
        as_json = values.pop("as_json") if returns_answer else False
        with showing_progress(values.pop("volume")) if shows_progress else nullcontext() as progress:
            found = _call(function, values, **({"progress": progress} if shows_progress else {}))
        if not isinstance(found, Answer):
            code: int | None = found
            return code
        show_json(found.value) if as_json else found.show()
        return exit_code(found.verdict, accept_unproven=found.accept_unproven)

    return click.Command(
        name,
        callback=run,
        params=[*_list_parameters(_read_annotations(function)), *_list_parameters(_read_marks(shared))],
        help=inspect.cleandoc(function.__doc__ or ""),
        short_help=line,
    )


_Annotations = Iterator[tuple[str, Any, tuple[Any, ...]]]


def _list_parameters(annotations: _Annotations) -> Iterator[click.Parameter]:
    for name, hint, marks in annotations:
        for mark in marks:
            is_nested = isinstance(mark, From)
            yield from _list_parameters(_read_annotations(mark.make)) if is_nested else (mark.make(name, hint),)


def _call(function: Callable[..., Any], values: Mapping[str, Any], **given: Any) -> Any:
    for name, _, marks in _read_annotations(function):
        builder = next((mark.make for mark in marks if isinstance(mark, From)), None)
        given[name] = values[name] if builder is None else _call(builder, values)
    return function(**given)


def _read_annotations(function: Callable[..., Any]) -> _Annotations:
    """Returns name, type and marks of each annotated parameter of a function, or field of a class."""
    return _read_marks(get_type_hints(function, include_extras=True))


def _read_marks(hints: Mapping[str, Any]) -> _Annotations:
    for name, hint in hints.items():
        marks = tuple(mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Argument | Option | From))
        if marks:
            yield name, get_args(hint)[0], marks


def _read_type(hint: Any) -> tuple[Any, bool, bool]:
    """Returns click's type for an annotation, whether the value is optional, and whether it may be repeated."""
    members = get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)
    kind = next(one for one in members if one is not type(None))
    several = get_origin(kind) is tuple
    if several:
        kind = get_args(kind)[0]
    if kind is Path:
        return click.Path(path_type=Path), len(members) > 1, several
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind)), len(members) > 1, several
    is_scalar = isinstance(kind, type) and issubclass(kind, str | int | float | bool)
    return kind if is_scalar else None, len(members) > 1, several
