"""The gate on the house's shape says yes to this tree and no to a broken one."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from shape import find_breaks  # noqa: E402


def test_the_house_stands() -> None:
    assert list(find_breaks(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("model.py", "from edgekit.pipeline import x", "does not point down"),
        ("check/rules.py", "from edgekit.quantize.plan import x", "does not point down"),
        ("check/rules.py", "import onnxruntime", "only edgekit/_ort.py"),
        ("model.py", "import subprocess", "only edgekit/_proc.py"),
        ("model.py", "def f():\n    import json", "not at the top"),
        ("model.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING: pass", "no TYPE_CHECKING"),
        ("utils.py", "", "excludes nothing"),
        ("model.py", "x = 1\n" * 401, "401 lines"),
        ("model.py", "def f():\n" + "    x = 1\n" * 50, "f has 51 lines"),
    ],
)
def test_a_break_is_named(tmp_path: Path, file: str, source: str, message: str) -> None:
    path = tmp_path / "edgekit" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert message in "\n".join(find_breaks(tmp_path))
