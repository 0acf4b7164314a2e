"""What a session is told beyond what its target asks for, and for which kind of machine that was found to be better."""

import platform
from typing import Annotated

import msgspec

from edgekit._ort import Level
from edgekit.evidence import Evidence
from edgekit.machine import count_cores

_Threads = Annotated[int, msgspec.Meta(ge=0, le=1024)]
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Word = Annotated[str, msgspec.Meta(max_length=200)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]


class SessionSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session is told, and how it is called; each default is ONNX Runtime's own.

    `form` is that of the bundle to load, "" for the manifest's. `threads` and `inter_threads` of 0 let ONNX Runtime
    choose. `config` and `provider_options` are added to those of the target, or take their place.
    """

    form: _Word = ""
    level: Level = Level.ALL
    threads: _Threads = 0
    inter_threads: _Threads = 0
    parallel: bool = False
    arena: bool = True
    memory_pattern: bool = True
    io_binding: bool = False
    concurrency: _AtLeastOne = 1
    config: dict[str, str] = {}
    provider_options: dict[str, str] = {}


class MachineClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines for which a setting holds: what a loader can find out of its own without asking anyone.

    `system` and `machine` are those of `uname`, in lower case; `cores` are those that the process may use, 0 for any.
    """

    system: _Word
    machine: _Word
    cores: _Threads = 0

    def holds(self, other: "MachineClass") -> bool:
        """Returns True if a machine of this class is `other`."""
        same = (self.system, self.machine) == (other.system, other.machine)
        return same and self.cores in {0, other.cores}


class TuningEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a setting is there: how many times the cost of the defaults it has, with 95 %, in so many fresh rounds."""

    goal: _Word
    device: _Word
    evidence: Evidence
    ratio: _Positive
    interval: tuple[_Positive, _Positive]
    rounds: int
    changes: tuple[_Word, ...]
    versions: dict[str, str]


class TunedSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting, the machines that it is for, and the evidence."""

    machine: MachineClass
    setting: SessionSetting
    evidence: TuningEvidence


def class_of_this_machine() -> MachineClass:
    """Returns the class of the machine that runs this."""
    return MachineClass(system=platform.system().lower(), machine=platform.machine().lower(), cores=count_cores())
