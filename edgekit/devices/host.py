"""The CPU provider of this machine, in a child process."""

from pathlib import Path

import msgspec

from edgekit.devices.child import Runner, describe_job, run_python
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.evidence import Evidence


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
