"""Times as tables, time series and pages: benchmarks, searches for settings, and forecasts with their intervals."""

import math
from collections.abc import Iterator, Mapping
from itertools import groupby

import msgspec
from rich.table import Table
from rich.text import Text

from edgekit.bench.bench import BenchReport
from edgekit.bench.latency import Ratio
from edgekit.bundle.manifest import SessionSetting
from edgekit.check.report import count_of
from edgekit.evidence import Evidence
from edgekit.forecasts.forecast import BITS, DeviceForecast, ForecastReport
from edgekit.forecasts.model import Bits
from edgekit.report.pages import Chart, LogAxis, Mark
from edgekit.report.tables import format_bytes, format_count, format_sqnr, make_table
from edgekit.tune.race import Entrant
from edgekit.tune.space import PROVIDER_OPTIONS, Goal
from edgekit.tune.tune import TuneReport


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
        settings = f"batch {run.batch}, {run.concurrency} at once" + (", IO binding" if run.io_binding else "")
        settings += f", queue {run.queue}" if run.queue else ""
        low, high = run.interval_ms
        figures = (
            ("median", "ms", run.median_ms, f"± {(high - low) / 2:.3g}"),
            ("p99", "ms", run.p99_ms, ""),
            ("load", "ms", run.load_ms, ""),
            ("memory", "MB", run.peak_rss_bytes / 1e6, ""),
        )
        extra = f"{run.iterations} runs, {run.evidence.value}, {run.provider}"
        for figure, unit, value, spread in figures:
            name = f"{report.subject} on {run.device}, {settings}: {figure}"
            points.append(SeriesPoint(name=name, unit=unit, value=value, range=spread, extra=extra))
    return tuple(points)


_BAD, _UNKNOWN = "red", "yellow"
_NOTHING = ("-",) * 7
_HEADINGS = {"batch": "batch", "concurrency": "at once", "queue": "queue", "execution": "execution"}


def table_bench(report: BenchReport) -> Table:
    """Returns the times as a table: a row for each device."""
    # The mean is left out, because a single pause of the system changes it.
    varying = [column for column in _HEADINGS if any(getattr(run, column) not in {1, ""} for run in report.runs)]
    columns = ["p50 (95 %)", "p95", "p99", "per second", "runs", "load", "first", "memory"]
    table = make_table("device", "evidence", "provider", *(_HEADINGS[settings] for settings in varying), *columns)
    for run in report.runs:
        settings = [str(getattr(run, column)) for column in varying]
        if run.failure is not None:
            table.add_row(run.device, run.evidence.value, run.provider, *settings, Text("failed", _BAD), *_NOTHING)
            continue
        low, high = run.interval_ms
        median = f"{run.median_ms:.3g} ms ({low:.3g} to {high:.3g})"
        times = (median, *(f"{ms:.3g} ms" for ms in (run.p95_ms, run.p99_ms)))
        rates = (f"{run.throughput_per_s:.3g}", str(run.iterations))
        starts = (f"{run.load_ms:.0f} ms", f"{run.first_ms:.3g} ms", f"{run.peak_rss_bytes / 1e6:.0f} MB")
        provider = run.provider.removesuffix("ExecutionProvider")
        table.add_row(run.device, run.evidence.value, provider, *settings, *times, *rates, *starts)
    for skip in report.skipped:
        table.add_row(skip.device, "-", "-", *("-" for _ in varying), Text("skipped", _UNKNOWN), *_NOTHING)
    return table


def list_bench_remarks(report: BenchReport) -> Iterator[str]:
    """Yields each comparison, failure, warning and skipped device."""
    for found in report.comparisons:
        if found.ratio is None:
            yield f"{found.device}: no comparison: {found.failure}"
            continue
        low, high = found.ratio.interval
        longer = f"{found.ratio.value:.3f} times as long as A ({found.a}), 95 % between {low:.3f} and {high:.3f}"
        times = f"{found.b_median_ms:.3g} ms and {found.a_median_ms:.3g} ms, {found.ratio.rounds} rounds"
        takes = f"B ({found.b}) takes {longer} ({times})"
        yield f"{found.device} ({found.evidence.value}): {found.ratio.verdict}; {takes}"
    yield from (f"slower: {line}" for line in report.regressions)
    yield from report.notes
    for run in report.runs:
        if run.failure is not None:
            yield f"{run.device} failed: {run.failure}"
        yield from (f"{run.device}: {warning}" for warning in run.warnings)
    yield from map(str, report.skipped)


_MEANINGS: Mapping[Goal, str] = {
    "latency": "median time of a run",
    "p99": "99th percentile of a run's time",
    "throughput": "time from one sample done to the next",
    "memory": "peak memory of the process",
    "load": "time to make the session and run it once",
}
_DEFAULT = SessionSetting()
# A simulator of an accelerator runs on the CPU: options for the accelerator's clock have no effect there.
_CLOCKLESS = frozenset({Evidence.SIMULATOR})
# If more than this share of the cores is busy, other programs slow down what is measured.
_MAX_LOAD = 0.5
# From this share on, the budget counts as used up.
_BUDGET_USED = 0.9


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


def list_tables(report: TuneReport) -> Iterator[Table]:
    """Yields two tables: the races, and every setting that was measured.

    A race has its last challenger, the cost of that, and why it was taken or not.
    """
    table = make_table("race", "last challenger", "cost", "taken", "why")
    for race in report.decisions:
        cost = "-" if race.ratio is None else f"{race.ratio.value:.3f}"
        taken = Text("yes", "green") if race.taken else "no"
        table.add_row(race.group, race.challenger or "-", cost, taken, race.reason)
    yield table
    table = make_table("setting", "p50", "p99", "per second", "load", "first", "memory", "SQNR", "times")
    for one in report.tried:
        name = one.entrant.name
        if one.fault is not None:
            table.add_row(name, Text(one.fault, "red"), *("-" for _ in range(6)), str(one.measurements))
            continue
        times = f"{one.median_ms:.3g} ms", f"{one.p99_ms:.3g} ms", f"{one.throughput_per_s:.3g}"
        starts = f"{one.load_ms:.0f} ms", f"{one.first_ms:.3g} ms", format_bytes(one.peak_rss_bytes)
        table.add_row(name, *times, *starts, format_sqnr(one.sqnr_db), str(one.measurements))
    yield table


def describe_setting(entrant: Entrant) -> Iterator[str]:
    """Yields the settings that differ from the defaults, by the names of ONNX Runtime's options."""
    setting = entrant.setting
    settings = {
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
    yield from (f"{name} = {value}" for name, (value, default) in settings.items() if value != default)
    yield from (f"{key} = {value}" for key, value in {**setting.config, **setting.provider_options}.items())


def list_tuning_remarks(report: TuneReport) -> Iterator[str]:
    """Yields the settings, and how reliable the result is: evidence, load, time; at the end what was written."""
    if report.chosen != report.defaults:
        yield f"settings: {'; '.join(describe_setting(report.chosen))}"
    yield from report.notes
    if report.evidence is not Evidence.DEVICE:
        yield f"these are not the target's times ({report.evidence.value}: {report.evidence.meaning})"
    if report.evidence in _CLOCKLESS and any(one.group == PROVIDER_OPTIONS for one in report.decisions):
        clock = "but has no clock of its own: a device may gain by them"
        yield f"{report.device} takes the options of {report.provider} {clock}"
    yield from (f"{one.group}: {one.reason}" for one in report.decisions if "is out:" in one.reason)
    if report.busy is not None:
        before, after = report.busy
        yield f"load average on {report.cores or '?'} cores: {before:.1f} before, {after:.1f} after"
        if report.cores and before > _MAX_LOAD * report.cores:
            idle = "on an idle machine more threads or spinning may be faster"
            yield f"other programs used this machine: the ratios hold under that load, and {idle}"
    rest = "" if report.seconds > _BUDGET_USED * report.budget_s else ": every race was decided before"
    if rest and any("time was over" in one.reason for one in report.decisions):
        rest = ": the remaining time is too short for another round and the final comparison"
    used = f"{report.seconds:.0f} of {report.budget_s:.0f} s"
    yield f"{report.measurements} sessions were measured in {used}{rest}"
    if report.applied:
        yield f"written: {report.applied}"


# Forecasts that differ by less than this factor count as equal, as measured pairs do in the table's `faster`.
_EQUAL_FACTOR = 1.1


def headline_forecast(report: ForecastReport) -> str:
    """Returns what was forecast and how good the forecast is, in one line."""
    work = f"{format_count(report.macs)} multiply-accumulates, {format_count(report.weights)} weights"
    ground = f"{report.evidence}: estimated from other networks, nothing ran"
    return f"{report.model}: {work}, {report.nodes} operators; {ground}"


def table_forecast(report: ForecastReport) -> Table:
    """Returns the devices as a table: time with 80 % interval, nodes left to the CPU, memory, similar networks."""
    columns = ("device", "SoC", "precision", "ms", "80 % between", "on the CPU", "memory MB", "most like it (ms)")
    table = make_table(*columns)
    before = ""
    for row in report.rows:
        name = "" if row.device == before else row.device
        before = row.device
        soc = "" if row.soc_model is None or not name else f"{row.soc_model} v{row.htp}"
        table.add_row(
            name, soc, row.precision, describe_time(row), describe_interval(row), describe_cpu(row),
            "-" if row.memory_mb is None else f"{row.memory_mb:.0f} ({row.low_mb:.0f} to {row.high_mb:.0f})",
            ", ".join(f"{near.network} {near.ms:.3g}" for near in row.nearest[:2]),
        )  # fmt: skip
    return table


def describe_time(row: DeviceForecast) -> str:
    """Returns the milliseconds with the basis of the figure, or why there is no forecast."""
    if row.ms is None:
        return row.note
    words = {"compiled": " (compiled)", "measured": " (given)", "recalibrated": " (moved)", "scaled": " (scaled)"}
    return f"{row.ms:.3g}{words.get(row.basis, '')}"


def describe_interval(row: DeviceForecast) -> str:
    """Returns the 80 % interval."""
    return "-" if row.low_ms is None or row.high_ms is None else f"{row.low_ms:.3g} to {row.high_ms:.3g}"


def describe_cpu(row: DeviceForecast) -> str:
    """Returns the number of nodes that the rules leave to the CPU, their operators, and the bytes that cross over."""
    if (placing := row.placing) is None:
        return "all"
    if not placing.left:
        return "none, in one partition" if placing.partitions == 1 else f"none, in {placing.partitions} partitions"
    ops = ", ".join(f"{count} {op}" for op, count in list(placing.cpu_ops.items())[:3])
    crossing = f"{format_bytes(placing.crossing_bytes)} between"
    return f"{placing.left} of {placing.nodes} in {count_of(placing.partitions, 'partition')}, {crossing}: {ops}"


def describe_forecast(report: ForecastReport) -> str:
    """Returns the forecast of each device in one line, and which devices miss the limit."""
    texts: list[str] = []
    for row in report.rows:
        time = "" if row.ms is None else f"{row.precision} {row.ms:.3g} ms ({describe_interval(row)})"
        texts.append(f"{row.device} {time or row.note}")
    limit = "" if report.max_ms is None else f"; at most {report.max_ms:g} ms: {report.verdict}"
    return f"forecast, nothing ran there: {'; '.join(texts)}{limit}"


def list_forecast_remarks(report: ForecastReport) -> Iterator[str]:
    """Yields a line for each remark: the fastest precision, why nodes stay on the CPU, the source of the figures."""
    found: dict[str, list[str]] = {}
    for device in dict.fromkeys(row.device for row in report.rows):
        forecast = (row for row in report.rows if row.device == device and row.ms is not None)
        rows: dict[Bits, DeviceForecast] = {row.precision: row for row in forecast}
        if len(rows) > 1:
            # Forecasts of two precisions are too uncertain to compare, unless they come from times of this network.
            is_measured = all(row.basis in {"measured", "recalibrated"} for row in rows.values())
            times = {bits: row.ms for bits, row in rows.items() if row.ms is not None}
            fastest_ms = min(times.values())
            # The fastest precision, with those that are slower by less than a tenth.
            same = [bits for bits in BITS if bits in times and times[bits] <= fastest_ms * _EQUAL_FACTOR]
            if not is_measured:
                # The precision that was the fastest for most networks that were measured in several precisions.
                faster = {bits: {other: report.faster[bits][other] for other in rows if other != bits} for bits in rows}
                best = max(rows, key=lambda bits: min(faster[bits].values()))
                shares = ", ".join(f"{share:.0%} against {other}" for other, share in faster[best].items())
                answer = f"{best} forecast to be the fastest, as it was in most measured pairs ({shares})"
                if fastest_ms < times[best]:
                    answer += ", although the uncertain times above say otherwise"
            elif same == ["float"]:
                answer = "float is forecast to be the fastest, so quantizing would cost time"
            elif "float" in same:
                answer = "quantizing is forecast to gain less than a tenth"
            else:
                answer = f"{' and '.join(same)} forecast to be the fastest"
            found.setdefault(answer, []).append(device)
    yield from (f"{answer}: {', '.join(devices)}" for answer, devices in found.items())
    reasons = dict.fromkeys(reason for row in report.rows if row.placing for reason in row.placing.reasons)
    yield from (f"left to the CPU: {reason}" for reason in list(reasons)[:5])
    yield from report.remarks
    if report.max_ms is not None:
        if report.too_slow:
            yield f"slower than {report.max_ms:g} ms: {', '.join(report.too_slow)}"
        if report.unproven:
            yield f"not proven to keep {report.max_ms:g} ms: {', '.join(report.unproven)}"
    yield f"the figures come from {report.ground}"


_LEFT, _RIGHT, _TOP, _ROW, _GAP = 250.0, 985.0, 30.0, 15.0, 9.0


def draw_devices(report: ForecastReport) -> Chart | None:
    """Returns the chart of a forecast, None if nothing was forecast; the time axis is logarithmic.

    Each device has, for each precision, a bar for the interval and a dot for the time.
    """
    shown = [row for row in report.rows if row.ms is not None and row.low_ms is not None and row.high_ms is not None]
    if not shown:
        return None
    axis = LogAxis.fit([end for row in shown for end in (row.low_ms, row.high_ms) if end], _LEFT, _RIGHT)
    marks: list[Mark] = []
    y = _TOP
    for device, rows in groupby(shown, key=lambda row: row.device):
        begin = y
        for row in rows:
            ms = row.ms or 0.0
            low, high = axis.place(row.low_ms or ms), axis.place(row.high_ms or ms)
            title = f"{device}, {row.precision}: {describe_time(row)} ms, 80 % between {describe_interval(row)} ms"
            marks.append(Mark(x=low, y=y, width=round(high - low, 1), kind=f"bar {row.precision}", title=title))
            marks.append(Mark(x=axis.place(ms), y=y, radius=5, kind=row.precision, title=title))
            y += _ROW
        marks.append(Mark(x=_LEFT - 10, y=round((begin + y - _ROW) / 2 + 4, 1), label=device))
        y += _GAP
    limit = report.max_ms
    if limit and axis.low <= math.log10(limit) <= axis.high:
        title = f"{limit} ms at most"
        marks.append(Mark(x=axis.place(limit), y=12, height=y - 10, kind="limit", title=title))
    return Chart(marks=tuple(marks), columns=axis.ticks, edges=(0, 1000, 18, y + 2), height=y + 26)
