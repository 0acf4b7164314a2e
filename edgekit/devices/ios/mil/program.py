"""Reads an ML Program and its weights from a `.mlpackage`.

The format is that of coremltools' mlmodel/format/Model.proto and MIL.proto; the messages that ONNX Runtime's builder
writes are declared below. Weights are in a blob file, see mlmodel/src/MILBlob/Blob/StorageFormat.hpp.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from edgekit.model.tensors import Array

# Each message with its fields: number, name, type. A `*` marks a repeated field, such as the entries of a map. Other
# fields are skipped.
_MESSAGES = """
Model: 1 version int64, 500 network bytes, 502 program Program
Program: 2 functions *FunctionEntry
FunctionEntry: 1 key string, 2 value Function
Function: 1 inputs *Named, 2 opset string, 3 blocks *BlockEntry
BlockEntry: 1 key string, 2 value Block
Block: 2 outputs *string, 3 operations *Operation
Operation: 1 kind string, 2 inputs *ArgumentEntry, 3 outputs *Named, 4 bodies *bytes, 5 attributes *ValueEntry
ArgumentEntry: 1 key string, 2 value Argument
ValueEntry: 1 key string, 2 value Value
Argument: 1 bindings *Binding
Binding: 1 name string, 2 value Value
Named: 1 name string, 2 type ValueType
ValueType: 1 tensor TensorType
TensorType: 1 dtype int64, 3 dimensions *Dimension
Dimension: 1 constant Size
Size: 1 size int64
Value: 2 type ValueType, 3 immediate Immediate, 5 blob Blob
Immediate: 1 tensor Tensor
Blob: 1 file string, 2 offset int64
Tensor: 1 floats Floats, 2 ints Ints, 3 bools Ints, 4 texts Texts, 5 longs Ints, 6 doubles Doubles, 7 raw Raw
Floats: 1 values *float
Doubles: 1 values *double
Ints: 1 values *int64
Texts: 1 values *string
Raw: 1 values bytes
"""


def _declare(text: str) -> Any:
    """Declares some protobuf messages, and returns the class of the first."""
    field = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "int64": field.TYPE_INT64, "float": field.TYPE_FLOAT, "double": field.TYPE_DOUBLE,
        "string": field.TYPE_STRING, "bytes": field.TYPE_BYTES,
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="edgekit/mil.proto", package="mil", syntax="proto2")
    for line in text.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for entry in fields.split(", "):
            number, key, kind = entry.split()
            label = field.LABEL_REPEATED if kind[0] == "*" else field.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            declared = message.field.add(name=key, number=int(number), label=label)
            if kind in scalars:
                declared.type = scalars[kind]
            else:
                declared.type_name = f".mil.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"mil.{text.split(':', maxsplit=1)[0].strip()}"))


_MODEL = _declare(_MESSAGES)

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
_MOST_ELEMENTS = 1 << 31

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
    path = next((path for path in files if path.stat().st_size > 0), None)
    if path is None:
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
    function = {entry.key: entry.value for entry in model.program.functions}.get("main")
    if function is None:
        raise ValueError("it has no function main")
    block = {entry.key: entry.value for entry in function.blocks}.get(function.opset)
    if block is None:
        raise ValueError(f"it has no block for {function.opset!r}")
    blobs = _Blobs(folder)
    return Program(
        opset=function.opset,
        inputs=tuple(map(_read_result, function.inputs)),
        outputs=tuple(block.outputs),
        operations=tuple(_read_operation(entry, blobs) for entry in block.operations),
    )


class _Blobs:
    """The blob files of a package, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, bytes] = {}

    def read(self, name: str, offset: int, count: int) -> Array:
        """Returns the elements that the blob record at an offset of a file points to."""
        if name not in self._files:
            # Names of blob files start with this placeholder for the package's folder.
            path = self._folder / name.removeprefix("@model_path/")
            if not path.resolve().is_relative_to(self._folder.resolve()):
                raise ValueError(f"its blob file {name!r} lies outside")
            self._files[name] = path.read_bytes()
        data = self._files[name]
        if not 0 <= offset <= len(data) - _BLOB_HEAD.size:
            raise ValueError("it is cut off")
        sentinel, kind, size, start = _BLOB_HEAD.unpack_from(data, offset)
        if sentinel != _SENTINEL or kind not in _BLOB_KINDS:
            raise ValueError(f"there is no blob at {offset}")
        dtype = np.dtype(_BLOB_KINDS[kind])
        if size != count * dtype.itemsize or start + size > len(data):
            raise ValueError(f"the blob at {offset} is cut off")
        return np.frombuffer(data, dtype, count, start)


def _read_result(entry: Any) -> Result:
    tensor = entry.type.tensor
    return Result(name=entry.name, dtype=DTYPES.get(tensor.dtype), shape=tuple(_list_dimensions(tensor)))


def _list_dimensions(tensor: Any) -> Iterator[int]:
    for dimension in tensor.dimensions:
        yield dimension.constant.size if dimension.HasField("constant") else -1


def _read_operation(entry: Any, blobs: _Blobs) -> Operation:
    if entry.bodies:
        raise ValueError(f"its operation {entry.kind!r} has a body")
    inputs: dict[str, tuple[str, ...]] = {}
    constants: dict[str, Value] = {}
    for argument in entry.inputs:
        bindings = argument.value.bindings
        values = [binding.value for binding in bindings if binding.HasField("value")]
        if values:
            constants[argument.key] = _read_value(values[0], blobs)
        else:
            inputs[argument.key] = tuple(binding.name for binding in bindings)
    attributes = {attribute.key: _read_value(attribute.value, blobs) for attribute in entry.attributes}
    name = attributes.pop("name", "")
    return Operation(
        kind=entry.kind,
        name=name if isinstance(name, str) else "",
        inputs=inputs,
        constants={**attributes, **constants},
        results=tuple(map(_read_result, entry.outputs)),
    )


def _read_value(value: Any, blobs: _Blobs) -> Value:
    if not value.type.HasField("tensor"):
        raise ValueError("it has a constant that is no tensor")
    kind: int = value.type.tensor.dtype
    shape = tuple(_list_dimensions(value.type.tensor))
    count = math.prod(shape)
    if not 0 <= count <= _MOST_ELEMENTS or min(shape, default=0) < 0:
        raise ValueError("it has a constant of no size")
    if value.HasField("blob"):
        return blobs.read(value.blob.file, value.blob.offset, count).reshape(shape)
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
