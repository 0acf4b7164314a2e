"""edgekit's runner on this machine, and in the emulated Arm root: what a phone or board runs, without the cable."""

from pathlib import Path

import msgspec

from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.emulators.arm64 import Arm64, arm64_root, enter_arm64, folder_in_arm64, thread_count
from edgekit.devices.local.runner import LIBRARY, PROGRAM, NativeRunner, find_missing_runner, find_runner, host_abi
from edgekit.devices.process.child import Runner, describe_job, refuse_run, require_device
from edgekit.devices.process.link import Link, LocalLink, list_model_files
from edgekit.devices.process.pipe import run_over
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence


class HostNative(msgspec.Struct, frozen=True, kw_only=True):
    """This machine's CPU, through the runner."""

    name: str = "host:native"
    evidence: Evidence = Evidence.EMULATED

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: the runner has to be built."""
        return find_missing_runner(host_abi())

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the CPU provider.

        Raises:
            DeviceError: the runner is not built.
        """
        require_device(self.name, self.find_missing())
        link = LocalLink(name=self.name, folder=work / "sets", inside=str(work / "sets"))
        return run_native(link, Runner(device=self.name, evidence=self.evidence), host_abi(), job, work)


class Arm64Native(msgspec.Struct, frozen=True, kw_only=True):
    """An emulated Arm CPU, through the runner."""

    name: str = "arm64:native"
    evidence: Evidence = Evidence.SAME_ARCH

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine."""
        return Arm64().find_missing() or find_missing_runner("linux-arm64")

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job under qemu.

        Raises:
            DeviceError: qemu, the Debian root or the runner is missing.
        """
        require_device(self.name, self.find_missing())
        root = arm64_root()
        with folder_in_arm64(root) as folder:
            enter = tuple(enter_arm64(root, Arm64().cpu))
            link = LocalLink(name=self.name, folder=folder, inside=f"/jobs/{folder.name}", enter=enter)
            runner = Runner(device=self.name, evidence=self.evidence, emulates=True)
            return run_native(link, runner, "linux-arm64", job, work, threads=thread_count())


def run_native(link: Link, runner: Runner, abi: str, job: Job, work: Path, *, threads: int = 0) -> DeviceRun:
    """Runs a job with the runner on the machine that a link leads to, on the CPU provider.

    Raises:
        DeviceError: the runner is not built, or the machine does not answer.
    """
    native = find_runner(abi)
    if native is None:
        require_device(runner.device, find_missing_runner(abi))
        return refuse_run(runner, "the runner is not built")
    try:
        files = list_model_files(job.model)
    except EdgekitError as error:
        return refuse_run(runner, error.message)
    program, library = push_runner(link, native)
    model = f"{link.push(files)}/{job.model.name}"
    far = msgspec.structs.replace(describe_job(job), model=model, runtime=library, threads=job.threads or threads)
    return run_over(link, [program, "--pipe"], job, far, work, runner=runner)


def push_runner(link: Link, native: NativeRunner) -> tuple[str, str]:
    """Returns where the runner and ONNX Runtime's library lie on the machine that a link leads to.

    Raises:
        DeviceError: the machine does not answer, or has no space.
    """
    folder = link.push(native.files)
    return f"{folder}/{PROGRAM}", f"{folder}/{LIBRARY}"
