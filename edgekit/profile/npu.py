"""The file of QNN's own profiler: what the operations inside the one kernel that ONNX Runtime sees took, in cycles.

QNN's provider writes it with `profiling_level=detailed`, a line an event: `Msg Timestamp,Message,Time,Unit of
Measurement,Timing Source,Event Level,Event Identifier`. It may come from a device: hostile until it has been checked.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from edgekit._files import open_regular
from edgekit.devices.process.child import MAX_LOG, printable
from edgekit.errors import DeviceError
from edgekit.profile.nodes import Source, find_source
from edgekit.profile.report import NpuTime

# Half a kilobyte a node and run, and no more runs than the profile makes.
_MOST_BYTES = 1 << 26
_EVENT = re.compile(r"(?P<name>.*?):?\s?OpId_(?P<number>\d{1,9}) \(cycles\)")

Cycles = Mapping[str, int]
"""What each operation of a run took, by its name, in the order in which they stand."""


class _Header(msgspec.Struct, frozen=True):
    message: int
    time: int
    unit: int
    event: int


def read_npu(path: Path) -> tuple[Cycles, ...]:
    """Returns what the operations took in each run, in order.

    Raises:
        DeviceError: it cannot be read, or is no such file.
    """
    try:
        with open_regular(path) as stream:
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DeviceError(f"cannot read '{path.name}': {error.strerror}", hint="--on host profiles the CPU") from error
    if len(data) > _MOST_BYTES:
        raise DeviceError(f"QNN's profile is larger than {_MOST_BYTES} bytes", hint="profile fewer runs: --runs 5")
    try:
        rows = list(csv.reader(data.decode().splitlines()))
        return tuple(_list_runs(rows))
    except (UnicodeDecodeError, csv.Error, ValueError) as error:
        hint = "another onnxruntime-qnn may write another form: edgekit doctor"
        raise DeviceError(f"QNN's profile is malformed: {printable(str(error))}", hint=hint) from error


def list_npu(runs: Sequence[Cycles], sources: Mapping[str, Source]) -> tuple[NpuTime, ...]:
    """Returns the operations with their median cycles, the most expensive first; the first run is no part of it."""
    steady = runs[1:] or runs
    names = dict.fromkeys(name for run in steady for name in run)
    found = {name: [run[name] for run in steady if name in run] for name in names}
    middle = {name: median(cycles) for name, cycles in found.items()}
    whole = sum(middle.values())
    times = (
        NpuTime(
            name=name,
            source=find_source(name, sources).node,
            cycles=cycles,
            share=cycles / whole if whole else 0.0,
            spread=(max(found[name]) - min(found[name])) / cycles if cycles else 0.0,
        )
        for name, cycles in middle.items()
    )
    return tuple(sorted(times, key=lambda one: -one.cycles))


def _list_runs(rows: Sequence[Sequence[str]]) -> Iterator[Cycles]:
    if not rows:
        return
    header = _Header(*(rows[0].index(name) for name in ("Message", "Time", "Unit of Measurement", "Event Identifier")))
    cycles: dict[str, int] = {}
    for row in rows[1:]:
        if len(row) < len(rows[0]):
            raise ValueError("a line has too few columns")
        found = _EVENT.fullmatch(row[header.event])
        if row[header.message] == "NODE" and row[header.unit] == "CYCLES" and found:
            # Nodes of one name are told apart by QNN's number.
            name = printable(found["name"], MAX_LOG)
            name = f"{name} ({found['number']})" if name in cycles else name
            cycles[name] = min(int(row[header.time]), 1 << 53)
        elif row[header.message] == "EXECUTE" and cycles:
            yield cycles
            cycles = {}
