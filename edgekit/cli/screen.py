"""What every command shows with: the result on stdout, progress on stderr."""

import contextlib
import sys
from collections.abc import Generator, Iterable

import click
from rich.console import Console, RenderableType

from edgekit.plain import to_json
from edgekit.progress import Progress


def show_json(value: object) -> None:
    """Prints one value as JSON on stdout."""
    click.echo(to_json(value), nl=False)


def show_line(line: str) -> None:
    """Prints a line on stdout."""
    click.echo(line)


def show_lines(lines: Iterable[str]) -> None:
    """Prints lines on stdout."""
    for line in lines:
        show_line(line)


@contextlib.contextmanager
def showing_progress(volume: int) -> Generator[Progress]:
    """Yields a function that shows what is being done: one line that renews itself, all with -v, nothing with -q."""
    # Without markup: names of tensors and files have brackets.
    console = Console(stderr=True, highlight=False, markup=False)
    # Lines that stay, also in a file: -v is for logs.
    if volume > 0:
        yield lambda step: console.print(step, style="dim")
    # A log of a CI job would have a line for each turn of the spinner.
    elif volume < 0 or not sys.stderr.isatty():
        yield lambda _step: None
    else:
        with console.status("") as status:
            yield status.update


def print_table(table: RenderableType) -> None:
    """Prints a table, as wide as the terminal."""
    # rich takes 80 columns where there is no terminal, and would fold every row of a log.
    wide = None if sys.stdout.isatty() else 160
    Console(width=wide, highlight=False).print(table)
