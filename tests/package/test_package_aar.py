"""The Android archive: its structure, what a store says of it, and its Java loader on a desktop with QNN's simulator.

`test_package_android.py` runs the loader with Android's own library.
"""

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import pytest
from android_parts import find_runtime
from package_loaders import (
    NNAPI,
    PACKAGE,
    QNN,
    XNNPACK,
    find_qnn,
    join_jars,
    read_all,
    require_program,
    run_check,
    run_program,
)
from package_maven import ANDROID, GET, ORT, fetch_jar, maven_repository, run_maven

from edgekit._files import digest_file
from edgekit.app_runtime import NativeLibrary
from edgekit.bundle.archive import list_files, unpack_archive
from edgekit.bundle.folder import open_bundle
from edgekit.errors import UsageError
from edgekit.package.formats import StoreReport
from edgekit.package.package import package_bundles
from edgekit.package.variant import Identity

pytestmark = pytest.mark.slow

POM = "{http://maven.apache.org/POM/4.0.0}"


@pytest.fixture(scope="module")
def java(checker: str) -> list[str]:
    """The command that runs `standalone/Check.java` with ONNX Runtime for desktops, which takes QNN's simulator."""
    return ["java", "-cp", join_jars(checker, fetch_jar(ORT)), f"{PACKAGE}.Check"]


def test_the_aar_has_the_entries_that_android_requires(unpacked: Path, repository: Path) -> None:
    manifest = ET.parse(unpacked / "AndroidManifest.xml").getroot()  # noqa: S314 - our own file
    level = "{http://schemas.android.com/apk/res/android}minSdkVersion"
    assert manifest.get("package") == PACKAGE
    assert [entry.get(level) for entry in manifest.iter("uses-sdk")] == ["29"]
    assert {"AndroidManifest.xml", "R.txt", "classes.jar", "proguard.txt"} <= list_files(unpacked).keys()
    with zipfile.ZipFile(unpacked / "classes.jar") as classes:
        assert all(name.startswith(f"{PACKAGE.replace('.', '/')}/") for name in classes.namelist())
    pom = ET.parse(_only(repository, "*.pom")).getroot()  # noqa: S314 - our own file
    needs = [
        ":".join(entry.findtext(f"{POM}{key}", "") for key in ("groupId", "artifactId", "version", "scope"))
        for entry in pom.iter(f"{POM}dependency")
    ]
    assert needs == [
        "com.microsoft.onnxruntime:onnxruntime-android:1.29.0:compile",
        "com.qualcomm.qti:onnxruntime-android-qnn:2.7.0:runtime",
        "com.qualcomm.qti:qnn-runtime:2.51.0:runtime",
    ]


def test_the_archive_carries_what_its_loader_opens_and_tests_once(unpacked: Path, bundles: Path) -> None:
    models: dict[str, int] = {}
    for name in (QNN, XNNPACK, NNAPI):
        manifest = open_bundle(bundles / name).manifest
        models |= {f"{name}/{file}": manifest.files[file].size_bytes for file in manifest.forms[manifest.form]}
    assets = list_files(unpacked / "assets" / PACKAGE)
    (shared,) = {name for name in assets if name.startswith("golden-")}
    own = {f"{name}/{file}" for name in (QNN, XNNPACK, NNAPI) for file in ("manifest.json", "golden/expected.npz")}
    assert assets.keys() == {shared, *own, *models}
    chosen = {
        sample.row for name in (QNN, XNNPACK, NNAPI) for sample in open_bundle(bundles / name).manifest.golden.chosen
    }
    with np.load(assets[shared]) as golden:
        assert {len(rows) for rows in golden.values()} == {len(chosen)}
    assert sum(path.stat().st_size for path in list_files(unpacked).values()) <= 1.5 * sum(models.values())


def test_the_archive_repeats_and_says_what_stores_check(repository: Path, bundles: Path, tmp_path: Path) -> None:
    again = (bundles / QNN, bundles / NNAPI, bundles / XNNPACK)
    report = package_bundles(again, "aar", tmp_path / "again", runtime=find_runtime())
    assert digest_file(_only(repository, "*.aar")) == digest_file(_only(tmp_path / "again", "*.aar"))
    assert report.store is not None
    assert report.store.passed
    assert report.store.abis == ("arm64-v8a", "armeabi-v7a", "x86", "x86_64")
    assert {library.alignment for library in report.store.libraries} == {16384}
    assert (report.store.version, report.store.minimum_ort) == ("1.29.0", "1.29.0")
    assert report.store.unseen == (
        "com.qualcomm.qti:onnxruntime-android-qnn:2.7.0",
        "com.qualcomm.qti:qnn-runtime:2.51.0",
    )
    readme = (tmp_path / "again" / "README.md").read_text()
    assert all(f"- {remark}" in readme for remark in report.store.remarks)


def test_a_store_refuses_narrow_pages_and_32_bits_alone() -> None:
    def judge(*libraries: tuple[str, int]) -> tuple[str, ...]:
        given = tuple(NativeLibrary(abi=abi, name="lib.so", alignment=alignment) for abi, alignment in libraries)
        return StoreReport(
            archive="a.aar", archive_sha256="", version="1.29.0", minimum_ort="1.29.0", libraries=given, unseen=()
        ).complaints

    assert judge(("arm64-v8a", 1 << 14), ("armeabi-v7a", 1 << 12), ("x86_64", 1 << 16)) == ()
    narrow = judge(("arm64-v8a", 1 << 12))
    assert narrow == ("'jni/arm64-v8a/lib.so' of 'a.aar' is aligned to 4096 bytes and not to 16 KB",)
    alone = judge(("armeabi-v7a", 1 << 14))
    assert alone == ("'a.aar' has libraries for armeabi-v7a and none for arm64-v8a",)


def test_a_bundle_that_needs_a_newer_runtime_is_refused_or_left_out(bundles: Path, tmp_path: Path) -> None:
    """What is packed then, without NNAPI, asks for what ONNX Runtime asks for."""
    older = msgspec.structs.replace(find_runtime(), version="1.26.0")
    reason = "it needs ONNX Runtime 1.29.0, and 'onnxruntime.aar' holds 1.26.0"
    with pytest.raises(UsageError, match=re.escape(reason)):
        package_bundles((bundles / XNNPACK,), "aar", tmp_path / "no", runtime=older)
    assert not (tmp_path / "no").exists()
    require_program("javac", "openjdk-17-jdk-headless")
    names = Identity(name="digits", group="com.example", version="2.0.0")
    report = package_bundles((bundles,), "aar", tmp_path / "maven", names=names, runtime=older)
    assert [variant.name for variant in report.bundles] == [QNN]
    with zipfile.ZipFile(tmp_path / "maven/com/example/digits/2.0.0/digits-2.0.0.aar") as opened:
        assert b'minSdkVersion="24"' in opened.read("AndroidManifest.xml")
        assert f"assets/com.example.digits/{QNN}/manifest.json" in opened.namelist()
    assert sorted(left.reason for left in report.left_out if "CoreML" not in left.reason) == [reason] * 3


def test_without_an_archive_of_onnxruntime_there_is_no_aar(bundles: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compiled against ONNX Runtime's own classes") as raised:
        package_bundles((bundles / XNNPACK,), "aar", tmp_path / "no")
    assert raised.value.hint == "edgekit devices install android"
    lacking = msgspec.structs.replace(find_runtime(), classes=tmp_path / "classes.jar")
    with pytest.raises(UsageError, match=r"'onnxruntime\.aar' holds no classes\.jar"):
        package_bundles((bundles / XNNPACK,), "aar", tmp_path / "no", runtime=lacking)
    assert not (tmp_path / "no").exists()


def test_classes_that_the_loader_does_not_fit_are_named(bundles: Path, tmp_path: Path) -> None:
    require_program("javac", "openjdk-17-jdk-headless")
    with zipfile.ZipFile(find_runtime().classes) as whole, zipfile.ZipFile(tmp_path / "classes.jar", "w") as lacking:
        for name in whole.namelist():
            if not name.endswith("NNAPIFlags.class"):
                lacking.writestr(name, whole.read(name))
    runtime = msgspec.structs.replace(find_runtime(), classes=tmp_path / "classes.jar")
    with pytest.raises(UsageError, match=r"the loader does not fit the classes of 'onnxruntime\.aar'"):
        package_bundles((bundles / XNNPACK,), "aar", tmp_path / "no", runtime=runtime)
    assert not (tmp_path / "no").exists()


@pytest.mark.long
def test_androids_declarations_compile_to_its_classes(repository: Path, unpacked: Path, tmp_path: Path) -> None:
    unpack_archive(_only(repository, "*-sources.jar"), tmp_path / "source")
    unpack_archive(unpacked / "classes.jar", tmp_path / "ours")
    path = join_jars(find_runtime().classes, fetch_jar(ANDROID))
    sources = sorted((tmp_path / "source").rglob("*.java"))
    options = ["--release", "8", "-Xlint:-options", "-encoding", "UTF-8", "-proc:none"]
    run_program(["javac", *options, "-cp", path, "-d", tmp_path / "real", *sources])
    assert read_all(tmp_path / "ours") == read_all(tmp_path / "real")


@pytest.mark.long
def test_maven_finds_the_archive(repository: Path) -> None:
    archive = _only(repository, "*.aar")
    coordinates = f"edgekit.models:digits_mobilenet:{archive.parent.name}:aar"
    own = f"-DremoteRepositories=own::::{repository.as_uri()}"
    kept = maven_repository() / "edgekit"
    try:
        run_maven(GET, own, "-Dtransitive=false", f"-Dartifact={coordinates}")
        assert digest_file(_only(kept, archive.name)) == digest_file(archive)
    finally:
        shutil.rmtree(kept, ignore_errors=True)


@pytest.mark.long
def test_the_java_loader_opens_the_bundle_on_the_simulator(java: list[str], unpacked: Path, tmp_path: Path) -> None:
    assert f"{QNN}: self-test passed with" in run_check(java, unpacked, tmp_path, "open", "-", "--plugin", find_qnn())


@pytest.mark.long
def test_the_java_loader_says_why_a_bundle_cannot_be_opened(java: list[str], unpacked: Path, tmp_path: Path) -> None:
    shown = run_check(java, unpacked, tmp_path, "open", "-", code=1)
    assert "give the library of QNNExecutionProvider" in shown
    assert f"'{XNNPACK}' cannot be opened here" in shown
    assert "XNNPACK" in shown


def test_a_lacking_javac_is_told(bundles: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    said = refused("package", str(bundles / QNN), "--allow-failed", "--as", "aar", "--out", "no")
    assert "there is no javac here (apt-get install openjdk-17-jdk-headless)" in said


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.rglob(pattern)
    return found
