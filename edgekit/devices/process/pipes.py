"""Two pipes through which a program lets another process compute: a phone's stand-in asks, edgekit answers.

Each question is a line of JSON followed by its binary data. The server imports as little as it can, because it is
started for every run.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Literal, Protocol

import msgspec

from edgekit._proc import run_process
from edgekit.errors import EdgekitError
from edgekit.serialize import ready_type

ASK, ANSWER = "ask", "answer"
"""The pipes, by their names in a folder."""
END = b'{"ask":"end"}\n'
"""The last question."""


@contextlib.contextmanager
def open_pipes(folder: Path) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Yields the pipes of a folder for a process that serves them: questions to read, answers to write.

    The process that started this one holds both pipes open; if it has ended already, opening them fails at once.

    Raises:
        OSError: nobody holds the pipes.
    """
    with contextlib.ExitStack() as stack:
        opened: list[IO[bytes]] = []
        for name, access, mode in ((ASK, os.O_RDONLY, "rb"), (ANSWER, os.O_WRONLY, "wb")):
            number = os.open(folder / name, access | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(number, True)
            opened.append(stack.enter_context(os.fdopen(number, mode)))
        yield opened[0], opened[1]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed: the number of operations by name, and how many of them in half precision."""

    operations: dict[str, int]
    halves: int


_FACTS = msgspec.json.Decoder(ready_type(Facts))


class Computer(Protocol):
    """Answers questions about models, each a line of JSON; `read` returns the next bytes after the line."""

    def load(self, question: bytes, read: Callable[[int], bytes]) -> None:
        """Loads a model."""
        ...

    def compute(self, question: bytes, read: Callable[[int], bytes]) -> bytes:
        """Returns the outputs of a model for the inputs that follow."""
        ...

    def describe(self) -> Facts:
        """Returns what was computed."""
        ...


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    ask: Literal["model", "run", "end"]


def answer_questions(computer: Computer, ask: IO[bytes], answer: IO[bytes]) -> None:
    """Answers questions until the last one; an answer is an empty line and the outputs, or a line with an error."""
    while line := ask.readline():
        if (question := msgspec.json.decode(line, type=ready_type(_Question)).ask) == "end":
            break
        try:
            result = b""
            if question == "model":
                computer.load(line, ask.read)
            else:
                result = computer.compute(line, ask.read)
            answer.write(b"\n" + result)
        except (EdgekitError, LookupError, MemoryError, RuntimeError, ValueError) as error:
            reason = error.message if isinstance(error, EdgekitError) else str(error)
            answer.write((" ".join(reason.split())[:400] or "no reason given").encode() + b"\n")
        answer.flush()


def serve_pipes(computer: Computer, folder: Path) -> None:
    """Serves the pipes of a folder, and at the end prints what was computed."""
    with open_pipes(folder) as (ask, answer):
        answer_questions(computer, ask, answer)
    sys.stdout.write(msgspec.json.encode(computer.describe()).decode() + "\n")


class Served(msgspec.Struct, kw_only=True):
    """The process that serves the pipes of a `folder`; `said` is the last line that it printed, "" until it ends."""

    folder: Path
    said: str = ""

    def read_facts(self) -> Facts | None:
        """Returns what was computed, None if the process did not report it."""
        with contextlib.suppress(msgspec.DecodeError):
            return _FACTS.decode(self.said)
        return None


@contextlib.contextmanager
def serving(folder: Path, module: str, timeout_s: float) -> Generator[Served]:
    """Runs `python -m MODULE FOLDER`, which serves the pipes in a new folder, for the duration of the block.

    This process holds both pipes open until one side has ended; then it closes them, so that the other side sees the
    end and does not wait for ever.
    """
    served = Served(folder=folder)
    folder.mkdir(parents=True)
    held: list[int] = []
    for name in (ASK, ANSWER):
        os.mkfifo(folder / name)
        held.append(os.open(folder / name, os.O_RDWR | os.O_CLOEXEC))

    def serve() -> None:
        finished = run_process([sys.executable, "-P", "-m", module, str(folder)], timeout_s=timeout_s)
        served.said = (finished.stdout.splitlines() or [""])[-1]
        while held:
            os.close(held.pop())

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield served
    finally:
        with contextlib.suppress(OSError, IndexError):
            os.write(held[0], END)
        server.join(timeout_s)
