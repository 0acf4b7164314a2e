"""Earlier runs: what is worse than the last good one is a failure that says what changed."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_types import present
from msgspec.structs import replace
from verify_devices import InProcess, restate

from edgekit.bench.latency import Latency
from edgekit.bundle.folder import Bundle
from edgekit.devices.device import SkippedDevice
from edgekit.errors import EdgekitError, UsageError
from edgekit.evidence import Evidence
from edgekit.jobs.forecast import read_history
from edgekit.model.tensors import Tensors
from edgekit.verify.history import (
    compare_with_baseline,
    diff_runs,
    find_changes,
    find_last_good,
    find_regressions,
    list_runs,
    read_run,
    record_report,
)
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.report import VerifyReport, recheck_report
from edgekit.verify.run import verify_bundle
from edgekit.verify.task_scores import TaskReport


@pytest.fixture(scope="module")
def bundle(tiny: Bundle) -> Bundle:
    # Noise that a self-test of float32 would not grant is what these tests compare.
    return restate(tiny, golden=replace(tiny.manifest.golden, tolerance={"y": 10.0}))


@pytest.fixture(scope="module")
def report(bundle: Bundle) -> VerifyReport:
    """What an honest device did."""
    return verify_bundle(bundle, [InProcess()])


def shake(rows: list[Tensors], size: float = 0.1) -> list[Tensors]:
    rng = np.random.default_rng(0)
    return [{"y": row["y"] + rng.normal(scale=size, size=row["y"].shape).astype(np.float32)} for row in rows]


def test_the_forecast_knows_a_time_on_an_npu(bundle: Bundle, report: VerifyReport, tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    npu = "QNNExecutionProvider"
    phone = replace(
        report.runs[0], evidence=Evidence.DEVICE, provider=npu, provider_nodes={npu: 3}, versions={"soc": "SM8750"},
        latency_ms=Latency(median=1.5, p95=2.0),
    )  # fmt: skip
    subject = bundle.folder.parent / report.bundle
    if subject != bundle.folder:
        bundle.folder.rename(subject)
    # What the provider took nothing of says nothing of it.
    for run in (phone, replace(phone, provider_nodes={"CPUExecutionProvider": 3})):
        record_report(file, replace(report, runs=(run,)))
    (time,) = read_history(file, subject)
    assert (time.device, time.ms, time.source) == ("Samsung Galaxy S25", 1.5, "run 1 of h.sqlite")


def test_what_became_worse_fails_and_says_what_changed(bundle: Bundle) -> None:
    good = replace(verify_bundle(bundle, [InProcess()]), ancestry={"model": "a" * 64, "data": "b" * 64})
    worse = verify_bundle(bundle, [InProcess(lie=shake)])
    worse = replace(worse, ancestry={"model": "c" * 64, "data": "b" * 64})
    run = worse.runs[0]
    limits = replace(run.thresholds, min_cosine=0.5)
    worse = replace(worse, runs=(replace(run, versions={"onnxruntime": "1.32.0", "driver": "2"}, thresholds=limits),))
    assert worse.passed
    held = compare_with_baseline(worse, good, "run 7")
    assert not held.passed
    assert "worse than run 7: output 'y' on emulated: SQNR fell to" in held.failures[0]
    for change in ("model aaaaaaaaaaaa -> cccccccccccc", "driver on emulated none -> 2", "threshold min_cosine"):
        assert change in held.failures[0]
    assert "onnxruntime on emulated 1.31.1 -> 1.32.0" in held.failures[0]
    assert "data" not in held.failures[0]


@pytest.mark.parametrize(
    ("higher", "got", "interval", "worse"),
    [
        (True, 0.86, (-0.05, 0.05), False),
        (True, 0.84, (-0.05, 0.05), True),
        (True, 0.95, (-0.05, 0.05), False),
        (True, 0.89, None, True),
        (True, 0.9, None, False),
        (False, 0.96, (-0.05, 0.05), True),
        (False, 0.5, None, False),
        (True, None, (-0.05, 0.05), True),
    ],
)
def test_a_metric_is_worse_beyond_half_its_interval(
    report: VerifyReport, higher: bool, got: float | None, interval: tuple[float, float] | None, worse: bool
) -> None:
    task = TaskReport(
        name="top1", output="y", samples=100, unit="share", higher_is_better=higher, reference=0.9, got=0.9,
        interval=interval,
    )  # fmt: skip
    runs = (replace(report.runs[0], task=each) for each in (task, replace(task, got=got)))
    before, now = (replace(report, runs=(run,)) for run in runs)
    assert bool(find_regressions(before, now)) is worse
    without, other = (replace(now.runs[0], task=each) for each in (None, replace(task, name="top5")))
    for run in (without, other):
        (line,) = find_regressions(before, replace(now, runs=(run,)))
        assert line == "metric 'top1' on emulated was not measured"


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"sqnr_db": 30.0}, {"sqnr_db": 29.0}, ""),
        ({"sqnr_db": 30.0}, {"sqnr_db": 28.9}, "SQNR fell to 28.9 dB from 30 dB"),
        ({"sqnr_db": 30.0, "sqnr_interval_db": (28.0, 31.0)}, {"sqnr_db": 28.0}, ""),
        ({"sqnr_db": 30.0, "sqnr_interval_db": (28.0, 31.0)}, {"sqnr_db": 27.9}, "SQNR fell"),
        ({"sqnr_db": 30.0, "sqnr_interval_db": (29.9, 31.0)}, {"sqnr_db": 29.1}, ""),
        ({"top1_agreement": 0.9}, {"top1_agreement": 0.9}, ""),
        ({"top1_agreement": 0.9}, {"top1_agreement": 0.89}, "top-1 agreement fell to 0.89 from 0.9"),
        ({"top1_agreement": 0.9, "top1_interval": (0.8, 1.0)}, {"top1_agreement": 0.81}, ""),
        ({"exact_match": 1.0}, {"exact_match": 0.99}, "exact match fell"),
        ({"exact_match": 1.0}, {}, "exact match was not measured"),
        ({}, {"exact_match": 0.1}, ""),
        ({"sqnr_db": 30.0}, {"sqnr_db": 40.0}, ""),
    ],
)
def test_an_output_is_worse_below_its_interval(
    report: VerifyReport, before: dict[str, Any], now: dict[str, Any], words: str
) -> None:
    outputs = (OutputReport(name="y", samples=6, **fields) for fields in (before, now))
    old, new = (replace(report, runs=(replace(report.runs[0], outputs=(each,)),)) for each in outputs)
    lines = find_regressions(old, new)
    assert len(lines) == bool(words)
    assert words in "".join(lines)


def test_what_is_gone_or_new_is_told(report: VerifyReport) -> None:
    (run,) = report.runs
    less = replace(report, runs=(replace(run, outputs=(), samples=3),))
    assert find_regressions(report, less) == ("output 'y' on emulated is gone",)
    assert list(find_changes(report, less)) == ["samples on emulated 6 -> 3"]
    other = replace(report, runs=(replace(run, device="phone"), run))
    assert list(find_changes(report, other)) == ["device phone is new"]
    assert find_regressions(report, other) == ()
    assert find_regressions(other, report) == ("device phone did not run",)
    assert find_regressions(other, less) == ("device phone did not run", "output 'y' on emulated is gone")
    assert list(find_changes(report, replace(other, runs=(other.runs[0], *less.runs)))) == [
        "device phone is new", "samples on emulated 6 -> 3"
    ]  # fmt: skip
    skipped = (SkippedDevice(device="phone", reason="unplugged", command=None),)
    absent = replace(report, skipped=skipped)
    assert find_regressions(other, absent) == ("device phone did not run: unplugged",)
    assert compare_with_baseline(report, other, "run 1").passed  # nobody asked for the phone
    assert not compare_with_baseline(absent, other, "run 1").passed
    moved = replace(report, ancestry={"model": "b" * 64})
    (line,) = find_changes(replace(report, ancestry={"model": "a" * 64}), moved)
    assert line == f"model {'a' * 12} -> {'b' * 12}"


def test_neither_chance_nor_the_nodes_of_an_emulator_are_a_regression(bundle: Bundle) -> None:
    first, again = (verify_bundle(bundle, [InProcess(lie=lambda rows: shake(rows, 0.01))]) for _ in range(2))
    assert compare_with_baseline(again, first, "run 1").passed
    assert compare_with_baseline(first, verify_bundle(bundle, [InProcess(lie=shake)]), "run 1").passed
    before, now = (verify_bundle(bundle, [InProcess(nodes=n, evidence=Evidence.EMULATED)]) for n in (5, 3))
    assert find_regressions(before, now) == ()
    more, none = (verify_bundle(bundle, [InProcess(nodes=nodes)]) for nodes in (6, 0))
    assert find_regressions(verify_bundle(bundle, [InProcess(nodes=5)]), more) == ()
    assert "takes 0 nodes, before 6" in find_regressions(more, none)[0]
    assert "(changed since: nothing that edgekit knows of)" in compare_with_baseline(none, more, "run 1").failures[0]


def test_latency_and_memory_are_held_against_the_reference_run(bundle: Bundle) -> None:
    before = verify_bundle(bundle, [InProcess(evidence=Evidence.DEVICE)])
    steady = replace(before.runs[0], latency_ms=Latency(median=1.0, p95=1.0))
    before = replace(before, runs=(steady,))
    slow = replace(before.runs[0], latency_ms=Latency(median=1.5, p95=2.0), peak_rss_bytes=3)
    now = compare_with_baseline(replace(before, runs=(slow,)), before, "base.json")
    assert now.passed
    limits = replace(slow.thresholds, max_latency_ratio=1.2, max_memory_ratio=2.0)
    lines = recheck_report(now, limits).runs[0].failures
    assert lines == (
        "latency is 1.50 times that of base.json, more than 1.2 times",
        "peak memory is 3.00 times that of base.json, more than 2 times",
    )
    assert recheck_report(now, replace(limits, max_latency_ratio=1.6, max_memory_ratio=3.0)).passed
    silent = replace(before.runs[0], latency_ms=None, peak_rss_bytes=0)
    now = compare_with_baseline(replace(before, runs=(silent,)), before, "base.json")
    assert now.passed
    assert recheck_report(now, limits).runs[0].failures == (
        "latency was not measured, and base.json has one to compare it with",
        "peak memory was not measured, and base.json has one to compare it with",
    )


def test_runs_are_recorded_come_back_and_are_compared(bundle: Bundle, report: VerifyReport, tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    bad = verify_bundle(bundle, [InProcess(failure="died")])
    assert [record_report(file, item) for item in (report, bad)] == [1, 2]
    assert [(run.id, run.passed, run.verdict) for run in list_runs(file)] == [(1, True, "pass"), (2, False, "fail")]
    assert read_run(file, 1).report == report
    assert present(find_last_good(file, bad)).id == 1
    assert find_last_good(file, replace(report, target="qnn", bundle="tiny-qnn")) is None
    assert list_runs(file, bundle="other") == ()
    assert record_report(file, verify_bundle(bundle, [InProcess(lie=shake)])) == 3
    found = diff_runs(read_run(file, 1), read_run(file, 3))
    assert (found.before, found.now, len(found.regressions)) == (1, 3, 1)
    assert diff_runs(read_run(file, 3), read_run(file, 1)).regressions == ()


def test_what_is_no_history_is_refused(report: VerifyReport, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database, but it is long enough to look at" * 40)
    refusals = {"text": "is no history", "none/h.sqlite": "there is no folder", ".": "cannot use"}
    for place, words in refusals.items():
        with pytest.raises(EdgekitError, match=words):
            record_report(tmp_path / place, report)
    with pytest.raises(EdgekitError, match="there is no history"):
        list_runs(tmp_path / "none")
    record_report(tmp_path / "h.sqlite", report)
    for number in (9, 2**63, -(2**63) - 1, 0):
        with pytest.raises(UsageError, match=f"has no run {number}"):
            read_run(tmp_path / "h.sqlite", number)
    for change, words in (("UPDATE runs SET report = '{'", "malformed"), ("PRAGMA user_version = 9", "newer edgekit")):
        with contextlib.closing(sqlite3.connect(tmp_path / "h.sqlite")) as connection, connection:
            connection.execute(change)
        with pytest.raises(EdgekitError, match=words):
            read_run(tmp_path / "h.sqlite", 1)
