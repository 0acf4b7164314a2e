"""A program of this machine that stands in for a process of another system: compiled, and linked by a table of names.

It is one static program. What the library of another system imports is linked into it by name, so that a library that
wants more than there is cannot be installed, and the names that are lacking are known.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edgekit._files import write_file
from edgekit._proc import Finished, run_process
from edgekit.errors import DeviceError

_BUILD_TIMEOUT_S = 1200.0
_WORKERS = 2
_UNDEFINED = re.compile(r"undefined (?:reference to|symbol:) [`']?([\w.]+)")


def write_table(header: str, places: Mapping[str, str], path: Path) -> None:
    """Writes the table of what a library may import: each name of its own, with the symbol that stands for it here.

    `header` declares `struct import`, with a name and a place.

    Raises:
        OutputError: the file cannot be written.
    """
    names = sorted(places)
    lines = [f'#include "{header}"']
    lines += [f'extern char place_{index}[] __asm__("{places[name]}");' for index, name in enumerate(names)]
    lines += ["const struct import imports[] = {"]
    lines += [f'  {{"{name}", place_{index}}},' for index, name in enumerate(names)]
    lines += ["};", f"const unsigned import_count = {len(names)};"]
    write_file(path, "\n".join(lines).encode())


def compile_sources(jobs: Sequence[tuple[Sequence[str], Path]], objects: Path) -> tuple[Path, ...]:
    """Returns what sources compile to in the folder `objects`; each stands behind its compiler and flags.

    Raises:
        DeviceError: the compiler fails.
    """
    objects.mkdir(parents=True, exist_ok=True)
    made = [objects / f"{source.name}.o" for _, source in jobs]
    steps = [[*words, "-c", "-o", str(out), str(source)] for (words, source), out in zip(jobs, made, strict=True)]
    run: Callable[[Sequence[str]], Finished] = lambda argv: run_process(argv, timeout_s=_BUILD_TIMEOUT_S)  # noqa: E731
    with ThreadPoolExecutor(_WORKERS) as pool:
        for finished in pool.map(run, steps):
            if not finished.succeeded:
                raise _failed(finished)
    return tuple(made)


def link_program(argv: Sequence[str], name: str) -> None:
    """Links a program with a command; `name` says in an error whose imports are lacking.

    Raises:
        DeviceError: the library imports what nothing here stands for, or the linker fails.
    """
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


def _failed(finished: Finished) -> DeviceError:
    lines = [line.strip() for line in (finished.stdout + finished.stderr).splitlines()]
    reason = next((line for line in lines if "error" in line.lower()), " ".join(lines)[-300:])
    return DeviceError(f"'{finished.argv[0]}' {finished.ending}: {reason[:400]}", hint="check the compiler")
