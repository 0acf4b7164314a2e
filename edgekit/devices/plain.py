"""The target that a bare model is opened as: that of a device with one provider, else the CPU provider as it is."""

import msgspec

from edgekit.devices.local.provider import PROVIDERS
from edgekit.target import Session, Target, load_target

_TARGETS = {
    "qnn-htp-sim": ("qnn",),
    "android": ("xnnpack", "nnapi"),
    "coreml": ("coreml",),
    "ios-sim": ("coreml",),
    "openvino": ("openvino",),
}


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
