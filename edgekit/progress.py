"""How a stage tells what it is doing, one step in words at a time, and how long it may take."""

import math
import time
from collections.abc import Callable

import msgspec

Progress = Callable[[str], None]


def say_nothing(_step: str) -> None:
    """Takes a step of progress and shows nothing."""


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a search: when it ends by `time.monotonic()`, and what was left out because it had ended."""

    end: float = math.inf
    progress: Progress = say_nothing
    left_out: list[str] = []

    def allows(self, step: str) -> bool:
        """Returns True while there is time for a step; else the step is among those left out."""
        if time.monotonic() < self.end:
            return True
        if step not in self.left_out:
            self.left_out.append(step)
        return False

    def tell(self, step: str, done: int, total: int, began: float) -> None:
        """Says how far a step of so many equal parts has come, and how long the rest takes at the pace so far."""
        left = ""
        if done:
            now = time.monotonic()
            left = f", {min((now - began) / done * (total - done), max(self.end - now, 0.0)):.0f} s left"
        self.progress(f"{step}: {done} of {total}{left}")


NO_LIMIT = Budget()
"""All the time there is, in silence."""
