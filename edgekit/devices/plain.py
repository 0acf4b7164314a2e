"""The target that a bare model is opened as: that of a device with one provider, else the CPU provider as it is."""

import msgspec

from edgekit.target import Session, Target, load_target

_TARGETS = {"qnn-htp-sim": "qnn", "android": "xnnpack", "coreml": "coreml", "ios-sim": "coreml"}


def plain_target(kind: str) -> Target:
    """Returns the target that a device of a kind, such as `arm64`, opens a model as when none was named."""
    return load_target(_TARGETS[kind]) if kind in _TARGETS else cpu_target()


def cpu_target() -> Target:
    """Returns the target `cpu` for a float model that is opened with no option at all."""
    return msgspec.structs.replace(load_target("cpu"), precisions=("fp32",), session=Session())
