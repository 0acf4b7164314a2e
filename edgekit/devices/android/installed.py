"""What is installed of the Android device, and installing it.

An archive is installed, and the program that stands in for an Android process.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from edgekit._files import digest_file, one_at_a_time, staged_folder, work_folder, write_file
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
from edgekit.devices.local.runner import PROGRAM, digest_sources, runner_sources
from edgekit.devices.process.cache import FACTS, Built, cache_folder, read_facts
from edgekit.devices.release import Compiler, compile_sources, find_compiler, is_made_by, link_program, write_table
from edgekit.errors import DeviceError
from edgekit.machine import spell_install
from edgekit.progress import Progress

_DEFINED = re.compile(r"^[\w ]*?[ *](?:bionic_(\w+)|(ANeuralNetworks\w+))(?:\(|\[| =)", re.MULTILINE)


def android_sources() -> Path:
    """Returns the folder of the sources of the loader and of what stands in for bionic."""
    shipped = Path(__file__).parents[2] / "_android"
    return shipped if shipped.is_dir() else Path(__file__).parents[3] / "tools" / "android"


def list_stand_ins() -> dict[str, str]:
    """Returns the functions that the sources define in the place of Android's: their symbols by the names there."""
    own: dict[str, str] = {}
    for source in sorted(android_sources().glob("*.c")):
        for bionic, neural in _DEFINED.findall(source.read_text()):
            own[bionic or neural] = f"bionic_{bionic}" if bionic else neural
    return own


def write_imports(imports: Collection[str], path: Path, *, without: Collection[str] = ()) -> None:
    """Writes the table of what a library may import: of each name the stand-in, else the C library's own.

    NNAPI's functions are in it too, which are found by name at run time. `without` leaves stand-ins out, for trying
    what they are good for.

    Raises:
        OutputError: the folder cannot be written.
    """
    own = list_stand_ins()
    found_by_name = {name for name in own if name.startswith(("ANeuralNetworks", "ASharedMemory"))}
    places = {name: name if name in without else own.get(name, name) for name in {*imports, *found_by_name}}
    write_table("imports.h", places, path)


def compile_runner(compiler: Compiler, objects: Path) -> tuple[Path, ...]:
    """Returns what the runner and the loader compile to in the folder `objects`; no archive is needed for it.

    Raises:
        DeviceError: the compiler fails.
    """
    # The runner tells which features the CPU has: those of the phone, as the library sees them.
    cpp = ["-std=c++17", "-Os", "-fvisibility=hidden", "-ffunction-sections", "-Dgetauxval=bionic_getauxval"]
    c = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-builtin"]
    jobs = [([*compiler.cpp, *cpp], source) for source in sorted((runner_sources() / "src").glob("*.cpp"))]
    jobs += [([*compiler.c, *c], source) for source in sorted(android_sources().glob("*.c"))]
    return compile_sources(jobs, objects)


def link_runner(
    compiler: Compiler, objects: Sequence[Path], imports: Collection[str], program: Path, *, name: str
) -> None:
    """Links the program for the imports of a library, of which `name` says in an error whose they are.

    Raises:
        DeviceError: the library imports what nothing here stands for, or the linker fails.
    """
    table = objects[0].parent / "imports.c"
    write_imports(imports, table)
    compiled = compile_sources([([*compiler.c, f"-I{android_sources()}"], table)], table.parent)
    link_program(
        [*compiler.cpp, "-Os", "-static", "-s", "-o", str(program), *map(str, (*objects, *compiled)), "-pthread"], name
    )


_COMPILERS = {
    "aarch64": f"apt-get install g++-aarch64-linux-gnu, or {spell_install('ziglang')}",
    "x86_64": f"apt-get install g++, or {spell_install('ziglang')}",
}


class Installed(Built, frozen=True, kw_only=True):
    """What is installed: of which archive, with which version and providers, for which ABIs.

    `abis` are those that run here, `libraries` all that the archive holds. `compilers` tell for each ABI what
    built its program.
    """

    archive: str
    sha256: str
    version: str
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
    return read_facts(device_folder(), Installed, digest_sources(android_sources()))


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
            sources=digest_sources(android_sources()),
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
    objects = compile_runner(compiler, work / ort.abi)
    link_runner(compiler, objects, ort.elf.imports, folder / PROGRAM, name=name)
    return compiler.describe()
