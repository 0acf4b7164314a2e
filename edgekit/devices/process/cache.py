"""Where installed emulators live: a folder of the user, each emulator whole or not at all; and the sources of some."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from edgekit._files import digest_bytes, digest_file, one_at_a_time, staged_folder

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


def find_sources(name: str) -> Path:
    """Returns the folder of C and C++ sources that ship with edgekit; in a checkout that is `tools/NAME`."""
    shipped = Path(__file__).parents[2] / f"_{name}"
    return shipped if shipped.is_dir() else Path(__file__).parents[3] / "tools" / name


def digest_sources(name: str) -> str:
    """Returns the digest of the sources of a program: those of its own folder, and of the runner linked with them."""
    runner = find_sources("runner")
    files = [*runner.rglob("*.cpp"), *runner.rglob("*.h"), *find_sources(name).iterdir()]
    return digest_bytes("\n".join(sorted(f"{path.name} {digest_file(path)}" for path in files)).encode())
