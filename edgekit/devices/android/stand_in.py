"""The program that stands in for an Android process: edgekit's runner, a loader, and what takes the place of bionic.

It is one static program for each machine. What the library of an archive imports is linked into it by name, so that a
library that wants more than there is cannot be installed, and the names that are lacking are known.
"""

import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgekit._files import write_file
from edgekit._proc import Finished, run_process
from edgekit.devices.android.compilers import Compiler
from edgekit.devices.local.runner import runner_sources
from edgekit.errors import DeviceError

_BUILD_TIMEOUT_S = 1200.0
_WORKERS = 2
_DEFINED = re.compile(r"^[\w ]*?[ *](?:bionic_(\w+)|(ANeuralNetworks\w+))(?:\(|\[| =)", re.MULTILINE)
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:) [`']?([\w.]+)")


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
    names = sorted({*imports, *found_by_name})
    places = [name if name in without else own.get(name, name) for name in names]
    lines = ['#include "imports.h"']
    lines += [f'extern char place_{index}[] __asm__("{place}");' for index, place in enumerate(places)]
    lines += ["const struct import imports[] = {"]
    lines += [f'  {{"{name}", place_{index}}},' for index, name in enumerate(names)]
    lines += ["};", f"const unsigned import_count = {len(names)};"]
    write_file(path, "\n".join(lines).encode())


def compile_runner(compiler: Compiler, objects: Path) -> tuple[Path, ...]:
    """Returns what the runner and the loader compile to in the folder `objects`; no archive is needed for it.

    Raises:
        DeviceError: the compiler fails.
    """
    objects.mkdir(parents=True)
    # The runner tells which features the CPU has: those of the phone, as the library sees them.
    cpp = ["-std=c++17", "-Os", "-fvisibility=hidden", "-ffunction-sections", "-Dgetauxval=bionic_getauxval"]
    c = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-builtin"]
    jobs = [(compiler.cpp, cpp, source) for source in sorted((runner_sources() / "src").glob("*.cpp"))]
    jobs += [(compiler.c, c, source) for source in sorted(android_sources().glob("*.c"))]
    made = [objects / f"{source.name}.o" for _, _, source in jobs]
    steps = [
        [*program, *flags, "-c", "-o", str(out), str(source)]
        for (program, flags, source), out in zip(jobs, made, strict=True)
    ]
    _run_together(steps)
    return tuple(made)


def link_runner(
    compiler: Compiler, objects: Sequence[Path], imports: Collection[str], program: Path, *, name: str
) -> None:
    """Links the program for the imports of a library, of which `name` says in an error whose they are.

    Raises:
        DeviceError: the library imports what nothing here stands for, or the linker fails.
    """
    table = objects[0].parent / "imports.c"
    write_imports(imports, table)
    compiled = table.with_suffix(".o")
    _run_together([[*compiler.c, "-c", f"-I{android_sources()}", "-o", str(compiled), str(table)]])
    argv = [*compiler.cpp, "-Os", "-static", "-s", "-o", str(program), *map(str, objects), str(compiled), "-pthread"]
    finished = run_process(argv, timeout_s=_BUILD_TIMEOUT_S)
    if finished.succeeded:
        return
    lacking = sorted(set(_UNDEFINED.findall(finished.stdout + finished.stderr)))
    if lacking:
        raise DeviceError(
            f"'{name}' imports what edgekit has no stand-in for: {', '.join(lacking[:12])}",
            hint="give the archive of another version of ONNX Runtime",
        )
    raise _failed(finished)


def _run_together(steps: Sequence[Sequence[str]]) -> None:
    run: Callable[[Sequence[str]], Finished] = lambda argv: run_process(argv, timeout_s=_BUILD_TIMEOUT_S)  # noqa: E731
    with ThreadPoolExecutor(_WORKERS) as pool:
        for finished in pool.map(run, steps):
            if not finished.succeeded:
                raise _failed(finished)


def _failed(finished: Finished) -> DeviceError:
    lines = [line.strip() for line in (finished.stdout + finished.stderr).splitlines()]
    reason = next((line for line in lines if "error" in line.lower()), " ".join(lines)[-300:])
    return DeviceError(f"'{finished.argv[0]}' {finished.ending}: {reason[:400]}", hint="check the compiler")
