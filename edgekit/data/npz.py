"""Rows of `.npz` archives, read one at a time: the archive is never in memory as a whole.

A tensor `y` whose shape changes from row to row is two arrays: `y` with the values of all rows one after another, and
`y.shapes`, int64, with the shape of each row.
"""

import contextlib
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from edgekit.errors import DataError, reraised
from edgekit.model.tensors import PARSER_LOCK, Array, Tensors

SHAPES = ".shapes"
MALFORMED: tuple[type[Exception], ...] = (
    EOFError, KeyError, MemoryError, OSError, OverflowError, RuntimeError, StopIteration, SyntaxError, TypeError,
    ValueError, lzma.LZMAError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What numpy and zipfile raise on damaged arrays: a header is parsed as Python, and its shape asks for memory."""

_MAX_ROW_BYTES = 1 << 32
# Version 3.0 differs only in the encoding of field names, and arrays with fields are refused.
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class _Column(msgspec.Struct, frozen=True, kw_only=True):
    file: IO[bytes]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    count: int
    shapes: "_Column | None" = None


def count_rows(path: Path) -> int:
    """Returns how many rows the arrays of an archive have.

    Raises:
        DataError: the file is no archive of plain arrays, or its arrays have unequal lengths.
    """
    with _open_columns(path) as columns:
        return _count(columns, path)


def read_rows(path: Path) -> Iterator[Tensors]:
    """Yields row i of every array, for each i in order.

    Raises:
        DataError: the file is no archive of plain arrays, or is damaged.
    """
    with _open_columns(path) as columns:
        for _ in range(_count(columns, path)):
            yield {name: _read_row(column, path) for name, column in columns.items()}
        # zipfile compares the checksum only at the end; without this read a damaged last row would pass.
        torn = next((name for name, column in columns.items() if column.shapes and column.file.read(1)), None)
        if torn is not None:
            raise DataError(f"array '{torn}' of '{path}' is longer than its shapes say", hint="build it again")


def open_npy(path: Path, *, mapped: bool = False) -> Array:
    """Returns the array of a `.npy` file; a `mapped` one stays in the file, and unread parts take no memory.

    Raises:
        OSError: the file cannot be read.
        Exception: one of `MALFORMED`, if it holds no plain array.
    """
    # No pickle: loading one runs code of whoever wrote the file.
    with PARSER_LOCK:
        array: Array = np.load(path, allow_pickle=False, mmap_mode="r" if mapped else None)
    return array


@contextlib.contextmanager
def _open_columns(path: Path) -> Generator[dict[str, _Column]]:
    """Yields the columns of an archive; their files are closed after the block."""
    hint = "write it with numpy.savez"
    with contextlib.ExitStack() as opened:
        if not path.exists():
            raise DataError(f"the data '{path}' does not exist", hint="it must stay where it is while it is read")
        with reraised(MALFORMED, DataError(f"'{path}' is not an .npz file, or is cut off", hint=hint)):
            archive = opened.enter_context(zipfile.ZipFile(path))
        odd = next((name for name in archive.namelist() if not name.endswith(".npy")), None)
        if odd is not None:
            raise DataError(f"'{path}' holds '{odd}', which is no array", hint=hint)
        columns: dict[str, _Column] = {}
        for name in (name.removesuffix(".npy") for name in archive.namelist()):
            with reraised(MALFORMED, DataError(f"array '{name}' of '{path}' is malformed", hint=hint)):
                columns[name] = _read_column(opened.enter_context(archive.open(f"{name}.npy")), name, path)
        for name in [name for name in columns if f"{name}{SHAPES}" in columns]:
            shapes = columns[f"{name}{SHAPES}"]
            # Only if it has the form that edgekit writes: an input may have such a name by chance.
            if not columns[name].shape and shapes.dtype == np.dtype("<i8") and len(shapes.shape) == 1:
                columns[name] = msgspec.structs.replace(columns[name], shapes=shapes)
                del columns[f"{name}{SHAPES}"]
        yield columns


def _count(columns: dict[str, _Column], path: Path) -> int:
    counts = {name: (column.shapes or column).count for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"'{path}' has arrays of unequal length: {counts}", hint="array[i] is sample i in each array")
    return next(iter(counts.values()), 0)


def _read_column(file: IO[bytes], name: str, path: Path) -> _Column:
    with PARSER_LOCK:
        shape, fortran, dtype = _READERS[np.lib.format.read_magic(file)](file)
    if any(dim < 0 for dim in shape) or dtype.itemsize == 0:
        raise ValueError(shape)
    if not shape:
        words = f"array '{name}' of '{path}' is a scalar, and each sample needs its own"
        raise DataError(words, hint=f"numpy.full(SAMPLES, {name}); or make it a constant: --freeze {name}=NUMBER")
    # Objects would be unpickled, which runs code.
    if dtype.hasobject:
        hint = "save numbers: numpy.stack(samples); samples of unequal size as a folder with a file for each"
        raise DataError(f"array '{name}' of '{path}' holds Python objects", hint=hint)
    if fortran:
        words = f"array '{name}' of '{path}' is in Fortran order, so that a sample cannot be read by itself"
        raise DataError(words, hint="save numpy.ascontiguousarray(array)")
    return _Column(file=file, dtype=dtype, shape=tuple(shape[1:]), count=shape[0])


def _read_row(column: _Column, path: Path) -> Array:
    if column.shapes is not None:
        dims = tuple(int(dim) for dim in _read_row(column.shapes, path))
        # Checked before they are multiplied: the product of large dimensions would be a size to allocate.
        if any(not 0 <= dim <= _MAX_ROW_BYTES for dim in dims):
            raise DataError(f"'{path}' has a row of the shape {list(dims)}", hint="build it again")
        column = msgspec.structs.replace(column, shape=dims, shapes=None)
    if (size_bytes := column.dtype.itemsize * math.prod(column.shape)) > _MAX_ROW_BYTES:
        raise DataError(f"'{path}' claims samples of {size_bytes} bytes", hint="one sample may have 4 GiB at most")
    with reraised(MALFORMED, DataError(f"'{path}' is damaged", hint="write it again with numpy.savez")):
        data = column.file.read(size_bytes)
    if len(data) < size_bytes:
        raise DataError(f"'{path}' is cut off", hint="write it again with numpy.savez")
    return np.frombuffer(data, column.dtype).reshape(column.shape)
