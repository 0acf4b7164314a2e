"""Writing samples to an `.npz` that is the same to the byte for the same content, in memory that stays flat."""

import contextlib
import math
import zipfile
from collections.abc import Generator, Iterable
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from edgekit._files import copy_into, replacing_file, work_folder
from edgekit.data.npz import SHAPES
from edgekit.errors import DataError
from edgekit.model.tensors import Array, Tensors, TensorSpec

# The first moment that a zip can hold (APPNOTE.TXT, 4.4.6).
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_rows(path: Path, samples: Iterable[Tensors], *, ragged: bool = False) -> tuple[tuple[TensorSpec, ...], int]:
    """Writes one array per tensor, row i of it being sample i, and returns their specs and the number of samples.

    With `ragged` a tensor `y` may change its shape, not its rank: `y` then holds the values of all samples one after
    another, `y.shapes` the shape of each, and in its spec the dimensions that change are unknown.

    Arrays are stored, not deflated, because deflated bytes depend on the version of zlib; entries are sorted by name
    and bear no time. Strings are kept in memory until the end, numbers are not. `edgekit.npz` reads them back.

    Raises:
        DataError: a tensor has another shape or dtype in some sample, or there is no sample.
        OutputError: the file cannot be written.
    """
    with writing_rows(path, ragged=ragged) as rows:
        for sample in samples:
            rows.append(sample)
    return rows.specs, rows.count


@contextlib.contextmanager
def writing_rows(path: Path, *, ragged: bool = False) -> Generator["Rows"]:
    """Yields rows to append samples to; they are in the file, as `write_rows` writes it, once the block has ended well.

    Raises:
        DataError: a tensor has another shape or dtype in some sample, or there is no sample.
        OutputError: the file cannot be written.
    """
    with work_folder() as work, contextlib.ExitStack() as opened:
        rows = Rows(path.name, work, opened, ragged=ragged)
        yield rows
        opened.close()
        with replacing_file(path) as temporary:
            rows.pack(temporary)


class Rows:
    """Samples on their way into a file."""

    def __init__(self, name: str, work: Path, opened: contextlib.ExitStack, *, ragged: bool) -> None:
        self.count = 0
        self._name, self._work, self._opened, self._ragged = name, work, opened, ragged
        self._columns: dict[str, _Column] = {}

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The name, type and shape of each tensor."""
        return tuple(column.spec for column in self._columns.values())

    def append(self, sample: Tensors) -> None:
        """Takes the next sample.

        Raises:
            DataError: a tensor has another shape or dtype than before, or is new or gone.
        """
        if self.count and sample.keys() != self._columns.keys():
            held = ", ".join(self._columns)
            raise DataError(
                f"sample {self.count} for '{self._name}' holds {', '.join(sample)}; sample 0 {held}",
                hint="a sequence of changing length cannot be kept: cut the model before it (prepare --outputs)",
            )
        for place, (name, value) in enumerate(sample.items()):
            if name not in self._columns:
                self._columns[name] = _Column(name, value, self._work / str(place), ragged=self._ragged)
                self._opened.callback(self._columns[name].close)
            self._columns[name].append(value, self.count)
        self.count += 1

    def pack(self, path: Path) -> None:
        """Writes the archive of all samples.

        Raises:
            DataError: there is no sample, or two tensors need one name.
        """
        if not self.count:
            raise DataError(f"there is no sample for '{self._name}'", hint="give at least one, better 100")
        entries = {f"{name}{part}": column for name, column in self._columns.items() for part in column.parts}
        if len(entries) < sum(len(column.parts) for column in self._columns.values()):
            raise DataError(f"'{self._name}' has two tensors of one name with '{SHAPES}'", hint="rename an output")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(entries):
                entries[name].pack(archive, name)


class _Column:
    """The rows of one tensor: numbers in a raw file until their count is known, strings in memory."""

    def __init__(self, name: str, first: Array, path: Path, *, ragged: bool) -> None:
        is_text = first.dtype.kind in "UO"
        self._name, self._ragged = name, ragged
        self._dtype = np.dtype(np.str_) if is_text else first.dtype
        self._path = path
        self._words: list[Array] = []
        self._shapes: list[tuple[int, ...]] = []
        self._file: IO[bytes] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """What stands behind the name of each of its arrays."""
        # Ragged only where it has to be: outputs of one shape stay a plain array that numpy reads.
        return ("",) if len(set(self._shapes)) == 1 else ("", SHAPES)

    @property
    def spec(self) -> TensorSpec:
        """Its type, and the dimensions that all rows have."""
        dims = (next(iter(sizes)) if len(sizes) == 1 else None for sizes in map(set, zip(*self._shapes, strict=True)))
        return TensorSpec(name=self._name, dtype=_name_dtype(self._dtype), shape=tuple(dims))

    def append(self, value: Array, index: int) -> None:
        is_text = value.dtype.kind in "UO"
        self._check(value, index, is_text=is_text)
        self._shapes.append(value.shape)
        if is_text:
            self._words.append(_as_text(value, self._name))
            return
        if self._file is None:
            # In a file until the count is known: a header of an `.npy` holds the number of rows, and comes first.
            self._file = self._path.open("wb")
        self._file.write(np.ascontiguousarray(value).tobytes())

    def close(self) -> None:
        """Ends the writing of rows."""
        if self._file is not None:
            self._file.close()

    def _check(self, value: Array, index: int, *, is_text: bool) -> None:
        first = self._shapes[0] if self._shapes else value.shape
        fits = len(value.shape) == len(first) if self._ragged else value.shape == first
        if not fits or (value.dtype != self._dtype and not (is_text and self._dtype.kind == "U")):
            spec = TensorSpec(name=self._name, dtype=_name_dtype(self._dtype), shape=first)
            what = "rank or type" if self._ragged else "shape or type"
            raise DataError(
                f"'{self._name}' is {value.dtype}{list(value.shape)} in sample {index}, in sample 0 [{spec}]",
                hint=f"a tensor of changing {what} cannot be kept: cut the model before it (prepare --outputs)",
            )

    def pack(self, archive: zipfile.ZipFile, name: str) -> None:
        if name != self._name:
            shapes = np.array(self._shapes, np.int64)
            _pack(archive, name, _header(shapes.dtype, shapes.shape), shapes.tobytes())
            return
        is_ragged, count = len(self.parts) > 1, len(self._shapes)
        if self._words:
            words = np.concatenate([word.reshape(-1) for word in self._words]) if is_ragged else np.stack(self._words)
            _pack(archive, name, _header(words.dtype, words.shape), words.tobytes())
            return
        shape = (sum(map(math.prod, self._shapes)),) if is_ragged else (count, *self._shapes[0])
        _pack(archive, name, _header(self._dtype, shape), self._path)


def _pack(archive: zipfile.ZipFile, name: str, header: bytes, content: bytes | Path) -> None:
    entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
    entry.create_system = 3
    entry.external_attr = 0o644 << 16
    size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
    # With the size known beforehand no Python writes a zip64 record that is not needed; they differ in its bytes.
    entry.file_size = len(header) + size_bytes
    with archive.open(entry, "w") as out:
        out.write(header)
        copy_into(content, out)


def _name_dtype(dtype: np.dtype[Any]) -> str:
    return "string" if dtype.kind == "U" else dtype.name


def _as_text(value: Array, name: str) -> Array:
    text = value.astype(np.str_)
    # numpy's text drops null characters at the end: what could not be read back is refused.
    if not np.array_equal(text.astype(object), value.astype(object)):
        raise DataError(f"'{name}' holds strings that end in a null character", hint="leave this output out")
    return text


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    # Version 1.0, which every numpy reads; names of fields, for which there are newer ones, do not occur.
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()
