"""The Core ML provider of this Mac."""

import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes
from edgekit._ort import VERSION
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.process.cache import cache_folder
from edgekit.devices.process.child import Runner, describe_job, require_device
from edgekit.devices.process.exchange import FarJob
from edgekit.devices.process.link import digest_files, list_model_files
from edgekit.devices.process.python import run_python
from edgekit.errors import TargetError, UsageError, suggest_name
from edgekit.evidence import Evidence

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


def coreml_job(job: Job, units: str = "") -> FarJob:
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
