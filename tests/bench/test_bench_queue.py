"""Requests that come at random, in batches that wait for more or until they are full."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_types import Answer, Refused
from other_machine.board import ssh_board
from tiny_models import parse_model

from edgekit.bench.bench import Effort, run_queue
from edgekit.bench.subject import Opening, open_subject
from edgekit.devices.device import Queue
from edgekit.devices.find import find_device
from edgekit.devices.observe import describe_job
from edgekit.devices.remote.remote import SshDevice
from edgekit.devices.standalone import ort_runner
from edgekit.errors import DeviceError
from edgekit.model.model import load_model
from edgekit.target import load_target

RELU = '<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] x) => (float[n,4] y) { y = Relu(x) }'
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
