"""The kinds of evidence, from a real device to a forecast, and the three verdicts: pass, fail, not proven."""

import enum
from collections.abc import Iterable
from typing import Literal, Self

import msgspec


class Evidence(enum.StrEnum):
    """What a result is based on, best first."""

    meaning: str  # a description in words

    DEVICE = "device", "ran on the device itself"
    SIMULATOR = "simulator", "ran the vendor's own code on this machine"
    SAME_BINARY = "same-binary", "ran the target's provider in the very file that an app links"
    SAME_EP = "same-ep", "ran the same execution provider on another CPU"
    SAME_ARCH = "same-arch", "ran on the same CPU architecture with another execution provider"
    EMULATED = "emulated", "ran edgekit's emulation of the target's arithmetic"
    PREDICTED = "predicted", "rules only, nothing ran"
    FORECAST = "forecast", "estimated from measured times of other networks on such devices, nothing ran"

    def __new__(cls, value: str, meaning: str = "") -> Self:
        """Returns the member with this value and meaning."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

    @property
    def rank(self) -> int:
        """The position in the order of kinds; the best has 0."""
        return list(Evidence).index(self)

    def is_at_least(self, other: "Evidence") -> bool:
        """Returns True if this evidence is as good as `other` or better."""
        return self.rank <= other.rank


class DeviceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What is reported of one device: `failure` says why there is no result, None if there is one."""

    device: str
    evidence: Evidence
    failure: str | None = None


class SessionReport(DeviceResult, frozen=True, kw_only=True):
    """A report of a session on one device: its provider, the time to create it, and the versions that ran."""

    provider: str
    load_ms: float = 0.0
    versions: dict[str, str] = {}


Verdict = Literal["pass", "fail", "not proven"]


class Judged:
    """Base of reports that have a verdict."""

    __slots__ = ()

    @property
    def verdict(self) -> Verdict:
        """Whether what was tried passes, if that can be decided."""
        raise NotImplementedError

    @property
    def passed(self) -> bool:
        """True if nothing failed and nothing is unproven."""
        return self.verdict == "pass"


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checks against limits, in lines.

    `failures` say which limits are missed, `unproven` which cannot be decided without more samples, labels, or another
    device.
    """

    failures: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The verdict of all checks: a failure counts before what is not proven."""
        return "fail" if self.failures else "not proven" if self.unproven else "pass"


def join_judgements(found: Iterable[Judgement]) -> Judgement:
    """Returns several judgements as one, their lines in order."""
    every = tuple(found)
    return Judgement(
        failures=tuple(line for one in every for line in one.failures),
        unproven=tuple(line for one in every for line in one.unproven),
    )


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the verdict on a whole from those on its parts: a failure counts before what is not proven."""
    found = set(verdicts)
    return "fail" if "fail" in found else "not proven" if "not proven" in found else "pass"
