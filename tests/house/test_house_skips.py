"""CI's rule: what can run there may not be skipped."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("reason", "ci", "code"),
    [
        ("qemu is missing: apt-get install qemu-user-static", "true", 1),
        ("qemu is missing: apt-get install qemu-user-static", "", 0),
        ("needs a Mac", "true", 0),
    ],
)
def test_a_skip_fails_in_ci_unless_ci_cannot_mend_it(reason: str, ci: str, code: int, tmp_path: Path) -> None:
    for name in ("conftest.py", "demo_paths.py", "tiny_models.py"):
        shutil.copy(TESTS / name, tmp_path)
    body = f"import pytest\n\ndef test_one() -> None:\n    pytest.skip({reason!r})\n"
    (tmp_path / "test_skipping.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "CI": ci}
    assert subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=False).returncode == code
