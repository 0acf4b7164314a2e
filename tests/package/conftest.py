"""The bundles that are packed, and the Android archive that several tests open."""

from pathlib import Path

import pytest
from android_parts import find_runtime
from fixture_types import MakeOnce
from package_loaders import NNAPI, PACKAGE, QNN, XNNPACK, compile_java, join_jars, require_program

from edgekit.bundle.archive import unpack_archive
from edgekit.package.package import package_bundles

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def bundles(demo_bundles: Path) -> Path:
    return demo_bundles


@pytest.fixture(scope="session")
def repository(bundles: Path, make_once: MakeOnce) -> Path:
    """A Maven repository with the archive of three bundles."""
    require_program("javac", "openjdk-17-jdk-headless")
    chosen, runtime = (bundles / QNN, bundles / NNAPI, bundles / XNNPACK), find_runtime()
    made = make_once("aar", lambda folder: package_bundles(chosen, "aar", folder / "maven", runtime=runtime))
    return made / "maven"


@pytest.fixture(scope="session")
def unpacked(repository: Path, make_once: MakeOnce) -> Path:
    (archive,) = repository.rglob("*.aar")
    return make_once("aar-unpacked", lambda folder: unpack_archive(archive, folder / "aar")) / "aar"


@pytest.fixture(scope="session")
def checker(unpacked: Path, make_once: MakeOnce) -> str:
    """A class path with the archive's own classes and `standalone/Check.java`, compiled against ONNX Runtime."""
    path = join_jars(unpacked / "classes.jar", find_runtime().classes)

    def compile_check(folder: Path) -> None:
        compile_java(HERE / "standalone" / "Check.java", PACKAGE, path, folder)

    return join_jars(make_once("aar-checker", compile_check), unpacked / "classes.jar")
