"""Sessions that stay open: for several turns of a model, and for a program that lets another process compute."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from bundle_models import flip_byte
from devices_models import Watched, float_conv, make_job, noise_samples, require_runner, text_model
from onnx import numpy_helper
from other_machine.board import Board
from other_machine.fixtures import Phone
from stepped_models import STEPS

from edgekit._files import digest_file
from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import write_rows
from edgekit.bundle.manifest import encode_json
from edgekit.devices.device import Device, DeviceRun, Job, refuse_run
from edgekit.devices.local.emulated import Emulated
from edgekit.devices.local.host import Host
from edgekit.devices.local.runner import host_abi
from edgekit.devices.process import session
from edgekit.devices.process.pipes import ANSWER, ASK, open_pipes
from edgekit.devices.process.session import open_session
from edgekit.devices.remote.remote import SshDevice
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.model.tensors import DTYPES, Array, Tensors
from edgekit.verify.run import verify_bundle


def assert_keeps_state(stepped: Bundle, device: Device, *, jobs: int = 2) -> None:
    """Asserts that a device runs all steps in one session, and that feeding the state back loses no accuracy."""
    watched = Watched(device=device)
    (run,) = verify_bundle(stepped, [watched]).runs
    assert run.passed, run.failures
    assert run.state is not None
    assert {drift.output: drift.lost_db for drift in run.state.drift} == {"y": 0.0, "new_h": 0.0}
    assert (run.state.steps, run.state.sequences) == (STEPS, len(run.find_places(stepped.golden.samples)) // STEPS)
    assert len(watched.jobs) == jobs, "the golden samples, and all steps of all sequences"


def test_the_host_keeps_one_session_for_all_steps(stepped: Bundle) -> None:
    assert_keeps_state(stepped, Host())


def test_without_pollable_pipes_each_step_is_a_run_of_its_own(stepped: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_WAITS_FOR_PIPES", False)
    assert_keeps_state(stepped, Emulated(), jobs=1 + STEPS)


@pytest.mark.slow
def test_a_phone_and_a_board_keep_one_session_for_all_steps(phone: Phone, stepped: Bundle, board: Board) -> None:
    assert_keeps_state(stepped, phone.device)
    assert phone.machine.left_running() == []
    assert_keeps_state(stepped, SshDevice(host="board", python=sys.executable, provider=CPU_PROVIDER))
    assert board.machine.left_running() == []


class Scripted(Device, frozen=True, kw_only=True):
    """A device that yields the outputs of `turns`, and ends with `failure`."""

    turns: Callable[[Job], Iterator[Tensors]]
    failure: str | None = None
    name: str = "it"
    evidence: Evidence = Evidence.DEVICE

    def run_job(self, job: Job, work: Path) -> DeviceRun:  # noqa: ARG002 - the seam
        for outputs in self.turns(job):
            if job.on_outputs is not None:
                job.on_outputs(outputs)
        return msgspec.structs.replace(refuse_run(self, ""), failure=self.failure)


def read_first_sample_twice(job: Job) -> Iterator[Tensors]:
    """Reads the first sample before the run, as the NPU's simulator does."""
    next(iter(job.samples))
    yield from job.samples


def repeat_first_sample(job: Job) -> Iterator[Tensors]:
    yield from islice(job.samples, 1)
    yield from job.samples


def ask(turns: Callable[[Job], Iterator[Tensors]], tmp_path: Path, *, failure: str | None = None) -> list[float]:
    """Runs two turns of one and of two samples on such a device, and returns what they gave."""
    job = make_job(float_conv(tmp_path / "f.onnx"), "cpu", noise_samples(3), timeout_s=0.5)
    rows = [{"x": np.full(1, value, np.float32)} for value in (1, 2, 3)]
    with open_session(Scripted(turns=turns, failure=failure), job, tmp_path) as run:
        return [float(row["x"][0]) for turn in (rows[:1], rows[1:]) for row in run(turn)]


@pytest.mark.parametrize("turns", [lambda job: iter(job.samples), read_first_sample_twice])
def test_steps_are_answered_in_order(turns: Callable[[Job], Iterator[Tensors]], tmp_path: Path) -> None:
    assert ask(turns, tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("turns", "failure", "said"),
    [
        (lambda job: islice(job.samples, 2), None, "1 of 2 samples came back"),
        (lambda job: islice(job.samples, 2), "it is asleep", "it is asleep"),
        (lambda job: iter(job.samples), "it broke afterwards", "it broke afterwards"),
        (lambda job: (sample for sample in job.samples for _ in "ab"), None, "2 of 1 samples came back"),
        # It waits for samples that nobody knows before it answers.
        (lambda job: iter(list(job.samples)), None, "0 of 1 samples came back"),
        (repeat_first_sample, None, "answered cannot be run again"),
    ],
)
def test_a_device_that_breaks_the_protocol_of_steps_fails(
    turns: Callable[[Job], Iterator[Tensors]], failure: str | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DeviceError, match=said):
        ask(turns, tmp_path, failure=failure)


MODULES = ("edgekit.devices.ios.compute", "edgekit.devices.android.compute")
STARTER = """
import sys, time
from pathlib import Path
from edgekit.devices.process.pipes import serving
with serving(Path(sys.argv[1]), sys.argv[2], 60.0):
    time.sleep(60)
"""


def has_reader(pipe: Path) -> bool:
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def wait_until(wanted: bool, pipe: Path) -> bool:
    deadline = time.monotonic() + 20
    while has_reader(pipe) != wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_child_processes_of_a_killed_command_end(tmp_path: Path) -> None:
    folder = tmp_path / "pipes"
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(folder), MODULES[0]])
    try:
        assert wait_until(True, folder / ASK)
        # Only this process's own end would hold the pipe open: wait for that of the server too.
        time.sleep(0.5)
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    assert wait_until(False, folder / ASK)


@pytest.mark.parametrize("module", MODULES)
def test_pipes_without_a_reader_are_not_waited_for(module: str, tmp_path: Path) -> None:
    for name in (ASK, ANSWER):
        os.mkfifo(tmp_path / name)
    argv = [sys.executable, "-P", "-m", module, str(tmp_path)]
    assert subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode != 0


def test_a_served_pipe_waits_for_requests(tmp_path: Path) -> None:
    for name in (ASK, ANSWER):
        os.mkfifo(tmp_path / name)
    held = [os.open(tmp_path / name, os.O_RDWR) for name in (ASK, ANSWER)]
    with open_pipes(tmp_path) as (ask, answer):
        assert os.get_blocking(ask.fileno())
        assert os.get_blocking(answer.fileno())
        os.write(held[0], b"question\n")
        assert ask.readline() == b"question\n"
    for number in held:
        os.close(number)


# edgekit's runner by hand: files in, files out, a report; and the self-test of a bundle on the machine itself.


def run_runner(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    runner = require_runner(host_abi())
    argv = [str(runner.program), *map(str, words), "--library", str(runner.library)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("form", ["npy", "pb"])
def test_files_give_the_bits_of_python(tmp_path: Path, form: str) -> None:
    model = float_conv(tmp_path / "f.onnx")
    samples = noise_samples(12)
    for index, sample in enumerate(samples):
        folder = tmp_path / f"in/test_data_set_{index}"
        folder.mkdir(parents=True)
        tensor = numpy_helper.from_array(sample["x"])
        if form == "pb":
            (folder / "input_0.pb").write_bytes(tensor.SerializeToString())
        else:
            np.save(folder / "x.npy", sample["x"])
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = run_runner("--model", model, "--inputs", tmp_path / "in", "--outputs", out, "--format", form, "--runs", "2",
                      "--report", report, "--warmup", "1", "--profile")  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    session = CpuSession(model, SessionSettings(level=Level.ALL))
    for index, sample in enumerate(samples):
        file = out / f"test_data_set_{index}" / f"output_0.{form}"
        got = np.load(file) if form == "npy" else numpy_helper.to_array(onnx.load_tensor(str(file)))
        assert got.tobytes() == session.run(sample)["y"].tobytes()
    run = json.loads(report.read_text())
    assert (run["status"], len(run["latency_ms"]), run["placement_source"]) == ("done", 24, "profile")
    assert all(node["provider"] == "CPUExecutionProvider" for node in run["placement"])


@pytest.mark.parametrize("form", ["npy", "pb"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*((name, (2, 3)) for name in DTYPES), *((n, s) for n in ("float32", "string") for s in ((), (0,), (3,)))],
)
def test_each_type_passes_through_files(tmp_path: Path, dtype: str, shape: tuple[int, ...], form: str) -> None:
    rng = np.random.default_rng(5)
    value: Array = rng.integers(0, 2, shape).astype(DTYPES[dtype])
    if dtype == "string":
        value = np.array(["a", "grüße", "\U0001f600", "", "x", "y"][: value.size], np.str_).reshape(shape)
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in/x.npy", value)
    kind = {"float32": "float", "float64": "double"}.get(dtype, dtype)
    kind += f"[{','.join('MN'[: len(shape)])}]" if shape else ""
    model = text_model(tmp_path / "m.onnx", f"({kind} x) => ({kind} y) {{ y = Identity(x) }}")
    done = run_runner("--model", model, "--inputs", tmp_path / "in", "--outputs", tmp_path / "out", "--format", form)
    assert done.returncode == 0, done.stderr
    file = tmp_path / f"out/output_0.{form}"
    got = np.load(file) if form == "npy" else numpy_helper.to_array(onnx.load_tensor(str(file)))
    assert (got.shape, got.tolist()) == (shape, value.tolist())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "m.onnx"], "--model and --inputs are needed"),
        (["--inputs", "none", "--model", "m.onnx"], "cannot open 'none'"),
        (["--fast", "1"], "there is no option '--fast'"),
        (["--runs", "0"], "--runs '0' is no number from 1"),
        (["--runs", "1x"], "--runs '1x' is no number"),
        (["--config", "x"], "'x' is not KEY=VALUE"),
        (["--self-test", "none"], "cannot open 'none/manifest.json'"),
    ],
)
def test_wrong_options_are_errors(words: list[str], reason: str) -> None:
    done = run_runner(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [
        (b"", 2, "it ends early"),
        (b"PK\x03\x04" + bytes(99), 2, "it is no .npy"),
        (b"\x93NUMPY\x01\x00\xff\xff{", 2, "it ends early"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{", 2, "its header is too long"),
        (np.zeros((2, 2), ">f4"), 2, "not little-endian"),
        (np.asfortranarray(np.zeros((2, 3), np.float32)), 2, "Fortran order"),
        (np.zeros(2, np.complex64), 2, "its type is unknown"),
        (np.zeros(2, "datetime64[s]"), 2, "its type is unknown"),
        # The model refuses it.
        (np.zeros((1, 9), np.float32), 1, "x"),
    ],
)
def test_an_npy_that_cannot_be_read_or_does_not_fit_is_an_error(
    tmp_path: Path, content: bytes | Array, code: int, reason: str
) -> None:
    (tmp_path / "in").mkdir()
    if isinstance(content, bytes):
        (tmp_path / "in/x.npy").write_bytes(content)
    else:
        np.save(tmp_path / "in/x.npy", content)
    done = run_runner("--model", float_conv(tmp_path / "f.onnx"), "--inputs", tmp_path / "in")
    assert done.returncode == code
    assert reason in done.stderr


def make_bundle(path: Path, *, off: float = 0.0) -> Path:
    """The part of a bundle that a self-test reads; `off` moves one expected number."""
    (path / "golden").mkdir(parents=True)
    model = float_conv(path / "model.onnx")
    samples = noise_samples(5)
    write_rows(path / "golden/inputs.npz", samples)
    session = CpuSession(model, SessionSettings(level=Level.DISABLED))
    expected = [session.run(samples[row]) for row in (1, 4)]
    expected[1]["y"][0, 0, 0, 0] += off
    write_rows(path / "golden/expected.npz", expected)
    return seal_bundle(path)


def seal_bundle(path: Path, **changes: object) -> Path:
    files = {
        name: {"sha256": digest_file(path / name), "size_bytes": 1}
        for name in ("model.onnx", "golden/inputs.npz", "golden/expected.npz")
    }
    chosen = [{"row": 1, "reason": "typical"}, {"row": 4, "reason": "extreme"}]
    manifest = {
        "name": "f", "target": "cpu", "provider": "CPUExecutionProvider", "provider_options": {}, "form": "onnx",
        "session_config": {"session.disable_cpu_ep_fallback": "1"}, "forms": {"onnx": ["model.onnx"]}, "files": files,
        "golden": {"chosen": chosen, "tolerance": {"y": 0.01}}, **changes,
    }  # fmt: skip
    (path / "manifest.json").write_bytes(encode_json(manifest))
    return path


@pytest.mark.parametrize("off", [0.0, 0.02, -0.02, float("nan"), float("inf")])
def test_the_self_test_of_a_bundle_fails_if_one_value_is_off(tmp_path: Path, off: float) -> None:
    done = run_runner("--self-test", make_bundle(tmp_path / "b", off=off))
    result = json.loads(done.stdout)
    assert (done.returncode, result["passed"]) == (int(off != 0), off == 0)
    found = [(item["sample"], item["output"], item["passed"]) for item in result["results"]]
    assert found == [(1, "y", True), (4, "y", off == 0)]


@pytest.mark.parametrize("name", ["model.onnx", "golden/inputs.npz", "golden/expected.npz"])
def test_an_altered_bundle_does_not_run(tmp_path: Path, name: str) -> None:
    bundle = make_bundle(tmp_path / "b")
    flip_byte(bundle / name)
    done = run_runner("--self-test", bundle)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"'{name}' of the bundle was altered" in done.stderr


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"golden": {"chosen": [], "tolerance": {}}}, "has no self-test"),
        ({"golden": {"chosen": [{"row": 5}], "tolerance": {"y": 1}}}, "has no row 5"),
        ({"golden": {"chosen": [{"row": 1}], "tolerance": {}}}, "judges no output"),
        ({"forms": {"onnx": ["../b/model.onnx"]}}, "not a safe file name"),
        ({"form": "context"}, "has no 'context'"),
    ],
)
def test_a_contradictory_bundle_is_an_error(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    done = run_runner("--self-test", seal_bundle(make_bundle(tmp_path / "b"), **changes))
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr


def test_a_self_test_takes_another_provider(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "b")
    shutil.copy(bundle / "model.onnx", tmp_path)
    seal_bundle(bundle, provider="NnapiExecutionProvider")
    assert run_runner("--self-test", bundle).returncode == 1
    assert run_runner("--self-test", bundle, "--provider", "CPUExecutionProvider").returncode == 0
