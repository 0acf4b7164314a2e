"""Functions with which every command prints: the result on stdout, progress and notes on stderr."""

import contextlib
import sys
import time
from collections.abc import Generator, Iterable
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.text import Text

from edgekit.progress import Progress, say_nothing
from edgekit.serialize import escape_controls, to_json

QUIET_S = 60.0
"""For so long a command says nothing in a log: a choice. Whoever ends a long build finds there how far it was."""


class _Screen(Console):
    """A console that prints names from models literally: without markup, emoji and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_controls(text), **options)


def show_json(value: object) -> None:
    """Prints one value as JSON on stdout."""
    click.echo(to_json(value), nl=False)


def show_line(line: str, *, aside: bool = False) -> None:
    """Prints a line on stdout, or with `aside` on stderr, if it is not part of the result."""
    click.echo(escape_controls(line), err=aside)


def show_lines(lines: Iterable[str]) -> None:
    """Prints lines on stdout."""
    for line in lines:
        show_line(line)


def show_remarks(remarks: Iterable[object]) -> None:
    """Prints remarks on stdout, each behind a dash."""
    for remark in remarks:
        show_line(f"- {remark}")


@contextlib.contextmanager
def showing_progress(volume: int) -> Generator[Progress]:
    """Yields a function that shows the current step in one line; with -v each step has a line, with -q none.

    Where there is no terminal, such as in the log of a CI job, a line is written at most every QUIET_S seconds.
    """
    console, start, shown = _Screen(stderr=True), time.monotonic(), 0.0

    def show_seldom(step: str) -> None:
        nonlocal shown
        if (passed := time.monotonic() - start) >= shown + QUIET_S:
            shown = passed
            console.print(f"after {passed:.0f} s: {step}", style="dim")

    # -v is for logs, so the lines stay.
    if volume > 0:
        yield lambda step: console.print(step, style="dim")
    elif volume < 0:
        yield say_nothing
    # In a log the spinner would write many lines.
    elif not sys.stderr.isatty():
        yield show_seldom
    else:
        with console.status("") as status:
            # A spinner interprets markup in a string, also on this console.
            yield lambda step: status.update(Text(escape_controls(step)))


def print_table(*tables: RenderableType) -> None:
    """Prints tables, as wide as the terminal."""
    # Without a terminal, rich would wrap the rows of a log at 80 columns; in a narrow one it cuts words to letters.
    width = max(80, _Screen().width) if sys.stdout.isatty() else 160
    for table in tables:
        _Screen(width=width).print(table)
