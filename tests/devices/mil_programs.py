"""ML Programs written by hand, as ONNX Runtime's Core ML provider writes them: MIL.proto and the blob file."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from edgekit.model.tensors import Array

NUMBERS = {"bool": 1, "float16": 10, "float32": 11, "int32": 23}
BLOBS = {"float16": 1, "float32": 2}


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def entry(key: str, value: bytes) -> bytes:
    return field(1, key) + field(2, value)


def tensor_type(dtype: str, shape: Iterable[int]) -> bytes:
    dims = b"".join(field(3, field(1, field(1, size))) for size in shape)
    return field(1, field(1, NUMBERS[dtype]) + dims)


def named(name: str, dtype: str, shape: Iterable[int]) -> bytes:
    return field(1, name) + field(2, tensor_type(dtype, shape))


def constant(value: Array | str) -> bytes:
    """A value that is stored in the program itself."""
    if isinstance(value, str):
        return field(2, field(1, field(1, 2))) + field(3, field(1, field(4, field(1, value))))
    kind = value.dtype.name
    if kind == "float32":
        tensor = field(1, field(1, value.tobytes()))
    elif kind == "float16":
        tensor = field(7, field(1, value.tobytes()))
    else:
        packed = b"".join(varint(int(one)) for one in value.reshape(-1))
        tensor = field(3 if kind == "bool" else 2, field(1, packed))
    return field(2, tensor_type(kind, value.shape)) + field(3, field(1, tensor))


def blob(value: Array, offset: int) -> bytes:
    """A value that is stored in the blob file."""
    place = field(1, "@model_path/weights/weight.bin") + field(2, offset)
    return field(2, tensor_type(value.dtype.name, value.shape)) + field(5, place)


def operation(
    kind: str, inputs: Mapping[str, str], result: bytes, attributes: Mapping[str, bytes] | None = None
) -> bytes:
    out = field(1, kind)
    for parameter, name in inputs.items():
        out += field(2, entry(parameter, field(1, field(1, name))))
    out += field(3, result)
    for name, value in ({"name": constant(f"{kind}_0")} | dict(attributes or {})).items():
        out += field(5, entry(name, value))
    return out


def write_package(
    folder: Path,
    inputs: Iterable[bytes],
    outputs: Iterable[str],
    operations: Iterable[bytes],
    weights: Iterable[Array] = (),
) -> Path:
    """Writes a package; the record of each of the `weights` begins at a multiple of 64 bytes, after a header of 64."""
    place = folder / "Data" / "com.microsoft.OnnxRuntime"
    (place / "weights").mkdir(parents=True)
    data = bytearray(64)
    for weight in weights:
        start = len(data) + 64
        data += struct.pack("<IIQQ", 0xDEADBEEF, BLOBS[weight.dtype.name], weight.nbytes, start).ljust(64, b"\0")
        data += weight.tobytes().ljust(-(-weight.nbytes // 64) * 64, b"\0")
    (place / "weights" / "weight.bin").write_bytes(data)
    block = b"".join(field(2, name) for name in outputs) + b"".join(field(3, step) for step in operations)
    function = b"".join(field(1, value) for value in inputs) + field(2, "CoreML6") + field(3, entry("CoreML6", block))
    program = field(1, 1) + field(2, entry("main", function))
    (place / "model.mlmodel").write_bytes(field(1, 7) + field(502, program))
    return folder


def scaled(folder: Path, dtype: str = "float32", kind: str = "mul") -> Path:
    """A program `y = x * w` with four weights in the blob file."""
    weight = np.array([1, 2, 3, 0.1], dtype)
    steps = [
        operation("const", {}, named("w", dtype, (4,)), {"val": blob(weight, 64)}),
        operation(kind, {"x": "x", "y": "w"}, named("y", dtype, (2, 4))),
    ]
    return write_package(folder, [named("x", dtype, (2, 4))], ["y"], steps, [weight])
