"""Android's binary of ONNX Runtime in a process of this machine: natively for x86-64, under qemu for Arm."""

import contextlib
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.devices.android.archive import MACHINES
from edgekit.devices.android.installed import explain_compiler, find_installed
from edgekit.devices.android.nnapi import computing, find_feature_level
from edgekit.devices.android.phone import CORE_TYPES, CORES, write_phone
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.process.child import Runner, describe_job, refuse_run, require_device
from edgekit.devices.process.link import LocalLink
from edgekit.devices.process.pipe import run_over
from edgekit.evidence import Evidence

NNAPI = "NnapiExecutionProvider"
XNNPACK = "XnnpackExecutionProvider"
PROVIDERS = frozenset({NNAPI, XNNPACK, CPU_PROVIDER})
CPUS = tuple(CORE_TYPES)
X86_64 = "x86_64"

_DEFAULT_API = "34"
_INSTALL = "edgekit devices install android"


class Android(msgspec.Struct, frozen=True, kw_only=True):
    """The library of an archive for Android with its own providers; `cpu` is a core of Arm or `x86_64`."""

    cpu: str = CPUS[0]
    evidence: Evidence = Evidence.SAME_BINARY

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return "android" if self.cpu == CPUS[0] else f"android:{self.cpu}"

    @property
    def abi(self) -> str:
        """Which of the archive's libraries runs."""
        return X86_64 if self.cpu == X86_64 else "arm64-v8a"

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine."""
        installed = find_installed()
        if installed is None:
            return Missing(reason="ONNX Runtime for Android is not installed", command=_INSTALL)
        if self.abi not in installed.abis:
            command = f"{explain_compiler(self.abi)}; {_INSTALL}"
            return Missing(reason=f"it was installed without {self.abi}", command=command)
        if find_emulator(self.abi) is not None:
            return None
        if self.abi == X86_64:
            return Missing(reason="this machine has no x86-64 CPU", command=None)
        return Missing(reason="qemu-aarch64-static not found", command="apt-get install qemu-user-static")

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the provider of its target.

        Raises:
            DeviceError: the device is not installed, or cannot run here.
        """
        require_device(self.name, self.find_missing())
        installed = find_installed()
        runner = Runner(device=self.name, evidence=self.evidence)
        provider = job.target.provider
        if installed is None or provider not in {*installed.providers, CPU_PROVIDER}:
            return refuse_run(runner, f"'{installed.archive if installed else ''}' was built without {provider}")
        platform = job.target.session.platforms.get("android")
        far = describe_job(job, provider=provider)
        far = msgspec.structs.replace(
            far,
            provider_options=far.provider_options if platform is None else platform.provider_options,
            runtime=str(installed.find_library(self.abi)),
            threads=job.threads or self._choose_threads(provider),
        )
        is_nnapi = provider == NNAPI
        with computing(work / "nnapi", job.timeout_s) if is_nnapi else contextlib.nullcontext(()) as pipes:
            enter = self._enter(job, work, pipes)
            link = LocalLink(name=self.name, folder=work, inside=str(work), enter=enter)
            run = run_over(link, [str(installed.find_program(self.abi)), "--pipe"], job, far, work, runner=runner)
        said = re.findall(r"^NNAPI: (.*)", run.log, re.MULTILINE)
        return msgspec.structs.replace(
            run,
            failure=f"{run.failure}; {said[-1]}" if run.failure and said else run.failure,
            versions={**run.versions, "archive": installed.archive},
        )

    def _choose_threads(self, provider: str) -> int:
        """Returns how many threads of its own a session gets: one beside XNNPACK's pool, as edgekit's loaders say."""
        if provider == XNNPACK:
            return 1
        return 0 if self.abi == X86_64 else CORES

    def _enter(self, job: Job, work: Path, pipes: Sequence[str]) -> tuple[str, ...]:
        """Returns the start of the command: what the phone says of itself, and what emulates its CPU."""
        api = job.target.settings.get("api_level", _DEFAULT_API)
        facts = [f"EDGEKIT_ANDROID_API={api}", *pipes]
        if job.target.provider == NNAPI:
            facts.append(f"EDGEKIT_NNAPI_LEVEL={find_feature_level(int(api))}")
        emulator = find_emulator(self.abi)
        if not emulator:
            return ("env", *facts)
        core = CORE_TYPES[self.cpu]
        write_phone(core, work / "phone")
        return ("env", *facts, f"EDGEKIT_PHONE={work / 'phone'}", *emulator, "-cpu", core.qemu)


def find_android_versions() -> dict[str, str]:
    """Returns the version of ONNX Runtime in the archive that is installed, and the archive's name."""
    installed = find_installed()
    return {} if installed is None else {"onnxruntime": installed.version, "archive": installed.archive}


def find_emulator(abi: str) -> tuple[str, ...] | None:
    """Returns the command that runs programs of an ABI: nothing where this machine does itself, None where none can."""
    if MACHINES[abi] == platform.machine():
        return ()
    if abi == X86_64:
        return None
    found = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    return None if found is None else (found,)
