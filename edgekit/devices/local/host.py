"""The CPU provider of this machine, in a child process, or as an older x64 would run it."""

import platform
import shutil
from pathlib import Path

import msgspec

from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.process.child import Runner, describe_job, require_device
from edgekit.devices.process.python import run_python
from edgekit.evidence import Evidence

_QEMU = "qemu-x86_64-static"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine's CPU: another architecture than the target's, hence `emulated`."""

    name: str = "host"
    evidence: Evidence = Evidence.EMULATED

    def find_missing(self) -> Missing | None:
        """Returns None: onnxruntime is a dependency."""
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the CPU provider."""
        return run_python(Runner(device=self.name, evidence=self.evidence), job, describe_job(job), work)


class OlderHost(msgspec.Struct, frozen=True, kw_only=True):
    """An emulated x64 with AVX2 and without VNNI or AVX-512: its products of u8 and s8 saturate."""

    name: str = "host:haswell"
    evidence: Evidence = Evidence.EMULATED

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: qemu, on an x64."""
        if platform.machine() != "x86_64":
            return Missing(reason="this Python is not for x86-64", command=None)
        if shutil.which(_QEMU) is None:
            return Missing(reason=f"{_QEMU} not found", command="apt-get install qemu-user-static")
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job under qemu.

        Raises:
            DeviceError: qemu is missing.
        """
        require_device(self.name, self.find_missing())
        runner = Runner(device=self.name, evidence=self.evidence)
        # qemu's Haswell has AVX2 and neither VNNI nor AVX-512: MLAS then takes its VPMADDUBSW kernels
        # (targets/cpu/NOTES.md).
        return run_python(runner, job, describe_job(job), work, (_QEMU, "-cpu", "Haswell"))
