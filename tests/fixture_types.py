"""What the fixtures `answer`, `shown`, `refused` and `make_once` of conftest.py are, and a value that must be there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Answer = Callable[..., Any]
Shown = Callable[..., str]
Refused = Callable[..., str]
MakeOnce = Callable[[str, Callable[[Path], object]], Path]
_Value = TypeVar("_Value")


def present(value: _Value | None) -> _Value:
    """Returns a value that must not be None."""
    assert value is not None
    return value
