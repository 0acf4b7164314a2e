"""Where weights lie that are not in the model's own file: the words of `TensorProto.external_data`, read and written.

The words are those of onnx.proto: `location` is relative to the model's folder; `offset` and `length` are decimal.
"""

import math
from collections.abc import Iterable, Iterator
from typing import IO, Any

import msgspec
import numpy as np
import onnx

PAGE_BYTES = 4096
"""Large weights begin a page, so that ONNX Runtime can map them (onnx's external_data_helper aligns for that too)."""
LEAST_BYTES = 1024
"""Weights up to this size stay inside: shape inference and constant folding read them, and cannot from other files."""


def begin_page(out: IO[bytes]) -> int:
    """Fills a file up to the next page, and returns where that begins: what is written there can be mapped."""
    out.write(bytes(-out.tell() % PAGE_BYTES))
    return out.tell()


class DataPlace(msgspec.Struct, frozen=True):
    """The bytes of a tensor: `length` of them from `offset` on, in `file` of the model's folder."""

    file: str
    offset: int
    length: int


def read_words(tensor: onnx.TensorProto) -> dict[str, str]:
    """Returns the words that say where the data of a tensor lie; none where they lie inside."""
    return {entry.key: entry.value for entry in tensor.external_data}


def read_place(tensor: onnx.TensorProto) -> DataPlace | None:
    """Returns where the data of a tensor lie, None where they lie in the model's own file.

    Without a length all of the tensor lies there, as ONNX Runtime reads it: so much as its type and shape ask for.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    words = read_words(tensor)
    length = int(words["length"]) if "length" in words else count_bytes(tensor) or 0
    return DataPlace(file=words["location"], offset=int(words.get("offset", "0")), length=length)


def list_files(tensors: Iterable[onnx.TensorProto]) -> Iterator[str]:
    """Yields the files in which data of these tensors lie; all that a tensor names, where a hostile one names two."""
    for tensor in tensors:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield from (entry.value for entry in tensor.external_data if entry.key == "location")


def point_to(tensor: onnx.TensorProto, place: DataPlace) -> None:
    """Says in a tensor, in place, that its data lie elsewhere; raw data that it has are dropped."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place.file), ("offset", place.offset), ("length", place.length)):
        tensor.external_data.add(key=key, value=str(value))


def count_bytes(tensor: onnx.TensorProto) -> int | None:
    """Returns how many bytes the raw data of a tensor have; None for strings, which have none, and elements of 6 bits.

    Elements of 2 and 4 bits are packed (onnx.proto, `raw_data`), though numpy holds each in a byte.
    """
    dtype: np.dtype[Any] = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    if dtype.kind == "O" or name.startswith("FLOAT6"):
        return None
    bits = 2 if name.endswith("INT2") else 4 if name.endswith(("INT4", "FLOAT4E2M1")) else 8 * dtype.itemsize
    return -(-math.prod(tensor.dims) * bits // 8)
