"""The empty folder that a run is given, and the fixtures of far sides."""

from pathlib import Path

import pytest
from far_root.fixtures import adb, arm_runner, host_runner, own_adb_server

__all__ = ["adb", "arm_runner", "host_runner", "own_adb_server", "work"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder
