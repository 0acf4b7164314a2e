"""Devices behind adb and ssh: what they compute, what is sent and kept, and how a run ends whatever a link does."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import Altering, float_conv, make_job, noise_samples, qdq_conv, require_device
from faults import ADB_FAULTS, SSH_FAULTS, Fault
from fixture_types import present
from onnx import numpy_helper
from other_machine.board import Board, ssh_board
from other_machine.client import Adb
from other_machine.fixtures import Phone, native_arguments
from other_machine.machine import OtherMachine, start_machine

from edgekit._ort import CPU_PROVIDER
from edgekit.devices.device import Device, Job
from edgekit.devices.local.host import Host
from edgekit.devices.local.runner import NativeRunner
from edgekit.devices.remote.remote import BASE, AdbDevice, RemoteDevice, SshDevice
from edgekit.devices.remote.store import KEPT_SETS, push_set
from edgekit.errors import EdgekitError
from edgekit.evidence import Evidence
from edgekit.model.tensors import Array
from edgekit.verify.layers.on_device import find_device_layer

pytestmark = pytest.mark.slow

_HOSTILE = "a b'$(touch owned);\"&#.onnx"

_HANGING_RUN = """
from pathlib import Path
from edgekit._proc import stream_process
from edgekit.devices.remote.remote import BASE, AdbDevice
from edgekit.devices.remote.store import push_set, remove_folder, wrap_program, make_folder_name
phone = AdbDevice(serial={serial!r})
folder, run = push_set(phone, BASE, {{"runner": Path({program!r})}}), make_folder_name("run")
argv = phone.command(wrap_program(BASE, run, [folder + "/runner"]))
try:
    stream_process(argv, timeout_s=60, feed=[b"x"], take=lambda stream: stream.read())
except BaseException:
    remove_folder(phone, BASE, run)
    raise
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(float_conv(tmp_path / _HOSTILE), "xnnpack", noise_samples(5), precision="fp32")


def test_a_phone_computes_as_its_runtime_does(phone: Phone, job: Job, work: Path, host_runner: NativeRunner) -> None:
    device, machine = phone.device, phone.machine
    assert device.find_missing() is None
    assert (device.name, device.evidence) == (f"adb:{device.serial}", Evidence.SAME_ARCH)
    assert AdbDevice(serial=device.serial).evidence is Evidence.DEVICE
    assert _outputs(device, job, work / "adb") == _outputs(Host(), job, work / "host")
    first = machine.ask()
    run = device.run_job(job, work / "again")
    assert [run.versions[key] for key in ("android", "abi", "soc")] == ["14", "x86_64", "SM8650"]
    assert machine.ask()["received"] == 0
    assert first["received"] > host_runner.library.stat().st_size
    assert not any("owned" in name for name in machine.files() if not name.endswith(_HOSTILE))
    # A provider that its ONNX Runtime lacks is refused.
    failure = present(msgspec.structs.replace(device, provider="").run_job(job, work / "refused").failure)
    assert "refused" in failure
    assert device.name in failure


@pytest.mark.long
def test_arm_devices_compute_what_arm_computes(adb: Adb, tmp_path: Path, work: Path, arm_runner: NativeRunner) -> None:
    direct = require_device("arm64:native")
    job = make_job(qdq_conv(tmp_path / "q.onnx", np.uint8), "nnapi", noise_samples(4))
    wanted = _outputs(direct, job, work / "direct")
    with start_machine(arm=True, adb=True) as machine, adb.connected(machine) as serial:
        phone = AdbDevice(serial=serial, **native_arguments(arm_runner))
        assert _outputs(phone, job, work / "adb") == wanted
    with ssh_board(arm=True) as board, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", board.programs, prepend=os.pathsep)
        native = SshDevice(host="board", **native_arguments(arm_runner))
        assert _outputs(native, job, work / "ssh") == wanted


def test_a_board_with_python_needs_no_runner(board: Board, job: Job, work: Path) -> None:
    device = SshDevice(host="board", python=sys.executable, provider=CPU_PROVIDER)
    assert device.find_missing() is None
    run = device.run_job(job, work / "run")
    assert run.failure is None
    assert run.notes == (f"run by the onnxruntime of {sys.executable}, as asked",)
    assert [dict(o)["y"].tobytes() for o in run.outputs] == _outputs(Host(), job, work / "host")
    lacking = present(SshDevice(host="board", python="/bin/false").find_missing())
    assert lacking.reason == "'/bin/false' there has no onnxruntime"
    assert board.wire.connections <= 4


def test_several_phones_run_at_once(adb: Adb, phone: Phone, job: Job, work: Path) -> None:
    # Other tests use this phone as well.
    before = set(phone.machine.left_files())
    with start_machine(arm=False, adb=True) as other:
        with adb.connected(other) as serial:
            devices = [phone.device, msgspec.structs.replace(phone.device, serial=serial), phone.device]
            with ThreadPoolExecutor() as pool:
                runs = list(pool.map(lambda item: _outputs(item[1], job, work / str(item[0])), enumerate(devices)))
            nameless = AdbDevice().find_missing()
        assert runs[0] == runs[1] == runs[2]
        assert "several devices" in present(nameless).reason
        for machine in (phone.machine, other):
            # A phone's shell removes the folder of a run after it has sent the last output.
            deadline = time.monotonic() + 20
            while (left := set(machine.left_files()) - before) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert left == set()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_edgekit_leaves_nothing_running(phone: Phone, tmp_path: Path, end: signal.Signals) -> None:
    machine, hanging = phone.machine, tmp_path / "runner"
    hanging.write_text("#!/bin/sh\nsleep 300 & exec sleep 300\n")
    hanging.chmod(0o755)
    script = _HANGING_RUN.format(serial=phone.device.serial, program=str(hanging))
    child = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while _count_sleeping(machine) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _count_sleeping(machine) == 2
    tasks = Path(f"/proc/{child.pid}/task").iterdir()
    clients = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    child.send_signal(end)
    child.wait(timeout=20)
    if end is signal.SIGKILL:  # what the kernel does to a program on a terminal that closes
        for pid in clients:
            os.kill(pid, signal.SIGKILL)
    assert (machine.left_running(), machine.left_files()) == ([], [])


def test_only_the_most_recent_sets_of_files_stay_on_a_phone(phone: Phone, tmp_path: Path) -> None:
    def push(content: bytes) -> Path:
        (tmp_path / "model").write_bytes(content)
        pushed = push_set(phone.device, BASE, {"sub folder/model": tmp_path / "model"})
        return phone.machine.root / pushed.removeprefix("/") / "sub folder/model"

    for index in range(KEPT_SETS + 1):
        push(bytes([index]) * 1000)
    kept = push(b"last" * 250)
    assert len(list((phone.machine.root / BASE.removeprefix("/")).iterdir())) == KEPT_SETS
    kept.write_bytes(b"")  # as a sudden reboot leaves it
    assert push(b"last" * 250) == kept
    assert kept.stat().st_size == 1000


def _count_sleeping(machine: OtherMachine) -> int:
    return sum("sleep 300" in process for process in machine.processes())


def _outputs(device: Device, job: Job, work: Path) -> list[bytes]:
    """Returns the bytes of every output of a run that must go well."""
    work.mkdir(parents=True, exist_ok=True)
    run = device.run_job(job, work)
    assert run.failure is None, run.failure
    values: list[Array] = [sample["y"] for sample in run.outputs]
    assert len(values) == job.samples.count
    return [value.tobytes() for value in values]


def negate_weights(proto: onnx.ModelProto) -> None:
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "wq")
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), "wq"))


@pytest.mark.long
def test_phones_and_boards_give_layers(phone: Phone, native_board: SshDevice, tmp_path: Path, work: Path) -> None:
    job = make_job(qdq_conv(tmp_path / "q.onnx", np.uint8), "nnapi", noise_samples(3))
    honest = find_device_layer(native_board, job, work / "honest")
    # The result of the layer, and the output of the model that is dequantized from it.
    assert [layer.name for layer in honest.layers] == ["x", "conv", "conv"]
    altered = find_device_layer(Altering(device=phone.device, change=negate_weights), job, work / "altered")
    assert [(found.layer, found.found_by) for found in (honest, altered)] == [(None, "tensors"), ("conv", "tensors")]


STEP_S, JOB_S = 25.0, 40.0
SHORT_S = 4.0
CLEANS_LATER = ("vanish", "stall", "reboot")
"""Faults after which the device cannot be reached for some seconds: what is left there goes with the next contact."""


def _marked(faults: Sequence[Fault]) -> list[object]:
    return [pytest.param(f, id=f.name, marks=[] if f.quick else [pytest.mark.faults]) for f in faults]


@pytest.fixture
def long_job(tmp_path: Path) -> Job:
    return make_job(float_conv(tmp_path / "conv.onnx"), "xnnpack", noise_samples(40), precision="fp32", timeout_s=JOB_S)


@pytest.mark.parametrize("fault", _marked(ADB_FAULTS))
def test_adbs_faults_are_told(fault: Fault, adb: Adb, long_job: Job, work: Path, host_runner: NativeRunner) -> None:
    with start_machine(arm=False, adb=True, space_bytes=fault.space_bytes) as machine:
        fault.prepare(machine)
        if fault.early:
            machine.ask(**fault.wire)
        with adb.connected(machine) as serial:
            if not fault.early:
                machine.ask(**fault.wire)
            good = AdbDevice(serial=serial, **native_arguments(host_runner))
            _judge(_limited(good, fault, work), fault.says, long_job, work)
            if fault.wire.get("kind") != "kill-daemon":
                assert machine.left_running() == []
                if fault.wire.get("kind") not in CLEANS_LATER:
                    assert machine.left_files() == []
            if fault.returns:
                _mend(machine)
                machine.ask(kind="appear" if fault.wire.get("kind") == "vanish" else "")
                time.sleep(1.2 if fault.wire.get("kind") == "reboot" else 0)
                adb.run("disconnect", serial)
                adb.run("connect", serial)
        if fault.returns and fault.space_bytes > 100 << 20:
            with adb.connected(machine) as serial:
                again = AdbDevice(serial=serial, **native_arguments(host_runner))
                assert again.run_job(long_job, work / "again").failure is None
                assert machine.left_files() == []


@pytest.mark.parametrize("fault", _marked(SSH_FAULTS))
def test_each_fault_of_ssh_is_reported(
    fault: Fault, long_job: Job, work: Path, host_runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ssh_board(arm=False, space_bytes=fault.space_bytes) as board:
        monkeypatch.setenv("PATH", board.programs, prepend=os.pathsep)
        good = SshDevice(host="board", **native_arguments(host_runner))
        if fault.warm:
            assert good.run_job(long_job, work / "warm").failure is None
        fault.prepare(board)
        if fault.wire:
            board.wire.fail(**fault.wire)
        _judge(_limited(good, fault, work), fault.says, long_job, work)
        board.wire.cut()  # what a stalled wire comes to in the end
        assert board.machine.left_running() == []
        if fault.wire.get("kind") != "stall":
            assert board.machine.left_files() == []
        if fault.returns and fault.space_bytes > 100 << 20:
            _restore(board)
            assert good.run_job(long_job, work / "again").failure is None
            assert board.machine.left_files() == []


def test_at_least_40_different_faults_are_tested() -> None:
    names = [fault.name for fault in ADB_FAULTS] + [f"ssh-{fault.name}" for fault in SSH_FAULTS]
    assert len(set(names)) == len(names) >= 40


def _judge(device: Device, says: str, job: Job, work: Path) -> None:
    """Runs a job, and looks at how long it took, what was said, and what still runs here."""
    job = msgspec.structs.replace(job, timeout_s=SHORT_S if "out of time" in says else JOB_S)
    start = time.monotonic()
    try:
        said = device.run_job(job, work / "run").failure
    except EdgekitError as error:
        said = error.message
    assert time.monotonic() - start < 45.0
    if not says:
        assert said is None
        return
    assert said is not None
    assert "\n" not in said
    assert device.name in said
    assert re.search(says, said), said
    assert len(said) < 600
    assert _own_children() == []


def _limited(good: RemoteDevice, fault: Fault, work: Path) -> RemoteDevice:
    """Returns a device of which no step may last long, and whose runner is what a fault puts in its place."""
    step_s = SHORT_S if "does not answer" in fault.says else STEP_S
    device = msgspec.structs.replace(good, step_timeout_s=step_s, slowest_bytes_per_s=4 << 20)
    if not fault.program:
        return device
    path = work / "edgekit-runner"
    path.write_text(fault.program)
    path.chmod(0o755)
    return msgspec.structs.replace(device, runner=path)


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
