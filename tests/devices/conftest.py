"""The empty folder that a run is given."""

from pathlib import Path

import pytest


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder
