"""Timing real subjects on real devices, and devices that do badly."""

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bundle_models import make_bundle
from tiny_models import parse_model

from edgekit._ort import CpuSession, SessionSettings
from edgekit.bench.bench import bench_on, bench_subject
from edgekit.bench.blocks import Effort
from edgekit.bench.interleaved import ROUNDS
from edgekit.bench.subject import open_subject
from edgekit.devices.device import DeviceRun, DeviceState, Job, Missing
from edgekit.devices.local.host import Host
from edgekit.devices.register import DeviceChoice
from edgekit.errors import BundleError, UsageError
from edgekit.evidence import Evidence
from edgekit.plain import to_json

pytestmark = pytest.mark.slow

HOST = DeviceChoice(names=("host",))
QUICK = Effort(runs=20, seconds=5)


def matmul_model(path: Path, size: int, *, times: int = 1) -> Path:
    """`times` products of square matrices, one after another."""
    products = " ".join(f"t{i + 1} = MatMul(t{i}, t{i})" for i in range(times))
    text = (
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[{size},{size}] t0)'
        f" => (float[{size},{size}] t{times}) {{ {products} }}"
    )
    return parse_model(text, path)


class Phone(Host, frozen=True, kw_only=True):
    """Stands for a device of its own: computes here, and tells the times and states that a test wants."""

    name: str = "adb:1"
    evidence: Evidence = Evidence.DEVICE
    slowing: float = 0.0
    after: DeviceState | None = None
    failure: str | None = None
    missing: Missing | None = None
    scale: float = 1.0

    def find_missing(self) -> Missing | None:
        return self.missing

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        run = Host.run_job(self, job, work)
        count = len(run.latency_ms)
        times = tuple(10 * self.scale * (1 + self.slowing * i / max(1, count - 1)) for i in range(count))
        before = (
            None if self.after is None else DeviceState(temperatures_c={"soc": 30.0}, clocks_khz={"cpu7": 3_000_000})
        )
        return msgspec.structs.replace(run, latency_ms=times, before=before, after=self.after, failure=self.failure)


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
    assert "this is not the device's time" in run.warnings[0]


def test_without_a_number_it_runs_until_the_median_is_known_or_the_time_is_over(tmp_path: Path) -> None:
    (run,) = bench_on(matmul_model(tmp_path / "m.onnx", 8), HOST, Effort(seconds=3)).runs
    assert run.failure is None
    assert run.iterations >= 50
    (low, high), median = run.interval_ms, run.median_ms
    assert (high - low) / 2 <= 0.05 * median or run.iterations > 50


def test_a_bundle_is_timed_as_an_app_would_load_it(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    report = bench_on(bundle.folder, HOST, QUICK)
    assert (report.subject, report.runs[0].failure) == (bundle.folder.name, None)
    with pytest.raises(UsageError, match="--target means nothing"):
        bench_on(bundle.folder, HOST, QUICK, target="nnapi")
    bundle.find_model("onnx").write_bytes(b"altered")
    with pytest.raises(BundleError, match="altered"):
        bench_on(bundle.folder, HOST, QUICK)


def test_an_ort_file_is_timed(tmp_path: Path) -> None:
    config = {"session.save_model_format": "ORT"}
    CpuSession(matmul_model(tmp_path / "m.onnx", 16), SessionSettings(config=config, save_to=tmp_path / "m.ort"))
    report = bench_on(tmp_path / "m.ort", HOST, QUICK, target="nnapi")
    assert report.runs[0].failure is None
    assert "not replayed" in report.notes[0]


def test_sizes_that_are_not_known_become_one_and_a_note_says_so(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }'
    report = bench_on(parse_model(text, tmp_path / "m.onnx"), HOST, QUICK)
    assert report.runs[0].failure is None
    assert "size 1" in report.notes[0]


def test_the_slower_of_two_is_found_in_turns(tmp_path: Path) -> None:
    small, large = matmul_model(tmp_path / "a.onnx", 96), matmul_model(tmp_path / "b.onnx", 96, times=6)
    report = bench_on(small, HOST, Effort(seconds=6, threads=1), against=large)
    (found,) = report.comparisons
    assert found.ratio is not None
    assert found.ratio.verdict == "A is faster"
    assert 2 < found.ratio.value < 12
    assert found.ratio.interval[0] < found.ratio.value < found.ratio.interval[1]
    (told,) = json.loads(to_json(report))["comparisons"]
    assert told["ratio"]["rounds"] == ROUNDS
    assert told["ratio"]["interval"] == list(found.ratio.interval)


@pytest.mark.parametrize(
    ("phone", "warning"),
    [
        (Phone(slowing=0.3), "slower from first to last"),
        (Phone(slowing=-0.3), "faster from first to last"),
        (Phone(after=DeviceState(temperatures_c={"soc": 45.0})), "15 °C warmer (soc)"),
        (Phone(after=DeviceState(clocks_khz={"cpu7": 1_500_000})), "clock of cpu7 changed by -50%"),
    ],
)
def test_a_device_that_changes_under_way_is_warned_of(tmp_path: Path, phone: Phone, warning: str) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path)
    (run,) = bench_subject(subject, [phone], QUICK).runs
    assert any(warning in line for line in run.warnings)
    (steady,) = bench_subject(subject, [Phone()], Effort(runs=120)).runs
    assert steady.warnings == ()


def test_a_device_that_fails_or_is_not_there_is_a_finding(tmp_path: Path) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path)
    phones = [Phone(failure="it fell"), Phone(missing=Missing(reason="offline", command="adb devices")), Phone()]
    report = bench_subject(subject, phones, QUICK)
    assert [run.failure for run in report.runs] == ["it fell", None]
    assert [skip.reason for skip in report.skipped] == ["offline"]
    assert not report.succeeded
    assert not bench_subject(subject, phones[1:2], QUICK).succeeded


def test_times_that_cannot_be_are_no_comparison(tmp_path: Path) -> None:
    subject = open_subject(matmul_model(tmp_path / "m.onnx", 8), tmp_path)
    report = bench_subject(subject, [Phone(scale=0.0)], QUICK, against=subject)
    assert "times that cannot be" in str(report.comparisons[0].failure)
    assert not report.succeeded


def test_data_gives_the_sample(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", t0=np.ones((2, 8, 8), np.float32))
    report = bench_on(matmul_model(tmp_path / "m.onnx", 8), HOST, QUICK, data=str(tmp_path / "d.npz"))
    assert report.runs[0].failure is None
