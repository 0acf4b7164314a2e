"""How good a claim's evidence is."""

import enum


class Evidence(enum.StrEnum):
    """What stood in for the device, best first."""

    DEVICE = "device"
    SIMULATOR = "simulator"
    SAME_BINARY = "same-binary"
    SAME_EP = "same-ep"
    SAME_ARCH = "same-arch"
    EMULATED = "emulated"
    PREDICTED = "predicted"

    @property
    def meaning(self) -> str:
        """What the word stands for."""
        return _MEANINGS[self]

    def is_at_least(self, other: "Evidence") -> bool:
        """Returns True if this evidence is as good as `other` or better."""
        order = list(Evidence)
        return order.index(self) <= order.index(other)


_MEANINGS = {
    Evidence.DEVICE: "ran on the device itself",
    Evidence.SIMULATOR: "ran the vendor's own code on this machine",
    Evidence.SAME_BINARY: "ran the target's provider in the very file that an app links",
    Evidence.SAME_EP: "ran the same execution provider on another CPU",
    Evidence.SAME_ARCH: "ran on the same CPU architecture with another execution provider",
    Evidence.EMULATED: "our arithmetic imitates the target",
    Evidence.PREDICTED: "rules only, nothing ran",
}
