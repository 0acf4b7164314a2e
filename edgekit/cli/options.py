"""Options that several commands share, and what their values mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from edgekit.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])
Option = Callable[[_F], _F]

MODEL = click.argument("model", type=click.Path(path_type=Path))
DATA = click.option("--data", required=True, metavar="DATA", help="Sample inputs: .npz, folder, or module:function.")
PREPROCESS = click.option(
    "--preprocess", type=click.Path(path_type=Path), metavar="FILE", help="How the model wants images (.toml)."
)
TARGETS = click.option(
    "--target", "targets", multiple=True, default=("all",), metavar="NAME", help="A target, its folder, or all."
)
TARGET = click.option("--target", required=True, metavar="NAME", help="A target or its folder.")
SET = click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the target.")
DIM = click.option("--dim", "dims", multiple=True, metavar="NAME=INT", help="The size of a dynamic dimension.")
SAMPLES = click.option("--samples", type=click.IntRange(min=1), metavar="N", help="Use at most N samples.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def verbosity(function: _F) -> _F:
    """Adds -q and -v, which become the argument `volume`: -1, 0 or 1."""
    function = click.option("-q", "--quiet", "volume", flag_value=-1, type=int, help="No progress.")(function)
    return click.option("-v", "--verbose", "volume", flag_value=1, type=int, default=0, help="Say each step.")(function)


def parse_assignments(pairs: tuple[str, ...], option: str) -> dict[str, str]:
    """Returns NAME=VALUE pairs as a dict.

    Raises:
        UsageError: a pair has no `=`, no name, or a name comes twice.
    """
    parsed: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.rpartition("=") if option == "--dim" else pair.partition("=")
        if not equals or not name or not value:
            raise UsageError(f"{option} '{pair}' is not NAME=VALUE", hint=f"for example {option} {_EXAMPLES[option]}")
        if name in parsed:
            raise UsageError(f"{option} gives '{name}' twice", hint="give each name once")
        parsed[name] = value
    return parsed


def parse_dims(pairs: tuple[str, ...]) -> dict[str, int]:
    """Returns --dim NAME=INT pairs as a dict.

    Raises:
        UsageError: a pair is malformed or its size is no positive whole number.
    """
    return {name: _parse_size(name, value) for name, value in parse_assignments(pairs, "--dim").items()}


def _parse_size(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 0 < int(value) < 2**31:
        raise UsageError(f"--dim {name}={value}: '{value}' is no size", hint="a whole number from 1")
    return int(value)


_EXAMPLES = {"--dim": "batch=1", "--set": "api_level=31"}
