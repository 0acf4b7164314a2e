"""A network as passed to NNAPI: operands, and operations by number; and which operations a phone's driver takes."""

from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from edgekit.errors import UsageError, look_up
from edgekit.serialize import read_toml, suggest_key

NAMES = dict(enumerate((Path(__file__).parent / "operations.txt").read_text().split()))
"""NNAPI's names of its operations, by the numbers of NeuralNetworksTypes.h."""
NUMBERS = {name: number for number, name in NAMES.items()}


def name_operation(number: int) -> str:
    """Returns the name of an operation, or a description by its number if it has none."""
    return NAMES.get(number, f"of number {number}")


class OperandType(IntEnum):
    """The operand types that ONNX Runtime's NNAPI provider uses."""

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
    OperandType.FLOAT32: np.float32, OperandType.INT32: np.int32, OperandType.UINT32: np.uint32,
    OperandType.TENSOR_FLOAT32: np.float32, OperandType.TENSOR_INT32: np.int32, OperandType.BOOL: np.bool_,
    OperandType.TENSOR_QUANT8_ASYMM: np.uint8, OperandType.TENSOR_QUANT8_ASYMM_SIGNED: np.int8,
    OperandType.TENSOR_QUANT8_SYMM_PER_CHANNEL: np.int8, OperandType.TENSOR_BOOL8: np.bool_,
    OperandType.FLOAT16: np.float16, OperandType.TENSOR_FLOAT16: np.float16,
}  # fmt: skip


class Operand(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor or a scalar; `size` is that of a constant in bytes, -1 for a value of a run, 0 for an omitted one."""

    type: int
    shape: tuple[int, ...]
    scale: float
    zero_point: int
    size: int
    channel_dimension: int
    channel_scales: tuple[float, ...]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation, with the indices of the operands that it reads and writes."""

    type: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one NNAPI model; `relaxed` allows half precision for float32 operands."""

    id: int
    relaxed: bool
    operands: tuple[Operand, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


# NNAPI's feature levels by Android's API levels, from which they differ since Android 12L (NeuralNetworksTypes.h).
_FEATURE_LEVELS = {**{api: api for api in range(27, 32)}, 32: 1_000_006, 33: 1_000_007}
_LAST_FEATURE_LEVEL = 1_000_008


def find_feature_level(api: int) -> int:
    """Returns NNAPI's feature level on a phone with that Android API level and all updates."""
    return api if api < 32 else _FEATURE_LEVELS.get(api, _LAST_FEATURE_LEVEL)


class Driver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An NNAPI driver: the operations that it refuses, by NNAPI's names, and the feature level that it reports.

    NNAPI runs refused operations with its reference kernels on the CPU. A `feature_level` of None is that of the phone.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[\w.:+-]{1,64}$")] = "edgekit-accelerator"
    refused: tuple[str, ...] = ()
    feature_level: int | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the operations that it refuses, sorted."""
        return tuple(sorted(NUMBERS[name] for name in self.refused))


def read_driver(path: Path) -> Driver:
    """Returns the driver of a file.

    Raises:
        UsageError: the file cannot be read or is malformed, or names what is no operation or feature level of NNAPI.
    """
    suggest = partial(suggest_key, valid=Driver.__struct_fields__, otherwise='for example refused = ["SOFTMAX"]')
    driver = read_toml(path, Driver, hint="--set driver=FILE.toml", keys=suggest)
    for name in driver.refused:
        look_up(NUMBERS, name, f"'{path}' refuses '{name}', which is no operation of NNAPI (NeuralNetworksTypes.h)")
    known = [*_FEATURE_LEVELS.values(), _LAST_FEATURE_LEVEL]
    if driver.feature_level not in {None, *known}:
        levels = ", ".join(map(str, known))
        raise UsageError(f"'{path}' has no feature level of NNAPI: {driver.feature_level}", hint=f"one of {levels}")
    return driver
