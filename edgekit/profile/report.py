"""The results of a profile, as plain data."""

from typing import Literal

import msgspec

from edgekit.bench.latency import Ratio
from edgekit.devices.device import Phase, SkippedDevice
from edgekit.evidence import SessionReport

Kind = Literal["", "quantize and dequantize", "casts", "reorders", "transposes", "copies between providers"]
"""What a kernel that only converts or copies data does; "" for kernels that compute something."""
Bound = Literal["", "compute", "memory", "calls"]
"""What limits a kernel: multiplications, memory, or for very short kernels the call itself."""

DISTURBED = 1.2
"""If the profiler makes runs longer by this factor, most of the time between kernels is spent by the profiler."""


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """The peak rates of a machine with a number of threads, measured by a probe of four kernels.

    `float_gmacs` and `integer_gmacs` are giga multiply-accumulates a second of a matrix product in float32, and of
    uint8 with int8; `gbytes` are gigabytes a second read and written by an Add too large for any cache, `cache_gbytes`
    by one of 256 KiB.
    """

    float_gmacs: float
    integer_gmacs: float
    gbytes: float
    cache_gbytes: float = 0.0


class KernelTime(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one kernel, or of all kernels of an operator, in one run: times in milliseconds, and work.

    `self_ms` leaves out the kernels that ran inside it, `max_ms` is its longest call, and `share` is its part of the
    sum over all nodes.
    """

    op: str
    provider: str
    calls: float
    self_ms: float
    share: float
    macs: int
    bytes: int
    max_ms: float = 0.0


class NodeTime(KernelTime, frozen=True, kw_only=True):
    """A kernel of the session.

    `source` names the node of the model that it comes from, "" if ONNX Runtime inserted it. `roof_share` is the share
    of the machine's peak that it reaches, in multiplications or in memory, whichever is larger; None if there is no
    probe. `spread` is True if it gave work to other threads.
    """

    name: str
    source: str
    total_ms: float
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gmacs_per_s: float
    gbytes_per_s: float
    integers: bool = False
    spread: bool = False
    kind: Kind = ""
    roof_share: float | None = None
    bound: Bound = ""


class OperatorTime(KernelTime, frozen=True, kw_only=True):
    """All kernels of one operator; `average_ms` is the time of one call."""

    nodes: int
    average_ms: float = 0.0


class PhaseMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a session's process after a phase, and its peak until then, in bytes.

    `bare_bytes` and `bare_peak_bytes` are those of a session without an arena, None if none was measured.
    """

    phase: Phase
    resident_bytes: int
    peak_bytes: int
    bare_bytes: int | None = None
    bare_peak_bytes: int | None = None


class Unasked(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one kind of conversions and copies: `self_ms` per run, and how many nodes ONNX Runtime inserted."""

    kind: Kind
    nodes: int
    inserted: int
    self_ms: float
    share: float


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A reason why a run takes long: its milliseconds, and what can be done, "" if nothing is known.

    `nodes` are the nodes concerned, the most expensive first.
    """

    id: str
    message: str
    milliseconds: float
    advice: str = ""
    nodes: tuple[str, ...] = ()


class NpuTime(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of the graph that was given to an NPU, as the provider's own profiler saw it.

    `source` names the node of the model, "" if the provider inserted it. `cycles` are the median over runs, `share` is
    their part of all operations, and `spread` is the range over the runs divided by the median.
    """

    name: str
    source: str
    cycles: float
    share: float
    spread: float


class DeviceProfile(SessionReport, frozen=True, kw_only=True):
    """Where the time of a run goes on one device.

    `run_ms` is the mean of the counted runs, as the profiler saw them, `nodes_ms` the sum of all kernels in them.
    `plain_ms` is the median of runs without the profiler, and `overhead` the factor by which the profiler makes runs
    longer, from interleaved rounds. `load_ms` is the time to create the session, with the profiler, `make_ms` the part
    of it after the model was read. `unasked` is the cost of conversions and copies by kind. `advice` lists changes to
    the model for expensive nodes. `memory` is that of the process, phase by phase. `npu` are the operations inside a
    kernel of an NPU, if its provider reports them. If the device failed, `failure` says how, and the times are 0.
    """

    subject: str
    threads: int = 0
    runs: int = 0
    run_ms: float = 0.0
    nodes_ms: float = 0.0
    plain_ms: float = 0.0
    overhead: Ratio | None = None
    make_ms: float = 0.0
    operators: tuple[OperatorTime, ...] = ()
    nodes: tuple[NodeTime, ...] = ()
    unasked: tuple[Unasked, ...] = ()
    npu: tuple[NpuTime, ...] = ()
    memory: tuple[PhaseMemory, ...] = ()
    roof: Roof | None = None
    advice: tuple[Cause, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def covered(self) -> float:
        """The share of a run that its kernels take; the rest lies between them."""
        return self.nodes_ms / self.run_ms if self.run_ms > 0 else 0.0

    @property
    def recording(self) -> float:
        """The share of a run that the profiler itself takes, between kernels: 3 to 5 us for each event that it writes.

        It is 0 if runs without the profiler are not significantly shorter.
        """
        if self.overhead is None or self.overhead.interval[0] <= 1:
            return 0.0
        return min(1 - 1 / self.overhead.value, max(0.0, 1 - self.covered))

    @property
    def between_us(self) -> float:
        """The average number of microseconds between two kernels."""
        calls = sum(node.calls for node in self.nodes)
        return 1e3 * max(0.0, self.run_ms - self.nodes_ms) / calls if calls else 0.0


class LayerPair(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels of both sides that compute one value, and their time a run in milliseconds."""

    tensor: str
    a_ms: float
    b_ms: float
    a_ops: tuple[str, ...]
    b_ops: tuple[str, ...]


class ProfileComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two profiles compared: A is the first, and the causes say why the slower one is slower.

    `ratio` is B's time over A's, without the profiler, from interleaved rounds; None if they ran on two devices.
    """

    a: str
    b: str
    a_ms: float
    b_ms: float
    ratio: Ratio | None
    slower: Literal["a", "b", ""]
    pairs: tuple[LayerPair, ...] = ()
    causes: tuple[Cause, ...] = ()


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    """The profiles of one subject on devices, or of two subjects; two profiles are also compared."""

    profiles: tuple[DeviceProfile, ...] = ()
    comparison: ProfileComparison | None = None
    skipped: tuple[SkippedDevice, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """True if something was profiled and nothing failed."""
        return bool(self.profiles) and all(profile.failure is None for profile in self.profiles)
