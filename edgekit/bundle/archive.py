"""Zip and tar archives: the same files give the same bytes, and untrusted archives are unpacked safely.

Every name, size and kind of entry is checked before it is used.
"""

import contextlib
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Literal, TypeVar

import msgspec

from edgekit import _files
from edgekit.bundle.checks import find_fault, find_unsafe, iterate_files
from edgekit.errors import BundleError, OutputError, reading, reraised

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
    """A file in an archive: its name, its stated size, and a function that reads exactly so many bytes."""

    name: str
    size_bytes: int
    read: Callable[[], Iterator[bytes]]


def convert_errors(items: Iterator[_Item], path: Path) -> Iterator[_Item]:
    """Yields the items of a reader, and converts the errors that the standard library raises for bad archives.

    Raises:
        BundleError: the archive is damaged.
    """
    with reraised(_UNREADABLE, BundleError(f"'{path}' is damaged", hint="fetch it again"), quote=True):
        yield from items


def _read_zip(file: IO[bytes]) -> Iterator[Member]:
    # Refused are a list of files that would fill the memory, and a comment, which can hide a second list.
    size_bytes = file.seek(0, 2)
    file.seek(max(0, size_bytes - _ZIP_END.size))
    end = file.read(_ZIP_END.size)
    if len(end) < _ZIP_END.size or not end.startswith(b"PK\x05\x06") or not end.endswith(b"\0\0"):
        raise EOFError("it is cut off, or has a comment at its end")
    # Fields of the end record, the locator and the zip64 record: APPNOTE.TXT, 4.3.14 to 4.3.16.
    if (directory_bytes := int(_ZIP_END.unpack(end)[5])) == _ZIP64_MARK:
        file.seek(max(0, size_bytes - _ZIP_END.size - _ZIP64_RECORD_AND_LOCATOR_BYTES + 40))
        directory_bytes = int.from_bytes(file.read(8), "little")
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        raise ValueError(f"its list of files alone has {directory_bytes} bytes")
    archive = zipfile.ZipFile(file)  # it is only a view of `file`, which the caller closes
    if min((entry.header_offset for entry in archive.infolist()), default=0):
        # zipfile reads the last of two archives in a row, other readers the first: each would see other files.
        raise ValueError("something stands before its first file")
    for entry in archive.infolist():
        # The name in the archive: zipfile's `filename` ends at a null character, and on Windows has slashes in place of
        # backslashes.
        entry_name = entry.orig_filename
        if entry.flag_bits & 1:
            raise ValueError(f"{entry_name[:200]!r} is encrypted")
        # The kind of file is zero if the archive was made on a system without Unix modes.
        if stat.S_IFMT(entry.external_attr >> 16) not in {0, stat.S_IFREG, stat.S_IFDIR}:
            raise ValueError(f"{entry_name[:200]!r} is a link or a device")
        if entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            words = f"{entry_name[:200]!r} is packed by method {entry.compress_type}, neither stored nor deflated"
            raise ValueError(words)
        if entry_name.endswith("/"):
            _check_folder(entry_name, entry.file_size)
            continue
        yield Member(name=entry_name, size_bytes=entry.file_size, read=partial(_read_entry, archive, entry))


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    with archive.open(entry) as source:
        yield from _read_exactly(source, entry.file_size, entry.filename)
        source.read(1)  # at the end zipfile compares the checksum


def _read_tar(file: IO[bytes]) -> Iterator[Member]:
    """Yields the files of a POSIX tar; of its extensions only long names are supported, everything else is refused."""
    total_bytes, start, long_name = file.seek(0, 2), 0, ""
    while True:
        file.seek(start)
        try:
            # `tarfile.open` would follow sparse files, links and extensions, so the headers are read one by one.
            entry = tarfile.TarInfo.frombuf(file.read(tarfile.BLOCKSIZE), "utf-8", "strict")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined] # typeshed leaves it out
            # Some readers (`tar --ignore-zeros`) take data behind the end of the archive for further files.
            if any(chunk.count(0) != len(chunk) for chunk in _files.read_chunks(file)):
                raise ValueError("something stands behind its end") from None
            return
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
            yield Member(name=name, size_bytes=entry.size, read=partial(_read_exactly, file, entry.size, name, start))
        else:
            raise ValueError(f"{name[:200]!r} is a link, a device or of an unknown kind")
        start += -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _read_exactly(source: IO[bytes], size_bytes: int, name: str, start: int | None = None) -> Iterator[bytes]:
    """Yields `size_bytes` of a file, from its position or from the offset `start`."""
    if start is not None:
        source.seek(start)
    remaining = size_bytes
    for chunk in _files.read_chunks(source, size_bytes):
        yield chunk
        remaining -= len(chunk)
    if remaining:
        raise EOFError(f"{name[:200]!r} is cut off")


def _read_long_name(file: IO[bytes], entry: tarfile.TarInfo) -> str:
    """Returns the name of the next entry: the content of a GNU entry, or the record `path` of a POSIX entry."""
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
        # These records change the size or the meaning of names, and not every reader supports them.
        if key in {b"size", b"hdrcharset"} or key.startswith(b"GNU.sparse"):
            raise ValueError(f"an extension header sets {key.decode()!r}")
        name = value.decode() if key == b"path" else name
        data = data[int(length) :]
    return name


def _check_folder(name: str, size_bytes: int) -> None:
    stripped = name.rstrip("/")
    if size_bytes or (stripped not in {"", "."} and find_fault(stripped) is not None) or name.startswith("/"):
        raise ValueError(f"{name[:200]!r} is no safe folder")


Kind = Literal["zip", "tar"]
KINDS: tuple[Kind, ...] = ("zip", "tar")

# The earliest time in a zip (APPNOTE.TXT, 4.4.6): with the time of the build, each archive would have other bytes.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_DISTRUST = "do not trust this archive"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The largest number of files and bytes to which an archive may unpack, and the ratio of these to its own size."""

    # Against zip bombs. A ratio of 100 is generous for weights, which hardly shrink; DEFLATE reaches 1032 to 1 (zlib's
    # technical notes).
    files: int = 10_000
    size_bytes: int = 8 << 30
    ratio: int = 100


def write_archive(entries: Mapping[str, Path | bytes], out: Path, kind: Kind) -> None:
    """Writes files into one archive; the same entries always give the same bytes.

    `entries` maps a name with `/` between folders to a file or to its bytes. They are sorted by name and stored without
    compression, because deflated bytes depend on the version of zlib. They have no time and no owner.

    Raises:
        OutputError: the file cannot be written, or a name is not safe on every system.
    """
    if (unsafe := find_unsafe(entries, "in the archive")) is not None:
        raise OutputError(unsafe, hint="rename that file")
    with _files.replacing_file(out) as temporary:
        if kind == "zip":
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
                for name in sorted(entries):
                    write_entry(archive, name, [entries[name]], stat.S_IFREG | 0o644)
            return
        # PAX is the only format with a standard for long names in UTF-8 (POSIX.1-2001). A new TarInfo has no time and
        # no owner.
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
            for name in sorted(entries):
                source, entry = entries[name], tarfile.TarInfo(name)
                entry.mode, entry.size = 0o644, _files.measure_content(source)
                with BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
                    tar.addfile(entry, file)


def list_files(folder: Path) -> dict[str, Path]:
    """Returns every file below a folder by its name with `/`, sorted: the `entries` of `write_archive`.

    Raises:
        BundleError: there is a link, or something that is neither file nor folder.
    """
    found = dict(iterate_files(folder))
    irregular = next((name for name, path in found.items() if path.is_symlink() or not path.is_file()), None)
    if irregular is not None:
        raise BundleError(f"{irregular!r} of '{folder}' is a link or no regular file", hint="remove it")
    return found


@contextlib.contextmanager
def opened_folder(path: Path) -> Generator[Path]:
    """Yields a folder unchanged, or the folder into which an archive is unpacked, which is deleted after the block.

    Raises:
        BundleError: as `unpack_archive`.
    """
    if path.is_dir():
        yield path
        return
    with _files.work_folder() as work:
        unpack_archive(path, work / "unpacked")
        yield work / "unpacked"


def unpack_archive(path: Path, out: Path, limits: Limits | None = None) -> tuple[str, ...]:
    """Unpacks a zip or an uncompressed tar into the folder `out` and returns the names of its files, sorted.

    Nothing is written outside `out`, and nothing at all if the archive is refused. Every name and size is checked
    before the first file is written; files are read in chunks. Times, owners and modes are ignored.

    Raises:
        BundleError: it is no archive, is damaged, unpacks to more than `limits`, or holds a link, a device, an
            encrypted file, an unsafe name, or two files whose names differ only in case or Unicode form.
        OutputError: `out` cannot be written.
    """
    with reading(f"'{path}'", BundleError, "give a bundle's folder or archive"), path.open("rb") as file:
        # The kind is found from the content: "PK" of a local header or of an empty zip, or "ustar" at byte 257.
        head = file.read(tarfile.BLOCKSIZE)
    is_zip = head[:4] in {b"PK\x03\x04", b"PK\x05\x06"}
    if not is_zip and head[257:262] != b"ustar":
        if path.suffix in {".onnx", ".ort"}:
            raise BundleError(f"'{path}' is a model, not a bundle", hint="edgekit build makes bundles of a model")
        raise BundleError(f"'{path}' is no zip and no tar", hint="a compressed tar is not opened: decompress it first")
    # The file is opened once, so that the checked content is that which is read.
    with path.open("rb") as file, _files.staged_folder(out) as staging:
        limits, members, total = limits or Limits(), list[Member](), 0
        max_bytes = min(limits.size_bytes, limits.ratio * path.stat().st_size)
        for member in convert_errors((_read_zip if is_zip else _read_tar)(file), path):
            # Adding up the stated sizes is enough, because reading a file stops at its stated size.
            total += member.size_bytes
            if len(members) == limits.files or total > max_bytes:
                allowed = f"{limits.files} files, {limits.size_bytes} bytes or {limits.ratio} times its own size"
                raise BundleError(f"'{path}' would unpack to more than {allowed}", hint=_DISTRUST)
            members.append(member)
        if (unsafe := find_unsafe((member.name for member in members), f"in '{path}'")) is not None:
            raise BundleError(unsafe, hint=_DISTRUST)
        for member in members:
            _files.write_new(_files.safe_join(staging, member.name), convert_errors(member.read(), path))
    return tuple(sorted(member.name for member in members))


def write_entry(archive: zipfile.ZipFile, name: str, parts: Sequence[Path | bytes], mode: int) -> None:
    """Writes one file, which consists of `parts`, into a zip; equal parts always give the same bytes."""
    entry = zipfile.ZipInfo(name, _EPOCH)
    # Unix (3) on every system: by default zipfile writes another value on Windows.
    entry.create_system = 3
    entry.external_attr = mode << 16
    # With the size known, no version of Python writes a zip64 record, whose bytes differ between versions.
    entry.file_size = sum(map(_files.measure_content, parts))
    with archive.open(entry, "w") as target:
        for part in parts:
            _files.copy_into(part, target)
