"""Writing samples to an `.npz` that is the same to the byte for the same content, in memory that stays flat."""

import zipfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

import numpy as np

from edgekit._files import copy_into, replacing_file, work_folder
from edgekit.errors import DataError
from edgekit.tensors import Array, Tensors, TensorSpec

_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_rows(path: Path, samples: Iterable[Tensors]) -> tuple[tuple[TensorSpec, ...], int]:
    """Writes one array per tensor, row i of it being sample i, and returns their specs and the number of samples.

    Arrays are stored, not deflated, because deflated bytes depend on the version of zlib; entries are sorted by name
    and bear no time. Strings are kept in memory until the end, numbers are not. `edgekit.npz` reads them back.

    Raises:
        DataError: a tensor has another shape or dtype in some sample, or there is no sample.
        OutputError: the file cannot be written.
    """
    with work_folder() as work:
        columns: dict[str, _Column] = {}
        count = 0
        for sample in samples:
            if count and sample.keys() != columns.keys():
                raise DataError(
                    f"sample {count} for '{path.name}' holds {', '.join(sample)}; sample 0 {', '.join(columns)}",
                    hint="a sequence of changing length cannot be kept: cut the model before it (prepare --outputs)",
                )
            for place, (name, value) in enumerate(sample.items()):
                column = columns.setdefault(name, _Column(name, value, work / str(place)))
                column.append(value, count)
            count += 1
        if not count:
            raise DataError(f"there is no sample for '{path.name}'", hint="give at least one, better 100")
        with replacing_file(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted(columns):
                columns[name].pack(archive, count)
        return tuple(column.spec for column in columns.values()), count


class _Column:
    """The rows of one tensor: numbers in a raw file until their count is known, strings in memory."""

    def __init__(self, name: str, first: Array, path: Path) -> None:
        is_text = first.dtype.kind in "UO"
        self.spec = TensorSpec(name=name, dtype="string" if is_text else first.dtype.name, shape=first.shape)
        self._dtype = np.dtype(np.str_) if is_text else first.dtype
        self._path = path
        self._words: list[Array] = []

    def append(self, value: Array, index: int) -> None:
        is_text = value.dtype.kind in "UO"
        if value.shape != self.spec.shape or ("string" if is_text else value.dtype.name) != self.spec.dtype:
            raise DataError(
                f"'{self.spec.name}' is {value.dtype}{list(value.shape)} in sample {index}, in sample 0 [{self.spec}]",
                hint="tensors of changing shape cannot be compared: cut the model before it (prepare --outputs)",
            )
        if is_text:
            self._words.append(_as_text(value, self.spec.name))
            return
        with self._path.open("ab") as file:
            file.write(np.ascontiguousarray(value).tobytes())

    def pack(self, archive: zipfile.ZipFile, count: int) -> None:
        entry = zipfile.ZipInfo(f"{self.spec.name}.npy", _EPOCH)
        entry.create_system = 3
        entry.external_attr = 0o644 << 16
        rows = np.stack(self._words) if self._words else None
        shape = (count, *(dim for dim in self.spec.shape or () if isinstance(dim, int)))
        header = _header(self._dtype, shape) if rows is None else _header(rows.dtype, rows.shape)
        size_bytes = self._path.stat().st_size if rows is None else rows.nbytes
        # With the size known beforehand no Python writes a zip64 record that is not needed; they differ in its bytes.
        entry.file_size = len(header) + size_bytes
        with archive.open(entry, "w") as out:
            out.write(header)
            copy_into(self._path if rows is None else rows.tobytes(), out)


def _as_text(value: Array, name: str) -> Array:
    text = value.astype(np.str_)
    if not np.array_equal(text.astype(object), value.astype(object)):
        raise DataError(f"'{name}' holds strings that end in a null character", hint="leave this output out")
    return text


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()
