"""What was measured: devices by the names that people know, and networks with their times on them.

The figures are those of the package qai-hub-models (BSD-3-Clause); `tools/forecast/make.py` makes the file.
"""

import functools
import lzma
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Literal

import msgspec

from edgekit.errors import UsageError
from edgekit.target import targets_folder

Runtime = Literal["onnx", "precompiled_qnn_onnx", "qnn_context_binary", "qnn_dlc", "tflite"]
FOLDER = "forecast"


class Phone(msgspec.Struct, frozen=True, kw_only=True):
    """A device with a Hexagon NPU: its name, its chip, and what a QNN session must be told of it.

    `htp` is the version of the HTP, `soc_model` Qualcomm's number of the SoC. Without `fp16` it computes no floats.
    """

    name: str
    chipset: str
    marketing: str
    form: str
    htp: int
    soc_model: int
    fp16: bool
    weight_sharing: bool


class MeasuredRow(msgspec.Struct, frozen=True, array_like=True):
    """A network on a device: milliseconds, the unit that computed most, layers in all, and those left to others.

    `device` is a place in the table's devices. Memory is the range of the peak, in MB, as AI Hub estimates it.
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
    """What the package says of a network."""

    use_case: str
    source: str
    resolution: str
    parameters: str


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The measured figures. `rows` goes from NETWORK/COMPONENT over precision and runtime to what was measured."""

    source: str
    package: str
    version: str
    licence: str
    notice: str
    devices: tuple[Phone, ...]
    networks: dict[str, Network]
    rows: dict[str, dict[str, dict[Runtime, tuple[MeasuredRow, ...]]]]

    def find_key(self, name: str) -> str:
        """Returns the key in `rows` of a network: NETWORK/COMPONENT, or NETWORK where it is one whole."""
        model, _, part = name.partition("/")
        return name if part else next((key for key in self.rows if key.partition("/")[0] == model), name)

    def find_rows(self, network: str, precision: str) -> Mapping[str, MeasuredRow]:
        """Returns what a network took as ONNX Runtime runs it, by device; none where it was not measured so."""
        rows = self.rows.get(network, {}).get(precision, {}).get("onnx", ())
        return {self.devices[row.device].name: row for row in rows}


@functools.lru_cache(maxsize=1)
def load_table() -> Table:
    """Returns the measured figures that edgekit ships."""
    packed = (targets_folder() / FOLDER / "measured.json.xz").read_bytes()
    return msgspec.json.decode(lzma.decompress(packed), type=Table)


def find_phone(name: str, phones: Iterable[Phone] | None = None) -> Phone:
    """Returns the device of a name; a part of the name does where only one chip has it: "Galaxy S24", "RB3 Gen 2".

    Raises:
        UsageError: there is none of this name, or it stands for several chips.
    """
    known = tuple(load_table().devices if phones is None else phones)
    words = name.casefold().split()
    exact = [phone for phone in known if phone.name.casefold() == " ".join(words)]
    # The shortest of those that have the words: "Galaxy S24" is not the S24 Ultra.
    found = exact or sorted((phone for phone in known if _has(phone, words)), key=lambda phone: len(phone.name))
    if not found:
        raise UsageError(f"no device '{name}' is known", hint=f"near it: {', '.join(_near(name, known))}")
    if len({phone.chipset for phone in found}) > 1 and not _begins(found, len(words)):
        names = ", ".join(phone.name for phone in found[:6])
        raise UsageError(f"'{name}' stands for several devices", hint=f"name one of them: {names}")
    return found[0]


def _has(phone: Phone, words: Iterable[str]) -> bool:
    own = {*phone.name.casefold().split(), *phone.marketing.casefold().replace("®", "").replace("™", "").split()}
    wanted = list(words)
    return bool(wanted) and all(word in own for word in wanted)


def _begins(found: list[Phone], words: int) -> bool:
    """Returns True if the first adds at most a maker's name or a kind to the words, and the others more."""
    first, second = (len(phone.name.split()) for phone in found[:2])
    return first < second and first <= words + 1


def _near(name: str, known: Iterable[Phone]) -> list[str]:
    names = {phone.name.casefold(): phone.name for phone in known}
    short = {low.removeprefix("samsung ").removeprefix("snapdragon "): full for low, full in names.items()}
    close = get_close_matches(name.casefold(), {**names, **short}, n=3, cutoff=0.4)
    return list(dict.fromkeys({**names, **short}[each] for each in close)) or sorted(names.values())[:3]
