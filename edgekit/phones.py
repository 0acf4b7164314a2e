"""Devices with a Hexagon NPU by their common names, with the options that a QNN session needs for each."""

import functools
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import msgspec

from edgekit.errors import UsageError
from edgekit.serialize import ready_type


class Phone(msgspec.Struct, frozen=True, kw_only=True):
    """A device with a Hexagon NPU: its name, its chip, and the options that a QNN session needs.

    `marketing` is the chip's product name, `form` the kind of device, `htp` the version of the NPU (HTP v73: 73),
    `soc_model` Qualcomm's number of the SoC. Without `fp16` the NPU cannot compute with floats.
    """

    name: str
    chipset: str
    marketing: str
    form: str
    htp: int
    soc_model: int
    fp16: bool


class _PhoneList(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    package: str
    version: str
    licence: str
    phones: tuple[Phone, ...]


@functools.lru_cache(maxsize=4)
def read_phones(file: Path) -> tuple[Phone, ...]:
    """Returns the devices of a file, by name."""
    return msgspec.json.decode(file.read_bytes(), type=ready_type(_PhoneList)).phones


def find_phone(name: str, known: Sequence[Phone]) -> Phone:
    """Returns the device of a name, or of a part of its words that only devices of one chip have ("RB3 Gen 2").

    Raises:
        UsageError: there is none of this name, or devices of several chips have it.
    """
    words = name.casefold().split()
    exact = [phone for phone in known if phone.name.casefold() == " ".join(words)]
    # The shortest of those that have the words: "Galaxy S24" is not the S24 Ultra.
    spelled = [(phone, f"{phone.name} {phone.marketing}".casefold()) for phone in known]
    own = [(phone, {*text.replace("®", "").replace("™", "").split()}) for phone, text in spelled]
    having = [phone for phone, theirs in own if words and theirs.issuperset(words)]
    found = exact or sorted(having, key=lambda phone: len(phone.name))
    if not found:
        full = {phone.name.casefold(): phone.name for phone in known}
        full |= {low.removeprefix("samsung ").removeprefix("snapdragon "): each for low, each in full.items()}
        close = get_close_matches(name.casefold(), full, n=3, cutoff=0.4)
        near = list(dict.fromkeys(full[each] for each in close)) or sorted({*full.values()})[:3]
        raise UsageError(f"no device '{name}' is known", hint=f"near it: {', '.join(near)}")
    # The first is meant if it has at most one word more, such as the maker's name, and the others have still more.
    lengths = [len(phone.name.split()) for phone in found]
    is_meant = lengths[0] <= len(words) + 1 and lengths[0] < min(lengths[1:2], default=lengths[0])
    if len({phone.chipset for phone in found}) > 1 and not is_meant:
        names = ", ".join(phone.name for phone in found[:6])
        raise UsageError(f"'{name}' stands for several devices", hint=f"name one of them: {names}")
    return found[0]
