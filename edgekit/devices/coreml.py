"""The Core ML provider of this Mac."""

import sys
from pathlib import Path

import msgspec

from edgekit.devices.child import Runner, describe_job, require_device, run_python
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.evidence import Evidence

PROVIDER = "CoreMLExecutionProvider"


class CoreMl(msgspec.Struct, frozen=True, kw_only=True):
    """The real provider on Apple hardware, in a child process."""

    name: str = "coreml"
    evidence: Evidence = Evidence.DEVICE

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: nothing on a Mac, everything elsewhere."""
        if sys.platform == "darwin":
            return None
        return Missing(reason="Core ML runs only on Apple hardware", command=None)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the Core ML provider.

        Raises:
            DeviceError: this is no Mac.
        """
        require_device(self.name, self.find_missing())
        runner = Runner(device=self.name, evidence=self.evidence)
        return run_python(runner, job, describe_job(job, provider=PROVIDER), work)
