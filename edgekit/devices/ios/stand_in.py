"""The program that stands in for a process of iOS: edgekit's runner, a loader, and what replaces Apple's code.

zig compiles it, because its libc++ is of the kind that Apple's compilers expect.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from edgekit.devices.local.runner import runner_sources
from edgekit.devices.release.compilers import Compiler
from edgekit.devices.release.program import compile_sources, link_program, write_table

# In C and C++, what stands for NAME of Apple's is darwin_NAME; a use is found like a definition, and means the same.
_DEFINED = re.compile(r"\bdarwin_(\w+)")
# In their own words: structures of this side.
_NO_STAND_INS = frozenset({"stat_", "utsname_"})
_CLASS = "OBJC_CLASS_$_"
_NO_SANITIZER = "-fno-sanitize=undefined"
"""What zig adds unless told; Apple's code was not compiled for it."""


def ios_sources() -> Path:
    """Returns the folder of the sources of the loader and of what stands in for Apple's libraries."""
    shipped = Path(__file__).parents[2] / "_ios"
    return shipped if shipped.is_dir() else Path(__file__).parents[3] / "tools" / "ios"


def list_sources() -> tuple[Path, ...]:
    """Returns what is compiled of them."""
    return tuple(sorted((*ios_sources().glob("*.c"), *ios_sources().glob("*.cpp"))))


def list_stand_ins() -> frozenset[str]:
    """Returns the names for which the sources define something in the place of Apple's."""
    return frozenset(name for source in list_sources() for name in _DEFINED.findall(source.read_text()))


def place_import(name: str, own: Collection[str]) -> str:
    """Returns the symbol that stands for an import, which has Apple's underscore in front.

    What follows a `$` chooses a variant of a function. All classes of Objective-C are one, which answers nothing.
    """
    bare = name.removeprefix("_")
    if bare.startswith(_CLASS):
        return "apple_object"
    bare = bare.partition("$")[0]
    return f"darwin_{bare}" if bare in own else bare


def write_imports(imports: Collection[str], path: Path, *, without: Collection[str] = ()) -> None:
    """Writes the table of what an object may import; `without` leaves stand-ins out, for trying what they are good for.

    Raises:
        OutputError: the folder cannot be written.
    """
    own = list_stand_ins() - set(without)
    write_table("image.h", {name: place_import(name, own) for name in imports}, path)


def compile_runner(compiler: Compiler, objects: Path) -> tuple[Path, ...]:
    """Returns what the runner and the loader compile to in the folder `objects`; no framework is needed for it.

    Raises:
        DeviceError: the compiler fails.
    """
    runner = [*compiler.cpp, "-std=c++17", "-Os", "-fvisibility=hidden", "-ffunction-sections", _NO_SANITIZER]
    jobs = [(runner, source) for source in sorted((runner_sources() / "src").glob("*.cpp"))]
    jobs += [(compile_command(compiler, source), source) for source in list_sources()]
    return compile_sources(jobs, objects)


def compile_command(compiler: Compiler, source: Path) -> list[str]:
    """Returns the beginning of the command that compiles a source of the loader."""
    words = compiler.c if source.suffix == ".c" else compiler.cpp
    standard = ["-std=gnu11", "-fno-builtin"] if source.suffix == ".c" else ["-std=c++17"]
    return [*words, *standard, "-O2", "-Wall", "-Wextra", "-Werror", _NO_SANITIZER, f"-I{ios_sources()}"]


def link_runner(
    compiler: Compiler, objects: Sequence[Path], imports: Collection[str], program: Path, *, name: str
) -> None:
    """Links the program for the imports of an object, of which `name` says in an error whose they are.

    Raises:
        DeviceError: the object imports what nothing here stands for, or the linker fails.
    """
    table = objects[0].parent / "imports.c"
    write_imports(imports, table)
    compiled = compile_sources([(compile_command(compiler, table), table)], table.parent)
    argv = [*compiler.cpp, "-O2", "-static", "-s", _NO_SANITIZER, "-o", str(program)]
    link_program([*argv, *map(str, (*objects, *compiled)), "-pthread"], name)
