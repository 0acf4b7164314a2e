"""The files in a zip or a tar, as the archive itself names them: read one at a time, and nothing of it believed."""

import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from edgekit._files import read_chunks
from edgekit.bundle.manifest.names import find_fault
from edgekit.errors import BundleError, quote_error

# zipfile reads the whole list of files at once; 10,000 names, the most that `Limits` lets pass, take about a megabyte.
_MAX_DIRECTORY_BYTES = 8 << 20
_MAX_LONG_NAME_BYTES = 1 << 16
_ZIP_END = struct.Struct("<4s4H2LH")
_ZIP64_RECORD_AND_LOCATOR_BYTES = 56 + 20
_ZIP64_MARK = 0xFFFFFFFF
_UNREADABLE = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error, NotImplementedError, RuntimeError, ValueError,
    OverflowError, EOFError, OSError,
)  # fmt: skip

_Item = TypeVar("_Item")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A file in an archive: its name, how many bytes it says it has, and how to read exactly so many."""

    name: str
    size_bytes: int
    read: Callable[[], Iterator[bytes]]


def translating(items: Iterator[_Item], path: Path) -> Iterator[_Item]:
    """Yields what a reader yields, with one error for the many that the standard library has for bad archives.

    Raises:
        BundleError: the archive is damaged.
    """
    try:
        yield from items
    except _UNREADABLE as error:
        raise BundleError(f"'{path}' is damaged: {quote_error(error)}", hint="fetch it again") from error


def _read_zip(file: IO[bytes]) -> Iterator[Member]:
    _check_directory(file)
    archive = zipfile.ZipFile(file)  # it is only a view of `file`, which the caller closes
    if min((entry.header_offset for entry in archive.infolist()), default=0):
        # zipfile reads the last of two archives in a row, other readers the first: two truths in one file.
        raise ValueError("something stands before its first file")
    for entry in archive.infolist():
        # As it stands in the archive: zipfile's `filename` ends at a null character and, on Windows, has its
        # backslashes turned.
        name = entry.orig_filename
        if entry.flag_bits & 1:
            raise ValueError(f"{name[:200]!r} is encrypted")
        # Zero where the archive was made on a system without Unix modes.
        if stat.S_IFMT(entry.external_attr >> 16) not in {0, stat.S_IFREG, stat.S_IFDIR}:
            raise ValueError(f"{name[:200]!r} is a link or a device")
        if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise ValueError(f"{name[:200]!r} is packed by method {entry.compress_type}, neither stored nor deflated")
        if name.endswith("/"):
            _check_folder(name, entry.file_size)
            continue
        yield Member(name=name, size_bytes=entry.file_size, read=partial(_read_entry, archive, entry))


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(entry) as source:
        yield from _read_exactly(source, entry.file_size, entry.filename)
        source.read(1)  # at the end zipfile compares the checksum


def _check_directory(file: IO[bytes]) -> None:
    """Refuses a zip whose list of files would fill the memory, or with a comment, which can hide a second list."""
    size_bytes = file.seek(0, 2)
    file.seek(max(0, size_bytes - _ZIP_END.size))
    end = file.read(_ZIP_END.size)
    if len(end) < _ZIP_END.size or not end.startswith(b"PK\x05\x06") or not end.endswith(b"\0\0"):
        raise EOFError("it is cut off, or has a comment at its end")
    # Fields of the end record, the locator and the zip64 record: APPNOTE.TXT, 4.3.14 to 4.3.16.
    directory_bytes = int(_ZIP_END.unpack(end)[5])
    if directory_bytes == _ZIP64_MARK:
        file.seek(max(0, size_bytes - _ZIP_END.size - _ZIP64_RECORD_AND_LOCATOR_BYTES + 40))
        directory_bytes = int.from_bytes(file.read(8), "little")
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        raise ValueError(f"its list of files alone has {directory_bytes} bytes")


def _read_tar(file: IO[bytes]) -> Iterator[Member]:
    """Yields the files of a POSIX tar; of the extensions only long names are known, everything else is refused."""
    total_bytes, start, long_name = file.seek(0, 2), 0, ""
    while True:
        file.seek(start)
        try:
            # Header by header and not through `tarfile.open`, which follows sparse files, links and extensions that
            # nothing here needs.
            entry = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "strict")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # typeshed leaves it out
            return _check_tail(file)
        start += tarfile.BLOCKSIZE
        # GNU's binary sizes may be negative.
        if entry.size < 0 or start + entry.size > total_bytes:
            raise EOFError(f"{entry.name[:200]!r} is cut off")
        name = (long_name or entry.name).removeprefix("./")
        long_name = ""
        if entry.type in {tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME}:
            long_name = _read_long_name(file, entry)
        elif entry.type == tarfile.DIRTYPE:
            _check_folder(name, entry.size)
        elif entry.type in {tarfile.REGTYPE, tarfile.AREGTYPE}:
            yield Member(name=name, size_bytes=entry.size, read=partial(_read_slice, file, start, entry.size, name))
        else:
            raise ValueError(f"{name[:200]!r} is a link, a device or of an unknown kind")
        start += -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _check_tail(file: IO[bytes]) -> None:
    """Refuses a tar with more than zeros behind its end, which some readers (`tar --ignore-zeros`) take for files."""
    for chunk in read_chunks(file):
        if chunk.count(0) != len(chunk):
            raise ValueError("something stands behind its end")


def _read_slice(file: IO[bytes], start: int, size_bytes: int, name: str) -> Iterator[bytes]:
    file.seek(start)
    yield from _read_exactly(file, size_bytes, name)


def _read_exactly(source: IO[bytes], size_bytes: int, name: str) -> Iterator[bytes]:
    left = size_bytes
    for chunk in read_chunks(source, size_bytes):
        yield chunk
        left -= len(chunk)
    if left:
        raise EOFError(f"{name[:200]!r} is cut off")


def _read_long_name(file: IO[bytes], entry: tarfile.TarInfo) -> str:
    """Returns the name that the next entry bears: the whole of a GNU entry, or what stands as `path` in a POSIX one."""
    if entry.size > _MAX_LONG_NAME_BYTES:
        raise ValueError(f"an extension header has {entry.size} bytes")
    data = file.read(entry.size)
    if entry.type == tarfile.GNUTYPE_LONGNAME:
        return data.rstrip(b"\0").decode()
    name = ""
    while data:
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or not len(length) < int(length) <= len(data):
            raise ValueError("an extension header is malformed")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        # Records that change how much is read, or what a name means: two readers would see two archives.
        if key in {b"size", b"hdrcharset"} or key.startswith(b"GNU.sparse"):
            raise ValueError(f"an extension header sets {key.decode()!r}")
        name = value.decode() if key == b"path" else name
        data = data[int(length) :]
    return name


def _check_folder(name: str, size_bytes: int) -> None:
    bare = name.rstrip("/")
    if size_bytes or (bare not in {"", "."} and find_fault(bare) is not None) or name.startswith("/"):
        raise ValueError(f"{name[:200]!r} is no safe folder")


READERS: dict[str, Callable[[IO[bytes]], Iterator[Member]]] = {"zip": _read_zip, "tar": _read_tar}
"""How to read each kind of archive."""
