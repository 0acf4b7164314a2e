"""ONNX Runtime as an app ships it: bundles are verified with the same archive that packages are made for."""

from pathlib import Path

import msgspec


class NativeLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library of an archive; `alignment` is the smallest alignment of its segments, in bytes."""

    abi: str
    name: str
    alignment: int


class AppRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """An archive of ONNX Runtime, its version and every shared library in it; `classes` is its jar on this machine."""

    archive: str
    sha256: str
    version: str
    libraries: tuple[NativeLibrary, ...]
    classes: Path
