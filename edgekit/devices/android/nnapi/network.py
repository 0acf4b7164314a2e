"""A network as NNAPI is given it: operands, and operations by their numbers in Android's NeuralNetworksTypes.h."""

from enum import IntEnum

import msgspec
import numpy as np

from edgekit.model.tensors import Array


class OperandType(IntEnum):
    """Kinds of operands that ONNX Runtime's provider makes."""

    FLOAT32 = 0
    INT32 = 1
    UINT32 = 2
    TENSOR_FLOAT32 = 3
    TENSOR_INT32 = 4
    TENSOR_QUANT8_ASYMM = 5
    BOOL = 6
    TENSOR_FLOAT16 = 8
    TENSOR_BOOL8 = 9
    FLOAT16 = 10
    TENSOR_QUANT8_SYMM_PER_CHANNEL = 11
    TENSOR_QUANT8_ASYMM_SIGNED = 14


NUMPY_TYPES: dict[int, type[np.generic]] = {
    OperandType.FLOAT32: np.float32,
    OperandType.INT32: np.int32,
    OperandType.UINT32: np.uint32,
    OperandType.TENSOR_FLOAT32: np.float32,
    OperandType.TENSOR_INT32: np.int32,
    OperandType.TENSOR_QUANT8_ASYMM: np.uint8,
    OperandType.BOOL: np.bool_,
    OperandType.TENSOR_FLOAT16: np.float16,
    OperandType.TENSOR_BOOL8: np.bool_,
    OperandType.FLOAT16: np.float16,
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: np.int8,
    OperandType.TENSOR_QUANT8_ASYMM_SIGNED: np.int8,
}


class Operand(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor or a number: `size` bytes of it are constant, -1 where it comes with a run, 0 where it is left out."""

    type: int
    shape: tuple[int, ...]
    scale: float
    zero_point: int
    size: int
    channel_dimension: int
    channel_scales: tuple[float, ...]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation, with the operands that it reads and writes by their places."""

    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What one model of NNAPI holds; `relaxed` allows half precision where it says float32."""

    id: int
    relaxed: bool
    operands: tuple[Operand, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Constants(msgspec.Struct, frozen=True):
    """The values of constant operands, by place."""

    values: dict[int, Array]

    def number(self, place: int) -> float:
        """Returns a single number.

        Raises:
            LookupError: the operand is not constant.
        """
        return float(self.values[place].reshape(-1)[0])

    def whole(self, place: int) -> int:
        """Returns a single whole number.

        Raises:
            LookupError: the operand is not constant.
        """
        return int(self.number(place))


def split_constants(network: Network, data: bytes) -> Constants:
    """Returns the constant operands from their bytes, which follow each other in the order of the operands.

    Raises:
        ValueError: the bytes do not fit the operands.
    """
    values: dict[int, Array] = {}
    at = 0
    for place, operand in enumerate(network.operands):
        if operand.size > 0:
            dtype = np.dtype(NUMPY_TYPES[operand.type])
            values[place] = np.frombuffer(data[at : at + operand.size], dtype).reshape(operand.shape or (-1,))
            at += operand.size
    return Constants(values)
