"""The table of devices: finds a device by its name, says what it lacks, and installs it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._ort import CPU_PROVIDER, VERSION
from edgekit.devices.android.android import (
    NNAPI,
    X86_64,
    XNNPACK,
    Android,
    read_phones,
    vary_android,
)
from edgekit.devices.android.android import PROVIDERS as ANDROID
from edgekit.devices.android.installed import LOADER as ANDROID_LOADER
from edgekit.devices.device import Device, DeviceStatus, Missing
from edgekit.devices.ios.ios import LOADER as IOS_LOADER
from edgekit.devices.ios.ios import ML_PROGRAM, IosSimulator
from edgekit.devices.ios.ios import NAME as IOS_SIMULATOR
from edgekit.devices.ios.ios import PROVIDERS as IOS
from edgekit.devices.local.arm64 import CPUS, Arm64, find_arm64_versions, install_arm64
from edgekit.devices.local.emulated import Emulated
from edgekit.devices.local.host import (
    ARCH_SOCS,
    COREML,
    QNN,
    UNITS,
    CoreMl,
    Host,
    Native,
    QnnSimulator,
    find_qnn_versions,
)
from edgekit.devices.local.provider import PROVIDERS, LocalProvider, find_provider_versions, provider_devices
from edgekit.devices.release import Loader
from edgekit.devices.remote.remote import AdbDevice, SshDevice, check_address
from edgekit.errors import UsageError, suggest_name
from edgekit.evidence import Evidence
from edgekit.progress import Progress
from edgekit.target import Session, Target, load_target

_DEVICES: dict[str, Device] = {
    "host": Host(),
    "host:native": Native(),
    "qnn-htp-sim": QnnSimulator(),
    **{f"qnn-htp-sim:{arch}": QnnSimulator(arch=arch) for arch in ARCH_SOCS},
    "android": Android(),
    "android:x86_64": Android(cpu=X86_64, evidence=Evidence.SAME_EP),
    IOS_SIMULATOR: IosSimulator(),
    "arm64": Arm64(),
    **{f"arm64:{cpu}": Arm64(cpu=cpu) for cpu in CPUS},
    "arm64:native": Native(arm=True, evidence=Evidence.SAME_ARCH),
    "host:haswell": Host(cpu="Haswell"),
    "emulated": Emulated(),
    "coreml": CoreMl(),
    **{f"coreml:{units}": CoreMl(units=units) for units in UNITS},
    **provider_devices(),
}

# Remote devices by the part of their name before the colon; the rest is the address.
_REMOTE: dict[str, Callable[[str], Device]] = {
    "adb": lambda serial: AdbDevice(serial=check_address("adb", serial)),
    "ssh": lambda host: SshDevice(host=check_address("ssh", host)),
}


class _Kind(msgspec.Struct, frozen=True, kw_only=True):
    """What devices of one kind share; the kind is the part of a device's name before the colon.

    A bare model is opened as one of the `targets`, by default the first; without any, as the target `cpu`. If
    `providers` is not empty, the devices run only targets of these providers. They never run targets of the providers
    in `replaced`, for each of which another device proves more. `find_versions` returns the versions of the software
    that runs models. `loader` installs and finds a phone's library; `install` installs a device without one.
    """

    targets: tuple[str, ...] = ()
    providers: frozenset[str] = frozenset()
    replaced: Mapping[str, str] = {}
    find_versions: Callable[[], dict[str, str]] = lambda: {"onnxruntime": VERSION}
    loader: Loader | None = None
    install: Callable[[Progress], None] | None = None


_KINDS = {
    "qnn-htp-sim": _Kind(targets=("qnn",), providers=frozenset({QNN}), find_versions=find_qnn_versions),
    "coreml": _Kind(targets=("coreml",), providers=frozenset({COREML})),
    "android": _Kind(
        targets=("xnnpack", "nnapi"),
        providers=ANDROID,
        find_versions=ANDROID_LOADER.find_versions,
        loader=ANDROID_LOADER,
    ),
    IOS_SIMULATOR: _Kind(targets=("coreml",), providers=IOS, find_versions=IOS_LOADER.find_versions, loader=IOS_LOADER),
    "openvino": _Kind(targets=("openvino",)),
    "arm64": _Kind(find_versions=find_arm64_versions, install=install_arm64),
    "emulated": _Kind(replaced={NNAPI: "android", XNNPACK: "android"}),
}


def _kind_of(name: str) -> _Kind:
    return _KINDS.get(name.partition(":")[0], _Kind())


def device_names() -> tuple[str, ...]:
    """Returns the names of the devices, those with a variant as `device:variant`."""
    return tuple(_DEVICES)


def find_device(name: str, target: Target) -> Device:
    """Returns a device for a target; whether it can run on this machine is up to its `find_missing`.

    Raises:
        UsageError: there is no such device, or it runs other providers than the target's.
    """
    device = _known_device(name)
    kind = _kind_of(name)
    if better := kind.replaced.get(target.provider):
        raise UsageError(
            f"'{name}' says nothing of {target.provider} that '{better}' does not show with the provider itself",
            hint=f"--on {better}, or --on host for the CPU provider",
        )
    if not _fits(name, target):
        providers = " and ".join(sorted(_providers_of(name)))
        raise UsageError(
            f"'{name}' runs {providers}, and target '{target.name}' uses {target.provider}",
            hint=f"devices of this target: {', '.join(other for other in _DEVICES if _fits(other, target))}",
        )
    # For the target `cpu`, whose own provider is the CPU provider, a run in the CPU provider proves more than for
    # others.
    if isinstance(device, Android):
        return msgspec.structs.replace(device, computes=target.provider == NNAPI)
    if isinstance(device, IosSimulator):
        return msgspec.structs.replace(device, model_format=target.settings.get("model_format", ML_PROGRAM))
    if target.provider != CPU_PROVIDER or not isinstance(device, (Host, Native, Arm64)):
        return device
    return msgspec.structs.replace(device, evidence=Evidence.SAME_EP)


def serve_device(name: str) -> tuple[tuple[Device, Target], ...]:
    """Returns a device paired with each target whose provider it serves.

    Raises:
        UsageError: there is no such device.
    """
    return tuple((find_device(name, target), target) for target in serve_targets(name))


def serve_targets(name: str) -> tuple[Target, ...]:
    """Returns a target for each provider that a device, such as `arm64` or `host:cuda`, serves.

    The first is the one that the device uses for a model if the user names none.
    """
    if targets := _kind_of(name).targets:
        return tuple(map(load_target, targets))
    # A provider that has no target gets the target `cpu` with its own name as provider.
    row = PROVIDERS.get(name) or PROVIDERS.get(name.partition(":")[0])
    return (cpu_target() if row is None else msgspec.structs.replace(cpu_target(), provider=row.name),)


def default_target(name: str) -> Target:
    """Returns the target that a device uses for a model if the user names none."""
    return serve_targets(name)[0]


def cpu_target() -> Target:
    """Returns the target `cpu` for a float model, without any session options."""
    return msgspec.structs.replace(load_target("cpu"), precisions=("fp32",), session=Session())


def vary_device(device: Device, settings: Mapping[str, str], target: Target) -> Sequence[Device] | None:
    """Returns a device with settings applied, several if they name several CPUs; None if the device takes no settings.

    Raises:
        UsageError: there is no such setting or value.
    """
    return vary_android(device, settings, target.provider) if isinstance(device, Android) else None


def list_devices(target: Target | None = None) -> tuple[DeviceStatus, ...]:
    """Returns the status of every device, or only of those that can run `target`.

    Variants that need the same as their device, such as `arm64:native`, are left out.
    """
    listed: list[DeviceStatus] = []
    for name, device in _DEVICES.items():
        own = device if isinstance(device, LocalProvider) else None
        is_variant = ":" in name and (own is None or own.hardware)
        if is_variant or (target is not None and not _fits(name, target)):
            continue
        found = {served.name: rated.find_missing() for rated, served in serve_device(name)}
        lacking = {served: missing for served, missing in found.items() if missing is not None}
        available = len(lacking) < len(found)
        served, missing = next(iter(lacking.items()), ("", Missing(reason="", command=None)))
        versions: dict[str, str] = {}
        if available:
            versions = _kind_of(name).find_versions() if own is None else find_provider_versions(own.kind)
        listed.append(
            DeviceStatus(
                name=name,
                evidence=device.evidence,
                available=available,
                reason=f"not for {served}: {missing.reason}" if available and lacking else missing.reason,
                command=missing.command or "",
                versions=versions,
            )
        )
    return tuple(listed)


def install_device(
    name: str, progress: Progress, *, library: Path | None = None, framework: Path | None = None
) -> None:
    """Installs what a device needs into the user's cache, unless it is there already.

    `progress` gets a line for each step. `library` is ONNX Runtime's archive for `android` in place of the pinned one;
    `framework` is its folder `onnxruntime.xcframework` for `ios-sim`.

    Raises:
        UsageError: there is no such device, or edgekit does not install it; the hint says how to get it.
        DeviceError: a step of the installation failed; no half-finished installation is left.
    """
    device, kind = _known_device(name), _kind_of(name)
    for given, owner in ((library, ANDROID_LOADER), (framework, IOS_LOADER)):
        if given is not None and kind.loader is not owner:
            hint = f"edgekit devices install {owner.device} {owner.option}"
            raise UsageError(f"'{name}' takes no {owner.option.split()[0]}", hint=hint)
    missing, given, loader = device.find_missing(), library or framework, kind.loader
    if loader is not None:
        installed = loader.find_installed()
        if given is not None or installed is None or not loader.is_current(installed):
            installed = loader.install(progress, given)
        progress(installed.describe())
    elif missing is None:
        progress(f"'{name}' can run already")
    elif kind.install is not None:
        kind.install(progress)
        progress(f"'{name}' is installed")
    else:
        hint = missing.command or "use another"
        raise UsageError(f"'{name}' is not installed by edgekit: {missing.reason}", hint=hint)


def _known_device(name: str) -> Device:
    kind, colon, address = name.partition(":")
    if kind in _REMOTE and colon:
        return _REMOTE[kind](address)
    if name == "adb":
        return AdbDevice()
    if name == "ssh":
        raise UsageError("'ssh' names no machine", hint="give ssh:USER@HOST")
    if kind == "android" and (address in read_phones().cores or address in read_phones().phones):
        option = "cpu" if address in read_phones().cores else "phone"
        raise UsageError(f"'{address}' is a setting of 'android'", hint=f"--on android --set {option}={address}")
    if name not in _DEVICES:
        raise UsageError(f"there is no device '{name}'", hint=suggest_name(name, (*device_names(), "adb", "ssh")))
    return _DEVICES[name]


def _fits(name: str, target: Target) -> bool:
    if target.provider in _kind_of(name).replaced:
        return False
    return target.provider in (_providers_of(name) or {target.provider})


def _providers_of(name: str) -> frozenset[str]:
    """Returns the providers whose targets a device runs; an empty set means all."""
    device = _DEVICES.get(name)
    if isinstance(device, LocalProvider):
        return frozenset({device.provider})
    return _kind_of(name).providers
