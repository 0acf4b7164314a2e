"""Times in readable form: benchmarks, profiles and searches for settings as tables and series."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.table import Table
from rich.text import Text

from edgekit._ort import CPU_PROVIDER
from edgekit.bench.latency import Ratio
from edgekit.bench.report import BenchReport, Comparison
from edgekit.bundle.manifest import SessionSetting
from edgekit.evidence import Evidence
from edgekit.profile.report import Cause, DeviceProfile, NodeTime, ProfileComparison, ProfileReport
from edgekit.report.tables import format_bytes, format_count, format_or_dash, make_table
from edgekit.tune.report import Entrant, TriedSetting, TuneReport
from edgekit.tune.space import PROVIDER_OPTIONS, Goal


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point of a time series in which smaller values are better.

    The keys are those of `customSmallerIsBetter` of https://github.com/benchmark-action/github-action-benchmark.
    """

    name: str
    unit: str
    value: float
    range: str = ""
    extra: str = ""


def list_series(report: BenchReport) -> tuple[SeriesPoint, ...]:
    """Returns a point for each figure of each run that did not fail."""
    points: list[SeriesPoint] = []
    for run in (run for run in report.runs if run.failure is None):
        way = f"batch {run.batch}, {run.concurrency} at once" + (", IO binding" if run.io_binding else "")
        way += f", queue {run.queue}" if run.queue else ""
        low, high = run.interval_ms
        figures = (
            ("median", "ms", run.median_ms, f"± {(high - low) / 2:.3g}"),
            ("p99", "ms", run.p99_ms, ""),
            ("load", "ms", run.load_ms, ""),
            ("memory", "MB", run.peak_rss_bytes / 1e6, ""),
        )
        extra = f"{run.iterations} runs, {run.evidence.value}, {run.provider}"
        for figure, unit, value, spread in figures:
            name = f"{report.subject} on {run.device}, {way}: {figure}"
            points.append(SeriesPoint(name=name, unit=unit, value=value, range=spread, extra=extra))
    return tuple(points)


_BAD, _UNKNOWN = "red", "yellow"
_NOTHING = ("-",) * 7
_HEADINGS = {"batch": "batch", "concurrency": "at once", "queue": "queue", "execution": "execution"}


def table_bench(report: BenchReport) -> Table:
    """Returns the times as a table: a row for each device."""
    # No mean: a single pause of the system changes it, but not the median.
    ways = [column for column in _HEADINGS if any(getattr(run, column) not in {1, ""} for run in report.runs)]
    columns = ["p50", "p95", "p99", "per second", "runs", "load", "first", "memory"]
    table = make_table("device", "evidence", "provider", *(_HEADINGS[way] for way in ways), *columns)
    for run in report.runs:
        way = [str(getattr(run, column)) for column in ways]
        if run.failure is not None:
            table.add_row(run.device, run.evidence.value, run.provider, *way, Text("failed", _BAD), *_NOTHING)
            continue
        table.add_row(
            run.device,
            run.evidence.value,
            run.provider.removesuffix("ExecutionProvider"),
            *way,
            f"{run.median_ms:.3g} ms",
            f"{run.p95_ms:.3g} ms",
            f"{run.p99_ms:.3g} ms",
            f"{run.throughput_per_s:.3g}",
            str(run.iterations),
            f"{run.load_ms:.0f} ms",
            f"{run.first_ms:.3g} ms",
            f"{run.peak_rss_bytes / 1e6:.0f} MB",
        )
    for skip in report.skipped:
        table.add_row(skip.device, "-", "-", *("-" for _ in ways), Text("skipped", _UNKNOWN), *_NOTHING)
    return table


def list_bench_remarks(report: BenchReport) -> Iterator[str]:
    """Yields each comparison, each failure, how reliable the times are, and each device that is missing."""
    yield from map(describe_comparison, report.comparisons)
    yield from (f"slower: {line}" for line in report.regressions)
    yield from report.notes
    for run in report.runs:
        if run.failure is not None:
            yield f"{run.device} failed: {run.failure}"
        if run.energy_mj is not None:
            yield f"{run.device}: {run.energy_mj:.3g} mJ a sample by the processor's counters, with all that ran on it"
        yield from (f"{run.device}: {warning}" for warning in run.warnings)
    yield from map(str, report.skipped)


def describe_comparison(found: Comparison) -> str:
    """Returns how B compares with A on a device, in one line."""
    if found.ratio is None:
        return f"{found.device}: no comparison: {found.failure}"
    low, high = found.ratio.interval
    return (
        f"{found.device} ({found.evidence.value}): {found.ratio.verdict}; B ({found.b}) takes"
        f" {found.ratio.value:.3f} times as long as A ({found.a}), 95 % between {low:.3f} and {high:.3f}"
        f" ({found.b_median_ms:.3g} ms and {found.a_median_ms:.3g} ms, {found.ratio.rounds} rounds)"
    )


_MOST_TEXT = 60
# Smaller shares of a run are not mentioned.
_TELLING = 0.005


def headline_profile(profile: DeviceProfile) -> str:
    """Returns the result of a profile in one line."""
    if profile.failure is not None:
        return f"{profile.subject} on {profile.device} failed: {profile.failure}"
    cost = ""
    if profile.overhead is not None:
        low, high = profile.overhead.interval
        cost = (
            f"; with the profiler a run takes {profile.overhead.value:.2f} times that (95 %: {low:.2f} to {high:.2f})"
        )
    return (
        f"{profile.subject} on {profile.device}: {profile.plain_ms:.3g} ms a run{cost}; {len(profile.nodes)} kernels"
        f" make {profile.covered:.1%} of {profile.run_ms:.3g} ms in {profile.runs} runs"
        + (f", the profiler between them {profile.recording:.1%}" if profile.recording >= _TELLING else "")
    )


def table_operators(profile: DeviceProfile, most: int) -> Table:
    """Returns the operators as a table, the most expensive first."""
    rows = (
        (
            one.op,
            short_provider(one.provider),
            str(one.nodes),
            f"{one.calls:g}",
            f"{one.self_ms:.3g} ms",
            f"{one.average_ms:.3g} ms",
            f"{one.max_ms:.3g} ms",
            f"{one.share:.1%}",
            _rate(one.macs, one.self_ms),
            _rate(one.bytes, one.self_ms),
        )
        for one in profile.operators[:most]
    )
    columns = ("operator", "provider", "nodes", "calls", "total", "average", "maximum", "share", "GMAC/s", "GB/s")
    return make_table(*columns, rows=rows)


def table_memory(profile: DeviceProfile) -> Table:
    """Returns the memory of the process after each phase, with and without the arena, and the memory of the arena."""
    rows: list[tuple[str, ...]] = []
    for one in profile.memory:
        bare = (one.bare_bytes, one.bare_peak_bytes, one.arena_bytes, one.arena_peak_bytes)
        known = ("-" if size is None else format_bytes(size) for size in bare)
        rows.append((one.phase, format_bytes(one.resident_bytes), format_bytes(one.peak_bytes), *known))
    columns = ("held", "peak", "held without arena", "peak without arena", "arena holds", "most in use there")
    return make_table("memory behind", *columns, rows=rows)


def table_npu(profile: DeviceProfile, most: int) -> Table:
    """Returns the most expensive operations of the graph that was given to an NPU, as a table."""
    rows = (
        (shorten(one.name), shorten(one.source) or "-", f"{one.cycles:.0f}", f"{one.share:.1%}", f"{one.spread:.0%}")
        for one in profile.npu[:most]
    )
    return make_table("inside the NPU's graph", "node", "cycles", "share", "runs apart by", rows=rows)


def table_nodes(profile: DeviceProfile, most: int) -> Table:
    """Returns the most expensive kernels as a table."""
    rows = (
        (
            shorten(node.source or node.name),
            node.op,
            f"{node.self_ms:.3g} ms",
            f"{node.share:.1%}",
            format_count(node.macs) if node.macs else "-",
            format_bytes(node.bytes),
            f"{node.gmacs_per_s:.3g}" if node.macs else "-",
            f"{node.gbytes_per_s:.3g}",
            "-" if node.roof_share is None else f"{min(node.roof_share, 1):.0%} {node.bound}",
            f"{describe_shapes(node.inputs)} -> {describe_shapes(node.outputs)}",
        )
        for node in rank_nodes(profile)[:most]
    )
    columns = ("node", "operator", "self", "share", "MACs", "bytes", "GMAC/s", "GB/s", "of the roof", "shapes")
    return make_table(*columns, rows=rows)


def rank_nodes(profile: DeviceProfile) -> list[NodeTime]:
    """Returns the kernels, the most expensive first."""
    return sorted(profile.nodes, key=lambda node: -node.self_ms)


def list_profile_remarks(profile: DeviceProfile) -> Iterator[str]:
    """Yields overheads, what the machine reaches, what would help, and how reliable the figures are."""
    # The cost of conversions and copies, which are no part of the model's formulas: a line for each kind.
    copies = "copies between providers"
    if profile.provider != CPU_PROVIDER and all(one.kind != copies for one in profile.unasked):
        yield f"{copies}: none (no Memcpy kernel ran)"
    for one in profile.unasked:
        inserted = f", {one.inserted} of them put in by ONNX Runtime" if one.inserted else ""
        yield f"{one.kind}: {one.self_ms:.3g} ms ({one.share:.1%}) in {one.nodes} kernels{inserted}"
    if profile.roof is not None:
        roof = profile.roof
        yield (
            f"{profile.device} reaches {roof.float_gmacs:.3g} GMAC/s in float32, {roof.integer_gmacs:.3g} in 8 bits,"
            f" {roof.gbytes:.3g} GB/s from memory and {roof.cache_gbytes:.3g} GB/s from a cache"
            " (a probe, measured once)"
        )
    yield from (f"would help: {describe_cause(cause)}" for cause in profile.advice)
    yield from profile.warnings


def describe_profiles(found: ProfileComparison) -> str:
    """Returns in one line which of two profiles is slower, and how certain that is."""
    times = f"A ({found.a}) {found.a_ms:.3g} ms, B ({found.b}) {found.b_ms:.3g} ms"
    if found.ratio is not None:
        low, high = found.ratio.interval
        times += f"; B takes {found.ratio.value:.3f} times as long, 95 % between {low:.3f} and {high:.3f}"
    if not found.slower:
        return f"no difference can be told: {times}" + ("; what costs the integers:" if found.causes else "")
    slow = found.a if found.slower == "a" else found.b
    return f"{slow} is slower: {times}{'; because' if found.causes else ''}"


def describe_cause(cause: Cause) -> str:
    """Returns a cause with its milliseconds and its remedy."""
    return f"{cause.message} [{cause.milliseconds:+.3g} ms]" + (f"; {cause.advice}" if cause.advice else "")


def table_pairs(found: ProfileComparison, most: int) -> Table:
    """Returns the layers whose times differ most as a table."""
    rows = (
        (
            shorten(pair.tensor),
            f"{pair.a_ms:.3g} ms",
            f"{pair.b_ms:.3g} ms",
            f"{pair.b_ms - pair.a_ms:+.3g} ms",
            *(", ".join(side) or "-" for side in (pair.a_ops, pair.b_ops)),
        )
        for pair in sorted(found.pairs, key=lambda pair: -abs(pair.b_ms - pair.a_ms))[:most]
    )
    return make_table("value", "A", "B", "B - A", "kernels of A", "kernels of B", rows=rows)


def list_report_remarks(report: ProfileReport) -> Iterator[str]:
    """Yields what was assumed, and each device that is missing."""
    yield from report.notes
    yield from map(str, report.skipped)


def describe_shapes(shapes: Sequence[str]) -> str:
    """Returns the shapes of a kernel's data without those of scalars, such as scales and zero points."""
    return " ".join(shape for shape in shapes if not shape.endswith("[]")) or "-"


def short_provider(provider: str) -> str:
    """Returns a provider's name without the common ending."""
    return provider.removesuffix("ExecutionProvider")


def shorten(name: str) -> str:
    """Returns the end of a long name: exporters put the path first, and the part that tells nodes apart last."""
    return name if len(name) <= _MOST_TEXT else f"...{name[-_MOST_TEXT:]}"


def _rate(count: int, milliseconds: float) -> str:
    return f"{count / milliseconds / 1e6:.3g}" if count and milliseconds > 0 else "-"


_MEANINGS: Mapping[Goal, str] = {
    "latency": "median time of a run",
    "p99": "99th percentile of a run's time",
    "throughput": "time from one sample done to the next",
    "memory": "peak memory of the process",
    "load": "time to make the session and run it once",
}
_DEFAULT = SessionSetting()
# A simulator of an accelerator runs on the CPU: options for the accelerator's clock change nothing there.
_CLOCKLESS = frozenset({Evidence.SIMULATOR})
# If more than this share of the cores is busy, other programs slow down what is measured.
_BUSY = 0.5
# A budget counts as used up from this share on.
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
    """Returns as a table what each optimization level makes of the graph."""
    rows = (
        (
            row.level,
            format_or_dash(row.nodes, "{}"),
            describe_fused(row.fused),
            format_or_dash(row.load_ms, "{:.0f} ms"),
            format_or_dash(row.median_ms, "{:.3g} ms"),
        )
        for row in report.levels
    )
    return make_table("level", "nodes", "fused", "load", "p50", rows=rows)


def describe_fused(fused: Mapping[str, int]) -> str:
    """Returns the operators of ONNX Runtime's own in the optimized graph, with their counts."""
    return ", ".join(f"{count} {op}" for op, count in fused.items()) or "-"


def table_decisions(report: TuneReport) -> Table:
    """Returns each race as a table: the last challenger, its cost, and why it was taken or not."""
    rows = (
        (
            one.group,
            one.challenger or "-",
            "-" if one.ratio is None else f"{one.ratio.value:.3f}",
            Text("yes", "green") if one.taken else "no",
            one.reason,
        )
        for one in report.decisions
    )
    return make_table("race", "last challenger", "cost", "taken", "why", rows=rows)


def table_tried(report: TuneReport) -> Table:
    """Returns every measured setting as a table; a star marks those on the Pareto front."""
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
    """Returns how close the outputs are to the reference."""
    return "-" if one.sqnr_db is None else "equal" if one.sqnr_db >= 200 else f"{one.sqnr_db:.1f} dB"


def describe_setting(entrant: Entrant) -> Iterator[str]:
    """Yields the settings that differ from the defaults, by the names of ONNX Runtime's options."""
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


def list_tuning_remarks(report: TuneReport) -> Iterator[str]:
    """Yields the settings, and how reliable the result is: evidence, load, time; at the end what was written."""
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
    yield from (f"{one.group}: {one.reason}" for one in report.decisions if "is out:" in one.reason)
    if report.busy is not None:
        before, after = report.busy
        yield f"programs that wanted one of {report.cores or '?'} cores: {before:.1f} before, {after:.1f} after"
        if report.cores and before > _BUSY * report.cores:
            yield (
                "others used this machine: ratios hold for it as it was, and more threads or spinning may pay on a"
                " quiet one"
            )
    rest = "" if report.seconds > _USED * report.budget_s else ": every race was decided before"
    if rest and any("time was over" in one.reason for one in report.decisions):
        rest = ": what is left is less than another round, with what the last comparison needs, would take"
    used = f"{report.seconds:.0f} of {report.budget_s:.0f} s"
    yield f"{report.measurements} sessions were measured in {used}{rest}"
    if report.applied:
        yield f"written: {report.applied}"
