"""Files that hold what a calibration has measured so far, so that one that was killed goes on."""

import hashlib
import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from edgekit._files import open_regular, replacing_file
from edgekit.errors import DataError, OutputError
from edgekit.model.tensors import Array

# A format of our own: nothing is allocated before it is held against the size of the file, nothing is used before the
# digest of all of it is right, and no array is copied to be written. An .npz promises none of these.
_MAGIC = b"edgekit calibration 1\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
# A million samples have headers of 40 MB. Both chosen by hand.
_MAX_HEADER_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 20
# Plain numbers, little endian where that matters: no objects, no structures.
_DTYPE = re.compile(r"\|[biu]1|<[iuf][248]")


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The samples taken in, by their position, with the sha256 of each, and the arrays that sum them up."""

    seen: dict[int, bytes]
    arrays: dict[str, Array]


class _ArrayHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]

    def size_bytes(self) -> int:
        return int(self.dtype[2:]) * math.prod(self.shape)


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    seen: dict[int, bytes]
    arrays: tuple[_ArrayHeader, ...]


def write_checkpoint(path: Path, key: str, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint whole or not at all; its last 32 bytes are the sha256 of all before.

    Raises:
        OutputError: the folder cannot be written, or is full.
    """
    with replacing_file(path) as temporary:
        try:
            digest = hashlib.sha256()
            with temporary.open("xb") as file:
                for chunk in _chunks(key, checkpoint):
                    digest.update(chunk)
                    file.write(chunk)
                file.write(digest.digest())
        except OSError as error:
            raise OutputError(f"cannot write '{path}': {error.strerror}", hint="give a --cache with space") from error


def read_checkpoint(path: Path, key: str, most_bytes: int) -> Checkpoint | None:
    """Returns what a file holds, None if there is none; it is read once, and used only if its sha256 is right.

    Raises:
        DataError: the file is damaged, cut off, of something else, or larger than `most_bytes`.
    """
    try:
        with open_regular(path) as file:
            return _read(file, path, key, most_bytes)
    except FileNotFoundError:
        return None
    except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
        raise _refusal(path, str(error) or "it is cut off") from error


def _chunks(key: str, checkpoint: Checkpoint) -> Iterator[bytes]:
    arrays = {name: np.ascontiguousarray(array) for name, array in checkpoint.arrays.items()}
    # Shapes are those before `ascontiguousarray`, which makes vectors of scalars.
    headers = tuple(
        _ArrayHeader(name=name, dtype=array.dtype.str, shape=checkpoint.arrays[name].shape)
        for name, array in arrays.items()
    )
    header = msgspec.msgpack.encode(_Header(key=key, seen=checkpoint.seen, arrays=headers))
    yield _MAGIC + _LENGTH.pack(len(header)) + header
    for array in arrays.values():
        data = array.reshape(-1).view(np.uint8)
        yield from (data[start : start + _CHUNK_BYTES].tobytes() for start in range(0, data.size, _CHUNK_BYTES))


def _read(file: IO[bytes], path: Path, key: str, most_bytes: int) -> Checkpoint:
    size_bytes = file.seek(0, 2)
    file.seek(0)
    if size_bytes > most_bytes:
        raise _refusal(path, f"it has {size_bytes} bytes, a calibration of this model {most_bytes} at most")
    digest = hashlib.sha256()

    def take(count: int) -> bytes:
        data = file.read(count)
        if len(data) < count:
            raise EOFError
        digest.update(data)
        return data

    if take(len(_MAGIC)) != _MAGIC:
        raise _refusal(path, "it is no calibration of this edgekit")
    (length,) = _LENGTH.unpack(take(_LENGTH.size))
    if length > min(_MAX_HEADER_BYTES, size_bytes):
        raise EOFError
    header = msgspec.msgpack.decode(take(length), type=_Header)
    _check_arrays(header, path, size_bytes - file.tell() - _DIGEST_BYTES)
    arrays: dict[str, Array] = {}
    for its in header.arrays:
        arrays[its.name] = array = np.empty(its.shape, its.dtype)
        flat, start = array.reshape(-1).view(np.uint8), 0
        while start < flat.size:
            part = take(min(_CHUNK_BYTES, flat.size - start))
            flat[start : start + len(part)] = np.frombuffer(part, np.uint8)
            start += len(part)
    if file.read(_DIGEST_BYTES + 1) != digest.digest():
        raise _refusal(path, "its sha256 is wrong")
    if header.key != key:
        raise _refusal(path, "it is of another model, other settings or another version")
    return Checkpoint(seen=header.seen, arrays=arrays)


def _check_arrays(header: _Header, path: Path, left_bytes: int) -> None:
    for its in header.arrays:
        if not _DTYPE.fullmatch(its.dtype) or any(size < 0 for size in its.shape):
            raise _refusal(path, f"it holds an array of {its.dtype[:20]!r}")
    if sum(its.size_bytes() for its in header.arrays) != left_bytes:
        raise EOFError


def _refusal(path: Path, reason: str) -> DataError:
    return DataError(f"'{path}' is not used: {reason}", hint="it is measured again")
