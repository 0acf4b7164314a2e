"""Devices of this machine: its CPU provider, edgekit's own runner, and on a Mac the Core ML provider."""

import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes
from edgekit._ort import VERSION
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.emulators.arm64 import Arm64, arm64_root, enter_arm64, folder_in_arm64, thread_count
from edgekit.devices.local.runner import LIBRARY, PROGRAM, NativeRunner, find_missing_runner, find_runner, host_abi
from edgekit.devices.process.cache import cache_folder
from edgekit.devices.process.child import Runner, describe_job, refuse_run, require_device
from edgekit.devices.process.exchange import RunnerJob
from edgekit.devices.process.link import Link, LocalLink, digest_files, list_model_files
from edgekit.devices.process.pipe import run_over, run_python
from edgekit.errors import EdgekitError, TargetError, UsageError, suggest_name
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


PROVIDER = "CoreMLExecutionProvider"
UNITS = {"all": "ALL", "cpu": "CPUOnly", "gpu": "CPUAndGPU", "ane": "CPUAndNeuralEngine"}
"""What `coreml:UNITS` may name, and the provider's word for it."""

# The provider's options but its cache, and their values; from ORT's coreml_options.cc.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "ModelFormat": ("MLProgram", "NeuralNetwork"),
    "MLComputeUnits": tuple(UNITS.values()),
    "RequireStaticInputShapes": ("0", "1"),
    "EnableOnSubgraphs": ("0", "1"),
    "SpecializationStrategy": ("Default", "FastPrediction"),
    "ProfileComputePlan": ("0", "1"),
    "AllowLowPrecisionAccumulationOnGPU": ("0", "1"),
}


class CoreMl(msgspec.Struct, frozen=True, kw_only=True):
    """The real provider on Apple hardware, in a child process; `units` overrides the target's compute units."""

    units: str = ""
    evidence: Evidence = Evidence.DEVICE

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return f"coreml:{self.units}" if self.units else "coreml"

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: nothing on a Mac, everything elsewhere."""
        if sys.platform == "darwin":
            return None
        return Missing(reason="Core ML runs only on Apple hardware", command=None)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the Core ML provider; what it compiles is kept for the next run.

        Raises:
            DeviceError: this is no Mac.
            TargetError: the target has an option that the provider does not know.
        """
        require_device(self.name, self.find_missing())
        far = coreml_job(job, self.units)
        Path(far.provider_options["ModelCacheDirectory"]).mkdir(parents=True, exist_ok=True)
        run = run_python(Runner(device=self.name, evidence=self.evidence), job, far, work)
        return msgspec.structs.replace(run, versions={**run.versions, "macos": platform.mac_ver()[0]})


def coreml_job(job: Job, units: str = "") -> RunnerJob:
    """Returns the far-side job that opens a model in the Core ML provider, with a cache of its own.

    The provider never notices that a cached model is stale, so that the cache folder is named by the digest of the
    model's files, the options and ONNX Runtime's version.

    Raises:
        TargetError: the target has an option or a value that the provider does not know.
        UsageError: there are no such compute units.
    """
    options = provider_options(job.target.session.provider_options, units)
    state = f"{digest_files(list_model_files(job.model))} {sorted(options.items())} {VERSION}"
    cache = cache_folder() / "coreml" / digest_bytes(state.encode())[:32]
    far = describe_job(job, provider=PROVIDER)
    return msgspec.structs.replace(far, provider_options={**options, "ModelCacheDirectory": str(cache)})


def provider_options(options: Mapping[str, str], units: str = "") -> dict[str, str]:
    """Returns a target's options for the provider, with the compute units of the device where it names some.

    Raises:
        TargetError: an option or its value is unknown.
        UsageError: there are no such compute units.
    """
    if units and units not in UNITS:
        raise UsageError(f"Core ML has no compute units '{units}'", hint=suggest_name(units, UNITS))
    for key, value in options.items():
        if key not in _OPTIONS:
            raise TargetError(f"'{key}' is no option of {PROVIDER}", hint=suggest_name(key, _OPTIONS))
        if value not in _OPTIONS[key]:
            raise TargetError(f"'{value}' is no {key} of {PROVIDER}", hint=suggest_name(value, _OPTIONS[key]))
    return {**options, **({"MLComputeUnits": UNITS[units]} if units else {})}
