"""The bytes that a network moves inside Qualcomm's NPU, as its compiler plans them on a PC. Nothing runs."""

import re
from pathlib import Path

import msgspec

from edgekit.convert.context import plan_context

SOC = "69"
"""The chip that plans are made for: that of the Galaxy S25, the reference of the other devices' factors."""
_NAMES = ("dram_read", "dram_write", "vtcm_read", "vtcm_write", "is_dma")
_MOVE = re.compile(r'\{"opid"\s*:\s*0x([0-9a-f]+)' + "".join(rf'\s*,\s*"{name}"\s*:\s*(\d+)' for name in _NAMES))


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The data traffic of one inference.

    `dram` are the bytes between DRAM and the NPU's vector memory (VTCM), `matrix` and `vector` those that its matrix
    unit and its vector units read from VTCM and write there. `operations` counts the tiles of work: a convolution on a
    large activation is many of them.
    """

    dram: int
    matrix: int
    vector: int
    operations: int


def compile_traffic(model: str, folder: Path, *, timeout_s: float) -> Traffic:
    """Compiles the prepared model of that name in `folder`, for the chip that the forecast was fitted on.

    Raises:
        MissingExtraError: onnxruntime-qnn is not installed.
        RuntimeRefusal: QNN takes no node of it.
        DeviceError: the compiler crashed or ran out of time, or reported no bytes.
    """
    return read_plan(plan_context(model, SOC, folder, timeout_s=timeout_s))


def read_plan(text: str) -> Traffic:
    """Returns the sums over the operations of a compiler's plan."""
    on_vector = {
        int(number, 16)
        for numbers in re.findall(r"runlist_vec = \[([^\]]*)\]", text)
        for number in re.findall("0x([0-9a-f]+)", numbers)
    }
    sums = {"dram": 0, "matrix": 0, "vector": 0}
    operations = 0
    for found in _MOVE.finditer(text):
        from_dram, to_dram, read, written, is_dma = map(int, found.groups()[1:])
        operations += 1
        sums["dram"] += from_dram + to_dram
        # The VTCM bytes of a DMA transfer are its DRAM bytes again.
        if not is_dma:
            sums["vector" if int(found[1], 16) in on_vector else "matrix"] += read + written
    return Traffic(**sums, operations=operations)
