"""The Android archive: its structure, and its Java loader with the real ONNX Runtime for Java and QNN's simulator."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from package_loaders import OLDER, QNN, XNNPACK, find_qnn, flip_byte, require_program, run_program
from package_maven import ANDROID, GET, ORT, fetch_jar, maven_repository, run_maven

from edgekit._files import digest_file
from edgekit.bundle.archive import list_files, unpack_archive
from edgekit.bundle.folder import open_bundle
from edgekit.package.package import package_bundles

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = "edgekit.models.digits_mobilenet"
POM = "{http://maven.apache.org/POM/4.0.0}"


@pytest.fixture(scope="module")
def repository(bundles: Path, older: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_program("javac", "openjdk-17-jdk-headless")
    out = tmp_path_factory.mktemp("aar") / "maven"
    package_bundles((bundles / QNN, bundles / XNNPACK, older), "aar", out)
    return out


@pytest.fixture(scope="module")
def unpacked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unpacked") / "aar"
    unpack_archive(_only(repository, "*.aar"), out)
    return out


@pytest.fixture(scope="module")
def java(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs `far/Check.java` on the archive's own classes."""
    work = tmp_path_factory.mktemp("java")
    source = (ROOT / "tests" / "package" / "far" / "Check.java").read_text()
    (work / "Check.java").write_text(source.replace("package edgekit.loader;", f"package {PACKAGE};"))
    path = os.pathsep.join((str(unpacked / "classes.jar"), str(fetch_jar(ORT))))
    code, shown = run_program(["javac", "-cp", path, "-d", work, work / "Check.java"])
    assert code == 0, shown
    return ["java", "-cp", f"{work}{os.pathsep}{path}", f"{PACKAGE}.Check"]


def _check(java: Sequence[str], unpacked: Path, work: Path, *arguments: str) -> tuple[int, str]:
    return run_program([*java, unpacked / "assets" / PACKAGE, work, *arguments])


def test_the_archive_has_what_android_asks_for(unpacked: Path, repository: Path) -> None:
    manifest = ET.parse(unpacked / "AndroidManifest.xml").getroot()  # noqa: S314 - our own file
    level = "{http://schemas.android.com/apk/res/android}minSdkVersion"
    assert manifest.get("package") == PACKAGE
    assert [entry.get(level) for entry in manifest.iter("uses-sdk")] == ["24"]
    assert {"AndroidManifest.xml", "R.txt", "classes.jar", "proguard.txt"} <= list_files(unpacked).keys()
    with zipfile.ZipFile(unpacked / "classes.jar") as classes:
        assert all(name.startswith(f"{PACKAGE.replace('.', '/')}/") for name in classes.namelist())
    pom = ET.parse(_only(repository, "*.pom")).getroot()  # noqa: S314 - our own file
    needs = [
        ":".join(entry.findtext(f"{POM}{key}", "") for key in ("groupId", "artifactId", "version", "scope"))
        for entry in pom.iter(f"{POM}dependency")
    ]
    assert needs == [
        "com.microsoft.onnxruntime:onnxruntime-android:1.31.1:compile",
        "com.qualcomm.qti:onnxruntime-android-qnn:2.7.0:runtime",
        "com.qualcomm.qti:qnn-runtime:2.51.0:runtime",
    ]
    for name in (QNN, XNNPACK):
        assert open_bundle(unpacked / "assets" / PACKAGE / name).manifest.name == "digits_mobilenet"


def test_an_nnapi_bundle_asks_for_its_api_level(bundles: Path, tmp_path: Path) -> None:
    require_program("javac", "openjdk-17-jdk-headless")
    package_bundles((bundles,), "aar", tmp_path / "maven", name="digits", group="com.example", version="2.0.0")
    archive = tmp_path / "maven" / "com" / "example" / "digits" / "2.0.0" / "digits-2.0.0.aar"
    with zipfile.ZipFile(archive) as opened:
        assert b'minSdkVersion="29"' in opened.read("AndroidManifest.xml")
        assert "assets/com.example.digits/digits_mobilenet-nnapi/manifest.json" in opened.namelist()


def test_the_archive_is_the_same_to_the_byte(repository: Path, bundles: Path, older: Path, tmp_path: Path) -> None:
    package_bundles((bundles / QNN, bundles / XNNPACK, older), "aar", tmp_path / "again")
    assert digest_file(_only(repository, "*.aar")) == digest_file(_only(tmp_path / "again", "*.aar"))


def test_the_declarations_compile_to_the_classes_that_the_real_libraries_give(
    repository: Path, unpacked: Path, tmp_path: Path
) -> None:
    unpack_archive(_only(repository, "*-sources.jar"), tmp_path / "source")
    unpack_archive(unpacked / "classes.jar", tmp_path / "ours")
    path = os.pathsep.join((str(fetch_jar(ORT)), str(fetch_jar(ANDROID))))
    sources = sorted((tmp_path / "source").rglob("*.java"))
    options = ["--release", "8", "-Xlint:-options", "-encoding", "UTF-8", "-proc:none"]
    code, shown = run_program(["javac", *options, "-cp", path, "-d", tmp_path / "real", *sources])
    assert code == 0, shown
    ours, real = list_files(tmp_path / "ours"), list_files(tmp_path / "real")
    assert ours.keys() == real.keys()
    assert all(ours[name].read_bytes() == real[name].read_bytes() for name in ours)


def test_maven_finds_the_archive(repository: Path) -> None:
    archive = _only(repository, "*.aar")
    coordinates = f"edgekit.models:digits_mobilenet:{archive.parent.name}:aar"
    own = f"-DremoteRepositories=own::::{repository.as_uri()}"
    kept = maven_repository() / "edgekit"
    try:
        code, shown = run_maven(GET, own, "-Dtransitive=false", f"-Dartifact={coordinates}")
        assert code == 0, shown[-2000:]
        assert digest_file(_only(kept, archive.name)) == digest_file(archive)
    finally:
        shutil.rmtree(kept, ignore_errors=True)


def test_java_opens_the_bundle_on_the_simulator(java: list[str], unpacked: Path, tmp_path: Path) -> None:
    code, shown = _check(java, unpacked, tmp_path, "open", "-", "--plugin", find_qnn())
    assert code == 0, shown
    assert f"{QNN}: self-test passed with" in shown


def test_java_says_why_a_bundle_cannot_be_opened(java: list[str], unpacked: Path, tmp_path: Path) -> None:
    code, shown = _check(java, unpacked, tmp_path, "open", "-")
    assert code == 1
    assert "give the library of QNNExecutionProvider" in shown
    assert f"'{XNNPACK}' needs ONNX Runtime 1.31.0, this is 1.29.0" in shown
    assert f"'{OLDER}' cannot be opened here" in shown
    assert "XNNPACK" in shown


def test_java_passes_every_key_on_and_its_self_test_can_say_no(
    java: list[str], unpacked: Path, older: Path, tmp_path: Path
) -> None:
    code, shown = _check(java, unpacked, tmp_path, "keys", OLDER, "--cpu")
    assert code == 0, shown
    manifest = open_bundle(older).manifest
    lines = shown.splitlines()
    refused = [line.removeprefix("refused: ") for line in lines if line.startswith("refused: ")]
    assert refused == sorted(manifest.session_config)
    options = [line.removeprefix("option: ") for line in lines if line.startswith("option: ")]
    assert options == [f"{key}={value}" for key, value in sorted(manifest.provider_options.items())]
    assert "SQNR in dB" in shown
    assert shown.count("is off by") == len(manifest.golden.chosen) > 0


@pytest.mark.parametrize("name", ["golden/inputs.npz", "model.runtime.ort"])
def test_java_names_an_altered_file(name: str, java: list[str], unpacked: Path, tmp_path: Path) -> None:
    shutil.copytree(unpacked / "assets", tmp_path / "aar" / "assets")
    flip_byte(tmp_path / "aar" / "assets" / PACKAGE / OLDER / name)
    code, shown = _check(java, tmp_path / "aar", tmp_path / "work", "open", OLDER, "--cpu")
    assert code == 1
    assert f"'{name}' of bundle '{OLDER}' was altered" in shown


def test_java_unpacks_again_what_was_altered_on_the_device(java: list[str], unpacked: Path, tmp_path: Path) -> None:
    assert _check(java, unpacked, tmp_path, "open", OLDER, "--cpu")[0] == 0
    (model,) = tmp_path.rglob("model.runtime.ort")
    whole = model.read_bytes()
    flip_byte(model)
    assert _check(java, unpacked, tmp_path, "open", OLDER, "--cpu")[0] == 0
    assert model.read_bytes() == whole


def test_without_a_java_compiler_the_error_names_the_package(bundles: Path, tmp_path: Path) -> None:
    package = ["package", str(bundles / QNN), "--allow-failed", "--as", "aar", "--out", str(tmp_path / "no")]
    argv = [sys.executable, "-m", "edgekit", *package]
    done = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no javac here (apt-get install openjdk-17-jdk-headless)" in done.stderr
    assert not (tmp_path / "no").exists()


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.rglob(pattern)
    return found
