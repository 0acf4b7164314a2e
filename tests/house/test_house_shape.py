"""The gate on the house's shape says no to a broken tree; `make check` asks it of this one."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]

from mutation import TESTS, list_mutations  # noqa: E402
from shape import find_breaks  # noqa: E402


def test_the_mutation_bench_knows_its_modules_and_their_tests() -> None:
    for module, tests in TESTS.items():
        assert (ROOT / "edgekit" / module).is_file()
        files = [name.split("::")[0] for name in tests.split() if not name.startswith("-")]
        assert all((ROOT / "tests" / file).is_file() for file in files)


def test_mutations_are_slips_and_leave_words_and_seeds_alone() -> None:
    source = b"""def f(a: int | None, b=1):
    if a and not b:
        raise ValueError(f"{b + 1} is wrong")
    return np.random.default_rng(0).draw(max(a, 2 < b <= 3), strict=True, a=a)
"""
    found = [(item.line, item.before, item.text) for item in list_mutations("m.py", source)]
    assert [item for item in found if item[0] < 4] == [
        (1, "1", "(2)"), (2, "a and not b", "(a or not b)"), (2, "a and not b", "(a)"), (2, "a and not b", "(not b)"),
        (2, "not b", "(b)"), (3, 'raise ValueError(f"{b + 1} is wrong")', "pass"),
    ]  # fmt: skip
    assert {item[1:] for item in found if item[0] == 4} == {
        ("max", "(min)"), ("2 < b <= 3", "(2 <= b <= 3)"), ("2 < b <= 3", "(2 >= b <= 3)"), ("2", "(3)"),
        ("2 < b <= 3", "(2 < b < 3)"), ("2 < b <= 3", "(2 < b > 3)"), ("3", "(4)"), ("a", "(None)"),
    }  # fmt: skip


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
