"""The table of devices: finds a device by its name, says what it lacks, and installs it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from edgekit.devices.android import android, installed
from edgekit.devices.device import Device, DeviceStatus, Missing
from edgekit.devices.ios import ios
from edgekit.devices.local.arm64 import CPUS, install_arm64
from edgekit.devices.local.emulated import Emulated
from edgekit.devices.local.host import ARCH_SOCS, UNITS, CoreMl, Host, QnnSimulator
from edgekit.devices.local.provider import LocalProvider, provider_devices
from edgekit.devices.release import Loader
from edgekit.devices.remote.remote import AdbDevice, SshDevice, check_address
from edgekit.errors import UsageError, suggest_name
from edgekit.evidence import Evidence
from edgekit.progress import Progress
from edgekit.target import Session, Target, load_target

_DEVICES: dict[str, Device] = {
    "host": Host(),
    "host:native": Host(native=True),
    "qnn-htp-sim": QnnSimulator(),
    **{f"qnn-htp-sim:{arch}": QnnSimulator(arch=arch) for arch in ARCH_SOCS},
    "android": android.Android(),
    "android:x86_64": android.Android(cpu=android.X86_64, evidence=Evidence.SAME_EP),
    ios.NAME: ios.IosSimulator(),
    "arm64": Host(cpu=CPUS[0], evidence=Evidence.SAME_ARCH),
    **{f"arm64:{cpu}": Host(cpu=cpu, evidence=Evidence.SAME_ARCH) for cpu in CPUS},
    "arm64:native": Host(cpu=CPUS[0], native=True, evidence=Evidence.SAME_ARCH),
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


# The loaders, which install and find the libraries for phones.
_LOADERS: Mapping[str, Loader] = {"android": installed.LOADER, ios.NAME: ios.LOADER}


def device_names() -> tuple[str, ...]:
    """Returns the names of the devices, those with a variant as `device:variant`."""
    return tuple(_DEVICES)


def find_device(name: str, target: Target) -> Device:
    """Returns a device for a target; whether it can run on this machine is up to its `find_missing`.

    Raises:
        UsageError: there is no such device, or it runs other providers than the target's.
    """
    device = known_device(name)
    if better := device.replaced.get(target.provider):
        words = f"'{name}' would only emulate {target.provider}, and '{better}' runs the provider itself"
        raise UsageError(words, hint=f"--on {better}, or --on host for the CPU provider")
    if not _fits(device, target):
        providers = " and ".join(sorted(device.providers))
        fitting = ", ".join(other for other, one in _DEVICES.items() if _fits(one, target))
        words = f"'{name}' runs {providers}, and target '{target.name}' uses {target.provider}"
        raise UsageError(words, hint=f"devices of this target: {fitting}")
    return device.for_target(target)


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
    device = known_device(name)
    if device.targets:
        return tuple(map(load_target, device.targets))
    # A provider that has no target gets the target `cpu` with its own name as provider.
    return tuple(msgspec.structs.replace(cpu_target(), provider=name) for name in device.providers) or (cpu_target(),)


def default_target(name: str, *, first: str = "") -> Target:
    """Returns the target that a device uses for a model if the user names none: `first` if the device runs it."""
    preferred = load_target(first) if first else None
    return preferred if preferred and _fits(known_device(name), preferred) else serve_targets(name)[0]


def cpu_target() -> Target:
    """Returns the target `cpu` for a float model, without any session options."""
    return msgspec.structs.replace(load_target("cpu"), precisions=("fp32",), session=Session())


def list_devices(target: Target | None = None) -> tuple[DeviceStatus, ...]:
    """Returns the status of every device, or only of those that can run `target`.

    Variants that need the same as their device, such as `arm64:native`, are left out.
    """
    listed: list[DeviceStatus] = []
    for name, device in _DEVICES.items():
        is_variant = ":" in name and not (isinstance(device, LocalProvider) and not device.hardware)
        if is_variant or (target is not None and not _fits(device, target)):
            continue
        found = {served.name: rated.find_missing() for rated, served in serve_device(name)}
        missing_by_target = {served: missing for served, missing in found.items() if missing is not None}
        available = len(missing_by_target) < len(found)
        served, missing = next(iter(missing_by_target.items()), ("", Missing(reason="", command=None)))
        listed.append(
            DeviceStatus(
                name=name,
                evidence=device.evidence,
                available=available,
                reason=f"not for {served}: {missing.reason}" if available and missing_by_target else missing.reason,
                command=missing.command or "",
                versions=device.find_versions() if available else {},
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
    device, loader = known_device(name), _LOADERS.get(name.partition(":")[0])
    for given, owner in ((library, installed.LOADER), (framework, ios.LOADER)):
        if given is not None and loader is not owner:
            hint = f"edgekit devices install {owner.device} {owner.option}"
            raise UsageError(f"'{name}' takes no {owner.option.split()[0]}", hint=hint)
    missing, given = device.find_missing(), library or framework
    if loader is not None:
        found = loader.find_installed()
        if given is not None or found is None or not loader.is_current(found):
            found = loader.install(progress, given)
        progress(found.describe())
    elif missing is None:
        progress(f"'{name}' can run already")
    elif isinstance(device, Host) and device.is_arm:
        install_arm64(progress)
        progress(f"'{name}' is installed")
    else:
        hint = missing.command or "use another"
        raise UsageError(f"'{name}' is not installed by edgekit: {missing.reason}", hint=hint)


def known_device(name: str) -> Device:
    """Returns a device by its name, without a target.

    Raises:
        UsageError: there is no such device.
    """
    kind, colon, address = name.partition(":")
    if kind in _REMOTE and colon:
        return _REMOTE[kind](address)
    if name == "adb":
        return AdbDevice()
    if name == "ssh":
        raise UsageError("'ssh' names no machine", hint="give ssh:USER@HOST")
    phones = android.read_phones()
    if kind == "android" and (address in phones.cores or address in phones.phones):
        option = "cpu" if address in phones.cores else "phone"
        raise UsageError(f"'{address}' is a setting of 'android'", hint=f"--on android --set {option}={address}")
    if name not in _DEVICES:
        raise UsageError(f"there is no device '{name}'", hint=suggest_name(name, (*device_names(), "adb", "ssh")))
    return _DEVICES[name]


def _fits(device: Device, target: Target) -> bool:
    is_replaced = target.provider in device.replaced
    return not is_replaced and target.provider in (device.providers or {target.provider})
