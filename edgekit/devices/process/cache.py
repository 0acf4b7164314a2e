"""Where installed emulators live: a folder of the user, each emulator whole or not at all."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

import msgspec

from edgekit._files import digest_file, one_at_a_time, staged_folder

_STAMP = "installed-from"
FACTS = "device.json"
"""What an emulator that is built here says of itself."""


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """What an emulator that was built here says of itself; `sources` is the digest of what it was built from."""

    sources: str


_BuiltT = TypeVar("_BuiltT", bound=Built)


def cache_folder() -> Path:
    """Returns `$EDGEKIT_CACHE`, or `edgekit` below `$XDG_CACHE_HOME` or `~/.cache`."""
    own = os.environ.get("EDGEKIT_CACHE", "")
    if own:
        return Path(own).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache").absolute() / "edgekit"


def find_installed(name: str, lock: Path) -> Path | None:
    """Returns the folder of an emulator that was installed from exactly this lock file, or None."""
    folder = cache_folder() / name
    stamp = folder / _STAMP
    # Another lock file is another emulator: it is installed anew, not mended.
    if stamp.is_file() and stamp.read_text() == digest_file(lock):
        return folder
    return None


@contextlib.contextmanager
def installing(name: str, lock: Path) -> Generator[Path]:
    """Yields an empty folder, which becomes the emulator's if the block ends well and is gone if not.

    Raises:
        OutputError: the cache cannot be written.
    """
    with one_at_a_time(cache_folder() / name), staged_folder(cache_folder() / name) as staging:
        yield staging
        (staging / _STAMP).write_text(digest_file(lock))


def read_facts(folder: Path, kind: type[_BuiltT], sources: str) -> _BuiltT | None:
    """Returns what an emulator in a folder says of itself, or None where other sources built it.

    `sources` is the digest of those that would build it now.
    """
    try:
        facts = msgspec.json.decode((folder / FACTS).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
    return facts if facts.sources == sources else None
