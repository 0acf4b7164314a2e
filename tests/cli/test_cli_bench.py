"""`edgekit bench`, `edgekit devices test` and `--on-file`: exit codes, JSON, and one line for whatever is wrong."""

from pathlib import Path

import pytest
from demo_paths import MODEL
from fixture_types import Answer, Refused, Shown
from tiny_models import parse_model

pytestmark = pytest.mark.slow

KEYS = {
    "device", "provider", "median_ms", "mean_ms", "p90_ms", "p95_ms", "p99_ms", "min_ms", "max_ms", "std_ms",
    "throughput_per_s", "load_ms", "first_ms", "batch", "model_bytes", "peak_rss_bytes",
    "warmup", "iterations", "threads",
}  # fmt: skip
BENCH = ["bench", str(MODEL), "--on", "host", "--runs", "10", "-q"]


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares in two rounds of processes, not in eight."""
    monkeypatch.setattr("edgekit.bench.bench.ROUNDS", 2)


def test_the_json_of_bench_has_its_documented_keys(answer: Answer) -> None:
    report = answer([*BENCH, "--threads", "1"])
    (run,) = report["runs"]
    assert report["subject"] == MODEL.name
    assert run.keys() >= KEYS
    assert (run["iterations"], run["threads"]) == (10, 1)


def test_bench_compares_two_models_in_alternation(tmp_path: Path, shown: Shown) -> None:
    file = tmp_path / "bench.md"
    assert "B (" in shown([*BENCH, "--against", str(MODEL), "--seconds", "0.1", "--markdown", str(file)])
    title, *_, last = file.read_text().splitlines()
    assert title == f"### ✅ {MODEL.name} against {MODEL.name}".replace("_", "\\_")
    assert "B (" in file.read_text().replace("\\", "")
    assert last == ""


def test_each_subject_takes_its_own_sizes(tmp_path: Path, demo_bundles: Path, answer: Answer, refused: Refused) -> None:
    paths = [
        parse_model(f"agraph (float[{size}] x) => (float[{size}] y) {{ y = Abs(x) }}", tmp_path / f"{name}.onnx")
        for name, size in (("open", "n,4"), ("fixed", "2,4"))
    ]
    bench = ["bench", "--on", "host", "--runs", "3", "-q", "--dim", "n=2"]
    for first, second in (paths, (demo_bundles / "digits_mobilenet-cpu", paths[0])):
        report = answer([*bench, str(first), "--against", str(second), "--target", "cpu"])
        assert report["comparisons"][0]["failure"] is None
    told = refused(*bench, "--dim", "m=2", *map(str, (paths[0], "--against", paths[1])))
    assert "no dynamic dimension 'm'" in told


def test_a_missing_device_gives_exit_code_1(answer: Answer) -> None:
    report = answer(["bench", str(MODEL), "--on", "coreml", "-q"], 1)
    assert report["skipped"][0]["device"] == "coreml"


def test_bench_takes_devices_from_a_file(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "d.toml").write_text('[[device]]\nname = "my desk"\ndevice = "host"\n')
    arguments = ["bench", str(MODEL), "--on-file", str(tmp_path / "d.toml"), "--runs", "5", "-q"]
    assert [run["device"] for run in answer(arguments)["runs"]] == ["my desk"]


def test_devices_test_lists_its_checks(shown: Shown, answer: Answer) -> None:
    test = answer(["devices", "test", "host", "-q"])
    assert test["passed"] is True
    assert {"outputs", "placement", "an altered weight is noticed"} <= {check["name"] for check in test["checks"]}
    assert "not tried: Core ML runs only on Apple" in shown(["devices", "test", "coreml"], 1)


def test_devices_list_shows_versions(answer: Answer) -> None:
    devices = {device["name"]: device for device in answer(["devices", "list"])["devices"]}
    assert devices["host"]["versions"]["onnxruntime"]
    android = devices["android"]
    assert not android["available"] or android["versions"]["onnxruntime"]
