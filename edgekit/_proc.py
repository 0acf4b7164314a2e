"""The only module that starts processes: each has a time limit, and how it ended is returned, not raised."""

import contextlib
import io
import itertools
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread, Timer
from typing import IO, Any

import msgspec

from edgekit.errors import DeviceError
from edgekit.machine import peak_bytes

_TAIL_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_JOIN_S = 1.0
# The children that are running now, of all threads: an interrupted command ends them all.
_RUNNING: set[int] = set()
# Which core is next for a child that gets one; several programs begin at different ones.
_TURNS = itertools.count(os.getpid())


class ChildSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A child's folder, the variables added to the caller's environment, and whether it gets a single core.

    With `one_core`, all threads of the child share one core, on systems that support this (Linux).
    """

    cwd: Path | None = None
    env: Mapping[str, str] | None = None
    one_core: bool = False


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """How a child process ended.

    `status` is the exit code, or minus the number of the signal that ended it. `stdout` and `stderr` hold the last
    MiB of each.
    """

    argv: tuple[str, ...]
    status: int
    timed_out: bool
    stdout: str
    stderr: str
    peak_rss_bytes: int

    @property
    def succeeded(self) -> bool:
        """True if the child ended by itself with exit code 0."""
        return self.status == 0 and not self.timed_out

    @property
    def crashed(self) -> bool:
        """True if a signal ended the child before its time was up."""
        return self.status < 0 and not self.timed_out

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.timed_out:
            return "ran out of time"
        if self.crashed:
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"ended with exit code {self.status}"

    @property
    def explanation(self) -> str:
        """How it ended, and what it wrote about the cause: the first line with "error", else the end of its output."""
        lines = [" ".join(line.split()) for line in (self.stdout + self.stderr).splitlines()]
        reason = next((line for line in lines if "error" in line.lower()), " ".join(lines)[-300:])
        return f"{self.ending}: {reason[:400]}".removesuffix(": ")


def run_process(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    setting: ChildSetting | None = None,
    stdin: IO[bytes] | None = None,
    stdout: IO[bytes] | None = None,
) -> Finished:
    """Runs a child process to its end and returns how it ended.

    The child gets its own process session, so that it and its children can be killed together when the time is up or
    the caller is interrupted. `env` is added to the caller's environment; a `setting` replaces both `cwd` and `env`.
    Standard input is the open file `stdin`, or empty; standard output goes into the open file `stdout`, or is returned.

    Raises:
        DeviceError: the program cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = (stdin or subprocess.DEVNULL, stdout or out, err)
        status, timed_out, peak = _wait(_start(argv, streams, setting or ChildSetting(cwd=cwd, env=env)), timeout_s)
        return Finished(
            argv=tuple(argv),
            status=status,
            timed_out=timed_out,
            stdout=_tail(out.fileno()),
            stderr=_tail(err.fileno()),
            peak_rss_bytes=peak,
        )


def stream_process(
    argv: Sequence[str],
    *,
    timeout_s: float,
    feed: Iterable[bytes],
    take: Callable[[io.BufferedReader], None],
    setting: ChildSetting | None = None,
) -> Finished:
    """Runs a child process with streamed input and output, and returns how it ended; `stdout` of the result is "".

    `feed` is written to its standard input while `take` reads its standard output. It is no error if the child stops
    reading its input. When `take` returns before the end of the output, or the time is up, the child and its children
    are killed.

    Raises:
        DeviceError: the program cannot be started.
        EdgekitError: what `feed` or `take` raised.
    """
    deadline = time.monotonic() + timeout_s
    child = _start(argv, (subprocess.PIPE, subprocess.PIPE, subprocess.PIPE), setting or ChildSetting())
    wrong: list[BaseException] = []
    words = bytearray()
    work = ((_write_all, (child.stdin, feed, wrong)), (_keep_tail, (child.stderr, words)))
    threads = [Thread(target=target, args=args, daemon=True) for target, args in work]
    for thread in threads:
        thread.start()
    output: Any = child.stdout
    try:
        with output:
            timed: Any = _Timed(output.fileno(), deadline)
            stream = io.BufferedReader(timed, _CHUNK_BYTES)
            take(stream)
            # Do not wait for output that has not arrived: a grandchild may hold the pipe open after the program has
            # ended.
            has_ended = bool(select.select([output], [], [], 0)[0]) and not stream.peek(1)
    except BaseException:
        _end_group(child.pid)
        child.wait()
        _RUNNING.discard(child.pid)
        raise
    if not has_ended:
        _end_group(child.pid)
    status, timed_out, peak = _wait(child, max(0.0, deadline - time.monotonic()))
    for thread in threads:
        thread.join(_JOIN_S)
    if wrong:
        raise wrong[0]
    return Finished(
        argv=tuple(argv),
        status=status,
        timed_out=timed_out or time.monotonic() > deadline,
        stdout="",
        stderr=words.decode(errors="replace"),
        peak_rss_bytes=peak,
    )


class _Timed(io.RawIOBase):
    """A pipe that ends when the time is up, even if another process still holds it open."""

    def __init__(self, descriptor: int, deadline: float) -> None:
        self._descriptor = descriptor
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left = self._deadline - time.monotonic()
        if left <= 0 or not select.select([self._descriptor], [], [], left)[0]:
            return 0
        return os.readv(self._descriptor, [buffer])


def _write_all(pipe: IO[bytes], feed: Iterable[bytes], wrong: list[BaseException]) -> None:
    with contextlib.suppress(OSError), pipe:
        try:
            for data in feed:
                pipe.write(data)
                pipe.flush()
        except OSError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is raised again by the thread that asked
            wrong.append(error)


def _keep_tail(pipe: IO[bytes], words: bytearray) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), _CHUNK_BYTES):
            words += data
            del words[:-_TAIL_BYTES]


def _start(
    argv: Sequence[str], streams: tuple[int | IO[bytes], int | IO[bytes], int | IO[bytes]], setting: ChildSetting
) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = streams
    try:
        with _one_core() if setting.one_core else contextlib.nullcontext():
            child = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=setting.cwd,
                env={**os.environ, **(setting.env or {})},
                # A process group of its own: emulators and node start children, which must be killed together with this
                # process.
                start_new_session=True,
            )
    except OSError as error:
        raise DeviceError(f"cannot start '{argv[0]}': {error.strerror}", hint="edgekit doctor") from error
    _RUNNING.add(child.pid)
    return child


@contextlib.contextmanager
def _one_core() -> Generator[None]:
    """Keeps this thread to one core for the duration of the block, on systems that support this.

    A child that is started meanwhile inherits the core with all its threads. If the core were set afterwards, threads
    that the child had started by then would keep all cores. Children are spread over the cores in turn.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    every = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {every[next(_TURNS) % len(every)]})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, every)


def end_children() -> None:
    """Kills every child process that was started here and still runs, with its own children."""
    for pid in tuple(_RUNNING):
        _end_group(pid)


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, bool, int]:
    """Waits for a child, and returns its exit code, whether its time was up, and its peak memory in bytes.

    The peak is 0 where the system does not say.
    """
    expired: list[bool] = []

    def expire() -> None:
        expired.append(True)
        _end_group(child.pid)

    timer = Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    peak = 0
    try:
        if hasattr(os, "wait4"):
            # Popen.wait would reap the child without its resource usage.
            _, raw, usage = os.wait4(child.pid, 0)
            child.returncode, peak = os.waitstatus_to_exitcode(raw), peak_bytes(usage)
        else:
            child.wait()
    except BaseException:
        _end_group(child.pid)
        child.wait()
        raise
    finally:
        timer.cancel()
        _RUNNING.discard(child.pid)
    return child.returncode, bool(expired), peak


def _end_group(pid: int) -> None:
    try:
        # Windows has no process groups; there SIGTERM ends the single process at once.
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    start = max(0, size - _TAIL_BYTES)
    return os.pread(descriptor, size - start, start).decode(errors="replace")
