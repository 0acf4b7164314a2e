"""What is installed of the Android device, and installing it: an archive's libraries, and a program for each."""

from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, digest_file, one_at_a_time, staged_folder, work_folder, write_file
from edgekit.app_runtime import AppRuntime, NativeLibrary
from edgekit.devices.android.archive import (
    ARCHIVE_SHA256,
    LIBRARY,
    MACHINES,
    OrtLibrary,
    fetch_archive,
    list_native_libraries,
    unpack_libraries,
)
from edgekit.devices.android.stand_in import android_sources, compile_runner, link_runner
from edgekit.devices.local.runner import PROGRAM, runner_sources
from edgekit.devices.process.cache import cache_folder
from edgekit.devices.release.compilers import find_compiler, is_made_by
from edgekit.errors import DeviceError
from edgekit.progress import Progress

_FACTS = "device.json"
_COMPILERS = {
    "aarch64": "apt-get install g++-aarch64-linux-gnu, or pip install ziglang",
    "x86_64": "apt-get install g++, or pip install ziglang",
}


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed: of which archive, with which version and providers, for which ABIs.

    `abis` are those that run here, `libraries` all that the archive holds. `sources` is the digest of the sources that
    its programs were built from, `compilers` tell for each ABI what built them.
    """

    archive: str
    sha256: str
    version: str
    providers: tuple[str, ...]
    abis: tuple[str, ...]
    libraries: tuple[NativeLibrary, ...]
    sources: str
    compilers: dict[str, str]

    @property
    def is_pinned(self) -> bool:
        """True for the archive that edgekit fetches itself."""
        return self.sha256 == ARCHIVE_SHA256

    @property
    def is_current(self) -> bool:
        """True if the compilers that are here now would build the same programs, and no more of them."""
        return is_made_by(self.compilers, {abi: find_compiler(machine) for abi, machine in MACHINES.items()})

    def find_program(self, abi: str) -> Path:
        """Returns the program for an ABI."""
        return device_folder() / abi / PROGRAM

    def find_library(self, abi: str) -> Path:
        """Returns ONNX Runtime's library for an ABI."""
        return device_folder() / abi / LIBRARY


def device_folder() -> Path:
    """Returns where the device lies in the user's cache."""
    return cache_folder() / "android"


def find_installed() -> Installed | None:
    """Returns what is installed and was built from exactly these sources, or None."""
    try:
        facts = msgspec.json.decode((device_folder() / _FACTS).read_bytes(), type=Installed)
    except (OSError, msgspec.DecodeError):
        return None
    return facts if facts.sources == _digest_sources() else None


def find_app_runtime() -> AppRuntime | None:
    """Returns the archive that is installed, as an app ships it, or None."""
    installed = find_installed()
    if installed is None:
        return None
    return AppRuntime(
        archive=installed.archive,
        sha256=installed.sha256,
        version=installed.version,
        libraries=installed.libraries,
        classes=device_folder() / "classes.jar",
    )


def install_android(progress: Progress, library: Path | None = None) -> Installed:
    """Installs the pinned archive, or that of `library`, and builds a program for each of its ABIs that can be built.

    Raises:
        DeviceError: the archive cannot be fetched, is not what it should be or imports what nothing stands for, there
            is no compiler, or one fails. Nothing half is left.
        UsageError: there is no such file.
        OutputError: the cache cannot be written.
    """
    with one_at_a_time(device_folder()), staged_folder(device_folder()) as staging, work_folder() as work:
        if library is None:
            progress("fetching ONNX Runtime for Android with npm: 150 MB")
        archive = library or fetch_archive(work)
        found = unpack_libraries(archive, staging)
        compilers = {ort.abi: _build(ort, staging / ort.abi, work, archive.name, progress) for ort in found}
        built = [ort for ort in found if compilers[ort.abi]]
        if not built:
            raise DeviceError("there is no compiler for Android's stand-in", hint=_COMPILERS[MACHINES[found[0].abi]])
        facts = Installed(
            archive=archive.name,
            sha256=digest_file(archive),
            version=built[0].version,
            providers=built[0].providers,
            abis=tuple(ort.abi for ort in built),
            libraries=list_native_libraries(archive),
            sources=_digest_sources(),
            compilers=compilers,
        )
        write_file(staging / _FACTS, msgspec.json.encode(facts))
    return facts


def explain_compiler(abi: str) -> str:
    """Returns the command that installs a compiler for an ABI."""
    return _COMPILERS[MACHINES[abi]]


def _build(ort: OrtLibrary, folder: Path, work: Path, name: str, progress: Progress) -> str:
    """Builds the program beside a library and returns what compiled it, "" where there is no compiler for it."""
    compiler = find_compiler(MACHINES[ort.abi])
    if compiler is None:
        progress(f"{ort.abi} is left out: there is no compiler for it; {explain_compiler(ort.abi)}")
        return ""
    slow = ", which compiles its C++ library first: minutes" if compiler.name == "zig" else ""
    progress(f"compiling the stand-in for Android on {ort.abi} with {compiler.name}{slow}")
    objects = compile_runner(compiler, work / ort.abi)
    link_runner(compiler, objects, ort.elf.imports, folder / PROGRAM, name=name)
    return compiler.describe()


def _digest_sources() -> str:
    files = [*runner_sources().rglob("*.cpp"), *runner_sources().rglob("*.h"), *android_sources().iterdir()]
    return digest_bytes("\n".join(sorted(f"{path.name} {digest_file(path)}" for path in files)).encode())
