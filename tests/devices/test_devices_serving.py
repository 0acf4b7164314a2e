"""What computes for a program that stands in for a phone: it ends with whoever started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgekit.devices.process.pipes import ANSWER, ASK, open_pipes

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


def test_what_a_killed_command_started_ends_too(tmp_path: Path) -> None:
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
def test_pipes_that_nobody_holds_are_not_waited_for(module: str, tmp_path: Path) -> None:
    for name in (ASK, ANSWER):
        os.mkfifo(tmp_path / name)
    argv = [sys.executable, "-P", "-m", module, str(tmp_path)]
    finished = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert finished.returncode != 0


def test_a_served_pipe_waits_for_its_questions(tmp_path: Path) -> None:
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
