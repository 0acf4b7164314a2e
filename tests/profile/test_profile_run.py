"""Profiles of real sessions: what runs is found, added up, compared, drawn; what cannot be is one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from demo_paths import MODEL
from devices_models import Stub, float_conv, qdq_conv, require_runner
from tiny_models import parse_model

from edgekit.bench.latency import Ratio
from edgekit.cli.main import run_command
from edgekit.devices.device import DeviceRun, Job, refuse_run
from edgekit.devices.find import find_device
from edgekit.devices.local.runner import host_abi
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.graph.graph import read_graph
from edgekit.model.model import load_model
from edgekit.profile.measure import give_advice
from edgekit.profile.nodes import add_roof_shares, find_roof, find_source, list_sources
from edgekit.profile.profile import find_causes, pair_layers
from edgekit.profile.report import DeviceProfile, NodeTime, Roof, Unasked
from edgekit.report.profiles import describe_node, headline_profile
from edgekit.target import load_target

pytestmark = pytest.mark.slow

NATIVE = ["--on", "host:native", "--runs", "4", "--threads", "1", "-q"]


@pytest.fixture(scope="module", autouse=True)
def _runner() -> None:
    require_runner(host_abi())


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the runner of the user's, and no roofline."""
    kept = require_runner(host_abi()).program.parents[1]
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "runner").symlink_to(kept)
    monkeypatch.setenv("EDGEKIT_CACHE", str(cache))
    return cache


def profile(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    capsys.readouterr()
    assert run_command(["profile", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_profile_names_all_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    model = qdq_conv(tmp_path / "q.onnx", activation=np.int8)
    html = tmp_path / "p.html"
    report = profile([str(model), *NATIVE, "--html", str(html)], capsys)
    (found,) = report["profiles"]
    nodes = {node["source"]: node for node in found["nodes"]}
    assert nodes["conv"]["macs"] == 4 * 8 * 8 * 4 * 9
    assert nodes["conv"]["op"] == "QLinearConv"
    assert nodes["conv"]["integers"]
    assert found["nodes_ms"] == pytest.approx(sum(node["self_ms"] for node in found["nodes"]))
    assert sum(one["share"] for one in found["operators"]) == pytest.approx(1)
    assert {one["kind"] for one in found["unasked"]} >= {"quantize and dequantize"}
    assert found["plain_ms"] > 0
    assert found["overhead"]["rounds"] == 3
    assert min(found["roof"].values()) > 0
    assert len(list((own_cache / "roofline").iterdir())) == 1
    page = html.read_text()
    assert "default-src 'none'" in page
    assert page.count("<script>") == 1


# As in https://onnxruntime.ai/docs/performance/tune-performance/profiling-tools.html and the notebooks that follow it.
_SCRIPT = """
import collections, json, sys
total = collections.Counter()
for event in json.load(open(sys.argv[1])):
    if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
        total[event["args"]["op_name"]] += event["dur"]
print(json.dumps(total))
"""


def test_the_profilers_own_file_is_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgekit.profile.measure.ROUNDS", 1)
    trace = tmp_path / "t.json"
    arguments = [str(MODEL), "--on", "host", "--runs", "5", "--no-roofline", "--trace", str(trace)]
    (found,) = profile(arguments, capsys)["profiles"]
    own = subprocess.run([sys.executable, "-c", _SCRIPT, str(trace)], check=True, capture_output=True).stdout
    operators = {one["op"]: one for one in found["operators"]}
    assert json.loads(own).keys() == operators.keys()
    for one in operators.values():
        assert one["average_ms"] == pytest.approx(one["self_ms"] / one["calls"])
        assert one["average_ms"] <= one["max_ms"]
    assert [phase["phase"] for phase in found["memory"]] == ["start", "session", "first run", "all runs"]
    peaks = [phase["peak_bytes"] for phase in found["memory"]]
    assert peaks == sorted(peaks)
    assert all(phase["bare_bytes"] for phase in found["memory"])


def test_a_session_that_takes_longer_than_the_time_limit_runs_once(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = profile([str(MODEL), "--on", "host", "--seconds", "0.1", "--no-roofline"], capsys)["profiles"]
    assert found["overhead"] is None
    assert found["nodes"]
    assert any("0 of 3 rounds fitted into the time" in warning for warning in found["warnings"])


def test_two_profiles_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], own_cache: Path) -> None:
    a, b = qdq_conv(tmp_path / "q.onnx", activation=np.int8), float_conv(tmp_path / "f.onnx")
    trace = ["--trace", str(tmp_path / "t.json")]
    report = profile([str(a), "--against", str(b), *NATIVE, "--no-roofline", "--seconds", "0.5", *trace], capsys)
    ops = [{event["args"].get("op_name") for event in json.loads((tmp_path / name).read_bytes())}
           for name in ("t.json", "t.1.json")]  # fmt: skip
    assert ["QLinearConv" in each for each in ops] == [True, False]
    assert [found["subject"] for found in report["profiles"]] == ["q.onnx", "f.onnx"]
    assert report["comparison"]["ratio"]["rounds"] == 8
    assert [pair["b_ops"] for pair in report["comparison"]["pairs"]] != []
    assert not (own_cache / "roofline").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "M"], "would be written over one that is read"),
        (["--trace", "x.json", "--html", "x.json"], "another one that is written"),
        (["--probe-again", "--no-roofline"], "--no-roofline leaves out"),
        (["--html", "."], "it is a folder"),
        (["--against", "none.onnx"], "no file 'none.onnx'"),
    ],
)
def test_contradictory_options_are_refused_in_one_line(
    arguments: list[str], says: str, relu_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(relu_model) if word == "M" else word for word in arguments]
    assert run_command(["profile", str(relu_model), *NATIVE, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_model_that_cannot_run_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[1] x) => (float[1] y) { y = own.Mystery(x) }'
    report = profile([str(parse_model(text, tmp_path / "m.onnx")), *NATIVE], capsys, code=1)
    assert "Mystery" in report["profiles"][0]["failure"]


def test_kernels_are_traced_to_the_nodes_that_they_come_from(tmp_path: Path) -> None:
    sources = list_sources(read_graph(load_model(float_conv(tmp_path / "f.onnx"))))
    assert find_source("conv_nchwc", sources).node == "conv"
    assert find_source("y_nchwc", sources).node == "relu"
    assert find_source("conv_token_12", sources).macs == 4 * 8 * 8 * 4 * 9
    assert find_source("Transpose_token_3", sources).node == ""


def kernel(op: str, ms: float, source: str = "", **facts: Any) -> NodeTime:
    given: dict[str, Any] = {
        "name": source or op, "op": op, "provider": "", "source": source, "calls": 1, "total_ms": ms, "self_ms": ms,
        "share": 0.1, "inputs": ("float[4]",), "outputs": ("float[4]",), "macs": 0, "bytes": 1000,
        "gmacs_per_s": 0.0, "gbytes_per_s": 0.0,
    }  # fmt: skip
    return NodeTime(**{**given, **facts})


def device(*nodes: NodeTime, run_ms: float = 10.0, overhead: float = 1.01, **facts: Any) -> DeviceProfile:
    return DeviceProfile(
        subject="m", device="host", evidence=Evidence.EMULATED, provider="CPU", run_ms=run_ms, nodes=nodes,
        nodes_ms=sum(node.self_ms for node in nodes), overhead=Ratio(value=overhead, interval=(1, 2), rounds=3),
        **facts,
    )  # fmt: skip


def causes(slow: DeviceProfile, fast: DeviceProfile) -> list[str]:
    return [cause.id for cause in find_causes(slow, fast, None, (), slow_is_a=True)]


def test_fast_kernels_are_compared_with_the_peak_and_capped_at_100_percent() -> None:
    roof = Roof(float_gmacs=50, integer_gmacs=200, gbytes=10, cache_gbytes=40)
    busy = kernel("Conv", 1.0, macs=40_000_000, gmacs_per_s=40.0, gbytes_per_s=0.001)
    whole = kernel("QLinearConv", 1.0, macs=40_000_000, gmacs_per_s=40.0, gbytes_per_s=0.001, integers=True)
    moving = kernel("Add", 1.0, bytes=5_000_000, gbytes_per_s=5.0)
    short = kernel("Add", 0.002, gbytes_per_s=0.1)
    near = kernel("Mul", 0.05, bytes=1_000_000, gbytes_per_s=20.0)
    found = add_roof_shares([busy, whole, moving, short, near], roof)
    assert [(node.roof_share, node.bound) for node in found] == [
        (0.8, "compute"), (0.2, "compute"), (0.5, "memory"), (0.0025, "calls"), (0.5, "memory"),
    ]  # fmt: skip
    fast = kernel("Add", 1.0, bytes=5_000_000, gbytes_per_s=33.0)
    (held,) = add_roof_shares([fast], Roof(float_gmacs=50, integer_gmacs=200, gbytes=10))
    assert held.roof_share == pytest.approx(3.3)
    assert "100% of the roof" in describe_node(held)


def test_the_peak_of_a_machine_is_measured_once(tmp_path: Path, own_cache: Path) -> None:
    asked: list[int] = []

    def run(job: Job, work: Path) -> DeviceRun:
        asked.append(job.threads)
        work.mkdir(parents=True)
        return find_device("host:native", job.target).run_job(job, work)

    assert find_roof("d", 1, run, tmp_path / "b") == find_roof("d", 1, run, tmp_path / "a")
    assert asked == [1]
    (kept,) = (own_cache / "roofline").iterdir()
    kept.write_bytes(b'{"float_gmacs":1,"integer_gmacs":1,"gbytes":1}')
    assert find_roof("d", 1, run, tmp_path / "c").cache_gbytes > 0
    assert asked == [1, 1]


def test_a_device_that_cannot_run_the_probe_says_why(tmp_path: Path, own_cache: Path) -> None:
    refused = refuse_run(Stub(), "no such kernel")
    with pytest.raises(DeviceError, match="'d' cannot run the probe: no such kernel"):
        find_roof("d", 1, lambda job, work: refused, tmp_path)  # noqa: ARG005
    assert not (own_cache / "roofline").exists()


def test_a_cause_is_named_if_it_costs_more_than_in_the_other_profile() -> None:
    def with_casts(ms: float) -> DeviceProfile:
        one = Unasked(kind="casts", nodes=1, inserted=1, self_ms=ms, share=0.1)
        return device(kernel("Cast", ms, kind="casts"), unasked=(one,))

    assert "casts" in causes(with_casts(3.0), with_casts(1.0))
    assert "casts" not in causes(with_casts(3.0), with_casts(2.9))
    fast = device(kernel("Conv", 9.5))
    assert "between-kernels" in causes(device(kernel("Conv", 6.0)), fast)
    assert "between-kernels" not in causes(device(kernel("Conv", 6.0), overhead=2.0), fast)
    slow = kernel("QLinearConv", 9.0, integers=True, macs=100)
    fast = device(kernel("Conv", 5.0, macs=100))
    plain, vnni = Roof(float_gmacs=50, integer_gmacs=60, gbytes=9), Roof(float_gmacs=50, integer_gmacs=200, gbytes=9)
    assert "no-fast-integers" in causes(device(slow, roof=plain), fast)
    assert "no-fast-integers" not in causes(device(slow, roof=vnni), fast)
    assert "no-fast-integers" not in causes(device(slow, roof=plain), device(slow, roof=plain))


def test_float_between_quantized_values_is_a_float_island(tmp_path: Path) -> None:
    graph = read_graph(load_model(qdq_conv(tmp_path / "q.onnx", activation=np.int8)))
    conv, done = kernel("Conv", 3.0, "conv"), kernel("QLinearConv", 3.0, "conv", integers=True, inputs=("int8[4]",))
    fast = device(conv, run_ms=5)
    slow = device(conv, kernel("DequantizeLinear", 1.0, "x_dq"))
    (island,) = [one for one in find_causes(slow, fast, graph, (), slow_is_a=True) if one.id == "float-islands"]
    assert (island.milliseconds, island.nodes) == (3.0, ("conv",))
    assert not [one for one in find_causes(device(done), fast, graph, (), slow_is_a=True) if "islands" in one.id]
    assert island.message.startswith("1 Conv compute in float")


def test_layers_are_matched_through_fusion_and_quantization(tmp_path: Path) -> None:
    a = read_graph(load_model(float_conv(tmp_path / "f.onnx")))
    b = read_graph(load_model(qdq_conv(tmp_path / "q.onnx", activation=np.int8)))
    fused = (kernel("Conv", 2.0, "relu"),)
    rounded = (kernel("QuantizeLinear", 0.5, "x_q", kind="quantize and dequantize"),
               kernel("QLinearConv", 1.0, "conv"), kernel("DequantizeLinear", 0.25, "y_dq"))  # fmt: skip
    assert [(pair.a_ms, pair.b_ms) for pair in pair_layers(fused, a, rounded, b)] == [(2.0, 1.75)]


def test_what_the_profiler_writes_between_kernels_is_told_apart() -> None:
    found = device(kernel("Conv", 4.7), kernel("Conv", 4.7), overhead=1.05)
    known = msgspec.structs.replace(found, overhead=Ratio(value=1.05, interval=(1.02, 1.08), rounds=3))
    assert known.covered == pytest.approx(0.94)
    assert known.recording == pytest.approx(1 - 1 / 1.05)
    assert known.between_us == pytest.approx(300)
    assert "the profiler between them 4.8%" in headline_profile(known)
    # Never more than lies between, and nothing where noise could be all of it.
    assert msgspec.structs.replace(known, nodes_ms=9.9).recording == pytest.approx(0.01)
    noisy = Ratio(value=1.05, interval=(0.9, 1.2), rounds=3)
    assert msgspec.structs.replace(known, overhead=noisy).recording == 0.0


def test_the_target_of_a_bundle_is_checked_by_the_shipped_rules(relu_model: Path) -> None:
    """It has no folder: `edgekit profile BUNDLE` looked for rules in the working folder, and failed."""
    bundled = msgspec.structs.replace(load_target("xnnpack"), folder=Path())
    assert give_advice(load_model(relu_model), bundled, ()) == ()
    assert give_advice(load_model(relu_model), msgspec.structs.replace(bundled, name="of-mine"), ()) == ()
