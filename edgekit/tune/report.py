"""What a search found: each decision with its interval, what was measured of each setting, and what is proven."""

import msgspec

from edgekit.bench.latency import Ratio
from edgekit.bundle.manifest import MachineClass, SessionSetting
from edgekit.evidence import Evidence
from edgekit.tune.space import Goal


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a setting: a session made, warmed up and run; times in milliseconds.

    `pace_ms` is the time after which one more sample is done. `sqnr_db` says how far the outputs lie from the
    reference, None where they hold no numbers. `fault` says why the setting is out: it failed, or its outputs differ.
    """

    median_ms: float = 0.0
    p99_ms: float = 0.0
    pace_ms: float = 0.0
    load_ms: float = 0.0
    first_ms: float = 0.0
    peak_rss_bytes: int = 0
    runs: int = 0
    sqnr_db: float | None = None
    fault: str | None = None


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in the race: what is different from the defaults, with which file and batch."""

    name: str
    setting: SessionSetting = SessionSetting()
    file: str = ""
    batch: int = 1


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a race: the last challenger, how it compares with the holder, whether it was taken, and why.

    `ratio` is the cost of the challenger over that of the holder, from fresh rounds that chose nothing; None where it
    did not come to them. `screened` are the ratios by which the others were dropped: they prove nothing.
    """

    group: str
    holder: str
    challenger: str = ""
    ratio: Ratio | None = None
    taken: bool = False
    reason: str = ""
    screened: dict[str, float] = {}


class TriedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting over all of its measurements: medians, and on which front it lies.

    `pareto` is true where no other setting is at least as good in latency, memory and accuracy, and better in one.
    """

    entrant: Entrant
    measurements: int
    median_ms: float = 0.0
    p99_ms: float = 0.0
    throughput_per_s: float = 0.0
    load_ms: float = 0.0
    first_ms: float = 0.0
    peak_rss_bytes: int = 0
    sqnr_db: float | None = None
    fault: str | None = None
    pareto: bool = False


class LevelRow(msgspec.Struct, frozen=True, kw_only=True):
    """An optimization level: the nodes that ONNX Runtime leaves, those it fused, and what loading and a run take.

    `nodes` is None where the graph cannot be written: a file of ORT format, or another provider than the CPU's.
    """

    level: str
    nodes: int | None = None
    fused: dict[str, int] = {}
    load_ms: float | None = None
    median_ms: float | None = None


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found on a device.

    `chosen` are the settings that were decided for; `final` compares them with the defaults in fresh rounds: where its
    interval does not lie below 1 nothing is claimed, and `chosen` are the defaults. `seconds` of `budget_s` is the time
    of all measurements, also of those of a run before that was cut off. `busy` is how many programs wanted a
    core before and after, on the average of a minute, None where that is not known. `applied` says what was written
    where.
    """

    subject: str
    device: str
    evidence: Evidence
    provider: str
    goal: Goal
    machine: MachineClass | None = None
    defaults: Entrant
    chosen: Entrant
    final: Ratio | None = None
    decisions: tuple[Decision, ...] = ()
    levels: tuple[LevelRow, ...] = ()
    tried: tuple[TriedSetting, ...] = ()
    seconds: float = 0.0
    budget_s: float = 0.0
    measurements: int = 0
    busy: tuple[float, float] | None = None
    cores: int = 0
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    applied: str = ""
