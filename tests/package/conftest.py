"""The bundles that are packed, and the Android archive that several tests open."""

import os
from pathlib import Path

import pytest
from android_parts import find_runtime
from package_loaders import NNAPI, PACKAGE, QNN, XNNPACK, require_program, run_program

from edgekit.bundle.archive import unpack_archive
from edgekit.package.package import package_bundles

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bundles(demo_bundles: Path) -> Path:
    return demo_bundles


@pytest.fixture(scope="session")
def repository(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Maven repository with the archive of three bundles."""
    require_program("javac", "openjdk-17-jdk-headless")
    out = tmp_path_factory.mktemp("aar") / "maven"
    package_bundles((bundles / QNN, bundles / NNAPI, bundles / XNNPACK), "aar", out, runtime=find_runtime())
    return out


@pytest.fixture(scope="session")
def unpacked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unpacked") / "aar"
    (archive,) = repository.rglob("*.aar")
    unpack_archive(archive, out)
    return out


@pytest.fixture(scope="session")
def checker(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A class path with the archive's own classes and `standalone/Check.java`, compiled against ONNX Runtime."""
    work = tmp_path_factory.mktemp("java")
    source = (HERE / "standalone" / "Check.java").read_text()
    (work / "Check.java").write_text(source.replace("package edgekit.loader;", f"package {PACKAGE};"))
    path = os.pathsep.join((str(unpacked / "classes.jar"), str(find_runtime().classes)))
    code, shown = run_program(["javac", "-cp", path, "-d", work, work / "Check.java"])
    assert code == 0, shown
    return os.pathsep.join((str(work), str(unpacked / "classes.jar")))
