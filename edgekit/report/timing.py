"""Benchmarks as a table and as time series."""

from collections.abc import Iterator

import msgspec
from rich.table import Table
from rich.text import Text

from edgekit.bench.bench import BenchReport
from edgekit.bench.blocks import Comparison
from edgekit.report.tables import make_table


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
    columns = ["p50", "p95", "p99", "per second", "runs", "load", "first", "memory"]
    table = make_table("device", "evidence", "provider", *(_HEADINGS[settings] for settings in varying), *columns)
    for run in report.runs:
        settings = [str(getattr(run, column)) for column in varying]
        if run.failure is not None:
            table.add_row(run.device, run.evidence.value, run.provider, *settings, Text("failed", _BAD), *_NOTHING)
            continue
        times = (f"{ms:.3g} ms" for ms in (run.median_ms, run.p95_ms, run.p99_ms))
        rates = (f"{run.throughput_per_s:.3g}", str(run.iterations))
        starts = (f"{run.load_ms:.0f} ms", f"{run.first_ms:.3g} ms", f"{run.peak_rss_bytes / 1e6:.0f} MB")
        provider = run.provider.removesuffix("ExecutionProvider")
        table.add_row(run.device, run.evidence.value, provider, *settings, *times, *rates, *starts)
    for skip in report.skipped:
        table.add_row(skip.device, "-", "-", *("-" for _ in varying), Text("skipped", _UNKNOWN), *_NOTHING)
    return table


def list_bench_remarks(report: BenchReport) -> Iterator[str]:
    """Yields each comparison, failure, warning and skipped device."""
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
    longer = f"{found.ratio.value:.3f} times as long as A ({found.a}), 95 % between {low:.3f} and {high:.3f}"
    times = f"{found.b_median_ms:.3g} ms and {found.a_median_ms:.3g} ms, {found.ratio.rounds} rounds"
    takes = f"B ({found.b}) takes {longer} ({times})"
    return f"{found.device} ({found.evidence.value}): {found.ratio.verdict}; {takes}"
