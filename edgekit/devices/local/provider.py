"""The execution providers that a PC may have besides the CPU provider: a table, and each of them as a device.

On a machine without a GPU, the WebGPU provider uses SwiftShader, a Vulkan driver that computes on the CPU.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Literal

import msgspec

from edgekit._ort import AVAILABLE_PROVIDERS, CPU_PROVIDER, VERSION
from edgekit._proc import run_process
from edgekit.bundle.checks import PROVIDER_OPTIONS
from edgekit.devices.device import Device, DeviceRun, Job, Missing
from edgekit.devices.process.run import STANDALONE, check_options, describe_job, printable, quote_last_line, run_python
from edgekit.errors import MissingExtraError, reraised
from edgekit.evidence import Evidence
from edgekit.machine import spell_install
from edgekit.serialize import read_own_toml, ready_type

# Where Debian's and Ubuntu's Chromium install SwiftShader, with their own Vulkan loader.
_FOLDERS = (Path("/usr/lib/chromium"), Path("/usr/lib/chromium-browser"))
_DRIVER = "vk_swiftshader_icd.json"
_LOADER = "libvulkan.so.1"
_SYSTEMS = tuple(f"{place}/{_LOADER}" for place in ("lib", "lib/*-linux-gnu", "lib64", "local/lib"))


@functools.cache
def find_swiftshader() -> Mapping[str, str]:
    """Returns the environment variables for WebGPU on SwiftShader, empty if there is a GPU or no SwiftShader."""
    if sys.platform != "linux" or any(Path("/dev/dri").glob("renderD*")) or Path("/dev/nvidia0").exists():
        return {}
    if (folder := next((one for one in _FOLDERS if (one / _DRIVER).is_file()), None)) is None:
        return {}
    found = {"VK_ICD_FILENAMES": str(folder / _DRIVER), "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}
    # Dawn opens the Vulkan loader by its bare name. ctypes.util.find_library is avoided: it starts ldconfig and even a
    # compiler.
    if not any(any(Path("/usr").glob(place)) for place in _SYSTEMS) and (folder / _LOADER).is_file():
        found["LD_LIBRARY_PATH"] = str(folder)
    return found


OPENVINO = "OpenVINOExecutionProvider"
Hardware = Literal["cpu", "gpu", "npu"]

_DEV = Path("/dev")
_PROGRAM = STANDALONE / "ort_provider.py"
_TIMEOUT_S = 60.0


class Provider(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a provider is installed on this machine, and what it needs.

    `name` is ONNX Runtime's. `package` is the pip package: either a plug-in wheel, whose `module` returns the path of
    the library (`get_library_path()`), or, without a `module`, a build of ONNX Runtime with the provider built in,
    which replaces the package `onnxruntime`. Such a build loads the libraries `parts` when a session is made; if that
    fails, the session runs on the CPU. `needs` says how to install what they depend on. `systems` are the values of
    `sys.platform` on which the provider runs, empty for all. `hardware` are the kinds of device that a user may name.
    `drivers` are files under /dev on Linux, at least one of which exists if there is a GPU of the provider's maker.
    `cpu_vendor` is the PCI number of the only vendor whose CPUs the plug-in lists, although it computes on others; 0
    for all. `swiftshader` says that it computes on SwiftShader where there is no GPU. `evidence` is how much a run
    proves.
    """

    name: str
    package: str
    module: str = ""
    parts: tuple[str, ...] = ()
    needs: str = ""
    systems: tuple[str, ...] = ()
    hardware: tuple[Hardware, ...] = ()
    drivers: tuple[str, ...] = ()
    cpu_vendor: int = 0
    swiftshader: bool = False
    evidence: Evidence = Evidence.DEVICE

    @property
    def distribution(self) -> str:
        """The package's name without its version."""
        return self.package.partition("==")[0]

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables for the process that runs a model."""
        return find_swiftshader() if self.swiftshader else {}


PROVIDERS: Mapping[str, Provider] = read_own_toml(Path(__file__).parent / "providers.toml", dict[str, Provider])
"""The providers of this machine by the name of their device; to support another one, add a table to the file."""


# Providers whose devices are defined elsewhere, not by a row above.
_OTHERS = {CPU_PROVIDER: "host", "CoreMLExecutionProvider": "coreml"}
_OTHER_WHEELS = {"onnxruntime-qnn": ("QNNExecutionProvider", "qnn-htp-sim")}


class FoundDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hardware that a provider finds here, and the provider's version if it reports one."""

    kind: str
    name: str
    version: str


class Found(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a provider finds on this machine; `failure` says why it cannot be used.

    `vendor_claimed` says that it lists a CPU only because edgekit presented it as one of the supported vendor.
    """

    devices: tuple[FoundDevice, ...] = ()
    failure: str = ""
    vendor_claimed: bool = False


class OfferedProvider(msgspec.Struct, frozen=True, kw_only=True):
    """A provider that an installed package offers.

    `source` is that package with its version, `hardware` what the provider finds here, and `device` the name for
    `--on`, "" if edgekit has no device for it. `failure` says why it cannot be used.
    """

    provider: str
    source: str
    hardware: tuple[str, ...] = ()
    device: str = ""
    failure: str = ""


@functools.cache
def ask_provider(device: str) -> Found:
    """Returns what the provider of a device in PROVIDERS finds here; it is asked once, in a separate process.

    Raises:
        MissingExtraError: its wheel is installed, and cannot be imported.
    """
    row = PROVIDERS[device]
    name = "onnxruntime_{}.dll" if sys.platform == "win32" else "libonnxruntime_{}.so"
    request = {
        "provider": row.name,
        "library": find_library(row),
        "cpu_vendor": row.cpu_vendor,
        "parts": [name.format(part) for part in row.parts],
    }
    # -P keeps the program's own folder out of sys.path, where its files would shadow other modules.
    argv = [sys.executable, "-P", str(_PROGRAM), msgspec.json.encode(request).decode()]
    finished = run_process(argv, timeout_s=_TIMEOUT_S, env=row.environment)
    if not finished.succeeded:
        return Found(failure=f"the process that asks it {finished.ending}{quote_last_line(finished.stderr)}")
    try:
        found = msgspec.json.decode(finished.stdout.strip().splitlines()[-1], type=ready_type(Found))
    except (IndexError, msgspec.DecodeError):
        return Found(failure="the process that asks it gave no answer")
    return msgspec.structs.replace(found, failure=printable(found.failure, 400))


def find_library(row: Provider) -> str:
    """Returns the path of a plug-in provider's library, "" for a built-in provider.

    Raises:
        MissingExtraError: the wheel cannot be imported, or its library is gone.
    """
    if not row.module:
        return ""
    hint = f"pip install --force-reinstall {row.package}"
    unusable = MissingExtraError(f"the wheel {row.distribution} cannot be used", hint=hint)
    with reraised((ImportError, OSError, AttributeError), unusable, quote=True):
        return str(importlib.import_module(row.module).get_library_path())


def find_missing_provider(device: str, hardware: str) -> Missing | None:
    """Returns why a device's provider cannot be used here on some hardware ("" for any), None if it can."""
    row = PROVIDERS[device]
    if row.systems and sys.platform not in row.systems:
        names = " and ".join({"linux": "Linux", "win32": "Windows"}[system] for system in row.systems)
        return Missing(reason=f"{row.name} runs only on {names}", command=None)
    if row.module and importlib.util.find_spec(row.module) is None:
        return Missing(reason=f"the wheel {row.distribution} is not installed", command=spell_install(row.package))
    if not row.module and row.name not in AVAILABLE_PROVIDERS:
        command = f"pip uninstall -y onnxruntime && pip install {row.package}"
        return Missing(reason=f"onnxruntime {VERSION} here was built without {row.name}", command=command)
    # It is installed, and may lack a library that it loads, or hardware.
    try:
        found = ask_provider(device)
    except MissingExtraError as error:
        return Missing(reason=error.message, command=error.hint)
    if found.failure:
        # ONNX Runtime itself would silently use the CPU then.
        return Missing(reason=f"{row.name} cannot be loaded: {found.failure}", command=row.needs or None)
    if row.drivers and sys.platform == "linux" and not any((_DEV / name).exists() for name in row.drivers):
        return Missing(reason=f"this machine has no GPU that {row.name} computes on", command=row.needs or None)
    kinds = [one.kind for one in found.devices]
    if row.module and (hardware not in kinds if hardware else not kinds):
        seen = f": it has {', '.join(kinds)}" if kinds else ""
        reason = f"{row.name} finds no {hardware or 'device'} on this machine{seen}"
        return Missing(reason=reason, command=row.needs or None)
    return None


def is_accelerated(device: str) -> bool:
    """Returns True if a usable provider finds other hardware than a CPU, or a CPU of the vendor that it supports."""
    row = PROVIDERS[device]
    if not row.module:
        return True
    found = ask_provider(device)
    return any(one.kind != "cpu" for one in found.devices) or (bool(row.cpu_vendor) and not found.vendor_claimed)


def list_offered() -> tuple[OfferedProvider, ...]:
    """Returns every provider that the installed ONNX Runtime and plug-in wheels offer, with what each finds here."""
    builtin_devices = {row.name: device for device, row in PROVIDERS.items() if not row.module}
    named = {name: builtin_devices.get(name) or _OTHERS.get(name, "") for name in AVAILABLE_PROVIDERS}
    rows = [(name, f"onnxruntime {VERSION}", device) for name, device in named.items()]
    plugins = {row.distribution: (row.name, device) for device, row in PROVIDERS.items() if row.module}
    known = {**plugins, **_OTHER_WHEELS}
    wheels = {str(found.metadata["Name"]): found.version for found in distributions()}
    for name in sorted(name for name in wheels if name in known or name.startswith("onnxruntime-ep-")):
        provider, device = known.get(name, ("-", ""))
        rows.append((provider, f"{name} {wheels[name]}", device))
    offered: list[OfferedProvider] = []
    for provider, source, device in rows:
        failure = "edgekit has no device for this wheel" if provider == "-" else ""
        found, row = Found(), PROVIDERS.get(device)
        if row is not None:
            missing = find_missing_provider(device, "")
            failure = missing.reason if missing else ""
            found = found if missing or not row.module else ask_provider(device)
        hardware = tuple(f"{one.kind}: {one.name}" for one in found.devices)
        offered.append(
            OfferedProvider(provider=provider, source=source, hardware=hardware, device=device, failure=failure)
        )
    return tuple(offered)


_NAMED_NODES = 8


class LocalProvider(Device, frozen=True, kw_only=True):
    """A provider of this machine, in a child process; `hardware` is the kind of device to use, "" for the first."""

    kind: str
    hardware: str = ""
    evidence: Evidence

    @property
    def name(self) -> str:
        """The device as the user names it, for example `openvino:gpu` or `host:cuda`."""
        return f"{self.kind}:{self.hardware}" if self.hardware else self.kind

    def find_versions(self) -> dict[str, str]:
        """Returns the versions of ONNX Runtime and of the package that brings the provider."""
        name = PROVIDERS[self.kind].distribution
        try:
            return {"onnxruntime": VERSION, name: version(name)}
        except PackageNotFoundError:  # a custom build
            return {"onnxruntime": VERSION}

    def find_missing(self) -> Missing | None:
        """Returns what is lacking: the wheel, a library that it loads, or the hardware."""
        return find_missing_provider(self.kind, self.hardware)

    def run(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job in the provider; nodes that it leaves run on the CPU, and a note names them.

        If the provider could not be created, so that the session has only the CPU provider, the run has failed.

        Raises:
            TargetError: the target has an option that the provider would ignore.
        """
        row = PROVIDERS[self.kind]
        request = describe_job(
            job,
            provider=row.name,
            library=find_library(row),
            hardware=self.hardware,
            cpu_vendor=row.cpu_vendor,
            preload=not row.module,
        )
        check_options(row.name, request.provider_options, PROVIDER_OPTIONS.get(row.name, request.provider_options))
        run = run_python(self, job, request, work, env=row.environment)
        left = [node.name or node.op for node in run.placement if node.provider == CPU_PROVIDER]
        notes = [f"the provider leaves {len(left)} nodes to the CPU: {', '.join(left[:_NAMED_NODES])}"] if left else []
        if ask_provider(self.kind).vendor_claimed and self.hardware in {"", "cpu"}:
            words = "lists it only because edgekit presents it as Intel's: an app on this machine finds no device"
            notes.append(f"{row.name} computes on this CPU, but {words}")
        versions = {**run.versions, **self.find_versions()}
        return msgspec.structs.replace(run, versions=versions, notes=(*run.notes, *notes))


def provider_devices() -> dict[str, LocalProvider]:
    """Returns the devices by name: one for each provider, and one for each of its kinds of hardware."""
    devices = (
        LocalProvider(
            kind=kind,
            hardware=hardware,
            providers=frozenset({row.name}),
            # A GPU or NPU that the user names is the device itself.
            evidence=Evidence.DEVICE if hardware in {"gpu", "npu"} else row.evidence,
        )
        for kind, row in PROVIDERS.items()
        for hardware in ("", *row.hardware)
    )
    return {device.name: device for device in devices}
