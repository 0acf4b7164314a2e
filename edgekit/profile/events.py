"""The file of ONNX Runtime's profiler: which kernels ran when, in which run, on which data.

The file is Chrome's trace format, a list of events; its names and arguments are those of
`onnxruntime/core/common/profiler.cc` and `core/framework/sequential_executor.cc`. It may come from a device: all of it
is hostile until it has been checked.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit._files import open_regular
from edgekit.devices.process.child import MAX_LOG, printable
from edgekit.devices.process.exchange import MAX_TRACE_BYTES
from edgekit.errors import DeviceError

KERNEL = "_kernel_time"

_NODE, _SESSION, _RUN = "Node", "Session", "model_run"
_LOADING = ("model_loading_uri", "model_loading_array", "model_loading_from_saved_proto", "model_loading_ort_format")
_MAKING = "session_initialization"

# A day, as for times of devices.
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
    # An empty text in builds without statistics of threads, as those for Android.
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
        """Returns it for people: `float[1,3,224,224]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that ran once; times in microseconds, `self_us` without the kernels that ran inside it.

    `inputs` and `outputs` are what it read and wrote, `bytes` their sizes together; `thread` is the one it was started
    from, `depth` how many kernels it ran inside of. `spread` says that it gave work to the pool of threads.
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
    """A run of the session, in microseconds from the start of the profiler, and the kernels in it by their start."""

    start_us: int
    duration_us: int
    steps: tuple[Step, ...]


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What the profiler saw: the runs in order, and how long reading the model and making the session took, in ms."""

    executions: tuple[Execution, ...]
    read_ms: float
    make_ms: float


def read_trace(path: Path) -> Trace:
    """Returns what a file of the profiler holds.

    Raises:
        DeviceError: it cannot be read, or is no such file, or is larger than a device may send.
    """
    try:
        with open_regular(path) as stream:
            data = stream.read(MAX_TRACE_BYTES + 1)
    except OSError as error:
        raise DeviceError(f"cannot read '{path.name}': {error.strerror}", hint="the device gave no profile") from error
    if len(data) > MAX_TRACE_BYTES:
        raise DeviceError(f"the profile is larger than {MAX_TRACE_BYTES} bytes", hint="profile fewer runs: --runs 5")
    return decode_trace(data)


def decode_trace(data: bytes) -> Trace:
    """Returns what the profiler wrote.

    Raises:
        DeviceError: it is no trace.
    """
    try:
        events = msgspec.json.decode(data, type=list[_Event])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "names of nodes that hold quotation marks break the profiler's file: edgekit inspect MODEL"
        raise DeviceError(f"the profile is malformed: {error}", hint=hint) from error
    session = {event.name: event.dur / 1e3 for event in events if event.cat == _SESSION}
    return Trace(
        executions=tuple(_list_executions(events)),
        read_ms=sum(session.get(name, 0.0) for name in _LOADING),
        make_ms=session.get(_MAKING, 0.0),
    )


def _list_executions(events: Sequence[_Event]) -> Iterator[Execution]:
    runs = sorted((event for event in events if (event.cat, event.name) == (_SESSION, _RUN)), key=attrgetter("ts"))
    kernels = [event for event in events if event.cat == _NODE and event.name.endswith(KERNEL)]
    by_run: list[list[Step]] = [[] for _ in runs]
    starts = [run.ts for run in runs]
    for step in _nest(kernels):
        at = bisect_right(starts, step.start_us) - 1
        # Kernels outside all runs belong to none: constants are folded while the session is made.
        if at >= 0 and step.start_us <= runs[at].ts + runs[at].dur:
            by_run[at].append(step)
    for run, steps in zip(runs, by_run, strict=True):
        ordered = tuple(sorted(steps, key=lambda step: (step.start_us, step.depth)))
        yield Execution(start_us=run.ts, duration_us=run.dur, steps=ordered)


def _nest(kernels: Sequence[_Event]) -> Iterator[Step]:
    """Yields the kernels with their own times: those of bodies run inside the kernel of their If, Loop or Scan."""
    # A parent ends after what it holds: of two that start together the longer comes first.
    ordered = sorted(kernels, key=lambda event: (event.tid, event.ts, -event.dur))
    inside: list[int] = [0] * len(ordered)
    depths: list[int] = [0] * len(ordered)
    open_: list[int] = []
    for index, event in enumerate(ordered):
        while open_ and not _holds(ordered[open_[-1]], event):
            open_.pop()
        if open_:
            inside[open_[-1]] += event.dur
        depths[index] = len(open_)
        open_.append(index)
    for event, within, depth in zip(ordered, inside, depths, strict=True):
        yield _make_step(event, within, depth)


def _holds(outer: _Event, inner: _Event) -> bool:
    return outer.tid == inner.tid and inner.ts < outer.ts + outer.dur and inner.ts + inner.dur <= outer.ts + outer.dur


def _make_step(event: _Event, within: int, depth: int) -> Step:
    arguments = event.args
    sizes = (arguments.activation_size, arguments.parameter_size, arguments.output_size)
    threads = arguments.thread_scheduling_stats
    return Step(
        name=printable(event.name.removesuffix(KERNEL), MAX_LOG),
        op=printable(arguments.op_name),
        provider=printable(arguments.provider),
        start_us=event.ts,
        duration_us=event.dur,
        self_us=max(0, event.dur - within),
        thread=event.tid,
        depth=depth,
        inputs=_read_tensors(arguments.input_type_shape),
        outputs=_read_tensors(arguments.output_type_shape),
        bytes=sum(int(size) for size in sizes if size.isascii() and size.isdecimal() and len(size) < 16),
        spread=isinstance(threads, _Threads) and bool(threads.main_thread.block_size),
    )


def _read_tensors(shapes: _Shapes) -> tuple[Tensor, ...]:
    # A list of one entry each, with the type as its key.
    return tuple(
        Tensor(dtype=printable(dtype, 40), shape=tuple(shape)) for entry in shapes for dtype, shape in entry.items()
    )
