"""Progress messages, stage times, and time budgets."""

import math
import os
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec

from edgekit.errors import FAILURES, quote_error

Progress = Callable[[str], None]
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def say_nothing(_step: str) -> None:
    """Ignores a step of progress."""


def name_steps(progress: Progress, name: str) -> Progress:
    """Returns a progress function that puts a name before each step."""
    return lambda step: progress(f"{name}: {step}")


class StageTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a stage: wall-clock seconds, and CPU seconds of all cores and of ended child processes.

    `target` is the target that it was for, "" if it was for all. A bundle is written and verified while the next one is
    planned: "verify" ("write" without verification) has only the seconds in which no other stage ran, and its CPU
    seconds count in the other stages too.
    """

    stage: str
    target: str = ""
    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Measures consecutive stages without gaps: their times add up to the total."""

    def __init__(self) -> None:
        self._stages: list[StageTime] = []
        self._running: tuple[str, str, float, float] | None = None

    def begin(self, stage: str, target: str = "") -> None:
        """Begins a stage, and ends the one before."""
        self.end()
        self._running = stage, target, time.monotonic(), _cpu_seconds()

    def end(self) -> tuple[StageTime, ...]:
        """Ends the stage that runs; returns all so far, in order."""
        if self._running is not None:
            stage, target, began, used = self._running
            seconds, cpu_seconds = (round(each, 2) for each in (time.monotonic() - began, _cpu_seconds() - used))
            self._stages.append(StageTime(stage=stage, target=target, seconds=seconds, cpu_seconds=cpu_seconds))
            self._running = None
        return tuple(self._stages)


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The time limit of a search: its `end` by `time.monotonic()`, and the steps that were left out after it.

    `failed` maps optional steps that failed to the reason. Searches for several targets may share one budget.
    """

    end: float = math.inf
    progress: Progress = say_nothing
    left_out: list[str] = []
    failed: dict[str, str] = {}

    def allows(self, step: str) -> bool:
        """Returns True while there is time for a step; else the step is among those left out."""
        if time.monotonic() < self.end:
            return True
        if step not in self.left_out:
            self.left_out.append(step)
        return False

    def attempt(
        self, step: str, make: Callable[_Given, _Made], *given: _Given.args, **named: _Given.kwargs
    ) -> _Made | None:
        """Returns the result of an optional step, None if it raises one of `FAILURES`, which `failed` then records."""
        try:
            return make(*given, **named)
        except FAILURES as error:
            self.failed.setdefault(step, quote_error(error))
            return None

    def keep_back(self, seconds: float) -> "Budget":
        """Returns a budget that ends this many seconds earlier, for later steps; both share their records."""
        return msgspec.structs.replace(self, end=self.end - seconds)

    def tell(self, step: str, done: int, total: int, began: float) -> None:
        """Reports how many of a step's equal parts are done, and how long the rest will take at this pace."""
        left = ""
        if done:
            now = time.monotonic()
            left = f", {min((now - began) / done * (total - done), max(self.end - now, 0.0)):.0f} s left"
        self.progress(f"{step}: {done} of {total}{left}")


NO_LIMIT = Budget()
"""A budget without a limit and without progress messages."""
