"""The CPU of a phone as its kernel describes it, for a process under qemu: the two must say the same.

ONNX Runtime's library `cpuinfo` and XNNPACK choose kernels by the features that the CPU has (AT_HWCAP, which qemu sets)
and by which core it is (its part in /proc/cpuinfo). Without these files XNNPACK does not start.
"""

from pathlib import Path

import msgspec

from edgekit._files import write_file

CORES = 4
"""How many cores the phone has; apps give ONNX Runtime that many threads at most."""

_V8_0 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_V8_2 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"


class Core(msgspec.Struct, frozen=True, kw_only=True):
    """A core: its part number (MIDR_EL1 in Arm's manuals), its features, and the CPU of qemu that has the same."""

    part: int
    qemu: str
    features: str


CORE_TYPES = {
    "cortex-a76": Core(part=0xD0B, qemu="cortex-a76", features=_V8_2),
    "cortex-a53": Core(part=0xD03, qemu="cortex-a53", features=_V8_0),
    "cortex-a55": Core(part=0xD05, qemu="cortex-a76", features=_V8_2),
    "cortex-a72": Core(part=0xD08, qemu="cortex-a72", features=_V8_0),
    "cortex-x1": Core(part=0xD44, qemu="cortex-a76", features=_V8_2),
    "neoverse-n1": Core(part=0xD0C, qemu="neoverse-n1", features=_V8_2),
}
"""The first is what a phone has unless said: Armv8.2 with dot products and half precision, as most since 2019."""


def write_phone(core: Core, root: Path) -> None:
    """Writes the files that describe a phone of that core below `root`, as `/proc` and `/sys` of the phone.

    Raises:
        OutputError: the folder cannot be written.
    """
    lines = "".join(
        f"processor\t: {index}\nBogoMIPS\t: 38.40\nFeatures\t: {core.features}\nCPU implementer\t: 0x41\n"
        f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {core.part:#05x}\nCPU revision\t: 0\n\n"
        for index in range(CORES)
    )
    write_file(root / "proc" / "cpuinfo", lines.encode())
    for name in ("possible", "present", "online"):
        write_file(root / "sys" / "devices" / "system" / "cpu" / name, f"0-{CORES - 1}\n".encode())
