"""The program that stands in for an Android process: edgekit's runner, a loader, and what takes the place of bionic."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from edgekit.devices.local.runner import runner_sources
from edgekit.devices.release.compilers import Compiler
from edgekit.devices.release.program import compile_sources, link_program, write_table

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
