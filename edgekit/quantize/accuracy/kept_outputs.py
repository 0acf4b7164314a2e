"""The outputs of the float model, kept so that it runs once for all quantized models that are compared with it."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from edgekit.model.external import ArrayFile, FileArray
from edgekit.model.tensors import Tensors

# The memory for kept outputs, with and without a folder for more of them, and the room on the disk. Outputs that do not
# fit are computed again. Chosen by hand.
_MEMORY_BYTES, _ONLY_MEMORY_BYTES, _DISK_BYTES = 8 << 20, 64 << 20, 1 << 30


class KeptOutputs:
    """The outputs of a model by the index of the sample: in memory, and beyond a limit in a file in `folder`."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else _open_file(folder)
        self._memory, self._disk = (_ONLY_MEMORY_BYTES, 0) if folder is None else (_MEMORY_BYTES, _DISK_BYTES)
        self._known: dict[int, Tensors] = {}
        self._stored: dict[int, tuple[FileArray, ...]] = {}
        self._largest = 0

    def __contains__(self, index: int) -> bool:
        return index in self._known

    def __getitem__(self, index: int) -> Tensors:
        return self._known[index]

    def missing(self, indices: Sequence[int]) -> list[int]:
        """Returns the samples whose outputs are not kept."""
        return [index for index in indices if index not in self._known]

    def fits(self, count: int) -> bool:
        """Returns True if the outputs of `count` more samples can be kept, judging by the largest kept ones."""
        return bool(self._known) and count <= sum(
            math.floor(room / max(1, self._largest)) for room in (self._memory, self._disk)
        )

    def keep(self, index: int, outputs: Tensors) -> Tensors:
        """Keeps a copy of the outputs of a sample, if there is room; returns the copy, else the outputs themselves.

        Raises:
            OSError: the file cannot be written.
        """
        if index in self._known:
            return self._known[index]
        size = sum(value.nbytes for value in outputs.values())
        if size <= self._memory:
            self._memory -= size
            # An array that ONNX Runtime returns holds the memory of its whole session.
            self._known[index] = {name: value.copy() for name, value in outputs.items()}
        elif (
            self._file is not None and size <= self._disk and all(value.dtype.kind != "O" for value in outputs.values())
        ):
            self._disk -= size
            stored = {name: self._file.zeros(value.shape, value.dtype) for name, value in outputs.items()}
            for name, value in outputs.items():
                stored[name].values[...] = value
            self._known[index] = {name: array.values for name, array in stored.items()}
            self._stored[index] = tuple(stored.values())
            self.release(index)
        self._largest = max(self._largest, size)
        return self._known.get(index, outputs)

    def release(self, *indices: int) -> None:
        """Frees the memory of outputs that lie in the file, of some samples or of all, until they are read again."""
        for index in indices or self._stored:
            for array in self._stored.get(index, ()):
                array.release()


def _open_file(folder: Path) -> ArrayFile:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="outputs-", suffix=".data", delete=False) as file:
        return ArrayFile(Path(file.name))
