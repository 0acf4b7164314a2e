"""Timing real subjects on real devices, and devices that do badly."""

import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from bundle_models import make_bundle
from fixture_types import Shown
from tiny_models import parse_model
from verify_devices import InProcess

from edgekit._ort import CpuSession, SessionSettings
from edgekit.bench.bench import ROUNDS, Effort, bench_on, bench_subjects, run_block
from edgekit.bench.subject import Opening, open_subject
from edgekit.cli.main import run_command
from edgekit.devices.device import DeviceRun, DeviceState, Job, Missing
from edgekit.devices.find import DeviceChoice
from edgekit.devices.standalone import ort_runner
from edgekit.errors import BundleError, DataError, DeviceError, EdgekitError, UsageError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Array
from edgekit.serialize import to_json
from edgekit.target import load_target

pytestmark = pytest.mark.slow

HOST = DeviceChoice(names=("host",))
QUICK = (Effort(runs=20, seconds=5),)


def matmul_model(path: Path, size: int, *, times: int = 1) -> Path:
    """`times` products of square matrices, one after another."""
    products = " ".join(f"t{i + 1} = MatMul(t{i}, t{i})" for i in range(times))
    return parse_model(f"g (float[{size},{size}] t0) => (float[{size},{size}] t{times}) {{ {products} }}", path)


class Phone(InProcess, frozen=True, kw_only=True):
    """Stands for a device of its own, and tells the times and states that a test wants.

    Without a `scale` it tells the times that it took.
    """

    name: str = "adb:1"
    evidence: Evidence = Evidence.DEVICE
    nodes: int | None = 1
    slowing: float = 0.0
    after: DeviceState | None = None
    scale: float | None = 1.0

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        run, samples = super().run_job(job, work), list(job.samples)
        session, times = CpuSession(job.model, SessionSettings(threads=1)), list[float]()
        count = len(samples) * job.repeat
        for index in range(count):
            if self.scale is None:
                begun = time.perf_counter()
                session.run(samples[0])
                times.append(1e3 * (time.perf_counter() - begun))
            else:
                times.append(10 * self.scale * (1 + self.slowing * index / max(1, count - 1)))
        slices = [sum(times[place : place + job.repeat]) for place in range(0, count, job.repeat)]
        before = DeviceState(temperatures_c={"soc": 30.0}, clocks_khz={"cpu7": 3_000_000})
        return msgspec.structs.replace(
            run,
            latency_ms=tuple(times),
            elapsed_ms=tuple(elapsed / job.concurrency + (place == 0) * 99 for place, elapsed in enumerate(slices)),
            before=None if self.after is None else before,
            after=self.after,
        )


def test_a_device_whose_times_mean_nothing_is_not_timed(tmp_path: Path) -> None:
    job = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path, Opening()).job_for(Phone())
    with pytest.raises(DeviceError, match="'adb:1' cannot be timed: it says that run 1 took nan ms, which is no time"):
        run_block(Phone(scale=math.nan), job, 8, 1.0, 1.0)


def test_an_input_of_more_dimensions_than_numpy_has_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    shape = ",".join("1" * 65)
    parse_model(f"g (float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}", tmp_path / "m.onnx")
    for command in ("bench", "profile"):
        assert "input 'x' has 65 dimensions, numpy has 64 at most" in refused(command, "m.onnx")


def test_a_model_is_timed_on_this_machine(tmp_path: Path) -> None:
    report = bench_on(matmul_model(tmp_path / "m.onnx", 64), HOST, QUICK)
    (run,) = report.runs
    assert report.succeeded
    assert (run.failure, run.iterations, run.provider) == (None, 20, "CPUExecutionProvider")
    assert 0 < run.min_ms <= run.median_ms <= run.p90_ms <= run.p95_ms <= run.p99_ms <= run.max_ms
    assert run.interval_ms[0] <= run.median_ms <= run.interval_ms[1]
    assert math.isclose(run.throughput_per_s, 1e3 / run.median_ms)
    assert run.load_ms > 0
    assert run.peak_rss_bytes > 1 << 20
    assert run.warmup >= 1
    assert run.first_ms > 0
    assert run.model_bytes == (tmp_path / "m.onnx").stat().st_size
    assert "this is not the device's time" in run.warnings[0]


def test_without_a_count_of_runs_it_ends_at_a_precise_median_or_the_time_limit(tmp_path: Path) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path, Opening())
    (run,) = bench_subjects([subject], [Phone(scale=None)], [Effort(seconds=3)]).runs
    assert run.failure is None
    assert run.iterations >= 50
    (low, high), median = run.interval_ms, run.median_ms
    assert (high - low) / 2 <= 0.05 * median or run.iterations > 50


def test_a_bundle_is_timed_as_an_app_would_load_it(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    report = bench_on(bundle.folder, HOST, QUICK)
    assert (report.subject, report.runs[0].failure) == (bundle.folder.name, None)
    with pytest.raises(UsageError, match="--target means nothing"):
        bench_on(bundle.folder, HOST, QUICK, [Opening(target="nnapi")])
    bundle.find_model("onnx").write_bytes(b"altered")
    with pytest.raises(BundleError, match="altered"):
        bench_on(bundle.folder, HOST, QUICK)


def test_an_ort_file_is_timed(tmp_path: Path) -> None:
    config = {"session.save_model_format": "ORT"}
    CpuSession(matmul_model(tmp_path / "m.onnx", 16), SessionSettings(config=config, save_to=tmp_path / "m.ort"))
    target = Path(shutil.copytree(load_target("cpu").folder, tmp_path / "own"))
    with (target / "target.toml").open("a") as file:
        file.write('\n[session.config]\n"session.enable_saved_runtime_optimizations" = "1"\n')
    report = bench_on(tmp_path / "m.ort", HOST, QUICK, [Opening(target=str(target))])
    assert report.runs[0].failure is None
    assert "not replayed" in report.notes[0]


def test_unknown_sizes_become_1_with_a_note(tmp_path: Path) -> None:
    model = parse_model("g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }", tmp_path / "m.onnx")
    report = bench_subjects([open_subject(model, tmp_path / "a", Opening())], [Phone()], QUICK)
    assert report.runs[0].failure is None
    assert report.notes == ("without a --dim, 'N' ran with the size 1",)
    assert open_subject(tmp_path / "m.onnx", tmp_path / "b", Opening(dims={"N": 3})).notes == ()


def test_two_models_that_run_in_turns_show_which_is_slower(tmp_path: Path) -> None:
    small, large = matmul_model(tmp_path / "a.onnx", 96), matmul_model(tmp_path / "b.onnx", 96, times=6)
    subjects = [open_subject(path, tmp_path, Opening()) for path in (small, large)]
    effort = Effort(runs=20)
    report = bench_subjects(subjects[:1], [Phone(scale=None)], [effort], against=subjects[1])
    (found,) = report.comparisons
    assert found.ratio is not None
    assert found.ratio.verdict == "A is faster"
    assert 2 < found.ratio.value < 12
    assert found.ratio.interval[0] < found.ratio.value < found.ratio.interval[1]
    (told,) = json.loads(to_json(report))["comparisons"]
    assert (told["ratio"]["rounds"], told["ratio"]["interval"]) == (ROUNDS, list(found.ratio.interval))


def test_governor_temperature_and_load_are_read_from_sysfs(tmp_path: Path) -> None:
    files = {
        "class/thermal/thermal_zone0/temp": "41500",
        "class/thermal/thermal_zone0/type": "x86_pkg_temp",
        "devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2600000",
        "devices/system/cpu/cpufreq/policy0": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    state = msgspec.convert(ort_runner.read_state(tmp_path), type=DeviceState)
    assert (state.temperatures_c, state.clocks_khz) == ({"0 x86_pkg_temp": 41.5}, {"cpu0": 2_600_000})


@pytest.mark.parametrize(
    ("phone", "warning"),
    [
        (Phone(slowing=0.3), "slower from first to last"),
        (Phone(slowing=-0.3), "faster from first to last"),
        (Phone(after=DeviceState(temperatures_c={"soc": 45.0})), "15 °C warmer (soc)"),
        (Phone(after=DeviceState(clocks_khz={"cpu7": 1_500_000})), "clock of cpu7 changed by -50%"),
    ],
)
def test_a_device_that_throttles_during_a_run_gives_a_warning(tmp_path: Path, phone: Phone, warning: str) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path, Opening())
    effort = Effort(runs=120)
    (run,) = bench_subjects([subject], [phone], [effort]).runs
    assert any(warning in line for line in run.warnings)
    (steady,) = bench_subjects([subject], [Phone()], [effort]).runs
    assert steady.warnings == ()


def test_a_device_that_fails_or_is_not_there_is_a_finding(tmp_path: Path) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path, Opening())
    phones = [Phone(failure="it fell"), Phone(missing=Missing(reason="offline", command="adb devices")), Phone()]
    report = bench_subjects([subject], phones, QUICK)
    assert [run.failure for run in report.runs] == ["it fell", None]
    assert [skip.reason for skip in report.skipped] == ["offline"]
    assert not report.succeeded
    assert not bench_subjects([subject], phones[1:2], QUICK).succeeded


def test_impossible_times_are_not_compared(tmp_path: Path) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path, Opening())
    report = bench_subjects([subject], [Phone(scale=0.0)], QUICK, against=subject)
    assert "times that cannot be" in str(report.comparisons[0].failure)
    assert not report.succeeded


class Echo(Phone, frozen=True, kw_only=True):
    """Keeps the shapes of the samples that it got in a list."""

    shapes: list[tuple[int, ...]]

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        self.shapes.append(next(iter(job.samples))["x"].shape)
        return Phone.run_job(self, job, work)


def batched_model(path: Path) -> Path:
    return parse_model("g (float[N,T] x, float[4] w) => (float[N,T] y) { s = ReduceSum(w)  y = Mul(x, s) }", path)


@pytest.mark.parametrize("data", [False, True])
def test_a_batch_of_n_is_one_run_of_n_samples(tmp_path: Path, data: bool) -> None:
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    np.savez(tmp_path / "d.npz", x=rows, w=np.ones((3, 4), np.float32))
    opening = Opening(data=str(tmp_path / "d.npz")) if data else Opening(dims={"T": 3})
    subjects = [
        open_subject(batched_model(tmp_path / "m.onnx"), tmp_path, msgspec.structs.replace(opening, batch=size))
        for size in (1, 4)
    ]
    echo = Echo(shapes=[])
    one, four = bench_subjects(subjects, [echo], QUICK).runs
    assert set(echo.shapes) == {(1, 3), (4, 3)}
    assert (one.batch, four.batch) == (1, 4)
    assert math.isclose(four.throughput_per_s, 4 * 1e3 / four.median_ms)
    if data:
        # Three samples are taken over and over; what has no batch is the first's.
        (sample,) = subjects[1].job_for(echo).samples
        np.testing.assert_array_equal(sample["x"], rows[[0, 1, 2, 0]])
        assert sample["w"].shape == (4,)


@pytest.mark.parametrize(
    ("opening", "error", "message"),
    [
        (Opening(batch=2, dims={"N": 2}), UsageError, "--batch says the size of 'N'"),
        (Opening(dims={"M": 2}), UsageError, "no dynamic dimension 'M'"),
        (Opening(dims={"N": 0}), DataError, "the batch has no row: x of"),
    ],
)
def test_sizes_that_contradict_or_are_zero_are_refused(
    tmp_path: Path, opening: Opening, error: type[EdgekitError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_subject(batched_model(tmp_path / "m.onnx"), tmp_path, opening)


def test_a_batch_needs_a_dynamic_first_axis(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no input has a dynamic first axis"):
        open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path, Opening(batch=2))
    with pytest.raises(UsageError, match="--dim means nothing for a bundle"):
        open_subject(make_bundle(tmp_path).folder, tmp_path, Opening(dims={"N": 2}))


def test_sizes_follow_from_the_names_in_a_formula(tmp_path: Path) -> None:
    path = parse_model("g (float[B,4] x, float[K] w) => (float[B,4] y) { y = Relu(x) }", tmp_path / "m.onnx")
    proto = onnx.load(path)
    proto.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "2*past"
    onnx.save(proto, path)
    subject = open_subject(path, tmp_path, Opening(dims={"past": 3}, batch=2))
    (sample,) = subject.job_for(Phone()).samples
    assert {name: value.shape for name, value in sample.items()} == {"x": (2, 4), "w": (6,)}


def test_parallel_runs_are_measured_by_their_throughput(tmp_path: Path) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path, Opening())
    efforts = [Effort(runs=60, concurrency=count) for count in (1, 2)]
    alone, two = bench_subjects([subject], [Phone()], efforts).runs
    assert (alone.median_ms, alone.throughput_per_s) == (10, 100)
    # What starts the threads is in the time of the first slice, and does not count.
    assert (two.concurrency, two.iterations, two.median_ms, two.throughput_per_s) == (2, 60, 10, 200)
    (run,) = bench_subjects([subject], [Phone(scale=None)], efforts[:1]).runs
    assert run.throughput_per_s == 1e3 / run.median_ms


def test_parallel_runs_are_made_at_once() -> None:
    class Meeting:
        """Ends a run when another one runs at the same time, and fails if there is none."""

        both = threading.Barrier(2, timeout=30)

        def run(self, _names: None, inputs: dict[str, Array]) -> list[Array]:
            self.both.wait()
            return list(inputs.values())

    x = np.arange(3)
    run: dict[str, Any] = {"latency_ms": [], "elapsed_ms": [], "memory": {"session": (0, 0)}}
    job = {"repeat": 8, "concurrency": 2, "profile": False}
    assert ort_runner._run_repeatedly(Meeting(), {"x": x}, job, run) == [x]
    assert (len(run["latency_ms"]), len(run["elapsed_ms"])) == (8, 1)


def test_bound_outputs_are_those_of_each_run(tmp_path: Path) -> None:
    (run,) = bench_on(matmul_model(tmp_path / "m.onnx", 64), HOST, [Effort(runs=10, io_binding=True)]).runs
    assert (run.failure, run.io_binding, run.iterations) == (None, True, 10)


def test_threads_and_mode_reach_session_and_report(
    relu_model: Path, capsys: pytest.CaptureFixture[str], shown: Shown
) -> None:
    arguments = ["bench", str(relu_model), "--on", "host", "--runs", "3", "-q"]
    assert run_command([*arguments, "--execution-mode", "parallel", "--inter-op-threads", "2", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["parallel"], run["inter_threads"]) == (True, 2)
    assert "parallel, 2 at once" in shown([*arguments, "--inter-op-threads", "2"])
    assert run_command([*arguments, "--execution-mode", "sequential", "--inter-op-threads", "2"]) == 2
    assert "give --execution-mode parallel" in capsys.readouterr().err
