"""Statistics of run times, requests that queue, and benchmarks that are kept and held against the last one."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bundle_models import save_classifier
from fixture_types import Answer, Refused, Shown, present
from other_machine.board import ssh_board
from tiny_models import parse_model

from edgekit.bench.bench import BenchReport, BenchRun, Effort, run_queue
from edgekit.bench.history import compare_with_last, list_benches, record_bench
from edgekit.bench.latency import (
    compare_rounds,
    count_needed,
    find_drift,
    find_false_times,
    find_steady,
    median_interval,
    summarize_latency,
)
from edgekit.bench.subject import Opening, open_subject
from edgekit.cli.main import run_command
from edgekit.devices.device import Queue
from edgekit.devices.find import find_device
from edgekit.devices.observe import describe_job
from edgekit.devices.remote.remote import SshDevice
from edgekit.devices.standalone import ort_runner
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.model.model import load_model
from edgekit.report.timing import list_bench_remarks, list_series
from edgekit.target import load_target
from edgekit.verify.history import list_runs


def noise(seed: int, count: int) -> list[float]:
    """Times around 10 ms with a long tail, as real ones have."""
    return [float(value) for value in 10 + np.random.default_rng(seed).gamma(2.0, 0.2, count)]


def test_the_figures_are_those_of_the_series() -> None:
    latency = present(summarize_latency([float(value) for value in range(1, 102)]))
    assert (latency.median, latency.p95, latency.p99, latency.runs) == (51, 96, 100, 101)
    assert summarize_latency([]) is None
    assert summarize_latency([2.0]) is not None


def test_the_interval_of_the_median_holds_it_in_95_of_100_series() -> None:
    truth = float(np.median(noise(0, 200_000)))
    for count in (10, 30, 101):
        held = [low <= truth <= high for low, high in (median_interval(noise(seed, count)) for seed in range(1, 401))]
        assert 0.92 <= np.mean(held) <= 0.99


def test_the_interval_narrows_with_more_runs_as_predicted() -> None:
    low, high = median_interval(noise(2, count_needed(noise(1, 30), 0.005)))
    assert (high - low) / 2 <= 0.0075 * 10.4
    assert count_needed([5.0] * 30, 0.01) == 30


@pytest.mark.parametrize("growth", [0.15, -0.15])
def test_a_drift_is_seen_through_noise_and_slow_runs(growth: float) -> None:
    series = [value * (1 + growth * index / 99) for index, value in enumerate(noise(3, 100))]
    series[50] = 500.0
    assert abs(present(find_drift(series)) - growth) < 0.05


def test_steady_series_have_no_drift() -> None:
    false_alarms = [find_drift(noise(seed, 60)) for seed in range(300)]
    assert sum(drift is not None for drift in false_alarms) <= 1


@pytest.mark.parametrize(
    ("series", "drifts"),
    [
        pytest.param([1.0] * 50, False, id="equal"),
        pytest.param([1.0, 2.0, 3.0], False, id="too few"),
        pytest.param([0.0] * 50, False, id="no time"),
        pytest.param([100 + index * 0.01 for index in range(100)], False, id="small, however sure"),
        pytest.param([*noise(4, 60), *(value * 1.4 for value in noise(5, 40))], True, id="a step of the clock"),
        pytest.param([10 + index / 5000 for index in range(20_000)], True, id="long, so it is thinned"),
    ],
)
def test_a_drift_needs_size_and_significance(series: list[float], *, drifts: bool) -> None:
    assert (find_drift(series) is not None) is drifts


def test_a_ratio_is_found_although_the_device_slows_down() -> None:
    slowing = [1 + index / 5 for index in range(10)]
    wobble = np.random.default_rng(6).normal(1, 0.01, 10)
    ratio = compare_rounds([(10 * slow, 10 * slow * 1.1 * float(w)) for slow, w in zip(slowing, wobble, strict=True)])
    assert ratio.interval[0] <= 1.1 <= ratio.interval[1]
    assert ratio.verdict == "A is faster"
    assert compare_rounds([(b, a) for a, b in [(1.0, 1.1), (1.0, 1.12), (1.0, 1.09)]]).verdict == "B is faster"


def test_two_equal_models_differ_in_only_five_of_100_comparisons() -> None:
    wrong = 0
    for seed in range(500):
        rng = np.random.default_rng(seed)
        rounds = [(float(a), float(b)) for a, b in rng.lognormal(0, 0.05, (8, 2))]
        wrong += compare_rounds(rounds).verdict != "no difference can be told"
    assert 0.02 <= wrong / 500 <= 0.08


def test_many_rounds_use_the_limit_of_student_s_t() -> None:
    rounds = [(1.0, math.exp(0.01 if index % 2 else -0.01)) for index in range(100)]
    low, high = compare_rounds(rounds).interval
    assert math.isclose(high / low, math.exp(2 * 1.98422 * 0.01 * math.sqrt(100 / 99) / 10), rel_tol=1e-4)


@pytest.mark.parametrize("rounds", [[], [(1.0, 1.0)], [(1.0, 0.0), (1.0, 1.0)], [(math.nan, 1.0), (1.0, 1.0)]])
def test_fewer_than_two_rounds_with_times_are_an_error(rounds: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two rounds"):
        compare_rounds(rounds)


@pytest.mark.parametrize(
    ("times", "elapsed_ms", "words"),
    [
        ((), 1.0, None),
        ((0.0005, 0.01), 1.0, None),
        ((0.01, 0.0), 1.0, "0 ms is less than any session takes"),
        ((0.0004,), 1.0, "0.0004 ms is less"),
        ((2.0, 3.0), 5.0, None),
        ((2.0, 3.2), 5.0, None),
        ((2.0, 3.3), 5.0, "5.3 ms together, and answered after 5 ms"),
        ((1e7,), 2000.0, "1e+07 ms together, and answered after 2000 ms"),
    ],
)
def test_impossible_device_times_are_refused(times: tuple[float, ...], elapsed_ms: float, words: str | None) -> None:
    found = find_false_times(times, elapsed_ms)
    assert (found is None) if words is None else (found is not None and words in found)


def test_warming_up_ends_where_the_times_are_steady() -> None:
    warm = [30.0, *(10 + 5 * math.exp(-index / 6) for index in range(30))]
    cuts = [find_steady([*warm, *noise(seed, 100)], 50) for seed in range(50)]
    assert 10 <= np.median(cuts) <= 35
    assert min(cuts) >= 10
    assert find_steady([*warm, *noise(6, 100)], 5) == 5


def test_only_the_first_of_steady_times_is_left_out() -> None:
    cuts = [find_steady(noise(seed, 100), 50) for seed in range(200)]
    assert np.median(cuts) <= 20
    assert min(cuts) == 1
    assert (find_steady([3.0], 0), find_steady([3.0, 2.0], 1)) == (0, 1)


def test_a_pause_of_the_system_is_no_warm_up() -> None:
    calm = [10.0 + 0.01 * (index % 7) for index in range(100)]
    assert find_steady([*calm[:22], 400.0, *calm[23:]], 50) == find_steady(calm, 50)


RELU = "g (float[n,4] x) => (float[n,4] y) { y = Relu(x) }"
X = {"x": np.ones((1, 4), np.float32), "scale": np.ones(2, np.float32)}


class Machine:
    """A clock, and a session that takes 2 ms of it however many come at once, and notes how many did."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.now = 7.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, _: None, inputs: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
        self.sizes.append(len(inputs["x"]))
        assert inputs["scale"].shape == (2,)
        self.now += 0.002
        return [inputs["x"]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    # Times of this machine depend on who else uses it.
    monkeypatch.setattr(ort_runner, "time", made)
    return made


def serve(
    machine: Machine, most: int, wait_ms: float | None, *, rate: float = 1000.0, count: int = 60
) -> tuple[list[int], list[float]]:
    queue = {"most": most, "wait_ms": wait_ms, "rate_per_s": rate, "rows": ["x"]}
    machine.sizes.clear()
    values, times, elapsed_ms = ort_runner.serve_queue(machine, X, queue, count)
    assert values[0].shape == (1, 4)
    assert len(times) == count
    assert elapsed_ms >= max(times)
    # Each size is run once before anything counts.
    assert machine.sizes[:most] == list(range(1, most + 1))
    return machine.sizes[most:], times


def test_a_full_batch_waits_for_its_last_request(machine: Machine) -> None:
    sizes, times = serve(machine, 8, None)
    assert sizes == [8] * 7 + [4]
    # Seven more come at 1 ms each on average before the first is served.
    assert 4 < float(np.median(times)) < 12
    assert min(times) >= 1.999


def test_a_limit_ends_the_waiting(machine: Machine) -> None:
    # Requests 50 ms apart on average: hardly anybody waits for the next.
    sizes, times = serve(machine, 8, 1.0, rate=20.0)
    assert sizes.count(1) > 40
    assert min(times) >= 1.999
    assert float(np.median(times)) == pytest.approx(3.0)


def test_larger_batches_serve_a_rate_that_single_requests_cannot(machine: Machine) -> None:
    # A thousand a second come, five hundred a second can be served singly: the queue grows without end.
    _, single = serve(machine, 1, 0.0)
    sizes, dynamic = serve(machine, 8, 0.0)
    assert single[-1] > 40
    assert max(dynamic) < 8
    assert max(sizes) > 1


def test_bench_measures_requests_of_a_queue(tmp_path: Path, answer: Answer, refused: Refused) -> None:
    model = parse_model(RELU, tmp_path / "m.onnx")
    bench = ["bench", str(model), "--runs", "50", "-q", "--queue", "2000:2", "--batch", "1,4"]
    runs = answer(bench)["runs"]
    assert [(run["batch"], run["queue"]) for run in runs] == [
        (1, "2000/s, 2 ms"),
        (4, "2000/s, 2 ms"),
        (4, "2000/s, full"),
    ]
    assert all(run["iterations"] == 45 and run["failure"] is None for run in runs)
    assert all(0 < run["throughput_per_s"] < 4000 for run in runs)
    for wrong, words in (
        (["--queue", "0"], "is no rate"),
        (["--queue", "9:x"], "is no rate"),
        (["--queue", "9", "--concurrency", "2"], "two ways to load"),
    ):
        assert words in refused("bench", str(model), *wrong)
    fixed = parse_model(RELU.replace("n,4", "1,4"), tmp_path / "f.onnx")
    assert "no input has a dynamic first axis" in refused("bench", str(fixed), "--queue", "9")


def test_only_the_runner_in_python_serves_a_queue(tmp_path: Path) -> None:
    target = load_target("cpu")
    job = describe_job(load_model(parse_model(RELU, tmp_path / "m.onnx")), target, samples=0)
    with pytest.raises(DeviceError, match="'host:native' serves no queue: only the runner in Python does"):
        run_queue(find_device("host:native", target), job, Effort(), Queue(most=4, wait_ms=None, rate_per_s=9.0))


def test_a_board_with_python_serves_a_queue_and_one_without_says_so(tmp_path: Path) -> None:
    subject = open_subject(parse_model(RELU, tmp_path / "m.onnx"), tmp_path, Opening(batch=1))
    queue = Queue(most=4, wait_ms=1.0, rate_per_s=2000.0, rows=subject.rows)
    board = SshDevice(host="board", python=sys.executable)
    with ssh_board(arm=False) as machine, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", machine.programs, prepend=os.pathsep)
        block = run_queue(board, subject.job_for(board), Effort(runs=50), queue)
        with pytest.raises(DeviceError, match="'python3' there has no onnxruntime"):
            run_queue(SshDevice(host="board"), subject.job_for(board), Effort(runs=50), queue)
    assert len(block.latency_ms) == 45
    assert block.outputs["y"].shape == (1, 4)


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
    record_bench(tmp_path / "h", before)
    (line,) = compare_with_last(now, tmp_path / "h", None).notes
    assert line.startswith("host (batch 8): 30 ms, 1.50 times the 20 ms of run 1 of ")
    assert "overlap" not in line
    other = report(RUN, subject="other.onnx")
    assert compare_with_last(other, tmp_path / "h", 1.1) == other
    assert compare_with_last(report(RUN), tmp_path / "none", 1.1) == report(RUN)


def test_a_run_that_failed_is_compared_with_nothing(tmp_path: Path) -> None:
    failed, file = report(timed(5.0, 0.1, failure="gone")), tmp_path / "h"
    record_bench(file, failed)
    assert compare_with_last(report(RUN), file, 1.1) == report(RUN)
    record_bench(file, report(RUN))
    assert compare_with_last(failed, file, 1.1) == failed


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
    assert (points[0].name, points[0].range) == ("m.onnx on host, batch 1, 1 at once: median", "± 0.1")


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
