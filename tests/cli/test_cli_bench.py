"""`edgekit bench`, `edgekit devices test` and `--on-file`: exit codes, JSON, and one line for whatever is wrong."""

from pathlib import Path

import pytest
from demo_paths import MODEL
from fixture_types import Answer, Refused, Shown
from tiny_models import parse_model

from edgekit.bench.subject import Opening, open_pair
from edgekit.devices.find import find_device
from edgekit.target import load_target

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


def test_bench_compares_two_models_in_alternation_each_with_its_own_sizes(
    tmp_path: Path, demo_bundles: Path, shown: Shown, refused: Refused
) -> None:
    first, second = (
        parse_model(f"agraph (float[{size}] x) => (float[{size}] y) {{ y = Abs(x) }}", tmp_path / f"{name}.onnx")
        for name, size in (("net_open", "n,4"), ("fixed", "2,4"))
    )
    bench, file = ["bench", "--on", "host", "--runs", "3", "-q", "--dim", "n=2"], tmp_path / "bench.md"
    pair = [str(first), "--against", str(second), "--target", "cpu"]
    assert "B (" in shown([*bench, *pair, "--markdown", str(file)])
    title, *_, last = file.read_text().splitlines()
    assert title == "### ✅ net\\_open.onnx against fixed.onnx"
    assert "B (" in file.read_text().replace("\\", "")
    assert last == ""
    assert "no dynamic dimension 'm'" in refused(*bench, "--dim", "m=2", *pair)
    # The sizes of a bundle are fixed, and it has a target.
    opening = Opening(target="cpu", dims={"n": 2})
    bundle, model = open_pair(demo_bundles / "digits_mobilenet-cpu", first, tmp_path / "work", opening)
    host = find_device("host", load_target("cpu"))
    assert [sample["x"].shape for sample in model.job_for(host).samples] == [(2, 4)]
    assert bundle.job_for(host).samples.count == 1


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
