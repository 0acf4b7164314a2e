"""Java libraries of Maven Central for the tests: each is pinned by its sha256 and stored in edgekit's cache."""

import shutil
from pathlib import Path

import pytest
from package_loaders import join_jars, run_program

from edgekit._files import digest_file, one_at_a_time
from edgekit.machine import cache_folder

ORT = (
    "com.microsoft.onnxruntime:onnxruntime:1.29.0",
    "5933bbc0c6c4d89afc04bf7c11011de23a947509c1352e5bf5936e62a84e4d10",
)
"""The newest Java package for desktops; ONNX Runtime 1.31 has none."""
ANDROID = ("com.google.android:android:4.1.1.4", "84072541cbb711eff89f7277100ff854929a446dba7ceb1b195c340e0b4fd3cb")
KOTLIN = "2.0.21"
KOTLIN_MAIN = "org.jetbrains.kotlin.cli.jvm.K2JVMCompiler"
GET = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:get"


def fetch_jar(artifact: tuple[str, str]) -> Path:
    """The jar of an artifact; a jar with another digest than the pinned one is an error."""
    coordinates, sha256 = artifact
    group, name, version = coordinates.split(":")
    jar = maven_repository() / group.replace(".", "/") / name / version / f"{name}-{version}.jar"
    if not jar.exists():
        run_maven(GET, "-Dtransitive=false", f"-Dartifact={coordinates}")
    assert digest_file(jar) == sha256
    return jar


def fetch_kotlin() -> tuple[str, Path]:
    """The class path of Kotlin's compiler, which Maven resolves, and Kotlin's own library."""
    folder = maven_repository() / "org" / "jetbrains"
    library = folder / "kotlin" / "kotlin-stdlib" / KOTLIN / f"kotlin-stdlib-{KOTLIN}.jar"
    compiler = folder / "kotlin" / "kotlin-compiler-embeddable" / KOTLIN / f"kotlin-compiler-embeddable-{KOTLIN}.jar"
    if not library.exists() or not compiler.exists():
        run_maven(GET, f"-Dartifact=org.jetbrains.kotlin:kotlin-compiler-embeddable:{KOTLIN}")
    return join_jars(*sorted(folder.rglob("*.jar"))), library


def run_maven(*arguments: str) -> None:
    if shutil.which("mvn") is None:
        pytest.skip("needs mvn: apt-get install maven")
    with one_at_a_time(maven_repository()):
        run_program(["mvn", "-B", "-q", f"-Dmaven.repo.local={maven_repository()}", *arguments])


def maven_repository() -> Path:
    return cache_folder() / "maven"
