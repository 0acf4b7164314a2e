"""How a command says what it takes: the annotation of each parameter of its function is its option or argument.

    @as_command
    def command(
        model: Annotated[Path, Argument()], html: Annotated[Path | None, Option("Write a page.", "FILE")],
        progress: Progress,
    ) -> Answer:

The type says the rest: a `bool` is a flag, a `tuple` may be given several times, what may be `None` may be left out.
`Annotated[DeviceChoice, From(choose_devices)]` is what a function makes of the options that its own parameters name.
A command with the parameter `progress` has -v and -q; one that returns an `Answer` has --json.
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

from edgekit.cli.main import YES
from edgekit.cli.screen import show_json, showing_progress


class Answer(msgspec.Struct, frozen=True):
    """What a command found: the value that --json prints, the function that prints it for people, the exit code."""

    value: object
    show: Callable[[], object]
    code: int = YES


_Function = Callable[..., int | Answer]


class Argument:
    """An argument, in the place that it has among the parameters; what else click is told of it."""

    def __init__(self, **told: Any) -> None:
        self._told = told

    def make(self, name: str, hint: Any) -> click.Parameter:
        """Returns click's argument for a parameter of this name and type."""
        kind, optional, several = _read_type(hint)
        required = not (optional or "default" in self._told)
        known: dict[str, Any] = {"type": kind, "required": required, "nargs": -1 if several else 1}
        return click.Argument([name], **{**known, **self._told})


class _Number(click.FloatRange):
    # click's names of ranges would stand in a message: "'five' is not a valid float range".
    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        # Every comparison with NaN is false, so that a range lets it pass and no figure would ever miss it.
        if math.isnan(found):
            self.fail(f"'{value}' is no number", param, ctx)
        return found


class _Integer(click.IntRange):
    name = "integer"


class Option:
    """An option: its help, what stands for its value there, and its words where they are not the parameter's name.

    `within` are the least and the largest number that it takes.
    """

    def __init__(self, help_text: str | None, metavar: str | None = None, words: str = "", **told: Any) -> None:
        self._words, self._within = words.split(), told.pop("within", None)
        self._told: dict[str, Any] = {"help": help_text, "metavar": metavar, **told}

    def make(self, name: str, hint: Any) -> click.Parameter:
        """Returns click's option for a parameter of this name and type."""
        kind, optional, several = _read_type(hint)
        known: dict[str, Any] = {"type": kind, "multiple": several, "required": not (optional or several)}
        if self._within is not None:
            known["type"] = _Integer(*self._within) if kind is int else _Number(*self._within)
        # The type is that of what the callback returns, and says nothing of what is typed.
        if "callback" in self._told:
            known = {}
        elif kind is bool:
            known = {} if "default" in self._told else {"is_flag": True}
        elif {"default", "flag_value"} & self._told.keys():
            known["required"] = False
        return click.Option([*(self._words or [f"--{name.replace('_', '-')}"]), name], **{**known, **self._told})


class From:
    """What a function, or a class, makes of options: those that its parameters, or fields, are annotated with."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


def number(help_text: str, low: float, high: float | None = None, metavar: str = "X", **told: Any) -> Option:
    """Returns an option that takes a number between two, and refuses NaN."""
    return Option(help_text, metavar, within=(low, high), **told)


def as_command(function: _Function) -> click.Command:
    """Returns the command that calls a function with what its options mean."""
    return _make(function, None, None)


def subcommand(group: click.Group, name: str, line: str | None = None) -> Callable[[_Function], click.Command]:
    """Returns what adds a function to a group of commands; `line` is its help in one line, else its first sentence."""

    def add(function: _Function) -> click.Command:
        made = _make(function, name, line)
        group.add_command(made)
        return made

    return add


Json = Annotated[bool, Option("Print one JSON object on stdout.", words="--json")]
# Both options write one parameter, so that the last one given counts: -1, 0 or 1.
Volume = Annotated[
    int,
    Option("Say each step.", words="-v --verbose", flag_value=1, type=int, default=0),
    Option("No progress.", words="-q --quiet", flag_value=-1, type=int),
]


def _make(function: _Function, name: str | None, line: str | None) -> click.Command:
    hints = get_type_hints(function)
    answers, reports = hints["return"] is Answer, "progress" in hints
    shared = {**({"as_json": Json} if answers else {}), **({"volume": Volume} if reports else {})}

    def run(**values: Any) -> int:
        as_json = values.pop("as_json") if answers else False
        with showing_progress(values.pop("volume")) if reports else nullcontext() as progress:
            found = _call(function, values, **({"progress": progress} if reports else {}))
        if not isinstance(found, Answer):
            code: int = found
            return code
        show_json(found.value) if as_json else found.show()
        return found.code

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
            made = isinstance(mark, From)
            yield from _list_parameters(_read_annotations(mark.make)) if made else (mark.make(name, hint),)


def _call(function: Callable[..., Any], values: Mapping[str, Any], **given: Any) -> Any:
    for name, _, marks in _read_annotations(function):
        made = next((mark.make for mark in marks if isinstance(mark, From)), None)
        given[name] = values[name] if made is None else _call(made, values)
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
    """Returns what click makes a value of, whether it may be left out, and whether it may be given several times."""
    members = get_args(hint) if get_origin(hint) in {Union, types.UnionType} else (hint,)
    kind = next(one for one in members if one is not type(None))
    several = get_origin(kind) is tuple
    if several:
        kind = get_args(kind)[0]
    if kind is Path:
        return click.Path(path_type=Path), len(members) > 1, several
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind)), len(members) > 1, several
    is_plain = isinstance(kind, type) and issubclass(kind, str | int | float | bool)
    return kind if is_plain else None, len(members) > 1, several
