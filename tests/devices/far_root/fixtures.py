"""What tests of devices in several rooms need: an adb server that knows only their own devices, and runners."""

from collections.abc import Generator

import pytest

from edgekit.devices.local.runner import NativeRunner, build_runner, host_abi
from far_root.client import Adb, adb_server
from far_root.keeper import require


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
    require("cmake", "cmake")
    return build_runner(host_abi(), lambda _: None)


@pytest.fixture(scope="session")
def arm_runner() -> NativeRunner:
    """The runner for a 64-bit Arm Linux."""
    require("cmake", "cmake")
    require("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu")
    return build_runner("linux-arm64", lambda _: None)
