"""Shared by the tests of loaders: the real library, the real provider, and damage to files."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from edgekit.bundle.archive import list_files

NNAPI, QNN, XNNPACK = "digits_mobilenet-nnapi", "digits_mobilenet-qnn", "digits_mobilenet-xnnpack"
PACKAGE = "edgekit.models.digits_mobilenet"
CPU, PLAIN = "digits_mobilenet-cpu", "digits_mobilenet-plain"


def find_library() -> Path:
    """The library in the wheel of onnxruntime, which is the one that a board would load."""
    (found,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.1*")
    return found


def require_program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install {package}")
    return found


def find_qnn() -> str:
    """The plug-in provider of the wheel onnxruntime-qnn, with Qualcomm's simulator."""
    if importlib.util.find_spec("onnxruntime_qnn") is None:
        pytest.skip("needs onnxruntime-qnn: pip install onnxruntime-qnn==2.7.0")
    code = "import onnxruntime_qnn; print(onnxruntime_qnn.get_library_path())"
    return run_program([sys.executable, "-c", code]).strip()


def run_program(argv: Sequence[str | Path], *, code: int = 0) -> str:
    """What a command prints, such as a compiler, that must end with this exit code."""
    done = subprocess.run(
        [str(word) for word in argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "ORT_DISABLE_TELEMETRY": "1", "MAVEN_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"},
    )
    assert done.returncode == code, done.stdout[-5000:]
    return done.stdout


def run_check(java: Sequence[str], unpacked: Path, work: Path, *arguments: str, code: int = 0) -> str:
    """Runs `standalone/Check.java` on the assets of an unpacked archive; returns what it prints."""
    return run_program([*java, unpacked / "assets" / PACKAGE, work, *arguments], code=code)


def load_program(path: Path) -> Any:
    """A program of a package as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def join_jars(*places: str | Path) -> str:
    """A class path."""
    return os.pathsep.join(map(str, places))


def compile_java(source: Path, package: str, path: str, out: Path) -> None:
    """Compiles a program as a class in an archive's own Java package."""
    text = source.read_text().replace("package edgekit.loader;", f"package {package};")
    (out / source.name).write_text(text)
    run_program(["javac", "-J-XX:TieredStopAtLevel=1", "-cp", path, "-d", out, out / source.name])


def read_all(folder: Path) -> dict[str, bytes]:
    """The bytes of each file below a folder, by name."""
    return {name: path.read_bytes() for name, path in list_files(folder).items()}
