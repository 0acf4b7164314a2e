"""Computes ML Programs, operation by operation, in the precision that each declares: `python -m ...compute FOLDER`.

In half precision, an operation reads halves, computes and accumulates in float32, and returns halves: on its GPU, Core
ML accumulates in half precision only if `AllowLowPrecisionAccumulationOnGPU` is set.

The process with ONNX Runtime's Core ML provider (`tools/ios/coreml.cpp`) writes questions into the pipe `ask` of the
folder and reads from `answer`. A program that cannot be computed can still be loaded; only running it fails, with the
reason.
"""

import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from edgekit.devices.ios.mil.operations import ELEMENTWISE, LAYOUT, REDUCTIONS, Arguments
from edgekit.devices.ios.mil.program import Operation, Program, Result, Value, read_package
from edgekit.devices.ios.mil.windows import RESIZING, WINDOWS
from edgekit.devices.process.pipes import serve_pipes
from edgekit.machine import single_blas_thread
from edgekit.model.tensors import Array, Tensors

OPERATIONS: Mapping[str, Callable[[Arguments], Array | tuple[Array, ...]]] = {
    **ELEMENTWISE,
    **LAYOUT,
    **REDUCTIONS,
    **RESIZING,
    **WINDOWS,
}
"""The supported operations by their names in MIL."""


def require_known(program: Program) -> None:
    """Refuses a program with an operation that edgekit does not compute.

    Raises:
        ValueError: it holds one; the message names it.
    """
    for operation in program.operations:
        if operation.kind != "const" and operation.kind not in OPERATIONS:
            raise ValueError(f"operation '{operation.kind}' of '{operation.name}' is not computed by edgekit")


def compute_program(program: Program, inputs: Tensors) -> dict[str, Array]:
    """Returns the outputs of a program for its inputs, by name.

    Raises:
        ValueError: an input is missing, or an operation cannot be computed here; the message names it.
    """
    require_known(program)
    values: dict[str, Value] = {}
    for entry in program.inputs:
        if entry.name not in inputs:
            raise ValueError(f"input '{entry.name}' is missing")
        values[entry.name] = _store(inputs[entry.name], entry)
    # How many operations still read each value; outputs count once more, because they are returned.
    left = Counter(program.outputs)
    for operation in program.operations:
        left.update({name for names in operation.inputs.values() for name in names})
    # Infinities and NaN are valid results: halves overflow beyond 65504.
    with np.errstate(all="ignore"):
        for operation in program.operations:
            try:
                values |= _compute(operation, values)
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{operation.kind} '{operation.name}': {error}") from error
            for name in {name for names in operation.inputs.values() for name in names}:
                left[name] -= 1
                if left[name] == 0:
                    del values[name]
    return {name: value for name in program.outputs if isinstance(value := values[name], np.ndarray)}


def _compute(operation: Operation, values: Mapping[str, Value]) -> dict[str, Value]:
    if operation.kind == "const":
        return {operation.results[0].name: operation.constants["val"]}
    given: dict[str, tuple[Value, ...]] = {name: (value,) for name, value in operation.constants.items()}
    given |= {name: tuple(values[source] for source in sources) for name, sources in operation.inputs.items()}
    # Halves are computed in float32.
    wide = {
        name: tuple(
            value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float16 else value
            for value in parts
        )
        for name, parts in given.items()
    }
    found = OPERATIONS[operation.kind](Arguments(wide))
    parts = found if isinstance(found, tuple) else (found,)
    return {result.name: _store(part, result) for result, part in zip(operation.results, parts, strict=True)}


def _store(value: Array, result: Result) -> Array:
    """Returns a value in the element type that the program declares for it."""
    return np.asarray(value) if result.dtype is None else np.asarray(value).astype(result.dtype, copy=False)


_ONNX_TYPES: dict[int, type[np.generic]] = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16}
"""The element types that the provider exchanges, by their numbers in ONNX."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed: the number of operations by name, and how many of them return halves."""

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
    """Holds the loaded programs by number, and runs them; a string in place of a program says why it cannot run."""

    def __init__(self) -> None:
        self._programs: dict[int, Program | str] = {}

    def load(self, question: bytes, read: Callable[[int], bytes]) -> None:  # noqa: ARG002 - weights are in the package
        """Loads the program of a package."""
        model = msgspec.json.decode(question, type=_Question)
        try:
            program = read_package(Path(model.path))
            require_known(program)
            self._programs[model.id] = program
        except (ValueError, OSError) as error:
            self._programs[model.id] = str(error)

    def compute(self, question: bytes, read: Callable[[int], bytes]) -> bytes:
        """Returns the requested outputs, each as its rank, its sizes and its elements.

        Raises:
            ValueError: the program cannot be computed; the message says why.
        """
        run = msgspec.json.decode(question, type=_Question)
        values: dict[str, Array] = {}
        for entry in run.inputs:
            dtype = np.dtype(_ONNX_TYPES[entry.type])
            data = read(int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize)
            values[entry.name] = np.frombuffer(data, dtype).reshape(entry.shape)
        program = self._programs[run.id]
        if isinstance(program, str):
            raise ValueError(program)  # noqa: TRY004 - the string is the reason, not a wrong type
        for wanted in program.inputs:
            # A scalar in ONNX is a tensor of one element in an ML Program.
            if wanted.shape == (1,) and wanted.name in values and values[wanted.name].ndim == 0:
                values[wanted.name] = values[wanted.name].reshape(1)
        found = compute_program(program, values)
        parts: list[bytes] = []
        for asked in run.outputs:
            value = np.asarray(found[asked.name], _ONNX_TYPES[asked.type])
            # Core ML has no scalars: a tensor of one element is returned as a scalar if the graph has one there.
            value = value.reshape(()) if not asked.shape and value.size == 1 else value
            parts.append(struct.pack(f"<{1 + value.ndim}q", value.ndim, *value.shape) + value.tobytes())
        return b"".join(parts)

    def describe(self) -> Facts:
        """Returns what the programs contain."""
        programs = [program for program in self._programs.values() if isinstance(program, Program)]
        steps = [step for program in programs for step in program.operations if step.kind != "const"]
        return Facts(
            operations=dict(sorted(Counter(step.kind for step in steps).items())),
            halves=sum(any(result.dtype is np.float16 for result in step.results) for step in steps),
        )


if __name__ == "__main__":
    with single_blas_thread():
        serve_pipes(Computer(), Path(sys.argv[1]))
