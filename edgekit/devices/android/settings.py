"""What `--set` says of the device `android`: a core, a phone, or what its NNAPI driver takes."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgekit.devices.android.android import NNAPI, X86_64, Android
from edgekit.devices.android.nnapi.driver import read_driver
from edgekit.devices.android.phone import find_core, find_phone
from edgekit.errors import UsageError, suggest_name

SETTINGS = {
    "cpu": "a core of Arm, or several with commas between them: each runs",
    "phone": "a phone of phones.toml: each kind of its cores runs",
    "driver": "a .toml file with what the NNAPI driver refuses",
}
"""The settings of the device, each with what it is."""


def vary_android(device: Android, settings: Mapping[str, str], provider: str) -> tuple[Android, ...]:
    """Returns the device as the settings want it, one for each kind of core that they name.

    Raises:
        UsageError: there is no such setting, core, phone or driver file, or it means nothing for this device or for
            the target's provider.
    """
    for name in settings:
        if name not in SETTINGS:
            raise UsageError(f"device 'android' has no setting '{name}'", hint=suggest_name(name, SETTINGS))
    if "cpu" in settings and "phone" in settings:
        raise UsageError("--set cpu and --set phone both name the CPU", hint="give one of them")
    if device.cpu == X86_64 and (named := next((name for name in ("cpu", "phone") if name in settings), None)):
        raise UsageError(
            f"--set {named} means nothing for '{device.name}'", hint="--on android is the one with a phone"
        )
    if "driver" in settings:
        if provider != NNAPI:
            raise UsageError(f"--set driver means nothing for {provider}", hint="drivers stand behind NNAPI only")
        device = msgspec.structs.replace(device, driver=read_driver(Path(settings["driver"])))
    if "phone" in settings:
        name = settings["phone"]
        return tuple(msgspec.structs.replace(device, phone=name, cpu=core) for core in find_phone(name).cores)
    if "cpu" in settings:
        cores = [core.strip() for core in settings["cpu"].split(",")]
        for core in cores:
            find_core(core)
        return tuple(msgspec.structs.replace(device, cpu=core) for core in dict.fromkeys(cores))
    return (device,)
