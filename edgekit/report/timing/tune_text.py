"""What a search for settings found, as tables and lines for a terminal."""

from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from edgekit.bench.latency import Ratio
from edgekit.bundle.manifest.tuned import SessionSetting
from edgekit.evidence import Evidence
from edgekit.report.tables import format_bytes, make_table
from edgekit.tune.report import Decision, Entrant, TriedSetting, TuneReport
from edgekit.tune.space import PROVIDER_OPTIONS, Goal

_MEANINGS: Mapping[Goal, str] = {
    "latency": "median time of a run",
    "p99": "99th percentile of a run's time",
    "throughput": "time from one sample done to the next",
    "memory": "peak memory of the process",
    "load": "time to make the session and run it once",
}
_DEFAULT = SessionSetting()
# A simulator of an accelerator runs on the CPU: options that say how fast the accelerator is clocked change nothing.
_CLOCKLESS = frozenset({Evidence.SIMULATOR})
# Beyond this share of the cores others take time from what is measured.
_BUSY = 0.5
# A budget of which that much was used is used.
_USED = 0.9


def headline_tuning(report: TuneReport) -> str:
    """Returns in one line what was chosen and what it gains."""
    where = f"{report.subject} on {report.device}, {_MEANINGS[report.goal]}"
    if report.chosen == report.defaults or report.final is None:
        return f"{where}: the defaults stay; nothing is proven to be better"
    return f"{where}: {report.chosen.name}: {describe_ratio(report.final)} that of the defaults"


def describe_ratio(ratio: Ratio) -> str:
    """Returns a ratio with its interval."""
    low, high = ratio.interval
    return f"{ratio.value:.3f} times (95 %: {low:.3f} to {high:.3f}, {ratio.rounds} fresh rounds)"


def table_levels(report: TuneReport) -> Table:
    """Returns what each optimization level makes of the graph."""
    table = make_table("level", "nodes", "fused", "load", "p50")
    for row in report.levels:
        table.add_row(
            row.level,
            "-" if row.nodes is None else str(row.nodes),
            describe_fused(row.fused),
            "-" if row.load_ms is None else f"{row.load_ms:.0f} ms",
            "-" if row.median_ms is None else f"{row.median_ms:.3g} ms",
        )
    return table


def describe_fused(fused: Mapping[str, int]) -> str:
    """Returns the operators that ONNX Runtime made, with their numbers."""
    return ", ".join(f"{count} {op}" for op, count in fused.items()) or "-"


def table_decisions(report: TuneReport) -> Table:
    """Returns each race: who held, who came nearest, and why it was taken or not."""
    table = make_table("race", "last challenger", "cost", "taken", "why")
    for one in report.decisions:
        cost = "-" if one.ratio is None else f"{one.ratio.value:.3f}"
        table.add_row(one.group, one.challenger or "-", cost, Text("yes", "green") if one.taken else "no", one.reason)
    return table


def table_tried(report: TuneReport) -> Table:
    """Returns every setting that was measured, those of the front marked with a star."""
    table = make_table("setting", "p50", "p99", "per second", "load", "first", "memory", "SQNR", "times")
    for one in report.tried:
        name = f"* {one.entrant.name}" if one.pareto else one.entrant.name
        if one.fault is not None:
            table.add_row(name, Text(one.fault, "red"), *("-" for _ in range(6)), str(one.measurements))
            continue
        table.add_row(
            name,
            f"{one.median_ms:.3g} ms",
            f"{one.p99_ms:.3g} ms",
            f"{one.throughput_per_s:.3g}",
            f"{one.load_ms:.0f} ms",
            f"{one.first_ms:.3g} ms",
            format_bytes(one.peak_rss_bytes),
            describe_nearness(one),
            str(one.measurements),
        )
    return table


def describe_nearness(one: TriedSetting) -> str:
    """Returns how near outputs lie to the reference."""
    return "-" if one.sqnr_db is None else "equal" if one.sqnr_db >= 200 else f"{one.sqnr_db:.1f} dB"


def describe_setting(entrant: Entrant) -> Iterator[str]:
    """Yields what is different from the defaults, by the names of ONNX Runtime's options."""
    setting = entrant.setting
    told = {
        "graph_optimization_level": (setting.level.value, _DEFAULT.level.value),
        "intra_op_num_threads": (setting.threads, _DEFAULT.threads),
        "inter_op_num_threads": (setting.inter_threads, _DEFAULT.inter_threads),
        "execution_mode": ("parallel" if setting.parallel else "sequential", "sequential"),
        "enable_cpu_mem_arena": (setting.arena, _DEFAULT.arena),
        "enable_mem_pattern": (setting.memory_pattern, _DEFAULT.memory_pattern),
        "IO binding": (setting.io_binding, _DEFAULT.io_binding),
        "runs at once": (setting.concurrency, _DEFAULT.concurrency),
        "batch": (entrant.batch, 1),
        "file": (entrant.file, ""),
    }
    yield from (f"{name} = {value}" for name, (value, default) in told.items() if value != default)
    yield from (f"{key} = {value}" for key, value in {**setting.config, **setting.provider_options}.items())


def _explain_rest(report: TuneReport) -> str:
    """Returns why time of the budget is left, "" where hardly any is."""
    if report.seconds > _USED * report.budget_s:
        return ""
    if any("time was over" in one.reason for one in report.decisions):
        return ": what is left is less than another round, with what the last comparison needs, would take"
    return ": every race was decided before"


def list_tuning_remarks(report: TuneReport) -> Iterator[str]:
    """Yields what the result is made of and worth: settings, evidence, load, time, and what was written."""
    if report.chosen != report.defaults:
        yield f"settings: {'; '.join(describe_setting(report.chosen))}"
    yield from report.notes
    if report.evidence is not Evidence.DEVICE:
        yield f"these are not the target's times ({report.evidence.value}: {report.evidence.meaning})"
    if report.evidence in _CLOCKLESS and any(one.group == PROVIDER_OPTIONS for one in report.decisions):
        yield (
            f"{report.device} takes the options of {report.provider} and has no clock of its own: that they make no"
            " difference here says nothing of a device"
        )
    yield from (f"{one.group}: {one.reason}" for one in report.decisions if _is_out(one))
    if report.busy is not None:
        before, after = report.busy
        yield f"programs that wanted one of {report.cores or '?'} cores: {before:.1f} before, {after:.1f} after"
        if report.cores and before > _BUSY * report.cores:
            yield (
                "others used this machine: ratios hold for it as it was, and more threads or spinning may pay on a"
                " quiet one"
            )
    used = f"{report.seconds:.0f} of {report.budget_s:.0f} s"
    yield f"{report.measurements} sessions were measured in {used}{_explain_rest(report)}"
    if report.applied:
        yield f"written: {report.applied}"


def _is_out(one: Decision) -> bool:
    return "is out:" in one.reason
