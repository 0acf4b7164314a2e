"""ONNX Runtime's archive for Android (`.aar`): the pinned one, or one that the user names."""

import re
import zipfile
import zlib
from pathlib import Path

import msgspec

from edgekit.app_runtime import NativeLibrary
from edgekit.devices.android.elf import Library, read_alignment, read_library
from edgekit.devices.release.package import fetch_members, write_member
from edgekit.errors import DeviceError, UsageError

ARCHIVE_SHA256 = "98cddbac92640b4a6af72a03c42e0491851f366d3da66bbaeb5dd66310946cf2"
LIBRARY = "libonnxruntime.so"
MACHINES = {"arm64-v8a": "aarch64", "x86_64": "x86_64"}
"""The machine of each ABI that can run here."""
OLDEST = (1, 17)
"""The oldest ONNX Runtime whose interface edgekit's runner knows."""

_MEMBER = "package/Plugins/Android/onnxruntime.aar"
_KEPT = re.compile(rf"classes\.jar|headers/[\w.]+\.(?:h|inc)|jni/(?:{'|'.join(MACHINES)})/libonnxruntime4j_jni\.so")
_NATIVE = re.compile(r"jni/([\w-]+)/([\w.+-]+\.so)")
# Headers of an ELF file and of its segments stand at its beginning.
_ELF_HEADERS_BYTES = 1 << 13
_MOST_BYTES = 1 << 30
_VERSION = re.compile(r"VERS_(\d+)\.(\d+)\.(\d+)$")
_PROVIDERS = {
    "NnapiExecutionProvider": b"OrtSessionOptionsAppendExecutionProvider_Nnapi\0",
    "XnnpackExecutionProvider": b"XnnpackExecutionProvider\0",
    "WebGpuExecutionProvider": b"WebGpuExecutionProvider\0",
}


class OrtLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """The library of an archive for one ABI: its version and the providers that were built into it."""

    path: Path
    abi: str
    version: str
    providers: tuple[str, ...]
    elf: Library


def fetch_archive(folder: Path) -> Path:
    """Returns the pinned archive, taken out of its package with npm into `folder`.

    Raises:
        DeviceError: npm is missing or fails, or what it fetched is not what is pinned.
        OutputError: the folder cannot be written.
    """
    (archive,) = fetch_members(folder, {_MEMBER: ARCHIVE_SHA256}, instead="--library FILE.aar")
    return archive


def list_native_libraries(archive: Path) -> tuple[NativeLibrary, ...]:
    """Returns every shared library of an archive, for each ABI, with the alignment of its segments.

    Raises:
        DeviceError: one is damaged.
    """
    with zipfile.ZipFile(archive) as file:
        return tuple(
            NativeLibrary(abi=match[1], name=match[2], alignment=_read_alignment(file, match[0], archive))
            for name in sorted(file.namelist())
            if (match := _NATIVE.fullmatch(name))
        )


def _read_alignment(file: zipfile.ZipFile, name: str, archive: Path) -> int:
    with file.open(name) as member:
        try:
            return read_alignment(member.read(_ELF_HEADERS_BYTES))
        except ValueError as error:
            raise DeviceError(f"'{name}' of '{archive}' is damaged: {error}", hint="fetch it again") from error


def unpack_libraries(archive: Path, folder: Path) -> tuple[OrtLibrary, ...]:
    """Returns the libraries of an archive for the ABIs that can run here, each in its folder `folder/ABI`.

    The archive's classes, what binds them to the library, and its headers are put into `folder` too.

    Raises:
        DeviceError: it is no whole archive, or its libraries are not those of an ONNX Runtime that can run here.
        UsageError: there is no such file.
        OutputError: the folder cannot be written.
    """
    if not archive.is_file():
        raise UsageError(f"there is no file '{archive}'", hint="--library onnxruntime-android-VERSION.aar")
    try:
        with zipfile.ZipFile(archive) as file:
            return tuple(_unpack(file, archive, folder))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DeviceError(f"'{archive}' is no whole .aar: {error}", hint="fetch it again") from error


def _unpack(file: zipfile.ZipFile, archive: Path, folder: Path) -> list[OrtLibrary]:
    sizes = {info.filename: info.file_size for info in file.infolist()}
    if sum(sizes.values()) > _MOST_BYTES:
        raise DeviceError(f"'{archive}' unpacks to more than a GiB", hint="give ONNX Runtime's own archive")
    found = [abi for abi in MACHINES if f"jni/{abi}/{LIBRARY}" in sizes]
    if not found:
        has = sorted(name.split("/")[1] for name in sizes if name.startswith("jni/") and name.endswith(f"/{LIBRARY}"))
        raise DeviceError(
            f"'{archive}' holds no {LIBRARY} for {' or '.join(MACHINES)}"
            + (f", only for {', '.join(has)}" * bool(has)),
            hint="give ONNX Runtime's archive for Android, onnxruntime-android-VERSION.aar",
        )
    for name in filter(_KEPT.fullmatch, sizes):
        _take(file, name, folder / name.removeprefix("jni/"))
    for abi in found:
        _take(file, f"jni/{abi}/{LIBRARY}", folder / abi / LIBRARY)
    return [read_ort_library(folder / abi / LIBRARY, abi, archive.name) for abi in found]


def _take(file: zipfile.ZipFile, name: str, path: Path) -> None:
    with file.open(name) as member:
        write_member(member, path)


def read_ort_library(path: Path, abi: str, name: str) -> OrtLibrary:
    """Returns what a library is; `name` says in an error where it comes from.

    Raises:
        DeviceError: it is no ONNX Runtime for that ABI, or one that is too old.
    """
    elf = read_library(path)
    if elf.machine != MACHINES[abi]:
        raise DeviceError(f"the {abi} library of '{name}' is for {elf.machine}", hint="give ONNX Runtime's own archive")
    versions = [match for word in elf.words if (match := _VERSION.match(word))]
    if "OrtGetApiBase" not in elf.words or len(versions) != 1:
        raise DeviceError(f"the {abi} library of '{name}' is no ONNX Runtime", hint="give ONNX Runtime's own archive")
    numbers = tuple(map(int, versions[0].groups()))
    if numbers < OLDEST:
        raise DeviceError(
            f"'{name}' is ONNX Runtime {'.'.join(map(str, numbers))}", hint=f"{OLDEST[0]}.{OLDEST[1]} is the oldest"
        )
    data = path.read_bytes()
    return OrtLibrary(
        path=path,
        abi=abi,
        version=".".join(map(str, numbers)),
        providers=tuple(provider for provider, trace in _PROVIDERS.items() if trace in data),
        elf=elf,
    )
