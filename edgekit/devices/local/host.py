"""Devices of this machine: the CPU provider, edgekit's own runner, Core ML on a Mac, and QNN's simulator of an HTP.

The simulator is in the Linux wheel of the QNN plug-in provider, which loads Qualcomm's HTP library.
"""

import importlib.util
import itertools
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, digest_files
from edgekit._ort import CPU_PROVIDER, VERSION
from edgekit.bundle.checks import PROVIDER_OPTIONS
from edgekit.check.report import count_of
from edgekit.convert.context import HTP_SOCS, INSTALL_QNN
from edgekit.devices.device import Device, DeviceRun, Job, Missing, refuse_run, require_device
from edgekit.devices.local.arm64 import CPUS, PYTHON, find_arm64_versions, find_missing_root, run_in_root
from edgekit.devices.local.runner import find_runner, host_abi
from edgekit.devices.process.exchange import RunnerJob
from edgekit.devices.process.run import check_options, describe_job, python_program, run_program, run_python, stand_in
from edgekit.errors import MissingExtraError, TargetError, look_up, require_known, reraised
from edgekit.evidence import Evidence
from edgekit.machine import cache_folder
from edgekit.model.external import skim_model
from edgekit.model.model import list_model_files
from edgekit.target import Target

_QEMU = "qemu-x86_64-static"


class Host(Device, frozen=True, kw_only=True):
    """The CPU provider on this machine's CPU, usually not the target's, or on one that qemu emulates.

    `cpu` is "" for this machine's, "Haswell" for an older x64, or an Arm core. qemu's Haswell has AVX2, but neither
    VNNI nor AVX-512: on it MLAS uses its VPMADDUBSW kernels, whose sums of u8 by s8 products saturate
    (targets/cpu/NOTES.md). An Arm core runs the kernels of an Arm device, but not at its speed. With `native` edgekit's
    own runner opens the model, in place of Python. As the CPU is usually not the target's, the evidence is `emulated`;
    for a target whose own provider is the CPU provider, it is `same-ep`.
    """

    cpu: str = ""
    native: bool = False
    evidence: Evidence = Evidence.EMULATED

    @property
    def is_arm(self) -> bool:
        """True for an Arm core: the program runs in a Debian root."""
        return self.cpu in CPUS

    @property
    def name(self) -> str:
        """The device as the user names it."""
        variant = "native" if self.native else "" if self.cpu == CPUS[0] else self.cpu.lower()
        return ("arm64" if self.is_arm else "host") + (f":{variant}" if variant else "")

    @property
    def abi(self) -> str:
        """The kind of machine for which the runner is built."""
        return "linux-arm64" if self.is_arm else host_abi()

    def for_target(self, target: Target) -> "Host":
        """Returns the device with the evidence of a run in the target's own provider, if that is the CPU provider."""
        is_own = target.provider == CPU_PROVIDER
        return msgspec.structs.replace(self, evidence=Evidence.SAME_EP) if is_own else self

    def find_versions(self) -> dict[str, str]:
        """Returns the versions of ONNX Runtime, and in the Debian root of Python and qemu."""
        return find_arm64_versions() if self.is_arm else super().find_versions()

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: the Debian root of an Arm core, the runner, or qemu on an x64."""
        if self.is_arm and (missing := find_missing_root()):
            return missing
        if self.native:
            found = find_runner(self.abi)
            return found if isinstance(found, Missing) else None
        if self.cpu and not self.is_arm and platform.machine() != "x86_64":
            return Missing(reason="this Python is not for x86-64", command=None)
        if self.cpu and not self.is_arm and shutil.which(_QEMU) is None:
            return Missing(reason=f"{_QEMU} not found", command="apt-get install qemu-user-static")
        return None

    def run(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the CPU provider."""
        native = require_device(self.name, find_runner(self.abi)) if self.native else None
        if self.is_arm:
            program = python_program(PYTHON) if native is None else native.pack()
            return run_in_root(self, self.cpu, program, job, work)
        if native is not None:
            request = stand_in(job, runtime=str(native.library))
            return run_program(self, [str(native.program), "--pipe"], job, request, work)
        emulator = (_QEMU, "-cpu", self.cpu) if self.cpu else ()
        request = describe_job(job) if self.cpu else stand_in(job)
        return run_python(self, job, request, work, emulator)


COREML = "CoreMLExecutionProvider"
UNITS = {"all": "ALL", "cpu": "CPUOnly", "gpu": "CPUAndGPU", "ane": "CPUAndNeuralEngine"}
"""The values of UNITS in `coreml:UNITS`, and the provider's names for them."""

# The provider's options except the cache, and their values, from ORT's coreml_options.cc.
_COREML_OPTIONS: dict[str, tuple[str, ...]] = {
    "ModelFormat": ("MLProgram", "NeuralNetwork"), "MLComputeUnits": tuple(UNITS.values()),
    "RequireStaticInputShapes": ("0", "1"), "EnableOnSubgraphs": ("0", "1"),
    "SpecializationStrategy": ("Default", "FastPrediction"), "ProfileComputePlan": ("0", "1"),
    "AllowLowPrecisionAccumulationOnGPU": ("0", "1"),
}  # fmt: skip


class CoreMl(Device, frozen=True, kw_only=True):
    """The real Core ML provider on Apple hardware, in a child process; `units` overrides the target's compute units."""

    targets = ("coreml",)
    providers: frozenset[str] = frozenset({COREML})
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

    def run(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the Core ML provider; compiled models are cached for the next run.

        Raises:
            TargetError: the target has an option that the provider does not know.
        """
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
    options = coreml_options(job.target.session.provider_options, units)
    state = f"{digest_files(list_model_files(job.model))} {sorted(options.items())} {VERSION}"
    cache = cache_folder() / "coreml" / digest_bytes(state.encode())[:32]
    options = {**options, "ModelCacheDirectory": str(cache)}
    return describe_job(job, provider=COREML, provider_options=options)


def coreml_options(options: Mapping[str, str], units: str = "") -> dict[str, str]:
    """Returns a target's options for the provider, with the device's compute units if it names some.

    Raises:
        TargetError: an option or its value is unknown.
        UsageError: there are no such compute units.
    """
    own = {"MLComputeUnits": look_up(UNITS, units, f"Core ML has no compute units '{units}'")} if units else {}
    check_options(COREML, options, _COREML_OPTIONS)
    for key, value in options.items():
        require_known(value, _COREML_OPTIONS[key], f"'{value}' is no {key} of {COREML}", TargetError)
    return {**options, **own}


QNN = "QNNExecutionProvider"
ARCH_SOCS: Mapping[str, str] = {f"v{arch}": soc for arch, soc in HTP_SOCS.items()}
"""One SoC number for each HTP architecture; for the simulator, only the architecture matters."""

_NO_DEVICE = frozenset({14, 22, 23, 24, 44, 79, 80, 81, 98, 121})
# The SoC numbers for which onnxruntime-qnn 2.7.0 creates a device (measured for 0 to 130).
_KNOWN_SOCS = frozenset(str(number) for number in range(1, 124) if number not in _NO_DEVICE)

# The options that a session on a device knows; the provider silently ignores any other.
_QNN_OPTIONS = frozenset({*PROVIDER_OPTIONS[QNN], "backend_path"})

_PROFILE = "qnn.csv"
_FALLBACK = "session.disable_cpu_ep_fallback"
_FALLBACK_REFUSED = "fallback to CPU EP has been explicitly disabled"
_COMPATIBILITY = "ep_compatibility_info.QNNExecutionProvider"


class QnnSimulator(Device, frozen=True, kw_only=True):
    """The HTP simulator; `arch` overrides the target's SoC, "" keeps it."""

    targets = ("qnn",)
    providers: frozenset[str] = frozenset({QNN})
    arch: str = ""
    evidence: Evidence = Evidence.SIMULATOR

    def find_versions(self) -> dict[str, str]:
        """Returns the versions of ONNX Runtime and of the provider's wheel, which contains Qualcomm's libraries."""
        return {"onnxruntime": VERSION, "onnxruntime-qnn": version("onnxruntime-qnn")}

    @property
    def name(self) -> str:
        """The device as the user names it."""
        return f"qnn-htp-sim:{self.arch}" if self.arch else "qnn-htp-sim"

    def find_missing(self) -> Missing | None:
        """Returns what is lacking on this machine."""
        if importlib.util.find_spec("onnxruntime_qnn") is None:
            return Missing(reason="the wheel onnxruntime-qnn is not installed", command=INSTALL_QNN)
        return None

    def run(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the simulator, at first without a fallback to the CPU.

        If the provider does not take every node, the job runs again with the fallback; a note says so, and the
        placement names the nodes.

        Raises:
            MissingExtraError: it cannot be imported.
            TargetError: the target has an option that the provider would ignore or misread.
        """
        options = qnn_options(job.target.session.provider_options, self.arch)
        if job.model.suffix == ".ort":
            return refuse_run(self, f"'{job.model.name}' is in ORT format, which {QNN} never takes")
        # Qualcomm's library aborts the process on an empty tensor. Shapes are fixed, so checking one sample is enough.
        first = itertools.islice(job.samples, 1)
        if empty := [name for sample in first for name, value in sample.items() if value.size == 0]:
            return refuse_run(self, f"input '{empty[0]}' has no elements, on which {QNN} aborts: drop it")
        unusable = MissingExtraError("the QNN provider cannot be loaded", hint=INSTALL_QNN)
        with reraised(ImportError, unusable, quote=True):
            import onnxruntime_qnn  # noqa: PLC0415 - an optional extra
        library = str(onnxruntime_qnn.get_library_path())
        request = stand_in(job, provider=QNN, library=library, provider_options=options)
        config = dict(request.session_config)
        # The simulator would run a context binary made for another SoC, a device would not.
        soc = options["soc_model"]
        for entry in skim_model(job.model).metadata_props:
            if entry.key == _COMPATIBILITY:
                # `v2:6:<QAIRT>:<backend>:<htp_archs>:<socs>:<vtcm>:0`; 0 means no particular SoC. A context that names
                # none was compiled for an architecture, and runs on all its chips.
                socs = [*entry.value.split(":"), *[""] * 6][5]
                is_list = re.fullmatch(r"\d+(,\d+)*", socs) is not None
                made_for = [number for number in socs.split(",") if number != "0"] if is_list else []
                if made_for and soc not in made_for:
                    words = f"'{job.model.name}' is a context for soc_model {', '.join(made_for)}, not {soc}"
                    raise TargetError(words, hint=f"build the model for it: --target qnn with soc_model={soc}")
        # Each of the two runs has its own process and folder, because QNN keeps state between sessions that breaks the
        # second. The simulator computes in one thread; the threads that represent the NPU's units spin, which costs a
        # third more CPU seconds on cores of their own, and nothing if they share the one core.
        # Without this key, ONNX Runtime silently runs nodes on the CPU that the provider does not take.
        strict = msgspec.structs.replace(request, session_config={**config, _FALLBACK: "1"})
        run = _run_watched(self, job, strict, work / "strict", one_core=True)
        # Retried only after this refusal: after any other failure, a run on the CPU would pass for one in the
        # simulator.
        if run.failure is None or _FALLBACK_REFUSED not in run.failure:
            return run
        config.pop(_FALLBACK, None)
        run = _run_watched(self, job, msgspec.structs.replace(request, session_config=config), work / "fallback")
        left = [node.name or node.op for node in run.placement if node.provider != QNN]
        note = f"the provider refuses {count_of(len(left), 'node')}, which ran on the CPU: {', '.join(left[:8])}"
        return msgspec.structs.replace(run, notes=(note, *run.notes))


def qnn_options(options: Mapping[str, str], arch: str = "") -> dict[str, str]:
    """Returns a target's options for the simulator, with the SoC of `arch` if it is given.

    Raises:
        TargetError: the provider does not know an option or the SoC, and would not say so.
        UsageError: there is no such architecture.
    """
    own = look_up(ARCH_SOCS, arch, f"there is no HTP architecture '{arch}'") if arch else ""
    check_options(QNN, options, _QNN_OPTIONS)
    # The provider silently replaces an unknown SoC by its default.
    soc = own or options.get("soc_model", "")
    if soc not in _KNOWN_SOCS:
        known = ", ".join(f"{number} ({name})" for name, number in ARCH_SOCS.items())
        raise TargetError(f"'{soc}' is no soc_model that the HTP simulator knows", hint=f"for example: {known}")
    # The provider ignores htp_arch if no SoC is given, and the target's backend path is that of a library on the
    # device.
    effective = {key: value for key, value in options.items() if key not in {"htp_arch", "backend_path"}}
    return {**effective, "backend_type": "htp", "soc_model": soc}


def _run_watched(device: Device, job: Job, request: RunnerJob, folder: Path, *, one_core: bool = False) -> DeviceRun:
    """Returns a run in a separate folder; if the job asks for a trace, with QNN's own profile of its operations."""
    if not job.trace:
        return run_python(device, job, request, folder, one_core=one_core, emulates=True)
    file = folder / _PROFILE
    options = {**request.provider_options, "profiling_level": "detailed", "profiling_file_path": str(file)}
    watched = msgspec.structs.replace(request, provider_options=options)
    run = run_python(device, job, watched, folder, one_core=one_core, emulates=True)
    return msgspec.structs.replace(run, npu_trace=file if file.is_file() else None)
