"""Archives that are the same to the byte for the same content, and opening those of others without harm."""

import contextlib
import stat
import tarfile
import zipfile
from collections.abc import Collection, Generator, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._files import copy_into, replacing_file, safe_join, staged_folder, work_folder, write_new
from edgekit.bundle.manifest.names import find_clash, find_fault
from edgekit.bundle.members import READERS, Member, translating
from edgekit.errors import BundleError, OutputError

Kind = Literal["zip", "tar"]
KINDS: tuple[Kind, ...] = ("zip", "tar")

# The first moment that a zip can hold (APPNOTE.TXT, 4.4.6): a time of the build would make other bytes each time.
_EPOCH = (1980, 1, 1, 0, 0, 0)
_DISTRUST = "do not trust this archive"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive may unpack to: so many files, so many bytes, and at most so many times its own size."""

    # Against archives that unpack to more than they seem. A ratio of 100 is generous for weights, which hardly shrink,
    # while DEFLATE itself reaches 1032 to 1 (zlib's technical notes).
    files: int = 10_000
    size_bytes: int = 8 << 30
    ratio: int = 100


def write_archive(
    entries: Mapping[str, Path | bytes], out: Path, kind: Kind, *, executable: Collection[str] = ()
) -> None:
    """Writes files into one archive: the same entries give the same bytes, whenever, wherever and by whom.

    `entries` maps a name with `/` between folders to a file or to its bytes. They are sorted by name and stored, not
    deflated, because deflated bytes depend on the version of zlib; they bear no time, no owner and one of two modes.

    Raises:
        OutputError: the file cannot be written, or a name is not safe on every system.
    """
    for name in entries:
        fault = find_fault(name)
        if fault is not None:
            raise OutputError(f"{name[:200]!r} {fault}: it cannot go into an archive", hint="rename that file")
    clash = find_clash(entries)
    if clash is not None:
        raise OutputError(f"{clash[0]!r} and {clash[1]!r} cannot lie in one archive", hint="rename one of them")
    with replacing_file(out) as temporary:
        if kind == "zip":
            _write_zip(entries, temporary, executable)
        else:
            _write_tar(entries, temporary, executable)


def list_files(folder: Path) -> dict[str, Path]:
    """Returns every file below a folder by its name with `/`, sorted: what `write_archive` takes.

    Raises:
        BundleError: there is a link, or something that is neither file nor folder.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise BundleError(f"{name!r} of '{folder}' is a link or no regular file", hint="remove it")
        if path.is_file():
            found[name] = path
    return found


@contextlib.contextmanager
def opened_folder(path: Path) -> Generator[Path]:
    """Yields a folder as it is, and of an archive the folder that it is unpacked into, which is gone after the block.

    Raises:
        BundleError: as `unpack_archive`.
    """
    if path.is_dir():
        yield path
        return
    with work_folder() as work:
        unpack_archive(path, work / "unpacked")
        yield work / "unpacked"


def unpack_archive(path: Path, out: Path, limits: Limits | None = None) -> tuple[str, ...]:
    """Unpacks a zip or an uncompressed tar into the folder `out` and returns the names of its files, sorted.

    Nothing is written outside `out`, and nothing at all if the archive is refused. Every name and size is checked
    before the first file is written; memory holds one chunk. Times, owners and modes are not taken over.

    Raises:
        BundleError: it is no archive, is damaged, unpacks to more than `limits`, or holds a link, a device, an
            encrypted file, an unsafe name, or two files of one name (case and Unicode form do not tell files apart).
        OutputError: `out` cannot be written.
    """
    kind = find_kind(path)
    if kind is None:
        if path.suffix in {".onnx", ".ort"}:
            raise BundleError(f"'{path}' is a model, not a bundle", hint="edgekit build makes bundles of a model")
        raise BundleError(f"'{path}' is no zip and no tar", hint="a compressed tar is not opened: decompress it first")
    # Members are read from the file that was checked, opened once: nobody can exchange it in between.
    with path.open("rb") as file, staged_folder(out) as staging:
        members = _check_members(translating(READERS[kind](file), path), path, limits or Limits())
        for member in members:
            write_new(safe_join(staging, member.name), translating(member.read(), path))
    return tuple(sorted(member.name for member in members))


def find_kind(path: Path) -> Kind | None:
    """Returns which kind of archive a file begins as, None if it is none.

    Raises:
        BundleError: there is no such file, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            # By content, not by name: "PK" of a local header or of an empty zip, and POSIX's magic at byte 257.
            start = file.read(tarfile.BLOCKSIZE)
    except OSError as error:
        raise BundleError(
            f"cannot read '{path}': {error.strerror}", hint="give a bundle's folder or archive"
        ) from error
    if start[:4] in {b"PK\x03\x04", b"PK\x05\x06"}:
        return "zip"
    return "tar" if start[257:262] == b"ustar" else None


def _check_members(members: Iterator[Member], path: Path, limits: Limits) -> list[Member]:
    most_bytes = min(limits.size_bytes, limits.ratio * path.stat().st_size)
    found: list[Member] = []
    total = 0
    for member in members:
        fault = find_fault(member.name)
        if fault is not None:
            raise BundleError(f"{member.name[:200]!r} in '{path}' {fault}", hint=_DISTRUST)
        # Counted on what the archive claims, and reading stops at the claim: no file is larger than what was added up
        # here.
        total += member.size_bytes
        if len(found) == limits.files or total > most_bytes:
            most = f"{limits.files} files, {limits.size_bytes} bytes or {limits.ratio} times its own size"
            raise BundleError(f"'{path}' would unpack to more than {most}", hint=_DISTRUST)
        found.append(member)
    clash = find_clash(member.name for member in found)
    if clash is not None:
        raise BundleError(f"{clash[0]!r} and {clash[1]!r} in '{path}' are one file on some systems", hint=_DISTRUST)
    return found


def _write_zip(entries: Mapping[str, Path | bytes], out: Path, executable: Collection[str]) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(entries):
            source = entries[name]
            entry = zipfile.ZipInfo(name, _EPOCH)
            # Unix: without it zipfile writes the system that it runs on, and other bytes on Windows.
            entry.create_system = 3
            entry.external_attr = (stat.S_IFREG | (0o755 if name in executable else 0o644)) << 16
            entry.file_size = _measure(source)
            with archive.open(entry, "w") as target:
                copy_into(source, target)


def _write_tar(entries: Mapping[str, Path | bytes], out: Path, executable: Collection[str]) -> None:
    # PAX alone holds long names in UTF-8 by a standard (POSIX.1-2001); a TarInfo made by hand bears no time and no
    # owner.
    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
        for name in sorted(entries):
            source = entries[name]
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755 if name in executable else 0o644
            entry.size = _measure(source)
            if isinstance(source, bytes):
                archive.addfile(entry, BytesIO(source))
                continue
            with source.open("rb") as file:
                archive.addfile(entry, file)


def _measure(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size
