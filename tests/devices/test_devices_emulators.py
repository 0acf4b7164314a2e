"""The same test bodies over every emulator that is here, and the self-test, which says no to devices that lie."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import assert_same_as_cpu, float_conv, make_job, noise_samples, require_device, run_in, text_model

from edgekit._ort import CPU_PROVIDER, CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.devices.device import LEAST_SAMPLES, Device, DeviceRun, Job, Missing
from edgekit.devices.find import default_target, serve_device
from edgekit.devices.local.host import Host, QnnSimulator
from edgekit.devices.self_test import SelfTest, try_device
from edgekit.evidence import Evidence
from edgekit.model.tensors import DTYPES, Array, Tensors

pytestmark = pytest.mark.slow

TARGETS = {"host": "nnapi", "emulated": "coreml", "qnn-htp-sim": "qnn", "android:x86_64": "xnnpack"}


@pytest.mark.parametrize("name", ["host", "emulated", "qnn-htp-sim", "android:x86_64"])
def test_a_float_model_runs(name: str, tmp_path: Path, work: Path) -> None:
    # Each sample runs as often as asked, with a time each.
    job = make_job(float_conv(tmp_path / "f.onnx"), TARGETS[name], precision="fp16")
    run = require_device(name, TARGETS[name]).run_job(msgspec.structs.replace(job, repeat=2, threads=1), work)
    assert (run.failure, run.outputs.count, len(run.latency_ms)) == (None, 3, 6)
    assert run.placement
    assert run.load_ms > 0
    assert run.peak_rss_bytes > 1 << 20
    assert_same_as_cpu(run, job, 5e-3)


@pytest.mark.parametrize("name", ["host", "emulated", "qnn-htp-sim", "android:x86_64"])
def test_a_slow_device_stops_when_its_time_is_over_and_says_so(name: str, tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), TARGETS[name], noise_samples(9), precision="fp16")
    run = require_device(name, TARGETS[name]).run_job(msgspec.structs.replace(job, budget_s=0.0), work)
    assert (run.failure, run.outputs.count, run.stopped_early) == (None, LEAST_SAMPLES, True)
    assert any("4 of 9 samples" in note for note in run.notes)


@pytest.mark.parametrize("name", ["host", "android:x86_64"])
@pytest.mark.parametrize(("concurrency", "io_binding"), [(1, True), (3, True)])
def test_parallel_runs_are_the_same(name: str, concurrency: int, io_binding: bool, tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), TARGETS[name], precision="fp16")
    way = msgspec.structs.replace(job, repeat=8, threads=1, concurrency=concurrency, io_binding=io_binding)
    run = require_device(name, TARGETS[name]).run_job(way, work)
    assert (run.failure, run.outputs.count, len(run.latency_ms)) == (None, 3, 24)
    assert len(run.elapsed_ms) == (3 if concurrency > 1 else 0)
    for index, spent in enumerate(run.elapsed_ms):
        assert spent > max(run.latency_ms[8 * index : 8 * index + 8])
    assert_same_as_cpu(run, job, 5e-3)


@pytest.mark.parametrize("name", ["host", "host:native", "android:x86_64", "emulated"])
def test_every_type_of_tensor_passes_unchanged(name: str, tmp_path: Path, work: Path) -> None:
    rng = np.random.default_rng(5)
    values: dict[str, Array] = {
        dtype: rng.integers(0, 2, (1, 7)).astype(kind) for dtype, kind in DTYPES.items() if dtype != "string"
    }
    values |= {"i64": np.array([[2**62]]), "f64": np.array([[1e300]]), "minus": np.array([[-0.0]], np.float32)}
    values |= {"string": np.array([["grüße", 'a\nb\x01"\\', "\U0001f600", "x\x00y", ""]], object)}
    values |= {"scalar": np.array(2.5, np.float32)}
    kinds = {key: "string" if value.dtype == object else value.dtype.name for key, value in values.items()}
    words = {key: {"float32": "float", "float64": "double"}.get(kind, kind) for key, kind in kinds.items()}
    dims = {key: "[1,N]" if value.ndim else "" for key, value in values.items()}
    ins = ", ".join(f"{words[key]}{dims[key]} {key}_in" for key in values)
    outs = ", ".join(f"{words[key]}{dims[key]} {key}_out" for key in values)
    body = " ".join(f"{key}_out = Identity({key}_in)" for key in values)
    model = text_model(tmp_path / "all.onnx", f"({ins}) => ({outs}) {{ {body} }}")
    full = {f"{key}_in": value for key, value in values.items()}
    rows = [full, {key: value[:, :0] if value.ndim else value for key, value in full.items()}]
    target = TARGETS.get(name, "nnapi")
    run = require_device(name, target).run_job(make_job(model, target, rows, precision="fp32"), work)
    assert run.failure is None
    for row, got in zip(rows, run.outputs, strict=True):
        for key in values:
            np.testing.assert_array_equal(got[f"{key}_out"], row[f"{key}_in"])
            assert got[f"{key}_out"].dtype == row[f"{key}_in"].dtype


def test_nodes_that_qnn_refuses_are_named(tmp_path: Path, work: Path) -> None:
    device = require_device("qnn-htp-sim", "qnn")
    model = text_model(tmp_path / "m.onnx", "(float[1,4] x) => (float[1,4] y) { r = Relu(x) y = Asinh(r) }")
    run = device.run_job(make_job(model, "qnn", [{"x": np.ones((1, 4), np.float32)}]), work)
    assert run.failure is None
    assert [(node.op, node.provider) for node in run.placement if node.op == "Asinh"] == [("Asinh", CPU_PROVIDER)]
    assert "refuses 1 node, " in run.notes[0]
    assert "n1" in run.notes[0]


def test_an_architecture_of_the_simulator_computes_otherwise(tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "qnn")
    require_device("qnn-htp-sim", "qnn")
    errors: dict[str, float] = {}
    for arch in ("v68", "v79"):
        run = run_in(QnnSimulator(arch=arch), job, work / arch)
        assert (run.failure, run.evidence) == (None, Evidence.SIMULATOR)
        session = CpuSession(job.model, SessionSettings())
        pairs = zip(job.samples, run.outputs, strict=True)
        errors[arch] = max(float(np.abs(session.run(sample)["y"] - got["y"]).max()) for sample, got in pairs)
    assert errors["v68"] < 1e-5 < errors["v79"]


def test_an_ort_format_file_gets_its_placement_from_the_profile(tmp_path: Path, work: Path) -> None:
    model = float_conv(tmp_path / "f.onnx")
    job = make_job(model, "xnnpack")
    ort = tmp_path / "f.ort"
    CpuSession(model, SessionSettings(config={"session.save_model_format": "ORT"}, save_to=ort))
    run = require_device("host", "xnnpack").run_job(msgspec.structs.replace(job, model=ort), work)
    assert (run.failure, run.placement_source) == (None, "profile")
    assert {node.provider for node in run.placement} == {CPU_PROVIDER}
    assert run.outputs.count == 3


HONEST: dict[bytes, tuple[DeviceRun, list[Tensors]]] = {}


EMULATED = [pytest.param(name, marks=pytest.mark.long) for name in ("arm64:native", "android")]


@pytest.mark.parametrize("name", ["emulated", "qnn-htp-sim", "android:x86_64", "ios-sim", *EMULATED])
def test_every_installed_emulator_passes_its_self_test(name: str) -> None:
    # That of the host is in tests/cli/test_cli_bench.py.
    served = serve_device(name)
    for _, target in served:
        require_device(name, target)
    test = try_device(served)
    assert test.skipped is None
    assert [(check.name, check.detail) for check in test.checks if not check.passed] == []
    assert len(test.checks) == 5 * len(served)
    assert [check.name.startswith("nnapi: ") for check in test.checks][-5:] == [name.startswith("android")] * 5
    assert test.versions["onnxruntime"]


def try_alone(device: Device) -> SelfTest:
    return try_device([(device, default_target("host"))])


class Liar(Host, frozen=True, kw_only=True):
    """Runs a model once for all liars, and then says something else."""

    lie: str = ""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        model = job.model.read_bytes()
        if model not in HONEST:
            run = Host.run_job(self, job, work)
            HONEST[model] = run, [{"y": row["y"].copy()} for row in run.outputs]
        run, rows = HONEST[model]
        if self.lie == "zeros":
            rows = [{"y": np.zeros_like(row["y"])} for row in rows]
        elif self.lie == "swapped":
            rows = rows[::-1]
        elif self.lie == "NaN":
            rows = [{"y": np.full_like(row["y"], np.nan)} for row in rows]
        elif self.lie == "nowhere":
            run = msgspec.structs.replace(run, placement=())
        elif self.lie == "timeless":
            run = msgspec.structs.replace(run, latency_ms=())
        elif self.lie == "eager" and run.failure is not None:
            rows, run = [{"y": np.zeros((1, 4, 8, 8), np.float32)}] * 3, msgspec.structs.replace(run, failure=None)
        return msgspec.structs.replace(run, outputs=Samples(source="lie", count=len(rows), read=lambda: iter(rows)))


class Remembering(Host, frozen=True, kw_only=True):
    """Runs the first model that it was ever given, whatever comes after."""

    first: list[Path]

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        kept = work.parent.parent / f"edgekit-first-{id(self)}.onnx"
        if not self.first:
            kept.write_bytes(job.model.read_bytes())
            self.first.append(kept)
        return Host.run_job(self, msgspec.structs.replace(job, model=kept), work)


@pytest.mark.parametrize(
    ("lie", "check"),
    [
        ("zeros", "outputs"), ("swapped", "outputs"), ("NaN", "outputs"), ("nowhere", "placement"),
        ("timeless", "times"), ("eager", "a model that cannot run is refused"),
    ],
)  # fmt: skip
def test_a_lying_device_fails_the_check_for_that_lie(lie: str, check: str) -> None:
    test = try_alone(Liar(lie=lie))
    assert not test.passed
    assert check in [tried.name for tried in test.checks if not tried.passed]


def test_a_device_that_does_not_run_what_it_is_given_fails_the_negative_control() -> None:
    device = Remembering(first=[])
    test = try_alone(device)
    device.first[0].unlink()
    assert {check.name for check in test.checks if not check.passed} == {
        "an altered weight is noticed", "a model that cannot run is refused",
    }  # fmt: skip


def test_a_device_that_is_not_there_is_not_tried() -> None:
    class Absent(Host, frozen=True, kw_only=True):
        """Is not there."""

        def find_missing(self) -> Missing | None:
            return Missing(reason="unplugged", command="plug it in")

    test = try_alone(Absent())
    assert (test.passed, test.skipped, test.command, test.checks) == (False, "unplugged", "plug it in", ())
