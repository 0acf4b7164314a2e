"""The table of measured times, and the model that is fitted to it.

The table holds the times of networks on devices, from the package qai-hub-models (BSD-3-Clause);
`tools/forecast/make_table.py` writes it. The model is a sum over kinds of work times a factor for the device, with an
interval from cross-validation: each family of networks is left out of the fit once.

    log ms(network, device) = log sum_k c_k * work_k(network) + d(device)

The coefficients are fitted by `tools/forecast/fit.py`; here they are only applied.
"""

import functools
import lzma
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from edgekit.forecasts.features import BLOCK, Kind, Traffic
from edgekit.model.tensors import Array
from edgekit.phones import Phone, read_phones
from edgekit.serialize import ready_type
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

    source: str
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
    return msgspec.json.decode(lzma.decompress(packed), type=ready_type(Table))


def load_phones() -> tuple[Phone, ...]:
    """Returns the devices that are known by name."""
    return read_phones(targets_folder() / "qnn" / "phones.json")


Bits = Literal["float", "w8a8", "w8a16"]


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A weighted sum of amounts of work.

    `low` and `high` are the quantiles 0.1 and 0.9 of log(measured / forecast) over families left out of the fit.
    """

    coefficients: tuple[float, ...]
    low: float
    high: float

    def sum(self, amounts: Iterable[float]) -> float:
        """Returns what is forecast for these amounts: milliseconds on the reference device, or MB."""
        return float(self.split(amounts).sum())

    def split(self, amounts: Iterable[float]) -> Array:
        """Returns what each amount contributes to the forecast."""
        return np.asarray(np.array(self.coefficients) * np.array(list(amounts)))


class Fitted(Fit, frozen=True, kw_only=True):
    """The fit for a precision: milliseconds on the reference device for each amount of `list_amounts`.

    `devices` holds the logarithm of each device's factor. `low` and `high` are stored divided by 1 + distance;
    `farthest` is the largest distance of a left-out family. `spread` is, by device, the uncertainty (quantile 0.8) if
    the time on another device is known.

    `over` and `faster` compare this precision with others. `over` holds the median of log(time in this one / time in
    the other), and the quantile 0.8 around it. `faster` holds the share of networks that were faster in this one, among
    those whose times differ by more than a tenth.

    `compiled` is the fit to the compiler's plans of the float networks, for each amount of `list_planned`; its `low`
    and `high` apply to the mean of the logarithms of that forecast and of the forecast from the graph. It is None if
    plans do not improve the forecast.
    """

    devices: dict[str, float]
    farthest: float
    spread: dict[str, float]
    over: dict[Bits, tuple[float, float]] = {}
    faster: dict[Bits, float] = {}
    compiled: Fit | None = None


class KnownNetwork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A measured network whose graph is known: its family, its work by kind, and what QNN's compiler plans for it.

    `operators` counts those of the prepared graph, before patterns that an NPU runs as one operator are joined.
    """

    family: str
    macs: int
    operators: int = 0
    kinds: dict[Kind, float]
    traffic: dict[Bits, Traffic] = {}


class CpuFit(msgspec.Struct, frozen=True, kw_only=True):
    """How much longer a run takes if at least `least` layers run on the CPU.

    `low`, `middle` and `high` are the quantiles 0.1, 0.5 and 0.9 of the logarithm of the factor.
    """

    least: int
    low: float
    middle: float
    high: float


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """All that a forecast needs: the fit of times by precision, and that of peak memory by precision and device.

    The coefficients of `memory` are MB for each of `MEMORY_KINDS`, and a constant.
    """

    reference: str
    cpu_layers: tuple[CpuFit, ...]
    precisions: dict[Bits, Fitted]
    memory: dict[Bits, dict[str, Fit]]


@functools.lru_cache(maxsize=1)
def load_fitted() -> tuple[Model, dict[str, KnownNetwork]]:
    """Returns the fitted model, and the networks that it was fitted to."""
    folder = targets_folder() / FOLDER
    model = msgspec.json.decode((folder / "model.json").read_bytes(), type=ready_type(Model))
    return model, read_networks(folder / "networks.json")


def read_networks(path: Path) -> dict[str, KnownNetwork]:
    """Returns the networks whose graphs are known."""
    return msgspec.json.decode(path.read_bytes(), type=ready_type(dict[str, KnownNetwork]))


@functools.lru_cache(maxsize=1)
def load_cpu_fit() -> Fit:
    """Returns the fit to times of networks on the CPU of a PC: only ratios of its sums are used.

    Its `low` and `high` hold if the time of a network of another family, on the same machine, gives the scale.
    """
    return msgspec.json.decode((targets_folder() / FOLDER / "cpu.json").read_bytes(), type=ready_type(Fit))


def list_planned(kinds: Mapping[Kind, float], traffic: Traffic) -> list[float]:
    """Returns the amounts of work that determine the time of a network with a compiler's plan.

    The matrix products are counted in the graph; a depthwise convolution counts as a dense one of 32 channels by 32,
    as the matrix unit computes it. Inputs and outputs are counted because the plan does not say what ONNX Runtime does
    with them.
    """
    products = kinds["matrix"] + BLOCK * kinds["vector"]
    return [float(traffic.dram), float(traffic.vector), products, kinds["nodes"], kinds["outside"], 1.0]


def measure_distance(one: Array, other: Array) -> float:
    """Returns how different two networks are, from their milliseconds by kind.

    It is half the sum of the absolute differences of their shares (0 to 1), plus |log10| of the ratio of their times.
    """
    shares = float(np.abs(one / one.sum() - other / other.sum()).sum()) / 2
    return shares + abs(math.log10(float(one.sum()) / float(other.sum())))


MEMORY_KINDS: tuple[Kind, ...] = ("weights", "spill", "outside", "nodes")
"""The kinds of work that determine peak memory, besides a constant."""
