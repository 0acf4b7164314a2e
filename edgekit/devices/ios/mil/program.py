"""An ML Program and its weights, read from a `.mlpackage`.

The format is that of coremltools' mlmodel/format/Model.proto and MIL.proto; weights lie in the blob file of
mlmodel/src/MILBlob/Blob/StorageFormat.hpp.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from edgekit.devices.ios.mil import wire
from edgekit.model.tensors import Array

DTYPES: Mapping[int, type[np.generic]] = {
    1: np.bool_,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    21: np.int8,
    22: np.int16,
    23: np.int32,
    24: np.int64,
    31: np.uint8,
    32: np.uint16,
}
"""Element types by their numbers in MIL.proto."""

_TEXT = 2
_PROGRAM, _NETWORK = 502, 500
_SENTINEL = 0xDEADBEEF
_BLOB_KINDS: Mapping[int, type[np.generic]] = {
    1: np.float16,
    2: np.float32,
    3: np.uint8,
    4: np.int8,
    6: np.int16,
    7: np.uint16,
    14: np.int32,
}
_MOST_ELEMENTS = 1 << 31

Value = Array | str
"""A constant: numbers, or text."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation gives, or a function takes: its name, element type and shape, -1 where that is not known."""

    name: str
    dtype: type[np.generic] | None
    shape: tuple[int, ...]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operation: constants stand in `constants`, names of values in `inputs`, both by the parameter."""

    kind: str
    name: str
    inputs: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, Value]
    results: tuple[Result, ...]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The function `main` of an ML Program; `opset` says which operations there are, such as CoreML6."""

    specification: int
    opset: str
    inputs: tuple[Result, ...]
    outputs: tuple[str, ...]
    operations: tuple[Operation, ...]


class UnknownProgramError(ValueError):
    """A model that is none that edgekit reads, with what it is."""


def read_package(folder: Path) -> Program:
    """Returns the program in a `.mlpackage` of ONNX Runtime, with all its weights.

    Raises:
        UnknownProgramError: it is a neural network, which edgekit does not compute.
        ValueError: it is damaged, or holds what no builder of ONNX Runtime's writes.
        OSError: a file cannot be read.
    """
    files = sorted(folder.rglob("*/model.mlmodel")) if folder.is_dir() else [folder]
    path = next((path for path in files if path.stat().st_size > 0), None)
    if path is None:
        raise ValueError("it holds no model.mlmodel")
    return read_program(path.read_bytes(), path.parent)


def read_program(data: bytes, folder: Path) -> Program:
    """Returns the program in a model's bytes; its blob files are named from `folder` on.

    Raises:
        UnknownProgramError: it is another kind of model.
        ValueError: it is damaged.
        OSError: a blob file cannot be read.
    """
    model = wire.read_message(data)
    program = wire.find_message(model, _PROGRAM)
    if program is None:
        kind = "a neural network" if _NETWORK in model else "no ML Program"
        raise UnknownProgramError(f"the model is {kind}: edgekit computes ML Programs only")
    function = dict(wire.list_pairs(program, 2)).get("main")
    if function is None:
        raise ValueError("it has no function main")
    opset = wire.read_text(function, 2)
    block = dict(wire.list_pairs(function, 3)).get(opset)
    if block is None:
        raise ValueError(f"it has no block for {opset!r}")
    blobs = _Blobs(folder)
    return Program(
        specification=wire.read_number(model, 1),
        opset=opset,
        inputs=tuple(_read_result(entry) for entry in wire.list_messages(function, 1)),
        outputs=wire.list_texts(block, 2),
        operations=tuple(_read_operation(entry, blobs) for entry in wire.list_messages(block, 3)),
    )


class _Blobs:
    """The blob files of a package, each read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, bytes] = {}

    def read(self, name: str, offset: int, count: int) -> Array:
        """Returns the elements behind the record at an offset of a file."""
        if name not in self._files:
            # The package's own root stands before it.
            path = self._folder / name.removeprefix("@model_path/")
            if not path.resolve().is_relative_to(self._folder.resolve()):
                raise ValueError(f"its blob file {name!r} lies outside")
            self._files[name] = path.read_bytes()
        data = self._files[name]
        sentinel, kind, size, start = wire.read_struct("<IIQQ", data, offset)
        if sentinel != _SENTINEL or kind not in _BLOB_KINDS:
            raise ValueError(f"there is no blob at {offset}")
        dtype = np.dtype(_BLOB_KINDS[kind])
        if size != count * dtype.itemsize or start + size > len(data):
            raise ValueError(f"the blob at {offset} is cut off")
        return np.frombuffer(data, dtype, count, start)


def _read_result(entry: wire.Fields) -> Result:
    kind = wire.find_message(entry, 2) or {}
    tensor = wire.find_message(kind, 1) or {}
    return Result(
        name=wire.read_text(entry, 1),
        dtype=DTYPES.get(wire.read_number(tensor, 1)),
        shape=tuple(_list_dimensions(tensor)),
    )


def _list_dimensions(tensor: wire.Fields) -> Iterator[int]:
    for dimension in wire.list_messages(tensor, 3):
        constant = wire.find_message(dimension, 1)
        yield -1 if constant is None else wire.read_number(constant, 1)


def _read_operation(entry: wire.Fields, blobs: _Blobs) -> Operation:
    inputs: dict[str, tuple[str, ...]] = {}
    constants: dict[str, Value] = {}
    if wire.list_messages(entry, 4):
        raise ValueError(f"its operation {wire.read_text(entry, 1)!r} has a body")
    for parameter, argument in wire.list_pairs(entry, 2):
        bindings = wire.list_messages(argument, 1)
        values = [value for value in (wire.find_message(binding, 2) for binding in bindings) if value is not None]
        if values:
            constants[parameter] = _read_value(values[0], blobs)
        else:
            inputs[parameter] = tuple(wire.read_text(binding, 1) for binding in bindings)
    attributes = {name: _read_value(value, blobs) for name, value in wire.list_pairs(entry, 5)}
    name = attributes.pop("name", "")
    return Operation(
        kind=wire.read_text(entry, 1),
        name=name if isinstance(name, str) else "",
        inputs=inputs,
        constants={**attributes, **constants},
        results=tuple(_read_result(result) for result in wire.list_messages(entry, 3)),
    )


def _read_value(value: wire.Fields, blobs: _Blobs) -> Value:
    kind = wire.find_message(wire.find_message(value, 2) or {}, 1)
    if kind is None:
        raise ValueError("it has a constant that is no tensor")
    shape = tuple(_list_dimensions(kind))
    count = math.prod(shape)
    if not 0 <= count <= _MOST_ELEMENTS or min(shape, default=0) < 0:
        raise ValueError("it has a constant of no size")
    blob = wire.find_message(value, 5)
    if blob is not None:
        return blobs.read(wire.read_text(blob, 1), wire.read_number(blob, 2), count).reshape(shape)
    tensor = wire.find_message(wire.find_message(value, 3) or {}, 1)
    if tensor is None:
        raise ValueError("it has a constant without a value")
    number = wire.read_number(kind, 1)
    if number == _TEXT:
        return "".join(wire.list_texts(wire.find_message(tensor, 4) or {}, 1))
    found = _read_elements(tensor, number)
    if found.size != count:
        raise ValueError(f"it has a constant of {found.size} elements where {count} were expected")
    return found.astype(DTYPES[number]).reshape(shape)


def _read_elements(tensor: wire.Fields, number: int) -> Array:
    if number not in DTYPES:
        raise ValueError(f"it has a constant of element type {number}")
    for field, width in ((1, 4), (6, 8)):
        if (floats := wire.find_message(tensor, field)) is not None:
            return wire.list_floats(floats, 1, width)
    for field in (2, 3, 5):
        if (whole := wire.find_message(tensor, field)) is not None:
            return np.array(wire.list_numbers(whole, 1), np.int64)
    raw = wire.find_message(tensor, 7)
    if raw is None:
        raise ValueError("it has a constant without elements")
    # What is narrower than the lists above stands as bytes.
    data = b"".join(part for part in raw.get(1, ()) if isinstance(part, bytes))
    return np.frombuffer(data, DTYPES[number])
