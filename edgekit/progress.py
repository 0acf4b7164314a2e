"""How a stage tells what it is doing, one step in words at a time, and how long it may take."""

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
    """Returns what says each step with the name of what it is a step of before it."""
    return lambda step: progress(f"{name}: {step}")


class StageTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage took: seconds of the clock, and of all cores with those of ended child processes.

    `target` is the one that it was for, "" where all share it. Bundles are written and verified beside the planning of
    the next: in the seconds of "verify" only this was done ("write" where none is verified), and its CPU seconds fall
    in other stages too.
    """

    stage: str
    target: str = ""
    seconds: float
    cpu_seconds: float


class Stopwatch:
    """Tells stages that follow each other apart; what they took adds up to the whole."""

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
    """The time of a search: when it ends by `time.monotonic()`, and what was left out because it had ended.

    `failed` says of steps that could be left out why they were. Where work is shared, so is what failed of it.
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
        """Returns the budget with so much less time, for what follows it; what is left out stands in both."""
        return msgspec.structs.replace(self, end=self.end - seconds)

    def tell(self, step: str, done: int, total: int, began: float) -> None:
        """Says how far a step of so many equal parts has come, and how long the rest takes at the pace so far."""
        left = ""
        if done:
            now = time.monotonic()
            left = f", {min((now - began) / done * (total - done), max(self.end - now, 0.0)):.0f} s left"
        self.progress(f"{step}: {done} of {total}{left}")


NO_LIMIT = Budget()
"""All the time there is, in silence."""
