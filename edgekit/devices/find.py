"""Finds devices and targets by what a user writes: names, a `devices.toml`, or "auto" for this machine.

The table of devices is here, and what each of them lacks. A device of a `devices.toml` has a name and time limits of
its own. If it is shared through Labgrid, its place there is acquired while a job runs on it.
"""

import contextlib
import getpass
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import msgspec

from edgekit._files import digest_bytes, one_at_a_time
from edgekit._ort import CPU_PROVIDER
from edgekit._proc import Finished, run_process
from edgekit.devices.android import android, installed
from edgekit.devices.device import Device, DeviceRun, DeviceStatus, Job, Missing, WrappedDevice
from edgekit.devices.ios import ios
from edgekit.devices.local.arm64 import CPUS, install_arm64
from edgekit.devices.local.emulated import Emulated
from edgekit.devices.local.host import ARCH_SOCS, UNITS, CoreMl, Host, QnnSimulator
from edgekit.devices.local.provider import PROVIDERS, LocalProvider, is_accelerated, provider_devices
from edgekit.devices.release import Loader
from edgekit.devices.remote.remote import AdbDevice, SshDevice, check_address
from edgekit.errors import DeviceError, UsageError, require_known
from edgekit.evidence import Evidence
from edgekit.machine import cache_folder, has_vnni, host_cpu
from edgekit.progress import Progress
from edgekit.recipe import Recipe, load_targets
from edgekit.serialize import read_toml, suggest_key
from edgekit.target import Session, Target, load_target, target_names

# Those with a variant are called `device:variant`.
DEVICES: dict[str, Device] = {
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
REMOTE: dict[str, Callable[[str], Device]] = {
    "adb": lambda serial: AdbDevice(serial=check_address("adb", serial)),
    "ssh": lambda host: SshDevice(host=check_address("ssh", host)),
}


# The loaders, which install and find the libraries for phones.
_LOADERS: Mapping[str, Loader] = {"android": installed.LOADER, ios.NAME: ios.LOADER}


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
        fitting = ", ".join(other for other, one in DEVICES.items() if _fits(one, target))
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
    for name, device in DEVICES.items():
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
    if kind in REMOTE and colon:
        return REMOTE[kind](address)
    if name == "adb":
        return AdbDevice()
    if name == "ssh":
        raise UsageError("'ssh' names no machine", hint="give ssh:USER@HOST")
    phones = android.read_phones()
    if kind == "android" and (address in phones.cores or address in phones.phones):
        option = "cpu" if address in phones.cores else "phone"
        raise UsageError(f"'{address}' is a setting of 'android'", hint=f"--on android --set {option}={address}")
    require_known(name, (*DEVICES, "adb", "ssh"), f"there is no device '{name}'")
    return DEVICES[name]


def _fits(device: Device, target: Target) -> bool:
    is_replaced = target.provider in device.replaced
    return not is_replaced and target.provider in (device.providers or {target.provider})


_CLIENT = "labgrid-client"
_WAIT_S = 3600.0
_PAUSE_S = 2.0
# Messages of the client of Labgrid 24 and 26 (`labgrid/remote/client.py`).
_MINE, _TAKEN = "You have already acquired place", "is already acquired by"


@contextlib.contextmanager
def holding_place(place: str, *, wait_s: float = _WAIT_S) -> Generator[None]:
    """Acquires a place (a device) of Labgrid for the duration of the block; waits if somebody else has it.

    Labgrid's client finds the coordinator by the environment variable `LG_COORDINATOR`.

    Raises:
        DeviceError: there is no client or no coordinator or no such place, or it was not free in time.
    """
    if (program := shutil.which(_CLIENT)) is None:
        raise DeviceError(f"place '{place}' of Labgrid needs {_CLIENT}", hint="pip install labgrid, or pipx")
    # A user name of edgekit's own, so that a place which the user acquired by hand is not mistaken for edgekit's.
    env = {"LG_USERNAME": f"edgekit-{getpass.getuser()}"}

    def ask(what: str) -> Finished:
        return run_process([program, "-p", place, what], timeout_s=60.0, env=env)

    # One process of this machine at a time: if the place is acquired in edgekit's name now, a killed process left it
    # so.
    with one_at_a_time(cache_folder() / "leases" / digest_bytes(f"labgrid:{place}".encode()) / "lock"):
        end = time.monotonic() + wait_s
        while not (done := ask("acquire")).succeeded:
            if _MINE in done.stderr:
                ask("release")
            elif _TAKEN not in done.stderr:
                raise DeviceError(f"place '{place}' of Labgrid: {_quote(done)}", hint=f"{_CLIENT} places lists them")
            elif time.monotonic() > end:
                raise DeviceError(f"place '{place}' was not free: {_quote(done)}", hint=f"{_CLIENT} who says more")
            else:
                time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            ask("release")


def _quote(done: Finished) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1].removeprefix(f"{_CLIENT}: ") if lines else done.ending


class NamedDevice(WrappedDevice, frozen=True, kw_only=True):
    """A device of `devices.toml`, which reports name `label`; a limit of None keeps that of the job.

    A `place` of Labgrid is acquired while it runs.
    """

    label: str
    timeout_s: float | None = None
    budget_s: float | None = None
    place: str | None = None

    @property
    def name(self) -> str:
        """The user's name for it."""
        return self.label

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs every sample of a job within the limits.

        Raises:
            DeviceError: the device is not there, or its place is not free.
        """
        limited = msgspec.structs.replace(
            job,
            timeout_s=job.timeout_s if self.timeout_s is None else self.timeout_s,
            # A job may ask for less time than the user allows, never for more.
            budget_s=job.budget_s if self.budget_s is None else min(job.budget_s, self.budget_s),
        )
        with nullcontext() if self.place is None else holding_place(self.place):
            return msgspec.structs.replace(self.device.run_job(limited, work), device=self.label)


def address_of(device: Device) -> str:
    """Returns the address of a device, for example `adb:SERIAL` or `arm64`, also if the user gave it another name."""
    return device.device.name if isinstance(device, NamedDevice) else device.name


def kind_of(device: Device) -> str:
    """Returns the part of a device's address before the colon."""
    return address_of(device).partition(":")[0]


def is_remote(device: Device) -> bool:
    """Returns True for a device that is another machine; all others run on this one, emulated or not."""
    return kind_of(device) in REMOTE


_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
# The name is written into reports, file names and XML, so only letters, digits and a few marks are allowed.
_Label = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w .:@+-]{0,63}$")]

# Stands for all targets whose provider is installed on this machine, with the hardware for it.
_AUTO = "auto"


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as a file describes it.

    `device` is a name as for `--on`, and `settings` are those of `--set`. Three fields are for devices over adb or ssh:
    `runner` and `library` replace the runner and the library of ONNX Runtime that edgekit finds (paths are relative to
    the file's folder), and `provider` replaces that of the target, so that a run proves less. `labgrid` is the device's
    place in a laboratory that shares its devices through Labgrid: it is acquired while the device runs.
    """

    device: str
    runner: str | None = None
    library: str | None = None
    provider: str | None = None
    timeout_s: _Seconds | None = None
    budget_s: _Seconds | None = None
    settings: dict[str, str] = {}
    labgrid: _Label | None = None


class ListedDevice(DeviceEntry, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device of a `devices.toml`, with the name that reports call it by."""

    name: _Label


class DeviceChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The devices that a user asks for: `names` by `--on`, `settings` by `--set`, and a `file` by `--on-file`.

    `listed` are further entries of the kind that such a file holds.
    """

    names: tuple[str, ...] = ()
    file: Path | None = None
    listed: tuple[ListedDevice, ...] = ()
    settings: Mapping[str, str] = {}


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    device: tuple[ListedDevice, ...]


def read_devices(path: Path) -> tuple[ListedDevice, ...]:
    """Returns the devices of a file, in its order.

    Raises:
        UsageError: the file cannot be read, has an unknown or missing key, or a name comes twice.
    """
    fields = ListedDevice.__struct_fields__
    form = f"[[device]] with {', '.join(fields)}"
    suggest = partial(suggest_key, valid=("device", *fields), otherwise=form)
    if not (listed := read_toml(path, _File, hint="--on-file takes a .toml file", keys=suggest).device):
        raise UsageError(f"'{path}' lists no device", hint=form)
    names = [entry.name for entry in listed]
    if (repeated := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise UsageError(f"'{path}' lists the name '{repeated}' twice", hint="give each device a name of its own")
    return tuple(resolve_device(entry, path.parent) for entry in listed)


def resolve_device(entry: ListedDevice, folder: Path) -> ListedDevice:
    """Returns a device of a file with its relative paths resolved: they are relative to the file's folder."""
    return msgspec.structs.replace(
        entry,
        runner=None if entry.runner is None else str(folder / entry.runner),
        library=None if entry.library is None else str(folder / entry.library),
        settings={key: str(folder / value) if key == "driver" else value for key, value in entry.settings.items()},
    )


def choose_devices(
    choice: DeviceChoice, target_for: Callable[[str], Target], *, default: Sequence[str]
) -> list[Device]:
    """Returns the devices of a choice, first those named by `--on`; if it has none, those of `default`.

    `target_for` returns the target for a device, by the device's name.

    Raises:
        UsageError: there is no such device, it runs another provider, or the file is malformed; `default`, which a
            stranger's bundle may have set, names a device that is not on this machine; or no device takes a setting.
    """
    listed = (*choice.listed, *(() if choice.file is None else read_devices(choice.file)))
    if not choice.names and not listed:
        # The default may come from a bundle: only the user may decide which machines edgekit contacts.
        for name in default:
            if name.partition(":")[0] in REMOTE:
                words = f"the bundle asks to run on {name[:200]!r}, and no bundle may choose that"
                raise UsageError(words, hint="if it is yours, name it: --on")
    names = choice.names if choice.names or listed else default
    found = [_apply_settings(name, target_for, choice.settings) for name in names]
    if choice.settings and not any(takes_settings for _, takes_settings in found):
        named = f"--set {next(iter(choice.settings))}"
        words = f"{named} means nothing for {', '.join(names) or 'these devices'}"
        raise UsageError(words, hint="--on android takes it")
    devices = [device for several, _ in found for device in several]
    for entry in listed:
        several, takes_settings = _apply_settings(entry.device, target_for, entry.settings)
        if entry.settings and not takes_settings:
            words = f"'settings' of device '{entry.name}' mean nothing for '{entry.device}'"
            raise UsageError(words, hint="leave them out")
        given = {"runner": entry.runner, "library": entry.library, "provider": entry.provider}
        stated = {key: value for key, value in given.items() if value is not None}
        changes = {key: value if key == "provider" else Path(value) for key, value in stated.items()}
        if unknown := next((key for key in changes if not hasattr(several[0], key)), None):
            words = f"'{unknown}' of device '{entry.name}' means nothing for '{entry.device}'"
            raise UsageError(words, hint="leave it out")
        devices += [
            NamedDevice(
                # One of several has its CPU in its name.
                label=entry.name if len(several) == 1 else f"{entry.name}:{address_of(device).split(':')[-1]}",
                device=cast("Device", msgspec.structs.replace(cast("msgspec.Struct", device), **changes)),
                timeout_s=entry.timeout_s,
                budget_s=entry.budget_s,
                place=entry.labgrid,
            )
            for device in several
        ]
    return devices


def _apply_settings(
    name: str, target_for: Callable[[str], Target], given: Mapping[str, str]
) -> tuple[Sequence[Device], bool]:
    """Returns a device with settings applied, several if they name several CPUs, and whether it takes any."""
    target = target_for(name)
    device = find_device(name, target)
    found = device.with_settings(given, target)
    return found or (device,), found is not None


def choose_here(recipe: Recipe, *, alone: bool = False) -> Recipe:
    """Returns a recipe with "auto" replaced by the targets of this machine, and with `cpu` set to its CPU architecture.

    With `alone`, "auto" becomes the single target with the longest list of fallbacks: TensorRT rather than CUDA.
    """
    if _AUTO not in recipe.targets:
        return recipe
    targets_here: list[Target] = []
    for target in map(load_target, target_names()):
        # `cpu` runs everywhere, another target where its own provider is installed with hardware for it.
        if target.provider != CPU_PROVIDER:
            device = find_device(target.verification[0].device, target)
            if device.find_missing() is not None:
                continue
            # Simulators and emulators are no hardware of this machine.
            if not (is_accelerated(device.name) if device.name in PROVIDERS else device.evidence is Evidence.DEVICE):
                continue
        targets_here.append(target)
    if alone:
        targets_here = [max(targets_here, key=lambda target: len(target.fallback))]
    found = [target.name for target in targets_here]
    targets = [name for given in recipe.targets for name in (found if given == _AUTO else [given])]
    arch = "arm64" if host_cpu() == "arm" else "x64-vnni" if has_vnni() else "x64"
    settings = {"arch": arch, **recipe.settings} if "cpu" in targets else recipe.settings
    return msgspec.structs.replace(recipe, targets=tuple(dict.fromkeys(targets)), settings=settings)


def load_target_here(name: str, settings: Mapping[str, str] | None = None) -> Target:
    """Returns a target as `load_target` does, or for "auto" the best target of this machine."""
    recipe = choose_here(Recipe(targets=(name,), settings=dict(settings or {})), alone=True)
    return load_targets(recipe)[0] if name == _AUTO else load_target(name, settings)
