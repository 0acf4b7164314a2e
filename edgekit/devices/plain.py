"""The target that a bare model is opened as: that of a device with one provider, else the CPU provider as it is."""

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.target import Session, Target, load_target

_TARGETS = {"qnn-htp-sim": "qnn", "xnnpack-wasm": "xnnpack", "coreml": "coreml"}


def plain_target(kind: str) -> Target:
    """Returns the target that a device of a kind, such as `arm64`, opens a model as when none was named."""
    return load_target(_TARGETS[kind]) if kind in _TARGETS else cpu_target()


def cpu_target() -> Target:
    """Returns the target of a model that is opened on the CPU provider, with no option at all."""
    like = load_target("xnnpack")
    return msgspec.structs.replace(
        like, name="cpu", title="the CPU provider", provider=CPU_PROVIDER, precisions=("fp32",), session=Session()
    )
