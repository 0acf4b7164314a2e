"""The gate on the house's shape says yes to this tree and no to a broken one."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from shape import find_breaks  # noqa: E402


def test_the_house_stands() -> None:
    assert list(find_breaks(ROOT)) == []


def test_circles_and_crowds_in_a_folder_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "edgekit" / "model"
    folder.mkdir(parents=True)
    for index in range(13):
        (folder / f"m{index}.py").write_text(f"from edgekit.model.m{(index + 1) % 2} import x\n" if index < 2 else "")
    found = "\n".join(find_breaks(tmp_path))
    assert "a circle of imports, m0 -> m1 -> m0" in found or "a circle of imports, m1 -> m0 -> m1" in found
    assert "13 modules, at most 12" in found


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("model/model.py", "from edgekit.jobs.build import x", "does not point down"),
        ("check/macs.py", "from edgekit.quantize.plan import x", "does not point down"),
        ("quantize/graph/layers.py", "from edgekit.quantize.plan import x", "does not point down"),
        ("quantize/graph/layers.py", "from edgekit.quantize.soups import x", "'soups' has no floor in 'quantize'"),
        ("quantize/graph/layers.py", "from edgekit.convert._tables import x", "is the inside of another room"),
        ("check/macs.py", "import onnxruntime", "only edgekit/_ort.py"),
        ("model/model.py", "import subprocess", "only edgekit/_proc.py"),
        ("model/model.py", "def f():\n    import json", "not at the top"),
        ("model/model.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING: pass", "no TYPE_CHECKING"),
        ("utils.py", "", "excludes nothing"),
        ("model/model.py", "x = 1\n" * 401, "401 lines"),
        ("model/model.py", "def f():\n" + "    x = 1\n" * 50, "f has 51 lines"),
    ],
)
def test_a_break_is_named(tmp_path: Path, file: str, source: str, message: str) -> None:
    path = tmp_path / "edgekit" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert message in "\n".join(find_breaks(tmp_path))
