"""The profiler's file comes back from wherever a program runs, whole, and a program that lies about it is found out."""

from pathlib import Path

import msgspec
import pytest
from devices_models import OUTPUTS, encode_report, float_conv, make_job, pretend
from other_machine.board import Board
from other_machine.fixtures import Phone
from test_devices_pipe import PYTHON, run_piped

from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.local.host import Host
from edgekit.devices.remote.remote import SshDevice
from edgekit.profile.events import read_trace

pytestmark = pytest.mark.slow


def traced(tmp_path: Path) -> Job:
    return msgspec.structs.replace(make_job(float_conv(tmp_path / "f.onnx"), "nnapi"), trace=True, repeat=2)


def ops(run: DeviceRun) -> list[list[str]]:
    assert run.failure is None
    assert run.trace is not None
    return [[step.op for step in one.steps] for one in read_trace(run.trace).executions]


def test_a_folder_and_a_pipe_bring_the_trace_back(tmp_path: Path, work: Path) -> None:
    job = traced(tmp_path)
    (work / "a").mkdir()
    direct, piped = Host().run_job(job, work / "a"), run_piped(job, work)
    assert ops(direct) == ops(piped)
    assert len(ops(piped)) == 2 * job.samples.count
    assert direct.placement == piped.placement != ()


def test_a_phone_and_a_board_bring_the_trace_back_and_keep_nothing(
    phone: Phone, board: Board, native_board: SshDevice, tmp_path: Path, work: Path
) -> None:
    for name, device, machine in (("adb", phone.device, phone.machine), ("ssh", native_board, board.machine)):
        assert "Conv" in ops(device.run_job(traced(tmp_path), work / name))[0]
        assert machine.left_running() == []
        assert not [name for name in machine.files() if "profile" in name or "run-" in name]


@pytest.mark.parametrize(
    ("size", "trace", "says"),
    [
        (9, b"short", "ends early"),
        (3, b"too long", "more after its last line"),
        (1 << 40, b"", "larger than"),
        (-1, b"", "malformed"),
    ],
)
def test_a_program_that_lies_about_its_trace_is_found_out(
    size: int, trace: bytes, says: str, tmp_path: Path, work: Path
) -> None:
    last = encode_report(latency_ms=[1] * 6, trace_bytes=size)
    failure = pretend(work, OUTPUTS * 3 + last + trace, job=traced(tmp_path), by_files=False).failure
    assert failure is not None
    assert says in failure


def test_a_trace_that_nobody_asked_for_is_refused(tmp_path: Path, work: Path) -> None:
    job = msgspec.structs.replace(traced(tmp_path), trace=False)
    assert run_piped(job, work, PYTHON).trace is None
    assert not list(work.rglob("trace.json"))
