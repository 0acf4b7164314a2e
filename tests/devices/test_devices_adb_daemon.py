"""The tests' own adb daemon, judged by the real client: what it serves, and the faults that it injects."""

import hashlib
import os
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from other_machine.client import Adb
from other_machine.keeper import OtherMachine, start_machine

pytestmark = pytest.mark.slow


@pytest.fixture(params=["native", "arm"])
def machine(request: pytest.FixtureRequest) -> Generator[OtherMachine]:
    with start_machine(arm=request.param == "arm", adb=True) as machine:
        yield machine


@pytest.fixture
def native() -> Generator[OtherMachine]:
    with start_machine(arm=False, adb=True) as machine:
        yield machine


def test_commands_keep_their_streams_apart_and_their_exit_code(adb: Adb, machine: OtherMachine) -> None:
    with adb.connected(machine) as serial:
        done = adb.run("-s", serial, "shell", "-T", "cat; echo wrong >&2; exit 7", data=b"\0\xffbytes\r\n")
        assert (done.returncode, done.stdout, done.stderr) == (7, b"\0\xffbytes\r\n", b"wrong\n")
        killed = adb.run("-s", serial, "shell", "-T", "kill -9 $$")
        assert killed.returncode == 137


def test_the_arm_root_runs_arm_programs() -> None:
    with start_machine(arm=True, adb=False) as machine:
        assert (machine.root / "system/bin/sh").is_symlink()
        assert machine.files() == ["home", "local", "local/tmp"]


def test_files_arrive_whole(adb: Adb, machine: OtherMachine, tmp_path: Path) -> None:
    data = os.urandom(3_000_001)
    (tmp_path / "sent").write_bytes(data)
    (tmp_path / "sent").chmod(0o755)
    with adb.connected(machine) as serial:
        pushed = adb.run("-s", serial, "push", str(tmp_path / "sent"), "/data/local/tmp/new/name")
        assert pushed.returncode == 0, pushed.stdout
        said = adb.run("-s", serial, "shell", "-T", "sha256sum < /data/local/tmp/new/name; uname -m")
        assert said.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert (machine.root / "data/local/tmp/new/name").stat().st_mode & 0o777 == 0o777


def test_a_killed_client_leaves_no_process(adb: Adb, native: OtherMachine) -> None:
    with adb.connected(native) as serial, pytest.raises(subprocess.TimeoutExpired):
        adb.run("-s", serial, "shell", "-T", "exec sleep 60", timeout_s=0.5)
    assert native.left_running() == []


def test_a_phone_that_was_not_told_to_trust_this_pc(adb: Adb, native: OtherMachine) -> None:
    native.ask(kind="unauthorized", times=3)
    with adb.connected(native) as serial:
        assert b"device unauthorized" in adb.run("-s", serial, "get-state").stderr


def test_a_device_that_vanishes_is_offline(adb: Adb, native: OtherMachine) -> None:
    native.ask(kind="vanish", service="shell")
    with adb.connected(native) as serial:
        adb.run("-s", serial, "shell", "-T", "echo gone")
        assert b"offline" in adb.run("-s", serial, "get-state").stderr


def test_a_full_disk_is_told_and_leaves_nothing(adb: Adb, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(8 << 20))
    with start_machine(arm=False, adb=True, space_bytes=4 << 20) as machine, adb.connected(machine) as serial:
        pushed = adb.run("-s", serial, "push", str(tmp_path / "large"), "/data/local/tmp/large")
        assert b"No space left on device" in pushed.stdout + pushed.stderr
        assert machine.files() == ["home", "local", "local/tmp"]


def test_a_link_that_dies_in_a_command_looks_like_success(adb: Adb, native: OtherMachine) -> None:
    """Why edgekit never trusts adb's exit code: its client of 2020 says 0 here."""
    native.ask(kind="drop", service="shell", after=100)
    with adb.connected(native) as serial:
        done = adb.run(
            "-s", serial, "shell", "-T", "i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done; exit 5"
        )
    assert done.returncode in {0, 255}
    assert len(done.stdout) < 890


def test_a_reboot_ends_every_process_and_the_device_comes_back(adb: Adb, native: OtherMachine) -> None:
    native.ask(kind="reboot", service="shell", after=0, seconds=0.1)
    with adb.connected(native) as serial:
        adb.run("-s", serial, "shell", "-T", "sleep 50 & echo started; wait")
        assert native.left_running() == []
        adb.run("disconnect", serial)
        time.sleep(0.3)
        adb.run("connect", serial)
        assert adb.run("-s", serial, "get-state").stdout.strip() == b"device"
