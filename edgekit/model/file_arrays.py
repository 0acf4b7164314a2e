"""Large arrays in files, so that they take no memory while they are not used."""

import math
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgekit.model.tensors import Array


class FileArray:
    """An array whose `values` lie in a file; `release` frees their memory until they are used again."""

    def __init__(self, mapping: mmap.mmap, shape: Sequence[int], dtype: Any) -> None:
        self._mapping = mapping
        self.values: Array = np.frombuffer(mapping, dtype, math.prod(shape)).reshape(shape)

    def release(self) -> None:
        """Frees memory if the system supports it: the file holds the values."""
        # Only Linux promises that this writes the pages of a shared mapping to the file (madvise(2)).
        if sys.platform == "linux":
            self._mapping.madvise(mmap.MADV_DONTNEED)


class ArrayFile:
    """A file for arrays, created with the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size_bytes = 0

    def zeros(self, shape: Sequence[int], dtype: Any) -> FileArray:
        """Returns an array of zeros.

        Raises:
            OSError: the file cannot be written.
        """
        step, length = mmap.ALLOCATIONGRANULARITY, max(1, math.prod(shape)) * np.dtype(dtype).itemsize
        start, self._size_bytes = self._size_bytes, self._size_bytes + -(-length // step) * step
        with self._path.open("r+b" if start else "w+b") as file:
            # On a full disk, writing to a page that was not reserved would end the process.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), start, self._size_bytes - start)
            else:
                file.truncate(self._size_bytes)
            return FileArray(mmap.mmap(file.fileno(), length, offset=start), shape, dtype)
