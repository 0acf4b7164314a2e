"""Sessions that stay open: for several turns of a model, and for a program that lets another process compute."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import Watched, float_conv, make_job, noise_samples
from fixture_types import MakeOnce
from other_machine.board import Board
from other_machine.fixtures import Phone
from stepped_models import STEPS, make

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.devices.device import Device, DeviceRun, Job
from edgekit.devices.local.emulated import Emulated
from edgekit.devices.local.host import Host
from edgekit.devices.process import session
from edgekit.devices.process.pipes import ANSWER, ASK, open_pipes
from edgekit.devices.process.run import refuse_run
from edgekit.devices.process.session import open_session
from edgekit.devices.remote.remote import SshDevice
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Tensors
from edgekit.verify.run import verify_bundle


@pytest.fixture(scope="module")
def bundle(make_once: MakeOnce) -> Bundle:
    return open_bundle(make_once("recurrent", make) / "out" / "recurrent-cpu")


def assert_keeps_state(bundle: Bundle, device: Device, *, jobs: int = 2) -> None:
    """Asserts that a device runs all steps in one session, and that feeding the state back loses no accuracy."""
    watched = Watched(device=device)
    (run,) = verify_bundle(bundle, [watched]).runs
    assert run.passed, run.failures
    assert run.state is not None
    assert {drift.output: drift.lost_db for drift in run.state.drift} == {"y": 0.0, "new_h": 0.0}
    assert (run.state.steps, run.state.sequences) == (STEPS, len(run.find_places(bundle.golden.samples)) // STEPS)
    assert len(watched.jobs) == jobs, "the golden samples, and all steps of all sequences"


def test_the_host_keeps_one_session_for_all_steps(bundle: Bundle) -> None:
    assert_keeps_state(bundle, Host())


def test_without_pollable_pipes_each_step_is_a_run_of_its_own(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_WAITS_FOR_PIPES", False)
    assert_keeps_state(bundle, Emulated(), jobs=1 + STEPS)


@pytest.mark.slow
def test_a_phone_and_a_board_keep_one_session_for_all_steps(phone: Phone, bundle: Bundle, board: Board) -> None:
    assert_keeps_state(bundle, phone.device)
    assert phone.machine.left_running() == []
    assert_keeps_state(bundle, SshDevice(host="board", python=sys.executable, provider=CPU_PROVIDER))
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
        run = refuse_run(self, "")
        return msgspec.structs.replace(run, failure=self.failure)


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


MODULES = ("edgekit.devices.ios.mil.compute", "edgekit.devices.android.nnapi.compute")
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
    finished = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert finished.returncode != 0


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
