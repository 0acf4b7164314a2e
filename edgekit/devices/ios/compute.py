"""Reads ML Programs and computes them, operation by operation: `python -m ...compute FOLDER`.

The format of a `.mlpackage` is that of coremltools' mlmodel/format/Model.proto and MIL.proto; the messages that ONNX
Runtime's builder writes are declared in `messages.textproto`. Weights are in a blob file, see
mlmodel/src/MILBlob/Blob/StorageFormat.hpp.

Each operation has the precision that it declares. In half precision, it reads halves, computes and accumulates in
float32, and returns halves: on its GPU, Core ML accumulates in half precision only if
`AllowLowPrecisionAccumulationOnGPU` is set.

The process with ONNX Runtime's Core ML provider (`tools/ios/coreml.cpp`) writes questions into the pipe `ask` of the
folder and reads from `answer`. A program that cannot be computed can still be loaded; only running it fails, with the
reason.
"""

import functools
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, message_factory, text_format
from google.protobuf.message import DecodeError

from edgekit.devices.ios.operations import OPERATIONS, Arguments
from edgekit.devices.process.pipes import Facts, serve_pipes
from edgekit.machine import single_blas_thread
from edgekit.model.tensors import Array, Tensors
from edgekit.serialize import ready_type

_DECLARED = text_format.Parse(
    (Path(__file__).parent / "messages.textproto").read_text(), descriptor_pb2.FileDescriptorProto()
)
_MODEL: Any = message_factory.GetMessages([_DECLARED])["mil.Model"]

DTYPES: Mapping[int, type[np.generic]] = {
    1: np.bool_, 10: np.float16, 11: np.float32, 12: np.float64, 21: np.int8, 22: np.int16, 23: np.int32,
    24: np.int64, 31: np.uint8, 32: np.uint16,
}  # fmt: skip
"""Element types by their numbers in MIL.proto."""

_TEXT = 2
_SENTINEL = 0xDEADBEEF
_BLOB_HEAD = struct.Struct("<IIQQ")
_BLOB_KINDS: Mapping[int, type[np.generic]] = {
    1: np.float16, 2: np.float32, 3: np.uint8, 4: np.int8, 6: np.int16, 7: np.uint16, 14: np.int32,
}  # fmt: skip
_MAX_ELEMENTS = 1 << 31

Value = Array | str
"""A value: a tensor or a string."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an operation or the input of a function: its name, element type and shape, -1 for unknown sizes."""

    name: str
    dtype: type[np.generic] | None
    shape: tuple[int, ...]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation; for each parameter, `inputs` has the names of values, or `constants` has a constant."""

    kind: str
    name: str
    inputs: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, Value]
    results: tuple[Result, ...]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The function `main` of an ML Program; `opset` names the version of the operation set, such as CoreML6."""

    opset: str
    inputs: tuple[Result, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]


def read_package(folder: Path) -> Program:
    """Returns the program in a `.mlpackage` of ONNX Runtime, with its weights.

    Raises:
        ValueError: it is in the NeuralNetwork format, which edgekit does not compute, is damaged, or contains something
            that ONNX Runtime never writes.
        OSError: a file cannot be read.
    """
    files = sorted(folder.rglob("*/model.mlmodel")) if folder.is_dir() else [folder]
    if (path := next((path for path in files if path.stat().st_size > 0), None)) is None:
        raise ValueError("it holds no model.mlmodel")
    return read_program(path.read_bytes(), path.parent)


def read_program(data: bytes, folder: Path) -> Program:
    """Returns the program in a model's bytes; the paths of its blob files are relative to `folder`.

    Raises:
        ValueError: it is another kind of model, or damaged.
        OSError: a blob file cannot be read.
    """
    try:
        model = _MODEL.FromString(data)
    except DecodeError as error:
        raise ValueError(f"it is damaged: {error}") from error
    if not model.HasField("program"):
        kind = "a neural network" if model.HasField("network") else "no ML Program"
        raise ValueError(f"the model is {kind}: edgekit computes ML Programs only")
    if (function := {entry.key: entry.value for entry in model.program.functions}.get("main")) is None:
        raise ValueError("it has no function main")
    if (block := {entry.key: entry.value for entry in function.blocks}.get(function.opset)) is None:
        raise ValueError(f"it has no block for {function.opset!r}")

    @functools.cache
    def read_file(name: str) -> bytes:
        """Returns the content of a file of weights, in which many constants may lie."""
        # Names of blob files start with this placeholder for the package's folder.
        path = folder / name.removeprefix("@model_path/")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"its blob file {name!r} lies outside")
        return path.read_bytes()

    return Program(
        opset=function.opset,
        inputs=tuple(map(_read_result, function.inputs)),
        outputs=tuple(block.outputs),
        operations=tuple(_read_operation(entry, read_file) for entry in block.operations),
    )


_ReadFile = Callable[[str], bytes]


def _read_result(entry: Any) -> Result:
    tensor = entry.type.tensor
    return Result(name=entry.name, dtype=DTYPES.get(tensor.dtype), shape=_read_shape(tensor))


def _read_shape(tensor: Any) -> tuple[int, ...]:
    return tuple(each.constant.size if each.HasField("constant") else -1 for each in tensor.dimensions)


def _read_operation(entry: Any, read_file: _ReadFile) -> Operation:
    if entry.bodies:
        raise ValueError(f"its operation {entry.kind!r} has a body")
    constants = {attribute.key: _read_value(attribute.value, read_file) for attribute in entry.attributes}
    name, inputs = constants.pop("name", ""), dict[str, tuple[str, ...]]()
    for argument in entry.inputs:
        bindings = argument.value.bindings
        if values := [binding.value for binding in bindings if binding.HasField("value")]:
            constants[argument.key] = _read_value(values[0], read_file)
        else:
            inputs[argument.key] = tuple(binding.name for binding in bindings)
    return Operation(
        kind=entry.kind,
        name=name if isinstance(name, str) else "",
        inputs=inputs,
        constants=constants,
        results=tuple(map(_read_result, entry.outputs)),
    )


def _read_value(value: Any, read_file: _ReadFile) -> Value:
    if not value.type.HasField("tensor"):
        raise ValueError("it has a constant that is no tensor")
    kind: int = value.type.tensor.dtype
    shape = _read_shape(value.type.tensor)
    count = math.prod(shape)
    if not 0 <= count <= _MAX_ELEMENTS or min(shape, default=0) < 0:
        raise ValueError("it has a constant of no size")
    if value.HasField("blob"):
        data, offset = read_file(value.blob.file), value.blob.offset
        if not 0 <= offset <= len(data) - _BLOB_HEAD.size:
            raise ValueError("it is cut off")
        sentinel, stored, size, start = _BLOB_HEAD.unpack_from(data, offset)
        if sentinel != _SENTINEL or stored not in _BLOB_KINDS:
            raise ValueError(f"there is no blob at {offset}")
        dtype = np.dtype(_BLOB_KINDS[stored])
        if size != count * dtype.itemsize or start + size > len(data):
            raise ValueError(f"the blob at {offset} is cut off")
        return np.frombuffer(data, dtype, count, start).reshape(shape)
    tensor = value.immediate.tensor
    if kind == _TEXT:
        return "".join(tensor.texts.values)
    if kind not in DTYPES:
        raise ValueError(f"it has a constant of element type {kind}")
    if tensor.HasField("raw"):  # element types without a list of their own, such as halves, are stored as bytes
        found = np.frombuffer(tensor.raw.values, DTYPES[kind])
    else:
        lists = (tensor.floats, tensor.doubles, tensor.ints, tensor.bools, tensor.longs)
        found = np.array([number for numbers in lists for number in numbers.values])
    if found.size != count:
        raise ValueError(f"it has a constant of {found.size} elements where {count} were expected")
    return found.astype(DTYPES[kind]).reshape(shape)


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
    reads_left = Counter(program.outputs)
    for operation in program.operations:
        reads_left.update({name for names in operation.inputs.values() for name in names})
    # Infinities and NaN are valid results: halves overflow beyond 65504.
    with np.errstate(all="ignore"):
        for operation in program.operations:
            try:
                if operation.kind == "const":
                    values[operation.results[0].name] = operation.constants["val"]
                    continue
                given: dict[str, tuple[Value, ...]] = {key: (value,) for key, value in operation.constants.items()}
                given |= {key: tuple(values[name] for name in names) for key, names in operation.inputs.items()}
                wide = {key: tuple(map(_widen, parts)) for key, parts in given.items()}
                found = OPERATIONS[operation.kind](Arguments(wide))
                made = zip(operation.results, found if isinstance(found, tuple) else (found,), strict=True)
                values |= {result.name: _store(part, result) for result, part in made}
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{operation.kind} '{operation.name}': {error}") from error
            for name in {name for names in operation.inputs.values() for name in names}:
                reads_left[name] -= 1
                if reads_left[name] == 0:
                    del values[name]
    return {name: value for name in program.outputs if isinstance(value := values[name], np.ndarray)}


def _widen(value: Value) -> Value:
    """Returns a value as it is computed: halves in float32."""
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype == np.float16 else value


def _store(value: Array, result: Result) -> Array:
    """Returns a value in the element type that the program declares for it."""
    return np.asarray(value) if result.dtype is None else np.asarray(value).astype(result.dtype, copy=False)


_ONNX_TYPES: dict[int, type[np.generic]] = {1: np.float32, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16}
"""The element types that the provider exchanges, by their numbers in ONNX."""


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
        model = msgspec.json.decode(question, type=ready_type(_Question))
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
        run = msgspec.json.decode(question, type=ready_type(_Question))
        values: dict[str, Array] = {}
        for entry in run.inputs:
            dtype = np.dtype(_ONNX_TYPES[entry.type])
            data = read(int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize)
            values[entry.name] = np.frombuffer(data, dtype).reshape(entry.shape)
        program = self._programs[run.id]
        if isinstance(program, str):
            raise ValueError(program)  # noqa: TRY004 - the string is the reason, not a wrong type
        for parameter in program.inputs:
            # A scalar in ONNX is a tensor of one element in an ML Program.
            if parameter.shape == (1,) and parameter.name in values and values[parameter.name].ndim == 0:
                values[parameter.name] = values[parameter.name].reshape(1)
        found = compute_program(program, values)
        parts: list[bytes] = []
        for requested in run.outputs:
            value = np.asarray(found[requested.name], _ONNX_TYPES[requested.type])
            # Core ML has no scalars: a tensor of one element is returned as a scalar if the graph has one there.
            value = value.reshape(()) if not requested.shape and value.size == 1 else value
            parts.append(struct.pack(f"<{1 + value.ndim}q", value.ndim, *value.shape) + value.tobytes())
        return b"".join(parts)

    def describe(self) -> Facts:
        """Returns what the programs contain."""
        programs = [program for program in self._programs.values() if isinstance(program, Program)]
        steps = [step for program in programs for step in program.operations if step.kind != "const"]
        halves = sum(any(result.dtype is np.float16 for result in step.results) for step in steps)
        return Facts(operations=dict(sorted(Counter(step.kind for step in steps).items())), halves=halves)


if __name__ == "__main__":
    with single_blas_thread():
        serve_pipes(Computer(), Path(sys.argv[1]))
