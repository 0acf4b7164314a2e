"""Reads the file of ONNX Runtime's profiler: which kernels ran when, in which run, on which tensors.

The file is in Chrome's trace format, a list of events; its names and arguments are those of
`onnxruntime/core/common/profiler.cc` and `core/framework/sequential_executor.cc`. It may come from a device, so nothing
in it is trusted until it has been checked.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit._files import open_regular
from edgekit.devices.process.exchange import MAX_TRACE_BYTES
from edgekit.devices.process.run import MAX_LOG, printable
from edgekit.errors import DeviceError, reading, reraised
from edgekit.serialize import UNDECODABLE, ready_type

KERNEL = "_kernel_time"

_NODE, _SESSION, _RUN = "Node", "Session", "model_run"
_SESSION_CREATION = "session_initialization"

# At most a day, as for other times that devices report.
_Microseconds = Annotated[int, msgspec.Meta(ge=0, le=86_400_000_000)]
_Dim = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Shapes = list[dict[str, list[_Dim]]]


class _Pool(msgspec.Struct):
    block_size: list[int] = []


class _Threads(msgspec.Struct):
    main_thread: _Pool = msgspec.field(default_factory=_Pool)


class _Arguments(msgspec.Struct):
    op_name: str = ""
    provider: str = ""
    input_type_shape: _Shapes = []
    output_type_shape: _Shapes = []
    activation_size: str = "0"
    parameter_size: str = "0"
    output_size: str = "0"
    # An empty text in builds without thread statistics, such as those for Android.
    thread_scheduling_stats: _Threads | str | None = None


class _Event(msgspec.Struct):
    cat: str
    name: str
    ts: _Microseconds = 0
    dur: _Microseconds = 0
    tid: int = 0
    args: _Arguments = msgspec.field(default_factory=_Arguments)


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """The type and the shape of a tensor that a kernel read or wrote, in ONNX Runtime's words: `float`, `uint8`."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Returns it in readable form: `float[1,3,224,224]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One execution of a kernel; times in microseconds, `self_us` without the kernels that ran inside it.

    `bytes` is the total size of inputs, weights and outputs. `thread` is the thread that started it, `depth` the number
    of kernels (If, Loop, Scan) inside which it ran. `spread` is True if it gave work to the thread pool.
    """

    name: str
    op: str
    provider: str
    start_us: int
    duration_us: int
    self_us: int
    thread: int
    depth: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    bytes: int
    spread: bool


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the session, in microseconds from the start of the profiler; its kernels are in order of their start."""

    start_us: int
    duration_us: int
    steps: tuple[Step, ...]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """The profiler's results: the runs in order, and the milliseconds of ONNX Runtime's session initialization."""

    executions: tuple[Execution, ...]
    make_ms: float


def read_trace(path: Path) -> Trace:
    """Returns the contents of a profiler's file.

    Raises:
        DeviceError: it cannot be read, or is no such file, or is larger than a device may send.
    """
    return decode_trace(read_profile(path, MAX_TRACE_BYTES, "the device gave no profile"))


def read_profile(path: Path, max_bytes: int, hint: str) -> bytes:
    """Returns the bytes of a profiler's file, which may come from a device.

    Raises:
        DeviceError: it cannot be read (with the given hint), or is larger than `max_bytes`.
    """
    with reading(f"'{path.name}'", DeviceError, hint), open_regular(path) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise DeviceError(f"the profile is larger than {max_bytes} bytes", hint="profile fewer runs: --runs 5")
    return data


def decode_trace(data: bytes) -> Trace:
    """Returns the profiler's events as a trace.

    Raises:
        DeviceError: it is no trace.
    """
    hint = "names of nodes that hold quotation marks break the profiler's file: edgekit inspect MODEL"
    with reraised(UNDECODABLE, DeviceError("the profile is malformed", hint=hint), quote=True):
        events = msgspec.json.decode(data, type=ready_type(list[_Event]))
    session = {event.name: event.dur / 1e3 for event in events if event.cat == _SESSION}
    runs = sorted((event for event in events if (event.cat, event.name) == (_SESSION, _RUN)), key=attrgetter("ts"))
    kernels = [event for event in events if event.cat == _NODE and event.name.endswith(KERNEL)]
    by_run: list[list[_Event]] = [[] for _ in runs]
    starts = [run.ts for run in runs]
    for event in sorted(kernels, key=attrgetter("ts")):
        index = bisect_right(starts, event.ts) - 1
        # Kernels outside all runs are left out: they fold constants while the session is created.
        if index >= 0 and event.ts <= runs[index].ts + runs[index].dur:
            by_run[index].append(event)
    steps = (tuple(sorted(_list_steps(each), key=attrgetter("start_us", "depth"))) for each in by_run)
    pairs = zip(runs, steps, strict=True)
    executions = tuple(Execution(start_us=run.ts, duration_us=run.dur, steps=each) for run, each in pairs)
    return Trace(executions=executions, make_ms=session.get(_SESSION_CREATION, 0.0))


def _read_count(text: str) -> int:
    """Returns a number that the profiler wrote as text; 0 if the text is no number that it can have written."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdecimal() and len(digits) < 16 else 0


def _list_steps(kernels: Sequence[_Event]) -> Iterator[Step]:
    """Yields the kernels, each with its time less that of the kernels inside it (the subgraphs of If, Loop or Scan)."""
    # A parent ends after its children: of two that start together, the longer one comes first.
    ordered = sorted(kernels, key=lambda event: (event.tid, event.ts, -event.dur))
    child_us, depths, open_ = [0] * len(ordered), [0] * len(ordered), list[int]()
    for index, event in enumerate(ordered):
        # A kernel that began before is open as long as this one lies within it, on the same thread.
        while open_:
            outer = ordered[open_[-1]]
            end = outer.ts + outer.dur
            if outer.tid == event.tid and event.ts < end and event.ts + event.dur <= end:
                break
            open_.pop()
        if open_:
            child_us[open_[-1]] += event.dur
        depths[index] = len(open_)
        open_.append(index)
    for event, inner_us, depth in zip(ordered, child_us, depths, strict=True):
        arguments, threads = event.args, event.args.thread_scheduling_stats
        sizes = (arguments.activation_size, arguments.parameter_size, arguments.output_size)
        yield Step(
            name=printable(event.name.removesuffix(KERNEL), MAX_LOG),
            op=printable(arguments.op_name),
            provider=printable(arguments.provider),
            start_us=event.ts,
            duration_us=event.dur,
            self_us=max(0, event.dur - inner_us),
            thread=event.tid,
            depth=depth,
            inputs=_read_tensors(arguments.input_type_shape),
            outputs=_read_tensors(arguments.output_type_shape),
            bytes=sum(max(0, _read_count(size)) for size in sizes),
            spread=isinstance(threads, _Threads) and bool(threads.main_thread.block_size),
        )


def _read_tensors(shapes: _Shapes) -> tuple[Tensor, ...]:
    # A list of dicts with one entry each, whose key is the type.
    pairs = (pair for entry in shapes for pair in entry.items())
    return tuple(Tensor(dtype=printable(dtype, 40), shape=tuple(shape)) for dtype, shape in pairs)
