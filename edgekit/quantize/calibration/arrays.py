"""Arrays by name in one file: written one after the other, and read one at a time.

The file holds the bytes of the arrays, a table of their names, types and shapes, and the length of the table. A `.npz`
would take longer to read: each candidate plan reads all held-out samples, and the headers of small arrays are longer
than these. Nor would it promise that arrays take no more memory than the file has bytes.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from edgekit.errors import UsageError
from edgekit.model.tensors import Array
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
