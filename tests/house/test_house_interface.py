"""The public interface: what it lists is there, typed, documented, and quick to import."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import edgekit

ROOT = Path(edgekit.__file__).parent


def test_the_stub_names_what_the_facade_gives() -> None:
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    named = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(name for name in named if name) == dir(edgekit)
    for name, module in named.items():
        assert getattr(edgekit, str(name)).__module__.startswith(str(module)), name


@pytest.mark.parametrize("name", dir(edgekit))
def test_every_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(edgekit, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'buidl'"):
        _ = edgekit.buidl  # type: ignore[attr-defined]


def test_help_does_not_load_onnxruntime() -> None:
    code = "import sys; from edgekit.cli.main import run_command; run_command(['--help']); print('onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")


def test_errors_are_one_tree_and_carry_a_hint() -> None:
    tree = ast.parse((ROOT / "errors.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert names[0] == "EdgekitError"
    assert all(name in (ast.get_docstring(tree) or "") for name in names)
