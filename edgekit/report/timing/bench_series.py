"""Benchmarks as the series of numbers that dashboards take."""

from collections.abc import Iterator

import msgspec

from edgekit.bench.report import BenchReport, BenchRun


class SeriesPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A number of a series whose smaller values are better.

    The keys are those of `customSmallerIsBetter` of https://github.com/benchmark-action/github-action-benchmark.
    """

    name: str
    unit: str
    value: float
    range: str = ""
    extra: str = ""


def list_series(report: BenchReport) -> tuple[SeriesPoint, ...]:
    """Returns a point for each figure of each run that did not fail."""
    return tuple(point for run in report.runs if run.failure is None for point in _list(report.subject, run))


def _list(subject: str, run: BenchRun) -> Iterator[SeriesPoint]:
    way = f"batch {run.batch}, {run.concurrency} at once" + (", IO binding" if run.io_binding else "")
    way += f", queue {run.queue}" if run.queue else ""
    name = f"{subject} on {run.device}, {way}"
    low, high = run.interval_ms
    extra = f"{run.iterations} runs, {run.evidence.value}, {run.provider}"
    yield SeriesPoint(
        name=f"{name}: median", unit="ms", value=run.median_ms, range=f"± {(high - low) / 2:.3g}", extra=extra
    )
    yield SeriesPoint(name=f"{name}: p99", unit="ms", value=run.p99_ms, extra=extra)
    yield SeriesPoint(name=f"{name}: load", unit="ms", value=run.load_ms, extra=extra)
    yield SeriesPoint(name=f"{name}: memory", unit="MB", value=run.peak_rss_bytes / 1e6, extra=extra)
