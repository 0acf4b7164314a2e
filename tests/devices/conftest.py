"""Fixtures for the folder of a run, and for other machines."""

from pathlib import Path

import pytest
from other_machine.fixtures import adb, arm_runner, board, host_runner, native_board, own_adb_server, phone

__all__ = ["adb", "arm_runner", "board", "host_runner", "native_board", "own_adb_server", "phone", "work"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder
