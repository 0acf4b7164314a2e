"""What a calibration stores: arrays by name in one file, and checkpoints, from which one that was killed continues.

A file of arrays holds their bytes one after the other, a table of their names, types and shapes, and the length of the
table. A `.npz` would take longer to read: each candidate plan reads all held-out samples, and the headers of small
arrays are longer than these. Nor would it promise that arrays take no more memory than the file has bytes.
"""

import contextlib
import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from edgekit._files import STRICT_FLAGS, open_regular, replacing_file, try_lock
from edgekit.errors import DataError, OutputError, UsageError
from edgekit.model.tensors import Array
from edgekit.progress import Progress
from edgekit.serialize import ready_type

# The allowed types: plain numbers and texts, little endian if that matters; no objects, no structures.
_DTYPE = re.compile(r"\|[biu]1|<[iuf][248]|<U[0-9]{1,6}")
_LENGTH_BYTES = 8
_Places = dict[str, tuple[str, tuple[int, ...], int]]
"""The type, the shape and the first byte of each array."""


def write_arrays(file: IO[bytes], arrays: Iterable[tuple[str, Array]]) -> None:
    """Writes arrays one by one, so that no more than one need be in memory."""
    table = list[tuple[str, str, tuple[int, ...]]]()
    for name, array in arrays:
        file.write(np.ascontiguousarray(array).data)
        table.append((name, array.dtype.str, array.shape))
    encoded = msgspec.msgpack.encode(table)
    file.write(encoded + len(encoded).to_bytes(_LENGTH_BYTES, "little"))


def save_arrays(path: Path, arrays: Iterable[tuple[str, Array]]) -> None:
    """Writes a file of arrays, one by one.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as file:
        write_arrays(file, arrays)


def parse_arrays(data: Array) -> dict[str, Array]:
    """Returns the arrays in the bytes of a file, uint8 [bytes], as views of these.

    Raises:
        ValueError: the bytes are no such file.
    """
    start = _find_table(len(data), data[-_LENGTH_BYTES:].tobytes())
    places = _read_table(data[start:-_LENGTH_BYTES].tobytes(), start)
    return {
        name: data[first : first + _count_bytes(dtype, shape)].view(dtype).reshape(shape)
        for name, (dtype, shape, first) in places.items()
    }


class StoredArrays(Mapping[str, Array]):
    """The arrays in a file, each read when it is asked for; threads may read side by side."""

    def __init__(self, path: Path) -> None:
        """Reads the table of a file.

        Raises:
            UsageError: there is no such file, or it is damaged.
        """
        self._path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(-min(size, _LENGTH_BYTES), 2)
                start = _find_table(size, file.read())
                file.seek(start)
                self._places = _read_table(file.read(size - start - _LENGTH_BYTES), start)
        except FileNotFoundError as error:
            words = f"the statistics of the calibration, '{path.parent}', are gone"
            raise UsageError(words, hint="calibrate again") from error
        except ValueError as error:
            raise UsageError(f"the statistics '{path}' are damaged", hint="calibrate again") from error

    def __getitem__(self, name: str) -> Array:
        dtype, shape, first = self._places[name]
        return np.fromfile(self._path, dtype, math.prod(shape), offset=first).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _find_table(size: int, length: bytes) -> int:
    start = size - _LENGTH_BYTES - int.from_bytes(length, "little")
    if size < _LENGTH_BYTES or start < 0:
        raise ValueError("it is cut off")
    return start


def _read_table(table: bytes, end: int) -> _Places:
    places: _Places = {}
    first = 0
    # A DecodeError of msgspec is a ValueError.
    for name, dtype, shape in msgspec.msgpack.decode(table, type=ready_type(list[tuple[str, str, tuple[int, ...]]])):
        if not _DTYPE.fullmatch(dtype) or any(length < 0 for length in shape):
            raise ValueError(f"it holds an array of {dtype[:20]!r}")
        places[name] = dtype, shape, first
        first += _count_bytes(dtype, shape)
    if first != end:
        raise ValueError("it is cut off")
    return places


def _count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


_DIGEST_BYTES = 32
# The arrays with the key, the indices of the samples and their digests.
_KEY, _SEEN, _DIGESTS = "key", "seen", "digests"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The sha256 of each measured sample, by its index, and the arrays with the sums over these samples."""

    seen: dict[int, bytes]
    arrays: dict[str, Array]


def write_checkpoint(path: Path, key: str, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint atomically; its last 32 bytes are the sha256 of all before.

    Raises:
        OutputError: the folder cannot be written, or is full.
    """
    digests = np.frombuffer(b"".join(checkpoint.seen.values()), np.uint8)
    facts = {_KEY: np.array(key), _SEEN: np.array([*checkpoint.seen], np.int64), _DIGESTS: digests}
    with replacing_file(path) as temporary:
        try:
            with temporary.open("x+b") as file:
                write_arrays(file, chain(checkpoint.arrays.items(), facts.items()))
                file.seek(0)
                file.write(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise OutputError(f"cannot write '{path}': {error.strerror}", hint="give a --cache with space") from error


def read_checkpoint(path: Path, key: str, most_bytes: int) -> Checkpoint | None:
    """Returns the checkpoint in a file, None if there is no file; nothing is used before its sha256 is checked.

    Arrays are views of the file's contents, which is read once: each keeps all of them in memory.

    Raises:
        DataError: the file is damaged, truncated, of another kind, or larger than `most_bytes`.
    """
    try:
        with open_regular(path) as file:
            size_bytes = file.seek(0, 2)
            if size_bytes > most_bytes:
                raise _refusal(path, f"it has {size_bytes} bytes, a calibration of this model {most_bytes} at most")
            file.seek(0)
            data = np.fromfile(file, np.uint8, size_bytes)
        body = data[:-_DIGEST_BYTES]
        if hashlib.sha256(body.data).digest() != data[-_DIGEST_BYTES:].tobytes():
            raise _refusal(path, "its sha256 is wrong")
        arrays = parse_arrays(body)
        own, seen, digests = (arrays.pop(name) for name in (_KEY, _SEEN, _DIGESTS))
        rows = digests.reshape(len(seen), _DIGEST_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refusal(path, str(error)) from error
    if own.tobytes() != np.array(key).tobytes():
        raise _refusal(path, "it is of another model, other settings or another version")
    return Checkpoint(seen=dict(zip(seen.tolist(), map(bytes, rows), strict=True)), arrays=arrays)


def _refusal(path: Path, reason: str) -> DataError:
    return DataError(f"'{path}' is not used: {reason}", hint="it is measured again")


# Writing checkpoints takes at most a twentieth of the time. A killed run then loses the time of 20 writes, or 0.2 s.
# Chosen by hand; tools/bench/calibrate_ratio.py measures without a cache.
_WRITING_SHARE = 20
_LEAST_SECONDS = 0.2


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of the cache, and the sha256 of each sample in order, as `check_samples` returns them."""

    folder: Path
    digests: tuple[bytes, ...]


class CalibrationCache:
    """Reads and writes the checkpoints of one calibration, each a part by name; without a folder it does nothing.

    `notes` lists problems with them.
    """

    def __init__(self, folder: Path | None, key: str, progress: Progress) -> None:
        self._folder, self._key, self.progress = folder, key, progress
        self._next = time.monotonic() + _LEAST_SECONDS
        self.notes: list[str] = []

    def load(self, part: str, digests: Mapping[int, bytes] | None, most_bytes: int) -> Checkpoint | None:
        """Returns the checkpoint of a part; None if there is none, or if its samples have other digests.

        Without `digests` the caller must compare those in `seen`.
        """
        if self._folder is None:
            return None
        try:
            found = read_checkpoint(self._folder / part, self._key, most_bytes)
        except DataError as error:
            self.note(error.message)
            return None
        if found is None or digests is None or found.seen.items() <= digests.items():
            return found
        self.note(f"'{self._folder / part}' is not used: it is of other samples")
        return None

    def save(self, part: str, seen: Mapping[int, bytes], arrays: dict[str, Array], *, now: bool) -> None:
        """Writes a part if enough time has passed, or if `now`; after a failure nothing more is written."""
        began = time.monotonic()
        if self._folder is None or not (now or began >= self._next):
            return
        try:
            write_checkpoint(self._folder / part, self._key, Checkpoint(seen=dict(seen), arrays=arrays))
        except OutputError as error:
            self.note(f"the calibration is not kept: {error.message}")
            self._folder = None
        ended = time.monotonic()
        self._next = ended + max(_LEAST_SECONDS, _WRITING_SHARE * (ended - began))

    def note(self, text: str) -> None:
        """Reports a problem, as progress and in `notes`."""
        self.notes.append(text)
        self.progress(text)


@contextlib.contextmanager
def open_cache(
    settings: CacheSettings | None, key: str, progress: Progress, kind: str = "calibration"
) -> Generator[CalibrationCache]:
    """Yields the cache of a calibration (or of another `kind`); one that another run has open is not used.

    Raises:
        OutputError: the folder cannot be made.
    """
    if settings is None:
        yield CalibrationCache(None, key, progress)
        return
    folder = settings.folder / f"{kind}-{key[:32]}"
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        # Only the owner may read it, since it holds the held-out samples.
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
