"""The only door to subprocess: a child with a time limit, whose death is a finding."""

import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer

import msgspec

from edgekit.errors import DeviceError

_TAIL_BYTES = 1 << 20


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
    def ending(self) -> str:
        """How it ended, in words."""
        if self.timed_out:
            return "ran out of time"
        if self.status < 0:
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"ended with exit code {self.status}"


def run_process(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Runs a child process to its end and returns how it ended.

    The child gets no standard input and a session of its own, so that it and its children end together when the time
    is up or the caller is interrupted. `env` is added to the caller's environment.

    Raises:
        DeviceError: the program cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise DeviceError(f"cannot start '{argv[0]}': {error.strerror}", hint="edgekit doctor") from error
        status, timed_out, usage = _wait(child, timeout_s)
        return Finished(
            argv=tuple(argv),
            status=status,
            timed_out=timed_out,
            stdout=_tail(out.fileno()),
            stderr=_tail(err.fileno()),
            peak_rss_bytes=usage.ru_maxrss * 1024,
        )


def _wait(child: subprocess.Popen[bytes], timeout_s: float) -> tuple[int, bool, resource.struct_rusage]:
    expired: list[bool] = []

    def expire() -> None:
        expired.append(True)
        _end_group(child.pid)

    timer = Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        _, raw, usage = os.wait4(child.pid, 0)
    except BaseException:
        _end_group(child.pid)
        child.wait()
        raise
    finally:
        timer.cancel()
    child.returncode = os.waitstatus_to_exitcode(raw)
    return child.returncode, bool(expired), usage


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    start = max(0, size - _TAIL_BYTES)
    return os.pread(descriptor, size - start, start).decode(errors="replace")
