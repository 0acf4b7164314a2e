"""The measured table: networks with their times on devices.

The figures are those of the package qai-hub-models (BSD-3-Clause); `tools/forecast/make_table.py` makes the file.
"""

import functools
import lzma
from collections.abc import Mapping
from typing import Literal

import msgspec

from edgekit.phones import Phone, read_phones
from edgekit.target import targets_folder

Runtime = Literal["onnx", "precompiled_qnn_onnx", "qnn_context_binary", "qnn_dlc", "tflite"]
FOLDER = "forecast"


class MeasuredRow(msgspec.Struct, frozen=True, array_like=True):
    """A network on a device: milliseconds, the main compute unit, all layers, and those on GPU and CPU.

    `device` is an index into the table's devices. Memory is the range of the peak, in MB, as AI Hub estimates it.
    """

    device: int
    ms: float
    unit: str
    layers: int
    gpu_layers: int
    cpu_layers: int
    memory_low: int
    memory_high: int


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """What the package states about a network."""

    use_case: str
    source: str
    resolution: str
    parameters: str


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The measured figures. `rows` maps NETWORK/COMPONENT to precision, to runtime, to the measured rows."""

    source: str
    package: str
    version: str
    licence: str
    notice: str
    devices: tuple[str, ...]
    networks: dict[str, Network]
    rows: dict[str, dict[str, dict[Runtime, tuple[MeasuredRow, ...]]]]

    def find_key(self, name: str) -> str:
        """Returns a network's key in `rows`, for NETWORK/COMPONENT or, if the network has one component, NETWORK."""
        model, _, part = name.partition("/")
        return name if part else next((key for key in self.rows if key.partition("/")[0] == model), name)

    def find_rows(self, network: str, precision: str) -> Mapping[str, MeasuredRow]:
        """Returns the measurements of a network with ONNX Runtime, by device; empty if there are none."""
        rows = self.rows.get(network, {}).get(precision, {}).get("onnx", ())
        return {self.devices[row.device]: row for row in rows}


@functools.lru_cache(maxsize=1)
def load_table() -> Table:
    """Returns the measured table that edgekit ships."""
    packed = (targets_folder() / FOLDER / "measured.json.xz").read_bytes()
    return msgspec.json.decode(lzma.decompress(packed), type=Table)


@functools.lru_cache(maxsize=1)
def load_phones() -> tuple[Phone, ...]:
    """Returns the devices that are known by name."""
    return read_phones(targets_folder() / "qnn" / "phones.json")
