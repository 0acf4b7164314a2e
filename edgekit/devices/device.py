"""The interface of a device: it gets a model and samples, and returns outputs, times and the placement of the nodes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from edgekit._ort import VERSION
from edgekit.bundle.manifest import CallSettings
from edgekit.check.report import CheckReport
from edgekit.data.samples import Samples
from edgekit.errors import DeviceError, EdgekitError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors, TensorSpec
from edgekit.target import Precision, Target

_Found = TypeVar("_Found")

LEAST_SAMPLES = 4
"""The number of samples that even a slow device runs, whatever its time budget."""
STOPPED = "stopped after"
"""The start of the note on a run that ended because of its time budget."""


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that arrive at random, `rate_per_s` on average, and are run in batches of at most `most`.

    A batch starts when it is full, or when its oldest request has waited for `wait_ms`; with None it always waits until
    it is full. `rows` names the inputs that have a batch axis: each request adds one row to them.
    """

    rate_per_s: float
    most: int
    wait_ms: float | None
    rows: tuple[str, ...] = ()


class RunOptions(CallSettings, frozen=True, kw_only=True):
    """How samples are run; both edgekit and the program that runs the model read these fields.

    After `budget_s` seconds of running samples the program may stop, once it has run `least_samples` of them. It runs
    each sample `repeat` times, and reports a time for each run. With `trace`, ONNX Runtime's profiler records every
    run. With a `queue`, the runs of a sample are requests that arrive at random; only the runner in Python supports
    this.
    """

    budget_s: float = 20.0
    least_samples: int = LEAST_SAMPLES
    repeat: int = 1
    trace: bool = False
    queue: Queue | None = None


UNCHECKED = CheckReport(target="", model="", sha256="", evidence="predicted", settings={}, node_list=(), advice=())
"""The check of a job for a device that does not imitate the target: it needs no predicted placement."""


class Job(RunOptions, frozen=True, kw_only=True):
    """A model file and how an app would open it on the target.

    `precision` is what the model was built for: the emulated device needs it to know how the target computes a float
    graph. `outputs` describes the outputs of the model; anything else that comes back is refused. `check` is the
    predicted placement, from which the emulated device learns which nodes the provider takes. `samples` are the inputs
    to run, in order. `custom_ops` are libraries of custom operators, built for this machine, which only the host can
    load. `digests_hold` says that the file was just compared with the digest in its bundle: only then are optimisations
    replayed that were saved in an ORT-format file. `chosen` are the keys of provider options that were tuned for this
    very device: the device keeps them, although it would override others (as `android` does with XNNPACK's threads).
    `on_outputs` is called with the outputs of each sample as soon as they arrive, because later samples may depend on
    them, as with the state of a language model. Then all samples run in one session, `samples` may end before its count
    is reached, and each sample is read only when it is sent.
    """

    model: Path
    target: Target
    precision: Precision = "fp32"
    outputs: tuple[TensorSpec, ...]
    check: CheckReport = UNCHECKED
    samples: Samples
    timeout_s: float = 300.0
    custom_ops: tuple[Path, ...] = ()
    chosen: frozenset[str] = frozenset()
    digests_hold: bool = False
    on_outputs: Callable[[Tensors], None] | None = None


class PlacedNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node and the provider to which a session assigned it."""

    name: str
    op: str
    domain: str
    provider: str


class DeviceState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The temperatures by sensor in degrees Celsius and the clocks by CPU in kHz, as far as a system reports them."""

    temperatures_c: Mapping[str, float] = {}
    clocks_khz: Mapping[str, int] = {}


Phase = Literal["start", "session", "first run", "all runs"]
"""How far a program has come: started, session made, first run done, all runs done."""


# Many JSON readers store numbers as doubles, which hold whole numbers exactly only up to 2^53 (RFC 8259, 6).
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=8.64e7)]
"""At most a day: that is the longest time limit of a device, so no reported time can be longer."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a device measured during a run.

    `latency_ms` has `repeat` times for each sample. `elapsed_ms` has the wall-clock time of all runs of a sample, if
    several ran at once. `cpu_features`, and the state `before` the first and `after` the last sample, come only from
    devices with edgekit's runner. `memory` holds, for the end of each phase, the resident bytes and their peak until
    then; it is empty if the device does not report them.
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

    `outputs` reads from the work folder of the run, so it is valid only as long as that folder exists. `placement`
    lists the nodes of the session with their providers; `placement_source` says where it was observed. `failure` is
    None if every sample ran; otherwise it says in one line what went wrong, and `outputs` holds the outputs received
    before. `crashed` says that the program of an emulator died, which proves nothing about the device or the model, and
    `timed_out` that the program was ended after the job's time.
    `notes` say, a line each, what was done differently from an app on the target. `stopped_early` says that the time
    budget ended before the last sample; the outputs so far are complete. `log` holds the last output of the device's
    program if the run failed, without control characters for terminals. `waited_ms` is how long the device took to
    answer if the run was recorded elsewhere, else 0. `trace` is the profiler's file in the work folder, unchecked as it
    came from the device; `npu_trace` is the file of an NPU's own profiler, also unchecked.
    """

    device: str
    evidence: Evidence
    outputs: Samples
    placement: tuple[PlacedNode, ...]
    placement_source: Literal["session", "profile", "log", "predicted"]
    versions: Mapping[str, str]
    failure: str | None
    crashed: bool = False
    timed_out: bool = False
    notes: tuple[str, ...] = ()
    stopped_early: bool = False
    log: str = ""
    waited_ms: float = 0.0
    trace: Path | None = None
    npu_trace: Path | None = None


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A device, and whether it can run here; if not, `reason` and `command` are those of `Missing`.

    A device that can run only some of its providers is available, and `reason` says why it cannot run another one.
    `versions` are those of the software that runs models on it, ONNX Runtime's first.
    """

    name: str
    evidence: Evidence
    available: bool
    reason: str
    command: str
    versions: dict[str, str] = {}


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """Why a device cannot be used here, and the command that fixes it (None if nothing on this machine can)."""

    reason: str
    command: str | None


class SkippedDevice(Missing, frozen=True, kw_only=True):
    """A device that did not run, with what it lacks."""

    device: str

    def __str__(self) -> str:
        return f"{self.device} skipped: {self.reason}" + (f"; to run it: {self.command}" if self.command else "")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Something that can run a job.

    It runs the targets of its `providers`, or of all providers if that is empty. `replaced` maps the providers that it
    does not run to the device that runs them, because a run there proves more. A bare model is opened as on the first
    of its `targets`, if the user names none, and as on the target `cpu` if it has none.
    """

    targets: ClassVar[tuple[str, ...]] = ()
    replaced: ClassVar[Mapping[str, str]] = {}
    providers: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The device as the user names it, for example `qnn-htp-sim:v79`."""
        raise NotImplementedError

    @property
    def evidence(self) -> Evidence:
        """How much a run on it proves."""
        raise NotImplementedError

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine, or None if the device can run."""
        return None

    def find_versions(self) -> dict[str, str]:
        """Returns the versions of the software that runs models, ONNX Runtime's first."""
        return {"onnxruntime": VERSION}

    def for_target(self, target: Target) -> "Device":  # noqa: ARG002 - most devices are the same for every target
        """Returns the device as it runs a target."""
        return self

    def as_seen(self, target: Target) -> Target:
        """Returns a target with the settings for which the rules describe this device, not the user's."""
        return target

    def with_settings(self, settings: Mapping[str, str], target: Target) -> Sequence["Device"] | None:  # noqa: ARG002
        """Returns the device with settings applied, several if they name several CPUs; None if it takes no settings.

        Raises:
            UsageError: there is no such setting or value.
        """
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job; files go into the folder `work`, which is made if it is not there.

        Raises:
            DeviceError: the device is not there. If it refuses the model or dies, nothing is raised: the `DeviceRun`
                has a `failure`.
            TargetError: the target has an option that the provider does not know, or would ignore or misread.
        """
        require_device(self.name, self.find_missing())
        work.mkdir(parents=True, exist_ok=True)
        return self.run(job, work)

    def try_job(self, job: Job, work: Path) -> DeviceRun:
        """Returns the run of a job as `run_job` does, and one that failed in place of an error."""
        try:
            return self.run_job(job, work)
        except EdgekitError as error:
            return refuse_run(self, str(error))

    def run(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job; `run_job` calls it if nothing is missing."""
        raise NotImplementedError


def refuse_run(device: Device, reason: str) -> DeviceRun:
    """Returns the run of a job that could not be started on a device."""
    return DeviceRun(
        device=device.name,
        evidence=device.evidence,
        outputs=Samples(source=device.name, count=0, read=lambda: iter(())),
        placement=(),
        placement_source="predicted",
        load_ms=0.0,
        latency_ms=(),
        peak_rss_bytes=0,
        versions={},
        failure=reason,
    )


class WrappedDevice(Device, frozen=True, kw_only=True):
    """A device that wraps another one; a subclass changes the jobs that it is given, or the runs that it returns."""

    device: Device

    @property
    def name(self) -> str:
        """The wrapped device's own."""
        return self.device.name

    @property
    def evidence(self) -> Evidence:
        """The wrapped device's own."""
        return self.device.evidence

    def find_missing(self) -> Missing | None:
        """Returns what the wrapped device lacks."""
        return self.device.find_missing()


def require_device(name: str, found: _Found | Missing) -> _Found:
    """Returns `found`, unless it says what a device lacks.

    Raises:
        DeviceError: something is missing.
    """
    if isinstance(found, Missing):
        hint = found.command or "use another device: edgekit devices list"
        raise DeviceError(f"'{name}' cannot run here: {found.reason}", hint=hint)
    return found


def find_present(devices: Iterable[Device]) -> tuple[list[Device], tuple[SkippedDevice, ...]]:
    """Returns the devices that can run here, and why the others cannot."""
    present, skipped = list[Device](), list[SkippedDevice]()
    for device in devices:
        if (missing := device.find_missing()) is None:
            present.append(device)
        else:
            skipped.append(SkippedDevice(device=device.name, reason=missing.reason, command=missing.command))
    return present, tuple(skipped)
