"""What an installed edgekit holds: code, targets, far-side programs, demo and schema of manifests; nothing else."""

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from fixture_types import Shown

from edgekit.bundle.manifest import SCHEMA_FILE, render_schema

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(built_wheel: Path) -> list[str]:
    with zipfile.ZipFile(built_wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_every_file_of_the_package_and_what_is_put_into_it(wheel: list[str]) -> None:
    inside = {path for path in (ROOT / "edgekit").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    put = (
        "_targets/qnn/target.toml", "_targets/qnn/rules.toml", "_targets/coreml/app/ModelSession.swift.j2",
        "_runner/src/main.cpp", "_android/loader.c", "_android/imports.h",
    )  # fmt: skip
    wanted = {path.relative_to(ROOT).as_posix() for path in inside} | {f"edgekit/{name}" for name in put}
    assert wanted - {*wheel} == set()
    assert {"edgekit/py.typed", "edgekit/demo/LICENSE.md", "edgekit/report/templates/build.html.j2"} <= wanted


def test_the_wheel_holds_nothing_else(wheel: list[str]) -> None:
    heads = {name.split("/")[0] for name in wheel}
    assert all(head == "edgekit" or head.endswith(".dist-info") for head in heads)
    assert not any("node_modules" in name or "__pycache__" in name for name in wheel)


def test_the_wheel_alone_checks_its_own_model(built_wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built_wheel) as archive:
        archive.extractall(tmp_path)
    model = tmp_path / "edgekit/demo/digits_mobilenet.onnx"
    program = (
        "import sys, edgekit\nfrom edgekit.cli.main import run_command\n"
        "print(edgekit.__file__)\nsys.exit(run_command(['check', sys.argv[1], '--target', 'qnn']))"
    )
    # The path comes before the checkout, an editable install.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program, str(model)]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path))


def test_every_locked_package_is_hashed() -> None:
    for lock in (ROOT / "tools" / "lock").glob("*.txt"):
        entries = lock.read_text().replace("\\\n", " ").splitlines()
        packages = [line for line in entries if line and not line.startswith(("#", " "))]
        assert packages
        assert all("--hash=sha256:" in line for line in packages), lock.name


def test_no_message_installs_another_project() -> None:
    """`edgekit` on PyPI is somebody else's: what is advised names real packages."""
    told = [*(ROOT / "edgekit").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [path for path in told if re.search(r"install\s+['\"]?edgekit", path.read_text())] == []


def test_the_version_is_that_of_the_distribution(shown: Shown) -> None:
    assert shown(["--version"]) == f"edgekit {metadata.version('edgekit-onnx')}\n"


def test_the_published_schema_is_current() -> None:
    assert SCHEMA_FILE.read_bytes() == render_schema(), (
        "run .venv/bin/python tools/write_schemas.py, and say in CHANGELOG.md what is new"
    )
