"""CI's rule: what can run there may not be skipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


SKIPPING = """
import pytest

@pytest.mark.parametrize(("ci", "reason"), [
    ("true", "qemu is missing: apt-get install qemu-user-static"),
    ("", "qemu is missing: apt-get install qemu-user-static"),
    ("true", "needs a Mac"),
])
def test_one_is_skipped(ci, reason, monkeypatch):
    monkeypatch.setenv("CI", ci)
    pytest.skip(reason)
"""


def test_a_skip_fails_in_ci_unless_ci_cannot_mend_it(tmp_path: Path) -> None:
    for name in ("conftest.py", "demo_paths.py", "tiny_models.py"):
        shutil.copy(TESTS / name, tmp_path)
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "CI": ""}, capture_output=True, check=False)
    assert b"skipped in CI, where it can run: Skipped: qemu is missing" in done.stdout
    assert b"1 failed, 2 skipped" in done.stdout
