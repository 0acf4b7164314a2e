"""The service that runs a command: `shell,v2`."""

import os
import signal
import struct
import subprocess
import threading
from typing import IO

from adb_daemon.wire import Stream

_PACKET = struct.Struct("<BI")
STDIN, STDOUT, STDERR, EXIT, CLOSE_STDIN = range(5)
FILES = "tar -xf"
"""Part of the script that is sent files."""
_SHELL = "/system/bin/sh"
_ENVIRONMENT = {
    "PATH": "/system/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/",
    "TMPDIR": "/data/local/tmp",
    "ANDROID_ROOT": "/system",
    "ANDROID_DATA": "/data",
    "LC_ALL": "C",
    "QEMU_CPU": "cortex-a76",
}


def serve_shell(stream: Stream, text: str) -> int:
    """Runs a command by shell v2: packets of stdin, stdout and stderr, and its exit code at the end.

    Returns how many bytes of files it was sent.
    """
    child = subprocess.Popen(
        [_SHELL, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
        env=_ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    stream.pids.append(child.pid)
    stream.on_close = lambda: _hang_up(child)
    lock = threading.Lock()
    pumps = [
        threading.Thread(target=_pump, args=(stream, lock, pipe, kind), daemon=True)
        for pipe, kind in ((child.stdout, STDOUT), (child.stderr, STDERR))
    ]
    given: list[int] = []
    feeder = threading.Thread(target=_feed, args=(stream, child, given), daemon=True)
    if stream.link.faults.takes("prefix", stream.service):
        stream.write(_PACKET.pack(STDOUT, 6) + b"hello\n")
    for thread in (*pumps, feeder):
        thread.start()
    for thread in pumps:
        thread.join()
    status = child.wait()
    if not stream.link.faults.takes("no-exit", stream.service):
        code = status if status >= 0 else 0x80 | -status
        stream.write(_PACKET.pack(EXIT, 1) + bytes([code]))
    return sum(given) if FILES in text else 0


def _pump(stream: Stream, lock: threading.Lock, pipe: IO[bytes], kind: int) -> None:
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            with lock:
                if not stream.write(_PACKET.pack(kind, len(data)) + data):
                    return


def _feed(stream: Stream, child: subprocess.Popen[bytes], given: list[int]) -> None:
    while (header := stream.read_exactly(_PACKET.size)) is not None:
        kind, size = _PACKET.unpack(header)
        data = stream.read_exactly(size)
        if data is None:
            break
        if kind == STDIN:
            given.append(size)
            _write(child, data)
        elif kind == CLOSE_STDIN:
            _close_stdin(child)
    _close_stdin(child)


def _hang_up(child: subprocess.Popen[bytes]) -> None:
    """Does what adbd does when the host goes: the shell is told, its children are not."""
    if child.poll() is None:
        os.kill(child.pid, signal.SIGHUP)


def _write(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(data)
        child.stdin.flush()
    except (OSError, ValueError):
        return


def _close_stdin(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    try:
        child.stdin.close()
    except OSError:
        return
