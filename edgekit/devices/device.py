"""What a device is: it gets a model and samples, and gives back tensors, times and the placement of the nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

from edgekit._ort import Level
from edgekit.check.report import CheckReport
from edgekit.data.samples import Samples
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors, TensorSpec
from edgekit.target import Precision, Target

LEAST_SAMPLES = 4
"""How many samples a device runs in any case, however slow it is."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that come at random, `rate_per_s` of them on average, and are run together, `most` at once.

    A batch begins when it is full, or when its oldest request has waited for `wait_ms`; None waits until it is full.
    `rows` are the inputs of which a request brings a row.
    """

    rate_per_s: float
    most: int
    wait_ms: float | None
    rows: tuple[str, ...] = ()


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How samples are run; edgekit and the program that runs the model read these fields in the same way.

    After `budget_s` seconds of running samples the program may stop, once it has run `least_samples` of them. It runs
    each sample `repeat` times, with a time for each run, `concurrency` at once in one session; with `io_binding`
    outputs are written where those of the run before lie. `threads` of 0 lets ONNX Runtime choose, and so do
    `inter_threads`, which run nodes side by side where a session is `parallel`. Without `arena` memory is asked of the
    system each time, without `memory_pattern` no block is planned for all of a run. `level` is how far the session
    optimises the graph. With `trace` ONNX Runtime's profiler watches every run. With a `queue` the runs of a sample are
    requests that come at random; the runner in Python alone can do that.
    """

    budget_s: float = 20.0
    least_samples: int = LEAST_SAMPLES
    repeat: int = 1
    concurrency: int = 1
    io_binding: bool = False
    threads: int = 0
    inter_threads: int = 0
    parallel: bool = False
    arena: bool = True
    memory_pattern: bool = True
    level: Level = Level.ALL
    trace: bool = False
    queue: Queue | None = None


class Job(RunOptions, frozen=True, kw_only=True):
    """A model file and how an app would open it on the target.

    `precision` is what the model was built for: it tells emulated arithmetic how the target computes a float graph.
    `outputs` is what the model gives; anything else that comes back is refused. `check` is the predicted placement,
    which emulated arithmetic needs in order to know what the provider takes. `samples` are the inputs to run, in order.
    `custom_ops` are libraries of this machine's kind, which only the host can load. `digests_hold` says that the file
    was just compared with the digest of its bundle: optimisations that were saved in a file are replayed only then.
    `chosen` are keys of provider options that were chosen for this very device, which takes them as they are, where it
    would set others by itself. `answered` is called with the outputs of each sample as soon as they are there, because
    later samples may be made from them. Then all samples run in one session, there may be fewer of them than `samples`
    counts, and none is read before it is sent.
    """

    model: Path
    target: Target
    precision: Precision
    outputs: tuple[TensorSpec, ...]
    check: CheckReport
    samples: Samples
    timeout_s: float = 300.0
    custom_ops: tuple[Path, ...] = ()
    chosen: frozenset[str] = frozenset()
    digests_hold: bool = False
    answered: Callable[[Tensors], None] | None = None


class PlacedNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node and the provider that a session gave it to."""

    name: str
    op: str
    domain: str
    provider: str


class DeviceState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The temperatures and clocks of a device and the energy that it has used, as far as it tells them.

    Sensors in degrees Celsius, CPUs in kHz, and the counters of processor packages (Linux's powercap) in microjoules.
    """

    temperatures_c: Mapping[str, float] = {}
    clocks_khz: Mapping[str, int] = {}
    energy_uj: Mapping[str, int] = {}


Phase = Literal["start", "session", "first run", "all runs"]
"""What a program has done: started, made the session, run once, run all."""


# Beyond 2^53 readers of JSON, whose numbers are doubles, do not keep whole numbers exact (RFC 8259, 6).
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=8.64e7)]
"""A day is the longest time limit that a device may get, so nothing in a run has taken longer."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a device measured of a run.

    `latency_ms` has one time a sample, or as many as the job said in `repeat`; `elapsed_ms` how long the runs of a
    sample took together, where several ran at once. `cpu_features`, and the state before the first and after the last
    sample, are known from devices with edgekit's runner. `memory` holds the bytes that are resident behind each phase
    and the most that were until then, empty where the device does not tell.
    """

    load_ms: Milliseconds
    latency_ms: tuple[Milliseconds, ...]
    elapsed_ms: tuple[Milliseconds, ...] = ()
    peak_rss_bytes: Count
    cpu_features: tuple[str, ...] = ()
    before: DeviceState | None = None
    after: DeviceState | None = None
    memory: Mapping[Phase, tuple[Count, Count]] = {}


class DeviceRun(Measured, frozen=True, kw_only=True):
    """What came back from a device.

    `outputs` reads from the work folder that the run was given, so it is valid as long as that folder. `placement`
    lists the nodes of the session as the provider saw them; `placement_source` says who observed it. `failure` is None
    when every sample ran; otherwise it says in one line what the device did instead, and `outputs` holds what came back
    until then. `crashed` says that the program of an emulator died, which proves nothing about the device or the
    model. `notes` tell what was done differently from an app on the target, a line each. `stopped_early` says
    that the time was over before the last sample; what came back is whole. `log` holds the last words of a run that
    failed, as the device's program said them, without what could steer a terminal. `waited_ms` is how long the device
    was waited for where the run was recorded elsewhere, else 0. `trace` is the file of the profiler in the work folder,
    as it came back: nobody has read it yet; `npu_trace` is that of an NPU's own profiler, likewise.
    """

    device: str
    evidence: Evidence
    outputs: Samples
    placement: tuple[PlacedNode, ...]
    placement_source: Literal["session", "profile", "log", "predicted"]
    versions: Mapping[str, str]
    failure: str | None
    crashed: bool = False
    notes: tuple[str, ...] = ()
    stopped_early: bool = False
    log: str = ""
    waited_ms: float = 0.0
    trace: Path | None = None
    npu_trace: Path | None = None


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device, and whether it can run here: `reason` and `command` are those of `Missing`, else empty.

    A device that can run only some of its providers is available, and `reason` tells why it cannot run another one.
    `versions` are those of what runs models in it, ONNX Runtime's first.
    """

    name: str
    evidence: Evidence
    available: bool
    reason: str
    command: str
    versions: dict[str, str] = {}


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Why a device cannot be used here, and the command that changes it (None where nothing on this machine can)."""

    reason: str
    command: str | None


class SkippedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that did not run, why, and the command that installs it (None where nothing on this machine can)."""

    device: str
    reason: str
    command: str | None

    def __str__(self) -> str:
        return f"{self.device} skipped: {self.reason}" + (f"; to run it: {self.command}" if self.command else "")


class Device(Protocol):
    """Something that can run a job."""

    @property
    def name(self) -> str:
        """The device as the user names it, for example `qnn-htp-sim:v79`."""
        ...

    @property
    def evidence(self) -> Evidence:
        """How much a run on it proves."""
        ...

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine, or None if the device can run."""
        ...

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job; files go into the empty folder `work`.

        Raises:
            DeviceError: the device is not there. A device that refuses the model or dies is no error but a
                `DeviceRun` with a `failure`.
        """
        ...


Devices = Sequence[Device]


def find_present(devices: Iterable[Device]) -> tuple[list[Device], tuple[SkippedDevice, ...]]:
    """Returns the devices that can run here, and why the others cannot."""
    found = [(device, device.find_missing()) for device in devices]
    skipped = (
        SkippedDevice(device=device.name, reason=missing.reason, command=missing.command)
        for device, missing in found
        if missing is not None
    )
    return [device for device, missing in found if missing is None], tuple(skipped)
