"""Whatever happens to a link, a run ends in time, says in one line what happened where, and leaves nothing behind."""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from devices_models import float_conv, make_job, noise_samples
from faults import ADB_FAULTS, SSH_FAULTS, Fault
from other_machine.board import Board, ssh_board
from other_machine.client import Adb
from other_machine.keeper import OtherMachine, start_machine

from edgekit._ort import CPU_PROVIDER
from edgekit.devices.device import Device, Job
from edgekit.devices.local.runner import NativeRunner
from edgekit.devices.remote.remote import AdbDevice, SshDevice
from edgekit.errors import EdgekitError

pytestmark = pytest.mark.slow

STEP_S, JOB_S = 25.0, 40.0
SHORT_S = 4.0
BOUND_S = 45.0
CLEANS_LATER = ("vanish", "stall", "reboot")
"""Faults after which the device cannot be reached for some seconds: what is left there goes with the next contact."""


def _marked(faults: Sequence[Fault]) -> list[object]:
    return [pytest.param(f, id=f.name, marks=[] if f.quick else [pytest.mark.faults]) for f in faults]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(float_conv(tmp_path / "conv.onnx"), "xnnpack", noise_samples(40), precision="fp32", timeout_s=JOB_S)


@pytest.mark.parametrize("fault", _marked(ADB_FAULTS))
def test_adb(fault: Fault, adb: Adb, job: Job, work: Path, host_runner: NativeRunner) -> None:
    with start_machine(arm=False, adb=True, space_bytes=fault.space_bytes) as machine:
        fault.prepare(machine)
        if fault.early:
            machine.ask(**fault.wire)
        with adb.connected(machine) as serial:
            if not fault.early:
                machine.ask(**fault.wire)
            device = AdbDevice(
                serial=serial, runner=_program(fault, host_runner, work), library=host_runner.library,
                provider=CPU_PROVIDER, threads=1, step_timeout_s=_step_s(fault.says), slowest_bytes_per_s=4 << 20,
            )  # fmt: skip
            _judge(device, fault.says, _limited(job, fault.says), work)
            if fault.wire.get("kind") != "kill-daemon":
                assert machine.left_running() == []
                if fault.wire.get("kind") not in CLEANS_LATER:
                    assert _left_files(machine) == []
            if fault.returns:
                _mend(machine)
                machine.ask(kind="appear" if fault.wire.get("kind") == "vanish" else "")
                time.sleep(1.2 if fault.wire.get("kind") == "reboot" else 0)
                adb.run("disconnect", serial)
                adb.run("connect", serial)
        if fault.returns and fault.space_bytes > 100 << 20:
            with adb.connected(machine) as serial:
                again = AdbDevice(
                    serial=serial, runner=host_runner.program, library=host_runner.library, provider=CPU_PROVIDER
                )
                assert again.run_job(job, work / "again").failure is None
                assert _left_files(machine) == []


@pytest.mark.parametrize("fault", _marked(SSH_FAULTS))
def test_ssh(fault: Fault, job: Job, work: Path, host_runner: NativeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    with ssh_board(arm=False, space_bytes=fault.space_bytes) as board:
        monkeypatch.setenv("PATH", board.programs, prepend=os.pathsep)
        good = SshDevice(
            host="board", runner=host_runner.program, library=host_runner.library, provider=CPU_PROVIDER, threads=1
        )
        if fault.warm:
            assert good.run_job(job, work / "warm").failure is None
        fault.prepare(board)
        if fault.wire:
            board.wire.fail(**fault.wire)
        device = SshDevice(
            host="board", runner=_program(fault, host_runner, work), library=host_runner.library,
            provider=CPU_PROVIDER, threads=1, step_timeout_s=_step_s(fault.says), slowest_bytes_per_s=4 << 20,
        )  # fmt: skip
        _judge(device, fault.says, _limited(job, fault.says), work)
        board.wire.cut()  # what a stalled wire comes to in the end
        assert board.machine.left_running() == []
        if fault.wire.get("kind") != "stall":
            assert _left_files(board.machine) == []
        if fault.returns and fault.space_bytes > 100 << 20:
            _restore(board)
            assert good.run_job(job, work / "again").failure is None
            assert _left_files(board.machine) == []


def test_there_are_enough_faults() -> None:
    names = [fault.name for fault in ADB_FAULTS] + [f"ssh-{fault.name}" for fault in SSH_FAULTS]
    assert len(set(names)) == len(names) >= 40


def _judge(device: Device, says: str, job: Job, work: Path) -> None:
    """Runs a job, and looks at how long it took, what was said, and what still runs here."""
    start = time.monotonic()
    try:
        said = device.run_job(job, work / "run").failure
    except EdgekitError as error:
        said = error.message
    assert time.monotonic() - start < BOUND_S
    if not says:
        assert said is None
        return
    assert said is not None
    assert "\n" not in said
    assert device.name in said
    assert re.search(says, said), said
    assert len(said) < 600
    assert _own_children() == []


def _step_s(says: str) -> float:
    return SHORT_S if "does not answer" in says else STEP_S


def _limited(job: Job, says: str) -> Job:
    return make_job(
        job.model, "xnnpack", noise_samples(40), precision="fp32", timeout_s=SHORT_S if "out of time" in says else JOB_S
    )


def _program(fault: Fault, host_runner: NativeRunner, work: Path) -> Path:
    """Returns the runner, or what takes its place."""
    if not fault.program:
        return host_runner.program
    path = work / "edgekit-runner"
    path.write_text(fault.program)
    path.chmod(0o755)
    return path


def _left_files(machine: OtherMachine) -> list[str]:
    return [name for name in machine.files() if "part-" in name or "run-" in name]


def _own_children() -> list[str]:
    """Returns the ssh and adb clients that this process has not waited for."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread, or a child, that has just ended
            for pid in (task / "children").read_text().split():
                words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
                if Path(os.fsdecode(words[0])).name in {"ssh", "adb"} and b"server" not in words:
                    found.append(repr(words))
    return found


def _mend(machine: OtherMachine) -> None:
    """Takes away what a fault put before the programs of the system."""
    for name in ("df", "mv", "sha256sum", "tar"):
        (machine.root / "system/bin" / name).unlink(missing_ok=True)
    for name in ("data/local/tmp/edgekit", "data/home/.cache"):
        if (machine.root / name).is_file():
            (machine.root / name).unlink()
    getprop = machine.root / "system/bin/getprop"
    getprop.write_text("#!/bin/sh\ncase $1 in ro.product.cpu.abi) echo x86_64;; *) echo;; esac\n")


def _restore(board: Board) -> None:
    board.wire.fail("")
    board.wire.cut()
    board.set_enter()
    (board.machine.root / "system/bin/uname").unlink(missing_ok=True)
    _mend(board.machine)
