"""Progress messages, stage times, and time budgets."""

import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from edgekit.errors import FAILURES, quote_error

Progress = Callable[[str], None]
_Made = TypeVar("_Made")


def say_nothing(_step: str) -> None:
    """Takes a step of progress and shows nothing."""


def name_steps(progress: Progress, name: str) -> Progress:
    """Returns a progress function that puts a name before each step."""
    return lambda step: progress(f"{name}: {step}")


class StageTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage took: wall-clock seconds, and CPU seconds of all cores with those of ended child processes.

    `target` is the target that it was for, "" where all share it. A bundle is written and verified while the next one
    is planned: "verify" ("write" without verification) has only the seconds in which nothing else was done, and its
    CPU seconds are counted in other stages too.
    """

    stage: str
    target: str = ""
    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Measures stages that follow each other, without gaps: their times add up to the whole."""

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

    `failed` holds optional steps that failed, with the reason. Searches that share their work share it.
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

    def attempt(self, step: str, make: Callable[[], _Made]) -> _Made | None:
        """Returns what an optional step makes, None where it fails: then the step is among the failed, with its reason.

        Every improvement goes through here, since each may meet numbers, or make a model, that nobody has seen.
        """
        try:
            return make()
        except FAILURES as error:
            self.failed.setdefault(step, quote_error(error))
            return None

    def keep_back(self, seconds: float) -> "Budget":
        """Returns the budget with so many seconds less, reserved for later steps; both share the list `left_out`."""
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
