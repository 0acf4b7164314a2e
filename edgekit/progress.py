"""How a stage tells what it is doing: one step in words at a time."""

from collections.abc import Callable

Progress = Callable[[str], None]


def say_nothing(_step: str) -> None:
    """Takes a step of progress and shows nothing."""
