"""The calibration cache: the folder where a calibration is kept while it runs, and afterwards."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

import msgspec

from edgekit._files import STRICT_FLAGS, try_lock
from edgekit.errors import DataError, OutputError
from edgekit.model.tensors import Array
from edgekit.progress import Progress
from edgekit.quantize.calibration.checkpoint import Checkpoint, read_checkpoint, write_checkpoint

# Writing checkpoints takes at most one part in so many of the time: what is lost when a run is killed is then 20 times
# what one write takes, or 0.2 s. Chosen by hand; tools/bench/calibrate_ratio.py measures without a cache.
_WRITING_SHARE = 20
_LEAST_SECONDS = 0.2


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where to keep a calibration, and the sha256 of each sample in order, as `check_samples` returns them."""

    folder: Path
    digests: tuple[bytes, ...]


class CalibrationCache:
    """Reads and writes the parts of one calibration; without a folder it does nothing.

    `notes` says what was wrong with them.
    """

    def __init__(self, folder: Path | None, key: str, progress: Progress) -> None:
        self._folder, self._key, self._progress = folder, key, progress
        self._next = time.monotonic() + _LEAST_SECONDS
        self.notes: list[str] = []

    def load(self, part: str, digests: Mapping[int, bytes] | None, most_bytes: int) -> Checkpoint | None:
        """Returns what is kept of samples with these digests at their positions, None if there is none.

        Without `digests` it is for the caller to look at those that are `seen`.
        """
        if self._folder is None:
            return None
        try:
            found = read_checkpoint(self._folder / part, self._key, most_bytes)
        except DataError as error:
            self.note(error.message)
            return None
        seen = {} if found is None or digests is None else found.seen
        if digests is not None and any(digests.get(index) != digest for index, digest in seen.items()):
            self.note(f"'{self._folder / part}' is not used: it is of other samples")
            return None
        return found

    def save(self, part: str, seen: Mapping[int, bytes], arrays: Callable[[], dict[str, Array]], *, now: bool) -> None:
        """Writes a part if it is time to, or if it must be `now`; where that fails, nothing is kept any more."""
        began = time.monotonic()
        if self._folder is None or not (now or began >= self._next):
            return
        try:
            write_checkpoint(self._folder / part, self._key, Checkpoint(seen=dict(seen), arrays=arrays()))
        except OutputError as error:
            self.note(f"the calibration is not kept: {error.message}")
            self._folder = None
        ended = time.monotonic()
        self._next = ended + max(_LEAST_SECONDS, _WRITING_SHARE * (ended - began))

    def tell(self, text: str) -> None:
        """Says how far it is."""
        self._progress(text)

    def note(self, text: str) -> None:
        """Says what is wrong, now and in the report."""
        self.notes.append(text)
        self._progress(text)


@contextlib.contextmanager
def open_cache(
    settings: CacheSettings | None, key: str, progress: Progress, kind: str = "calibration"
) -> Generator[CalibrationCache]:
    """Yields the cache of the calibration (or of another `kind`) with a key; one that another run has open is left.

    Raises:
        OutputError: the folder cannot be made.
    """
    if settings is None:
        yield CalibrationCache(None, key, progress)
        return
    folder = settings.folder / f"{kind}-{key[:32]}"
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        # Its owner's alone: the samples held out to judge by are in it.
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | STRICT_FLAGS, 0o600)
    except OSError as error:
        raise OutputError(f"cannot write '{folder}': {error.strerror}", hint="give another --cache") from error
    try:
        cache = CalibrationCache(folder, key, progress)
        if try_lock(lock):
            for left in folder.glob(".edgekit-*"):
                shutil.rmtree(left, ignore_errors=True)
        else:
            cache = CalibrationCache(None, key, progress)
            cache.note(f"another run has '{folder}' open, or this system has no locks: this one keeps nothing")
        yield cache
    finally:
        os.close(lock)
