"""Writes files and folders whole or not at all, and computes digests; no other module writes files."""

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, TypeVar

import msgspec

from edgekit.errors import BundleError, OutputError, UsageError, reading, reraised
from edgekit.machine import find_module
from edgekit.serialize import UNDECODABLE, ready_type

fcntl = find_module("fcntl")

STRICT_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags of `os.open` that refuse links and do not wait for pipes, on systems that have them."""

_CHUNK_BYTES = 1 << 20


_T = TypeVar("_T")
AnyPath = str | os.PathLike[str]
"""A path as users of the Python API write it."""


def as_path(given: AnyPath) -> Path:
    """Returns a path that a user of the Python API gave.

    Raises:
        UsageError: it is no path.
    """
    try:
        return Path(given)
    except TypeError as error:
        hint = "give its .path" if hasattr(given, "path") else "give a str or a pathlib.Path"
        raise UsageError(f"{' '.join(repr(given).split()):.100} is no path", hint=hint) from error


def list_below(place: Path) -> list[Path]:
    """Returns the files in a folder and its subfolders, sorted; a path that is no folder is returned itself."""
    return sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]


def digest_file(path: Path) -> str:
    """Returns the sha256 of a file in hex; the file is read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_bytes(data: bytes) -> str:
    """Returns the sha256 of some bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def digest_files(files: Mapping[str, Path]) -> str:
    """Returns the sha256 of a set of files: of their names, contents and executable bits."""
    lines = [f"{digest_unchanged(path)} {int(os.access(path, os.X_OK))} {name}" for name, path in sorted(files.items())]
    return digest_bytes("\n".join(lines).encode())


def digest_unchanged(path: Path) -> str:
    """Returns the sha256 of a file; it is read again only if its size or one of its times has changed."""
    facts = path.stat()
    # The ctime also reveals a change after which a program reset the modification time.
    return _digest_known(path, (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))


@functools.lru_cache(maxsize=64)
def _digest_known(path: Path, facts: tuple[int, ...]) -> str:  # noqa: ARG001 - part of the key
    return digest_file(path)


def measure_content(source: Path | bytes) -> int:
    """Returns the number of bytes of a file, or of the bytes themselves."""
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def open_regular(path: Path) -> IO[bytes]:
    """Opens a file that must be a regular one: a link could lead anywhere, and a pipe would block forever.

    Raises:
        OSError: it is no plain file, or cannot be read.
    """
    # For systems without O_NOFOLLOW; harmless on the others.
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link")
    descriptor = os.open(path, os.O_RDONLY | STRICT_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file")
    return os.fdopen(descriptor, "rb")


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all, through a temporary file in the same folder.

    Raises:
        OutputError: the folder cannot be written.
    """
    with replacing_file(path) as temporary, writing(path):
        temporary.write_bytes(data)


def require_place(path: Path) -> None:
    """Refuses a path that cannot be written, as far as can be known now, before hours of work are spent.

    Raises:
        OutputError: it is a folder, or lies in one that cannot be written.
    """
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    reason = "it is a folder" if path.is_dir() or path.name in {"", ".."} else ""
    if _is_special(path):
        reason = _SPECIAL
    elif not folder.is_dir():
        reason = f"'{folder}' is no folder"
    elif not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        reason = "this place is read-only"
    if reason:
        raise OutputError(f"cannot write '{path}': {reason}", hint="choose a place you may write, with space")


_SPECIAL = "it is a device or a pipe, in whose place a file would be put"


def _is_special(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())


def require_apart(outputs: Iterable[Path], inputs: Iterable[Path]) -> None:
    """Refuses outputs that would overwrite an input or each other.

    Raises:
        OutputError: one would.
    """
    taken = {path.resolve(): "one that is read" for path in inputs}
    for path in outputs:
        if (place := path.resolve()) in taken:
            raise OutputError(f"'{path}' would be written over {taken[place]}", hint="give it another name")
        taken[place] = "another one that is written"


def write_new(path: Path, chunks: Iterable[bytes], *, mode: int = 0o666) -> None:
    """Writes a file that does not exist yet, chunk by chunk, and makes its folders; `mode` is subject to the umask.

    If writing fails, or the iterator of chunks raises, the file is removed.

    Raises:
        OutputError: the folder cannot be written, or there is such a file.
    """
    opener = partial(os.open, mode=mode)
    with _made(path.parent), writing(path), open(path, "xb", opener=opener) as file:
        try:
            file.writelines(chunks)
        except BaseException:
            path.unlink()
            raise


def read_chunks(file: IO[bytes], most: int | None = None) -> Iterator[bytes]:
    """Yields the rest of an open file, or `most` bytes of it, in chunks."""
    while chunk := file.read(_CHUNK_BYTES if most is None else min(most, _CHUNK_BYTES)):
        yield chunk
        most = None if most is None else most - len(chunk)


def copy_into(source: Path | bytes, target: IO[bytes]) -> None:
    """Copies a file, or the bytes themselves, into an open file."""
    if isinstance(source, bytes):
        target.write(source)
        return
    with source.open("rb") as file:
        shutil.copyfileobj(file, target, _CHUNK_BYTES)


def replace_file(source: Path, path: Path) -> None:
    """Copies a file over whatever is at `path`, whole or not at all; does nothing if `source` is `path`.

    Raises:
        OutputError: the folder cannot be written.
    """
    if source != path:
        with replacing_file(path) as temporary, writing(path):
            shutil.copyfile(source, temporary)


def copy_once(source: Path, path: Path) -> None:
    """Copies a file to a path where there is none; an existing file stays as it is.

    Raises:
        OutputError: the folder cannot be written.
    """
    if not path.exists():
        replace_file(source, path)


@contextlib.contextmanager
def replacing_file(path: Path) -> Generator[Path]:
    """Yields a temporary path beside `path`; it is renamed to `path` if the block succeeds, and removed if not.

    Raises:
        OutputError: the folder cannot be written.
    """
    if path.name in {"", ".."}:
        raise OutputError(f"cannot write '{path}': it is a folder", hint="give the name of a file")
    # In the same folder, not in /tmp: a rename is atomic only within a file system.
    with _temporary_folder(path.parent, path) as folder:
        temporary = folder / path.name
        yield temporary
        with writing(path):
            temporary.replace(path)


@contextlib.contextmanager
def staged_folder(path: Path) -> Generator[Path]:
    """Yields an empty folder beside `path`; it replaces `path` if the block succeeds, and is removed if not.

    Raises:
        OutputError: the parent cannot be written, or `path` is a file.
    """
    # "." and ".." cannot be the target of a rename.
    if path.name in {"", ".."}:
        raise OutputError(f"'{path}' cannot be replaced", hint="give the name of a new folder")
    with _holder(path) as holder:
        staging = holder / path.name
        staging.mkdir()
        yield staging
        _publish(staging, path, holder)


@contextlib.contextmanager
def one_at_a_time(place: Path) -> Generator[None]:
    """Locks the parent folder of `place` for a block: other processes that want it wait.

    The lock (flock) belongs to the system: it ends with the process, and leaves no file behind. Blocks for one folder
    cannot be nested. On systems without such locks (Windows) nobody waits, and the last writer wins.

    Raises:
        OutputError: the folder cannot be made.
    """
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    with writing(place):
        folder = os.open(place.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def try_lock(descriptor: int) -> bool:
    """Locks an open file and returns True, False if another process has the lock; the kernel frees it at exit."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def staged_entries(path: Path) -> Generator[Path]:
    """Yields an empty folder; if the block succeeds its entries are moved into `path`, else they are removed.

    Other entries of `path` stay. Each new entry, file or folder, appears whole.

    Raises:
        OutputError: `path` cannot be written, or is a file.
    """
    with _holder(path) as holder:
        staging = holder / "entries"
        staging.mkdir()
        yield staging
        with writing(path):
            path.mkdir(exist_ok=True)
        for entry in sorted(staging.iterdir()):
            _publish(entry, path / entry.name, holder)


@contextlib.contextmanager
def _holder(path: Path) -> Generator[Path]:
    if path.exists() and not path.is_dir():
        raise OutputError(f"'{path}' is a file, not a folder", hint="give another --out")
    with _temporary_folder(path.parent, path) as holder:
        yield holder


@contextlib.contextmanager
def _temporary_folder(parent: Path, place: Path, prefix: str = ".edgekit-") -> Generator[Path]:
    """Yields a folder inside `parent` that is removed after the block; error messages name `place`."""
    with _made(parent):
        with writing(place):
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _made(folder: Path) -> Generator[None]:
    """Makes a folder and its parents for a block, and afterwards removes those of them that are empty."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for place in missing:
            with contextlib.suppress(OSError):
                # Fails if the folder now holds the result, as it should.
                place.rmdir()


def _publish(entry: Path, place: Path, holder: Path) -> None:
    with writing(place):
        if place.is_dir() and not place.is_symlink():
            # A folder cannot be renamed over one that is not empty: the old one is moved away, and removed with the
            # holder.
            place.replace(holder / f"replaced-{place.name}")
        entry.replace(place)


@contextlib.contextmanager
def work_folder(parent: Path | None = None) -> Generator[Path]:
    """Yields a temporary folder, removed afterwards; from one inside `parent`, files can be renamed into `parent`.

    Raises:
        OutputError: `parent` cannot be written.
    """
    place = parent or Path(tempfile.gettempdir())
    with _temporary_folder(place, place, ".edgekit-" if parent else "edgekit-") as folder:
        yield folder


_IN_WORK = re.compile(r"[^\s'\"]*[/\\]\.?edgekit-[a-z0-9_]{8}[/\\]")


def hide_work(text: str) -> str:
    """Returns a text in which paths of files in work folders, which are gone when it is read, are their names."""
    return _IN_WORK.sub("", text)


def move_file(source: Path, path: Path) -> None:
    """Moves a file into place by a rename on the same file system, which is atomic.

    Raises:
        OutputError: the folder cannot be written.
    """
    with writing(path):
        source.replace(path)


def safe_join(root: Path, name: str) -> Path:
    """Returns `root / name` for a relative name that stays below `root`.

    Raises:
        BundleError: the name is absolute, climbs out, or leads out through a link.
    """
    parts = PurePosixPath(name)
    path = root / name
    # A backslash is an ordinary character here and a separator on Windows: a name must mean the same path everywhere.
    # No file system takes names with zero bytes, or with parts of more than 255 bytes.
    strange = "\\" in name or "\0" in name or any(len(part.encode(errors="replace")) > 255 for part in parts.parts)
    if strange or parts.is_absolute() or not parts.parts or ".." in parts.parts:
        raise BundleError(f"'{name[:255]}' is not a safe file name", hint="the bundle was altered: build it again")
    # Unlike Path.resolve this accepts links that form a circle: opening the file then raises an error.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise BundleError(f"'{name}' leads out of '{root}'", hint="the bundle was altered: build it again")
    return path


@contextlib.contextmanager
def writing(path: Path) -> Generator[None]:
    """Turns an error of the system in the block into the message that `path` cannot be written.

    Raises:
        OutputError: there was one, or `path` is a device or a pipe: a rename would put a file in its place, also in
            that of /dev/null.
    """
    try:
        if _is_special(path):
            raise OutputError(f"cannot write '{path}': {_SPECIAL}", hint="give the name of a file")
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hint = "choose a place you may write, with space"
        raise OutputError(f"cannot write '{path}': {reason}", hint=hint) from error


def read_kept(path: Path, kind: type[_T]) -> _T | None:
    """Returns the content of a JSON file of an earlier run, None if there is none or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ready_type(kind))
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


# A larger state was not written by edgekit: a plan takes about 100 bytes a tensor, and a search tries about 10 plans.
_MAX_STATE_BYTES = 1 << 28


class _State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a search has `done`, with its sha256, and the facts that identify the search, such as the model."""

    key: dict[str, str]
    sha256: str
    done: msgspec.Raw


def write_state(path: Path, key: Mapping[str, str], done: object) -> None:
    """Writes what a search has done, from which an interrupted one continues."""
    encoded = msgspec.json.encode(done)
    state = _State(key=dict(key), sha256=digest_bytes(encoded), done=msgspec.Raw(encoded))
    write_file(path, msgspec.json.encode(state))


def read_state(path: Path, key: Mapping[str, str], kind: type[_T]) -> _T | None:
    """Returns what `write_state` wrote; None if there is no file yet.

    Raises:
        UsageError: the file belongs to another search, was changed, or is no state of a search.
        OutputError: it cannot be written.
    """
    require_place(path)
    if not path.exists():
        return None
    hint = f"remove '{path}' or name another file"
    malformed = UsageError(f"'{path}' is no state of a search", hint=hint)
    with reading(f"the state '{path}'", UsageError, hint), reraised(UNDECODABLE, malformed, quote=True):
        with open_regular(path) as stream:
            state = msgspec.json.decode(stream.read(_MAX_STATE_BYTES), type=ready_type(_State))
        if other := [name for name in key if state.key.get(name) != key[name]]:
            raise UsageError(f"'{path}' is of a search for another {' and '.join(other)}", hint=hint)
        if state.sha256 != digest_bytes(bytes(state.done)):
            raise UsageError(f"'{path}' was changed after it was written", hint=hint)
        return msgspec.json.decode(state.done, type=ready_type(kind))
