"""What a command shows: the result on stdout, progress on stderr."""

import contextlib
import sys
from collections.abc import Callable, Generator

import click
from rich.console import Console

from edgekit.plain import to_json

Progress = Callable[[str], None]


def show_json(value: object) -> None:
    """Prints one value as JSON on stdout."""
    click.echo(to_json(value), nl=False)


@contextlib.contextmanager
def showing_progress(volume: int) -> Generator[Progress]:
    """Yields a function that shows what is being done: one line that renews itself, all with -v, nothing with -q."""
    console = Console(stderr=True, highlight=False)
    if volume > 0:
        yield lambda step: console.print(step, style="dim")
    elif volume < 0 or not sys.stderr.isatty():
        yield lambda _step: None
    else:
        with console.status("") as status:
            yield lambda step: status.update(f"[dim]{step}")
