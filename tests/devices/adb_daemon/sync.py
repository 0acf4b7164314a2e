"""The service that takes files: STAT, old and new, and SEND."""

import errno
import stat
import struct
from pathlib import Path

from adb_daemon.wire import Stream

_REQUEST = struct.Struct("<4sI")
_OLD = struct.Struct("<III")
_NEW = struct.Struct("<IQQIIIIQqqq")
_MAX_PATH = 1024
_MAX_CHUNK = 1 << 16


class Refused(Exception):  # noqa: N818 - a refusal is what it is
    """What the host is told."""


def serve_sync(stream: Stream) -> int:
    """Answers requests until the host is done, and returns how many bytes of files it sent."""
    received = 0
    while (request := stream.read_exactly(_REQUEST.size)) is not None:
        kind, size = _REQUEST.unpack(request)
        if kind == b"QUIT":
            break
        if size > _MAX_PATH or (name := stream.read_exactly(size)) is None:
            _fail(stream, "path too long")
            break
        text = name.decode()
        try:
            if kind == b"SEND":
                received += _receive(stream, text)
                continue
        except Refused as refused:
            _fail(stream, str(refused))
            break
        if kind not in {b"STAT", b"STA2", b"LST2"}:
            _fail(stream, f"unknown command {int.from_bytes(kind, 'little'):08x}")
            break
        _tell_stat(stream, kind, text)
    return received


def _fail(stream: Stream, text: str) -> None:
    stream.write(_REQUEST.pack(b"FAIL", len(text)) + text.encode())


def _tell_stat(stream: Stream, kind: bytes, name: str) -> None:
    problem, found = 0, None
    try:
        found = Path(name).stat(follow_symlinks=kind == b"STA2")
    except OSError as error:
        problem = error.errno or errno.EIO
    if stream.link.faults.takes("stat-lies", stream.service):
        problem, found = errno.EACCES, None
    if kind == b"STAT":
        fields = _OLD.pack(found.st_mode, found.st_size & 0xFFFFFFFF, int(found.st_mtime)) if found else bytes(12)
    elif found is None:
        fields = _NEW.pack(problem, *([0] * 10))
    else:
        times = (int(found.st_atime), int(found.st_mtime), int(found.st_ctime))
        owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid)
        fields = _NEW.pack(0, found.st_dev, found.st_ino, *owner, found.st_size, *times)
    stream.write(kind + fields)


def _receive(stream: Stream, request: str) -> int:
    name, _, digits = request.rpartition(",")
    mode = int(digits)
    path = Path(name)
    try:
        return _write_file(stream, path, mode)
    except (OSError, Refused) as error:
        _drain(stream)
        if not stat.S_ISDIR(mode):
            path.unlink(missing_ok=True)
        raise Refused(f"write failed: {error.strerror}" if isinstance(error, OSError) else str(error)) from error


def _write_file(stream: Stream, path: Path, mode: int) -> int:
    faults = stream.link.faults
    if faults.takes("fail-push", stream.service):
        raise Refused(faults.fault.text)
    loses = faults.takes("lose-push", stream.service)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    received = 0
    with path.open("wb") as file:
        while (chunk := _chunk(stream)) is not None:
            received += len(chunk)
            if not loses or received <= faults.fault.after:
                file.write(chunk)
    if stream.closed.is_set():
        path.unlink(missing_ok=True)
        return received
    path.chmod(_widened(stat.S_IMODE(mode)))
    if not faults.takes("no-answer", stream.service):
        stream.write(_REQUEST.pack(b"OKAY", 0))
    return received


def _widened(mode: int) -> int:
    """Returns the permissions that adbd gives a file: those of its owner for everyone."""
    mode |= (mode >> 3) & 0o070
    return mode | ((mode >> 3) & 0o007)


def _chunk(stream: Stream) -> bytes | None:
    """Returns the next part of a file, None at its end."""
    header = stream.read_exactly(_REQUEST.size)
    if header is None:
        return None
    kind, size = _REQUEST.unpack(header)
    if kind == b"DONE":
        return None
    if kind != b"DATA" or size > _MAX_CHUNK:
        raise Refused("invalid data message")
    return stream.read_exactly(size)


def _drain(stream: Stream) -> None:
    try:
        while _chunk(stream) is not None:
            continue
    except Refused:
        return
