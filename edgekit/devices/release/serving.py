"""A process that computes for a program which stands in for a phone: asked through one pipe, answering through another.

A question is a line of JSON and then bytes; so is its answer, whose line says in words why there is none, and is empty
where there is one.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import IO

import msgspec

from edgekit._proc import run_process

ASK, ANSWER = "ask", "answer"
"""The pipes, by their names in a folder."""
END = b'{"ask":"end"}\n'
"""The last question."""


@contextlib.contextmanager
def open_pipes(folder: Path) -> Generator[tuple[IO[bytes], IO[bytes]]]:
    """Yields the pipes of a folder for a process that serves them: questions to read, answers to write.

    Whoever starts the process holds both pipes open; where that one has ended already, nothing is waited for.

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


class Served(msgspec.Struct, kw_only=True):
    """What the process said at its end, in the last line of its output; empty until then."""

    said: str = ""


@contextlib.contextmanager
def serving(folder: Path, module: str, timeout_s: float) -> Generator[Served]:
    """Yields while `python -m MODULE FOLDER` serves the pipes in a new folder; it ends with the block.

    Both ends of both pipes stay open here until one side has ended: then the other sees the end too, and neither waits
    for ever.
    """
    served = Served()
    folder.mkdir()
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
