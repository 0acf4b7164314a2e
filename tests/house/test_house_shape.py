"""The gates on the shape of the code say no to a broken tree; `make check` asks them of this one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench")]

from mutation import TESTS, list_mutations, list_tests  # noqa: E402
from shape import find_banned_names, measure_shape  # noqa: E402


def test_the_mutation_bench_knows_its_modules_and_their_tests() -> None:
    for module in TESTS:
        assert (ROOT / "edgekit" / module).is_file()
        assert all((ROOT / file).is_file() for file in list_tests(module))
    assert "tests/verify/test_verify_recorded.py" in list_tests("bundle/sign.py")


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


def test_each_import_that_points_up_and_each_module_without_a_layer_is_named(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.npz", "*.onnx")
    shutil.copytree(ROOT / "edgekit", tmp_path / "edgekit", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    wrong = (
        ("model/model.py", "from edgekit.jobs.build import x", "edgekit.model is not allowed to import edgekit.jobs"),
        ("check/macs.py", "from edgekit.quantize.plan import x", "edgekit.check is not allowed to import edgekit.qua"),
        ("model/tensors.py", "from edgekit.model.model import x", ".tensors -> .model"),
        ("check/macs.py", "import onnxruntime", "edgekit is not allowed to import onnxruntime"),
        ("model/model.py", "import subprocess", "edgekit is not allowed to import subprocess"),
        ("soups.py", "", "soups"),
    )
    for file, source, _ in wrong:
        path = tmp_path / "edgekit" / file
        path.write_text(f"{source}\n{path.read_text() if path.exists() else ''}")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert [message for *_, message in wrong if message not in done.stdout] == []


def test_code_is_counted_without_comments_and_docstrings(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        '"""Docs\n\nof three lines."""\n\nfrom a import (\n    b,\n)\n\n\n# why\n'
        'def once():\n    """Docs."""\n    return b\n\n\ndef twice():\n    return once()\n\n\nTABLE = [twice, twice]\n'
    )
    shape = measure_shape(tmp_path)
    assert (shape.modules, shape.code_lines, shape.import_lines) == (1, 8, 3)
    assert (shape.functions, shape.called_once) == (2, 1)


def test_a_module_named_by_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "utils.py").touch()
    assert "excludes nothing" in find_banned_names(tmp_path)[0]
