"""What an installed edgekit holds: the code, the targets, the far-side programs, the demo; and nothing else."""

import re
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from edgekit.cli.main import run_command

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(built_wheel: Path) -> list[str]:
    with zipfile.ZipFile(built_wheel) as archive:
        return archive.namelist()


@pytest.mark.parametrize(
    "name",
    [
        "edgekit/py.typed",
        "edgekit/__init__.pyi",
        "edgekit/_targets/qnn/target.toml",
        "edgekit/_targets/qnn/rules.toml",
        "edgekit/_targets/coreml/app/ModelSession.swift.j2",
        "edgekit/demo/digits_mobilenet.onnx",
        "edgekit/demo/LICENSE.md",
        "edgekit/devices/standalone/ort_provider.py",
        "edgekit/devices/standalone/ort_runner.py",
        "edgekit/convert/standalone/qnn_context.py",
        "edgekit/_runner/CMakeLists.txt",
        "edgekit/_runner/src/main.cpp",
        "edgekit/_android/loader.c",
        "edgekit/_android/imports.h",
        "edgekit/report/templates/build.html.j2",
        "edgekit/bundle/templates/README.md.j2",
        "edgekit/package/standalone/cpp/CMakeLists.txt",
        "edgekit/package/standalone/java/loader/Loader.java",
        "edgekit/package/standalone/java/platform/android/content/Context.java",
        "edgekit/package/standalone/python/edgekit_loader.py",
        "edgekit/package/standalone/swift/Loader.swift",
        "edgekit/package/templates/pom.xml.j2",
    ],
)
def test_the_wheel_holds_what_runs(wheel: list[str], name: str) -> None:
    assert name in wheel


def test_the_wheel_holds_nothing_else(wheel: list[str]) -> None:
    heads = {name.split("/")[0] for name in wheel}
    assert all(head == "edgekit" or head.endswith(".dist-info") for head in heads)
    assert not any("node_modules" in name or "__pycache__" in name for name in wheel)


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


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"edgekit {metadata.version('edgekit-onnx')}\n"
