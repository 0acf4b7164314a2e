"""Files that hold what a calibration has measured so far, so that one that was killed goes on."""

import hashlib
import math
import re
import struct
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from edgekit._files import open_regular, replacing_file
from edgekit.errors import DataError, OutputError
from edgekit.model.tensors import Array

# A format of our own: magic, length of the header, header, arrays, sha256 of all before. Nothing is used before that is
# right, arrays take no more memory than the file has, and none is copied. An .npz promises none of these.
_MAGIC = b"edgekit calibration 1\n"
_LENGTH = struct.Struct("<Q")
_DIGEST_BYTES = 32
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
    headers = tuple(
        _ArrayHeader(name=name, dtype=array.dtype.str, shape=array.shape) for name, array in checkpoint.arrays.items()
    )
    header = msgspec.msgpack.encode(_Header(key=key, seen=checkpoint.seen, arrays=headers))
    parts: list[bytes | memoryview] = [_MAGIC, _LENGTH.pack(len(header)), header]
    parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in checkpoint.arrays.values()]
    with replacing_file(path) as temporary:
        try:
            digest = hashlib.sha256()
            with temporary.open("xb") as file:
                for part in parts:
                    digest.update(part)
                    file.write(part)
                file.write(digest.digest())
        except OSError as error:
            raise OutputError(f"cannot write '{path}': {error.strerror}", hint="give a --cache with space") from error


def read_checkpoint(path: Path, key: str, most_bytes: int) -> Checkpoint | None:
    """Returns what a file holds, None if there is none; it is read once, and used only if its sha256 is right.

    Arrays are views of what was read: they hold all of it in memory.

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


def _read(file: IO[bytes], path: Path, key: str, most_bytes: int) -> Checkpoint:
    size_bytes = file.seek(0, 2)
    file.seek(0)
    if size_bytes > most_bytes:
        raise _refusal(path, f"it has {size_bytes} bytes, a calibration of this model {most_bytes} at most")
    data = np.fromfile(file, np.uint8, size_bytes)
    body, start = data[:-_DIGEST_BYTES], len(_MAGIC) + _LENGTH.size
    if body[: len(_MAGIC)].tobytes() != _MAGIC:
        raise _refusal(path, "it is no calibration of this edgekit")
    if len(body) < start or hashlib.sha256(body.data).digest() != data[-_DIGEST_BYTES:].tobytes():
        raise _refusal(path, "its sha256 is wrong")
    (length,) = _LENGTH.unpack(body[len(_MAGIC) : start].tobytes())
    header = msgspec.msgpack.decode(body[start : start + length].tobytes(), type=_Header)
    start += length
    _check_arrays(header, path, len(body) - start)
    arrays: dict[str, Array] = {}
    for its in header.arrays:
        arrays[its.name] = body[start : start + its.size_bytes()].view(its.dtype).reshape(its.shape)
        start += its.size_bytes()
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
