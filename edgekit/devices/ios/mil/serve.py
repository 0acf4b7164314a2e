"""Computes the ML Programs that ONNX Runtime's Core ML provider loads: `python -m ...serve FOLDER`.

The provider's process (`tools/ios/coreml.cpp`) asks through the pipe `ask` of the folder and reads from `answer`. A
program that cannot be computed can be loaded: only running it says why.
"""

import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from edgekit.devices.ios.mil.compute import compute_program, require_known
from edgekit.devices.ios.mil.program import Program, Result, read_package
from edgekit.devices.release import serve_pipes
from edgekit.machine import single_blas_thread
from edgekit.model.tensors import Array

_ONNX_TYPES: dict[int, type[np.generic]] = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16}
"""Element types that the provider hands over, by their numbers in ONNX."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed: how many operations of each name the programs have, and how many give halves."""

    operations: dict[str, int]
    halves: int


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    type: int
    shape: tuple[int, ...]


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    path: str = ""
    inputs: tuple[_Tensor, ...] = ()
    outputs: tuple[_Tensor, ...] = ()


class Computer:
    """The programs so far, by number; a text in the place of one says why it cannot be computed."""

    def __init__(self) -> None:
        self._programs: dict[int, Program | str] = {}

    def load(self, question: bytes, read: Callable[[int], bytes]) -> None:  # noqa: ARG002 - its weights lie beside it
        """Takes the program of a package."""
        model = msgspec.json.decode(question, type=_Question)
        try:
            program = read_package(Path(model.path))
            require_known(program)
            self._programs[model.id] = program
        except (ValueError, OSError) as error:
            self._programs[model.id] = str(error)

    def compute(self, question: bytes, read: Callable[[int], bytes]) -> bytes:
        """Returns the outputs that are asked for, each with its rank and sizes before the elements.

        Raises:
            ValueError: the program cannot be computed; the message says why.
        """
        run = msgspec.json.decode(question, type=_Question)
        data, program = read(_count_bytes(run)), self._programs[run.id]
        if isinstance(program, str):
            raise ValueError(program)  # noqa: TRY004 - what the program is, not of which type
        wanted = {entry.name: entry for entry in program.inputs}
        found = compute_program(program, _split_inputs(run.inputs, data, wanted))
        parts: list[bytes] = []
        for asked in run.outputs:
            value = np.asarray(found[asked.name], _ONNX_TYPES[asked.type])
            # Core ML has no scalars: ONNX Runtime takes one element for one where the graph has a scalar.
            value = value.reshape(()) if not asked.shape and value.size == 1 else value
            parts.append(struct.pack(f"<{1 + value.ndim}q", value.ndim, *value.shape) + value.tobytes())
        return b"".join(parts)

    def describe(self) -> Facts:
        """Returns what the programs hold."""
        programs = [program for program in self._programs.values() if isinstance(program, Program)]
        steps = [step for program in programs for step in program.operations if step.kind != "const"]
        return Facts(
            operations=dict(sorted(Counter(step.kind for step in steps).items())),
            halves=sum(any(result.dtype is np.float16 for result in step.results) for step in steps),
        )


def _split_inputs(asked: tuple[_Tensor, ...], data: bytes, wanted: dict[str, Result]) -> dict[str, Array]:
    values: dict[str, Array] = {}
    at = 0
    for entry in asked:
        dtype = np.dtype(_ONNX_TYPES[entry.type])
        count = int(np.prod(entry.shape, dtype=np.int64))
        value = np.frombuffer(data, dtype, count, at).reshape(entry.shape)
        # What ONNX has as a scalar, a program takes as one element.
        shape = wanted[entry.name].shape if entry.name in wanted else entry.shape
        values[entry.name] = value.reshape(1) if value.ndim == 0 and shape == (1,) else value
        at += count * dtype.itemsize
    return values


def _count_bytes(question: _Question) -> int:
    return sum(
        int(np.prod(entry.shape, dtype=np.int64)) * np.dtype(_ONNX_TYPES[entry.type]).itemsize
        for entry in question.inputs
    )


if __name__ == "__main__":
    with single_blas_thread():
        serve_pipes(Computer(), Path(sys.argv[1]))
