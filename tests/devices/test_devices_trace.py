"""The profiler's file comes back from wherever a program runs, whole, and a program that lies about it is found out."""

import os
import sys
from pathlib import Path

import msgspec
import pytest
from devices_models import float_conv, make_job
from far_root.board import ssh_board
from far_root.client import Adb
from far_root.keeper import far_side
from test_devices_pipe import GOOD, PYTHON, RUN, run_piped

from edgekit._ort import CPU_PROVIDER
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.local.host import Host
from edgekit.devices.local.runner import NativeRunner
from edgekit.devices.remote.adb import AdbDevice
from edgekit.devices.remote.ssh import SshDevice
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


def test_a_phone_brings_the_trace_back_and_keeps_nothing(
    adb: Adb, tmp_path: Path, work: Path, host_runner: NativeRunner
) -> None:
    with far_side(arm=False, adb=True) as far, adb.connected(far) as serial:
        device = AdbDevice(
            serial=serial, runner=host_runner.program, library=host_runner.library, provider=CPU_PROVIDER, threads=1
        )
        assert "Conv" in ops(device.run_job(traced(tmp_path), work))[0]
        assert far.left_running() == []
        assert not [name for name in far.files() if "profile" in name]


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
    last = RUN.replace(b'"session"}', b'"session","trace_bytes":%d}' % size)
    (tmp_path / "answer").write_bytes(GOOD * 3 + last.replace(b"[1,1,1]", b"[1,1,1,1,1,1]") + trace)
    say = f"sys.stdout.buffer.write(open({str(tmp_path / 'answer')!r}, 'rb').read())"
    program = f"import sys; sys.stdin.buffer.read(); {say}"
    failure = run_piped(traced(tmp_path), work, (sys.executable, "-c", program)).failure
    assert failure is not None
    assert says in failure


def test_a_trace_that_nobody_asked_for_is_refused(tmp_path: Path, work: Path) -> None:
    job = msgspec.structs.replace(traced(tmp_path), trace=False)
    assert run_piped(job, work, PYTHON).trace is None
    assert not list(work.rglob("trace.json"))


def test_a_board_brings_the_trace_back_and_keeps_nothing(
    tmp_path: Path, work: Path, host_runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SshDevice(
        host="board", runner=host_runner.program, library=host_runner.library, provider=CPU_PROVIDER, threads=1
    )
    with ssh_board(arm=False) as board:
        monkeypatch.setenv("PATH", board.programs, prepend=os.pathsep)
        assert "Conv" in ops(device.run_job(traced(tmp_path), work))[0]
        assert board.far.left_running() == []
        assert not [name for name in board.far.files() if "profile" in name or "run-" in name]
