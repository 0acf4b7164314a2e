"""A device's place in a laboratory: held while it runs, waited for, and taken back from a process that was killed."""

import getpass
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgekit.devices.register import holding_place
from edgekit.errors import DeviceError


def test_a_place_without_labgrid_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="place 'rack1' of Labgrid needs labgrid-client"), holding_place("rack1"):
        pytest.fail("it is not held")


def _ask(*words: str) -> str:
    program = shutil.which("labgrid-client") or ""
    done = subprocess.run([program, *words], check=False, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.fixture
def laboratory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Labgrid's own coordinator with the place `rack1`."""
    program = shutil.which("labgrid-coordinator")
    if program is None:
        pytest.skip("labgrid is not installed")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    monkeypatch.setenv("LG_COORDINATOR", address)
    process = subprocess.Popen(
        [program, "-l", address], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while "rack1" not in _ask("places") and time.monotonic() < end:
            _ask("-p", "rack1", "create")
        yield
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("laboratory")
def test_one_at_a_time_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgekit.devices.register._PAUSE_S", 0.1)
    with holding_place("rack1"):
        assert "edgekit-" in _ask("who")
        # Somebody else cannot have it meanwhile.
        assert "already acquired by" in _ask("-p", "rack1", "acquire")
    assert "acquired place rack1" in _ask("-p", "rack1", "acquire")
    with (
        pytest.raises(DeviceError, match="was not free: Error: Place rack1 is already acquired by"),
        holding_place("rack1", wait_s=0.0),
    ):
        pytest.fail("it is not held")
    # As soon as that one gives it back, it is ours.
    threading.Timer(1.0, _ask, ("-p", "rack1", "release")).start()
    with holding_place("rack1", wait_s=60.0):
        assert "edgekit-" in _ask("who")
    with (
        pytest.raises(DeviceError, match="place 'gone' of Labgrid: Error: place pattern gone matches nothing"),
        holding_place("gone"),
    ):
        pytest.fail("there is none")


@pytest.mark.slow
@pytest.mark.usefixtures("laboratory")
def test_a_process_that_was_killed_leaves_no_place_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # What SIGKILL leaves: the place acquired in our name, and no lock of this machine.
    with monkeypatch.context() as killed:
        killed.setenv("LG_USERNAME", f"edgekit-{getpass.getuser()}")
        assert "acquired place rack1" in _ask("-p", "rack1", "acquire")
    with holding_place("rack1", wait_s=0.0):
        assert "edgekit-" in _ask("who")
    assert "edgekit-" not in _ask("who")
