"""A provider of this machine as a device: the same class for each row of `offered.PROVIDERS`."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.manifest.trust import PROVIDER_OPTIONS
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.offered import (
    PROVIDERS,
    ask_provider,
    find_library,
    find_missing_provider,
    find_provider_versions,
)
from edgekit.devices.process.child import Runner, describe_job, require_device
from edgekit.devices.process.python import run_python
from edgekit.errors import TargetError, suggest_name
from edgekit.evidence import Evidence

_NAMED_NODES = 8


class LocalProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider of this machine, in a child process; `hardware` chooses among its devices, "" takes the first."""

    kind: str
    hardware: str = ""
    evidence: Evidence

    @property
    def name(self) -> str:
        """The device as the user names it, for example `openvino:gpu` or `host:cuda`."""
        return f"{self.kind}:{self.hardware}" if self.hardware else self.kind

    @property
    def provider(self) -> str:
        """ONNX Runtime's name of the provider."""
        return PROVIDERS[self.kind].name

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: the wheel, a library that it loads, or the hardware."""
        return find_missing_provider(self.kind, self.hardware)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the provider; what it leaves runs on the CPU, and a note names those nodes.

        A session that has the CPU alone, because the provider could not be made, is a failed run.

        Raises:
            DeviceError: the provider cannot be used here.
            TargetError: the target has an option that the provider would ignore.
        """
        require_device(self.name, self.find_missing())
        row = PROVIDERS[self.kind]
        far = describe_job(job, provider=row.name)
        check_options(row.name, far.provider_options)
        far = msgspec.structs.replace(
            far,
            library=find_library(row),
            hardware=self.hardware,
            cpu_vendor=row.cpu_vendor,
            preload=not row.module,
        )
        runner = Runner(device=self.name, evidence=self.evidence)
        run = run_python(runner, job, far, work, env=row.find_environment())
        return msgspec.structs.replace(
            run, versions={**run.versions, **find_provider_versions(self.kind)}, notes=(*run.notes, *self._notes(run))
        )

    def _notes(self, run: DeviceRun) -> tuple[str, ...]:
        left = [node.name or node.op for node in run.placement if node.provider == CPU_PROVIDER]
        notes = [f"the provider leaves {len(left)} nodes to the CPU: {', '.join(left[:_NAMED_NODES])}"] if left else []
        if ask_provider(self.kind).told and self.hardware in {"", "cpu"}:
            notes.append(
                f"{self.provider} computes on this CPU, and lists it only where it is told that it is Intel's:"
                " an app on this machine finds no device"
            )
        return tuple(notes)


def check_options(provider: str, options: Mapping[str, str]) -> None:
    """Refuses an option that a provider does not know: some take any word without complaint.

    Raises:
        TargetError: there is no such option.
    """
    known = PROVIDER_OPTIONS.get(provider, options)
    for key in options:
        if key not in known:
            raise TargetError(f"'{key}' is no option of {provider}", hint=suggest_name(key, known))


def provider_devices() -> dict[str, LocalProvider]:
    """Returns the devices of every provider, and those of its kinds of hardware, by name."""
    devices = (
        LocalProvider(kind=kind, hardware=hardware, evidence=_rate(row.evidence, hardware))
        for kind, row in PROVIDERS.items()
        for hardware in ("", *row.hardware)
    )
    return {device.name: device for device in devices}


def _rate(evidence: Evidence, hardware: str) -> Evidence:
    """Returns how good a run's word is: a GPU or an NPU that is asked for by name is the device itself."""
    return Evidence.DEVICE if hardware in {"gpu", "npu"} else evidence
