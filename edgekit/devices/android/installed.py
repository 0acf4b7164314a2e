"""What is installed of the Android device, and installing it.

An archive is installed, and the program that stands in for an Android process.
"""

import re
from collections.abc import Collection
from pathlib import Path

import msgspec

from edgekit._files import digest_file, write_file
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
from edgekit.devices.local.runner import PROGRAM
from edgekit.devices.process.cache import digest_sources, find_sources
from edgekit.devices.release import FACTS, Installed, Loader, find_compiler, is_made_by
from edgekit.errors import DeviceError
from edgekit.machine import spell_install
from edgekit.progress import Progress

_DEFINED = re.compile(r"^[\w ]*?[ *](?:bionic_(\w+)|(ANeuralNetworks\w+))(?:\(|\[| =)", re.MULTILINE)


def list_stand_ins() -> dict[str, str]:
    """Returns the functions that the sources define in the place of Android's: their symbols by the names there."""
    own: dict[str, str] = {}
    for source in sorted(find_sources("android").glob("*.c")):
        for bionic, neural in _DEFINED.findall(source.read_text()):
            own[bionic or neural] = f"bionic_{bionic}" if bionic else neural
    return own


def place_imports(imports: Collection[str], without: Collection[str] = ()) -> dict[str, str]:
    """Returns the symbol for each import: the stand-in, else the C library's own.

    NNAPI's functions are among them, which the library finds by name at run time.
    """
    own = list_stand_ins()
    found_by_name = {name for name in own if name.startswith(("ANeuralNetworks", "ASharedMemory"))}
    return {name: name if name in without else own.get(name, name) for name in {*imports, *found_by_name}}


# The runner tells which features the CPU has: those of the phone, as the library sees them.
LOADER = Loader(
    system="android",
    device="android",
    header="imports.h",
    place=place_imports,
    runner_flags=("-Dgetauxval=bionic_getauxval",),
)

_COMPILERS = {
    "aarch64": f"apt-get install g++-aarch64-linux-gnu, or {spell_install('ziglang')}",
    "x86_64": f"apt-get install g++, or {spell_install('ziglang')}",
}


class InstalledArchive(Installed, frozen=True, kw_only=True):
    """What is installed: of which archive, with which version and providers, for which ABIs.

    `abis` are those that run here, `libraries` all that the archive holds. `compilers` tell for each ABI what
    built its program.
    """

    archive: str
    providers: tuple[str, ...]
    abis: tuple[str, ...]
    libraries: tuple[NativeLibrary, ...]
    compilers: dict[str, str]

    @property
    def is_pinned(self) -> bool:
        """True for the archive that edgekit fetches itself."""
        return self.sha256 == ARCHIVE_SHA256

    @property
    def is_current(self) -> bool:
        """True if the compilers that are here now would build the same programs, and no more of them."""
        return is_made_by(self.compilers, {abi: find_compiler(machine) for abi, machine in MACHINES.items()})

    def describe(self) -> str:
        """Returns what is installed, in words."""
        return (
            f"ONNX Runtime {self.version} of {self.archive} for {', '.join(self.abis)} with {', '.join(self.providers)}"
        )

    def find_program(self, abi: str) -> Path:
        """Returns the program for an ABI."""
        return LOADER.folder / abi / PROGRAM

    def find_library(self, abi: str) -> Path:
        """Returns ONNX Runtime's library for an ABI."""
        return LOADER.folder / abi / LIBRARY


def find_installed() -> InstalledArchive | None:
    """Returns what is installed and was built from exactly these sources, or None."""
    return LOADER.find_installed(InstalledArchive)


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
        classes=LOADER.folder / "classes.jar",
    )


def install_android(progress: Progress, library: Path | None = None) -> InstalledArchive:
    """Installs the pinned archive, or that of `library`, and builds a program for each of its ABIs that can be built.

    Raises:
        DeviceError: the archive cannot be fetched, is not what it should be or imports what nothing stands for, there
            is no compiler, or one fails. Nothing half is left.
        UsageError: there is no such file.
        OutputError: the cache cannot be written.
    """
    with LOADER.installing() as (staging, work):
        if library is None:
            progress("fetching ONNX Runtime for Android with npm: 150 MB")
        archive = library or fetch_archive(work)
        found = unpack_libraries(archive, staging)
        compilers = {ort.abi: _build(ort, staging / ort.abi, work, archive.name, progress) for ort in found}
        built = [ort for ort in found if compilers[ort.abi]]
        if not built:
            raise DeviceError("there is no compiler for Android's stand-in", hint=_COMPILERS[MACHINES[found[0].abi]])
        facts = InstalledArchive(
            archive=archive.name,
            sha256=digest_file(archive),
            version=built[0].version,
            providers=built[0].providers,
            abis=tuple(ort.abi for ort in built),
            libraries=list_native_libraries(archive),
            sources=digest_sources(LOADER.system),
            compilers=compilers,
        )
        write_file(staging / FACTS, msgspec.json.encode(facts))
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
    objects = LOADER.compile_sources(compiler, work / ort.abi)
    LOADER.link(compiler, objects, ort.elf.imports, folder / PROGRAM, name=name)
    return compiler.describe()
