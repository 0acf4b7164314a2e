"""The targets that fit a device or this machine where the user named none."""

import platform

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.devices.find import find_device
from edgekit.devices.local.offered import PROVIDERS, is_accelerated
from edgekit.evidence import Evidence
from edgekit.machine import VNNI, read_cpu_flags
from edgekit.recipe import Recipe
from edgekit.target import Session, Target, load_target, target_names

_TARGETS = {
    "qnn-htp-sim": ("qnn",),
    "android": ("xnnpack", "nnapi"),
    "coreml": ("coreml",),
    "ios-sim": ("coreml",),
    "openvino": ("openvino",),
}
AUTO = "auto"
"""Stands for the targets whose provider and hardware this machine has."""


def plain_target(device: str) -> Target:
    """Returns the target that a device, such as `arm64` or `host:cuda`, opens a model as when none was named."""
    return serve_targets(device)[0]


def serve_targets(device: str) -> tuple[Target, ...]:
    """Returns a target for each provider that a device serves, the one that is meant when none was named first."""
    kind = device.partition(":")[0]
    names = _TARGETS.get(device) or _TARGETS.get(kind)
    if names is not None:
        return tuple(load_target(name) for name in names)
    row = PROVIDERS.get(device) or PROVIDERS.get(kind)
    # A provider without a target of its own is held to what the CPU provider takes.
    return (cpu_target() if row is None else msgspec.structs.replace(cpu_target(), provider=row.name),)


def cpu_target() -> Target:
    """Returns the target `cpu` for a float model that is opened with no option at all."""
    return msgspec.structs.replace(load_target("cpu"), precisions=("fp32",), session=Session())


def choose_here(recipe: Recipe) -> Recipe:
    """Returns a recipe in which the target "auto" is what this machine runs, and `cpu` is built for its CPU."""
    if AUTO not in recipe.targets:
        return recipe
    here = [name for name in target_names() if _runs_here(load_target(name))]
    targets = [name for given in recipe.targets for name in (here if given == AUTO else [given])]
    settings = {"arch": _name_arch(), **recipe.settings}
    return msgspec.structs.replace(recipe, targets=tuple(dict.fromkeys(targets)), settings=settings)


def _runs_here(target: Target) -> bool:
    """Returns True for `cpu`, and for a target whose own provider is installed here with hardware to compute on."""
    if target.provider == CPU_PROVIDER:
        return True
    device = find_device(target.verification[0].device, target)
    if device.find_missing() is not None:
        return False
    # Simulators and emulators are no hardware of this machine.
    return is_accelerated(device.name) if device.name in PROVIDERS else device.evidence is Evidence.DEVICE


def _name_arch() -> str:
    """Returns the value of `arch` of the target `cpu` that this machine's CPU is."""
    if platform.machine().lower() in {"arm64", "aarch64"}:
        return "arm64"
    return "x64-vnni" if VNNI.search(read_cpu_flags()) else "x64"
