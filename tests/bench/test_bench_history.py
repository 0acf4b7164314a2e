"""Benchmarks are kept, held against the last one, and listed."""

import json
from pathlib import Path

import msgspec
import pytest
from bundle_models import save_classifier
from fixture_types import Shown

from edgekit.bench.bench import BenchReport, BenchRun
from edgekit.bench.history import compare_benches, compare_with_last, list_benches, record_bench
from edgekit.cli.main import run_command
from edgekit.evidence import Evidence
from edgekit.report.timing import list_bench_remarks, list_series
from edgekit.verify.history import list_runs

RUN = BenchRun(
    device="host",
    evidence=Evidence.EMULATED,
    provider="CPUExecutionProvider",
    median_ms=10.0,
    interval_ms=(9.9, 10.1),
    p99_ms=12.0,
    load_ms=40.0,
    peak_rss_bytes=30_000_000,
    iterations=100,
)


def report(*runs: BenchRun, subject: str = "m.onnx") -> BenchReport:
    return BenchReport(subject=subject, runs=runs)


def timed(median: float, half: float, **fields: object) -> BenchRun:
    return msgspec.structs.replace(RUN, median_ms=median, interval_ms=(median - half, median + half), **fields)


def test_a_time_above_the_limit_fails_and_names_the_run_that_it_began_with(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    assert compare_with_last(report(RUN), file, 1.1) == report(RUN)
    assert record_bench(file, report(RUN)) == 1
    now = compare_with_last(report(timed(12.0, 0.1)), file, 1.1)
    assert not now.succeeded
    assert now.regressions[0].startswith("host: 12 ms, 1.20 times the 10 ms of run 1 of ")
    assert next(iter(list_bench_remarks(now))).startswith("slower: host")
    # Less than allowed, intervals that overlap, or no limit at all: told, and no failure.
    for run, most in ((timed(10.5, 0.1), 1.1), (timed(12.0, 3.0), 1.1), (timed(12.0, 0.1), None)):
        held = compare_with_last(report(run), file, most)
        assert held.succeeded
        assert "of run 1 of" in held.notes[0]
    assert "the intervals overlap" in compare_with_last(report(timed(12.0, 3.0)), file, 1.1).notes[0]


def test_only_times_of_the_same_model_device_and_settings_are_compared(tmp_path: Path) -> None:
    before = report(RUN, timed(20.0, 0.1, batch=8), timed(5.0, 0.1, failure="gone"))
    now = report(timed(30.0, 0.1, batch=8), timed(1.0, 0.1, threads=3), timed(1.0, 0.1, device="adb:X"))
    (one,) = compare_benches(before, now)
    assert (one.settings, round(one.ratio, 3), one.apart) == ("batch 8", 1.5, True)
    record_bench(tmp_path / "h", before)
    other = report(RUN, subject="other.onnx")
    assert compare_with_last(other, tmp_path / "h", 1.1) == other
    assert compare_with_last(report(RUN), tmp_path / "none", 1.1) == report(RUN)


def test_times_and_verifications_share_a_history(tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    record_bench(file, report(RUN))
    record_bench(file, report(timed(11, 1), subject="b"))
    assert [(one.id, one.subject) for one in list_benches(file)] == [(1, "m.onnx"), (2, "b")]
    assert [one.report.runs[0].median_ms for one in list_benches(file, subject="b")] == [11]
    assert list_runs(file) == ()


def test_an_export_for_dashboards_has_one_point_for_each_figure() -> None:
    points = list_series(report(RUN, msgspec.structs.replace(RUN, failure="gone")))
    assert [(point.unit, round(point.value, 3)) for point in points] == [("ms", 10), ("ms", 12), ("ms", 40), ("MB", 30)]
    assert points[0].name == "m.onnx on host, batch 1, 1 at once: median"
    assert points[0].range == "± 0.1"


def test_the_command_records_and_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: Shown) -> None:
    model, file, series = save_classifier(tmp_path / "m.onnx").path, tmp_path / "h", tmp_path / "s.json"
    bench = ["bench", str(model), "--on", "host", "--runs", "5", "-q", "--history", str(file)]
    assert run_command([*bench, "--series", str(series)]) == 0
    assert json.loads(series.read_bytes())[0]["unit"] == "ms"
    assert "of run 1 of" in shown([*bench, "--max-slowdown", "1000"])
    assert run_command(["runs", "bench", "--history", str(file), "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)["benches"]] == [1, 2]
    assert len(shown(["runs", "bench", "--history", str(file)]).splitlines()) == 2
    assert run_command(["bench", str(model), "--max-slowdown", "2"]) == 2
    assert "add --history FILE" in capsys.readouterr().err
