"""The CPU of a phone, for a process under qemu: /proc/cpuinfo, AT_HWCAP and qemu's CPU say the same.

ONNX Runtime's library `cpuinfo` and XNNPACK choose kernels by the features that the CPU has (AT_HWCAP) and by which
core it is (its part and variant in /proc/cpuinfo). Without these files XNNPACK does not start.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from edgekit._files import write_file
from edgekit.errors import UsageError, suggest_name

_T = TypeVar("_T")

CORES = 4
"""How many cores the phone has; apps give ONNX Runtime that many threads at most."""

DEFAULT_CORE = "cortex-a76"
"""What a phone has unless said: Armv8.2 with dot products and half precision, as most since 2019."""

_TABLE = Path(__file__).parent / "phones.toml"
# The bits of AT_HWCAP and AT_HWCAP2 from the first on: Linux, arch/arm64/include/uapi/asm/hwcap.h.
_HWCAP = """
fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4
asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg
"""
_HWCAP2 = """
dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16 dgh rng
bti mte
"""


class Core(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A core: the fields of its MIDR_EL1, its features as Linux names them, and the CPU of qemu that has them all."""

    part: int
    qemu: str
    features: str
    implementer: int = 0x41
    variant: int = 0
    revision: int = 0
    source: str = ""

    @property
    def hwcaps(self) -> tuple[int, int]:
        """AT_HWCAP and AT_HWCAP2 for these features."""
        known = set(self.features.split())
        words = [
            sum(1 << bit for bit, name in enumerate(names.split()) if name in known) for names in (_HWCAP, _HWCAP2)
        ]
        return words[0], words[1]


class Phone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A phone, and the names of the kinds of cores that it has, the big ones first."""

    title: str
    cores: tuple[str, ...]
    source: str


class Phones(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table of cores and phones, with what its sources are called."""

    sources: dict[str, str]
    cores: dict[str, Core]
    phones: dict[str, Phone]


@functools.cache
def read_phones() -> Phones:
    """Returns the table."""
    return msgspec.toml.decode(_TABLE.read_bytes(), type=Phones)


def find_core(name: str) -> Core:
    """Returns a core by its name.

    Raises:
        UsageError: there is no such core.
    """
    return _find(name, read_phones().cores, f"cpu '{name}' for 'android'")


def find_phone(name: str) -> Phone:
    """Returns a phone by its name.

    Raises:
        UsageError: there is no such phone.
    """
    return _find(name, read_phones().phones, f"phone '{name}'")


def _find(name: str, table: Mapping[str, _T], what: str) -> _T:
    if name not in table:
        raise UsageError(f"there is no {what}", hint=suggest_name(name, table))
    return table[name]


def write_phone(core: Core, root: Path) -> None:
    """Writes the files that describe a phone of that core below `root`, as `/proc` and `/sys` of the phone.

    Raises:
        OutputError: the folder cannot be written.
    """
    lines = "".join(
        f"processor\t: {index}\nBogoMIPS\t: 38.40\nFeatures\t: {core.features}\n"
        f"CPU implementer\t: {core.implementer:#04x}\nCPU architecture: 8\nCPU variant\t: {core.variant:#x}\n"
        f"CPU part\t: {core.part:#05x}\nCPU revision\t: {core.revision}\n\n"
        for index in range(CORES)
    )
    write_file(root / "proc" / "cpuinfo", lines.encode())
    for name in ("possible", "present", "online"):
        write_file(root / "sys" / "devices" / "system" / "cpu" / name, f"0-{CORES - 1}\n".encode())
