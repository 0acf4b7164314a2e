"""Where installed emulators live: a folder of the user, each emulator whole or not at all."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from edgekit._files import digest_file, one_at_a_time, staged_folder

_STAMP = "installed-from"


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
