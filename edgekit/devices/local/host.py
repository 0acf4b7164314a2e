"""Devices of this machine: the CPU provider, edgekit's own runner, and on a Mac the Core ML provider."""

import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes
from edgekit._ort import VERSION
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.arm64 import CPUS, find_missing_root, run_in_root
from edgekit.devices.local.runner import find_missing_runner, host_abi, require_runner
from edgekit.devices.process.exchange import RunnerJob
from edgekit.devices.process.files import cache_folder, digest_files, list_model_files
from edgekit.devices.process.run import check_options, describe_job, require_device, run_program, run_python
from edgekit.errors import TargetError, UsageError, suggest_name
from edgekit.evidence import Evidence

_QEMU = "qemu-x86_64-static"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine's CPU, usually not the target's, hence `emulated`; `cpu` names an older one, emulated by qemu.

    qemu's Haswell is an x64 with AVX2, but without VNNI and AVX-512: on it MLAS uses its VPMADDUBSW kernels, whose sums
    of u8 by s8 products saturate (targets/cpu/NOTES.md).
    """

    cpu: str = ""
    evidence: Evidence = Evidence.EMULATED

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return f"host:{self.cpu.lower()}" if self.cpu else "host"

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: nothing for the real CPU; an emulated one needs qemu on an x64."""
        if self.cpu and platform.machine() != "x86_64":
            return Missing(reason="this Python is not for x86-64", command=None)
        if self.cpu and shutil.which(_QEMU) is None:
            return Missing(reason=f"{_QEMU} not found", command="apt-get install qemu-user-static")
        return None

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the CPU provider.

        Raises:
            DeviceError: qemu is missing.
        """
        require_device(self.name, self.find_missing())
        emulator = (_QEMU, "-cpu", self.cpu) if self.cpu else ()
        return run_python(self, job, describe_job(job), work, emulator)


class Native(msgspec.Struct, frozen=True, kw_only=True):
    """edgekit's own runner on this machine's CPU, or with `arm` on the emulated one of `arm64`."""

    arm: bool = False
    evidence: Evidence = Evidence.EMULATED

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return "arm64:native" if self.arm else "host:native"

    @property
    def abi(self) -> str:
        """The kind of machine for which the runner is built."""
        return "linux-arm64" if self.arm else host_abi()

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: the runner must be built, and with `arm` the Debian root installed."""
        return (find_missing_root() if self.arm else None) or find_missing_runner(self.abi)

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the CPU provider.

        Raises:
            DeviceError: the runner is not built, or what emulates the CPU is missing.
        """
        require_device(self.name, self.find_missing())
        native = require_runner(self.abi)
        if self.arm:
            return run_in_root(self, CPUS[0], native.pack(), job, work)
        request = describe_job(job, runtime=str(native.library))
        return run_program(self, [str(native.program), "--pipe"], job, request, work)


PROVIDER = "CoreMLExecutionProvider"
UNITS = {"all": "ALL", "cpu": "CPUOnly", "gpu": "CPUAndGPU", "ane": "CPUAndNeuralEngine"}
"""The values of UNITS in `coreml:UNITS`, and the provider's names for them."""

# The provider's options except the cache, and their values, from ORT's coreml_options.cc.
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
    """The real Core ML provider on Apple hardware, in a child process; `units` overrides the target's compute units."""

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
        """Runs every sample of a job in the Core ML provider; compiled models are cached for the next run.

        Raises:
            DeviceError: this is no Mac.
            TargetError: the target has an option that the provider does not know.
        """
        require_device(self.name, self.find_missing())
        request = coreml_job(job, self.units)
        Path(request.provider_options["ModelCacheDirectory"]).mkdir(parents=True, exist_ok=True)
        run = run_python(self, job, request, work)
        return msgspec.structs.replace(run, versions={**run.versions, "macos": platform.mac_ver()[0]})


def coreml_job(job: Job, units: str = "") -> RunnerJob:
    """Returns the job that opens a model in the Core ML provider, with a separate cache folder.

    The provider does not notice that a cached model is stale, so the cache folder is named by the digest of the model's
    files, the options and ONNX Runtime's version.

    Raises:
        TargetError: the target has an option or a value that the provider does not know.
        UsageError: there are no such compute units.
    """
    options = provider_options(job.target.session.provider_options, units)
    state = f"{digest_files(list_model_files(job.model))} {sorted(options.items())} {VERSION}"
    cache = cache_folder() / "coreml" / digest_bytes(state.encode())[:32]
    options = {**options, "ModelCacheDirectory": str(cache)}
    return describe_job(job, provider=PROVIDER, provider_options=options)


def provider_options(options: Mapping[str, str], units: str = "") -> dict[str, str]:
    """Returns a target's options for the provider, with the device's compute units if it names some.

    Raises:
        TargetError: an option or its value is unknown.
        UsageError: there are no such compute units.
    """
    if units and units not in UNITS:
        raise UsageError(f"Core ML has no compute units '{units}'", hint=suggest_name(units, UNITS))
    check_options(PROVIDER, options, _OPTIONS)
    for key, value in options.items():
        if value not in _OPTIONS[key]:
            raise TargetError(f"'{value}' is no {key} of {PROVIDER}", hint=suggest_name(value, _OPTIONS[key]))
    return {**options, **({"MLComputeUnits": UNITS[units]} if units else {})}
