"""The report of a search: each decision with its interval, the measurements of each setting, and what is proven."""

import msgspec

from edgekit.bench.latency import Ratio
from edgekit.bundle.manifest import MachineClass, SessionSetting
from edgekit.evidence import Evidence
from edgekit.tune.space import Goal


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a setting, in a session of its own, after a warm-up; times in milliseconds.

    `pace_ms` is the typical time from one finished sample to the next. `sqnr_db` is the SQNR of the outputs against the
    reference, None if they are not numeric. `fault` says why the setting is out of the race: it failed, or its outputs
    differ.
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
    """A setting in the race: its differences from the defaults, its file and its batch size."""

    name: str
    setting: SessionSetting = SessionSetting()
    file: str = ""
    batch: int = 1


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a race.

    It tells the last challenger, how that compares with the current setting, whether it replaces it, and why.

    `holder` is the current setting. `ratio` is the challenger's cost divided by the holder's, from fresh rounds that
    were not used to select the challenger; None if there were none. `screened` are the ratios of the selection rounds:
    they prove nothing, because the best was picked by them.
    """

    group: str
    holder: str
    challenger: str = ""
    ratio: Ratio | None = None
    taken: bool = False
    reason: str = ""
    screened: dict[str, float] = {}


class TriedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting with the medians of all its measurements, and whether it is Pareto-optimal.

    `pareto` is true if no other setting is at least as good in latency, memory and accuracy, and better in one of them.
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
    """An optimization level: the number of nodes left, the fused nodes by operator, and the times to load and run.

    `nodes` is None if the optimized graph cannot be written: for ORT format, very large models, or other providers than
    the CPU's.
    """

    level: str
    nodes: int | None = None
    fused: dict[str, int] = {}
    load_ms: float | None = None
    median_ms: float | None = None


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search on a device.

    `chosen` is the resulting setting; `final` compares it with the defaults in fresh rounds. If the interval of `final`
    is not entirely below 1, nothing is claimed, and `chosen` is the defaults. `seconds`, of `budget_s`, is the time of
    all measurements, including those of an earlier, interrupted search that were read back. `busy` is the load average
    over a minute before and after the search, None if not known. `applied` says what was written where.
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
