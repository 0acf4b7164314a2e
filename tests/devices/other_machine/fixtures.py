"""Fixtures for tests of devices in several folders: an adb server with only the tests' devices, and runners."""

import os
from collections.abc import Generator
from typing import Any

import msgspec
import pytest
from devices_models import require_runner

from edgekit._ort import CPU_PROVIDER
from edgekit.devices.local.runner import NativeRunner, host_abi
from edgekit.devices.remote.remote import AdbDevice, SshDevice
from other_machine.board import Board, ssh_board
from other_machine.client import Adb, adb_server
from other_machine.machine import OtherMachine, start_machine


@pytest.fixture(scope="session")
def own_adb_server() -> Generator[Adb]:
    with adb_server() as adb:
        yield adb


@pytest.fixture
def adb(own_adb_server: Adb, monkeypatch: pytest.MonkeyPatch) -> Adb:
    """The tests' adb server, which `adb` finds in the environment."""
    for name, value in own_adb_server.environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    return own_adb_server


@pytest.fixture(scope="session")
def host_runner() -> NativeRunner:
    """The runner for this machine, built once into the cache."""
    return require_runner(host_abi())


@pytest.fixture(scope="session")
def arm_runner() -> NativeRunner:
    """The runner for a 64-bit Arm Linux."""
    return require_runner("linux-arm64")


class Phone(msgspec.Struct, frozen=True, kw_only=True):
    """A machine behind adb, and the device that runs the runner of this machine there."""

    machine: OtherMachine
    device: AdbDevice


@pytest.fixture
def phone(adb: Adb, host_runner: NativeRunner) -> Generator[Phone]:
    with start_machine(arm=False, adb=True) as machine, adb.connected(machine) as serial:
        yield Phone(machine=machine, device=AdbDevice(serial=serial, **native_arguments(host_runner)))


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Generator[Board]:
    """A machine behind ssh, which `ssh` reaches as `board`."""
    with ssh_board(arm=False) as board:
        monkeypatch.setenv("PATH", board.programs, prepend=os.pathsep)
        yield board


@pytest.fixture
def native_board(board: Board, host_runner: NativeRunner) -> SshDevice:  # noqa: ARG001 - keeps the board running
    """The board with the runner of this machine."""
    return SshDevice(host="board", **native_arguments(host_runner))


def native_arguments(runner: NativeRunner) -> dict[str, Any]:
    """Returns the arguments of a device on which a native runner runs, on one thread of the CPU."""
    return {"runner": runner.program, "library": runner.library, "provider": CPU_PROVIDER, "threads": 1}
