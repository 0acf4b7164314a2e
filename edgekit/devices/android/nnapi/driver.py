"""A phone's NNAPI driver, as far as it decides what runs where: a `.toml` file that the user writes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit.devices.android.nnapi.operations import NUMBERS
from edgekit.errors import UsageError, suggest_name
from edgekit.plain import read_toml

_FEATURE_LEVELS = frozenset({27, 28, 29, 30, 31, 1_000_006, 1_000_007, 1_000_008})
# What TFLite and ONNX call an operation whose name NNAPI spells otherwise.
_OTHER_NAMES = {
    "SIGMOID": "LOGISTIC", "CONV": "CONV_2D", "GEMM": "FULLY_CONNECTED", "PADV2": "PAD_V2", "RELU_N1_TO_1": "RELU1",
    "ARG_MAX": "ARGMAX", "ARG_MIN": "ARGMIN", "SUM": "REDUCE_SUM",
}  # fmt: skip


class Driver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A driver: the operations that it refuses, by NNAPI's names, and the feature level that it reports.

    What it refuses, NNAPI gives to its reference kernels on the CPU. A `feature_level` of None is that of the phone.
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
    try:
        tree = read_toml(path, dict[str, object])
        _check_keys(path, tree)
        driver = msgspec.convert(tree, type=Driver)
    except OSError as error:
        raise UsageError(f"cannot read '{path}': {error.strerror}", hint="--set driver=FILE.toml") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"'{path}' is malformed: {error}", hint='for example refused = ["SOFTMAX"]') from error
    for name in driver.refused:
        if name not in NUMBERS:
            raise UsageError(f"'{path}' refuses '{name}', which is no operation of NNAPI", hint=_suggest(name))
    if driver.feature_level not in {None, *_FEATURE_LEVELS}:
        levels = ", ".join(map(str, sorted(_FEATURE_LEVELS)))
        raise UsageError(f"'{path}' has no feature level of NNAPI: {driver.feature_level}", hint=f"one of {levels}")
    return driver


def _check_keys(path: Path, tree: Mapping[str, object]) -> None:
    for key in tree:
        if key not in Driver.__struct_fields__:
            hint = suggest_name(key, Driver.__struct_fields__)
            raise UsageError(f"'{path}' has the unknown key '{key}'", hint=hint)


def _suggest(name: str) -> str:
    """Returns the name that NNAPI has for what TFLite or ONNX call so, else the nearest."""
    upper = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()
    if upper in _OTHER_NAMES:
        return f"did you mean '{_OTHER_NAMES[upper]}'?"
    near = suggest_name(upper, NUMBERS)
    return near if near.startswith("did") else "the names are those of NeuralNetworksTypes.h, as CONV_2D"
